"""What the layers of self-attention have in common: sizes and inputs, which are checked here, and four projections."""

from __future__ import annotations

from torch import Tensor, nn

from dmattn_ops import symbolic
from dmattn_ops.checks import require, validation
from dmattn_ops.nn.rotary import base_of

NAMES_ELSEWHERE = {
    "attention_mask": "padding, [B, S]",
    "attn_mask": "padding, [B, S]",
    "mask": "padding, [B, S]",
    "key_padding_mask": "padding, which is True or 1 where there is a key",
    "padding_mask": "padding, which is True or 1 where there is a key",
    "position_ids": "positions",
    "cu_seqlens": f"documents, {require.IDS_OF_OFFSETS}",
    "segment_ids": "documents",
    "document_ids": "documents",
}


class AttentionLayer(nn.Module):
    """Projections to query, key and value, and from the heads to the output. Layers say which keys a query sees."""

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None,
        head_dim: int | None,
        *,
        bias: bool,
        rotary_base: float | None,
        dropout: float,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        dim, heads, kv_heads = require.counts(dim=dim, heads=heads, kv_heads=kv_heads)
        if heads < 1 or kv_heads < 1:
            raise ValueError(f"heads and kv_heads must be at least 1, got {heads} and {kv_heads}")
        if heads % kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
        if head_dim is None and dim % heads:
            raise ValueError(f"dim must be a multiple of heads, or head_dim given, got {dim} and {heads}")
        [head_dim] = require.counts(head_dim=dim // heads if head_dim is None else head_dim)
        rotary_base = base_of(rotary_base, head_dim)
        dropout = validation.number("dropout", dropout)
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be between 0 and 1, got {dropout}")
        self.dim, self.heads, self.kv_heads, self.head_dim = dim, heads, kv_heads, head_dim
        self.rotary_base, self.dropout = rotary_base, dropout
        self.q_proj = nn.Linear(dim, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(dim, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(dim, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, dim, bias=bias)

    def _read(self, hidden: Tensor, positions: Tensor | None) -> Tensor | None:
        """Return positions as `[B|1, S]`, or None; refuse what is not `hidden [B, S, dim]` with positions of its rows."""
        validation.tensors(hidden=hidden)
        if not validation.is_dense(hidden):
            what = "a nested one" if hidden.is_nested else f"layout {hidden.layout}"
            raise TypeError(f"hidden must be a dense tensor, with documents for sequences of other lengths, got {what}")
        require.rank("hidden", hidden, 3, "[B, S, dim]")
        if not symbolic.same(hidden.shape[-1], self.dim):
            raise ValueError(f"hidden must have shape [B, S, {self.dim}], got {require.text(hidden.shape)}")
        if positions is not None:
            validation.tensors(positions=positions)
            positions = positions.unsqueeze(0) if positions.dim() == 1 else positions
            require.sizes("positions", positions, (1, hidden.shape[0]), (hidden.shape[1],))
        return positions

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query `[B, S, H, D]`, and key and value `[B, S, Hkv, D]`, before rotary embeddings."""
        query = self.q_proj(hidden).unflatten(-1, (self.heads, self.head_dim))
        key = self.k_proj(hidden).unflatten(-1, (self.kv_heads, self.head_dim))
        value = self.v_proj(hidden).unflatten(-1, (self.kv_heads, self.head_dim))
        return query, key, value
