"""Decoding: the query heads that share a key head are the rows of one block, so that keys and values are read once.

Each program computes such a block and walks the keys, or one share of them. One query sees the same keys in all heads of a
group, so what is visible is one number for each key. Where a mask may hide most of them, a program first looks for the first
and the last key of its share that is seen, and walks what lies between: of a cache that is not full, what is used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dmattn_ops.kernels.portable.arguments import ROW_TENSORS, UNSPECIALIZED
from dmattn_ops.kernels.portable.heads import Head
from dmattn_ops.kernels.portable.places import Place, head_offset, head_rows
from dmattn_ops.kernels.portable.primitives import Rows, load_rows, rows_of, store_rows
from dmattn_ops.kernels.portable.scores import (
    Bias,
    BiasArray,
    Factors,
    bias_of,
    load_bias,
    load_key_bias,
    log2_unit,
    lse_terms,
)
from dmattn_ops.kernels.portable.softmax import RowResults, Softmax, finish_rows, least_peaks, scores_of, weights_of
from dmattn_ops.kernels.portable.visibility import some_nan
from dmattn_ops.kernels.sinks import share_of_keys

SEARCHED = tl.constexpr(1024)  # keys of which a program reads at once whether they are seen


class Walk(NamedTuple):
    """The keys and values of a head, of which a program walks `first ... last`."""

    key: Any  # Rows
    value: Any  # Rows
    first: Any
    last: Any  # one behind the last


class Shown(NamedTuple):
    """Where the intervals of the keys of a head lie; None for what they do not have."""

    start: Any
    end: Any
    hidden_from: Any
    hidden_to: Any


@triton.jit
def visible_keys(shown, keys, walk, features: tl.constexpr):
    """Return which keys the query, whose position is 0, sees."""
    visible = (keys >= walk.first) & (keys < walk.last)
    if features.mask == "intervals":
        visible = visible & (tl.load(shown.end + keys, mask=visible, other=0) > 0)
        if shown.start is not None:
            visible = visible & (tl.load(shown.start + keys, mask=visible, other=1) <= 0)
        if features.hidden:
            begun = tl.load(shown.hidden_from + keys, mask=visible, other=0) <= 0
            visible = visible & ((begun & (tl.load(shown.hidden_to + keys, mask=visible, other=1) > 0)) == 0)
    return visible


@triton.jit
def seen_part(walk, shown, lanes, features: tl.constexpr):
    """Return the walk from its first key that is seen to its last one; `lanes` are the numbers from 0 to before `SEARCHED`."""
    least = lanes * 0 + walk.last
    greatest = lanes * 0 + walk.first - 1
    for start in tl.range(walk.first, walk.last, SEARCHED):
        keys = start + lanes
        visible = visible_keys(shown, keys, walk, features)
        least = tl.minimum(least, tl.where(visible, keys, walk.last))
        greatest = tl.maximum(greatest, tl.where(visible, keys, walk.first - 1))
    return Walk(walk.key, walk.value, tl.min(least, 0), tl.max(greatest, 0) + 1)


@triton.jit
def attend_to_one(q, walk, shown, head, shape: tl.constexpr, features: tl.constexpr, CAREFUL: tl.constexpr):
    """Return the running softmax of the rows `q`, the heads of a group, after a walk.

    `CAREFUL`: values of keys that are not seen may be NaN, and are not loaded.
    """
    BLOCK_M: tl.constexpr = shape.block_m
    BLOCK_N: tl.constexpr = shape.block_n
    PADDED_VALUE: tl.constexpr = shape.padded_value
    KEY_ROWS: tl.constexpr = shape.key_rows
    VALUE_ROWS: tl.constexpr = shape.value_rows
    rows = tl.arange(0, BLOCK_M)
    factors = head.factors
    unit = log2_unit(factors, features)
    peak, base = least_peaks(tl.zeros((BLOCK_M,), tl.float32), factors, features)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, PADDED_VALUE), tl.float32)
    for step in tl.range(walk.first // BLOCK_N, tl.cdiv(walk.last, BLOCK_N)):
        start = step * BLOCK_N
        keys = start + tl.arange(0, BLOCK_N)
        visible = visible_keys(shown, keys, walk, features)
        k = load_rows(walk.key, start, walk.last, KEY_ROWS, True)
        products = tl.dot(q, tl.trans(k), input_precision=features.precision)
        added = 0.0
        if features.bias == "key":
            added = load_key_bias(head, keys)[None, :]
        if features.bias == "full":
            added = load_bias(head, rows, keys, False, True)
        score = scores_of(products, added, factors, features)
        score = tl.where(visible[None, :], score, float("-inf"))
        weights = weights_of(score, peak, base, unit, features)
        total = total * weights.shrink + tl.sum(weights.p, 1)
        seen = None
        if CAREFUL:
            seen = visible
        v = load_rows(walk.value, start, walk.last, VALUE_ROWS, True, walk.first, True, seen)
        p = weights.p.to(v.dtype)
        acc = tl.dot(p, v, acc * weights.shrink[:, None], input_precision=features.precision)
        peak, base = weights.peak, weights.base
    return Softmax(acc, peak, base, total)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def decode_kernel(
    query, key, value, bias, out, lse, lse_tail, row_max, sink, start, end, hidden_from, hidden_to,
    query_b, query_h, key_b, key_s, key_h, value_b, value_s, value_h, out_b, out_h, out_split,
    lse_b, lse_tail_b, row_max_b, lse_split, bias_b, bias_h, bias_q, bias_group, keys_b, keys_h, key_group,
    blocks, heads, seqlen_k, band_lo, band_hi, ratio, factor,
    shape: tl.constexpr, features: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """Write out and the statistics of `block_m` query heads of one of `heads` key heads, or of one share of its walk.

    `program_id(1)` says which share. Key head `h` is read by query heads from `h * features.group` on. `SPARSE`: the mask may
    hide most keys.
    """
    QUERY_ROWS: tl.constexpr = shape.query_rows
    OUT_ROWS: tl.constexpr = shape.out_rows
    BLOCK_M: tl.constexpr = shape.block_m
    BLOCK_N: tl.constexpr = shape.block_n
    GROUP: tl.constexpr = features.group
    program, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    first_row = (program % blocks) * BLOCK_M
    kv_head = (program // blocks) % heads
    batch = program // blocks // heads
    zero = tl.cast(0, tl.int32)
    place = Place(batch, batch, kv_head, zero, tl.cast(GROUP, tl.int32) - first_row, zero, seqlen_k, zero)

    first = tl.maximum(band_lo, 0)
    last = tl.minimum(band_hi + 1, seqlen_k)
    share = tl.cdiv(tl.cdiv(last, BLOCK_N) - first // BLOCK_N, splits) * BLOCK_N
    begin = first // BLOCK_N * BLOCK_N + split * share
    walk = Walk(
        rows_of(key, key_b, key_s, key_h, batch, kv_head, zero),
        rows_of(value, value_b, value_s, value_h, batch, kv_head, zero),
        tl.maximum(begin, first),
        tl.minimum(begin + share, last),
    )
    of_head = head_offset(batch, kv_head // key_group, keys_b, keys_h)
    shown = Shown(
        None if start is None else start + of_head,
        None if end is None else end + of_head,
        None if hidden_from is None else hidden_from + of_head,
        None if hidden_to is None else hidden_to + of_head,
    )
    if SPARSE:
        walk = seen_part(walk, shown, tl.arange(0, SEARCHED), features)
    of_heads = bias_of(BiasArray(bias, bias_b, bias_h, bias_q, bias_group), place, kv_head, features)
    if features.bias == "full":
        of_heads = Bias(of_heads.start + first_row.to(tl.int64) * bias_q, bias_q)
    head = Head(place, 0, of_heads, 0, 0, Factors(ratio, factor))

    row = kv_head * GROUP + first_row  # the query head of the first row
    query_rows = Rows(head_rows(query, batch, row, zero, query_b, 0, query_h), query_h)
    q = load_rows(query_rows, zero, place.length_q, QUERY_ROWS, True)
    sums = attend_to_one(q, walk, shown, head, shape, features, False)
    if features.mask != "none":
        if some_nan(sums.acc):
            sums = attend_to_one(q, walk, shown, head, shape, features, True)

    rows = tl.arange(0, BLOCK_M)
    results = RowResults(lse, lse_b, GROUP, lse_tail, lse_tail_b, GROUP, row_max, row_max_b, GROUP, None, 1.0)
    written = split.to(tl.int64) * lse_split + first_row
    scale = finish_rows(sums.peak, sums.total, rows, written, results, head, features)
    if sink is not None:
        of_row = tl.load(sink + row + rows, mask=rows < place.length_q, other=0.0).to(tl.float32)
        row_lse, _ = lse_terms(sums.peak, sums.total, log2_unit(head.factors, features), features.natural)
        scale *= share_of_keys(of_row, row_lse)
    acc = tl.where((sums.total == 0.0)[:, None], 0.0, sums.acc * scale[:, None])
    out_rows = Rows(head_rows(out, batch, row, zero, out_b, 0, out_h) + split.to(tl.int64) * out_split, out_h)
    store_rows(out_rows, zero, place.length_q, acc, OUT_ROWS)
