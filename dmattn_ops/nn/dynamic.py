"""Modules: `KeyScores`, what each key is worth, and `DynamicMaskAttention`, a layer that attends to the best keys.

Source: Trainable Dynamic Mask Sparse Attention, Shi et al., arXiv 2508.02124. Letters: `B` batch, `S` length, `H` query heads,
`Hkv` key and value heads, `D` head dimension.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dmattn_ops import symbolic
from dmattn_ops.api.functions import flash_dmattn_func
from dmattn_ops.checks import require, validation
from dmattn_ops.generation import KeptKeys
from dmattn_ops.kernels.selection import order
from dmattn_ops.masks import layout
from dmattn_ops.masks.documents import as_integers
from dmattn_ops.masks.prepare import dynamic_mask
from dmattn_ops.masks.tile_mask import TileMask
from dmattn_ops.nn.layer import NAMES_ELSEWHERE, AttentionLayer
from dmattn_ops.nn.rotary import turned, turns_of

LARGEST_EXPONENT = 10  # of the exponential in the scores of keys; an integer, which torch.compile takes as a constant


class Float32Linear(nn.Linear):
    """A linear layer that computes and returns float32, whatever dtype its parameters and its input have.

    It is called like any other, so that hooks, offloading, adapters, pruning and other weights act on it.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return float32 `[..., out_features]`; quantised weights decide in which dtype they multiply."""
        weight, bias = self.weight.float(), self.bias
        product = F.linear(input.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))
        return product.float()


class KeyScores(nn.Module):
    """What each key is worth, from its value: `exp(A * softplus(dt_proj(value)))`, one number for each key head.

    Parameters have the names of the paper's model, Doge: `A` `[Hkv]`, zeros at first, and `dt_proj`, a linear layer from the
    values of all heads. With `recency`, a learned slope for each head adds `slope * position`; it starts at `recency`.
    Nothing else favours near keys, and while `A` is 0 all keys are worth the same, of which the earliest count as the best.
    A slope needs no distance to the query: a softmax does not change when all scores of a row move.
    `dt_proj` works in float32; a module that takes its place, such as an adapter, is called as it is.
    The exponent stops at `LARGEST_EXPONENT`, 10: a key with such a score gets all attention already, and a larger one would make
    gradients grow until they are infinite, as they did in training a model of 1024 columns with `A` near 1 and a rate of 1e-3.

    Args:
        heads: `Hkv`.
        head_dim: dimension of values.
        bias: whether `dt_proj` has a bias.
        recency: where the slope starts; None is without.
    """

    def __init__(self, heads: int, head_dim: int, *, bias: bool = False, recency: float | None = None) -> None:
        super().__init__()
        heads, head_dim = require.counts(heads=heads, head_dim=head_dim)
        recency = None if recency is None else validation.number("recency", recency)
        self.A = nn.Parameter(torch.zeros(heads))
        self.dt_proj = Float32Linear(heads * head_dim, heads, bias=bias)
        self.slope = None if recency is None else nn.Parameter(torch.full((heads,), recency))

    def forward(self, value: Tensor, begin: Tensor | None = None) -> Tensor:
        """Return scores, float32 `[B, Hkv, S]`, of values `[B, S, Hkv, Dv]`: ranks of rounded scores would be ties.

        `begin`, int64 `[B]`, says where the first position stands in its sequence; None is 0.
        """
        with _without_autocast(value.device):
            steps = self.dt_proj(value.flatten(2)).float().transpose(1, 2).contiguous()  # keys last, as masks want them
            exponents = self.A.float().unsqueeze(-1) * F.softplus(steps)
            scores = torch.exp(exponents.clamp(max=LARGEST_EXPONENT))
            if self.slope is not None:
                position = torch.arange(value.shape[1], device=value.device)
                if begin is not None:
                    position = begin.view(-1, 1, 1) + position
                scores = scores + self.slope.float().unsqueeze(-1) * position
        return scores

    def extra_repr(self) -> str:
        """Say how many heads there are."""
        return f"heads={self.A.shape[0]}"


class DynamicMaskAttention(AttentionLayer):
    """Self-attention in which each query sees the `keep` keys of its prefix with the best scores, learned from the values.

    The scores are added to the attention scores as well: that trains them. `keep_first` and `keep_last` keys are seen beside
    (see `dynamic_mask`). Memory is O(S), and attention costs what is kept.

    Args:
        dim: of the inputs and outputs.
        heads: `H`.
        kv_heads: `Hkv`; None is `H`.
        head_dim: `D`; None is `dim // heads`.
        keep: how many of the best keys a query sees.
        keep_first: how many keys at the start of its document a query sees in any case.
        keep_last: how many keys, up to its own, a query sees in any case.
        bias: whether the projections have biases.
        rotary_base: base of rotary position embeddings (Su et al., arXiv 2104.09864); None is without.
        recency: where a learned slope over positions starts (see `KeyScores`); None is without.
        dropout: probability with which attention weights are dropped in training.
        is_causal: if False, every query sees the best keys of the whole sequence.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        keep: int,
        keep_first: int = 0,
        keep_last: int = 0,
        bias: bool = False,
        rotary_base: float | None = 10000.0,
        recency: float | None = None,
        dropout: float = 0,
        is_causal: bool = True,
    ) -> None:
        super().__init__(dim, heads, kv_heads, head_dim, bias=bias, rotary_base=rotary_base, dropout=dropout)
        self.keep, self.keep_first, self.keep_last = validation.kept_keys(keep, keep_first, keep_last, is_causal)
        self.is_causal = is_causal
        self.scores = KeyScores(self.kv_heads, self.head_dim, bias=bias, recency=recency)

    def forward(
        self,
        hidden: Tensor,
        *,
        documents: Tensor | None = None,
        padding: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KeptKeys | None = None,
        **unknown: NoReturn,
    ) -> Tensor:
        """Attend, `[B, S, dim]` to `[B, S, dim]`.

        With a `cache`, `hidden` holds the next positions only, and the result is what the whole sequence would give at these
        rows, without gradients.

        Args:
            hidden: with shape `[B, S, dim]`.
            documents: ids `[B|1, S]` in contiguous runs: a query sees its own document only.
            padding: `[B|1, S]`, bool or integer, False or 0 for what is no key. The first keys of a document are those behind the
                padding that it begins with; without documents, all are one.
            positions: `[B|1, S]` or `[S]`, of rotary embeddings; None counts from 0, with a cache from its length on.
            cache: what `make_cache` returned, and earlier calls went through.
        """
        if unknown:
            require.no_unknown("DynamicMaskAttention.forward", unknown, NAMES_ELSEWHERE)
        positions = self._read(hidden, positions)
        if cache is not None:
            self._check_cache(cache, hidden.shape[0])
        query, key, value = self._project(hidden)
        if self.rotary_base is not None:
            if cache is not None and positions is None:
                positions = cache.length[:, None] + torch.arange(hidden.shape[1], device=hidden.device)
            turns = turns_of(hidden, positions, self.head_dim, self.rotary_base)
            query, key = turned(query, *turns), turned(key, *turns)
        if cache is not None:
            scores = self.scores(value, cache.length)
            parts = query, key, value, scores, scores.unsqueeze(2)
            out = cache.attend_beside(parts, padding, documents, True, {})
            return self.o_proj(out.flatten(2))  # type: ignore[union-attr]
        scores = self.scores(value)
        out = flash_dmattn_func(
            query,
            key,
            value,
            self.mask(scores, documents=documents, padding=padding),
            scores.unsqueeze(2),
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.o_proj(out.flatten(2))  # type: ignore[union-attr]

    def make_cache(
        self,
        batch: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        rollback: int = 0,
    ) -> KeptKeys:
        """Return an empty cache of constant size for generation by `forward(hidden, cache=cache)`.

        Args:
            batch: how many sequences.
            dtype: of keys and values: what the projections return, under autocast its dtype; None is that of the parameters.
            device: where it lies; None is where the parameters lie.
            rollback: how many positions `cache.crop` can take back.
        """
        like = self.k_proj.weight
        return KeptKeys(
            batch,
            self.kv_heads,
            self.head_dim,
            self.keep,
            keep_first=self.keep_first,
            keep_last=self.keep_last,
            dtype=like.dtype if dtype is None else dtype,
            device=like.device if device is None else device,
            rollback=rollback,
        )

    def _check_cache(self, cache: KeptKeys, batch: int) -> None:
        """Refuse what is no cache of this layer, and uses that have none."""
        if not isinstance(cache, KeptKeys):
            raise TypeError(f"cache must be a KeptKeys, as make_cache returns it, got {require.type_text(cache)}")
        if not self.is_causal:
            raise ValueError("cache must be None where is_causal is False: every query sees the whole sequence")
        if self.training and self.dropout > 0:
            raise ValueError(f"cache must be None in training with dropout {self.dropout}: call eval() first")
        own = self.kv_heads, self.head_dim, self.head_dim, self.keep, self.keep_first, self.keep_last
        sizes = cache.kv_heads, cache.head_dim, cache.value_dim, cache.keep, cache.keep_first, cache.keep_last
        if sizes != own:
            names = "kv_heads, head_dim, value_dim, keep, keep_first, keep_last"
            raise ValueError(f"cache must have the layer's {names}, {own}, got {sizes}")
        if not symbolic.same(batch, cache.batch):
            raise ValueError(f"cache must have the batch size of hidden, {require.size_text(batch)}, got {cache.batch}")

    def mask(self, scores: Tensor, *, documents: Tensor | None = None, padding: Tensor | None = None) -> TileMask:
        """Return the mask that scores `[B, Hkv, S]` make."""
        if padding is not None:
            validation.tensors(scores=scores, padding=padding)
            require.rank("scores", scores, 3, "[B, Hkv, S]")
            if not scores.is_floating_point():
                require.dtype("scores", scores, *validation.DTYPES)
            require.dtype("padding", padding, torch.bool, *validation.INTEGERS)
            require.sizes("padding", padding, (1, scores.shape[0]), (scores.shape[2],))
            if documents is not None:
                validation.tensors(documents=documents)
                documents = as_integers(documents)
                require.dtype("documents", documents, *validation.INTEGERS)
                require.rank("documents", documents, 2, require.DOCUMENTS)
                require.sizes("documents", documents, (1, scores.shape[0]), (scores.shape[2],))
            scores, documents = without_padding(scores, padding, documents, self.keep_first)
        made = dynamic_mask(
            scores,
            self.keep,
            keep_first=self.keep_first,
            keep_last=self.keep_last,
            documents=documents,
            is_causal=self.is_causal,
        )
        if padding is None:
            return made
        assert made.end is not None
        return replace(made, end=torch.where((padding != 0).unsqueeze(1), made.end, 0))

    def extra_repr(self) -> str:
        """Say what is kept."""
        return (
            f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, keep={self.keep},"
            f" keep_first={self.keep_first}, keep_last={self.keep_last}, is_causal={self.is_causal}"
        )


def _without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Return a context without autocast, which the meta device does not have."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def without_padding(
    scores: Tensor, padding: Tensor, documents: Tensor | None, keep_first: int
) -> tuple[Tensor, Tensor | None]:
    """Return scores `[B, H, S]` and documents of a dynamic mask that has no padding (`[B|1, S]`, 0 there) among its keys.

    The padding in front of a document's first key becomes a document of its own, so that the first keys begin behind it, and a
    document sees what it sees without padding.
    """
    kept = padding != 0
    scores = torch.where(kept.unsqueeze(1), _without_nan(scores.detach()), torch.nan)
    return scores, _behind_padding(kept, documents) if keep_first else documents


def _without_nan(scores: Tensor) -> Tensor:
    """Return float64 numbers in the order of scores: none is NaN, which is worse than all of them, as padding has to be."""
    if scores.dtype == torch.float64:
        return -order.ranks(scores).double()
    wide = scores.double()  # which has room below the least number of float32: for -inf, and then for NaN
    return torch.where(wide.isnan(), -torch.inf, wide.clamp(min=torch.finfo(wide.dtype).min))


def _behind_padding(kept: Tensor, documents: Tensor | None) -> Tensor:
    """Return documents `[B|1, S]` of which each begins with a key that is kept, or has none."""
    count = kept.cumsum(-1)
    if documents is None:
        return (count > 0).to(torch.int32)
    first, _ = layout.runs(documents)
    before, first = torch.broadcast_tensors(count - kept.long(), first.long())
    return 2 * documents.long() + (count > before.gather(-1, first))


require.without_unknown(DynamicMaskAttention.forward)
