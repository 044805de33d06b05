"""Row work before the SM 9.0 backward kernels: statistics, a zeroed accumulator and counters.

A statistic of a row is held twice. Rounded: minus lse in log2 units, which one addition takes from a score. And as a pair,
whose difference from a score is exact where lse is too large to be rounded: P = exp2((score - first) - second). Kernels use
the pairs where a flag says that some row of the call needs them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dmattn_ops.call import TILE as _TILE
from dmattn_ops.kernels.ragged import WORDS as _WORDS
from dmattn_ops.kernels.sinks import part_of_gradient, take_sink
from dmattn_ops.launching.overlap import follow_kernel_before

TILE = tl.constexpr(_TILE)
WORDS = tl.constexpr(_WORDS)
LOG2E = tl.constexpr(1.4426950408889634)
LARGE = tl.constexpr(4096.0)  # from here on float32 holds lse with an error of more than 2 ** -12
HUGE = tl.constexpr(2.0e38)  # times log2(e) this is finite
NEVER = tl.constexpr(3.0e38)  # the statistic of rows that give nothing: P = 0, and 0 times it is 0


@triton.jit
def _within(x, limit):
    """Return the nearest number from -limit to limit; NaN stays."""
    nan: tl.constexpr = tl.PropagateNan.ALL
    return tl.minimum(tl.maximum(x, 0.0 - limit, propagate_nan=nan), limit, propagate_nan=nan)


@triton.jit
def row_statistics(lse, tail, NATURAL: tl.constexpr):
    """Return (minus lse in log2 units, first and second of its pair, whether the pair is needed) of rows.

    NATURAL: the pair is in natural units, for scores with a bias; else in log2 units.
    """
    given = lse != float("-inf")
    lse = tl.where(given, lse, 0.0)
    factor = tl.full(lse.shape, LOG2E, tl.float32)
    bounded = _within(lse, HUGE)  # so that nothing below is infinite
    anchor = tl.fma(bounded, factor, tl.zeros_like(lse))  # a product would be contracted with what follows
    rest = tl.fma(tail, factor, tl.fma(bounded, factor, -anchor))
    large = given & ((tl.abs(lse) > LARGE) | (tl.abs(tail) > LARGE))
    # A sink beside a row of finfo.min makes the tail as large as a float32: kernels that take the pair multiply the rounded
    # statistic by 0, which must not be infinite either.
    rounded = _within(anchor + rest, NEVER)
    if NATURAL:
        first = lse
        second = tail
    else:
        first = anchor
        second = rest
    return (
        tl.where(given, 0.0 - rounded, 0.0 - NEVER),
        tl.where(given, first, NEVER),
        tl.where(given, second, 0.0),
        large,
    )


@triton.jit
def query_of(row, start, query_tiles, seqlen_q):
    """Return (query, whether there is one) of rows from `start` on, all in one tile of 128, of a head of the workspaces.

    `query_tiles` are the records of packed sequences (`kernels/ragged.py`), or None.
    """
    query = row
    inside = row < seqlen_q
    if query_tiles is not None:
        record = query_tiles + (start // TILE).to(tl.int64) * WORDS
        local = tl.load(record + 1) + row % TILE
        inside = local < tl.load(record + 3)
        query = tl.load(record + 2) + local
    return query, inside


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
    BLOCK: tl.constexpr,
    DV: tl.constexpr,
    D: tl.constexpr,
    D2: tl.constexpr,
    TICKETS: tl.constexpr,
    NATURAL: tl.constexpr,
):
    """Write the statistics of BLOCK rows, so that P is 0 where nothing may flow; zero their pieces of dq.

    A `sink` `[heads]` is a part of the sums; `sink_parts` are what each program adds to the gradient of its head's.

    `stats` `[4, total_rows]` are minus lse (rounded, in log2 units), delta times `delta_factor`, and the pair; `flags` says for
    each program whether a row of its needs the pair.

    Counts become 0 too: TICKETS tickets, `counters` of pieces, of which BLOCK rows are two, and `blocks_done` of key heads, of
    which there are no more than programs.
    """
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
    minus_lse, first, second, large = row_statistics(value, tail, NATURAL)
    if grad_lse is not None:
        delta -= tl.load(grad_lse + batch * glse_b + head * glse_h + row64 * glse_s, mask=inside, other=0.0)
    at = bh.to(tl.int64) * rows + row
    tl.store(stats + at, minus_lse)
    tl.store(stats + total_rows + at, tl.where(value == float("-inf"), 0.0, delta * delta_factor))
    tl.store(stats + 2 * total_rows + at, first)
    tl.store(stats + 3 * total_rows + at, second)
    tl.store(flags + block, tl.max(large.to(tl.int32), 0).to(tl.int8))
    zero = accumulator + (bh.to(tl.int64) * rows + start) * (D + D2)
    tl.store(zero + tl.arange(0, BLOCK * D), tl.zeros([BLOCK * D], tl.float32))
    if D2 > 0:
        tl.store(zero + BLOCK * D + tl.arange(0, BLOCK * D2), tl.zeros([BLOCK * D2], tl.float32))
    if block == 0:
        tl.store(tickets + tl.arange(0, TICKETS), tl.zeros([TICKETS], tl.int32))
    tl.store(blocks_done + block, 0)
    tl.store(counters + block * 2 + tl.arange(0, 2), tl.zeros([2], tl.int32))
