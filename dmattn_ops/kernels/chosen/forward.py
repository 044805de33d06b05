"""The forward of chosen blocks: a program has the rows of a few queries and the heads that share their lists.

It walks what these queries chose together, gathers the keys of some blocks at a time, and tests for each row whether its
query chose the block; band and segments are tested where a block may be cut by them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dmattn_ops.kernels.chosen.unions import is_apart
from dmattn_ops.kernels.chosen.work import (
    ROWS,
    UNSPECIALIZED,
    columns_of,
    combined,
    gathered,
    inner,
    no_rows,
    scaled,
    stored,
)
from dmattn_ops.kernels.portable.places import head_offset
from dmattn_ops.kernels.portable.scores import LN2, Factors, log2_unit, lse_terms
from dmattn_ops.kernels.portable.softmax import Softmax, least_peaks, scores_of, weights_of
from dmattn_ops.kernels.sinks import share_of_keys


class Head(NamedTuple):
    """The keys and values of one key head, and what scores need."""

    key: Any
    key_s: Any
    value: Any
    value_s: Any
    factors: Any
    segments: Any  # of keys
    seqlen_k: Any
    band_lo: Any
    band_hi: Any


class Tile(NamedTuple):
    """The rows of a tile: which of its queries each belongs to, which of all, and its segment."""

    within: Any
    row: Any
    segment: Any
    head: Any  # query heads
    is_row: Any


class Listed(NamedTuple):
    """The list of the blocks that the queries of a tile chose."""

    entries: Any
    words: Any
    count: Any
    whole: Any  # steps, the first ones, of which all is visible


@triton.jit
def tile_of(batch, head_kv, number, seqlen_q, q_segments, q_segments_b, work: tl.constexpr):
    """Return the rows of tile `number`: its queries in all heads of a group."""
    row = tl.arange(0, work.rows)
    within, member = row // work.padded_group, row % work.padded_group
    row = number * work.queries + within
    segment = row * 0
    if work.query_segments:
        segment = tl.load(q_segments + batch.to(tl.int64) * q_segments_b + row, row < seqlen_q, other=0)
    head = (head_kv * work.group + member).to(tl.int64)
    return Tile(within, row, segment, head, (row < seqlen_q) & (member < work.group))


@triton.jit
def listed_of(counts, entries, words, index, capacity, work: tl.constexpr):
    """Return the list of the blocks that the queries of tile `index` chose."""
    whole = tl.load(counts + index * 2 + 1) // work.entries * work.parts
    return Listed(entries + index * capacity, words + index * capacity, tl.load(counts + index * 2), whole)


@triton.jit
def visible_pairs(tile, columns, head, work: tl.constexpr, TESTED: tl.constexpr):
    """Return which pairs `[rows, columns]` are visible; `TESTED`: band, segments and ends may hide some of a block."""
    visible = ((columns.word[None, :] >> tile.within[:, None]) & 1) != 0
    if TESTED:
        distance = columns.key[None, :] - tile.row[:, None]
        visible = visible & columns.inside[None, :] & (distance >= head.band_lo) & (distance <= head.band_hi)
        if work.segments:
            segment = tl.load(head.segments + columns.key, columns.inside, other=0)
            visible = visible & (segment[None, :] == tile.segment[:, None])
    elif work.wide != work.block:
        visible = visible & columns.inside[None, :]
    return visible


@triton.jit
def attend(sums, q, tile, listed, begin, end, head, work: tl.constexpr, features: tl.constexpr, TESTED: tl.constexpr):
    """Add steps `begin ... end` of a walk to the running softmax."""
    HEAD: tl.constexpr = work.keys
    VALUE: tl.constexpr = work.values
    acc, peak = sums.acc, sums.peak
    base, total = sums.base, sums.total
    unit = log2_unit(head.factors, features)
    CHECKED: tl.constexpr = TESTED or work.wide != work.block
    for step in tl.range(begin, end):
        columns = columns_of(listed.entries, listed.words, step, listed.count, head.seqlen_k, work)
        k = gathered(head.key, head.key_s, columns.key, columns.inside, HEAD, work.aligned, CHECKED)
        products = inner(q, k, HEAD, features)
        visible = visible_pairs(tile, columns, head, work, TESTED)
        score = tl.where(visible, scores_of(products, 0.0, head.factors, features), float("-inf"))
        weights = weights_of(score, peak, base, unit, features)
        total = total * weights.shrink + tl.sum(weights.p, 1)
        inside = columns.inside
        if TESTED:  # a value that nobody sees may be NaN
            inside = tl.max(visible.to(tl.int32), 0) != 0
        v = gathered(head.value, head.value_s, columns.key, inside, VALUE, work.aligned, CHECKED)
        acc = scaled(acc, weights.shrink[:, None], VALUE)
        acc = combined(weights.p.to(v.first.dtype), v, acc, VALUE, features)
        peak, base = weights.peak, weights.base
    return Softmax(acc, peak, base, total)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ROWS)
def forward_kernel(
    query, key, value, out, lse, lse_tail, row_max, sink, counts, entries, words, wide_counts, q_segments, k_segments,
    query_b, query_s, query_h, key_b, key_s, key_h, value_b, value_s, value_h, out_b, out_s, out_h,
    lists_b, lists_h, q_segments_b, k_segments_b,
    heads_kv, seqlen_q, seqlen_k, band_lo, band_hi, tiles, capacity, wide, most, ratio, factor,
    work: tl.constexpr, features: tl.constexpr,
):  # fmt: skip
    """Write out and the statistics, lse, lse_tail and row_max `[B, H, Sq]`, of one tile of queries of a key head.

    A tile whose queries chose more than `most` blocks together is left to another launch, of narrower tiles, which is given the
    counts of these in `wide_counts`: each has `wide` of its own.
    """
    HEAD: tl.constexpr = work.keys
    VALUE: tl.constexpr = work.values
    tile_index = tiles - 1 - tl.program_id(0) % tiles
    head_kv = tl.program_id(0) // tiles % heads_kv
    batch = tl.program_id(0) // tiles // heads_kv
    index = batch.to(tl.int64) * lists_b + head_kv.to(tl.int64) * lists_h + tile_index
    if wide_counts is None:
        is_mine = tl.load(counts + index * 2) <= most
    else:
        is_mine = is_apart(wide_counts, index // tiles, tile_index, tiles, wide, most)
    if not is_mine:
        return

    tile = tile_of(batch, head_kv, tile_index, seqlen_q, q_segments, q_segments_b, work)
    row, head, is_row = tile.row, tile.head, tile.is_row
    segments = 0
    if work.segments:
        segments = k_segments + batch.to(tl.int64) * k_segments_b
    keys = Head(
        key + head_offset(batch, head_kv, key_b, key_h), key_s,
        value + head_offset(batch, head_kv, value_b, value_h), value_s,
        Factors(ratio, factor), segments, seqlen_k, band_lo, band_hi,
    )  # fmt: skip
    listed = listed_of(counts, entries, words, index, capacity, work)
    q = gathered(
        query + batch.to(tl.int64) * query_b, 1, head * query_h + row.to(tl.int64) * query_s, is_row,
        HEAD, work.aligned, True,
    )  # fmt: skip

    COUNT: tl.constexpr = work.rows
    peak, base = least_peaks(tl.zeros((COUNT,), tl.float32), keys.factors, features)
    sums = Softmax(no_rows(COUNT, VALUE), peak, base, tl.zeros((COUNT,), tl.float32))
    sums = attend(sums, q, tile, listed, 0, listed.whole, keys, work, features, False)
    steps = tl.cdiv(listed.count, work.entries) * work.parts
    sums = attend(sums, q, tile, listed, listed.whole, steps, keys, work, features, True)

    unit = log2_unit(keys.factors, features)
    empty = sums.total == 0.0
    scale = 1.0 / tl.where(empty, 1.0, sums.total)
    row_lse, row_tail = lse_terms(sums.peak, sums.total, unit, features.natural)
    if sink is not None:
        scale *= share_of_keys(tl.load(sink + head, is_row, other=0.0).to(tl.float32), row_lse)
    at = (batch.to(tl.int64) * heads_kv * work.group + head) * seqlen_q + row
    tl.store(lse + at, row_lse, is_row)
    tl.store(lse_tail + at, row_tail, is_row)
    if row_max is not None:
        largest = sums.peak
        if not features.natural:
            largest = tl.where(empty, float("-inf"), sums.peak * unit * LN2)
        tl.store(row_max + at, tl.where(sums.total == sums.total, largest, float("nan")), is_row)
    scale = tl.where(empty, 0.0, scale)
    acc = scaled(sums.acc, scale[:, None], VALUE)
    at = head * out_h + row.to(tl.int64) * out_s
    stored(out + batch.to(tl.int64) * out_b, 1, at, is_row, acc, VALUE)
