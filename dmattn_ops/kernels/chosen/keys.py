"""The backward of chosen blocks, by blocks of keys: each program walks the queries that chose its block.

It gathers some of them at a time with all heads of the group, computes five products, and keeps dk and dv in registers. dq is
summed in float32 by atomic additions. No pair is computed that was not chosen, however far the choices of neighbours differ.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dmattn_ops.kernels.chosen.forward import Head
from dmattn_ops.kernels.chosen.work import (
    ROWS,
    UNSPECIALIZED,
    added,
    combined,
    gathered,
    inner,
    no_rows,
    scaled,
    stored,
    together,
)
from dmattn_ops.kernels.portable.places import head_offset
from dmattn_ops.kernels.portable.primitives import Statistics
from dmattn_ops.kernels.portable.scores import Factors, capped, probabilities

_COUNTED = tl.constexpr(128)  # at least as many as the keys of a block


class Keys(NamedTuple):
    """A block of keys, which a program owns."""

    k: Any
    v: Any
    key: Any  # numbers
    inside: Any
    segment: Any


class Queries(NamedTuple):
    """Where the queries of a group lie, with their statistics, and those that chose the block."""

    query: Any
    query_s: Any
    query_h: Any
    grad_out: Any
    grad_out_s: Any
    grad_out_h: Any
    dq_sums: Any
    statistics: Any
    segments: Any
    listed: Any
    count: Any
    heads: Any


class Sums(NamedTuple):
    """What is gathered for a block of keys."""

    dk: Any
    dv: Any


@triton.jit
def visible_keys(row, is_row, segment, keys, head, work: tl.constexpr):
    """Return which pairs `[rows, columns]` of rows and keys of a block that they chose are visible."""
    distance = keys.key[None, :] - row[:, None]
    visible = (distance >= head.band_lo) & (distance <= head.band_hi) & is_row[:, None] & keys.inside[None, :]
    if work.segments:
        visible = visible & (segment[:, None] == keys.segment[None, :])
    return visible


@triton.jit
def gather(
    sums,
    keys,
    queries,
    begin,
    end,
    head,
    work: tl.constexpr,
    features: tl.constexpr,
    TESTED: tl.constexpr,
):
    """Add steps `begin ... end` of the queries that chose a block to its sums, and what they get to dq."""
    HEAD: tl.constexpr = work.keys
    VALUE: tl.constexpr = work.values
    dk, dv = sums.dk, sums.dv
    row = tl.arange(0, work.rows)
    within, member = row // work.padded_group, row % work.padded_group
    CHECKED: tl.constexpr = TESTED or work.group != work.padded_group
    for step in tl.range(begin, end):
        at = step * work.queries + within
        is_row = member < work.group
        if TESTED:
            is_row = is_row & (at < queries.count)
            number = tl.load(queries.listed + at, at < queries.count, other=0)
        else:
            number = tl.load(queries.listed + at)
        place = number.to(tl.int64)
        at = place * queries.query_s + member.to(tl.int64) * queries.query_h
        q = gathered(queries.query, 1, at, is_row, HEAD, work.aligned, CHECKED)
        at = place * queries.grad_out_s + member.to(tl.int64) * queries.grad_out_h
        do = gathered(queries.grad_out, 1, at, is_row, VALUE, work.aligned, CHECKED)
        offset = place * queries.heads + member
        log_sum = tl.load(queries.statistics.log_sum + offset, is_row, other=float("inf"))
        log_rest = tl.load(queries.statistics.log_rest + offset, is_row, other=0.0)
        delta = tl.load(queries.statistics.delta + offset, is_row, other=0.0)
        products, slope = capped(inner(q, keys.k, HEAD, features), head.factors, features)
        p = probabilities(products, 0.0, head.factors, log_sum[:, None], log_rest[:, None], features.natural)
        if TESTED:
            segment = number * 0
            if work.query_segments:
                segment = tl.load(queries.segments + number, is_row, other=0)
            visible = visible_keys(number, is_row, segment, keys, head, work)
            p = tl.where(visible, p, 0.0)
        dv = combined(tl.trans(p.to(do.first.dtype)), do, dv, VALUE, features)
        grad_p = inner(do, keys.v, VALUE, features)
        ds = p * (grad_p - delta[:, None])
        if TESTED:
            ds = tl.where(visible, ds, 0.0)
        if features.softcap:
            if TESTED:
                slope = tl.where(visible, slope, 0.0)
            ds *= slope
        ds = ds.to(q.first.dtype)
        dk = combined(tl.trans(ds), q, dk, HEAD, features)
        added(queries.dq_sums, place * work.group + member, is_row, ds, keys.k, HEAD, features)
    return Sums(dk, dv)


@triton.jit
def seen_keys(key, inside, segment, queries, head, work: tl.constexpr):
    """Return which keys of a block some query sees that chose it: others may be NaN."""
    if work.tested:
        COLUMNS: tl.constexpr = work.columns
        seen = tl.zeros((COLUMNS,), tl.int32)
        for start in tl.range(0, queries.count, work.rows):
            at = start + tl.arange(0, work.rows)
            is_row = at < queries.count
            number = tl.load(queries.listed + at, is_row, other=0)
            own = number * 0
            if work.query_segments:
                own = tl.load(queries.segments + number, is_row, other=0)
            keys = Keys(0, 0, key, inside, segment)
            seen = tl.maximum(seen, tl.max(visible_keys(number, is_row, own, keys, head, work).to(tl.int32), 0))
        found = seen != 0
    else:
        last = tl.load(queries.listed + queries.count - 1, queries.count > 0, other=0)
        found = inside & (queries.count > 0) & (key - last <= head.band_hi)
    return found


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ROWS)
def keys_kernel(
    query, key, value, grad_out, log_sum, log_rest, delta, dq_sums, dk_sums, dv_sums, starts, counts, choosers,
    q_segments, k_segments,
    query_b, query_s, query_h, key_b, key_s, key_h, value_b, value_s, value_h, grad_out_b, grad_out_s, grad_out_h,
    lists_b, lists_h, q_segments_b, k_segments_b,
    heads_kv, seqlen_q, seqlen_k, band_lo, band_hi, blocks, parts, capacity, ratio, factor,
    work: tl.constexpr, features: tl.constexpr,
):  # fmt: skip
    """Add what a block of keys, or one of its `parts`, gets of its queries to `dk_sums` and `dv_sums` `[B, Hkv, Sk, D]`.

    What the queries get is added to `dq_sums [B, Hkv, Sq, group, D]`.
    """
    HEAD: tl.constexpr = work.keys
    VALUE: tl.constexpr = work.values
    part = tl.program_id(0) % parts
    number = tl.program_id(0) // parts % blocks
    head_kv = tl.program_id(0) // parts // blocks % heads_kv
    batch = tl.program_id(0) // parts // blocks // heads_kv
    matrix = batch.to(tl.int64) * lists_b + head_kv.to(tl.int64) * lists_h
    count = tl.load(counts + matrix * blocks + number)
    if count == 0:
        return

    listed = choosers + matrix * capacity + tl.load(starts + matrix * blocks + number)
    first_head = (head_kv * work.group).to(tl.int64)
    group = batch.to(tl.int64) * heads_kv + head_kv
    first = batch.to(tl.int64) * seqlen_q * heads_kv * work.group + first_head
    segments_q, segments_k = 0, 0
    if work.query_segments:
        segments_q = q_segments + batch.to(tl.int64) * q_segments_b
    if work.segments:
        segments_k = k_segments + batch.to(tl.int64) * k_segments_b
    queries = Queries(
        query + head_offset(batch, first_head, query_b, query_h), query_s, query_h,
        grad_out + head_offset(batch, first_head, grad_out_b, grad_out_h), grad_out_s, grad_out_h,
        dq_sums + group * work.group * seqlen_q * HEAD.whole,
        Statistics(log_sum + first, log_rest + first, delta + first),
        segments_q, listed, count, heads_kv * work.group,
    )  # fmt: skip
    head = Head(
        key + head_offset(batch, head_kv, key_b, key_h), key_s,
        value + head_offset(batch, head_kv, value_b, value_h), value_s,
        Factors(ratio, factor), segments_k, seqlen_k, band_lo, band_hi,
    )  # fmt: skip
    place = part * work.columns + tl.arange(0, work.columns)
    own = number * work.block + place
    inside = (place < work.block) & (own < seqlen_k)
    segment = own * 0
    if work.segments:
        segment = tl.load(segments_k + own, inside, other=0)
    seen = seen_keys(own, inside, segment, queries, head, work)
    k = gathered(head.key, key_s, own, seen, HEAD, work.aligned, True)
    v = gathered(head.value, value_s, own, seen, VALUE, work.aligned, True)
    keys = Keys(k, v, own, seen, segment)
    COLUMNS: tl.constexpr = work.columns
    sums = Sums(no_rows(COLUMNS, HEAD), no_rows(COLUMNS, VALUE))
    whole = count // work.queries
    cut = tl.cast(0, tl.int32)
    if work.tested:
        cut = tl.cdiv(count, work.queries)
    else:  # the queries that do not see the last key of a block are fewer than its keys, and the first of its list
        at = tl.arange(0, _COUNTED)
        early = (
            tl.load(listed + at, at < count, other=seqlen_q + seqlen_k) + band_hi < number * work.block + work.block - 1
        )
        cut = tl.minimum(
            tl.cdiv(tl.sum((early & (at < count)).to(tl.int32), 0), work.queries), tl.cdiv(count, work.queries)
        )
        if number * work.block + work.block > seqlen_k:
            cut = tl.cdiv(count, work.queries)
    whole = tl.maximum(whole, cut)
    sums = gather(sums, keys, queries, 0, cut, head, work, features, True)
    sums = gather(sums, keys, queries, cut, whole, head, work, features, False)
    sums = gather(sums, keys, queries, whole, tl.cdiv(count, work.queries), head, work, features, True)

    at = group * seqlen_k + own
    before = gathered(dk_sums, HEAD.whole, at, inside, HEAD, True, True)
    stored(dk_sums, HEAD.whole, at, inside, together(sums.dk, before, HEAD), HEAD)
    before = gathered(dv_sums, VALUE.whole, at, inside, VALUE, True, True)
    stored(dv_sums, VALUE.whole, at, inside, together(sums.dv, before, VALUE), VALUE)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ROWS)
def dq_kernel(
    dq_sums, dq, wide_counts, dq_b, dq_s, dq_h, lists_b, lists_h, heads_kv, seqlen_q, wide, most, softmax_scale,
    work: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """Write dq from its sums `[B, Hkv, Sq, group, D]`, or `CLEAR` these: of queries that chose apart (`unions.is_apart`)."""
    HEAD: tl.constexpr = work.keys
    tiles = tl.cdiv(seqlen_q, work.queries)
    head_kv = tl.program_id(0) // tiles % heads_kv
    batch = tl.program_id(0) // tiles // heads_kv
    row = tl.arange(0, work.rows)
    member = row % work.padded_group
    row = tl.program_id(0) % tiles * work.queries + row // work.padded_group
    inside = (row < seqlen_q) & (member < work.group)
    of_row = batch.to(tl.int64) * lists_b + head_kv.to(tl.int64) * lists_h + row // wide
    inside = inside & (tl.load(wide_counts + of_row * 2, inside, other=0) > most)
    at = ((batch.to(tl.int64) * heads_kv + head_kv) * seqlen_q + row) * work.group + member
    if CLEAR:
        COUNT: tl.constexpr = work.rows
        stored(dq_sums, HEAD.whole, at, inside, no_rows(COUNT, HEAD), HEAD)
    else:
        sums = gathered(dq_sums, HEAD.whole, at, inside, HEAD, True, True)
        head = (head_kv * work.group + member).to(tl.int64)
        at = row.to(tl.int64) * dq_s + head * dq_h
        stored(dq + batch.to(tl.int64) * dq_b, 1, at, inside, scaled(sums, softmax_scale, HEAD), HEAD)
