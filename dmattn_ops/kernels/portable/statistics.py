"""The statistics of the rows that the gradient kernels read: the logarithm of each row's sum, and delta."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dmattn_ops.call import Call, Gradients, Saved, in_natural_units, rows_are_aligned
from dmattn_ops.kernels.portable.arguments import (
    ROW_TENSORS,
    UNSPECIALIZED,
    Extent,
    ceil_div,
    row_strides,
    shape_of,
    shared_arguments,
    statistic_strides,
)
from dmattn_ops.kernels.portable.places import head_offset
from dmattn_ops.kernels.portable.primitives import load_rows, rows_of, statistics_of
from dmattn_ops.kernels.portable.scores import log_terms
from dmattn_ops.kernels.sinks import add_parts, part_of_gradient, parts_of_gradient, take_sink
from dmattn_ops.launching.launch import launch, workspace

STATISTICS_ROWS = 32
CLEARED = 1024  # elements that a program clears at a time
_CLEARED = tl.constexpr(CLEARED)


class RowStatistics(NamedTuple):
    """float32 `[B, H, Sq]`, or `[1, H, total_q]` where sequences are packed (`scores.log_terms`)."""

    log_sum: Tensor
    log_rest: Tensor
    delta: Tensor


@triton.jit(do_not_specialize=(*UNSPECIALIZED, "cleared_parts"), do_not_specialize_on_alignment=ROW_TENSORS)
def statistics_kernel(
    grad_out, out, lse, lse_tail, grad_lse, sink, sink_parts, log_sum, log_rest, delta, cleared,
    grad_out_b, grad_out_s, grad_out_h, out_b, out_s, out_h, lse_b, lse_h, lse_tail_b, lse_tail_h,
    grad_lse_b, grad_lse_h, grad_lse_s, heads, seqlen_q, blocks, cleared_parts, shape: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """Write delta = rowsum(grad_out * out) - grad_lse, 0 in empty rows, and the logarithm of the rows' sums.

    A `sink` `[heads]` is a part of the sums; `sink_parts` `[B, H, blocks]` are what adds up to its gradient. Where sums are given
    that kernels behind this one add to, `cleared`, this one sets their `cleared_parts` times `CLEARED` elements to 0.
    """
    ROWS: tl.constexpr = shape.block_m
    OUT_ROWS: tl.constexpr = shape.out_rows
    program = tl.program_id(0)
    if cleared is not None:
        for part in tl.range(program, cleared_parts, tl.num_programs(0)):
            tl.store(
                cleared + tl.cast(part, tl.int64) * _CLEARED + tl.arange(0, _CLEARED), tl.zeros((_CLEARED,), tl.float32)
            )
    head = (program % heads).to(tl.int64)
    batch = (program // heads // blocks).to(tl.int64)
    start = (program // heads) % blocks * ROWS
    zero = tl.cast(0, tl.int32)
    grad_out = rows_of(grad_out, grad_out_b, grad_out_s, grad_out_h, batch, head, zero)
    out = rows_of(out, out_b, out_s, out_h, batch, head, zero)
    rows = start + tl.arange(0, ROWS)
    inside = rows < seqlen_q
    gradient = load_rows(grad_out, start, seqlen_q, OUT_ROWS, True).to(tl.float32)
    output = load_rows(out, start, seqlen_q, OUT_ROWS, True).to(tl.float32)
    row_delta = tl.sum(gradient * output, 1)
    if grad_lse is not None:
        grad_lse += head_offset(batch, head, grad_lse_b, grad_lse_h)
        row_delta -= tl.load(grad_lse + rows.to(tl.int64) * grad_lse_s, mask=inside, other=0.0).to(tl.float32)
    row_lse = tl.load(lse + head_offset(batch, head, lse_b, lse_h) + rows, mask=inside, other=0.0)
    row_tail = tl.load(lse_tail + head_offset(batch, head, lse_tail_b, lse_tail_h) + rows, mask=inside, other=0.0)
    if sink is not None:
        row_tail, taken = take_sink(tl.load(sink + head).to(tl.float32), row_lse, row_tail)
        if sink_parts is not None:
            part = (batch * heads + head) * blocks + start // ROWS
            tl.store(sink_parts + part, part_of_gradient(tl.where(inside, taken, 0.0), row_delta))
    made = statistics_of(log_sum, log_rest, delta, (batch * heads + head) * seqlen_q + rows)
    store_terms(made, row_lse, row_tail, row_delta, inside, NATURAL)


@triton.jit
def store_terms(made, lse, tail, delta, inside, NATURAL: tl.constexpr):
    """Write the statistics of rows to where `made` points: the terms of the logarithms of their sums, and delta, 0 if empty."""
    log_sum, log_rest = log_terms(lse, tail, NATURAL)
    tl.store(made.log_sum, log_sum, mask=inside)
    tl.store(made.log_rest, log_rest, mask=inside)
    tl.store(made.delta, tl.where(lse == float("-inf"), 0.0, delta), mask=inside)


def gradient_arguments(
    call: Call, saved: Saved, grads: Gradients, size: Extent, cleared: Tensor | None = None
) -> dict[str, Any]:
    """Return the arguments that the kernels of all gradients share; computes the statistics of the rows, and clears sums."""
    aligned = rows_are_aligned(grads.grad_out, saved.out)
    return {
        **shared_arguments(call, size),
        "grad_out": grads.grad_out,
        **row_strides("grad_out", grads.grad_out),
        **row_statistics(call, saved, grads, aligned, cleared)._asdict(),
        "softmax_scale": float(call.options.softmax_scale),
    }


def row_statistics(
    call: Call, saved: Saved, grads: Gradients, aligned: bool, cleared: Tensor | None = None
) -> RowStatistics:
    """Compute the statistics of a call's rows; `aligned` says that rows of out and grad_out are.

    `cleared`, float32 with a multiple of `CLEARED` elements that follow each other, is set to 0 unless there are no rows.
    """
    out, grad_lse = saved.out, grads.grad_lse
    heads, seqlen_q = out.shape[-2], out.shape[-3]
    batch = out.shape[0] if out.dim() == 4 else 1
    statistics = RowStatistics(*[workspace(call.query, batch, heads, seqlen_q) for _ in RowStatistics._fields])
    blocks = ceil_div(seqlen_q, STATISTICS_ROWS)
    programs = batch * heads * blocks
    if programs == 0:
        return statistics
    sink_parts = parts_of_gradient(grads, programs)
    launch(
        statistics_kernel,
        (programs,),
        grads.grad_out,
        out,
        saved.lse,
        saved.lse_tail,
        grad_lse,
        call.sink,
        sink_parts,
        *statistics,
        cleared,
        **row_strides("grad_out", grads.grad_out),
        **row_strides("out", out),
        **statistic_strides("lse", saved.lse),
        **statistic_strides("lse_tail", saved.lse_tail),
        **statistic_strides("grad_lse", grad_lse),
        grad_lse_s=0 if grad_lse is None else grad_lse.stride(-1),
        heads=heads,
        seqlen_q=seqlen_q,
        blocks=blocks,
        cleared_parts=0 if cleared is None else cleared.numel() // CLEARED,
        shape=shape_of(call, STATISTICS_ROWS, 0, aligned),
        NATURAL=in_natural_units(call),
        num_warps=4,
    )
    add_parts(sink_parts, batch, heads, grads)
    return statistics
