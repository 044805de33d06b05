"""Row work around the SM 9.0 backward: statistics and a zeroed accumulator before it, dq out of it afterwards."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
PIECE = tl.constexpr(64)  # the accumulator is made of 64 x 64 pieces in the order of hopper_backward_steps.FRAGMENT


@triton.jit
def prepare_kernel(
    out,
    grad_out,
    lse,
    grad_lse,
    stats,
    accumulator,
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

    BLOCK rows of dq are two pieces. Behind dq, the accumulator holds TICKETS counters, and then one of each piece; they
    become 0 too.
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
    tickets = accumulator + total_rows.to(tl.int64) * D
    if block == 0:
        tl.store(tickets + tl.arange(0, TICKETS), tl.zeros([TICKETS], tl.float32))
    tl.store(tickets + TICKETS + block * 2 + tl.arange(0, 2), tl.zeros([2], tl.float32))


@triton.jit
def finish_kernel(
    accumulator,
    dq,
    dq_b,
    dq_s,
    dq_h,
    scale,
    seqlen_q,
    heads,
    rows,
    dim,
    SPLIT_D: tl.constexpr,
):
    """Write 64 rows x 64 columns of dq from one piece of the accumulator."""
    piece = tl.program_id(0)
    if SPLIT_D:  # two pieces side by side
        strip = piece // 2
        column = (piece % 2) * PIECE
    else:
        strip = piece
        column = 0
    bh = strip // (rows // PIECE)
    start = (strip - bh * (rows // PIECE)) * PIECE
    batch = (bh // heads).to(tl.int64)
    head = (bh % heads).to(tl.int64)
    x = tl.load(accumulator + piece.to(tl.int64) * (PIECE * PIECE) + tl.arange(0, PIECE * PIECE)) * scale
    # bits of the offset, highest first: column 3-5, row 4-5, row 0-2, column 1-2, row 3, column 0
    x = tl.reshape(x, (8, 4, 8, 4, 2, 2))
    x = tl.permute(x, (1, 4, 2, 0, 3, 5))
    x = tl.reshape(x, (PIECE, PIECE))
    row = start + tl.arange(0, PIECE)
    col = column + tl.arange(0, PIECE)
    at = dq + batch * dq_b + head * dq_h + row.to(tl.int64)[:, None] * dq_s + col[None, :]
    tl.store(at, x.to(dq.dtype.element_ty), mask=(row < seqlen_q)[:, None] & (col < dim)[None, :])
