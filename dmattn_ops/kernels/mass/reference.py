"""Masses in plain torch, on any device: a chunk of queries at a time, against all keys."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dmattn_ops.bands import shifted
from dmattn_ops.call import Call, Options
from dmattn_ops.checks.chosen import block_count
from dmattn_ops.masks import layout
from dmattn_ops.masks.chosen import Selection, Statistics, first_of_each, shown_keys

NEEDS_STATISTICS = False
_CHUNK = 1 << 21  # scores that are computed at a time: some tensors of 8 MiB in float32


def selection_mass(choice: Selection, mass: Tensor) -> None:
    """Write the probability of each chosen block, `[B, Hkv, Sq, k]` (`[B, H, Sq, k]` for indices of H heads)."""
    query, key, options = choice.query, choice.key.to(mass.dtype), choice.options
    heads, (seqlen_k, heads_kv) = query.shape[2], key.shape[1:3]
    count = block_count(seqlen_k, choice.block)
    for start, stop in _chunks(query, key):
        indices = choice.indices[:, :, start:stop]
        shown = shown_keys(indices, choice.block, seqlen_k) & _band(options, start, stop, key)
        if choice.k_segments is not None:
            queries = None if choice.q_segments is None else choice.q_segments[:, start:stop]
            shown = shown & layout.segments_mask(queries, choice.k_segments)
        scores = _scores(query[:, start:stop], key, choice.bias, start, stop, options)
        scores = scores.masked_fill(~_by_group(shown, heads, heads_kv), -math.inf)
        if choice.lse is None:
            lse = scores.logsumexp(-1, keepdim=True)
        else:
            lse = choice.lse[:, :, start:stop].unflatten(1, (heads_kv, -1)).unsqueeze(-1)
        each = _probabilities(scores, lse)
        each = (
            torch.nn.functional.pad(each, (0, count * choice.block - seqlen_k))
            .unflatten(-1, (count, choice.block))
            .sum(-1)
        )
        each = each.sum(2) if mass.shape[1] == heads_kv else each.flatten(1, 2)
        first = first_of_each(indices)
        target = torch.where((first >= 0) & (first < count), first, count).long()
        target = target.expand(*mass.shape[:2], stop - start, -1)
        mass[:, :, start:stop] = torch.nn.functional.pad(each, (0, 1)).gather(-1, target)


def key_mass(call: Call, statistics: Statistics | None, mass: Tensor) -> None:
    """Write the probabilities of each key, summed over the queries and the heads of a group, `[B, Hkv, Sk]`."""
    query, key, options = call.query, call.key.to(mass.dtype), call.options
    heads, heads_kv = query.shape[2], key.shape[2]
    mass.zero_()
    for start, stop in _chunks(query, key):
        scores = _scores(query[:, start:stop], key, call.bias, start, stop, options)
        shown = _visible(call, start, stop)
        scores = scores.masked_fill(~_by_group(shown, heads, heads_kv), -math.inf)
        lse, tail = (
            part if part is None else part[:, :, start:stop].unflatten(1, (heads_kv, -1)).unsqueeze(-1)
            for part in statistics or (None, None)
        )
        mass += _probabilities(scores, scores.logsumexp(-1, keepdim=True) if lse is None else lse, tail).sum((2, 3))


def _chunks(query: Tensor, key: Tensor) -> Iterator[tuple[int, int]]:
    """Yield ranges of queries whose scores are few enough."""
    batch, seqlen_q, heads, _ = query.shape
    rows = max(1, _CHUNK // max(1, batch * heads * key.shape[1]))
    for start in range(0, seqlen_q, rows):
        yield start, min(start + rows, seqlen_q)


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, start: int, stop: int, options: Options) -> Tensor:
    """Return the scores of some queries in the dtype of the keys, float32 or float64: `[B, Hkv, group, rows, Sk]`."""
    wide, heads_kv = key.dtype, key.shape[2]
    grouped = query.to(wide).unflatten(2, (heads_kv, -1)).permute(0, 2, 3, 1, 4)
    scores = (grouped @ key.permute(0, 2, 3, 1).unsqueeze(2)) * options.softmax_scale
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if bias is not None:
        rows = bias if bias.shape[2] == 1 else bias[:, :, start:stop]
        scores = scores + _by_group(rows.to(wide), query.shape[2], heads_kv)
    return scores


def _by_group(part: Tensor, heads: int, heads_kv: int) -> Tensor:
    """Return `[B|1, H|Hkv|1, rows, Sk]` as `[B|1, Hkv|1, group|1, rows, Sk]`."""
    own = part.shape[1]
    if own == heads:
        return part.unflatten(1, (heads_kv, -1))
    return part.unsqueeze(2)


def _probabilities(scores: Tensor, lse: Tensor, tail: Tensor | None = None) -> Tensor:
    """Return `exp(score - lse - tail)`, at most 1; 0 in rows without a key."""
    difference = scores - lse
    if tail is not None:
        difference = difference - tail
    each = difference.clamp(max=0.0).exp()
    return torch.where((lse == -math.inf) | (scores == -math.inf), 0.0, each)


def _band(options: Options, start: int, stop: int, key: Tensor) -> Tensor:
    """Return the band of some queries, bool `[rows, Sk]`."""
    limits = shifted(options.band_lo, options.band_hi, start)
    return layout.band_mask(*limits, stop - start, key.shape[1], key.device)


def _visible(call: Call, start: int, stop: int) -> Tensor:
    """Return the keys that some queries see, bool `[Bm, Hm, rows, Sk]`."""
    mask = call.mask
    band = _band(call.options, start, stop, call.key)
    if mask.kind == "none":
        return band[None, None]
    if mask.end is not None:
        return layout.intervals_mask(mask, stop, start) & band
    if mask.k_segments is not None:
        queries = None if mask.q_segments is None else mask.q_segments[:, start:stop]
        return layout.segments_mask(queries, mask.k_segments) & band
    return layout.bits_mask(mask, call.key.shape[1], stop, start)
