"""A layer whose queries choose their keys by a learned index: the sparse attention of DeepSeek-V3.2 (arXiv 2512.02556).

`dmattn_ops.nn` is where users import it from. Letters: `B` batch, `S` length, `H` query heads, `Hkv` key and value heads, `D`
head dimension, `k` how many blocks of keys a query chooses.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn

from dmattn_ops.api.functions import flash_dmattn_func
from dmattn_ops.api.mass import selection_mass
from dmattn_ops.call import TILE
from dmattn_ops.checks import require, validation
from dmattn_ops.checks.chosen import block_count
from dmattn_ops.masks.chosen import selection_mask
from dmattn_ops.masks.documents import as_integers
from dmattn_ops.masks.prepare import prepare_mask
from dmattn_ops.nn.layer import NAMES_ELSEWHERE, AttentionLayer
from dmattn_ops.nn.rotary import base_of, turned, turns_of


class LightningIndexer(nn.Module):
    """What each key is worth to each query: `sum_h w_h(query) * relu(q_h(query) . k(key))`, from the hidden states.

    A few small heads and one key for all of them, so that comparing all pairs costs little beside attention. It learns by
    `loss` alone.

    Args:
        dim: of the hidden states.
        heads: of the indexer.
        head_dim: of the indexer; even where there are rotary embeddings.
        rotary_base: base of rotary position embeddings; None is without.
    """

    def __init__(self, dim: int, heads: int = 4, head_dim: int = 64, *, rotary_base: float | None = 10000.0) -> None:
        super().__init__()
        dim, heads, head_dim = require.counts(dim=dim, heads=heads, head_dim=head_dim)
        if heads < 1 or head_dim < 1:
            raise ValueError(f"heads and head_dim must be at least 1, got {heads} and {head_dim}")
        self.heads, self.head_dim, self.rotary_base = heads, head_dim, base_of(rotary_base, head_dim)
        self.q_proj = nn.Linear(dim, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, head_dim, bias=False)
        self.k_norm = nn.LayerNorm(head_dim)
        self.weights_proj = nn.Linear(dim, heads, bias=False)

    def forward(self, hidden: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return scores `[B, S, S]`, of queries and keys, of hidden states `[B, S, dim]`; float32, or float64 of float64."""
        query = self.q_proj(hidden).unflatten(-1, (self.heads, self.head_dim))
        key = self.k_norm(self.k_proj(hidden)).unsqueeze(2)
        if self.rotary_base is not None:
            turns = turns_of(hidden, positions, self.head_dim, self.rotary_base)
            query, key = turned(query, *turns), turned(key, *turns)
        weights = self.weights_proj(hidden) * (self.heads * self.head_dim) ** -0.5
        found = query.transpose(1, 2) @ key.transpose(1, 2).mT  # [B, heads, S, S]
        wide = torch.promote_types(found.dtype, torch.float32)
        return (found.relu().to(wide) * weights.transpose(1, 2).unsqueeze(-1).to(wide)).sum(1)

    @staticmethod
    def loss(scores: Tensor, mass: Tensor) -> Tensor:
        """Return the divergence KL(attention || index) of the chosen blocks, a scalar: the mean over rows that see a key.

        Args:
            scores: `[B, S, k]`, of the chosen blocks; -inf of those that a query does not see. They get the gradient.
            mass: `[B, S, k]`, not negative: the attention that they get, in any scale, as `selection_mass` summed over its heads.
        """
        total = mass.sum(-1, keepdim=True)
        is_seen = (scores > -torch.inf) & (total > 0)
        row = is_seen.any(-1, keepdim=True)
        share = torch.where(is_seen, mass / torch.where(total > 0, total, 1.0), 0.0)
        index = torch.where(row, scores, 0.0).log_softmax(-1)
        each = torch.where(is_seen, torch.xlogy(share, share) - share * torch.where(is_seen, index, 0.0), 0.0)
        return each.sum() / row.sum().clamp(min=1)

    def extra_repr(self) -> str:
        """Say how many heads there are."""
        return f"heads={self.heads}, head_dim={self.head_dim}"


