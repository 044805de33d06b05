"""What the layers of self-attention have in common: their sizes, which are checked here, and four projections."""

from __future__ import annotations

import math

from torch import nn

from dmattn_ops.checks import require, validation


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
        rotary_base = None if rotary_base is None else validation.number("rotary_base", rotary_base)
        if rotary_base is not None and head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {head_dim}")
        if rotary_base is not None and not 0 < rotary_base < math.inf:
            raise ValueError(f"rotary_base must be a positive number, or None, got {rotary_base}")
        dropout = validation.number("dropout", dropout)
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be between 0 and 1, got {dropout}")
        self.dim, self.heads, self.kv_heads, self.head_dim = dim, heads, kv_heads, head_dim
        self.rotary_base, self.dropout = rotary_base, dropout
        self.q_proj = nn.Linear(dim, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(dim, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(dim, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, dim, bias=bias)
