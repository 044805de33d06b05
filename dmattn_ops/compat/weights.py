"""Attention weights as a whole matrix, for `return_attn_probs`: for tests, in plain torch and O(Sq * Sk) memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmattn_ops.api import arguments
from dmattn_ops.bands import Band
from dmattn_ops.call import TILE
from dmattn_ops.kernels import reference
from dmattn_ops.masks import layout


def with_dropout_seed(query: Tensor, batch: int | None, attend: Callable[[], Any]) -> tuple[Any, Tensor]:
    """Call `attend` and return (its result, the seeds `[B, H]` that its dropout drew)."""
    with torch.random.fork_rng([query.device] if query.is_cuda else []):
        result = attend()
    return result, arguments.dropout_seed(query, batch)  # drawn from the state that `attend` began with


@torch.no_grad()
def dense_weights(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    *,
    band: Band,
    scale: float | None,
    softcap: float = 0,
    keep: Tensor | None = None,
    bias: Tensor | None = None,
    seed: Tensor | None = None,
    dropout_p: float = 0,
) -> Tensor:
    """Return `softmax(score)`, negative where dropout dropped it: `[B, H, Sq, Sk]` rounded up to 128, in query's dtype.

    `query` is `[B, Sq, H, D]`, `key` `[B, Sk, Hkv, D]`, `lse` `[B, H, Sq]`.
    """
    heads, (seqlen_q, seqlen_k) = query.shape[2], (query.shape[1], key.shape[1])
    wide = lse.dtype
    key = key.to(wide).repeat_interleave(heads // key.shape[2], dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", query.to(wide), key)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + _per_head(bias.to(wide), heads)
    visible = layout.band_mask(*band.limits(seqlen_q, seqlen_k), seqlen_q, seqlen_k, query.device)
    if keep is not None:
        visible = visible & _per_head(keep != 0, heads)
    weights = torch.exp(scores - lse.unsqueeze(-1)).masked_fill(~visible, 0.0)
    if seed is not None:
        kept = reference.philox_keep(seed, seqlen_q, seqlen_k, dropout_p)
        weights = torch.where(kept, weights, -weights)
    padding = (0, -seqlen_k % TILE, 0, -seqlen_q % TILE)
    return torch.nn.functional.pad(weights.to(query.dtype), padding)


@torch.no_grad()
def varlen_weights(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    offsets: tuple[Tensor, Tensor],
    *,
    band: Band,
    scale: float | None,
    softcap: float = 0,
    bias: Tensor | None = None,
    seed: Tensor | None = None,
    dropout_p: float = 0,
) -> Tensor:
    """Return `dense_weights` of packed sequences, `[B, H, longest Sq, longest Sk]` rounded up to 128; `bias` is `[Hb, total_k]`."""
    starts_q, starts_k = (part.tolist() for part in offsets)
    parts = []
    for number in range(len(starts_q) - 1):
        rows, columns = slice(*starts_q[number : number + 2]), slice(*starts_k[number : number + 2])
        parts.append(
            dense_weights(
                query[None, rows],
                key[None, columns],
                lse[None, :, rows],
                band=band,
                scale=scale,
                softcap=softcap,
                bias=None if bias is None else bias[None, :, None, columns],
                seed=None if seed is None else seed[number : number + 1],
                dropout_p=dropout_p,
            )
        )
    sizes = [max((part.shape[dim] for part in parts), default=0) for dim in (2, 3)]
    joined = query.new_zeros((len(parts), query.shape[1], *sizes))
    for number, part in enumerate(parts):
        joined[number, :, : part.shape[2], : part.shape[3]] = part[0]
    return joined


def _per_head(tensor: Tensor, heads: int) -> Tensor:
    own = tensor.shape[1]
    return tensor if own in (1, heads) else tensor.repeat_interleave(heads // own, dim=1)