class IndexedAttention(AttentionLayer):
    """Causal self-attention in which each query sees the `keep` blocks of keys that an indexer gives the best scores.

    All heads share the choice. Nothing that the loss of the model depends on trains the indexer: its own loss does, the
    divergence of the index from the attention that the chosen blocks get, and it trains nothing else. Train first with
    `warm_up=True`, where attention sees all keys and the index learns all of its distribution, then without.

    The index compares all pairs, `S^2` scores for each head of the indexer; attention costs what is kept.

    Args:
        dim: of the inputs and outputs.
        heads: `H`.
        kv_heads: `Hkv`; None is `H`.
        head_dim: `D`; None is `dim // heads`.
        keep: how many blocks a query sees, at most.
        block: how many keys a block has, 1 to 128. The score of a block is that of its best key.
        index_heads: heads of the indexer.
        index_dim: their dimension.
        bias: whether the projections have biases.
        rotary_base: base of rotary position embeddings; None is without.
        dropout: probability with which attention weights are dropped in training.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        keep: int,
        block: int = 1,
        index_heads: int = 4,
        index_dim: int = 64,
        bias: bool = False,
        rotary_base: float | None = 10000.0,
        dropout: float = 0,
    ) -> None:
        super().__init__(dim, heads, kv_heads, head_dim, bias=bias, rotary_base=rotary_base, dropout=dropout)
        self.keep, self.block = require.counts(keep=keep, block=block)
        if not 1 <= self.block <= TILE:
            raise ValueError(f"block must be between 1 and {TILE}, got {block}")
        self.indexer = LightningIndexer(self.dim, index_heads, index_dim, rotary_base=rotary_base)

    def forward(
        self,
        hidden: Tensor,
        *,
        documents: Tensor | None = None,
        padding: Tensor | None = None,
        positions: Tensor | None = None,
        return_loss: bool = False,
        warm_up: bool = False,
        **unknown: NoReturn,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend, `[B, S, dim]` to `[B, S, dim]`.

        Args:
            hidden: with shape `[B, S, dim]`.
            documents: ids `[B|1, S]`: a query sees its own document only.
            padding: `[B|1, S]`, bool or integer, False or 0 for what is no key.
            positions: `[B|1, S]` or `[S]`, of rotary embeddings; None counts from 0.
            return_loss: return the loss of the indexer as well, a scalar, as `LightningIndexer.loss` has it.
            warm_up: let queries see all keys before them, whatever the index says of them.
        """
        if unknown:
            require.no_unknown("IndexedAttention.forward", unknown, NAMES_ELSEWHERE)
        validation.flags(return_loss=return_loss, warm_up=warm_up)
        positions = self._read(hidden, positions)
        query, key, value = self._project(hidden)
        if self.rotary_base is not None:
            turns = turns_of(hidden, positions, self.head_dim, self.rotary_base)
            query, key = turned(query, *turns), turned(key, *turns)
        ids = _ids(hidden, documents, padding)
        scores = indices = None
        if return_loss or not warm_up:
            with torch.set_grad_enabled(return_loss and torch.is_grad_enabled()):
                scores = self.indexer(hidden.detach(), positions)
                scores, indices = self._chosen(scores, ids, warm_up)
        if warm_up or indices is None:
            mask = None if ids is None else prepare_mask(documents=ids, is_causal=True)
        else:
            mask = selection_mask(indices.unsqueeze(1), block=self.block, documents=ids)
        dropout_p = self.dropout if self.training else 0.0
        out, lse = flash_dmattn_func(query, key, value, mask, is_causal=True, dropout_p=dropout_p, return_lse=True)
        result = self.o_proj(out.flatten(2))
        if not return_loss:
            return result
        assert scores is not None and indices is not None
        mass = selection_mass(query, key, indices.unsqueeze(1), block=self.block, documents=ids, lse=lse.detach())
        return result, self.indexer.loss(scores, mass.sum(1).to(scores.dtype))

    def _chosen(self, scores: Tensor, ids: tuple[Tensor, Tensor] | None, warm_up: bool) -> tuple[Tensor, Tensor]:
        """Return the scores of the chosen blocks, `[B, S, k]`, -inf of unseen ones, and their numbers `[B|1, S, k]`."""
        seqlen = scores.shape[-1]
        place = torch.arange(seqlen, device=scores.device)
        hidden = place > place.unsqueeze(-1)
        if ids is not None:
            hidden = hidden | (ids[0].unsqueeze(-1) != ids[1].unsqueeze(-2))
        scores = scores.masked_fill(hidden, -torch.inf)
        count = block_count(seqlen, self.block)
        if self.block > 1:
            scores = nn.functional.pad(scores, (0, count * self.block - seqlen), value=-torch.inf)
            scores = scores.unflatten(-1, (count, self.block)).amax(-1)
        if warm_up:
            return scores, torch.arange(count, device=scores.device).expand(1, *scores.shape[1:])
        # With as many blocks more as are kept, there are always enough: one graph serves every length.
        scores, indices = nn.functional.pad(scores, (0, self.keep), value=-torch.inf).topk(self.keep, dim=-1)
        return scores, indices.masked_fill(scores == -torch.inf, -1)

    def extra_repr(self) -> str:
        """Say what is kept."""
        return f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, keep={self.keep}, block={self.block}"


def _ids(hidden: Tensor, documents: Tensor | None, padding: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Return ids of queries and of keys, `[B|1, S]`: those of padding differ from every query's."""
    shape = (1, hidden.shape[0]), (hidden.shape[1],)
    for name, part in (("documents", documents), ("padding", padding)):
        if part is not None:
            validation.tensors(**{name: part})
            require.dtype(name, part, torch.bool, *validation.INTEGERS)
            require.sizes(name, part, *shape)
    documents = as_integers(documents)
    if padding is None:
        return None if documents is None else (documents, documents)
    kept = padding != 0
    own = torch.zeros_like(kept, dtype=torch.int64) if documents is None else 2 * documents.long()
    return own, own + (~kept).long()


require.without_unknown(IndexedAttention.forward)
