"""Attention computed again, without what the mask hides, where kernels for SM 9.0 made NaN of it.

Those kernels multiply whole tiles, so that a NaN in a row which a mask hides from everybody reaches others as 0 * NaN. They
note it in a word of memory where a result is NaN (`hopper/unseen.py`). The kernels here come behind them in the stream. Mostly the
word is 0, and they do nothing: their few programs are there before the kernel in front has ended, and take a microsecond.
Else they write all results anew, as the portable kernels do in a careful walk: hidden rows are not loaded. A NaN that somebody
does see is in their results, too.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dmattn_ops.call import Call, Gradients, Result, Saved, in_natural_units, rows_are_aligned
from dmattn_ops.choice import arch, config
from dmattn_ops.kernels.portable.arguments import (
    ROW_TENSORS,
    UNSPECIALIZED,
    Extent,
    blocks_and_programs,
    ceil_div,
    extent,
    features_of,
    list_arguments,
    row_strides,
    shape_of,
    shared_arguments,
    statistic_strides,
)
from dmattn_ops.kernels.portable.dropout import Seeds
from dmattn_ops.kernels.portable.forward import Queries as OwnQueries
from dmattn_ops.kernels.portable.forward import attend_share
from dmattn_ops.kernels.portable.heads import Operands, head_of, program_of
from dmattn_ops.kernels.portable.keys import Keys, Queries, Sums, gather_queries
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
)
from dmattn_ops.kernels.portable.primitives import KeyRows, Rows, load_rows, rows_of, statistics_of, store_rows
from dmattn_ops.kernels.portable.queries import gather_keys, load_queries
from dmattn_ops.kernels.portable.scores import BiasArray, Factors, log_terms
from dmattn_ops.kernels.portable.softmax import RowResults, finish_rows
from dmattn_ops.kernels.portable.statistics import STATISTICS_ROWS, RowStatistics
from dmattn_ops.kernels.portable.visibility import BitArray, KeyArrays, MaskArrays, key_marks, query_marks
from dmattn_ops.kernels.sinks import take_sink
from dmattn_ops.launching.launch import launch, workspace
from dmattn_ops.launching.overlap import follow_kernel_before

COUNTS = 4  # words that a kernel counts in, of which these two are read here
SUSPECT, ENDED = 2, 3  # whether a result is NaN, and how many programs of a forward have ended
_SUSPECT, _ENDED = tl.constexpr(SUSPECT), tl.constexpr(ENDED)
_UNSPECIALIZED = (
    *UNSPECIALIZED,
    "programs",
    "key_programs",
    "query_programs",
    "key_blocks_of_head",
    "query_blocks_of_head",
)


@triton.jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def _forward_again(
    counts, query, key, value, bias, out, lse, lse_tail, row_max, sink, tiles, bits,
    q_segments, k_segments, start, end, hidden_from, hidden_to, seed, cu_seqlens_q, cu_seqlens_k,
    query_b, query_s, query_h, key_b, key_s, key_h, value_b, value_s, value_h, out_b, out_s, out_h,
    lse_b, lse_h, lse_tail_b, lse_tail_h, row_max_b, row_max_h,
    bias_b, bias_h, bias_q, bias_k, bias_group, tiles_b, tiles_h, tiles_r, tiles_w, bits_b, bits_h, bits_r, mask_group,
    q_segments_b, keys_b, keys_h, key_group, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin,
    blocks, heads, seqlen_q, seqlen_k, longest_q, longest_k, band_lo, band_hi, ratio, factor, programs,
    shape: tl.constexpr, features: tl.constexpr,
):  # fmt: skip
    """Write out and the statistics of all blocks of queries where `counts` says that a result is NaN, and clear that word."""
    follow_kernel_before()
    if tl.load(counts + _SUSPECT) == 0:
        return
    BLOCK_M: tl.constexpr = shape.block_m
    QUERY_ROWS: tl.constexpr = shape.query_rows
    OUT_ROWS: tl.constexpr = shape.out_rows
    lengths = Lengths(heads, seqlen_q, seqlen_k, longest_q, longest_k, cu_seqlens_q, cu_seqlens_k)
    lists = Lists(tiles, tiles_b, tiles_h, tiles_r, tiles_w, mask_group)
    operands = Operands(
        lists,
        MaskArrays(
            BitArray(bits, bits_b, bits_h, bits_r, mask_group),
            KeyArrays(k_segments, start, end, hidden_from, hidden_to, keys_b, keys_h, key_group),
            q_segments,
            q_segments_b,
        ),
        BiasArray(bias, bias_b, bias_h, bias_q, bias_k, bias_group),
        Seeds(seed, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin),
        Factors(ratio, factor),
    )
    results = RowResults(
        lse, lse_b, lse_h, lse_tail, lse_tail_b, lse_tail_h, row_max, row_max_b, row_max_h, sink, rescale
    )
    zero = tl.cast(0, tl.int32)
    for program in tl.range(tl.program_id(0), programs, tl.num_programs(0)):
        place, start_q = program_of(program, tl.arange(0, SEARCHED), blocks, lengths, lists, shape, features, False)
        if start_q < place.length_q:
            kv_head = place.head // features.group
            keys = KeyRows(
                rows_of(key, key_b, key_s, key_h, place.batch, kv_head, place.k_begin),
                rows_of(value, value_b, value_s, value_h, place.batch, kv_head, place.k_begin),
            )
            head = head_of(
                operands, place, place.head, start_q, band_of(Band(band_lo, band_hi), place, False), features
            )
            last_q = last_owned(place, start_q, shape, False)
            walk = plan_walk(head, start_q, last_q, lists, shape, features, False)
            own = rows_of(query, query_b, query_s, query_h, place.batch, place.head, place.q_begin)
            q = load_rows(own, start_q, place.length_q, QUERY_ROWS, True)
            queries = OwnQueries(q, query_marks(head, start_q + tl.arange(0, BLOCK_M), features), start_q, last_q)
            sums = attend_share(queries, keys, walk, zero, 1, head, shape, features, True)
            rows = start_q + tl.arange(0, BLOCK_M)
            scale = finish_rows(sums.peak, sums.total, rows, 0, results, head, features)
            acc = tl.where((sums.total == 0.0)[:, None], 0.0, sums.acc * scale[:, None])
            own_out = Rows(head_rows(out, place.batch, place.head, place.q_begin, out_b, out_s, out_h), out_s)
            store_rows(own_out, start_q, place.length_q, acc, OUT_ROWS)
    if tl.atomic_add(counts + _ENDED, 1) == tl.num_programs(0) - 1:  # the last one: all have read the word
        tl.store(counts + _SUSPECT, 0)
        tl.store(counts + _ENDED, 0)


@triton.jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def _statistics_again(
    counts, grad_out, out, lse, lse_tail, grad_lse, sink, log_sum, log_rest, delta,
    grad_out_b, grad_out_s, grad_out_h, out_b, out_s, out_h, lse_b, lse_h, lse_tail_b, lse_tail_h,
    grad_lse_b, grad_lse_h, grad_lse_s, heads, seqlen_q, blocks, programs, shape: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """Write what `statistics.statistics_kernel` does where `counts` says that a result is NaN, but for the gradient of a sink."""
    follow_kernel_before()
    if tl.load(counts + _SUSPECT) == 0:
        return
    ROWS: tl.constexpr = shape.block_m
    OUT_ROWS: tl.constexpr = shape.out_rows
    zero = tl.cast(0, tl.int32)
    for program in tl.range(tl.program_id(0), programs, tl.num_programs(0)):
        head = (program % heads).to(tl.int64)
        batch = (program // heads // blocks).to(tl.int64)
        first = (program // heads) % blocks * ROWS
        rows = first + tl.arange(0, ROWS)
        inside = rows < seqlen_q
        own_grad = rows_of(grad_out, grad_out_b, grad_out_s, grad_out_h, batch, head, zero)
        own_out = rows_of(out, out_b, out_s, out_h, batch, head, zero)
        gradient = load_rows(own_grad, first, seqlen_q, OUT_ROWS, True).to(tl.float32)
        row_delta = tl.sum(gradient * load_rows(own_out, first, seqlen_q, OUT_ROWS, True).to(tl.float32), 1)
        if grad_lse is not None:
            at = grad_lse + batch * grad_lse_b + head * grad_lse_h + rows.to(tl.int64) * grad_lse_s
            row_delta -= tl.load(at, mask=inside, other=0.0).to(tl.float32)
        row_lse = tl.load(lse + batch * lse_b + head * lse_h + rows, mask=inside, other=0.0)
        row_tail = tl.load(lse_tail + batch * lse_tail_b + head * lse_tail_h + rows, mask=inside, other=0.0)
        if sink is not None:
            row_tail, _ = take_sink(tl.load(sink + head).to(tl.float32), row_lse, row_tail)
        row_log_sum, row_log_rest = log_terms(row_lse, row_tail, NATURAL)
        to = (batch * heads + head) * seqlen_q + rows
        tl.store(log_sum + to, row_log_sum, mask=inside)
        tl.store(log_rest + to, row_log_rest, mask=inside)
        tl.store(delta + to, tl.where(row_lse == float("-inf"), 0.0, row_delta), mask=inside)


@triton.jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def _keys_again(
    counts, query, key, value, bias, grad_out, log_sum, log_rest, delta, dk, dv, key_sums, tiles, bits,
    q_segments, k_segments, start, end, hidden_from, hidden_to, seed, cu_seqlens_q, cu_seqlens_k,
    query_b, query_s, query_h, key_b, key_s, key_h, value_b, value_s, value_h, grad_out_b, grad_out_s, grad_out_h,
    dk_b, dk_s, dk_h, dv_b, dv_s, dv_h,
    bias_b, bias_h, bias_q, bias_k, bias_group, tiles_b, tiles_h, tiles_r, tiles_w, bits_b, bits_h, bits_r, mask_group,
    q_segments_b, keys_b, keys_h, key_group, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin,
    blocks, heads, seqlen_q, seqlen_k, longest_q, longest_k, band_lo, band_hi, ratio, factor, softmax_scale, programs,
    shape: tl.constexpr, features: tl.constexpr,
):  # fmt: skip
    """Write dk, dv and the sums of dS of all blocks of keys where `counts` says that a result is NaN."""
    follow_kernel_before()
    if tl.load(counts + _SUSPECT) == 0:
        return
    KEY_ROWS: tl.constexpr = shape.key_rows
    VALUE_ROWS: tl.constexpr = shape.value_rows
    BLOCK_N: tl.constexpr = shape.block_n
    PADDED_HEAD: tl.constexpr = shape.padded_head
    PADDED_VALUE: tl.constexpr = shape.padded_value
    GROUP: tl.constexpr = features.group
    KEY_SUMS: tl.constexpr = key_sums is not None
    lengths = Lengths(heads, seqlen_q, seqlen_k, longest_q, longest_k, cu_seqlens_q, cu_seqlens_k)
    lists = Lists(tiles, tiles_b, tiles_h, tiles_r, tiles_w, mask_group)
    operands = Operands(
        lists,
        MaskArrays(
            BitArray(bits, bits_b, bits_h, bits_r, mask_group),
            KeyArrays(k_segments, start, end, hidden_from, hidden_to, keys_b, keys_h, key_group),
            q_segments,
            q_segments_b,
        ),
        BiasArray(bias, bias_b, bias_h, bias_q, bias_k, bias_group),
        Seeds(seed, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin),
        Factors(ratio, factor),
    )
    for program in tl.range(tl.program_id(0), programs, tl.num_programs(0)):
        place, start_k = program_of(program, tl.arange(0, SEARCHED), blocks, lengths, lists, shape, features, True)
        if start_k < place.length_k:
            kv_head = place.head
            own_key = rows_of(key, key_b, key_s, key_h, place.batch, kv_head, place.k_begin)
            own_value = rows_of(value, value_b, value_s, value_h, place.batch, kv_head, place.k_begin)
            k = load_rows(own_key, start_k, place.length_k, KEY_ROWS, True)
            v = load_rows(own_value, start_k, place.length_k, VALUE_ROWS, True)
            last_k = last_owned(place, start_k, shape, True)
            band = band_of(Band(band_lo, band_hi), place, True)
            key_grad = tl.zeros((BLOCK_N, PADDED_HEAD), tl.float32)
            value_grad = tl.zeros((BLOCK_N, PADDED_VALUE), tl.float32)
            for member in tl.range(GROUP):
                index = kv_head * GROUP + member
                every_head = place.batch.to(tl.int64) * heads + index
                queries = Queries(
                    rows_of(query, query_b, query_s, query_h, place.batch, index, place.q_begin),
                    rows_of(grad_out, grad_out_b, grad_out_s, grad_out_h, place.batch, index, place.q_begin),
                    statistics_of(log_sum, log_rest, delta, every_head * seqlen_q + place.q_begin),
                )
                head = head_of(operands, place, index, start_k, band, features)
                marks = key_marks(head, start_k + tl.arange(0, BLOCK_N), features)
                keys = Keys(k, v, marks, start_k, last_k)
                walk = plan_walk(head, start_k, last_k, lists, shape, features, True)
                sums = Sums(key_grad, value_grad, tl.zeros((BLOCK_N,), tl.float32))
                for PARTIAL in tl.static_range(2):
                    part = part_of(walk, PARTIAL)
                    sums = gather_queries(sums, keys, queries, part, head, shape, features, KEY_SUMS, PARTIAL, True)
                if KEY_SUMS:
                    rows = start_k + tl.arange(0, BLOCK_N)
                    head_sums = key_sums + every_head * seqlen_k + place.k_begin
                    tl.store(head_sums + rows, sums.ds, mask=rows < place.length_k)
                key_grad = sums.dk
                value_grad = sums.dv
            if features.dropout:
                value_grad *= rescale
            own_dk = rows_of(dk, dk_b, dk_s, dk_h, place.batch, kv_head, place.k_begin)
            own_dv = rows_of(dv, dv_b, dv_s, dv_h, place.batch, kv_head, place.k_begin)
            store_rows(own_dk, start_k, place.length_k, key_grad * softmax_scale, KEY_ROWS)
            store_rows(own_dv, start_k, place.length_k, value_grad, VALUE_ROWS)


@triton.jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def _queries_again(
    counts, query, key, value, bias, grad_out, log_sum, log_rest, delta, dq, tiles, bits,
    q_segments, k_segments, start, end, hidden_from, hidden_to, seed, cu_seqlens_q, cu_seqlens_k,
    query_b, query_s, query_h, key_b, key_s, key_h, value_b, value_s, value_h, grad_out_b, grad_out_s, grad_out_h,
    dq_b, dq_s, dq_h,
    bias_b, bias_h, bias_q, bias_k, bias_group, tiles_b, tiles_h, tiles_r, tiles_w, bits_b, bits_h, bits_r, mask_group,
    q_segments_b, keys_b, keys_h, key_group, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin,
    blocks, heads, seqlen_q, seqlen_k, longest_q, longest_k, band_lo, band_hi, ratio, factor, softmax_scale, programs,
    shape: tl.constexpr, features: tl.constexpr,
):  # fmt: skip
    """Write dq of all blocks of queries where `counts` says that a result is NaN."""
    follow_kernel_before()
    if tl.load(counts + _SUSPECT) == 0:
        return
    QUERY_ROWS: tl.constexpr = shape.query_rows
    BLOCK_M: tl.constexpr = shape.block_m
    PADDED_HEAD: tl.constexpr = shape.padded_head
    lengths = Lengths(heads, seqlen_q, seqlen_k, longest_q, longest_k, cu_seqlens_q, cu_seqlens_k)
    lists = Lists(tiles, tiles_b, tiles_h, tiles_r, tiles_w, mask_group)
    operands = Operands(
        lists,
        MaskArrays(
            BitArray(bits, bits_b, bits_h, bits_r, mask_group),
            KeyArrays(k_segments, start, end, hidden_from, hidden_to, keys_b, keys_h, key_group),
            q_segments,
            q_segments_b,
        ),
        BiasArray(bias, bias_b, bias_h, bias_q, bias_k, bias_group),
        Seeds(seed, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin),
        Factors(ratio, factor),
    )
    for program in tl.range(tl.program_id(0), programs, tl.num_programs(0)):
        place, start_q = program_of(program, tl.arange(0, SEARCHED), blocks, lengths, lists, shape, features, False)
        if start_q < place.length_q:
            kv_head = place.head // features.group
            keys = KeyRows(
                rows_of(key, key_b, key_s, key_h, place.batch, kv_head, place.k_begin),
                rows_of(value, value_b, value_s, value_h, place.batch, kv_head, place.k_begin),
            )
            own_query = rows_of(query, query_b, query_s, query_h, place.batch, place.head, place.q_begin)
            own_grad = rows_of(grad_out, grad_out_b, grad_out_s, grad_out_h, place.batch, place.head, place.q_begin)
            head = head_of(
                operands, place, place.head, start_q, band_of(Band(band_lo, band_hi), place, False), features
            )
            last_q = last_owned(place, start_q, shape, False)
            walk = plan_walk(head, start_q, last_q, lists, shape, features, False)
            first = (place.batch.to(tl.int64) * heads + place.head) * seqlen_q + place.q_begin
            statistics = statistics_of(log_sum, log_rest, delta, first)
            queries = load_queries(own_query, own_grad, statistics, start_q, head, shape, features)
            query_grad = tl.zeros((BLOCK_M, PADDED_HEAD), tl.float32)
            for PARTIAL in tl.static_range(2):
                part = part_of(walk, PARTIAL)
                query_grad = gather_keys(query_grad, queries, keys, part, head, None, shape, features, PARTIAL, True)
            own_dq = rows_of(dq, dq_b, dq_s, dq_h, place.batch, place.head, place.q_begin)
            store_rows(own_dq, start_q, place.length_q, query_grad * softmax_scale, QUERY_ROWS)


def _launch(kernel: Any, call: Call, programs: int, counts: Tensor, arguments: dict[str, Any]) -> None:
    """Launch a kernel with no more programs than there are multiprocessors, which share the work of `programs`."""
    if programs:
        grid = (min(programs, arch.physical(call.query.device).num_sms),)
        launch(kernel, grid, counts=counts, programs=programs, follows=True, num_stages=1, **arguments)


def forward_again(call: Call, result: Result, counts: Tensor) -> None:
    """Write out and the statistics anew, behind a kernel that has noted a NaN in word SUSPECT of `counts`; else do nothing.

    Intervals have their lists already. Where sequences are packed, rows that belong to none stay as that kernel left them.
    """
    mask, size, made = call.mask, extent(call), config.AGAIN_FORWARD
    blocks, programs = blocks_and_programs(size, size.seqlen_q, size.heads, made.block_m, mask.row_tiles)
    statistics = {"lse": result.lse, "lse_tail": result.lse_tail, "row_max": result.row_max}
    arguments = shared_arguments(call, size) | list_arguments(mask.row_tiles, mask.row_bits, size.heads)
    for name, tensor in statistics.items():
        arguments |= {name: tensor, **statistic_strides(name, tensor)}
    arguments |= {
        "out": result.out,
        **row_strides("out", result.out),
        "sink": call.sink,
        "blocks": blocks,
        "shape": shape_of(
            call, made.block_m, made.block_n, rows_are_aligned(call.query, call.key, call.value, result.out)
        ),
        "features": features_of(call, mask.row_tiles),
        "num_warps": made.num_warps,
    }
    _launch(_forward_again, call, programs, counts, arguments)


def backward_again(call: Call, saved: Saved, grads: Gradients, key_sums: Tensor | None, counts: Tensor) -> None:
    """Write dq, dk, dv and `key_sums` `[B, H, Sk]` (the sums of dS, where dbias is made of them) as `forward_again` does.

    Where sequences are packed, rows that belong to none stay as the kernel in front left them.
    """
    mask, size, made = call.mask, extent(call), config.AGAIN_BACKWARD
    shared = shared_arguments(call, size) | {
        "grad_out": grads.grad_out,
        **row_strides("grad_out", grads.grad_out),
        **_statistics(call, saved, grads, size, counts)._asdict(),
        "softmax_scale": float(call.options.softmax_scale),
        "num_warps": made.num_warps,
    }
    tensors = (call.query, call.key, call.value, grads.grad_out, grads.dq, grads.dk, grads.dv)
    shape = shape_of(call, made.block_m, made.block_n, rows_are_aligned(*tensors))
    blocks, programs = blocks_and_programs(size, size.seqlen_k, size.kv_heads, made.block_n, mask.col_tiles)
    of_keys = {
        **list_arguments(mask.col_tiles, mask.col_bits, size.heads),
        "dk": grads.dk,
        **row_strides("dk", grads.dk),
        "dv": grads.dv,
        **row_strides("dv", grads.dv),
        "key_sums": None if grads.dbias is None else key_sums,
        "blocks": blocks,
        "shape": shape,
        "features": features_of(call, mask.col_tiles),
    }
    _launch(_keys_again, call, programs, counts, shared | of_keys)
    blocks, programs = blocks_and_programs(size, size.seqlen_q, size.heads, made.block_m, mask.row_tiles)
    of_queries = {
        **list_arguments(mask.row_tiles, mask.row_bits, size.heads),
        "dq": grads.dq,
        **row_strides("dq", grads.dq),
        "blocks": blocks,
        "shape": shape,
        "features": features_of(call, mask.row_tiles),
    }
    _launch(_queries_again, call, programs, counts, shared | of_queries)


def _statistics(call: Call, saved: Saved, grads: Gradients, size: Extent, counts: Tensor) -> RowStatistics:
    """Return room for the statistics of a call's rows, which are computed where a NaN was noted."""
    out, heads, seqlen_q = saved.out, size.heads, size.seqlen_q
    batch = 1 if size.packed else size.batch
    statistics = RowStatistics(*[workspace(call.query, batch, heads, seqlen_q) for _ in RowStatistics._fields])
    blocks = ceil_div(seqlen_q, STATISTICS_ROWS)
    arguments = {
        "grad_out": grads.grad_out,
        **row_strides("grad_out", grads.grad_out),
        "out": out,
        **row_strides("out", out),
        "lse": saved.lse,
        **statistic_strides("lse", saved.lse),
        "lse_tail": saved.lse_tail,
        **statistic_strides("lse_tail", saved.lse_tail),
        "grad_lse": grads.grad_lse,
        **statistic_strides("grad_lse", grads.grad_lse),
        "grad_lse_s": 0 if grads.grad_lse is None else grads.grad_lse.stride(-1),
        "sink": call.sink,
        **statistics._asdict(),
        "heads": heads,
        "seqlen_q": seqlen_q,
        "blocks": blocks,
        "shape": shape_of(call, STATISTICS_ROWS, 0, rows_are_aligned(grads.grad_out, out)),
        "NATURAL": in_natural_units(call),
        "num_warps": 4,
    }
    _launch(_statistics_again, call, batch * heads * blocks, counts, arguments)
    return statistics
