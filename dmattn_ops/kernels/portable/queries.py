"""dq in plain Triton: each program computes a block of queries and loops over the keys.

It also writes dbias where a bias has one element for each score.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dmattn_ops.kernels.portable.arguments import ROW_TENSORS, UNSPECIALIZED
from dmattn_ops.kernels.portable.primitives import (
    TILE,
    dropout_keep,
    head_offset,
    head_rows,
    load_bias,
    load_key_bias,
    load_rows,
    load_statistics,
    owned_start,
    score_gradient,
    scores,
    segment_ids,
    sequences,
    store_block,
    store_rows,
    visibility,
    walk,
    walked_start,
)


@triton.jit
def step_gradient(
    q,
    do,
    k,
    v,
    start,
    keys,
    owned,
    mask,
    bias,
    numbers,
    dropout,
    SHAPE: tl.constexpr,
    MASK: tl.constexpr,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Return dS of the keys `start ...`, and the derivative of the softcap."""
    BLOCK_M: tl.constexpr = SHAPE[0]
    BLOCK_N: tl.constexpr = SHAPE[1]
    _, _, _, _, k_segments, length_k = keys
    start_q, length_q, q_ids, log_sum, delta = owned
    bias_pointer, bias_q, bias_k = bias
    raw = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    extra = 0.0
    if BIAS == "key":
        extra = load_key_bias(bias_pointer, start, bias_k, length_k, BLOCK_N)[None, :]
    elif BIAS == "full":
        extra = load_bias(bias_pointer, bias_q, bias_k, start_q, start, length_q, length_k, BLOCK_M, BLOCK_N, PARTIAL)
    score, slope = scores(raw, extra, numbers, SOFTCAP, BIAS)
    p = tl.exp2(score - log_sum[:, None])
    if PARTIAL:
        k_ids = segment_ids(k_segments, start, length_k, BLOCK_N, MASK[1])
        visible = visibility(mask, q_ids, k_ids, start_q, start, length_k, BLOCK_M, BLOCK_N, MASK)
        p = tl.where(visible, p, 0.0)
    keep = True
    if DROPOUT:
        keep = dropout_keep(dropout, start_q, start, BLOCK_M, BLOCK_N)
    grad_p = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    return score_gradient(p, grad_p, delta[:, None], keep, dropout, DROPOUT), slope


