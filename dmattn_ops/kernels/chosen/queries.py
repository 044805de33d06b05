"""The backward of small chosen blocks, by tiles of queries: the walk of the forward, which adds to dk and dv as it goes.

A block of few keys would fill no product by itself, and those beside it have other queries. So a program has the rows of a few
queries, as in the forward, keeps dq in registers, and adds dk and dv of the gathered keys to sums in float32, by atomic additions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dmattn_ops.kernels.chosen.forward import Head, Listed, Tile, visible_pairs
from dmattn_ops.kernels.chosen.work import ROWS, UNSPECIALIZED, columns_of, gathered
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
    CHECKED: tl.constexpr = TESTED or work.wide != work.block
    for step in tl.range(begin, end):
        columns = columns_of(listed.entries, listed.words, step, listed.count, head.seqlen_k, work)
        k = gathered(head.key, head.key_s, columns.key, columns.inside, work.head_dim, work.padded_head, work.aligned, CHECKED)
        v = gathered(head.value, head.value_s, columns.key, columns.inside, work.value_dim, work.padded_value, work.aligned, CHECKED)
        products, slope = capped(tl.dot(rows.q, tl.trans(k), input_precision=features.precision), head.factors, features)
        statistics = rows.statistics
        p = probabilities(
            products, 0.0, head.factors, statistics.log_sum[:, None], statistics.log_rest[:, None], features.natural
        )
        visible = visible_pairs(rows.tile, columns, head, work, TESTED)
        p = tl.where(visible, p, 0.0)
        inside = columns.inside
        if TESTED:
            inside = tl.max(visible.to(tl.int32), 0) != 0
        key = columns.key.to(tl.int64)[:, None]
        column = tl.arange(0, work.padded_value)
        dv = tl.dot(tl.trans(p.to(rows.grad_out.dtype)), rows.grad_out, input_precision=features.precision)
        tl.atomic_add(
            sums.dv + key * work.padded_value + column[None, :], dv,
            mask=inside[:, None] & (column < work.value_dim)[None, :], sem="relaxed",
        )  # fmt: skip
        grad_p = tl.dot(rows.grad_out, tl.trans(v), input_precision=features.precision)
        ds = tl.where(visible, p * (grad_p - statistics.delta[:, None]), 0.0)
        if features.softcap:
            ds *= tl.where(visible, slope, 0.0)
        ds = ds.to(rows.q.dtype)
        column = tl.arange(0, work.padded_head)
        dk = tl.dot(tl.trans(ds), rows.q, input_precision=features.precision)
        tl.atomic_add(
            sums.dk + key * work.padded_head + column[None, :], dk,
            mask=inside[:, None] & (column < work.head_dim)[None, :], sem="relaxed",
        )  # fmt: skip
        if TESTED:  # a key that nobody sees may be NaN
            k = gathered(head.key, head.key_s, columns.key, inside, work.head_dim, work.padded_head, work.aligned, True)
        dq = tl.dot(ds, k, dq, input_precision=features.precision)
    return dq


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ROWS)
def queries_kernel(
    query, key, value, grad_out, log_sum, log_rest, delta, dq, dk_sums, dv_sums,
    counts, entries, words, q_segments, k_segments,
    query_b, query_s, query_h, key_b, key_s, key_h, value_b, value_s, value_h, grad_out_b, grad_out_s, grad_out_h,
    dq_b, dq_s, dq_h, lists_b, lists_h, q_segments_b, k_segments_b,
    heads_kv, seqlen_q, seqlen_k, band_lo, band_hi, tiles, capacity, ratio, factor, softmax_scale,
    work: tl.constexpr, features: tl.constexpr,
):  # fmt: skip
    """Write dq of a tile of queries of a key head, and add what their keys get to `dk_sums` and `dv_sums` `[B, Hkv, Sk, D]`."""
    tile_index = tiles - 1 - tl.program_id(0) % tiles
    head_kv = tl.program_id(0) // tiles % heads_kv
    batch = tl.program_id(0) // tiles // heads_kv
    row = tl.arange(0, work.rows)
    within, member = row // work.padded_group, row % work.padded_group
    row = tile_index * work.queries + within
    is_row = (row < seqlen_q) & (member < work.group)
    member_head = (head_kv * work.group + member).to(tl.int64)
    segment = row * 0
    if work.query_segments:
        segment = tl.load(q_segments + batch.to(tl.int64) * q_segments_b + row, row < seqlen_q, other=0)
    segments = 0
    if work.segments:
        segments = k_segments + batch.to(tl.int64) * k_segments_b
    head = Head(
        key + head_offset(batch, head_kv, key_b, key_h), key_s,
        value + head_offset(batch, head_kv, value_b, value_h), value_s,
        Factors(ratio, factor), segments, seqlen_k, band_lo, band_hi,
    )  # fmt: skip
    index = batch.to(tl.int64) * lists_b + head_kv.to(tl.int64) * lists_h + tile_index
    found = tl.load(counts + index * 2)
    whole = tl.load(counts + index * 2 + 1) // work.entries * work.parts
    listed = Listed(entries + index * capacity, words + index * capacity, found)
    at = (batch.to(tl.int64) * heads_kv * work.group + member_head) * seqlen_q + row
    statistics = Statistics(
        tl.load(log_sum + at, is_row, other=float("inf")),
        tl.load(log_rest + at, is_row, other=0.0),
        tl.load(delta + at, is_row, other=0.0),
    )
    is_seeing = is_row & (statistics.log_sum != float("inf"))  # others may be NaN
    column = tl.arange(0, work.padded_head)
    places = query + batch.to(tl.int64) * query_b + (member_head * query_h + row.to(tl.int64) * query_s)[:, None]
    q = tl.load(places + column[None, :], is_seeing[:, None] & (column < work.head_dim)[None, :], other=0.0)
    column = tl.arange(0, work.padded_value)
    places = grad_out + batch.to(tl.int64) * grad_out_b
    places += (member_head * grad_out_h + row.to(tl.int64) * grad_out_s)[:, None]
    do = tl.load(places + column[None, :], is_seeing[:, None] & (column < work.value_dim)[None, :], other=0.0)
    rows = Rows(q, do, statistics, Tile(within, row, segment))
    group = batch.to(tl.int64) * heads_kv + head_kv
    sums = KeySums(dk_sums + group * seqlen_k * work.padded_head, dv_sums + group * seqlen_k * work.padded_value)
    grad = tl.zeros((work.rows, work.padded_head), tl.float32)
    grad = scatter(grad, rows, listed, 0, whole, head, sums, work, features, False)
    steps = tl.cdiv(found, work.entries) * work.parts
    grad = scatter(grad, rows, listed, whole, steps, head, sums, work, features, True)
    column = tl.arange(0, work.padded_head)
    places = dq + batch.to(tl.int64) * dq_b + (member_head * dq_h + row.to(tl.int64) * dq_s)[:, None]
    inside = is_row[:, None] & (column < work.head_dim)[None, :]
    tl.store(places + column[None, :], (grad * softmax_scale).to(dq.dtype.element_ty), inside)
