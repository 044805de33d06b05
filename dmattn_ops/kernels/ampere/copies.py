"""Tiles of rows that come to shared memory by cp.async, 16 bytes to a thread at a time, and how registers hold what they make.

What Triton 3.6 does to such copies decides how they are written. It puts a barrier of the block between copies into parts of one
buffer, so that each buffer is filled by one copy. Addresses cost few registers only where those of all rows of a thread are the
first one plus numbers that are the same for every thread. A branch around a copy moves all registers of a step, so that a copy of
nothing new copies the last rows again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from dmattn_ops.kernels.portable.arguments import RowBlock
from dmattn_ops.kernels.portable.primitives import Rows

# Lanes along a row, of 16 bytes each: a line of 128 bytes. The rest of a row has the same addresses plus constants, which
# instructions hold.
LINE = gl.constexpr(8)
# Triton 3.9 renamed it.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


class Source(NamedTuple):
    """Rows of one head, as a tile of them is copied."""

    rows: Any  # primitives.Rows
    offsets: Any  # of the rows that all threads copy at once: `[1, rows, 1, columns of a line]`


@gluon.constexpr_function
def lanes_of_a_row(columns):
    """Return how many lanes of a warp lie along a row `columns` wide."""
    return min(LINE, columns // 8)


@gluon.constexpr_function
def registers_of_rows(columns, warps):
    """Return the layout of a tile of rows `columns` wide of which each thread has 8 neighbouring elements at a time."""
    along = lanes_of_a_row(columns)
    return gl.BlockedLayout([1, 8], [32 // along, along], [warps, 1], [1, 0])


@gluon.constexpr_function
def registers_of_groups(columns, warps):
    """Return the same layout of `[groups, rows that all threads copy at once, lines, columns of a line]`."""
    along = lanes_of_a_row(columns)
    return gl.BlockedLayout([1, 1, 1, 8], [1, 32 // along, 1, along], [1, warps, 1, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def rows_at_once(block, warps):
    """Return how many rows of a `block` all threads copy at once."""
    return min(block.length, warps * 32 // lanes_of_a_row(block.padded))


@gluon.constexpr_function
def shared_rows(columns):
    """Return the layout of rows in shared memory, whose pieces of 16 bytes are read by ldmatrix without conflicts."""
    return gl.SwizzledSharedLayout(8, max(1, 64 // columns), min(8, columns // 8), [1, 0])


@gluon.constexpr_function
def products(rows, columns):
    """Return the layout of a product that `rows` times `columns` warps share."""
    return gl.NVMMADistributedLayout([2, 0], [rows, columns], [16, 8])


@gluon.constexpr_function
def whole_slices(width):
    """Return how many columns the slices of 16 have that hold `width`."""
    return -(-width // 16) * 16


@gluon.jit
def source_of(rows, block: gl.constexpr, WARPS: gl.constexpr):
    """Return rows of a head as tiles `block` (`arguments.RowBlock`) of them are copied."""
    AT_ONCE: gl.constexpr = rows_at_once(block, WARPS)
    GROUPS: gl.constexpr = registers_of_groups(block.padded, WARPS)
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, GROUPS)))
    COLUMN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, GROUPS)))
    row = gl.arange(0, AT_ONCE, layout=ROW)[None, :, None, None]
    column = gl.arange(0, 8 * lanes_of_a_row(block.padded), layout=COLUMN)[None, None, None, :]
    return Source(rows, row * rows.stride + column)


@gluon.jit
def copy_rows(
    shared, source, start, begin, end, block: gl.constexpr, CHECKED: gl.constexpr, WARPS: gl.constexpr, columns=None
):
    """Fetch rows `start ...` into a buffer: 0 past the width of the `block`, and where `CHECKED` outside of `begin ... end`.

    Unless it is None, `columns`, a multiple of 8, is how many columns there are; those past it are 0 too.
    """
    AT_ONCE: gl.constexpr = rows_at_once(block, WARPS)
    GROUPS: gl.constexpr = registers_of_groups(block.padded, WARPS)
    ROWS: gl.constexpr = registers_of_rows(block.padded, WARPS)
    rows = source.rows
    COLUMNS: gl.constexpr = 8 * lanes_of_a_row(block.padded)
    GROUP: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, GROUPS)))
    PART: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, GROUPS)))
    group = gl.arange(0, block.length // AT_ONCE, layout=GROUP)[:, None, None, None]
    part = gl.arange(0, block.padded // COLUMNS, layout=PART)[None, None, :, None]
    first = rows.pointer + start.to(gl.int64) * rows.stride
    pointers = ((first + group * (AT_ONCE * rows.stride)) + source.offsets) + part * COLUMNS
    pointers = gl.convert_layout(gl.reshape(pointers, [block.length, block.padded]), ROWS, assert_trivial=True)
    pointers = gl.max_contiguous(gl.multiple_of(pointers, [1, 16]), [1, 8])  # which reshaping forgets
    inside = None
    if block.width != block.padded:
        inside = (gl.arange(0, block.padded, layout=gl.SliceLayout(0, ROWS)) < block.width)[None, :]
    if CHECKED:
        row = gl.arange(0, block.length, layout=gl.SliceLayout(1, ROWS))
        own = ((row >= begin - start) & (row < end - start))[:, None]
        inside = own if inside is None else own & inside
    if columns is not None:
        pieces = gl.arange(0, block.padded, layout=gl.SliceLayout(0, ROWS)) // 8  # each inside or outside as a whole
        inside = (pieces < columns // 8)[None, :] & inside
    async_load(shared, pointers, inside)


@gluon.constexpr_function
def bias_block(rows, columns):
    """Return the block of a bias, as rows of keys."""
    return RowBlock(rows, columns, columns, True)


@gluon.jit
def copy_bias(
    shared, head, start_q, start_k, M: gl.constexpr, N: gl.constexpr, CHECKED: gl.constexpr, WARPS: gl.constexpr
):
    """Fetch the bias `[M, N]` of queries `start_q ...` and keys `start_k ...`: 0 past the ends of both.

    Unless `CHECKED`, no key lies past the end.
    """
    BLOCK: gl.constexpr = bias_block(M, N)
    own = source_of(Rows(head.bias.start + start_k, head.bias.query_stride), BLOCK, WARPS)
    columns = None
    if CHECKED:
        columns = head.place.length_k - start_k
    copy_rows(shared, own, start_q, 0, head.place.length_q, BLOCK, True, WARPS, columns)


@gluon.jit
def copy_numbers(shared, pointer, start, end, COUNT: gl.constexpr, WARPS: gl.constexpr):
    """Fetch the float32 numbers of rows `start ...` into a buffer: 0 from row `end` on."""
    NUMBERS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    row = gl.arange(0, COUNT, layout=NUMBERS)
    async_load(shared, pointer + start + row, row < end - start)


@gluon.jit
def keep_rows(shared, kept, block: gl.constexpr, WARPS: gl.constexpr):
    """Clear the rows of a buffer whose number in `kept` `[count]` is 0, in whatever layout that is."""
    ROWS: gl.constexpr = registers_of_rows(block.padded, WARPS)
    kept = gl.convert_layout(kept, gl.SliceLayout(1, ROWS))
    values = shared.load(ROWS)
    shared.store(gl.where((kept != 0)[:, None], values, gl.zeros_like(values)))


@gluon.jit
def store_columns(rows, made, start, end, FIRST: gl.constexpr, COLUMNS: gl.constexpr, block: gl.constexpr):
    """Write columns `FIRST ...` of a `block` of rows `start ...`, up to row `end` and the block's width."""
    ROWS: gl.constexpr = registers_of_rows(COLUMNS, gl.num_warps())
    made = gl.convert_layout(made.to(rows.pointer.dtype.element_ty), ROWS)
    row = start + gl.arange(0, block.length, layout=gl.SliceLayout(1, ROWS))
    column = FIRST + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, ROWS))
    pointers = rows.pointer + row.to(gl.int64)[:, None] * rows.stride + column[None, :]
    inside = (row < end)[:, None] & (column < block.width)[None, :]
    if block.aligned:
        pointers = gl.multiple_of(pointers, [1, 16])
    gl.store(pointers, made, mask=inside)


@gluon.jit
def product(a, b, sums, K: gl.constexpr, LAYOUT: gl.constexpr):
    """Add the product of two buffers `[M, K ...]` and `[K ..., N]` to sums `[M, N]` of a layout, 16 of K at a time."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 2)
    for first in gl.static_range(0, K, 16):
        sums = mma_v2(a.slice(first, 16, 1).load(LEFT), b.slice(first, 16, 0).load(RIGHT), sums)
    return sums