@triton.jit
def gather_keys(
    dq,
    q,
    do,
    keys,
    part,
    steps,
    owned,
    mask,
    bias,
    dbias,
    numbers,
    dropout,
    SHAPE: tl.constexpr,
    MASK: tl.constexpr,
    LISTED: tl.constexpr,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    STORE_DBIAS: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Add what one part of the loop over the keys contributes to dq, and store dS where `STORE_DBIAS`."""
    BLOCK_M: tl.constexpr = SHAPE[0]
    BLOCK_N: tl.constexpr = SHAPE[1]
    key, key_s, value, value_s, _, length_k = keys
    for step in tl.range(steps):
        start = walked_start(part, step, BLOCK_N, LISTED)
        k = load_rows(key, start, key_s, length_k, BLOCK_N, SHAPE[2], SHAPE[4], SHAPE[6], PARTIAL)
        v = load_rows(value, start, value_s, length_k, BLOCK_N, SHAPE[3], SHAPE[5], SHAPE[6], PARTIAL)
        ds, slope = step_gradient(
            q,
            do,
            k,
            v,
            start,
            keys,
            owned,
            mask,
            bias,
            numbers,
            dropout,
            SHAPE,
            MASK,
            BIAS,
            SOFTCAP,
            DROPOUT,
            PRECISION,
            PARTIAL,
        )
        if STORE_DBIAS:
            dbias_pointer, dbias_q, dbias_k = dbias
            store_block(dbias_pointer, dbias_q, dbias_k, owned[0], start, owned[1], length_k, ds, BLOCK_M, BLOCK_N)
        if SOFTCAP:
            ds *= slope
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def queries_kernel(
    query,
    key,
    value,
    bias,
    grad_out,
    log_sum,
    delta,
    dq,
    dbias,
    tiles,
    bits,
    q_segments,
    k_segments,
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
    bits_b,
    bits_h,
    bits_r,
    mask_group,
    q_segments_b,
    k_segments_b,
    k_segments_h,
    segment_group,
    blocks,
    heads,
    seqlen_q,
    seqlen_k,
    longest_q,
    longest_k,
    band_lo,
    band_hi,
    softmax_scale,
    softcap,
    threshold,
    rescale,
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
    BITS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    QUERY_SEGMENTS: tl.constexpr,
    BANDED: tl.constexpr,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    STORE_DBIAS: tl.constexpr,
):
    """Write dq of one block of queries."""
    program = tl.program_id(0)
    head = (program // blocks) % heads
    batch = program // blocks // heads
    row, q_begin, length_q, k_begin, length_k, shift = sequences(
        cu_seqlens_q, cu_seqlens_k, batch, seqlen_q, seqlen_k, longest_q, longest_k, VARLEN, TOP_LEFT
    )
    if LISTED:
        tiles += head_offset(row, head // mask_group, tiles_b, tiles_h)
    start_q = owned_start(tiles, tiles_r, program % blocks, blocks, BLOCK_M, LISTED, True)
    if start_q >= length_q:
        return

    query = head_rows(query, row, head, q_begin, query_b, query_s, query_h)
    grad_out = head_rows(grad_out, row, head, q_begin, grad_out_b, grad_out_s, grad_out_h)
    key = head_rows(key, row, head // GROUP, k_begin, key_b, key_s, key_h)
    value = head_rows(value, row, head // GROUP, k_begin, value_b, value_s, value_h)
    dq = head_rows(dq, row, head, q_begin, dq_b, dq_s, dq_h)
    statistics = (row.to(tl.int64) * heads + head) * seqlen_q + q_begin
    record = 0
    if LISTED:
        record = tiles + (start_q // TILE).to(tl.int64) * tiles_r
    if BITS:
        bits += head_offset(row, head // mask_group, bits_b, bits_h)
    if QUERY_SEGMENTS:
        q_segments += row.to(tl.int64) * q_segments_b + q_begin
    if SEGMENTS:
        k_segments += head_offset(row, head // segment_group, k_segments_b, k_segments_h) + k_begin
    if BIAS != "none":
        bias = head_rows(bias, row, head // bias_group, k_begin, bias_b, bias_k, bias_h)
    if STORE_DBIAS:
        dbias += head_offset(row, head, dbias_b, dbias_h)
    seed_value = 0
    if DROPOUT:
        seed_value = tl.load(seed)

    low = band_lo + shift
    high = band_hi + shift
    last_q = tl.minimum(start_q + BLOCK_M, length_q) - 1
    n_full, full_first, n_partial, partial_first, left, gap = walk(
        record, start_q, last_q, low, high, length_k, BLOCK_N, LISTED, SEGMENTS
    )
    q = load_rows(query, start_q, query_s, length_q, BLOCK_M, HEAD_DIM, PADDED_HEAD, ALIGNED, True)
    do = load_rows(grad_out, start_q, grad_out_s, length_q, BLOCK_M, VALUE_DIM, PADDED_VALUE, ALIGNED, True)
    row_log_sum = load_statistics(log_sum + statistics, start_q, length_q, float("inf"), BLOCK_M, True)
    row_delta = load_statistics(delta + statistics, start_q, length_q, 0.0, BLOCK_M, True)
    q_ids = segment_ids(q_segments, start_q, length_q, BLOCK_M, QUERY_SEGMENTS)
    SHAPE: tl.constexpr = (BLOCK_M, BLOCK_N, HEAD_DIM, VALUE_DIM, PADDED_HEAD, PADDED_VALUE, ALIGNED)
    MASK: tl.constexpr = (BITS, SEGMENTS, BANDED)
    query_grad = tl.zeros((BLOCK_M, PADDED_HEAD), tl.float32)
    for PARTIAL in tl.static_range(2):
        query_grad = gather_keys(
            query_grad,
            q,
            do,
            (key, key_s, value, value_s, k_segments, length_k),
            (record, partial_first, left, gap) if PARTIAL else (record, full_first, 0, 0),
            n_partial if PARTIAL else n_full,
            (start_q, length_q, q_ids, row_log_sum, row_delta),
            (bits, bits_r, low, high),
            (bias, bias_q, bias_k),
            (dbias, dbias_q, dbias_k),
            (softmax_scale, softcap),
            (seed_value, threshold, rescale, batch * heads + head),
            SHAPE,
            MASK,
            LISTED,
            BIAS,
            SOFTCAP,
            DROPOUT,
            PRECISION,
            STORE_DBIAS,
            PARTIAL,
        )
    store_rows(dq, start_q, dq_s, length_q, query_grad * softmax_scale, BLOCK_M, HEAD_DIM, PADDED_HEAD, ALIGNED)
