"""Forward in plain Triton, for every GPU from SM 8.0: each program computes a block of queries and walks the keys.

Where there are too few queries to fill the GPU (decoding), several programs share the walk of one block of queries, and a
second kernel merges their outputs.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dmattn_ops.call import Call, Result, Takes, rows_are_aligned
from dmattn_ops.choice import arch
from dmattn_ops.choice.config import PortableForward
from dmattn_ops.kernels.interval_lists import listed
from dmattn_ops.kernels.portable.arguments import (
    ROW_TENSORS,
    UNSPECIALIZED,
    Extent,
    blocks_and_programs,
    ceil_div,
    extent,
    factor_sign,
    list_arguments,
    padded,
    row_strides,
    shared_arguments,
    statistic_strides,
)
from dmattn_ops.kernels.portable.dropout import Dropout, dropout_keep
from dmattn_ops.kernels.portable.merge import merge_kernel
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
from dmattn_ops.kernels.portable.primitives import Features, Rows, Shape, load_rows, store_rows
from dmattn_ops.kernels.portable.scores import (
    LN2,
    LOG2E,
    Bias,
    Factors,
    capped,
    least_peak,
    load_bias,
    load_key_bias,
    log2_unit,
    lse_terms,
    row_units,
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
from dmattn_ops.kernels.sinks import share_of_keys
from dmattn_ops.launching.launch import computed, launch, workspace

TAKES = Takes(("none", "bits", "segments", "intervals"), sinks=True, oldest=80)
SPLIT_STEPS = 4  # dividing the keys into shares of fewer steps costs more for merging than it saves
MERGED = 16  # shares that the merging kernel reads in one iteration


@triton.jit
def attend(
    acc,
    peak,
    base,
    total,
    q,
    key,
    value,
    part,
    begin,
    end,
    start_q,
    last_q,
    place,
    q_marks,
    mask,
    bias,
    factors,
    dropout,
    shape: tl.constexpr,
    features: tl.constexpr,
    SIGN: tl.constexpr,
    PARTIAL: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Add steps `begin ... end` of one part of the walk to the running softmax `(acc, peak, base, total)`.

    `peak` is the largest score in natural units, or the largest product; then `base` is what exponents are relative to
    (`scores.row_units`). `SIGN` is that of the factor in units of log2: where it is positive, the largest score is that of
    the largest product. `CAREFUL`: values that nobody of the block sees may be NaN.
    """
    BLOCK_M: tl.constexpr = shape.block_m
    BLOCK_N: tl.constexpr = shape.block_n
    unit = log2_unit(factors, SIGN)
    first_met, end_met = met_rows(mask, start_q, last_q, place.length_k, features)
    for step in tl.range(begin, end):
        start = walked_start(part, step, BLOCK_N, features.listed)
        seen = 0
        k = load_rows(key, start, place.length_k, BLOCK_N, shape.head_dim, shape.padded_head, shape.aligned, PARTIAL)
        score, _ = capped(tl.dot(q, tl.trans(k), input_precision=features.precision), factors, features)
        if SIGN < 0:
            score = -score
        if SIGN == 0:
            score = score * 0.0
        if features.natural and features.bias == "none":
            score = tl.fma(score, factors.factor, 0.0)
        if features.bias == "key":
            score = tl.fma(score, factors.factor, load_key_bias(bias, start, place.length_k, BLOCK_N)[None, :])
        if features.bias == "full":
            added = load_bias(bias, start_q, start, place.length_q, place.length_k, BLOCK_M, BLOCK_N, False, PARTIAL)
            score = tl.fma(score, factors.factor, added)
        if PARTIAL:
            k_marks = key_marks(mask, start, place.length_k, place.length_q, BLOCK_N, features)
            visible = visibility(
                mask, q_marks, k_marks, start_q, start, place.length_k, BLOCK_M, BLOCK_N, False, features
            )
            score = tl.where(visible, score, float("-inf"))
            if CAREFUL:
                seen = tl.max(visible.to(tl.int32), 0) != 0
        new_peak = tl.maximum(peak, tl.max(score, 1))
        if features.natural:
            # A row whose scores are all -inf so far has a peak of -inf; subtracting that from -inf would give NaN.
            finite = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            p = tl.exp2((score - finite[:, None]) * LOG2E)
            shrink = tl.exp2((peak - finite) * LOG2E)
        else:
            units = row_units(new_peak, unit)
            new_base = tl.fma(new_peak, units, 0.0)  # rounded by itself: not as a part of the difference below
            p = tl.exp2(tl.fma(score, units[:, None], new_base[:, None] * -1.0))
            shrink = tl.exp2(base - new_base)
            base = new_base
        total = total * shrink + tl.sum(p, 1)
        if features.dropout:
            keep = dropout_keep(dropout, start_q, start, BLOCK_M, BLOCK_N, features.whole_groups)
            p = tl.where(keep, p, 0.0)
        v = load_rows(
            value, start, end_met, BLOCK_N, shape.value_dim, shape.padded_value, shape.aligned, PARTIAL,
            first_met, features.banded, seen, CAREFUL,
        )  # fmt: skip
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=features.precision)
        peak = new_peak
    return acc, peak, base, total


