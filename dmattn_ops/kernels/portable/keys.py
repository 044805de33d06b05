"""dk and dv in plain Triton: each program computes a block of keys and walks the queries of every head that reads it.

Scores are computed transposed, `[keys, queries]`, so that P and dS can be the left operand of the products for dv and dk
without another transposition.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dmattn_ops.kernels.portable.arguments import ROW_TENSORS, UNSPECIALIZED
from dmattn_ops.kernels.portable.dropout import Seeds, dropout_keep
from dmattn_ops.kernels.portable.heads import Operands, head_of, program_of
from dmattn_ops.kernels.portable.places import (
    SEARCHED,
    Band,
    Lengths,
    Lists,
    band_of,
    last_owned,
    part_of,
    plan_walk,
    walked_start,
)
from dmattn_ops.kernels.portable.primitives import (
    Array,
    Statistics,
    load_rows,
    load_statistics,
    rows_in,
    rows_of,
    statistics_of,
    store_rows,
)
from dmattn_ops.kernels.portable.scores import (
    BiasArray,
    Factors,
    capped,
    load_bias,
    load_key_bias,
    probabilities,
    score_gradient,
)
from dmattn_ops.kernels.portable.visibility import (
    BitArray,
    KeyArrays,
    MaskArrays,
    key_marks,
    query_marks,
    rows_in_reach,
    some_nan,
    visibility,
)


class Queries(NamedTuple):
    """The queries of one head, which are walked."""

    query: Any  # Rows
    grad_out: Any  # Rows
    statistics: Any  # Statistics


class Keys(NamedTuple):
    """A block of keys, which is owned."""

    k: Any
    v: Any
    marks: Any
    start: Any
    last: Any


class Block(NamedTuple):
    """A block of keys of one key head, before a query head says which tensors go with it."""

    k: Any
    v: Any
    start: Any
    last: Any
    place: Any  # Place
    band: Any  # as keys have it


class Inputs(NamedTuple):
    """What the blocks of a backward read."""

    query: Any  # Array, as the two that follow
    key: Any
    value: Any
    grad_out: Any
    statistics: Any  # Statistics of all rows
    band: Any


class Sums(NamedTuple):
    """Sums over queries for a block of keys."""

    dk: Any
    dv: Any
    ds: Any  # the sum of dS over the queries of one head


@triton.jit
def gather_queries(
    sums,
    keys,
    queries,
    part,
    head,
    shape: tl.constexpr,
    features: tl.constexpr,
    KEY_SUMS: tl.constexpr,
    PARTIAL: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Add the queries of one part of the walk to the sums. `CAREFUL`: rows of queries that see no key may be NaN."""
    QUERY_ROWS: tl.constexpr = shape.query_rows
    OUT_ROWS: tl.constexpr = shape.out_rows
    BLOCK_M: tl.constexpr = shape.block_m
    place, factors, statistics = head.place, head.factors, queries.statistics
    dk, dv, key_sum = sums.dk, sums.dv, sums.ds
    own_keys = keys.start + tl.arange(0, shape.block_n)
    key_bias = 0.0
    if features.bias == "key":
        key_bias = load_key_bias(head, own_keys)[:, None]
    reach = rows_in_reach(head.mask, keys.start, keys.last, place.length_q, features)
    for step in tl.range(part.begin, part.end):
        start = walked_start(part, step, BLOCK_M, features)
        own_queries = start + tl.arange(0, BLOCK_M)
        log_sum = load_statistics(statistics.log_sum, start, place.length_q, float("inf"), BLOCK_M, PARTIAL)
        seen = None
        if CAREFUL:
            seen = log_sum != float("inf")
        q = load_rows(queries.query, start, reach.end, QUERY_ROWS, PARTIAL, reach.begin, features.banded, seen)
        log_rest = load_statistics(statistics.log_rest, start, place.length_q, 0.0, BLOCK_M, PARTIAL)
        products, slope = capped(tl.dot(keys.k, tl.trans(q), input_precision=features.precision), factors, features)
        added = key_bias
        if features.bias == "full":
            added = load_bias(head, own_queries, own_keys, True, PARTIAL)
        p = probabilities(products, added, factors, log_sum[None, :], log_rest[None, :], features.natural)
        if PARTIAL:
            q_marks = query_marks(head, own_queries, features)
            visible = visibility(head, q_marks, keys.marks, own_keys, own_queries, start, features, True)
            p = tl.where(visible, p, 0.0)
        keep = True
        kept_p = p
        if features.dropout:
            keep = tl.trans(dropout_keep(head.dropout, start, keys.start, shape, features))
            kept_p = tl.where(keep, p, 0.0)
        do = load_rows(queries.grad_out, start, reach.end, OUT_ROWS, PARTIAL, reach.begin, features.banded, seen)
        dv = tl.dot(kept_p.to(do.dtype), do, dv, input_precision=features.precision)
        delta = load_statistics(statistics.delta, start, place.length_q, 0.0, BLOCK_M, PARTIAL)
        grad_p = tl.dot(keys.v, tl.trans(do), input_precision=features.precision)
        ds = score_gradient(p, grad_p, delta[None, :], keep, head.dropout, features.dropout)
        if PARTIAL:
            ds = tl.where(visible, ds, 0.0)
            if features.softcap:
                slope = tl.where(visible, slope, 0.0)
        if KEY_SUMS:
            key_sum += tl.sum(ds, 1)
        if features.softcap:
            ds *= slope
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=features.precision)
    return Sums(dk, dv, key_sum)


