"""Attention and masks in plain torch: the launchers where there is no compiler, and the formula behind all tests.

Launchers take any dtype and device and loop over sequences. `attention` is the differentiable textbook formula.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from dmattn_ops.call import (
    HEADER,
    Call,
    Gradients,
    Mask,
    Options,
    Result,
    Saved,
    Takes,
    dropout_scale,
    dropout_threshold,
)
from dmattn_ops.masks import layout
from dmattn_ops.meta import lse_dtype

TAKES = Takes(("none", "bits", "segments", "intervals"))
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 7
_LOW_WORD = 0xFFFFFFFF
_Index: TypeAlias = slice | tuple[int | slice, ...]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    dropout_keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return out `[B, Sq, H, Dv]` and lse `[B, H, Sq]` of dense attention, differentiable in all four inputs.

    `keep` and `dropout_keep` are bool and broadcast to `[B, H, Sq, Sk]`; so does `bias`; heads of `keep` and `bias` may
    also be `Hkv`. Computes in the dtype of `query`, the softmax in float32 or wider. Rows without a visible key give 0,
    lse -inf and zero gradients.
    """
    heads = query.shape[2]
    key, value = (tensor.repeat_interleave(heads // tensor.shape[2], dim=2) for tensor in (key, value))
    scores = torch.einsum("bihd,bjhd->bhij", query, key) * softmax_scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + _per_head(bias, heads)
    scores = scores.to(lse_dtype(query.dtype))
    if keep is not None:
        scores = scores.masked_fill(~_per_head(keep, heads), -math.inf)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    lse = torch.logsumexp(scores.masked_fill(empty, 0.0), dim=-1, keepdim=True)
    probabilities = torch.exp(scores.masked_fill(empty, -math.inf) - lse)
    if dropout_keep is not None:
        probabilities = probabilities * dropout_keep * dropout_scale(dropout_p)
    out = torch.einsum("bhij,bjhd->bihd", probabilities.to(value.dtype), value)
    return out, lse.masked_fill(empty, -math.inf).squeeze(-1)


def visible(mask: Mask, options: Options, heads: int, seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """Return the keys that each query sees, bool `[Bm, heads or 1, Sq, Sk]`: by bits, segments or intervals, and band."""
    if mask.kind == "none":
        return layout.band_mask(options.band_lo, options.band_hi, seqlen_q, seqlen_k, device)[None, None]
    return _per_head(layout.dense(mask, options.band_lo, options.band_hi, seqlen_q, seqlen_k), heads)


def philox_keep(
    seed: Tensor, seqlen_q: int, seqlen_k: int, dropout_p: float, q_origin: int = 0, k_origin: int = 0
) -> Tensor:
    """Return the elements that dropout keeps, bool `[*seed.shape, Sq, Sk]`, by Philox4x32-7 (Salmon et al. 2011).

    The query at position `i` and the key at `j` take word `2 * (i >> 3 & 1) + (j >> 3 & 1)` of the counter `(i & ~8, j & ~8,
    low word of the seed, high word of the seed)` under the key 0: four pairs, eight rows and columns apart, share an
    evaluation. Positions start at the origins.
    """
    device = seed.device
    (rows, skipped_rows), (columns, skipped_columns) = (
        _first_of_pairs(origin, seqlen, device) for origin, seqlen in ((q_origin, seqlen_q), (k_origin, seqlen_k))
    )
    shape = (*seed.shape, rows.shape[0], columns.shape[0])
    low, high = (seed[..., None, None] >> shift & _LOW_WORD for shift in (0, 32))
    counter = [part.expand(shape) for part in (rows[:, None], columns, low, high)]
    bumps = (0, 0)
    for _ in range(_PHILOX_ROUNDS):
        # The product wraps modulo 2^64, which leaves the bits of both words right.
        first, second = _PHILOX_MULTIPLIERS[0] * counter[0], _PHILOX_MULTIPLIERS[1] * counter[2]
        counter = [
            ((second >> 32) & _LOW_WORD) ^ counter[1] ^ bumps[0],
            second & _LOW_WORD,
            ((first >> 32) & _LOW_WORD) ^ counter[3] ^ bumps[1],
            first & _LOW_WORD,
        ]
        bumps = ((bumps[0] + _PHILOX_WEYL[0]) & _LOW_WORD, (bumps[1] + _PHILOX_WEYL[1]) & _LOW_WORD)
    words = torch.stack(counter, dim=-1).unflatten(
        -1, (2, 2)
    )  # beside each other: of query i, of i + 8; of key j, of j + 8
    words = words.unflatten(-3, (-1, 8)).unflatten(-5, (-1, 8))  # [..., rows / 8, 8, columns / 8, 8, 2, 2]
    words = words.movedim((-2, -1), (-5, -2)).flatten(-3).flatten(-4, -2)
    kept = words >= dropout_threshold(dropout_p)
    return kept[..., skipped_rows : skipped_rows + seqlen_q, skipped_columns : skipped_columns + seqlen_k]


def _first_of_pairs(origin: int, length: int, device: torch.device) -> tuple[Tensor, int]:
    """Return the positions without bit 3 of the blocks of 16 that hold `length` positions from `origin` on, and how many
    positions of the first block come before the origin.
    """
    begin = origin // 16 * 16
    blocks = torch.arange(begin, -(-(origin + length) // 16) * 16, 16, device=device)
    return (blocks[:, None] + torch.arange(8, device=device)).flatten() & _LOW_WORD, origin - begin


class _Sequence(NamedTuple):
    """One sequence: its indices into the tensors of a call, the pairs that are visible, and the factors of dropout."""

    queries: _Index  # into query, out and their gradients
    keys: _Index
    rows: _Index  # into lse and the other statistics
    bias: _Index
    keep: Tensor  # bool [H or 1, Sq, Sk]
    scale: Tensor | None  # of each probability, from dropout: [H, Sq, Sk]


@torch.no_grad()
def forward(call: Call, result: Result, config: Any) -> None:
    """Write out, lse, lse_tail and, where it is asked for, row_max."""
    heads = call.query.shape[-2]
    result.out.zero_()
    result.lse.fill_(-math.inf)
    result.lse_tail.zero_()
    if result.row_max is not None:
        result.row_max.fill_(-math.inf)
    with torch.autocast(call.query.device.type, enabled=False):
        for part in _sequences(call):
            queries, keys, values = (
                _by_head(t, heads) for t in (call.query[part.queries], call.key[part.keys], call.value[part.keys])
            )
            scores, _ = _scores(
                queries, keys, None if call.bias is None else call.bias[part.bias], part.keep, call.options
            )
            peak, log_sum = _peak_and_log_sum(scores)
            lse = peak + log_sum
            probabilities = _probabilities(scores, peak, log_sum)
            if part.scale is not None:
                probabilities = probabilities * part.scale
            result.out[part.queries] = _product(probabilities, values).transpose(0, 1).to(result.out.dtype)
            result.lse[part.rows] = lse
            result.lse_tail[part.rows] = torch.where(lse == -math.inf, 0.0, (peak - lse) + log_sum)
            if result.row_max is not None:
                result.row_max[part.rows] = peak


@torch.no_grad()
def backward(call: Call, saved: Saved, grads: Gradients, config: Any) -> None:
    """Write dq, dk, dv and, where it is given, dbias."""
    for gradient in (grads.dq, grads.dk, grads.dv):
        gradient.zero_()
    dbias, bias, options = grads.dbias, call.bias, call.options
    bias_sum = None if dbias is None else torch.zeros(dbias.shape, dtype=saved.lse.dtype, device=dbias.device)
    heads = call.query.shape[-2]
    with torch.autocast(call.query.device.type, enabled=False):
        for part in _sequences(call):
            queries, keys, values = (
                _by_head(t, heads) for t in (call.query[part.queries], call.key[part.keys], call.value[part.keys])
            )
            douts, outs = _by_head(grads.grad_out[part.queries], heads), _by_head(saved.out[part.queries], heads)
            scores, slope = _scores(queries, keys, None if bias is None else bias[part.bias], part.keep, options)
            probabilities = _probabilities(scores, saved.lse[part.rows], saved.lse_tail[part.rows])
            weights, dweights = probabilities, douts @ values.transpose(-1, -2)
            if part.scale is not None:
                weights, dweights = weights * part.scale, dweights * part.scale
            delta = (douts * outs).sum(-1)
            if grads.grad_lse is not None:
                delta = delta - grads.grad_lse[part.rows]
            dscores = (probabilities * (dweights - delta.unsqueeze(-1))).masked_fill(probabilities == 0, 0.0)
            if bias_sum is not None:
                bias_sum[part.bias] += _sum_to(dscores, bias_sum[part.bias].shape)
            dscores = dscores * options.softmax_scale if slope is None else dscores * (slope * options.softmax_scale)
            grads.dq[part.queries] = _product(dscores, keys).transpose(0, 1).to(grads.dq.dtype)
            for target, weight, rows in ((grads.dk, dscores, queries), (grads.dv, weights, douts)):
                gradient = _product(weight.transpose(-1, -2), rows)
                grouped = gradient.unflatten(0, (target.shape[-2], -1)).sum(1)
                target[part.keys] = grouped.transpose(0, 1).to(target.dtype)
    if dbias is not None and bias_sum is not None:
        dbias.copy_(bias_sum)


def pack_mask(
    mask: Tensor,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    seqlen_q: int,
    band_lo: int,
    band_hi: int,
    row_tiles: Tensor,
    col_tiles: Tensor,
    row_bits: Tensor,
    col_bits: Tensor,
) -> None:
    """Write the lists and bits of a dense mask `[Bm, Hm, Sq or 1, Sk]` where segments and band hold too."""
    keep = (mask != 0) & layout.band_mask(band_lo, band_hi, seqlen_q, mask.shape[-1], mask.device)
    if k_segments is not None:
        keep = keep & layout.segments_mask(q_segments, k_segments)
    keep = layout.pad_to_tiles(keep.expand(*row_tiles.shape[:2], -1, -1))
    row_bits.copy_(layout.pack_words(keep))
    col_bits.copy_(layout.pack_words(keep.transpose(-1, -2)))
    _write_lists(layout.classify(keep), row_tiles, col_tiles)


def list_tiles(
    q_segments: Tensor | None,
    k_segments: Tensor,
    seqlen_q: int,
    band_lo: int,
    band_hi: int,
    row_tiles: Tensor,
    col_tiles: Tensor,
) -> None:
    """Write the lists of `[B|1, Sq]` and `[B|1, Hm, Sk]` segments inside the band."""
    _write_lists(layout.segment_classes(q_segments, k_segments, seqlen_q, band_lo, band_hi), row_tiles, col_tiles)


def _write_lists(classes: Tensor, row_tiles: Tensor, col_tiles: Tensor) -> None:
    for lists, oriented in ((row_tiles, classes), (col_tiles, classes.transpose(-1, -2))):
        lists.copy_(layout.lists_from_classes(oriented, lists.shape[-2], lists.shape[-1] - HEADER))


def _sequences(call: Call) -> Iterator[_Sequence]:
    """Yield the sequences of a dense or packed call."""
    query, bias, mask, options, varlen = call.query, call.bias, call.mask, call.options, call.varlen
    heads, all_ = query.shape[-2], slice(None)

    def weight_scale(number: int, seqlen_q: int, seqlen_k: int) -> Tensor | None:
        if not options.dropout_p or call.seed is None:
            return None
        seed = call.seed[min(number, call.seed.shape[0] - 1)]
        kept = philox_keep(seed, seqlen_q, seqlen_k, options.dropout_p, options.q_origin, options.k_origin)
        return kept.to(lse_dtype(query.dtype)) * dropout_scale(options.dropout_p)

    if varlen is None:
        seqlen_q, seqlen_k = query.shape[1], call.key.shape[1]
        keep = visible(mask, options, heads, seqlen_q, seqlen_k, query.device)
        for b in range(query.shape[0]):
            where: _Index = () if bias is None else (min(b, bias.shape[0] - 1), all_, all_, all_)
            kept = keep[min(b, keep.shape[0] - 1)]
            yield _Sequence((b, all_), (b, all_), (b, all_, all_), where, kept, weight_scale(b, seqlen_q, seqlen_k))
        return
    starts_q, starts_k = varlen.cu_seqlens_q.tolist(), varlen.cu_seqlens_k.tolist()
    for b in range(len(starts_q) - 1):
        rows, cols = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        seqlen_q, seqlen_k = rows.stop - rows.start, cols.stop - cols.start
        shift = 0 if varlen.top_left else seqlen_k - seqlen_q
        band = options._replace(band_lo=options.band_lo + shift, band_hi=options.band_hi + shift)
        k_segments = None if mask.k_segments is None else mask.k_segments.flatten(0, -2)[None, :, cols]
        kept = visible(Mask(k_segments=k_segments), band, heads, seqlen_q, seqlen_k, query.device)[0]
        where = (all_, cols)
        yield _Sequence(rows, cols, (all_, rows), where, kept, weight_scale(b, seqlen_q, seqlen_k))


def _per_head(tensor: Tensor, heads: int) -> Tensor:
    """Repeat the heads of `[B, heads of a mask, ...]` to query heads, unless there is 1."""
    own = tensor.shape[1]
    return tensor if own in (1, heads) else tensor.repeat_interleave(heads // own, dim=1)


def _by_head(rows: Tensor, heads: int) -> Tensor:
    """Return `[heads, S, D]` in the accumulation dtype from the `[S, own heads, D]` rows of one sequence."""
    return rows.to(lse_dtype(rows.dtype)).repeat_interleave(heads // rows.shape[1], dim=1).transpose(0, 1)


def _scores(
    query: Tensor, key: Tensor, bias: Tensor | None, keep: Tensor, options: Options
) -> tuple[Tensor, Tensor | None]:
    """Return masked scores `[H, Sq, Sk]` and, with softcap, the derivative of the capped product."""
    scores, slope = (query @ key.transpose(-1, -2)) * options.softmax_scale, None
    if options.softcap:
        capped = torch.tanh(scores / options.softcap)
        scores, slope = capped * options.softcap, (1 - capped * capped).masked_fill(~keep, 0.0)
    if bias is not None:
        bias = bias.to(scores.dtype)
        if bias.dim() == 2:  # per key, variable lengths
            bias = bias.unsqueeze(1)
        scores = scores + (
            bias if bias.shape[0] in (1, len(scores)) else bias.repeat_interleave(len(scores) // len(bias), dim=0)
        )
    return scores.masked_fill(~keep, -math.inf), slope


def _peak_and_log_sum(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's largest score and the logarithm of the sum of exp(score - it); -inf and 0 in empty rows."""
    if not scores.shape[-1]:
        return scores.new_full(scores.shape[:-1], -math.inf), scores.new_zeros(scores.shape[:-1])
    peak = scores.amax(-1)
    empty = peak == -math.inf
    below = torch.exp(scores - peak.masked_fill(empty, 0.0).unsqueeze(-1))
    return peak, below.sum(-1).masked_fill(empty, 1.0).log()


def _probabilities(scores: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return exp(scores - (first + second)) without rounding that sum, 0 in rows where `first` is -inf."""
    relative = (scores - first.masked_fill(first == -math.inf, 0.0).unsqueeze(-1)) - second.unsqueeze(-1)
    return torch.exp(relative.clamp(max=0.0))


def _product(weights: Tensor, rows: Tensor) -> Tensor:
    """Return `weights @ rows` in which a weight of 0 also drops NaN and infinity, as if that row had not been read.

    Whether there are such rows is asked on a CPU only: elsewhere the host would wait for the answer.
    """
    finite = rows.isfinite()
    if rows.device.type == "cpu" and finite.all():
        return weights @ rows
    reached = (weights != 0).to(rows.dtype) @ (~finite).to(rows.dtype) > 0
    return torch.where(reached, weights @ rows, weights @ rows.masked_fill(~finite, 0.0))


def _sum_to(dscores: Tensor, shape: torch.Size) -> Tensor:
    """Sum `[H, Sq, Sk]` over what a bias `[Hb, Sq or 1, Sk]`, or `[Hb, Sk]` per key, broadcasts."""
    summed = dscores.unflatten(0, (shape[0], -1)).sum(1)
    return summed.sum(1).reshape(shape) if len(shape) == 2 else summed.sum_to_size(shape)
