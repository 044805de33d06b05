"""Attention computed again, without what the mask hides, where kernels for SM 9.0 made NaN of it.

Those kernels multiply whole tiles, so that a NaN in a row which a mask hides from everybody reaches others as 0 * NaN. They
note it in a word of memory where a result is NaN (`hopper/unseen.py`). The kernels here come behind them in the stream. Mostly the
word is 0, and they do nothing: their few programs are there before the kernel in front has ended, and take a microsecond.
Else they write all results anew, as the portable kernels do in a careful walk: hidden rows are not loaded. A NaN that somebody
does see is in their results, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dmattn_ops.call import Call, Gradients, Result, Saved, rows_are_aligned
from dmattn_ops.choice import arch, config
from dmattn_ops.kernels.portable.arguments import (
    ROW_TENSORS,
    UNSPECIALIZED,
    blocks_and_programs,
    extent,
    features_of,
    list_arguments,
    row_strides,
    shape_of,
    shared_arguments,
    statistic_arguments,
)
from dmattn_ops.kernels.portable.dropout import Seeds
from dmattn_ops.kernels.portable.forward import Queries as OwnQueries
from dmattn_ops.kernels.portable.forward import attend_share
from dmattn_ops.kernels.portable.heads import Operands, head_of, program_of
from dmattn_ops.kernels.portable.keys import Block, Inputs, gather_group
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
from dmattn_ops.kernels.portable.primitives import (
    Array,
    KeyRows,
    Rows,
    Statistics,
    load_rows,
    rows_in,
    rows_of,
    statistics_of,
    store_rows,
)
from dmattn_ops.kernels.portable.queries import gather_keys, load_queries
from dmattn_ops.kernels.portable.scores import BiasArray, Factors
from dmattn_ops.kernels.portable.softmax import RowResults, finish_rows
from dmattn_ops.kernels.portable.statistics import RowStatistics, store_terms
from dmattn_ops.kernels.portable.visibility import BitArray, KeyArrays, MaskArrays, query_marks
from dmattn_ops.kernels.sinks import take_sink
from dmattn_ops.launching.launch import computed, launch, workspace
from dmattn_ops.launching.overlap import follow_kernel_before

COUNTS = 4  # words that a kernel counts in, of which these two are read here
SUSPECT, ENDED = 2, 3  # whether a result is NaN, and how many programs of a forward have ended
_COUNTS, _SUSPECT, _ENDED = tl.constexpr(COUNTS), tl.constexpr(SUSPECT), tl.constexpr(ENDED)
_UNSPECIALIZED = (*UNSPECIALIZED, "programs", "entries")


@triton.jit
def _suspects(counts, entries):
    """Return 0 unless a result is NaN; each of `entries`, unless that is None, has counts."""
    AT_ONCE: tl.constexpr = 1024
    found = tl.load(counts + _SUSPECT)
    if entries is not None:
        for first in tl.range(0, entries, AT_ONCE):
            entry = first + tl.arange(0, AT_ONCE)
            found |= tl.max(tl.load(counts + entry * _COUNTS + _SUSPECT, mask=entry < entries, other=0), 0)
    return found


@triton.jit
def _is_wanted(inside, counts, place, entries):
    """Return whether a block, which lies `inside` a sequence, is to be written: all are, or those of entries that note a NaN."""
    if entries is not None:
        inside &= tl.load(counts + place.batch * _COUNTS + _SUSPECT) != 0
    return inside


@triton.jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def _forward_again(
    counts, entries, query, key, value, bias, out, lse, lse_tail, row_max, sink, tiles, bits,
    q_segments, k_segments, start, end, hidden_from, hidden_to, seed, cu_seqlens_q, cu_seqlens_k,
    query_b, query_s, query_h, key_b, key_s, key_h, value_b, value_s, value_h, out_b, out_s, out_h,
    lse_b, lse_h, lse_tail_b, lse_tail_h, row_max_b, row_max_h,
    bias_b, bias_h, bias_q, bias_group, tiles_b, tiles_h, tiles_w, bits_b, bits_h, bits_r, mask_group,
    q_segments_b, keys_b, keys_h, key_group, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin,
    blocks, heads, seqlen_q, seqlen_k, longest_q, longest_k, band_lo, band_hi, ratio, factor, programs,
    shape: tl.constexpr, features: tl.constexpr,
):  # fmt: skip
    """Write out and the statistics of all blocks of queries where `counts` says that a result is NaN, and clear that word.

    Where each of `entries` has counts, which nobody reads again, write those of the batch entries with a NaN.
    """
    follow_kernel_before()
    if _suspects(counts, entries) == 0:
        return
    BLOCK_M: tl.constexpr = shape.block_m
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
    results = RowResults(
        lse, lse_b, lse_h, lse_tail, lse_tail_b, lse_tail_h, row_max, row_max_b, row_max_h, sink, rescale
    )
    zero = tl.cast(0, tl.int32)
    for program in tl.range(tl.program_id(0), programs, tl.num_programs(0)):
        place, start_q = program_of(program, tl.arange(0, SEARCHED), blocks, lengths, lists, shape, features, False)
        if _is_wanted(start_q < place.length_q, counts, place, entries):
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
    if entries is None:
        if tl.atomic_add(counts + _ENDED, 1) == tl.num_programs(0) - 1:  # the last one: all have read the word
            tl.store(counts + _SUSPECT, 0)
            tl.store(counts + _ENDED, 0)


class GivenRows(NamedTuple):
    """What statistics of rows are made of; row statistics are `[B, H, Sq]` without strides of their own."""

    out: Any  # Array
    grad_out: Any  # Array
    lse: Any
    lse_tail: Any
    grad_lse: Any  # None where no gradient arrives for lse
    sink: Any  # or None


@triton.jit
def _write_statistics(statistics, given, first, end, heads, seqlen_q, shape: tl.constexpr, features: tl.constexpr):
    """Write what `statistics.statistics_kernel` does for heads `first` to before `end`, counted over batches, for this program.

    Other programs may write the same of the same heads. The gradient of a sink is not among it.
    """
    ROWS: tl.constexpr = shape.block_m
    OUT_ROWS: tl.constexpr = shape.out_rows
    zero = tl.cast(0, tl.int32)
    blocks = tl.cdiv(seqlen_q, ROWS)
    for index in tl.range(first, end):
        batch, head = index // heads, index % heads
        own_grad, own_out = rows_in(given.grad_out, batch, head, zero), rows_in(given.out, batch, head, zero)
        for block in tl.range(0, blocks):
            start = block * ROWS
            rows = start + tl.arange(0, ROWS)
            inside = rows < seqlen_q
            at = tl.cast(index, tl.int64) * seqlen_q + rows
            gradient = load_rows(own_grad, start, seqlen_q, OUT_ROWS, True).to(tl.float32)
            delta = tl.sum(gradient * load_rows(own_out, start, seqlen_q, OUT_ROWS, True).to(tl.float32), 1)
            if given.grad_lse is not None:
                delta -= tl.load(given.grad_lse + at, mask=inside, other=0.0)
            lse = tl.load(given.lse + at, mask=inside, other=0.0)
            tail = tl.load(given.lse_tail + at, mask=inside, other=0.0)
            if given.sink is not None:
                tail, _ = take_sink(tl.load(given.sink + head).to(tl.float32), lse, tail)
            made = statistics_of(statistics.log_sum, statistics.log_rest, statistics.delta, at)
            store_terms(made, lse, tail, delta, inside, features.natural)
    tl.debug_barrier()  # every thread reads what others have written


@triton.jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def _queries_again(
    counts, entries, query, key, value, bias, out, grad_out, lse, lse_tail, grad_lse, sink, log_sum, log_rest, delta, dq,
    tiles, bits,
    q_segments, k_segments, start, end, hidden_from, hidden_to, seed, cu_seqlens_q, cu_seqlens_k,
    query_b, query_s, query_h, key_b, key_s, key_h, value_b, value_s, value_h, out_b, out_s, out_h,
    grad_out_b, grad_out_s, grad_out_h, dq_b, dq_s, dq_h,
    bias_b, bias_h, bias_q, bias_group, tiles_b, tiles_h, tiles_w, bits_b, bits_h, bits_r, mask_group,
    q_segments_b, keys_b, keys_h, key_group, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin,
    blocks, heads, seqlen_q, seqlen_k, longest_q, longest_k, band_lo, band_hi, ratio, factor, softmax_scale, programs,
    shape: tl.constexpr, features: tl.constexpr,
):  # fmt: skip
    """Write dq, and the statistics of the rows, where `counts` says that a result is NaN.

    A program does the work of some of `programs` that follow each other, after the statistics of the heads that they are of.
    `entries`: as for `_forward_again`.
    """
    follow_kernel_before()
    if _suspects(counts, entries) == 0:
        return
    QUERY_ROWS: tl.constexpr = shape.query_rows
    BLOCK_M: tl.constexpr = shape.block_m
    PADDED_HEAD: tl.constexpr = shape.padded_head
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
    gradients = Array(grad_out, grad_out_b, grad_out_s, grad_out_h)
    given = GivenRows(Array(out, out_b, out_s, out_h), gradients, lse, lse_tail, grad_lse, sink)
    count = tl.cdiv(programs, tl.num_programs(0))
    first = tl.minimum(tl.program_id(0) * count, programs)
    behind = tl.minimum(first + count, programs)
    all_statistics = Statistics(log_sum, log_rest, delta)
    _write_statistics(all_statistics, given, first // blocks, tl.cdiv(behind, blocks), heads, seqlen_q, shape, features)
    for program in tl.range(first, behind):
        place, start_q = program_of(program, tl.arange(0, SEARCHED), blocks, lengths, lists, shape, features, False)
        if _is_wanted(start_q < place.length_q, counts, place, entries):
            kv_head = place.head // features.group
            keys = KeyRows(
                rows_of(key, key_b, key_s, key_h, place.batch, kv_head, place.k_begin),
                rows_of(value, value_b, value_s, value_h, place.batch, kv_head, place.k_begin),
            )
            own_query = rows_of(query, query_b, query_s, query_h, place.batch, place.head, place.q_begin)
            own_grad = rows_in(gradients, place.batch, place.head, place.q_begin)
            band = band_of(Band(band_lo, band_hi), place, False)
            head = head_of(operands, place, place.head, start_q, band, features)
            walk = plan_walk(head, start_q, last_owned(place, start_q, shape, False), lists, shape, features, False)
            at = (place.batch.to(tl.int64) * heads + place.head) * seqlen_q + place.q_begin
            statistics = statistics_of(log_sum, log_rest, delta, at)
            queries = load_queries(own_query, own_grad, statistics, start_q, head, shape, features)
            query_grad = tl.zeros((BLOCK_M, PADDED_HEAD), tl.float32)
            for PARTIAL in tl.static_range(2):
                part = part_of(walk, PARTIAL)
                query_grad = gather_keys(query_grad, queries, keys, part, head, None, shape, features, PARTIAL, True)
            own_dq = rows_of(dq, dq_b, dq_s, dq_h, place.batch, place.head, place.q_begin)
            store_rows(own_dq, start_q, place.length_q, query_grad * softmax_scale, QUERY_ROWS)


@triton.jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def _keys_again(
    counts, entries, query, key, value, bias, grad_out, log_sum, log_rest, delta, dk, dv, key_sums, tiles, bits,
    q_segments, k_segments, start, end, hidden_from, hidden_to, seed, cu_seqlens_q, cu_seqlens_k,
    query_b, query_s, query_h, key_b, key_s, key_h, value_b, value_s, value_h, grad_out_b, grad_out_s, grad_out_h,
    dk_b, dk_s, dk_h, dv_b, dv_s, dv_h,
    bias_b, bias_h, bias_q, bias_group, tiles_b, tiles_h, tiles_w, bits_b, bits_h, bits_r, mask_group,
    q_segments_b, keys_b, keys_h, key_group, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin,
    blocks, heads, seqlen_q, seqlen_k, longest_q, longest_k, band_lo, band_hi, ratio, factor, softmax_scale, programs,
    shape: tl.constexpr, features: tl.constexpr,
):  # fmt: skip
    """Write dk, dv and the sums of dS where `counts` says that a result is NaN, with the statistics of `_queries_again`.

    `entries`: as for `_forward_again`.
    """
    follow_kernel_before()
    if _suspects(counts, entries) == 0:
        return
    KEY_ROWS: tl.constexpr = shape.key_rows
    VALUE_ROWS: tl.constexpr = shape.value_rows
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
    inputs = Inputs(
        Array(query, query_b, query_s, query_h), Array(key, key_b, key_s, key_h), Array(value, value_b, value_s, value_h),
        Array(grad_out, grad_out_b, grad_out_s, grad_out_h), Statistics(log_sum, log_rest, delta), Band(band_lo, band_hi),
    )  # fmt: skip
    for program in tl.range(tl.program_id(0), programs, tl.num_programs(0)):
        place, start_k = program_of(program, tl.arange(0, SEARCHED), blocks, lengths, lists, shape, features, True)
        if _is_wanted(start_k < place.length_k, counts, place, entries):
            own_key = rows_in(inputs.key, place.batch, place.head, place.k_begin)
            own_value = rows_in(inputs.value, place.batch, place.head, place.k_begin)
            k = load_rows(own_key, start_k, place.length_k, KEY_ROWS, True)
            v = load_rows(own_value, start_k, place.length_k, VALUE_ROWS, True)
            last_k = last_owned(place, start_k, shape, True)
            block = Block(k, v, start_k, last_k, place, band_of(inputs.band, place, True))
            key_grad, value_grad = gather_group(block, inputs, key_sums, lengths, operands, shape, features, True)
            if features.dropout:
                value_grad *= rescale
            own_dk = rows_of(dk, dk_b, dk_s, dk_h, place.batch, place.head, place.k_begin)
            own_dv = rows_of(dv, dv_b, dv_s, dv_h, place.batch, place.head, place.k_begin)
            store_rows(own_dk, start_k, place.length_k, key_grad * softmax_scale, KEY_ROWS)
            store_rows(own_dv, start_k, place.length_k, value_grad, VALUE_ROWS)


def entries_with_counts(call: Call) -> int | None:
    """Return how many batch entries have counts of their own, as in batch-invariant calls, or None: the call has them."""
    return call.query.shape[0] if call.options.batch_invariant else None


def _launch(kernel: Any, call: Call, programs: int, counts: Tensor, arguments: dict[str, Any]) -> None:
    """Launch a kernel with no more programs than there are multiprocessors, which share the work of `programs`."""
    if programs:
        grid = (min(programs, arch.physical(call.query.device).num_sms),)
        launch(kernel, grid, counts=counts, entries=entries_with_counts(call), follows=True, num_stages=1, **arguments)


def _without_strides(statistic: Tensor) -> Tensor:
    """Return a statistic of rows as one that is contiguous: itself, as the forward makes them, or a copy."""
    return statistic if statistic.is_contiguous() else computed(Tensor.contiguous, statistic)


def _with_strides(name: str, tensor: Tensor) -> dict[str, Any]:
    """Return a tensor of rows and its strides as arguments."""
    return {name: tensor, **row_strides(name, tensor)}


def forward_again(call: Call, result: Result, counts: Tensor) -> None:
    """Write out and the statistics anew, behind a kernel that has noted a NaN in word SUSPECT of `counts`; else do nothing.

    Intervals have their lists already. Where sequences are packed, rows that belong to none stay as that kernel left them.
    """
    mask, size, made = call.mask, extent(call), config.AGAIN_FORWARD
    blocks, programs = blocks_and_programs(size, size.seqlen_q, size.heads, made.block_m, mask.row_tiles)
    aligned = rows_are_aligned(call.query, call.key, call.value, result.out)
    arguments = shared_arguments(call, size) | list_arguments(mask.row_tiles, mask.row_bits, size.heads)
    arguments |= statistic_arguments(lse=result.lse, lse_tail=result.lse_tail, row_max=result.row_max)
    arguments |= {
        **_with_strides("out", result.out),
        "sink": call.sink,
        "blocks": blocks,
        "programs": programs,
        "shape": shape_of(call, made.block_m, made.block_n, aligned),
        "features": features_of(call, mask.row_tiles),
        "num_warps": made.num_warps,
    }
    _launch(_forward_again, call, programs, counts, arguments)


def backward_again(call: Call, saved: Saved, grads: Gradients, key_sums: Tensor | None, counts: Tensor) -> None:
    """Write dq, dk, dv and `key_sums` `[B, H, Sk]` (the sums of dS, where dbias is made of them) as `forward_again` does.

    The kernel for keys follows the one for queries, which writes the statistics that both read.
    """
    size, made = extent(call), config.AGAIN_BACKWARD
    batch = 1 if size.packed else size.batch
    statistics = RowStatistics(
        *[workspace(call.query, batch, size.heads, size.seqlen_q) for _ in RowStatistics._fields]
    )
    tensors = (call.query, call.key, call.value, saved.out, grads.grad_out, grads.dq, grads.dk, grads.dv)
    shared = shared_arguments(call, size) | {
        **_with_strides("grad_out", grads.grad_out),
        **statistics._asdict(),
        "softmax_scale": float(call.options.softmax_scale),
        "shape": shape_of(call, made.block_m, made.block_n, rows_are_aligned(*tensors)),
        "features": features_of(call, call.mask.row_tiles),
        "num_warps": made.num_warps,
    }
    _launch_queries(call, saved, grads, shared, counts)
    _launch_keys(call, grads, shared, key_sums, counts)


def _launch_queries(call: Call, saved: Saved, grads: Gradients, shared: dict[str, Any], counts: Tensor) -> None:
    """Launch what writes dq and the statistics, with arguments `shared` by both kernels."""
    mask, size = call.mask, extent(call)
    blocks, programs = blocks_and_programs(
        size, size.seqlen_q, size.heads, config.AGAIN_BACKWARD.block_m, mask.row_tiles
    )
    arguments = shared | list_arguments(mask.row_tiles, mask.row_bits, size.heads)
    arguments |= {
        **_with_strides("out", saved.out),
        **_with_strides("dq", grads.dq),
        "lse": _without_strides(saved.lse),
        "lse_tail": _without_strides(saved.lse_tail),
        "grad_lse": None if grads.grad_lse is None else _without_strides(grads.grad_lse),
        "sink": call.sink,
        "blocks": blocks,
        "programs": programs,
    }
    _launch(_queries_again, call, programs, counts, arguments)


def _launch_keys(call: Call, grads: Gradients, shared: dict[str, Any], key_sums: Tensor | None, counts: Tensor) -> None:
    """Launch what writes dk, dv and the sums of dS, with arguments `shared` by both kernels."""
    mask, size = call.mask, extent(call)
    blocks, programs = blocks_and_programs(
        size, size.seqlen_k, size.kv_heads, config.AGAIN_BACKWARD.block_n, mask.col_tiles
    )
    arguments = shared | list_arguments(mask.col_tiles, mask.col_bits, size.heads)
    arguments |= {
        **_with_strides("dk", grads.dk),
        **_with_strides("dv", grads.dv),
        "key_sums": None if grads.dbias is None else key_sums,
        "blocks": blocks,
        "programs": programs,
    }
    _launch(_keys_again, call, programs, counts, arguments)
