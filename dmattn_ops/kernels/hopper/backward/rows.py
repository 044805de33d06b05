"""Row work before the SM 9.0 backward: statistics, a zeroed accumulator and counters."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def prepare_kernel(
    out,
    grad_out,
    lse,
    grad_lse,
    stats,
    accumulator,
    tickets,
    blocks_done,
    counters,
    out_b,
    out_s,
    out_h,
    grad_b,
    grad_s,
    grad_h,
    lse_b,
    lse_h,
    lse_s,
    glse_b,
    glse_h,
    glse_s,
    seqlen_q,
    heads,
    rows,
    total_rows,
    dim,
    BLOCK: tl.constexpr,
    DV: tl.constexpr,
    D: tl.constexpr,
    TICKETS: tl.constexpr,
):
    """Write lse (base 2) and delta of BLOCK rows, +inf and 0 where nothing may flow; zero their pieces of dq.

    Counts become 0 too: TICKETS tickets, `counters` of pieces, of which BLOCK rows are two, and `blocks_done` of key heads, of
    which there are no more than programs.
    """
    block = tl.program_id(0)
    bh = block // (rows // BLOCK)
    start = (block - bh * (rows // BLOCK)) * BLOCK
    batch = (bh // heads).to(tl.int64)
    head = (bh % heads).to(tl.int64)
    row = start + tl.arange(0, BLOCK)
    col = tl.arange(0, DV)
    inside = row < seqlen_q
    mask = inside[:, None] & (col < dim)[None, :]
    row64 = row.to(tl.int64)
    at_out = out + batch * out_b + head * out_h + row64[:, None] * out_s + col[None, :]
    at_grad = grad_out + batch * grad_b + head * grad_h + row64[:, None] * grad_s + col[None, :]
    o = tl.load(at_out, mask=mask, other=0.0)
    g = tl.load(at_grad, mask=mask, other=0.0)
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    value = tl.load(lse + batch * lse_b + head * lse_h + row64 * lse_s, mask=inside, other=float("-inf"))
    empty = value == float("-inf")
    if grad_lse is not None:
        delta -= tl.load(grad_lse + batch * glse_b + head * glse_h + row64 * glse_s, mask=inside, other=0.0)
    at = bh.to(tl.int64) * rows + row
    tl.store(stats + at, tl.where(empty, float("inf"), value * LOG2E))
    tl.store(stats + total_rows + at, tl.where(empty, 0.0, delta))
    zero = accumulator + (bh.to(tl.int64) * rows + start) * D
    tl.store(zero + tl.arange(0, BLOCK * D), tl.zeros([BLOCK * D], tl.float32))
    if block == 0:
        tl.store(tickets + tl.arange(0, TICKETS), tl.zeros([TICKETS], tl.int32))
    tl.store(blocks_done + block, 0)
    tl.store(counters + block * 2 + tl.arange(0, 2), tl.zeros([2], tl.int32))
