"""What no query of a block sees must not reach it: 0 * NaN is NaN, in products of probabilities that are 0 with values that are not finite.

Rows of shared memory that nobody of the block sees are set to 0 before they are multiplied (`clear_rows`). Under a band alone it is
known where they are (EDGES). Of other masks nobody knows, and clearing would cost each masked tile a pass over shared memory. So such a
call runs its kernel twice (TWICE). The first time it notes whether a sum that it writes is NaN (`note_nan`). The second time, blocks end
at once if none was, and otherwise do all work again, carefully. What remains NaN then is what some query sees.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.gluon_compat import fence_async_shared, meet

ALL_SEEN = gl.constexpr(0)  # everything is seen by something
EDGES = gl.constexpr(1)
TWICE = gl.constexpr(2)
CLEARED = gl.constexpr(16)  # rows that a forward clears at a time
# Of rows that are cleared by 4 warps: 16 bytes of a row for each thread, whatever their width
MATRIX = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
ROWS = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))


@gluon.jit
def note_nan(suspect, sums):
    """Store 1 to `suspect` if one of the sums is NaN: an instruction for each and one that is never carried out otherwise."""
    gl.store(suspect + gl.zeros_like(sums).to(gl.int32), gl.full_like(sums, 1.0).to(gl.int32), mask=sums != sums)


@gluon.jit
def clear(part, seen):
    """Set rows of a matrix in shared memory to 0 where `seen`, of the layout ROWS, is 0."""
    kept = part.load(MATRIX)
    part.store(gl.where(seen[:, None] != 0, kept, gl.zeros_like(kept)))


@gluon.jit
def clear_parts(parts, seen):
    """Do `clear` for each part of rows (`columns.py`)."""
    clear(parts[0], seen)
    if len(parts) > 1:
        clear(parts[1], seen)


@gluon.jit
def finish_clearing():
    """Let products that begin from here on read what all threads of the partition have cleared.

    Several partitions may clear the same rows, each before it multiplies: they store the same.
    """
    fence_async_shared()
    meet()


@gluon.jit
def clear_queries(q, do, minus_lse):
    """Set queries that see no key, and their grad_out, to 0, as their statistics in shared memory tell (`backward/rows.py`).

    Either may be None.
    """
    LEAST: gl.constexpr = -3.0e38  # `rows.NEVER`
    seen = (minus_lse.load(ROWS) != LEAST).to(gl.int32)
    if q is not None:
        clear_parts(q, seen)
    if do is not None:
        clear_parts(do, seen)
    finish_clearing()


@gluon.jit
def clear_rows(parts, seen, COUNT: gl.constexpr):
    """Set `COUNT` rows of matrices in shared memory to 0 where `seen`, `[COUNT]` in shared memory, holds 0."""
    for row in gl.static_range(0, COUNT, CLEARED):
        wanted = seen.slice(row, CLEARED, dim=0).load(ROWS)
        clear(parts[0].slice(row, CLEARED, dim=0), wanted)
        if len(parts) > 1:
            clear(parts[1].slice(row, CLEARED, dim=0), wanted)
    finish_clearing()
