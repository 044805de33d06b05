"""dq in plain Triton: each program computes a block of queries and walks the keys.

It also writes dS, where each of its elements is the gradient of one element of a bias.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dmattn_ops.kernels.portable.arguments import ROW_TENSORS, UNSPECIALIZED
from dmattn_ops.kernels.portable.dropout import Dropout, dropout_keep
from dmattn_ops.kernels.portable.places import (
    TILE,
    Lengths,
    head_offset,
    head_rows,
    owned_start,
    part_of,
    place_of,
    plan_walk,
    walked_start,
)
from dmattn_ops.kernels.portable.primitives import (
    Features,
    Rows,
    Shape,
    load_rows,
    load_statistics,
    store_rows,
    store_scores,
)
from dmattn_ops.kernels.portable.scores import (
    Bias,
    Factors,
    capped,
    load_bias,
    load_key_bias,
    probabilities,
    score_gradient,
)
from dmattn_ops.kernels.portable.visibility import (
    MaskArrays,
    key_marks,
    mask_of_head,
    met_rows,
    query_marks,
    some_nan,
    visibility,
)


class Queries(NamedTuple):
    """A block of queries and what the gradient of its scores needs of it."""

    q: Any
    grad_out: Any
    log_sum: Any
    log_rest: Any
    delta: Any
    marks: Any
    start: Any
    last: Any


@triton.jit
def load_queries(
    query, grad_out, log_sum, log_rest, delta, start_q, place, mask, shape: tl.constexpr, features: tl.constexpr
):  # fmt: skip
    """Load a block of queries. Past the end, rows have probabilities of 0."""
    BLOCK_M: tl.constexpr = shape.block_m
    end = place.length_q
    q = load_rows(query, start_q, end, BLOCK_M, shape.head_dim, shape.padded_head, shape.aligned, True)
    do = load_rows(grad_out, start_q, end, BLOCK_M, shape.value_dim, shape.padded_value, shape.aligned, True)
    row_log_sum = load_statistics(log_sum, start_q, end, float("inf"), BLOCK_M, True)
    row_log_rest = load_statistics(log_rest, start_q, end, 0.0, BLOCK_M, True)
    row_delta = load_statistics(delta, start_q, end, 0.0, BLOCK_M, True)
    marks, last = query_marks(mask, start_q, end, BLOCK_M, features), tl.minimum(start_q + BLOCK_M, end) - 1
    return Queries(q, do, row_log_sum, row_log_rest, row_delta, marks, start_q, last)


@triton.jit
def step_gradient(
    queries, k, v, start, place, mask, bias, factors, dropout, shape: tl.constexpr, features: tl.constexpr, PARTIAL: tl.constexpr
):  # fmt: skip
    """Return dS of the keys `start ...`, the derivative of the soft cap, and what of the step is visible where it is `PARTIAL`."""
    BLOCK_M: tl.constexpr = shape.block_m
    BLOCK_N: tl.constexpr = shape.block_n
    products, slope = capped(tl.dot(queries.q, tl.trans(k), input_precision=features.precision), factors, features)
    added = 0.0
    if features.bias == "key":
        added = load_key_bias(bias, start, place.length_k, BLOCK_N)[None, :]
    if features.bias == "full":
        added = load_bias(bias, queries.start, start, place.length_q, place.length_k, BLOCK_M, BLOCK_N, False, PARTIAL)
    p = probabilities(products, added, factors, queries.log_sum[:, None], queries.log_rest[:, None], features.natural)
    if PARTIAL:
        k_marks = key_marks(mask, start, place.length_k, place.length_q, BLOCK_N, features)
        visible = visibility(
            mask, queries.marks, k_marks, queries.start, start, place.length_k, BLOCK_M, BLOCK_N, False, features
        )
        p = tl.where(visible, p, 0.0)
    else:
        visible = True
    keep = True
    if features.dropout:
        keep = dropout_keep(dropout, queries.start, start, BLOCK_M, BLOCK_N, features.whole_groups)
    grad_p = tl.dot(queries.grad_out, tl.trans(v), input_precision=features.precision)
    ds = score_gradient(p, grad_p, queries.delta[:, None], keep, dropout, features.dropout)
    if PARTIAL:
        ds = tl.where(visible, ds, 0.0)
        if features.softcap:
            slope = tl.where(visible, slope, 0.0)
    return ds, slope, visible


@triton.jit
def gather_keys(
    dq, queries, key, value, part, place, mask, bias, dbias, factors, dropout, shape: tl.constexpr, features: tl.constexpr,
    STORE_DBIAS: tl.constexpr, PARTIAL: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Add the keys of one part of the walk to dq, and store their dS where `STORE_DBIAS`.

    `CAREFUL`: keys that nobody of the block sees may be NaN.
    """
    BLOCK_M: tl.constexpr = shape.block_m
    BLOCK_N: tl.constexpr = shape.block_n
    first_met, end_met = met_rows(mask, queries.start, queries.last, place.length_k, features)
    for step in tl.range(part.steps):
        start = walked_start(part, step, BLOCK_N, features.listed)
        k = load_rows(
            key, start, end_met, BLOCK_N, shape.head_dim, shape.padded_head, shape.aligned, PARTIAL,
            first_met, features.banded,
        )  # fmt: skip
        v = load_rows(
            value, start, place.length_k, BLOCK_N, shape.value_dim, shape.padded_value, shape.aligned, PARTIAL
        )
        ds, slope, visible = step_gradient(
            queries, k, v, start, place, mask, bias, factors, dropout, shape, features, PARTIAL
        )
        if STORE_DBIAS:
            store_scores(
                dbias.start, dbias.query_stride, dbias.key_stride, queries.start, start,
                place.length_q, place.length_k, ds, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        if features.softcap:
            ds *= slope
        if PARTIAL and CAREFUL:
            k = load_rows(
                key, start, end_met, BLOCK_N, shape.head_dim, shape.padded_head, shape.aligned, PARTIAL,
                first_met, features.banded, tl.max(visible.to(tl.int32), 0) != 0, CAREFUL,
            )  # fmt: skip
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=features.precision)
    return dq


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def queries_kernel(
    query,
    key,
    value,
    bias,
    grad_out,
    log_sum,
    log_rest,
    delta,
    dq,
    dbias,
    tiles,
    bits,
    q_segments,
    k_segments,
    start,
    end,
    hidden_from,
    hidden_to,
    seed,
    cu_seqlens_q,
    cu_seqlens_k,
    query_b,
    query_s,
    query_h,
    key_b,
    key_s,
    key_h,
    value_b,
    value_s,
    value_h,
    grad_out_b,
    grad_out_s,
    grad_out_h,
    dq_b,
    dq_s,
    dq_h,
    dbias_b,
    dbias_h,
    dbias_q,
    dbias_k,
    bias_b,
    bias_h,
    bias_q,
    bias_k,
    bias_group,
    tiles_b,
    tiles_h,
    tiles_r,
    tiles_w,
    bits_b,
    bits_h,
    bits_r,
    mask_group,
    q_segments_b,
    keys_b,
    keys_h,
    key_group,
    seed_b,
    seed_h,
    last_dropped,
    rescale,
    q_origin,
    k_origin,
    blocks,
    heads,
    seqlen_q,
    seqlen_k,
    longest_q,
    longest_k,
    band_lo,
    band_hi,
    ratio,
    factor,
    softmax_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_HEAD: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    ALIGNED: tl.constexpr,
    GROUP: tl.constexpr,
    VARLEN: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    LISTED: tl.constexpr,
    MASK: tl.constexpr,
    QUERY_SEGMENTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BANDED: tl.constexpr,
    BIAS: tl.constexpr,
    NATURAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
    WHOLE_GROUPS: tl.constexpr,
    PRECISION: tl.constexpr,
    STORE_DBIAS: tl.constexpr,
):
    """Write dq of one block of queries."""
    shape: tl.constexpr = Shape(BLOCK_M, BLOCK_N, HEAD_DIM, VALUE_DIM, PADDED_HEAD, PADDED_VALUE, ALIGNED)
    features: tl.constexpr = Features(
        LISTED, MASK, QUERY_SEGMENTS, HIDDEN, BANDED, BIAS, NATURAL, SOFTCAP, DROPOUT, WHOLE_GROUPS, PRECISION
    )
    lengths = Lengths(seqlen_q, seqlen_k, longest_q, longest_k, cu_seqlens_q, cu_seqlens_k)
    arrays = MaskArrays(
        bits, bits_b, bits_h, bits_r, mask_group, q_segments, q_segments_b,
        k_segments, start, end, hidden_from, hidden_to, keys_b, keys_h, key_group,
    )  # fmt: skip
    program = tl.program_id(0)
    place, block, blocks = place_of(program, blocks, heads, lengths, BLOCK_M, False, VARLEN, TOP_LEFT)
    head = place.head
    if LISTED:
        tiles += head_offset(place.batch, head // mask_group, tiles_b, tiles_h)
    start_q = owned_start(tiles, tiles_r, block, blocks, BLOCK_M, LISTED, True)
    if start_q >= place.length_q:
        return

    query = Rows(head_rows(query, place.batch, head, place.q_begin, query_b, query_s, query_h), query_s)
    grad_out = Rows(
        head_rows(grad_out, place.batch, head, place.q_begin, grad_out_b, grad_out_s, grad_out_h), grad_out_s
    )
    key = Rows(head_rows(key, place.batch, head // GROUP, place.k_begin, key_b, key_s, key_h), key_s)
    value = Rows(head_rows(value, place.batch, head // GROUP, place.k_begin, value_b, value_s, value_h), value_s)
    statistics = (place.batch.to(tl.int64) * heads + head) * seqlen_q + place.q_begin
    record = 0
    if LISTED:
        record = tiles + (start_q // TILE).to(tl.int64) * tiles_r
    head_bias = Bias(0, 0, 0)
    if BIAS != "none":
        head_bias = Bias(
            head_rows(bias, place.batch, head // bias_group, place.k_begin, bias_b, bias_k, bias_h), bias_q, bias_k
        )
    head_dbias = Bias(0, 0, 0)
    if STORE_DBIAS:
        head_dbias = Bias(dbias + head_offset(place.batch, head, dbias_b, dbias_h), dbias_q, dbias_k)
    dropout = Dropout(0, last_dropped, rescale, q_origin, k_origin)
    if DROPOUT:
        head_seed = tl.load(seed + head_offset(place.sequence, head, seed_b, seed_h))
        dropout = Dropout(head_seed, last_dropped, rescale, q_origin, k_origin)

    mask = mask_of_head(arrays, place, head, band_lo + place.shift, band_hi + place.shift, features)
    last_q = tl.minimum(start_q + BLOCK_M, place.length_q) - 1
    TEST_ALL: tl.constexpr = MASK == "segments" or MASK == "intervals"
    plan = plan_walk(record, tiles_w, start_q, last_q, mask.low, mask.high, place.length_k, BLOCK_N, LISTED, TEST_ALL)
    queries = load_queries(
        query, grad_out, log_sum + statistics, log_rest + statistics, delta + statistics, start_q, place, mask,
        shape, features,
    )  # fmt: skip
    query_grad = tl.zeros((BLOCK_M, PADDED_HEAD), tl.float32)
    for PARTIAL in tl.static_range(2):
        query_grad = gather_keys(
            query_grad, queries, key, value, part_of(plan, PARTIAL), place, mask, head_bias, head_dbias,
            Factors(ratio, factor), dropout, shape, features, STORE_DBIAS, PARTIAL, False,
        )  # fmt: skip
    if MASK != "none":
        if some_nan(query_grad):
            query_grad = tl.zeros((BLOCK_M, PADDED_HEAD), tl.float32)
            for PARTIAL in tl.static_range(2):
                query_grad = gather_keys(
                    query_grad, queries, key, value, part_of(plan, PARTIAL), place, mask, head_bias, head_dbias,
                    Factors(ratio, factor), dropout, shape, features, False, PARTIAL, True,
                )  # fmt: skip
    dq = Rows(head_rows(dq, place.batch, head, place.q_begin, dq_b, dq_s, dq_h), dq_s)
    store_rows(dq, start_q, place.length_q, query_grad * softmax_scale, BLOCK_M, HEAD_DIM, PADDED_HEAD, ALIGNED)
