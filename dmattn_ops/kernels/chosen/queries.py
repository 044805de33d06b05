"""The backward of chosen blocks by tiles of queries that agree: the walk of the forward, which adds to dk and dv as it goes.

A block of few keys would fill no product by itself, and those beside it have other queries. So a program has the rows of a few
queries, as in the forward, keeps dq in registers, and adds dk and dv of the gathered keys to sums in float32, by atomic additions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dmattn_ops.kernels.chosen.forward import Head, listed_of, tile_of, visible_pairs
from dmattn_ops.kernels.chosen.work import (
    ROWS,
    UNSPECIALIZED,
    added,
    columns_of,
    combined,
    gathered,
    inner,
    no_rows,
    scaled,
    stored,
)
from dmattn_ops.kernels.portable.places import head_offset
from dmattn_ops.kernels.portable.primitives import Statistics
from dmattn_ops.kernels.portable.scores import Factors, capped, probabilities


class Rows(NamedTuple):
    """The rows of a tile, which a program owns."""

    q: Any
    grad_out: Any
    statistics: Any
    tile: Any


class KeySums(NamedTuple):
    """Where the sums of dk and dv of a key head lie, `[Sk, D]` and `[Sk, Dv]`."""

    dk: Any
    dv: Any


@triton.jit
def scatter(dq, rows, listed, begin, end, head, sums, work: tl.constexpr, features: tl.constexpr, TESTED: tl.constexpr):
    """Add steps `begin ... end` of a walk to dq, and what their keys get to the sums."""
    HEAD: tl.constexpr = work.keys
    VALUE: tl.constexpr = work.values
    CHECKED: tl.constexpr = TESTED or work.wide != work.block
    for step in tl.range(begin, end):
        columns = columns_of(listed.entries, listed.words, step, listed.count, head.seqlen_k, work)
        k = gathered(head.key, head.key_s, columns.key, columns.inside, HEAD, work.aligned, CHECKED)
        v = gathered(head.value, head.value_s, columns.key, columns.inside, VALUE, work.aligned, CHECKED)
        products, slope = capped(inner(rows.q, k, HEAD, features), head.factors, features)
        statistics = rows.statistics
        p = probabilities(
            products, 0.0, head.factors, statistics.log_sum[:, None], statistics.log_rest[:, None], features.natural
        )
        visible = visible_pairs(rows.tile, columns, head, work, TESTED)
        p = tl.where(visible, p, 0.0)
        inside = columns.inside
        if TESTED:
            inside = tl.max(visible.to(tl.int32), 0) != 0
        added(sums.dv, columns.key, inside, tl.trans(p.to(rows.grad_out.first.dtype)), rows.grad_out, VALUE, features)
        grad_p = inner(rows.grad_out, v, VALUE, features)
        ds = p * (grad_p - statistics.delta[:, None])
        if TESTED:  # a key that nobody sees may be NaN
            ds = tl.where(visible, ds, 0.0)
            slope = tl.where(visible, slope, 0.0)
        if features.softcap:
            ds *= slope
        ds = ds.to(rows.q.first.dtype)
        added(sums.dk, columns.key, inside, tl.trans(ds), rows.q, HEAD, features)
        if TESTED:
            k = gathered(head.key, head.key_s, columns.key, inside, HEAD, work.aligned, True)
        dq = combined(ds, k, dq, HEAD, features)
    return dq


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ROWS)
def queries_kernel(
    query, key, value, grad_out, log_sum, log_rest, delta, dq, dk_sums, dv_sums,
    counts, entries, words, q_segments, k_segments,
    query_b, query_s, query_h, key_b, key_s, key_h, value_b, value_s, value_h, grad_out_b, grad_out_s, grad_out_h,
    dq_b, dq_s, dq_h, lists_b, lists_h, q_segments_b, k_segments_b,
    heads_kv, seqlen_q, seqlen_k, band_lo, band_hi, tiles, capacity, most, ratio, factor, softmax_scale,
    work: tl.constexpr, features: tl.constexpr,
):  # fmt: skip
    """Write dq of a tile of queries of a key head, and add what their keys get to `dk_sums` and `dv_sums` `[B, Hkv, Sk, D]`.

    A tile whose queries chose more than `most` blocks together is left to `keys.keys_kernel`.
    """
    HEAD: tl.constexpr = work.keys
    VALUE: tl.constexpr = work.values
    tile_index = tiles - 1 - tl.program_id(0) % tiles
    head_kv = tl.program_id(0) // tiles % heads_kv
    batch = tl.program_id(0) // tiles // heads_kv
    index = batch.to(tl.int64) * lists_b + head_kv.to(tl.int64) * lists_h + tile_index
    listed = listed_of(counts, entries, words, index, capacity, work)
    if listed.count > most:
        return

    tile = tile_of(batch, head_kv, tile_index, seqlen_q, q_segments, q_segments_b, work)
    row, member_head, is_row = tile.row, tile.head, tile.is_row
    segments = 0
    if work.segments:
        segments = k_segments + batch.to(tl.int64) * k_segments_b
    head = Head(
        key + head_offset(batch, head_kv, key_b, key_h), key_s,
        value + head_offset(batch, head_kv, value_b, value_h), value_s,
        Factors(ratio, factor), segments, seqlen_k, band_lo, band_hi,
    )  # fmt: skip
    at = (batch.to(tl.int64) * seqlen_q + row) * heads_kv * work.group + member_head
    statistics = Statistics(
        tl.load(log_sum + at, is_row, other=float("inf")),
        tl.load(log_rest + at, is_row, other=0.0),
        tl.load(delta + at, is_row, other=0.0),
    )
    is_seeing = is_row & (statistics.log_sum != float("inf"))  # others may be NaN
    at = member_head * query_h + row.to(tl.int64) * query_s
    q = gathered(query + batch.to(tl.int64) * query_b, 1, at, is_seeing, HEAD, work.aligned, True)
    at = member_head * grad_out_h + row.to(tl.int64) * grad_out_s
    do = gathered(grad_out + batch.to(tl.int64) * grad_out_b, 1, at, is_seeing, VALUE, work.aligned, True)
    rows = Rows(q, do, statistics, tile)
    group = batch.to(tl.int64) * heads_kv + head_kv
    sums = KeySums(dk_sums + group * seqlen_k * HEAD.whole, dv_sums + group * seqlen_k * VALUE.whole)
    COUNT: tl.constexpr = work.rows
    grad = no_rows(COUNT, HEAD)
    grad = scatter(grad, rows, listed, 0, listed.whole, head, sums, work, features, False)
    steps = tl.cdiv(listed.count, work.entries) * work.parts
    grad = scatter(grad, rows, listed, listed.whole, steps, head, sums, work, features, True)
    at = member_head * dq_h + row.to(tl.int64) * dq_s
    stored(dq + batch.to(tl.int64) * dq_b, 1, at, is_row, scaled(grad, softmax_scale, HEAD), HEAD)
