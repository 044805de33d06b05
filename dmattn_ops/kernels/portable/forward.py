"""Forward in plain Triton, for every GPU from SM 8.0: each program computes a block of queries and loops over the keys.

Where there are too few queries to fill the GPU (decoding), several programs divide the keys of one block of queries among
them, and a second kernel merges their outputs.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dmattn_ops import arch, problem
from dmattn_ops.call import Call, Result, rows_are_aligned
from dmattn_ops.config import PortableForward
from dmattn_ops.kernels.launching.launch import computed, launch, workspace
from dmattn_ops.kernels.portable.arguments import (
    ROW_TENSORS,
    UNSPECIALIZED,
    ceil_div,
    extent,
    is_positive,
    lse_strides,
    mask_arguments,
    padded,
    row_strides,
    shared_arguments,
)
from dmattn_ops.kernels.portable.primitives import (
    LN2,
    LOG2E,
    TILE,
    dropout_keep,
    head_offset,
    head_rows,
    load_bias,
    load_key_bias,
    load_rows,
    owned_start,
    scores,
    segment_ids,
    sequences,
    store_rows,
    visibility,
    walk,
    walked_start,
)

SPLIT_STEPS = 4  # dividing the keys into shares of fewer steps costs more for merging than it saves
MERGED = 16  # shares that the merging kernel reads in one iteration


@triton.jit
def attend(
    acc,
    peak,
    total,
    q,
    keys,
    part,
    begin,
    end,
    owned,
    mask,
    bias,
    numbers,
    dropout,
    SHAPE: tl.constexpr,
    MASK: tl.constexpr,
    LISTED: tl.constexpr,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
    LATE_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Add steps `begin ... end` of one part of the walk to the running softmax `(acc, peak, total)`, base 2."""
    BLOCK_M: tl.constexpr = SHAPE[0]
    BLOCK_N: tl.constexpr = SHAPE[1]
    key, key_s, value, value_s, k_segments, length_k = keys
    start_q, length_q, q_ids = owned
    bias_pointer, bias_q, bias_k = bias
    for step in tl.range(begin, end):
        start = walked_start(part, step, BLOCK_N, LISTED)
        k = load_rows(key, start, key_s, length_k, BLOCK_N, SHAPE[2], SHAPE[4], SHAPE[6], PARTIAL)
        raw = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if LATE_SCALE:
            score = raw
            unit = numbers[0] * LOG2E
        else:
            extra = 0.0
            if BIAS == "key":
                extra = load_key_bias(bias_pointer, start, bias_k, length_k, BLOCK_N)[None, :]
            elif BIAS == "full":
                extra = load_bias(
                    bias_pointer, bias_q, bias_k, start_q, start, length_q, length_k, BLOCK_M, BLOCK_N, PARTIAL
                )
            score, _ = scores(raw, extra, numbers, SOFTCAP, BIAS)
            unit = 1.0
        if PARTIAL:
            k_ids = segment_ids(k_segments, start, length_k, BLOCK_N, MASK[1])
            visible = visibility(mask, q_ids, k_ids, start_q, start, length_k, BLOCK_M, BLOCK_N, MASK)
            score = tl.where(visible, score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1) * unit)
        # A row whose scores are all -inf so far has a peak of -inf; subtracting that from -inf would give NaN.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.exp2(score * unit - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(p, 1)
        if DROPOUT:
            p = tl.where(dropout_keep(dropout, start_q, start, BLOCK_M, BLOCK_N), p, 0.0)
        v = load_rows(value, start, value_s, length_k, BLOCK_N, SHAPE[3], SHAPE[5], SHAPE[6], PARTIAL)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        peak = new_peak
    return acc, peak, total


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def forward_kernel(
    query,
    key,
    value,
    bias,
    out,
    lse,
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
    out_b,
    out_s,
    out_h,
    out_split,
    lse_b,
    lse_h,
    lse_split,
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
    LATE_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write out and lse of one block of queries, or of one share of its keys (`program_id(1)` says which)."""
    program = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
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
    key = head_rows(key, row, head // GROUP, k_begin, key_b, key_s, key_h)
    value = head_rows(value, row, head // GROUP, k_begin, value_b, value_s, value_h)
    out = head_rows(out, row, head, q_begin, out_b, out_s, out_h) + split.to(tl.int64) * out_split
    lse += head_offset(row, head, lse_b, lse_h) + split.to(tl.int64) * lse_split + q_begin
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
    seed_value = 0
    if DROPOUT:
        seed_value = tl.load(seed)

    SHAPE: tl.constexpr = (BLOCK_M, BLOCK_N, HEAD_DIM, VALUE_DIM, PADDED_HEAD, PADDED_VALUE, ALIGNED)
    MASK: tl.constexpr = (BITS, SEGMENTS, BANDED)
    low = band_lo + shift
    high = band_hi + shift
    last_q = tl.minimum(start_q + BLOCK_M, length_q) - 1
    n_full, full_first, n_partial, partial_first, left, gap = walk(
        record, start_q, last_q, low, high, length_k, BLOCK_N, LISTED, SEGMENTS
    )
    q = load_rows(query, start_q, query_s, length_q, BLOCK_M, HEAD_DIM, PADDED_HEAD, ALIGNED, True)
    q_ids = segment_ids(q_segments, start_q, length_q, BLOCK_M, QUERY_SEGMENTS)
    acc = tl.zeros((BLOCK_M, PADDED_VALUE), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for PARTIAL in tl.static_range(2):
        steps = n_partial if PARTIAL else n_full
        share = (steps + splits - 1) // splits
        begin = tl.minimum(split * share, steps)
        acc, peak, total = attend(
            acc,
            peak,
            total,
            q,
            (key, key_s, value, value_s, k_segments, length_k),
            (record, partial_first, left, gap) if PARTIAL else (record, full_first, 0, 0),
            begin,
            tl.minimum(begin + share, steps),
            (start_q, length_q, q_ids),
            (bits, bits_r, low, high),
            (bias, bias_q, bias_k),
            (softmax_scale, softcap),
            (seed_value, threshold, rescale, batch * heads + head),
            SHAPE,
            MASK,
            LISTED,
            BIAS,
            SOFTCAP,
            DROPOUT,
            LATE_SCALE,
            PRECISION,
            PARTIAL,
        )

    empty = total == 0.0
    factor = 1.0 / tl.where(empty, 1.0, total)
    if DROPOUT:
        factor *= rescale
    acc = tl.where(empty[:, None], 0.0, acc * factor[:, None])
    store_rows(out, start_q, out_s, length_q, acc, BLOCK_M, VALUE_DIM, PADDED_VALUE, ALIGNED)
    rows = start_q + tl.arange(0, BLOCK_M)
    log_sum = tl.where(empty, float("-inf"), (peak + tl.log2(tl.where(empty, 1.0, total))) * LN2)
    tl.store(lse + rows, log_sum.to(lse.dtype.element_ty), mask=rows < length_q)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def merge_kernel(
    shares,
    share_lse,
    out,
    lse,
    share_stride,
    lse_stride,
    out_b,
    out_s,
    out_h,
    lse_b,
    lse_h,
    heads,
    seqlen_q,
    splits,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Merge the shares `[splits, B, Sq, H, Dv]` of one row, weighted by `exp(lse - lse of all)`."""
    program = tl.program_id(0)
    head = program % heads
    position = (program // heads) % seqlen_q
    batch = (program // heads // seqlen_q).to(tl.int64)
    share_lse += (batch * heads + head) * seqlen_q + position
    shares += program.to(tl.int64) * WIDTH

    every = tl.arange(0, SPLITS).to(tl.int64)
    logs = tl.load(share_lse + every * lse_stride, mask=every < splits, other=float("-inf"))
    peak = tl.max(logs, 0)
    empty = peak == float("-inf")
    base = tl.where(empty, 0.0, peak)
    total = tl.sum(tl.exp2((logs - base) * LOG2E), 0)

    columns = tl.arange(0, PADDED)
    acc = tl.zeros((PADDED,), tl.float32)
    for first in tl.range(0, SPLITS, AT_ONCE):
        some = (first + tl.arange(0, AT_ONCE)).to(tl.int64)
        some_logs = tl.load(share_lse + some * lse_stride, mask=some < splits, other=float("-inf"))
        weight = tl.exp2((some_logs - base) * LOG2E)
        # The output of a share whose weight is 0 may never have been written.
        written = (weight != 0.0)[:, None] & (columns < WIDTH)[None, :]
        block = tl.load(shares + some[:, None] * share_stride + columns[None, :], mask=written, other=0.0)
        acc += tl.sum(block * weight[:, None], 0)
    acc = tl.where(empty, 0.0, acc / tl.where(empty, 1.0, total))
    out += batch * out_b + position.to(tl.int64) * out_s + head.to(tl.int64) * out_h
    tl.store(out + columns, acc.to(out.dtype.element_ty), mask=columns < WIDTH)
    log_sum = tl.where(empty, float("-inf"), base + tl.log2(tl.where(empty, 1.0, total)) * LN2)
    tl.store(lse + batch * lse_b + head.to(tl.int64) * lse_h + position, log_sum.to(lse.dtype.element_ty))


def split_count(programs: int, longest_k: int, config: PortableForward, num_sms: int) -> int:
    """Return how many programs share one walk: enough to fill the multiprocessors, each with some steps to do."""
    if 2 * programs > num_sms:
        return 1
    steps = ceil_div(longest_k, config.block_n)
    return max(1, min(config.per_sm * num_sms // programs, steps // SPLIT_STEPS))


def forward(call: Call, result: Result, config: PortableForward) -> None:
    """Write out `[B, Sq, H, Dv]` and lse `[B, H, Sq]` (packed: `[total_q, H, Dv]`, `[H, total_q]`)."""
    query, tiles, out, lse = call.query, call.mask, result.out, result.lse
    size = extent(call)
    aligned = rows_are_aligned(query, call.key, call.value, out)
    if call.varlen is not None:  # rows that belong to no sequence
        computed(Tensor.zero_, out)
        computed(Tensor.fill_, lse, float("-inf"))
    blocks = ceil_div(size.longest_q, config.block_m)
    if tiles.row_tiles is not None:
        blocks = tiles.row_tiles.shape[2] * (problem.TILE // config.block_m)
    programs = blocks * size.heads * size.batch
    if programs == 0:
        return
    arguments = shared_arguments(call, size)
    arguments |= mask_arguments(tiles.row_tiles, tiles.row_bits, size.heads)
    arguments["ALIGNED"] = aligned
    arguments["LATE_SCALE"] = (
        call.bias is None and call.options.softcap == 0 and is_positive(call.options.softmax_scale)
    )
    walks = ceil_div(size.longest_q, config.block_m) * size.heads * size.batch
    splits = split_count(walks, size.longest_k, config, arch.physical(query.device).num_sms)
    if splits == 1:
        _launch(arguments, out, lse, (programs, 1), blocks, config)
        return
    shares = workspace(query, splits, *out.shape)
    share_lse = workspace(query, splits, *lse.shape)
    if call.varlen is not None:
        computed(Tensor.fill_, share_lse, float("-inf"))
    arguments["ALIGNED"] = aligned and rows_are_aligned(shares)
    _launch(arguments, shares, share_lse, (programs, splits), blocks, config)
    _merge(shares, share_lse, out, lse)


def _launch(
    arguments: dict[str, Any], out: Tensor, lse: Tensor, grid: tuple[int, int], blocks: int, config: PortableForward
) -> None:
    """Launch the kernel for out `[B, Sq, H, Dv]`, or for shares of it `[splits, B, Sq, H, Dv]`."""
    shared = grid[1] > 1
    launch(
        forward_kernel,
        grid,
        out=out,
        lse=lse,
        **row_strides("out", out[0] if shared else out),
        **lse_strides("lse", lse[0] if shared else lse),
        out_split=out.stride(0) if shared else 0,
        lse_split=lse.stride(0) if shared else 0,
        blocks=blocks,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **arguments,
    )


def _merge(shares: Tensor, share_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Launch the merging of shares `[splits, B, Sq, H, Dv]` and `[splits, B, H, Sq]`."""
    splits = shares.shape[0]
    launch(
        merge_kernel,
        (shares[0].numel() // out.shape[-1],),
        shares,
        share_lse,
        out,
        lse,
        share_stride=shares.stride(0),
        lse_stride=share_lse.stride(0),
        **row_strides("out", out),
        **lse_strides("lse", lse),
        heads=out.shape[-2],
        seqlen_q=out.shape[-3],
        splits=splits,
        WIDTH=out.shape[-1],
        PADDED=padded(out.shape[-1]),
        SPLITS=max(MERGED, triton.next_power_of_2(splits)),
        AT_ONCE=MERGED,
        num_warps=4,
    )