@triton.jit
def gather_group(
    block, inputs, key_sums, lengths, operands, shape: tl.constexpr, features: tl.constexpr, CAREFUL: tl.constexpr
):
    """Return dk and dv of a block, over the query heads that read it; write each head's sums of dS unless `key_sums` is None."""
    BLOCK_N: tl.constexpr = shape.block_n
    PADDED_HEAD: tl.constexpr = shape.padded_head
    PADDED_VALUE: tl.constexpr = shape.padded_value
    GROUP: tl.constexpr = features.group
    KEY_SUMS: tl.constexpr = key_sums is not None
    place, statistics = block.place, inputs.statistics
    key_grad = tl.zeros((BLOCK_N, PADDED_HEAD), tl.float32)
    value_grad = tl.zeros((BLOCK_N, PADDED_VALUE), tl.float32)
    for member in tl.range(GROUP):
        index = place.head * GROUP + member
        every_head = place.batch.to(tl.int64) * lengths.heads + index
        first = every_head * lengths.seqlen_q + place.q_begin
        queries = Queries(
            rows_in(inputs.query, place.batch, index, place.q_begin),
            rows_in(inputs.grad_out, place.batch, index, place.q_begin),
            statistics_of(statistics.log_sum, statistics.log_rest, statistics.delta, first),
        )
        head = head_of(operands, place, index, block.start, block.band, features)
        marks = key_marks(head, block.start + tl.arange(0, BLOCK_N), features)
        keys = Keys(block.k, block.v, marks, block.start, block.last)
        walk = plan_walk(head, block.start, block.last, operands.lists, shape, features, True)
        sums = Sums(key_grad, value_grad, tl.zeros((BLOCK_N,), tl.float32))
        for PARTIAL in tl.static_range(2):
            part = part_of(walk, PARTIAL)
            sums = gather_queries(sums, keys, queries, part, head, shape, features, KEY_SUMS, PARTIAL, CAREFUL)
        if KEY_SUMS:
            rows = block.start + tl.arange(0, BLOCK_N)
            head_sums = key_sums + every_head * lengths.seqlen_k + place.k_begin
            tl.store(head_sums + rows, sums.ds, mask=rows < place.length_k)
        key_grad = sums.dk
        value_grad = sums.dv
    return key_grad, value_grad


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def keys_kernel(
    query, key, value, bias, grad_out, log_sum, log_rest, delta, dk, dv, key_sums, tiles, bits,
    q_segments, k_segments, start, end, hidden_from, hidden_to, seed, cu_seqlens_q, cu_seqlens_k,
    query_b, query_s, query_h, key_b, key_s, key_h, value_b, value_s, value_h, grad_out_b, grad_out_s, grad_out_h,
    dk_b, dk_s, dk_h, dv_b, dv_s, dv_h,
    bias_b, bias_h, bias_q, bias_group, tiles_b, tiles_h, tiles_w, bits_b, bits_h, bits_r, mask_group,
    q_segments_b, keys_b, keys_h, key_group, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin,
    blocks, heads, seqlen_q, seqlen_k, longest_q, longest_k, band_lo, band_hi, ratio, factor, softmax_scale,
    shape: tl.constexpr, features: tl.constexpr,
):  # fmt: skip
    """Write dk and dv of one block of keys of one key head, and the sums of dS over the queries `[B, H, Sk]`."""
    KEY_ROWS: tl.constexpr = shape.key_rows
    VALUE_ROWS: tl.constexpr = shape.value_rows
    lengths = Lengths(heads, seqlen_q, seqlen_k, longest_q, longest_k, cu_seqlens_q, cu_seqlens_k)
    lists = Lists(tiles, tiles_b, tiles_h, tiles_w, mask_group)
    operands = Operands(
        lists,
        MaskArrays(
            BitArray(bits, bits_b, bits_h, bits_r, mask_group),
            KeyArrays(k_segments, start, end, hidden_from, hidden_to, keys_b, keys_h, key_group),
            q_segments,
            q_segments_b,
        ),
        BiasArray(bias, bias_b, bias_h, bias_q, bias_group),
        Seeds(seed, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin),
        Factors(ratio, factor),
    )
    place, start_k = program_of(tl.program_id(0), tl.arange(0, SEARCHED), blocks, lengths, lists, shape, features, True)
    if start_k >= place.length_k:
        return

    BLOCK_N: tl.constexpr = shape.block_n
    PADDED_HEAD: tl.constexpr = shape.padded_head
    PADDED_VALUE: tl.constexpr = shape.padded_value
    inputs = Inputs(
        Array(query, query_b, query_s, query_h), Array(key, key_b, key_s, key_h), Array(value, value_b, value_s, value_h),
        Array(grad_out, grad_out_b, grad_out_s, grad_out_h), Statistics(log_sum, log_rest, delta), Band(band_lo, band_hi),
    )  # fmt: skip
    key = rows_in(inputs.key, place.batch, place.head, place.k_begin)
    value = rows_in(inputs.value, place.batch, place.head, place.k_begin)
    k = load_rows(key, start_k, place.length_k, KEY_ROWS, True)
    v = load_rows(value, start_k, place.length_k, VALUE_ROWS, True)
    last_k = last_owned(place, start_k, shape, True)
    block = Block(k, v, start_k, last_k, place, band_of(inputs.band, place, True))
    key_grad = tl.zeros((BLOCK_N, PADDED_HEAD), tl.float32)
    value_grad = tl.zeros((BLOCK_N, PADDED_VALUE), tl.float32)
    WALKS: tl.constexpr = 1 if features.mask == "none" else 2
    for CAREFUL in tl.static_range(WALKS):
        wanted = True
        if CAREFUL:
            wanted = some_nan(key_grad) | some_nan(value_grad)
        if wanted:
            key_grad, value_grad = gather_group(block, inputs, key_sums, lengths, operands, shape, features, CAREFUL)

    if features.dropout:
        value_grad *= rescale
    dk = rows_of(dk, dk_b, dk_s, dk_h, place.batch, place.head, place.k_begin)
    dv = rows_of(dv, dv_b, dv_s, dv_h, place.batch, place.head, place.k_begin)
    store_rows(dk, start_k, place.length_k, key_grad * softmax_scale, KEY_ROWS)
    store_rows(dv, start_k, place.length_k, value_grad, VALUE_ROWS)
