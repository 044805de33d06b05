"""Keys and values of packed slots, read by index instead of from copies: cp.async, 16 bytes to a thread.

Tiles lie in shared memory as TMA would leave them, so that what multiplies them does not know the difference. Each thread that
copies arrives at the barrier when its copies have landed; the readers then order them before their matrix instructions, which
read through another proxy (`see_gathered`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from dmattn_ops.kernels.hopper.gluon_compat import fence_async_shared

# Triton 3.9 renamed it.
_async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
GATHERING = gl.constexpr(4)  # warps of a partition that gathers


class Rows(NamedTuple):
    """Rows `[B, S, heads, D]`, or those of one head: then batch and head are of no use."""

    pointer: Any
    batch: Any  # strides
    row: Any
    head: Any


class Gathered(NamedTuple):
    """What is gathered: the key in each slot, -1 in unused ones, and the rows that these number."""

    slots: Any
    key_rows: Any
    value_rows: Any


@gluon.jit
def rows_of_head(rows, batch, head):
    """Return the rows of one head."""
    return Rows(
        rows.pointer + batch.to(gl.int64) * rows.batch + head.to(gl.int64) * rows.head, rows.batch, rows.row, rows.head
    )


@gluon.jit
def of_head(gathered, numbers, batch, head):
    """Return what is gathered for one key head, whose slots begin at `numbers`."""
    return Gathered(
        gathered.slots + numbers,
        rows_of_head(gathered.key_rows, batch, head),
        rows_of_head(gathered.value_rows, batch, head),
    )


@gluon.constexpr_function
def _registers(columns, warps):
    """Return the layout of a tile of rows of which a thread has 8 columns, and four rows together: their numbers are one load."""
    return gl.BlockedLayout([4, 8], [256 // columns, columns // 8], [warps, 1], [1, 0])


@gluon.jit
def load_slots(slots, first, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Return the keys of `ROWS` slots, as `gather` takes them for rows of `COLUMNS`."""
    return gl.load(slots + first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, _registers(COLUMNS, gl.num_warps()))))


@gluon.jit
def gather(rows, numbers, buffer, COLUMNS: gl.constexpr):
    """Start copying rows with these numbers into a buffer, zeros where one is -1."""
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, _registers(COLUMNS, gl.num_warps())))
    pointers = rows.pointer + (gl.maximum(numbers, 0).to(gl.int64) * rows.row)[:, None] + column[None, :]
    _async_load(buffer, pointers, (numbers >= 0)[:, None])


@gluon.jit
def arrive_gathered(full):
    """Let every thread arrive at a barrier when all that it has gathered so far has landed."""
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def gather_part(rows, slots, first, buffer, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Gather the rows of `ROWS` slots from `first` on into a buffer, a few at a time: for one warp with few registers."""
    AT_ONCE: gl.constexpr = 1024 // COLUMNS
    for part in gl.static_range(ROWS // AT_ONCE):
        numbers = load_slots(slots, first + part * AT_ONCE, AT_ONCE, COLUMNS)
        gather(rows, numbers, buffer.slice(part * AT_ONCE, AT_ONCE, dim=0), COLUMNS)


@gluon.jit
def see_gathered(GATHERS: gl.constexpr):
    """Order what other threads have gathered before the matrix instructions that follow."""
    if GATHERS:
        fence_async_shared()
