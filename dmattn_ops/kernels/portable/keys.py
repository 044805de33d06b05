"""dk and dv in plain Triton: each program computes a block of keys and loops over the queries of every head that reads it.

Scores are computed transposed, `[keys, queries]`, so that P and dS can be the left operand of the products for dv and dk
without another transposition.
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
    store_rows,
    visibility,
    walk,
    walked_start,
)


@triton.jit
def gather_queries(
    dk,
    dv,
    key_sum,
    k,
    v,
    queries,
    part,
    steps,
    owned,
    mask,
    bias,
    numbers,
    dropout,
    SHAPE: tl.constexpr,
    MASK: tl.constexpr,
    LISTED: tl.constexpr,
    QUERY_SEGMENTS: tl.constexpr,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    KEY_SUMS: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Add what one part of the loop over the queries contributes to `(dk, dv, key_sum)`."""
    BLOCK_M: tl.constexpr = SHAPE[0]
    BLOCK_N: tl.constexpr = SHAPE[1]
    query, query_s, grad_out, grad_out_s, log_sum, delta, q_segments, length_q = queries
    start_k, length_k, k_ids = owned
    bias_pointer, bias_q, bias_k = bias
    key_bias = 0.0
    if BIAS == "key":
        key_bias = load_key_bias(bias_pointer, start_k, bias_k, length_k, BLOCK_N)[:, None]
    for step in tl.range(steps):
        start = walked_start(part, step, BLOCK_M, LISTED)
        q = load_rows(query, start, query_s, length_q, BLOCK_M, SHAPE[2], SHAPE[4], SHAPE[6], PARTIAL)
        row_log_sum = load_statistics(log_sum, start, length_q, float("inf"), BLOCK_M, PARTIAL)
        raw = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        extra = key_bias
        if BIAS == "full":
            extra = load_bias(
                bias_pointer, bias_k, bias_q, start_k, start, length_k, length_q, BLOCK_N, BLOCK_M, PARTIAL
            )
        score, slope = scores(raw, extra, numbers, SOFTCAP, BIAS)
        p = tl.exp2(score - row_log_sum[None, :])
        if PARTIAL:
            q_ids = segment_ids(q_segments, start, length_q, BLOCK_M, QUERY_SEGMENTS)
            visible = visibility(mask, k_ids, q_ids, start_k, start, length_q, BLOCK_N, BLOCK_M, MASK)
            p = tl.where(visible, p, 0.0)
        keep = True
        kept_p = p
        if DROPOUT:
            keep = tl.trans(dropout_keep(dropout, start, start_k, BLOCK_M, BLOCK_N))
            kept_p = tl.where(keep, p, 0.0)
        do = load_rows(grad_out, start, grad_out_s, length_q, BLOCK_M, SHAPE[3], SHAPE[5], SHAPE[6], PARTIAL)
        dv = tl.dot(kept_p.to(do.dtype), do, dv, input_precision=PRECISION)
        row_delta = load_statistics(delta, start, length_q, 0.0, BLOCK_M, PARTIAL)
        grad_p = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        ds = score_gradient(p, grad_p, row_delta[None, :], keep, dropout, DROPOUT)
        if KEY_SUMS:
            key_sum += tl.sum(ds, 1)
        if SOFTCAP:
            ds *= slope
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv, key_sum


