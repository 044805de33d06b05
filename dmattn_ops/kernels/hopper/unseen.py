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

NEVER = gl.constexpr(0)  # everything is seen by something
EDGES = gl.constexpr(1)
TWICE = gl.constexpr(2)
CLEARED = gl.constexpr(16)  # rows that are cleared at a time


@gluon.constexpr_function
def row_layout(width):
    """Return a layout of `[CLEARED, width]` for 4 warps: 16 bytes of a row for each thread."""
    lanes = min(width // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def note_nan(suspect, sums):
    """Store 1 to `suspect` if one of the sums is NaN: an instruction for each and one that is never carried out otherwise."""
    gl.store(suspect + gl.zeros_like(sums).to(gl.int32), gl.full_like(sums, 1.0).to(gl.int32), mask=sums != sums)


@gluon.jit
def clear_rows(parts, seen, ROWS: gl.constexpr):
    """Set the rows of matrices in shared memory to 0 of which `seen`, `[ROWS]` in shared memory, holds 0.

    Products that begin from here on read what all threads of the partition have cleared. Several partitions may clear the same rows.
    """
    FIRST: gl.constexpr = row_layout(parts[0].shape[1])
    for row in gl.static_range(0, ROWS, CLEARED):
        place = parts[0].slice(row, CLEARED, dim=0)
        kept = place.load(FIRST)
        wanted = seen.slice(row, CLEARED, dim=0).load(gl.SliceLayout(1, FIRST))[:, None] != 0
        place.store(gl.where(wanted, kept, gl.zeros_like(kept)))
        if len(parts) > 1:
            SECOND: gl.constexpr = row_layout(parts[1].shape[1])
            place = parts[1].slice(row, CLEARED, dim=0)
            kept = place.load(SECOND)
            wanted = seen.slice(row, CLEARED, dim=0).load(gl.SliceLayout(1, SECOND))[:, None] != 0
            place.store(gl.where(wanted, kept, gl.zeros_like(kept)))
    fence_async_shared()
    meet()
