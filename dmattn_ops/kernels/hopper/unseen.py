"""Rows that a mask hides from every query or key must not turn results into NaN, as 0 * NaN does in a product.

A window may hide the first or the last keys from every query, and queries may see no key, where there are more of one than
of the other. The tiles that hold such rows beside others (EDGES says that a call may have some) have them set to 0 in
shared memory before they are multiplied. Other rows that a band hides are never loaded.

A mask may hide any row, in any tile. Kernels for masks (WATCH) note where a result is NaN, and kernels behind them compute all
again without hidden rows, if one is (`portable/again.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.gluon_compat import fence_async_shared, thread_barrier
from dmattn_ops.kernels.hopper.statistics import NEVER as _NEVER
from dmattn_ops.kernels.portable.again import SUSPECT as _SUSPECT

# Of rows that 4 warps clear: 16 bytes of a row for each thread, whatever their width
MATRIX = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
CLEARED = gl.constexpr(gl.SliceLayout(1, MATRIX.value))
AT_ONCE = gl.constexpr(16)  # rows
NO_KEY = gl.constexpr(-_NEVER.value)  # the statistic of queries that see no key
SUSPECT = gl.constexpr(_SUSPECT)


class Seen(NamedTuple):
    """The columns that some row of a call, or of a sequence, sees inside the band: `first` to before `end`."""

    first: Any
    end: Any


@gluon.jit
def seen_columns(n_rows, n_columns, band_lo, band_hi):
    """Return the columns that some of the rows sees, where row r sees columns r + band_lo to r + band_hi."""
    return Seen(gl.maximum(band_lo, 0), gl.minimum(n_columns, n_rows + band_hi))


@gluon.jit
def ends_inside(seen, first, count, n_columns):
    """Return whether some of `count` columns from `first` on are seen by no row, although there are such columns."""
    return (first < seen.first) | (gl.minimum(first + count, n_columns) > seen.end)


@gluon.jit
def clear(rows, kept):
    """Set rows of a matrix in shared memory to 0 but those that are to be kept, of the layout CLEARED."""
    held = rows.load(MATRIX)
    rows.store(gl.where(kept[:, None], held, gl.zeros_like(held)))


@gluon.jit
def clear_parts(parts, kept):
    """Set rows of each part (`columns.py`) to 0 but those that are to be kept, as `clear` does."""
    clear(parts[0], kept)
    if len(parts) > 1:
        clear(parts[1], kept)


@gluon.jit
def finish_clearing():
    """Let products that begin from here on read what all threads of the partition have cleared.

    Several partitions may clear the same rows, each before it multiplies: they store the same.
    """
    fence_async_shared()
    thread_barrier()


@gluon.jit
def clear_unseen(parts, first, seen, COUNT: gl.constexpr):
    """Set those of `COUNT` rows to 0 that no row of the other side sees; the first of them is number `first`."""
    for row in gl.static_range(0, COUNT, AT_ONCE):
        number = first + row + gl.arange(0, AT_ONCE, layout=CLEARED)
        kept = (number >= seen.first) & (number < seen.end)
        clear(parts[0].slice(row, AT_ONCE, dim=0), kept)
        if len(parts) > 1:
            clear(parts[1].slice(row, AT_ONCE, dim=0), kept)
    finish_clearing()


@gluon.jit
def note_nan(counts, sums):
    """Set the word SUSPECT of `counts` to 1 where a row of `sums`, an accumulator, holds a NaN."""
    of_rows = gl.sum(sums, 1)
    found = of_rows != of_rows
    gl.store(counts + (SUSPECT + gl.zeros_like(of_rows).to(gl.int32)), found.to(gl.int32), mask=found)


@gluon.jit
def note_nan_in_parts(counts, parts):
    """Set the word SUSPECT of `counts` to 1 where a row of some part of sums (`columns.py`) holds a NaN."""
    note_nan(counts, parts[0])
    if len(parts) > 1:
        note_nan(counts, parts[1])
