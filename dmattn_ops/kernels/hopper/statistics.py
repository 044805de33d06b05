"""Row statistics of the SM 9.0 backward kernels.

A statistic of a row is held twice. Rounded: minus lse in log2 units, which one addition takes from a score. And as a pair,
whose difference from a score is exact where lse is too large to be rounded: P = exp2((score - first) - second). Kernels use
the pairs where a flag says that some row of the call needs them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dmattn_ops.kernels.hopper.constants import LOG2E, TILE
from dmattn_ops.kernels.ragged import WORDS as _WORDS

WORDS = tl.constexpr(_WORDS)
LARGE = tl.constexpr(4096.0)  # from here on float32 holds lse with an error of more than 2 ** -12
HUGE = tl.constexpr(2.0e38)  # times log2(e) this is finite
NEVER = tl.constexpr(3.0e38)  # the statistic of rows that give nothing: P = 0, and 0 times it is 0


@triton.jit
def _within(x, limit):
    """Return the nearest number from -limit to limit; NaN stays."""
    nan: tl.constexpr = tl.PropagateNan.ALL
    return tl.minimum(tl.maximum(x, 0.0 - limit, propagate_nan=nan), limit, propagate_nan=nan)


class RowStatistics(NamedTuple):
    """The statistics of some rows."""

    minus_lse: Any  # in log2 units
    first: Any  # of the pair
    second: Any
    large: Any  # whether the pair is needed


@triton.jit
def row_statistics(lse, tail, NATURAL: tl.constexpr):
    """Return the statistics of rows.

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
    return RowStatistics(
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


class Statistics(NamedTuple):
    """The statistics of all rows, and a byte for each of some rows that says whether pairs are needed."""

    rows: Tensor  # float32; [4, batch, heads, rows_of_head] from its start on: minus lse, delta, and the pair
    flags: Tensor
    rows_of_head: int
    n_flags: int


class Made(NamedTuple):
    """What the kernels of a backward leave to those behind them, beside dq, dk and dv."""

    statistics: Statistics
    key_sums: Tensor | None  # of dS, where the bias is one per key
    counts: Tensor | None  # where a NaN is noted (`unseen.py`)
