"""Biases of positions: ALiBi (Press et al., arXiv 2108.12409) and T5's buckets of distances (Raffel et al., arXiv 1910.10683).

ALiBi adds `-slope * |distance|`, where query `i` has the position `i + Sk - Sq`. Where no key behind the diagonal is
visible, that is `slope * j` less a number of each row, and a softmax does not change when a row moves: so a causal call
takes `alibi_of_keys`, one number for each key, and only lse is off, by what `alibi_lse` returns.

A score is rounded to float32 with that number in it, so that rows far from the last key lose digits: at 65536 keys and a
slope of 0.5 the first ones are off by up to 0.004. `exact_rows` says how many queries one call may have for its results to be
exact in their dtype; more are cut, each part with the keys up to its own last query: `compat.flash_attn` does so.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dmattn_ops.checks import require, validation


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """Return ALiBi's slopes, float32 `[H]`: `2^(-8 / H)`, `2^(-16 / H)` ... for a power of two of heads, as its authors have it."""
    [heads] = require.counts(heads=heads)
    if heads < 1:
        raise ValueError(f"heads must be positive, got {heads}")
    power = 1 << (heads.bit_length() - 1)
    exponents = [8 * (head + 1) / power for head in range(power)]
    exponents += [4 * (2 * head + 1) / power for head in range(heads - power)]
    return torch.tensor([2.0**-exponent for exponent in exponents], device=device)


def exact_rows(dtype: torch.dtype) -> int:
    """Return the number of queries up to which `alibi_of_keys` is exact in this dtype, with slopes up to 1."""
    return {torch.float32: 1 << 9, torch.float64: 1 << 30}.get(dtype, 1 << 14)


def alibi_of_keys(slopes: Tensor, seqlen_k: int) -> Tensor:
    """Return ALiBi for causal calls, a `bias` `[B|1, H, 1, Sk]`, from slopes `[H]` or `[B, H]`: 0 at the last key."""
    [seqlen_k] = require.counts(seqlen_k=seqlen_k)
    slopes = _of_heads(slopes)
    return slopes[:, :, None, None] * torch.arange(1 - seqlen_k, 1, device=slopes.device)


def alibi_lse(slopes: Tensor, seqlen_q: int) -> Tensor:
    """Return the correction `[B|1, H, Sq]` to subtract from lse of a causal call with `alibi_of_keys`."""
    [seqlen_q] = require.counts(seqlen_q=seqlen_q)
    slopes = _of_heads(slopes)
    return slopes[:, :, None] * torch.arange(seqlen_q - 1, -1, -1, device=slopes.device)


def alibi_of_distances(slopes: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Return ALiBi for calls that are not causal, a `bias` `[B|1, H, Sq, Sk]`."""
    slopes = _of_heads(slopes)
    return slopes[:, :, None, None] * -_distances(seqlen_q, seqlen_k, slopes.device).abs()


def alibi_of_packed_keys(slopes: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    """Return ALiBi for causal calls of packed sequences, a `bias` `[H, total_k]`; slopes are `[H]` or `[B, H]`."""
    slopes, before_last = _of_places(slopes, cu_seqlens, total)
    return -slopes * before_last


def alibi_packed_lse(slopes: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    """Return the correction `[H, total_q]` to subtract from lse of a causal call with `alibi_of_packed_keys`.

    `cu_seqlens` are the offsets of the queries.
    """
    slopes, before_last = _of_places(slopes, cu_seqlens, total)
    return slopes * before_last


def t5_buckets(
    seqlen_q: int,
    seqlen_k: int,
    buckets: int = 32,
    max_distance: int = 128,
    *,
    bidirectional: bool = True,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return T5's bucket of each distance, int64 `[Sq, Sk]`: exact ones for near keys, logarithmic ones up to `max_distance`.

    Half of the buckets are for keys behind the query where `bidirectional`; else those all lie in bucket 0.
    """
    buckets, max_distance = require.counts(buckets=buckets, max_distance=max_distance)
    least = 4 if bidirectional else 2
    if buckets < least:
        raise ValueError(f"buckets must be at least {least} where bidirectional is {bidirectional}, got {buckets}")
    buckets = buckets // 2 if bidirectional else buckets
    exact = buckets // 2
    if max_distance <= exact:
        raise ValueError(
            f"max_distance must exceed {exact}, the distances with buckets of their own, got {max_distance}"
        )
    behind = _distances(seqlen_q, seqlen_k, device)
    first: Tensor | int = (behind > 0) * buckets if bidirectional else 0
    distance = behind.abs() if bidirectional else (-behind).clamp(min=0)
    ratio = (distance.clamp(min=1).float() / exact).log() / math.log(max_distance / exact)
    far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
    return first + torch.where(distance < exact, distance, far)


def t5_bias(
    weight: Tensor, seqlen_q: int, seqlen_k: int, max_distance: int = 128, *, bidirectional: bool = True
) -> Tensor:
    """Return T5's `bias` `[1, H, Sq, Sk]`, differentiable, from one number for each bucket and head, `[buckets, H]`."""
    validation.tensors(weight=weight)
    require.rank("weight", weight, 2, "[buckets, H]")
    found = t5_buckets(
        seqlen_q, seqlen_k, weight.shape[0], max_distance, bidirectional=bidirectional, device=weight.device
    )
    return torch.nn.functional.embedding(found, weight).permute(2, 0, 1).unsqueeze(0)


def _of_heads(slopes: Tensor) -> Tensor:
    """Return slopes `[H]` or `[B, H]` as float32, or float64 as it is, `[B|1, H]`."""
    validation.tensors(slopes=slopes)
    if slopes.dim() not in (1, 2):
        raise ValueError(f"slopes must have shape (H,) or (B, H), got {tuple(slopes.shape)}")
    return slopes.to(torch.promote_types(slopes.dtype, torch.float32)).reshape(-1, slopes.shape[-1])


def _distances(seqlen_q: int, seqlen_k: int, device: torch.device | str | None) -> Tensor:
    """Return the position of each key less that of each query, `[Sq, Sk]`, aligned in the bottom right corner."""
    seqlen_q, seqlen_k = require.counts(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    queries = torch.arange(seqlen_k - seqlen_q, seqlen_k, device=device)
    return torch.arange(seqlen_k, device=device) - queries.unsqueeze(-1)


def _of_places(slopes: Tensor, cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the slopes of packed positions, `[H, total]`, and how many of its sequence follow each, `[total]`."""
    [total] = require.counts(total=total)
    slopes = _of_heads(slopes)
    validation.tensors(cu_seqlens=cu_seqlens)
    require.rank("cu_seqlens", cu_seqlens, 1, "[B + 1]")
    require.sizes("slopes", slopes, (1, cu_seqlens.shape[0] - 1), (slopes.shape[1],))
    place = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.bucketize(place, cu_seqlens[1:], right=True).clamp(max=cu_seqlens.shape[0] - 2)
    before_last = cu_seqlens[sequence + 1] - 1 - place  # without a sequence, all lies behind the last offset
    if slopes.shape[0] == 1:
        return slopes.transpose(0, 1).expand(-1, total), before_last
    return slopes[sequence].transpose(0, 1), before_last
