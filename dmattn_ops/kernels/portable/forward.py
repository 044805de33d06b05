"""Forward in plain Triton, for every GPU from SM 8.0: each program computes a block of queries and walks the keys.

Where there are too few queries to fill the GPU (decoding), several programs share the walk of one block of queries, and a
second kernel merges their outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dmattn_ops.call import Call, Result, Takes, rows_are_aligned
from dmattn_ops.choice import arch
from dmattn_ops.choice.configurations import AmpereForward, PortableForward
from dmattn_ops.kernels.interval_lists import listed
from dmattn_ops.kernels.portable.arguments import (
    ROW_TENSORS,
    UNSPECIALIZED,
    Extent,
    blocks_and_programs,
    ceil_div,
    extent,
    features_of,
    list_arguments,
    padded,
    row_strides,
    shape_of,
    shared_arguments,
    statistic_arguments,
)
from dmattn_ops.kernels.portable.dropout import Seeds, dropout_keep
from dmattn_ops.kernels.portable.heads import Operands, head_of, program_of
from dmattn_ops.kernels.portable.merge import merge_kernel
from dmattn_ops.kernels.portable.places import (
    SEARCHED,
    Band,
    Lengths,
    Lists,
    band_of,
    head_rows,
    last_owned,
    part_of,
    plan_walk,
    share_of,
    walked_start,
)
from dmattn_ops.kernels.portable.primitives import KeyRows, Rows, load_rows, rows_of, store_rows
from dmattn_ops.kernels.portable.scores import (
    BiasArray,
    Factors,
    load_bias,
    load_key_bias,
    log2_unit,
)
from dmattn_ops.kernels.portable.softmax import (
    RowResults,
    Softmax,
    finish_rows,
    least_peaks,
    scores_of,
    weights_of,
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
from dmattn_ops.launching.launch import computed, launch, workspace

TAKES = Takes(("none", "bits", "segments", "intervals"), sinks=True, oldest=80)
SPLIT_STEPS = 4  # dividing the keys into shares of fewer steps costs more for merging than it saves
MERGED = 16  # shares that the merging kernel reads in one iteration


class Queries(NamedTuple):
    """A block of queries, which is owned."""

    q: Any
    marks: Any
    start: Any
    last: Any


@triton.jit
def attend(
    sums,
    queries,
    keys,
    part,
    head,
    shape: tl.constexpr,
    features: tl.constexpr,
    PARTIAL: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Add the keys of one part of the walk to the running softmax `sums`.

    Where the sign of the factor of products is positive, the largest score is that of the largest product.
    `CAREFUL`: values that nobody of the block sees may be NaN.
    """
    KEY_ROWS: tl.constexpr = shape.key_rows
    VALUE_ROWS: tl.constexpr = shape.value_rows
    BLOCK_N: tl.constexpr = shape.block_n
    place, factors = head.place, head.factors
    acc, peak = sums.acc, sums.peak
    base, total = sums.base, sums.total
    unit = log2_unit(factors, features)
    reach = rows_in_reach(head.mask, queries.start, queries.last, place.length_k, features)
    own_queries = queries.start + tl.arange(0, shape.block_m)
    for step in tl.range(part.begin, part.end):
        start = walked_start(part, step, BLOCK_N, features)
        own_keys = start + tl.arange(0, BLOCK_N)
        seen = None
        k = load_rows(keys.key, start, place.length_k, KEY_ROWS, PARTIAL)
        products = tl.dot(queries.q, tl.trans(k), input_precision=features.precision)
        added = 0.0
        if features.bias == "key":
            added = load_key_bias(head, own_keys)[None, :]
        if features.bias == "full":
            added = load_bias(head, own_queries, own_keys, False, PARTIAL)
        score = scores_of(products, added, factors, features)
        if PARTIAL:
            k_marks = key_marks(head, own_keys, features)
            visible = visibility(head, queries.marks, k_marks, own_queries, own_keys, start, features, False)
            score = tl.where(visible, score, float("-inf"))
            if CAREFUL:
                seen = tl.max(visible.to(tl.int32), 0) != 0
        weights = weights_of(score, peak, base, unit, features)
        p = weights.p
        total = total * weights.shrink + tl.sum(p, 1)
        if features.dropout:
            keep = dropout_keep(head.dropout, queries.start, start, shape, features)
            p = tl.where(keep, p, 0.0)
        v = load_rows(keys.value, start, reach.end, VALUE_ROWS, PARTIAL, reach.begin, features.banded, seen)
        acc = tl.dot(p.to(v.dtype), v, acc * weights.shrink[:, None], input_precision=features.precision)
        peak, base = weights.peak, weights.base
    return Softmax(acc, peak, base, total)


