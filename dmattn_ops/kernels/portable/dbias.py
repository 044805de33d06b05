"""The gradient of a bias that several batches or heads share: sums of dS, without atomics or a `[B, H, Sq, Sk]` tensor.

For a bias per key, the dk/dv kernel has written sums over the queries of each head, and they are added up here. For a bias
with a query dimension, each program computes one block of dbias: it recomputes dS for every batch and head that reads it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmattn_ops import problem
from dmattn_ops.call import Call, is_pairwise, rows_are_aligned
from dmattn_ops.config import PortableBackward
from dmattn_ops.kernels.launching.launch import computed, launch
from dmattn_ops.kernels.portable.arguments import (
    ROW_TENSORS,
    UNSPECIALIZED,
    Extent,
    broadcast_stride,
    ceil_div,
    extent,
    mask_arguments,
    row_strides,
    shared_arguments,
)
from dmattn_ops.kernels.portable.primitives import (
    HEADER,
    TILE,
    head_offset,
    head_rows,
    load_rows,
    load_statistics,
    segment_ids,
    store_block,
)
from dmattn_ops.kernels.portable.queries import step_gradient
from dmattn_ops.problem import Mask

ENTRIES = 128  # list entries that one iteration marks


@triton.jit(do_not_specialize=["tiles_r", "key_tiles"])
def mark_kernel(tiles, states, tiles_r, key_tiles, ENTRIES: tl.constexpr):
    """Write the states of one query tile, `[key_tiles]`: 1 where its list has a partial tile, 2 where a full one."""
    program = tl.program_id(0).to(tl.int64)
    record = tiles + program * tiles_r
    n_partial = tl.load(record + 1)
    count = n_partial + tl.load(record + 2)
    for first in tl.range(0, count, ENTRIES):
        entries = first + tl.arange(0, ENTRIES)
        tile = tl.load(record + HEADER + entries, mask=entries < count, other=0)
        state = tl.where(entries < n_partial, 1, 2).to(tl.int8)
        tl.store(states + program * key_tiles + tile, state, mask=entries < count)


@triton.jit
def member_gradient(
    query,
    grad_out,
    rows,
    keys,
    start_k,
    mask,
    bias,
    numbers,
    dropout,
    SHAPE: tl.constexpr,
    MASK: tl.constexpr,
    QUERY_SEGMENTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Return dS `[BLOCK_M, BLOCK_N]` of one batch and head."""
    BLOCK_M: tl.constexpr = SHAPE[0]
    BLOCK_N: tl.constexpr = SHAPE[1]
    log_sum, delta, q_segments, start_q, length_q = rows
    key, key_s, value, value_s, _, length_k = keys
    q = load_rows(query[0], start_q, query[1], length_q, BLOCK_M, SHAPE[2], SHAPE[4], SHAPE[6], True)
    do = load_rows(grad_out[0], start_q, grad_out[1], length_q, BLOCK_M, SHAPE[3], SHAPE[5], SHAPE[6], True)
    k = load_rows(key, start_k, key_s, length_k, BLOCK_N, SHAPE[2], SHAPE[4], SHAPE[6], PARTIAL)
    v = load_rows(value, start_k, value_s, length_k, BLOCK_N, SHAPE[3], SHAPE[5], SHAPE[6], PARTIAL)
    q_ids = segment_ids(q_segments, start_q, length_q, BLOCK_M, QUERY_SEGMENTS)
    row_log_sum = load_statistics(log_sum, start_q, length_q, float("inf"), BLOCK_M, True)
    row_delta = load_statistics(delta, start_q, length_q, 0.0, BLOCK_M, True)
    owned = (start_q, length_q, q_ids, row_log_sum, row_delta)
    ds, _ = step_gradient(
        q,
        do,
        k,
        v,
        start_k,
        keys,
        owned,
        mask,
        bias,
        numbers,
        dropout,
        SHAPE,
        MASK,
        "full",
        SOFTCAP,
        DROPOUT,
        PRECISION,
        PARTIAL,
    )
    return ds


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def dbias_kernel(
    query,
    key,
    value,
    bias,
    grad_out,
    log_sum,
    delta,
    dbias,
    states,
    bits,
    q_segments,
    k_segments,
    seed,
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
    dbias_b,
    dbias_h,
    dbias_q,
    dbias_k,
    bias_b,
    bias_h,
    bias_q,
    bias_k,
    bias_group,
    states_b,
    states_h,
    states_q,
    bits_b,
    bits_h,
    bits_r,
    mask_group,
    q_segments_b,
    k_segments_b,
    k_segments_h,
    segment_group,
    blocks,
    key_blocks,
    dbias_heads,
    batches,
    heads,
    seqlen_q,
    seqlen_k,
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
    LISTED: tl.constexpr,
    BITS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    QUERY_SEGMENTS: tl.constexpr,
    BANDED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write one block of dbias: the sum of dS over `batches` batches and `bias_group` heads."""
    program = tl.program_id(0)
    start_k = program % key_blocks * BLOCK_N
    start_q = (program // key_blocks) % blocks * BLOCK_M
    first_head = (program // key_blocks // blocks) % dbias_heads * bias_group
    first_batch = program // key_blocks // blocks // dbias_heads
    SHAPE: tl.constexpr = (BLOCK_M, BLOCK_N, HEAD_DIM, VALUE_DIM, PADDED_HEAD, PADDED_VALUE, ALIGNED)
    MASK: tl.constexpr = (BITS, SEGMENTS, BANDED)
    in_band = (start_k + BLOCK_N > start_q + band_lo) & (start_k < start_q + BLOCK_M + band_hi)
    zero = tl.full((), 0, tl.int32)
    seed_value = 0
    if DROPOUT:
        seed_value = tl.load(seed)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for member in tl.range(batches * bias_group):
        batch = first_batch + member // bias_group
        head = first_head + member % bias_group
        if LISTED:
            place = head_offset(batch, head // mask_group, states_b, states_h) + start_k // TILE
            state = tl.load(states + place + (start_q // TILE).to(tl.int64) * states_q).to(tl.int32)
        else:
            state = in_band.to(tl.int32)
        head_bits = 0
        head_q_segments = 0
        head_k_segments = 0
        if BITS:
            head_bits = bits + head_offset(batch, head // mask_group, bits_b, bits_h)
        if QUERY_SEGMENTS:
            head_q_segments = q_segments + batch.to(tl.int64) * q_segments_b
        if SEGMENTS:
            head_k_segments = k_segments + head_offset(batch, head // segment_group, k_segments_b, k_segments_h)
        head_key = head_rows(key, batch, head // GROUP, zero, key_b, key_s, key_h)
        head_value = head_rows(value, batch, head // GROUP, zero, value_b, value_s, value_h)
        statistics = (batch.to(tl.int64) * heads + head) * seqlen_q
        for PARTIAL in tl.static_range(2):
            if state == 2 - PARTIAL:
                total += member_gradient(
                    (head_rows(query, batch, head, zero, query_b, query_s, query_h), query_s),
                    (head_rows(grad_out, batch, head, zero, grad_out_b, grad_out_s, grad_out_h), grad_out_s),
                    (log_sum + statistics, delta + statistics, head_q_segments, start_q, seqlen_q),
                    (head_key, key_s, head_value, value_s, head_k_segments, seqlen_k),
                    start_k,
                    (head_bits, bits_r, band_lo, band_hi),
                    (bias + head_offset(batch, head // bias_group, bias_b, bias_h), bias_q, bias_k),
                    (softmax_scale, softcap),
                    (seed_value, threshold, rescale, batch * heads + head),
                    SHAPE,
                    MASK,
                    QUERY_SEGMENTS,
                    SOFTCAP,
                    DROPOUT,
                    PRECISION,
                    PARTIAL,
                )
    store_block(
        dbias + head_offset(first_batch, first_head // bias_group, dbias_b, dbias_h),
        dbias_q,
        dbias_k,
        start_q,
        start_k,
        seqlen_q,
        seqlen_k,
        total,
        BLOCK_M,
        BLOCK_N,
    )


def reduce_key_sums(key_sums: Tensor, dbias: Tensor) -> Tensor:
    """Sum `[B, H, Sk]` into dbias `[B|1, H|Hkv|1, 1, Sk]`, or `[1, H, total_k]` into `[H|Hkv|1, total_k]`."""
    if dbias.numel() == 0:
        return dbias
    target = dbias[None] if dbias.dim() == 2 else dbias[:, :, 0]
    batch, heads, seqlen_k = key_sums.shape
    grouped = key_sums.view(batch, target.shape[1], heads // target.shape[1], seqlen_k)
    summed = grouped.sum(2) if grouped.shape[2] != 1 else grouped[:, :, 0]
    return target.copy_(summed.sum(0, keepdim=True) if target.shape[0] != batch else summed)


def mark_tiles(tiles: Tensor, key_tiles: int) -> Tensor:
    """Turn lists `[Bm, Hm, nQ, 4 + capacity]` into states `[Bm, Hm, nQ, key_tiles]`: 0 empty, 1 partial, 2 full."""
    states = computed(_empty_states, tiles, (*tiles.shape[:3], key_tiles))
    records = tiles.shape[0] * tiles.shape[1] * tiles.shape[2]
    if states.numel():
        launch(mark_kernel, (records,), tiles, states, tiles_r=tiles.stride(2), key_tiles=key_tiles, ENTRIES=ENTRIES)
    return states


def _empty_states(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return like.new_zeros(shape, dtype=torch.int8)


def recompute_dbias(
    call: Call, grad_out: Tensor, log_sum: Tensor, delta: Tensor, dbias: Tensor, config: PortableBackward
) -> None:
    """Write dbias `[B|1, H|Hkv|1, Sq, Sk]` beside kernels that leave it out.

    log_sum and delta `[B, H, Sq]` are the rows' lse in base 2 and delta, +inf and 0 in empty rows.
    """
    size = extent(call)
    aligned = rows_are_aligned(call.query, call.key, call.value, grad_out)
    arguments = shared_arguments(call, size)
    arguments |= {"grad_out": grad_out, **row_strides("grad_out", grad_out), "log_sum": log_sum, "delta": delta}
    arguments["ALIGNED"] = aligned
    config = config.for_call(aligned, is_pairwise(call.bias, call.options))
    broadcast_dbias(arguments, call.mask, size, dbias, config)


def broadcast_dbias(
    arguments: dict[str, Any], tiles: Mask, size: Extent, dbias: Tensor, config: PortableBackward
) -> None:
    """Write dbias `[B|1, H|Hkv|1, Sq, Sk]`: a program for each of its blocks."""
    blocks = ceil_div(size.seqlen_q, config.dq_block_m)
    key_blocks = ceil_div(size.seqlen_k, config.dq_block_n)
    programs = blocks * key_blocks * dbias.shape[0] * dbias.shape[1]
    if programs == 0:
        return
    mask = mask_arguments(tiles.row_tiles, tiles.row_bits, size.heads)
    states = None if tiles.row_tiles is None else mark_tiles(tiles.row_tiles, ceil_div(size.seqlen_k, problem.TILE))
    wanted = dbias_kernel.arg_names
    given = {name: value for name, value in (arguments | mask).items() if name in wanted}
    launch(
        dbias_kernel,
        (programs,),
        **given,
        dbias=dbias,
        dbias_b=dbias.stride(0),
        dbias_h=dbias.stride(1),
        dbias_q=dbias.stride(2),
        dbias_k=dbias.stride(3),
        states=states,
        states_b=0 if states is None else broadcast_stride(states, 0),
        states_h=0 if states is None else broadcast_stride(states, 1),
        states_q=0 if states is None else states.stride(2),
        blocks=blocks,
        key_blocks=key_blocks,
        dbias_heads=dbias.shape[1],
        batches=size.batch if dbias.shape[0] == 1 else 1,
        BLOCK_M=config.dq_block_m,
        BLOCK_N=config.dq_block_n,
        num_warps=config.dq_num_warps,
        num_stages=1,
    )
