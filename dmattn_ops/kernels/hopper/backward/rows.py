"""Row work before the SM 9.0 backward kernel: statistics, a zeroed accumulator and counters."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from dmattn_ops.kernels.constants import Constants
from dmattn_ops.kernels.hopper.statistics import query_of, row_statistics
from dmattn_ops.kernels.sinks import part_of_gradient, take_sink
from dmattn_ops.launching.overlap import follow_kernel_before


@dataclass(frozen=True, eq=False, repr=False)
class RowTraits(Constants):
    """What the kernel is compiled for."""

    BLOCK: int  # rows of a program
    DV: int  # columns of a row of out, to a power of two
    D: int  # columns of a row of dq in its first part, and (else 0) in its second one
    D2: int
    TICKETS: int
    NATURAL: bool  # whether pairs are in natural units


@triton.jit
def prepare_kernel(
    out,
    grad_out,
    lse,
    lse_tail,
    grad_lse,
    sink,
    sink_parts,
    stats,
    accumulator,
    tickets,
    blocks_done,
    counters,
    flags,
    out_b,
    out_s,
    out_h,
    grad_b,
    grad_s,
    grad_h,
    lse_b,
    lse_h,
    lse_s,
    tail_b,
    tail_h,
    tail_s,
    glse_b,
    glse_h,
    glse_s,
    query_tiles,
    seqlen_q,
    heads,
    rows,
    total_rows,
    dim,
    delta_factor,
    T: tl.constexpr,
):
    """Write the statistics of `T.BLOCK` rows, so that P is 0 where nothing may flow; zero their pieces of dq.

    A `sink` `[heads]` is a part of the sums; `sink_parts` are what each program adds to the gradient of its head's.

    `stats` `[4, total_rows]` are minus lse (rounded, in log2 units), delta times `delta_factor`, and the pair; `flags` says for
    each program whether a row of its needs the pair.

    Counts become 0 too: TICKETS tickets, `counters` of pieces, of which BLOCK rows are two, and `blocks_done` of key heads, of
    which there are no more than programs.
    """
    BLOCK: tl.constexpr = T.BLOCK
    DV: tl.constexpr = T.DV
    D: tl.constexpr = T.D
    D2: tl.constexpr = T.D2
    TICKETS: tl.constexpr = T.TICKETS
    follow_kernel_before()
    block = tl.program_id(0)
    bh = block // (rows // BLOCK)
    start = (block - bh * (rows // BLOCK)) * BLOCK
    batch = (bh // heads).to(tl.int64)
    head = (bh % heads).to(tl.int64)
    row = start + tl.arange(0, BLOCK)
    col = tl.arange(0, DV)
    query, inside = query_of(row, start, query_tiles, seqlen_q)
    mask = inside[:, None] & (col < dim)[None, :]
    row64 = query.to(tl.int64)
    at_out = out + batch * out_b + head * out_h + row64[:, None] * out_s + col[None, :]
    at_grad = grad_out + batch * grad_b + head * grad_h + row64[:, None] * grad_s + col[None, :]
    o = tl.load(at_out, mask=mask, other=0.0)
    g = tl.load(at_grad, mask=mask, other=0.0)
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    value = tl.load(lse + batch * lse_b + head * lse_h + row64 * lse_s, mask=inside, other=float("-inf"))
    tail = tl.load(lse_tail + batch * tail_b + head * tail_h + row64 * tail_s, mask=inside, other=0.0)
    if sink is not None:
        tail, taken = take_sink(tl.load(sink + head).to(tl.float32), value, tail)
        if sink_parts is not None:
            tl.store(sink_parts + block, part_of_gradient(taken, delta))
    made = row_statistics(value, tail, T.NATURAL)
    if grad_lse is not None:
        delta -= tl.load(grad_lse + batch * glse_b + head * glse_h + row64 * glse_s, mask=inside, other=0.0)
    at = bh.to(tl.int64) * rows + row
    tl.store(stats + at, made.minus_lse)
    tl.store(stats + total_rows + at, tl.where(value == float("-inf"), 0.0, delta * delta_factor))
    tl.store(stats + 2 * total_rows + at, made.first)
    tl.store(stats + 3 * total_rows + at, made.second)
    tl.store(flags + block, tl.max(made.large.to(tl.int32), 0).to(tl.int8))
    zero = accumulator + (bh.to(tl.int64) * rows + start) * (D + D2)
    tl.store(zero + tl.arange(0, BLOCK * D), tl.zeros([BLOCK * D], tl.float32))
    if D2 > 0:
        tl.store(zero + BLOCK * D + tl.arange(0, BLOCK * D2), tl.zeros([BLOCK * D2], tl.float32))
    if block == 0:
        tl.store(tickets + tl.arange(0, TICKETS), tl.zeros([TICKETS], tl.int32))
    tl.store(blocks_done + block, 0)
    tl.store(counters + block * 2 + tl.arange(0, 2), tl.zeros([2], tl.int32))