@triton.jit
def attend_share(
    queries, keys, walk, split, splits, head, shape: tl.constexpr, features: tl.constexpr, CAREFUL: tl.constexpr
):
    """Return the running softmax after one of `splits` shares of a walk."""
    BLOCK_M: tl.constexpr = shape.block_m
    PADDED_VALUE: tl.constexpr = shape.padded_value
    peak, base = least_peaks(tl.zeros((BLOCK_M,), tl.float32), head.factors, features)
    sums = Softmax(tl.zeros((BLOCK_M, PADDED_VALUE), tl.float32), peak, base, tl.zeros((BLOCK_M,), tl.float32))
    for PARTIAL in tl.static_range(2):
        part = share_of(part_of(walk, PARTIAL), split, splits)
        sums = attend(sums, queries, keys, part, head, shape, features, PARTIAL, CAREFUL)
    return sums


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def forward_kernel(
    query, key, value, bias, out, lse, lse_tail, row_max, sink, tiles, bits,
    q_segments, k_segments, start, end, hidden_from, hidden_to, seed, cu_seqlens_q, cu_seqlens_k,
    query_b, query_s, query_h, key_b, key_s, key_h, value_b, value_s, value_h, out_b, out_s, out_h, out_split,
    lse_b, lse_h, lse_tail_b, lse_tail_h, row_max_b, row_max_h, lse_split,
    bias_b, bias_h, bias_q, bias_group, tiles_b, tiles_h, tiles_w, bits_b, bits_h, bits_r, mask_group,
    q_segments_b, keys_b, keys_h, key_group, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin,
    blocks, heads, seqlen_q, seqlen_k, longest_q, longest_k, band_lo, band_hi, ratio, factor,
    shape: tl.constexpr, features: tl.constexpr,
):  # fmt: skip
    """Write out and the statistics of one block of queries, or of one share of its walk (`program_id(1)` says which)."""
    QUERY_ROWS: tl.constexpr = shape.query_rows
    OUT_ROWS: tl.constexpr = shape.out_rows
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
    program = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    place, start_q = program_of(program, tl.arange(0, SEARCHED), blocks, lengths, lists, shape, features, False)
    if start_q >= place.length_q:
        return

    BLOCK_M: tl.constexpr = shape.block_m
    query = rows_of(query, query_b, query_s, query_h, place.batch, place.head, place.q_begin)
    kv_head = place.head // features.group
    keys = KeyRows(
        rows_of(key, key_b, key_s, key_h, place.batch, kv_head, place.k_begin),
        rows_of(value, value_b, value_s, value_h, place.batch, kv_head, place.k_begin),
    )
    head = head_of(operands, place, place.head, start_q, band_of(Band(band_lo, band_hi), place, False), features)
    last_q = last_owned(place, start_q, shape, False)
    walk = plan_walk(head, start_q, last_q, lists, shape, features, False)
    q = load_rows(query, start_q, place.length_q, QUERY_ROWS, True)
    marks = query_marks(head, start_q + tl.arange(0, BLOCK_M), features)
    queries = Queries(q, marks, start_q, last_q)
    sums = attend_share(queries, keys, walk, split, splits, head, shape, features, False)
    if features.mask != "none":
        if some_nan(sums.acc):
            sums = attend_share(queries, keys, walk, split, splits, head, shape, features, True)

    results = RowResults(
        lse, lse_b, lse_h, lse_tail, lse_tail_b, lse_tail_h, row_max, row_max_b, row_max_h, sink, rescale
    )
    rows = start_q + tl.arange(0, BLOCK_M)
    scale = finish_rows(sums.peak, sums.total, rows, split.to(tl.int64) * lse_split, results, head, features)
    acc = tl.where((sums.total == 0.0)[:, None], 0.0, sums.acc * scale[:, None])
    out = head_rows(out, place.batch, place.head, place.q_begin, out_b, out_s, out_h) + split.to(tl.int64) * out_split
    store_rows(Rows(out, out_s), start_q, place.length_q, acc, OUT_ROWS)


