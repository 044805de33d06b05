"""dk and dv in plain Triton: each program computes a block of keys and walks the queries of every head that reads it.

Scores are computed transposed, `[keys, queries]`, so that P and dS can be the left operand of the products for dv and dk
without another transposition.
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
from dmattn_ops.kernels.portable.primitives import Features, Rows, Shape, load_rows, load_statistics, store_rows
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
    """The queries of one head, which are walked."""

    query: Any  # Rows
    grad_out: Any  # Rows
    log_sum: Any
    log_rest: Any
    delta: Any


class Keys(NamedTuple):
    """A block of keys, which is owned."""

    k: Any
    v: Any
    start: Any
    last: Any


class Sums(NamedTuple):
    """What is gathered for a block of keys."""

    dk: Any
    dv: Any
    ds: Any  # the sum of dS over the queries of one head


@triton.jit
def gather_queries(
    sums, keys, queries, part, place, k_marks, mask, bias, factors, dropout, shape: tl.constexpr, features: tl.constexpr,
    KEY_SUMS: tl.constexpr, PARTIAL: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Add the queries of one part of the walk to the sums. `CAREFUL`: rows of queries that see no key may be NaN."""
    BLOCK_M: tl.constexpr = shape.block_m
    BLOCK_N: tl.constexpr = shape.block_n
    dk, dv, key_sum = sums.dk, sums.dv, sums.ds
    key_bias = 0.0
    if features.bias == "key":
        key_bias = load_key_bias(bias, keys.start, place.length_k, BLOCK_N)[:, None]
    first_met, end_met = met_rows(mask, keys.start, keys.last, place.length_q, features)
    for step in tl.range(part.steps):
        start = walked_start(part, step, BLOCK_M, features.listed)
        log_sum = load_statistics(queries.log_sum, start, place.length_q, float("inf"), BLOCK_M, PARTIAL)
        q = load_rows(
            queries.query, start, end_met, BLOCK_M, shape.head_dim, shape.padded_head, shape.aligned, PARTIAL,
            first_met, features.banded, log_sum != float("inf"), CAREFUL,
        )  # fmt: skip
        log_rest = load_statistics(queries.log_rest, start, place.length_q, 0.0, BLOCK_M, PARTIAL)
        products, slope = capped(tl.dot(keys.k, tl.trans(q), input_precision=features.precision), factors, features)
        added = key_bias
        if features.bias == "full":
            added = load_bias(bias, start, keys.start, place.length_q, place.length_k, BLOCK_M, BLOCK_N, True, PARTIAL)
        p = probabilities(products, added, factors, log_sum[None, :], log_rest[None, :], features.natural)
        if PARTIAL:
            q_marks = query_marks(mask, start, place.length_q, BLOCK_M, features)
            visible = visibility(
                mask, q_marks, k_marks, keys.start, start, place.length_q, BLOCK_N, BLOCK_M, True, features
            )
            p = tl.where(visible, p, 0.0)
        keep = True
        kept_p = p
        if features.dropout:
            keep = tl.trans(dropout_keep(dropout, start, keys.start, BLOCK_M, BLOCK_N, features.whole_groups))
            kept_p = tl.where(keep, p, 0.0)
        do = load_rows(
            queries.grad_out, start, end_met, BLOCK_M, shape.value_dim, shape.padded_value, shape.aligned, PARTIAL,
            first_met, features.banded, log_sum != float("inf"), CAREFUL,
        )  # fmt: skip
        dv = tl.dot(kept_p.to(do.dtype), do, dv, input_precision=features.precision)
        delta = load_statistics(queries.delta, start, place.length_q, 0.0, BLOCK_M, PARTIAL)
        grad_p = tl.dot(keys.v, tl.trans(do), input_precision=features.precision)
        ds = score_gradient(p, grad_p, delta[None, :], keep, dropout, features.dropout)
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


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def keys_kernel(
    query,
    key,
    value,
    bias,
    grad_out,
    log_sum,
    log_rest,
    delta,
    dk,
    dv,
    key_sums,
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
    KEY_SUMS: tl.constexpr,
):
    """Write dk and dv of one block of keys of one key head, and the sums of dS over the queries `[B, H, Sk]`."""
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
    place, block, blocks = place_of(program, blocks, heads // GROUP, lengths, BLOCK_N, True, VARLEN, TOP_LEFT)
    kv_head = place.head
    ranking = 0
    if LISTED:
        ranking = tiles + head_offset(place.batch, kv_head * GROUP // mask_group, tiles_b, tiles_h)
    start_k = owned_start(ranking, tiles_r, block, blocks, BLOCK_N, LISTED, False)
    if start_k >= place.length_k:
        return

    key = Rows(head_rows(key, place.batch, kv_head, place.k_begin, key_b, key_s, key_h), key_s)
    value = Rows(head_rows(value, place.batch, kv_head, place.k_begin, value_b, value_s, value_h), value_s)
    k = load_rows(key, start_k, place.length_k, BLOCK_N, HEAD_DIM, PADDED_HEAD, ALIGNED, True)
    v = load_rows(value, start_k, place.length_k, BLOCK_N, VALUE_DIM, PADDED_VALUE, ALIGNED, True)
    last_k = tl.minimum(start_k + BLOCK_N, place.length_k) - 1
    keys = Keys(k, v, start_k, last_k)
    low, high = -(band_hi + place.shift), -(band_lo + place.shift)
    TEST_ALL: tl.constexpr = MASK == "segments" or MASK == "intervals"
    key_grad = tl.zeros((BLOCK_N, PADDED_HEAD), tl.float32)
    value_grad = tl.zeros((BLOCK_N, PADDED_VALUE), tl.float32)
    WALKS: tl.constexpr = 1 if MASK == "none" else 2
    for CAREFUL in tl.static_range(WALKS):
        wanted = True
        if CAREFUL:
            wanted = some_nan(key_grad) | some_nan(value_grad)
        if wanted:
            key_grad = tl.zeros((BLOCK_N, PADDED_HEAD), tl.float32)
            value_grad = tl.zeros((BLOCK_N, PADDED_VALUE), tl.float32)
            for member in tl.range(GROUP):
                head = kv_head * GROUP + member
                every_head = place.batch.to(tl.int64) * heads + head
                statistics = every_head * seqlen_q + place.q_begin
                queries = Queries(
                    Rows(head_rows(query, place.batch, head, place.q_begin, query_b, query_s, query_h), query_s),
                    Rows(
                        head_rows(grad_out, place.batch, head, place.q_begin, grad_out_b, grad_out_s, grad_out_h),
                        grad_out_s,
                    ),
                    log_sum + statistics,
                    log_rest + statistics,
                    delta + statistics,
                )
                record = 0
                if LISTED:
                    record = tiles + head_offset(place.batch, head // mask_group, tiles_b, tiles_h)
                    record += (start_k // TILE).to(tl.int64) * tiles_r
                head_bias = Bias(0, 0, 0)
                if BIAS != "none":
                    head_bias = Bias(
                        head_rows(bias, place.batch, head // bias_group, place.k_begin, bias_b, bias_k, bias_h),
                        bias_q,
                        bias_k,
                    )
                dropout = Dropout(0, last_dropped, rescale, q_origin, k_origin)
                if DROPOUT:
                    head_seed = tl.load(seed + head_offset(place.sequence, head, seed_b, seed_h))
                    dropout = Dropout(head_seed, last_dropped, rescale, q_origin, k_origin)
                mask = mask_of_head(arrays, place, head, low, high, features)
                k_marks = key_marks(mask, start_k, place.length_k, place.length_q, BLOCK_N, features)
                plan = plan_walk(record, tiles_w, start_k, last_k, low, high, place.length_q, BLOCK_M, LISTED, TEST_ALL)
                sums = Sums(key_grad, value_grad, tl.zeros((BLOCK_N,), tl.float32))
                for PARTIAL in tl.static_range(2):
                    sums = gather_queries(
                        sums, keys, queries, part_of(plan, PARTIAL), place, k_marks, mask, head_bias,
                        Factors(ratio, factor), dropout, shape, features, KEY_SUMS, PARTIAL, CAREFUL,
                    )  # fmt: skip
                if KEY_SUMS:
                    rows = start_k + tl.arange(0, BLOCK_N)
                    head_sums = key_sums + every_head * seqlen_k + place.k_begin
                    tl.store(head_sums + rows, sums.ds, mask=rows < place.length_k)
                key_grad = sums.dk
                value_grad = sums.dv

    if DROPOUT:
        value_grad *= rescale
    dk = Rows(head_rows(dk, place.batch, kv_head, place.k_begin, dk_b, dk_s, dk_h), dk_s)
    dv = Rows(head_rows(dv, place.batch, kv_head, place.k_begin, dv_b, dv_s, dv_h), dv_s)
    store_rows(dk, start_k, place.length_k, key_grad * softmax_scale, BLOCK_N, HEAD_DIM, PADDED_HEAD, ALIGNED)
    store_rows(dv, start_k, place.length_k, value_grad, BLOCK_N, VALUE_DIM, PADDED_VALUE, ALIGNED)