@triton.jit
def attend_share(
    acc, peak, base, total, q, key, value, plan, split, splits, start_q, last_q, place, q_marks, mask, bias, factors, dropout,
    shape: tl.constexpr, features: tl.constexpr, SIGN: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Add one of `splits` shares of a walk to the running softmax."""
    for PARTIAL in tl.static_range(2):
        part = part_of(plan, PARTIAL)
        share = (part.steps + splits - 1) // splits
        begin = tl.minimum(split * share, part.steps)
        end = tl.minimum(begin + share, part.steps)
        acc, peak, base, total = attend(
            acc, peak, base, total, q, key, value, part, begin, end, start_q, last_q, place, q_marks, mask,
            bias, factors, dropout, shape, features, SIGN, PARTIAL, CAREFUL,
        )  # fmt: skip
    return acc, peak, base, total


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def forward_kernel(
    query,
    key,
    value,
    bias,
    out,
    lse,
    lse_tail,
    row_max,
    sink,
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
    out_b,
    out_s,
    out_h,
    out_split,
    lse_b,
    lse_h,
    lse_tail_b,
    lse_tail_h,
    row_max_b,
    row_max_h,
    lse_split,
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
    SIGN: tl.constexpr,
    ROW_MAX: tl.constexpr,
):
    """Write out and the statistics of one block of queries, or of one share of its walk (`program_id(1)` says which)."""
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
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    place, block, blocks = place_of(program, blocks, heads, lengths, BLOCK_M, False, VARLEN, TOP_LEFT)
    head = place.head
    if LISTED:
        tiles += head_offset(place.batch, head // mask_group, tiles_b, tiles_h)
    start_q = owned_start(tiles, tiles_r, block, blocks, BLOCK_M, LISTED, True)
    if start_q >= place.length_q:
        return

    query = Rows(head_rows(query, place.batch, head, place.q_begin, query_b, query_s, query_h), query_s)
    key = Rows(head_rows(key, place.batch, head // GROUP, place.k_begin, key_b, key_s, key_h), key_s)
    value = Rows(head_rows(value, place.batch, head // GROUP, place.k_begin, value_b, value_s, value_h), value_s)
    record = 0
    if LISTED:
        record = tiles + (start_q // TILE).to(tl.int64) * tiles_r
    head_bias = Bias(0, 0, 0)
    if BIAS != "none":
        head_bias = Bias(
            head_rows(bias, place.batch, head // bias_group, place.k_begin, bias_b, bias_k, bias_h), bias_q, bias_k
        )
    dropout = Dropout(0, last_dropped, rescale, q_origin, k_origin)
    if DROPOUT:
        head_seed = tl.load(seed + head_offset(place.sequence, head, seed_b, seed_h))
        dropout = Dropout(head_seed, last_dropped, rescale, q_origin, k_origin)

    mask = mask_of_head(arrays, place, head, band_lo + place.shift, band_hi + place.shift, features)
    last_q = tl.minimum(start_q + BLOCK_M, place.length_q) - 1
    TEST_ALL: tl.constexpr = MASK == "segments" or MASK == "intervals"
    plan = plan_walk(record, tiles_w, start_q, last_q, mask.low, mask.high, place.length_k, BLOCK_N, LISTED, TEST_ALL)
    q = load_rows(query, start_q, place.length_q, BLOCK_M, HEAD_DIM, PADDED_HEAD, ALIGNED, True)
    q_marks = query_marks(mask, start_q, place.length_q, BLOCK_M, features)
    acc = tl.zeros((BLOCK_M, PADDED_VALUE), tl.float32)
    unit = log2_unit(Factors(ratio, factor), SIGN)
    least = float("-inf")
    if not NATURAL:
        least = least_peak(unit)
    peak = tl.full((BLOCK_M,), 0.0, tl.float32) + least
    base = peak * row_units(peak, unit)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc, peak, base, total = attend_share(
        acc, peak, base, total, q, key, value, plan, split, splits, start_q, last_q, place, q_marks, mask,
        head_bias, Factors(ratio, factor), dropout, shape, features, SIGN, False,
    )  # fmt: skip
    if MASK != "none":
        if some_nan(acc):
            acc = tl.zeros((BLOCK_M, PADDED_VALUE), tl.float32)
            peak = tl.full((BLOCK_M,), 0.0, tl.float32) + least
            base = peak * row_units(peak, unit)
            total = tl.zeros((BLOCK_M,), tl.float32)
            acc, peak, base, total = attend_share(
                acc, peak, base, total, q, key, value, plan, split, splits, start_q, last_q, place, q_marks, mask,
                head_bias, Factors(ratio, factor), dropout, shape, features, SIGN, True,
            )  # fmt: skip

    empty = total == 0.0
    scale = 1.0 / tl.where(empty, 1.0, total)
    if DROPOUT:
        scale *= rescale
    if sink is not None:
        log_sum, _ = lse_terms(peak, total, unit, NATURAL)
        scale *= share_of_keys(tl.load(sink + head).to(tl.float32), log_sum)
    acc = tl.where(empty[:, None], 0.0, acc * scale[:, None])
    out = head_rows(out, place.batch, head, place.q_begin, out_b, out_s, out_h) + split.to(tl.int64) * out_split
    store_rows(Rows(out, out_s), start_q, place.length_q, acc, BLOCK_M, VALUE_DIM, PADDED_VALUE, ALIGNED)
    rows = start_q + tl.arange(0, BLOCK_M)
    inside = rows < place.length_q
    first = split.to(tl.int64) * lse_split + place.q_begin
    row_lse, row_tail = lse_terms(peak, total, unit, NATURAL)
    tl.store(lse + head_offset(place.batch, head, lse_b, lse_h) + first + rows, row_lse, mask=inside)
    tl.store(lse_tail + head_offset(place.batch, head, lse_tail_b, lse_tail_h) + first + rows, row_tail, mask=inside)
    if ROW_MAX:
        largest = peak
        if not NATURAL:
            largest = tl.where(empty, float("-inf"), peak * unit * LN2)
        largest = tl.where(total == total, largest, float("nan"))
        tl.store(row_max + head_offset(place.batch, head, row_max_b, row_max_h) + first + rows, largest, mask=inside)


def split_count(programs: int, longest_k: int, config: PortableForward, num_sms: int) -> int:
    """Return how many programs share one walk: enough to fill the multiprocessors, each with some steps to do."""
    if 2 * programs > num_sms:
        return 1
    steps = ceil_div(longest_k, config.block_n)
    return max(1, min(config.per_sm * num_sms // programs, steps // SPLIT_STEPS))


def splits_of(call: Call, size: Extent, config: PortableForward, num_sms: int) -> int:
    """Return how many programs share one walk in a call: where it is batch-invariant, as if a batch entry were alone.

    How long a packed sequence is lies on the device, so that its walk is not shared then.
    """
    if call.options.batch_invariant:
        if size.packed:
            return 1
        size = size._replace(batch=1)
    programs = blocks_and_programs(size, size.seqlen_q, size.heads, config.block_m, None)[1]
    return split_count(programs, size.longest_k, config, num_sms)


def forward(call: Call, result: Result, config: PortableForward) -> None:
    """Write out `[B, Sq, H, Dv]`, and lse, lse_tail and row_max `[B, H, Sq]` (packed: `[total_q, H, Dv]`, `[H, total_q]`)."""
    call = listed(call)
    mask, size = call.mask, extent(call)
    aligned = rows_are_aligned(call.query, call.key, call.value, result.out)
    if call.varlen is not None:  # rows that belong to no sequence
        computed(Tensor.zero_, result.out)
        _empty_statistics(result)
    blocks, programs = blocks_and_programs(size, size.seqlen_q, size.heads, config.block_m, mask.row_tiles)
    if programs == 0:
        return
    arguments = shared_arguments(call, size)
    arguments |= list_arguments(mask.row_tiles, mask.row_bits, size.heads)
    arguments |= {
        "sink": call.sink,
        "ALIGNED": aligned,
        "SIGN": factor_sign(call),
        "ROW_MAX": result.row_max is not None,
    }
    splits = splits_of(call, size, config, arch.physical(call.query.device).num_sms)
    if splits == 1:
        _launch(arguments, result, (programs, 1), blocks, config)
        return
    shares = Result(*[None if part is None else workspace(call.query, splits, *part.shape) for part in result])
    if call.varlen is not None:
        _empty_statistics(shares)
    arguments["sink"] = None  # which takes its share of all shares together
    arguments["ALIGNED"] = aligned and rows_are_aligned(shares.out)
    _launch(arguments, shares, (programs, splits), blocks, config)
    _merge(shares, result, call.sink)


def _empty_statistics(result: Result) -> None:
    """Write the statistics of rows without visible keys."""
    computed(Tensor.fill_, result.lse, float("-inf"))
    computed(Tensor.zero_, result.lse_tail)
    if result.row_max is not None:
        computed(Tensor.fill_, result.row_max, float("-inf"))


def _statistics(result: Result) -> dict[str, Any]:
    """Return the statistics of a result and their strides, as arguments."""
    named = {"lse": result.lse, "lse_tail": result.lse_tail, "row_max": result.row_max}
    strides = [statistic_strides(name, tensor) for name, tensor in named.items()]
    return named | strides[0] | strides[1] | strides[2]


def _launch(
    arguments: dict[str, Any], result: Result, grid: tuple[int, int], blocks: int, config: PortableForward
) -> None:
    """Launch the kernel for a result, or for shares of one: `[splits, B, Sq, H, Dv]` and `[splits, B, H, Sq]`."""
    one, strides = result, {"out_split": 0, "lse_split": 0}
    if grid[1] > 1:
        one = Result(*[None if part is None else part[0] for part in result])
        strides = {"out_split": result.out.stride(0), "lse_split": result.lse.stride(0)}
    launch(
        forward_kernel,
        grid,
        out=result.out,
        **row_strides("out", one.out),
        **strides,
        **_statistics(one) | {"lse": result.lse, "lse_tail": result.lse_tail, "row_max": result.row_max},
        blocks=blocks,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **arguments,
    )


def _merge(shares: Result, result: Result, sink: Tensor | None) -> None:
    """Launch the merging of shares `[splits, B, Sq, H, Dv]` and `[splits, B, H, Sq]`; `sink` `[H]` takes its share."""
    splits, width = shares.out.shape[0], result.out.shape[-1]
    launch(
        merge_kernel,
        (shares.out[0].numel() // width,),
        shares.out,
        shares.lse,
        shares.lse_tail,
        shares.row_max,
        sink,
        result.out,
        share_stride=shares.out.stride(0),
        lse_stride=shares.lse.stride(0),
        **row_strides("out", result.out),
        **_statistics(result),
        heads=result.out.shape[-2],
        seqlen_q=result.out.shape[-3],
        splits=splits,
        WIDTH=width,
        PADDED=padded(width),
        SPLITS=max(MERGED, triton.next_power_of_2(splits)),
        AT_ONCE=MERGED,
        ROW_MAX=result.row_max is not None,
        num_warps=4,
    )