def split_count(programs: int, longest_k: int, config: PortableForward | AmpereForward, num_sms: int) -> int:
    """Return the number of programs that share one walk: enough to fill the multiprocessors, each with some steps to do."""
    if 2 * programs > num_sms:
        return 1
    steps = ceil_div(longest_k, config.block_n)
    return max(1, min(config.per_sm * num_sms // programs, steps // SPLIT_STEPS))


def splits_of(call: Call, size: Extent, config: PortableForward | AmpereForward, num_sms: int) -> int:
    """Return the number of programs that share one walk of a call; of a batch-invariant one, as if a batch entry were alone.

    The lengths of packed sequences are on the device, so that their walks are not shared then.
    """
    if call.options.batch_invariant:
        if size.packed:
            return 1
        size = size._replace(batch=1)
    programs = blocks_and_programs(size, size.seqlen_q, size.heads, config.block_m, None)[1]
    return split_count(programs, size.longest_k, config, num_sms)


def forward(call: Call, result: Result, config: PortableForward) -> None:
    """Write out `[B, Sq, H, Dv]`, and lse, lse_tail and row_max `[B, H, Sq]` (packed: `[total_q, H, Dv]`, `[H, total_q]`)."""
    forward_with(forward_kernel, call, result, config, 16, num_stages=config.num_stages)


def forward_with(
    kernel: Any, call: Call, result: Result, config: PortableForward | AmpereForward, least: int, **options: Any
) -> None:
    """Run a forward with a kernel that takes the arguments of `forward_kernel`, and blocks at least `least` columns wide."""
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
        "shape": shape_of(call, config.block_m, config.block_n, aligned, least),
        "features": features_of(call, mask.row_tiles),
        "num_warps": config.num_warps,
        **options,
    }
    splits = splits_of(call, size, config, arch.physical(call.query.device).num_sms)
    if splits == 1:
        _launch(kernel, arguments, result, (programs, 1), blocks)
        return
    shares = Result(*[None if part is None else workspace(call.query, splits, *part.shape) for part in result])
    if call.varlen is not None:
        _empty_statistics(shares)
    arguments["sink"] = None  # which takes its share of all shares together
    arguments["shape"] = shape_of(call, config.block_m, config.block_n, aligned and rows_are_aligned(shares.out), least)
    _launch(kernel, arguments, shares, (programs, splits), blocks)
    merge(shares, result, call.sink)


def _empty_statistics(result: Result) -> None:
    """Write the statistics of rows without visible keys."""
    computed(Tensor.fill_, result.lse, float("-inf"))
    computed(Tensor.zero_, result.lse_tail)
    if result.row_max is not None:
        computed(Tensor.fill_, result.row_max, float("-inf"))


def _statistics(result: Result) -> dict[str, Any]:
    """Return the statistics of a result and their strides, as arguments."""
    return statistic_arguments(lse=result.lse, lse_tail=result.lse_tail, row_max=result.row_max)


def first_share(result: Result, shares: int) -> tuple[Result, dict[str, int]]:
    """Return the first of several shares of a result, or the only one, and how far they lie apart, as arguments."""
    if shares == 1:
        return result, {"out_split": 0, "lse_split": 0}
    strides = {"out_split": result.out.stride(0), "lse_split": result.lse.stride(0)}
    return Result(*[None if part is None else part[0] for part in result]), strides


def _launch(kernel: Any, arguments: dict[str, Any], result: Result, grid: tuple[int, int], blocks: int) -> None:
    """Launch the kernel for a result, or for shares of one: `[splits, B, Sq, H, Dv]` and `[splits, B, H, Sq]`."""
    one, strides = first_share(result, grid[1])
    launch(
        kernel,
        grid,
        out=result.out,
        **row_strides("out", one.out),
        **strides,
        **_statistics(one) | {"lse": result.lse, "lse_tail": result.lse_tail, "row_max": result.row_max},
        blocks=blocks,
        **arguments,
    )


def merge(shares: Result, result: Result, sink: Tensor | None) -> None:
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
        num_warps=4,
    )