@triton.jit
def gather_head(
    dk,
    dv,
    k,
    v,
    queries,
    record,
    owned,
    mask,
    bias,
    numbers,
    dropout,
    key_sums,
    SHAPE: tl.constexpr,
    MASK: tl.constexpr,
    LISTED: tl.constexpr,
    QUERY_SEGMENTS: tl.constexpr,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    KEY_SUMS: tl.constexpr,
):
    """Add what one query head contributes to `(dk, dv)`, and write its sums of dS over the queries."""
    BLOCK_N: tl.constexpr = SHAPE[1]
    start_k, length_k, _ = owned
    _, _, low, high = mask
    last_k = tl.minimum(start_k + BLOCK_N, length_k) - 1
    n_full, full_first, n_partial, partial_first, left, gap = walk(
        record, start_k, last_k, low, high, queries[7], SHAPE[0], LISTED, MASK[1]
    )
    key_sum = tl.zeros((BLOCK_N,), tl.float32)
    for PARTIAL in tl.static_range(2):
        dk, dv, key_sum = gather_queries(
            dk,
            dv,
            key_sum,
            k,
            v,
            queries,
            (record, partial_first, left, gap) if PARTIAL else (record, full_first, 0, 0),
            n_partial if PARTIAL else n_full,
            owned,
            mask,
            bias,
            numbers,
            dropout,
            SHAPE,
            MASK,
            LISTED,
            QUERY_SEGMENTS,
            BIAS,
            SOFTCAP,
            DROPOUT,
            PRECISION,
            KEY_SUMS,
            PARTIAL,
        )
    if KEY_SUMS:
        keys = start_k + tl.arange(0, BLOCK_N)
        tl.store(key_sums + keys, key_sum, mask=keys < length_k)
    return dk, dv


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def keys_kernel(
    query,
    key,
    value,
    bias,
    grad_out,
    log_sum,
    delta,
    dk,
    dv,
    key_sums,
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
    dk_b,
    dk_s,
    dk_h,
    dv_b,
    dv_s,
    dv_h,
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
    KEY_SUMS: tl.constexpr,
):
    """Write dk and dv of one block of keys of one key head, and the sums of dS over the queries `[B, H, Sk]`."""
    program = tl.program_id(0)
    kv_heads = heads // GROUP
    kv_head = (program // blocks) % kv_heads
    batch = program // blocks // kv_heads
    row, q_begin, length_q, k_begin, length_k, shift = sequences(
        cu_seqlens_q, cu_seqlens_k, batch, seqlen_q, seqlen_k, longest_q, longest_k, VARLEN, TOP_LEFT
    )
    ranking = 0
    if LISTED:
        ranking = tiles + head_offset(row, kv_head * GROUP // mask_group, tiles_b, tiles_h)
    start_k = owned_start(ranking, tiles_r, program % blocks, blocks, BLOCK_N, LISTED, False)
    if start_k >= length_k:
        return

    key = head_rows(key, row, kv_head, k_begin, key_b, key_s, key_h)
    value = head_rows(value, row, kv_head, k_begin, value_b, value_s, value_h)
    k = load_rows(key, start_k, key_s, length_k, BLOCK_N, HEAD_DIM, PADDED_HEAD, ALIGNED, True)
    v = load_rows(value, start_k, value_s, length_k, BLOCK_N, VALUE_DIM, PADDED_VALUE, ALIGNED, True)
    key_grad = tl.zeros((BLOCK_N, PADDED_HEAD), tl.float32)
    value_grad = tl.zeros((BLOCK_N, PADDED_VALUE), tl.float32)
    SHAPE: tl.constexpr = (BLOCK_M, BLOCK_N, HEAD_DIM, VALUE_DIM, PADDED_HEAD, PADDED_VALUE, ALIGNED)
    MASK: tl.constexpr = (BITS, SEGMENTS, BANDED)
    seed_value = 0
    if DROPOUT:
        seed_value = tl.load(seed)

    for member in tl.range(GROUP):
        head = kv_head * GROUP + member
        head_query = head_rows(query, row, head, q_begin, query_b, query_s, query_h)
        head_grad_out = head_rows(grad_out, row, head, q_begin, grad_out_b, grad_out_s, grad_out_h)
        every_head = row.to(tl.int64) * heads + head
        statistics = every_head * seqlen_q + q_begin
        record = 0
        head_bits = 0
        head_q_segments = 0
        head_k_segments = 0
        head_bias = 0
        head_sums = 0
        if LISTED:
            record = tiles + head_offset(row, head // mask_group, tiles_b, tiles_h)
            record += (start_k // TILE).to(tl.int64) * tiles_r
        if BITS:
            head_bits = bits + head_offset(row, head // mask_group, bits_b, bits_h)
        if QUERY_SEGMENTS:
            head_q_segments = q_segments + row.to(tl.int64) * q_segments_b + q_begin
        if SEGMENTS:
            head_k_segments = k_segments + head_offset(row, head // segment_group, k_segments_b, k_segments_h) + k_begin
        if BIAS != "none":
            head_bias = head_rows(bias, row, head // bias_group, k_begin, bias_b, bias_k, bias_h)
        if KEY_SUMS:
            head_sums = key_sums + every_head * seqlen_k + k_begin
        k_ids = segment_ids(head_k_segments, start_k, length_k, BLOCK_N, SEGMENTS)
        key_grad, value_grad = gather_head(
            key_grad,
            value_grad,
            k,
            v,
            (
                head_query,
                query_s,
                head_grad_out,
                grad_out_s,
                log_sum + statistics,
                delta + statistics,
                head_q_segments,
                length_q,
            ),
            record,
            (start_k, length_k, k_ids),
            (head_bits, bits_r, -(band_hi + shift), -(band_lo + shift)),
            (head_bias, bias_q, bias_k),
            (softmax_scale, softcap),
            (seed_value, threshold, rescale, batch * heads + head),
            head_sums,
            SHAPE,
            MASK,
            LISTED,
            QUERY_SEGMENTS,
            BIAS,
            SOFTCAP,
            DROPOUT,
            PRECISION,
            KEY_SUMS,
        )

    if DROPOUT:
        value_grad *= rescale
    dk = head_rows(dk, row, kv_head, k_begin, dk_b, dk_s, dk_h)
    dv = head_rows(dv, row, kv_head, k_begin, dv_b, dv_s, dv_h)
    store_rows(dk, start_k, dk_s, length_k, key_grad * softmax_scale, BLOCK_N, HEAD_DIM, PADDED_HEAD, ALIGNED)
    store_rows(dv, start_k, dv_s, length_k, value_grad, BLOCK_N, VALUE_DIM, PADDED_VALUE, ALIGNED)
