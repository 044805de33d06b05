"""dq in plain Triton: each program computes a block of queries and walks the keys.

It also writes dS, where each of its elements is the gradient of one element of a bias.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dmattn_ops.kernels.portable.arguments import ROW_TENSORS, UNSPECIALIZED
from dmattn_ops.kernels.portable.dropout import Seeds, dropout_keep, dropout_of
from dmattn_ops.kernels.portable.heads import Head, Operands, program_of
from dmattn_ops.kernels.portable.places import (
    SEARCHED,
    Band,
    Lengths,
    Lists,
    band_of,
    head_offset,
    last_owned,
    part_of,
    plan_walk,
    record_of,
    walked_start,
)
from dmattn_ops.kernels.portable.primitives import (
    KeyRows,
    Statistics,
    load_rows,
    load_statistics,
    rows_of,
    statistics_of,
    store_rows,
    store_scores,
)
from dmattn_ops.kernels.portable.scores import (
    Bias,
    BiasArray,
    Factors,
    bias_of,
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
    mask_of_head,
    query_marks,
    rows_in_reach,
    some_nan,
    visibility,
)


class Queries(NamedTuple):
    """A block of queries and what the gradient of its scores needs of it."""

    q: Any
    grad_out: Any
    statistics: Any  # Statistics
    marks: Any
    start: Any
    last: Any


@triton.jit
def load_queries(query, grad_out, statistics, start_q, head, shape: tl.constexpr, features: tl.constexpr):
    """Load a block of queries. Past the end, rows have probabilities of 0."""
    QUERY_ROWS: tl.constexpr = shape.query_rows
    OUT_ROWS: tl.constexpr = shape.out_rows
    BLOCK_M: tl.constexpr = shape.block_m
    end = head.place.length_q
    q = load_rows(query, start_q, end, QUERY_ROWS, True)
    do = load_rows(grad_out, start_q, end, OUT_ROWS, True)
    loaded = Statistics(
        load_statistics(statistics.log_sum, start_q, end, float("inf"), BLOCK_M, True),
        load_statistics(statistics.log_rest, start_q, end, 0.0, BLOCK_M, True),
        load_statistics(statistics.delta, start_q, end, 0.0, BLOCK_M, True),
    )
    marks = query_marks(head, start_q + tl.arange(0, BLOCK_M), features)
    return Queries(q, do, loaded, marks, start_q, last_owned(head.place, start_q, shape, False))


@triton.jit
def step_gradient(queries, k, v, start, head, shape: tl.constexpr, features: tl.constexpr, PARTIAL: tl.constexpr):
    """Return dS of the keys `start ...`, the derivative of the soft cap, and what of the step is visible where it is `PARTIAL`."""
    rows, factors = queries.statistics, head.factors
    own_queries, own_keys = queries.start + tl.arange(0, shape.block_m), start + tl.arange(0, shape.block_n)
    products, slope = capped(tl.dot(queries.q, tl.trans(k), input_precision=features.precision), factors, features)
    added = 0.0
    if features.bias == "key":
        added = load_key_bias(head, own_keys)[None, :]
    if features.bias == "full":
        added = load_bias(head, own_queries, own_keys, False, PARTIAL)
    p = probabilities(products, added, factors, rows.log_sum[:, None], rows.log_rest[:, None], features.natural)
    if PARTIAL:
        k_marks = key_marks(head, own_keys, features)
        visible = visibility(head, queries.marks, k_marks, own_queries, own_keys, start, features, False)
        p = tl.where(visible, p, 0.0)
    else:
        visible = True
    keep = True
    if features.dropout:
        keep = dropout_keep(head.dropout, queries.start, start, shape, features)
    grad_p = tl.dot(queries.grad_out, tl.trans(v), input_precision=features.precision)
    ds = score_gradient(p, grad_p, rows.delta[:, None], keep, head.dropout, features.dropout)
    if PARTIAL:
        ds = tl.where(visible, ds, 0.0)
        if features.softcap:
            slope = tl.where(visible, slope, 0.0)
    return ds, slope, visible


@triton.jit
def gather_keys(
    dq,
    queries,
    keys,
    part,
    head,
    dbias,
    shape: tl.constexpr,
    features: tl.constexpr,
    PARTIAL: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Add the keys of one part of the walk to dq, and store their dS into `dbias` unless that is None.

    `CAREFUL`: keys that nobody of the block sees may be NaN.
    """
    KEY_ROWS: tl.constexpr = shape.key_rows
    VALUE_ROWS: tl.constexpr = shape.value_rows
    BLOCK_N: tl.constexpr = shape.block_n
    place = head.place
    reach = rows_in_reach(head.mask, queries.start, queries.last, place.length_k, features)
    for step in tl.range(part.begin, part.end):
        start = walked_start(part, step, BLOCK_N, features)
        k = load_rows(keys.key, start, reach.end, KEY_ROWS, PARTIAL, reach.begin, features.banded)
        v = load_rows(keys.value, start, place.length_k, VALUE_ROWS, PARTIAL)
        ds, slope, visible = step_gradient(queries, k, v, start, head, shape, features, PARTIAL)
        if dbias is not None:
            store_scores(dbias, ds, queries.start + tl.arange(0, shape.block_m), start + tl.arange(0, BLOCK_N), place)
        if features.softcap:
            ds *= slope
        if PARTIAL and CAREFUL:
            seen = tl.max(visible.to(tl.int32), 0) != 0
            k = load_rows(keys.key, start, reach.end, KEY_ROWS, PARTIAL, reach.begin, features.banded, seen)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=features.precision)
    return dq


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def queries_kernel(
    query, key, value, bias, grad_out, log_sum, log_rest, delta, dq, dbias, tiles, bits,
    q_segments, k_segments, start, end, hidden_from, hidden_to, seed, cu_seqlens_q, cu_seqlens_k,
    query_b, query_s, query_h, key_b, key_s, key_h, value_b, value_s, value_h, grad_out_b, grad_out_s, grad_out_h,
    dq_b, dq_s, dq_h, dbias_b, dbias_h, dbias_q,
    bias_b, bias_h, bias_q, bias_group, tiles_b, tiles_h, tiles_w, bits_b, bits_h, bits_r, mask_group,
    q_segments_b, keys_b, keys_h, key_group, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin,
    blocks, heads, seqlen_q, seqlen_k, longest_q, longest_k, band_lo, band_hi, ratio, factor, softmax_scale,
    shape: tl.constexpr, features: tl.constexpr,
):  # fmt: skip
    """Write dq of one block of queries, and its dS into `dbias` `[B, H, Sq, Sk]` unless that is None."""
    QUERY_ROWS: tl.constexpr = shape.query_rows
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
    place, start_q = program_of(
        tl.program_id(0), tl.arange(0, SEARCHED), blocks, lengths, lists, shape, features, False
    )
    if start_q >= place.length_q:
        return

    BLOCK_M: tl.constexpr = shape.block_m
    PADDED_HEAD: tl.constexpr = shape.padded_head
    query = rows_of(query, query_b, query_s, query_h, place.batch, place.head, place.q_begin)
    grad_out = rows_of(grad_out, grad_out_b, grad_out_s, grad_out_h, place.batch, place.head, place.q_begin)
    kv_head = place.head // features.group
    keys = KeyRows(
        rows_of(key, key_b, key_s, key_h, place.batch, kv_head, place.k_begin),
        rows_of(value, value_b, value_s, value_h, place.batch, kv_head, place.k_begin),
    )
    first = (place.batch.to(tl.int64) * heads + place.head) * seqlen_q + place.q_begin
    # What `heads.head_of` reads, with the addresses of dbias in between: in another order ptxas makes other code for SM 8.0.
    record = record_of(lists, place, place.head, start_q, features)
    bias = bias_of(operands.bias, place, place.head, features)
    head_dbias = None
    if dbias is not None:
        head_dbias = Bias(dbias + head_offset(place.batch, place.head, dbias_b, dbias_h), dbias_q)
    dropout = dropout_of(operands.seeds, place, place.head, features)
    band = band_of(Band(band_lo, band_hi), place, False)
    mask = mask_of_head(operands.mask, place, place.head, band, features)
    head = Head(place, record, bias, dropout, mask, operands.factors)
    last_q = last_owned(place, start_q, shape, False)
    walk = plan_walk(head, start_q, last_q, lists, shape, features, False)
    statistics = statistics_of(log_sum, log_rest, delta, first)
    queries = load_queries(query, grad_out, statistics, start_q, head, shape, features)
    query_grad = tl.zeros((BLOCK_M, PADDED_HEAD), tl.float32)
    for PARTIAL in tl.static_range(2):
        part = part_of(walk, PARTIAL)
        query_grad = gather_keys(query_grad, queries, keys, part, head, head_dbias, shape, features, PARTIAL, False)
    if features.mask != "none":
        if some_nan(query_grad):
            query_grad = tl.zeros((BLOCK_M, PADDED_HEAD), tl.float32)
            for PARTIAL in tl.static_range(2):
                part = part_of(walk, PARTIAL)
                query_grad = gather_keys(query_grad, queries, keys, part, head, None, shape, features, PARTIAL, True)
    dq = rows_of(dq, dq_b, dq_s, dq_h, place.batch, place.head, place.q_begin)
    store_rows(dq, start_q, place.length_q, query_grad * softmax_scale, QUERY_ROWS)
