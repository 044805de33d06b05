"""The columns of a head in one tile or two, since the sides of a tile are powers of two: 80 is 64 and 16, 192 is 128 and 64.

Tiles, buffers of shared memory and accumulators of a head are tuples of one or two. A product over the columns (of queries
and keys, of grad_out and values) adds both parts up in the same accumulator; one whose result has these columns (out and the
gradients) is a product for each part. A second width of 0 means that there is one part, and what is compiled is what would be
without tuples. Each part has its own tensor map: the second one's box begins at column `WIDTH`, and what lies past the end of
the head is read as 0 and not written.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.constants import accumulator
from dmattn_ops.kernels.hopper.gluon_compat import (
    fence_async_shared,
    reinterpret,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from dmattn_ops.kernels.hopper.ragged import corner_of


@gluon.constexpr_function
def staged(n, map):
    """Return the shape of shared memory for `n` boxes of a tensor map."""
    return [n, *map.block_type.shape]


@gluon.jit
def pair(first, second, SECOND: gl.constexpr):
    """Return a tuple of one part, or of two where the second has a width."""
    if SECOND > 0:
        return (first, second)
    else:
        return (first,)


@gluon.jit
def no_sums(WIDTH: gl.constexpr, SECOND: gl.constexpr):
    """Return accumulators `[64, width]` of 0."""
    first = gl.zeros([64, WIDTH], gl.float32, layout=accumulator(WIDTH))
    if SECOND > 0:
        second = gl.zeros([64, SECOND], gl.float32, layout=accumulator(SECOND))
        return (first, second)
    else:
        return (first,)


@gluon.jit
def multiply(left, right, sums, use_acc):
    """Start adding the products of all parts of `left` and `right` to the same sums; as many groups as there are parts."""
    sums = warpgroup_mma(left[0], right[0], sums, use_acc=use_acc, is_async=True)
    if len(left) > 1:
        sums = warpgroup_mma(left[1], right[1], sums, is_async=True)
    return sums


@gluon.jit
def add_products(left, right, sums, SECOND: gl.constexpr):
    """Start adding `left`, an operand for the first part, times each part of `right` to each part of the sums."""
    first = warpgroup_mma(left, right[0], sums[0], is_async=True)
    if SECOND > 0:
        return (first, warpgroup_mma(as_operand(left, SECOND), right[1], sums[1], is_async=True))
    else:
        return (first,)


@gluon.jit
def await_products(sums, SECOND: gl.constexpr):
    """Wait for all products, and return both parts of the sums of some."""
    if SECOND > 0:
        first, second = warpgroup_mma_wait(0, deps=(sums[0], sums[1]))
        return (first, second)
    else:
        return (warpgroup_mma_wait(0, deps=(sums[0],)),)


@gluon.jit
def as_operand(left, WIDTH: gl.constexpr):
    """Return a tile `[64, ..]` in the registers in which it is multiplied by `WIDTH` columns."""
    PARENT: gl.constexpr = accumulator(WIDTH)
    return gl.convert_layout(left, gl.DotOperandLayout(operand_index=0, parent=PARENT, k_width=2))


@gluon.jit
def allocate_rows(maps, n, ROWS: gl.constexpr, WIDTH: gl.constexpr, SECOND: gl.constexpr, dtype: gl.constexpr):
    """Return buffers for `n` tiles of rows `[B, S, heads, D]` as TMA fills them, and as matrices."""
    MATRIX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], dtype)
    filled = gl.allocate_shared_memory(dtype, staged(n, maps[0]), maps[0].layout)
    matrix = reinterpret(filled, dtype, [n, ROWS, WIDTH], MATRIX)
    if SECOND > 0:
        MATRIX_2: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, SECOND], dtype)
        second = gl.allocate_shared_memory(dtype, staged(n, maps[1]), maps[1].layout)
        return (filled, second), (matrix, reinterpret(second, dtype, [n, ROWS, SECOND], MATRIX_2))
    else:
        return (filled,), (matrix,)


@gluon.jit
def load_rows(maps, place, row, head, full, buffers, i, WIDTH: gl.constexpr):
    """Load rows `row ...` of a head at a place (`ragged.py`) into the `i`-th buffer of each part."""
    tma_load(maps[0], corner_of(maps[0], place, row, head, 0), full, buffers[0].index(i))
    if len(maps) > 1:
        tma_load(maps[1], corner_of(maps[1], place, row, head, WIDTH), full, buffers[1].index(i))


@gluon.jit
def stage_rows(rows, factor, buffer, WIDTH: gl.constexpr, ROOM: gl.constexpr, dtype: gl.constexpr):
    """Store rows `[64, WIDTH]` of one part, times a factor unless it is None, in a buffer of as many rows `ROOM` wide."""
    if WIDTH != ROOM:
        buffer = reinterpret(buffer, dtype, [64, WIDTH], gl.NVMMASharedLayout.get_default_for([64, WIDTH], dtype))
    if factor is not None:
        rows = rows * factor
    buffer.store(rows.to(dtype))
    fence_async_shared()


@gluon.jit
def send_rows(buffer, map, place, row, head, column, dtype: gl.constexpr):
    """Start writing what `stage_rows` stored to rows `row ...` and columns `column ...` of a head at a place."""
    tma_store(
        map, corner_of(map, place, row, head, column), reinterpret(buffer, dtype, map.block_type.shape, map.layout)
    )


@gluon.jit
def stage_parts(parts, factor, buffers, WIDTH: gl.constexpr, SECOND: gl.constexpr, dtype: gl.constexpr):
    """Store each part of rows in a buffer with room for it, as `stage_rows` does."""
    stage_rows(parts[0], factor, buffers[0], WIDTH, 0, dtype)
    if SECOND > 0:
        stage_rows(parts[1], factor, buffers[1], SECOND, 0, dtype)


@gluon.jit
def send_parts(buffers, maps, place, row, head, WIDTH: gl.constexpr, SECOND: gl.constexpr, dtype: gl.constexpr):
    """Start writing rows `row ...` of a head at a place, which `stage_parts` stored."""
    send_rows(buffers[0], maps[0], place, row, head, 0, dtype)
    if SECOND > 0:
        send_rows(buffers[1], maps[1], place, row, head, WIDTH, dtype)


@gluon.jit
def buffer_at(buffers, i):
    """Return the `i`-th of the buffers of each part."""
    if len(buffers) > 1:
        return (buffers[0].index(i), buffers[1].index(i))
    else:
        return (buffers[0].index(i),)


@gluon.jit
def slice_rows(parts, first, count: gl.constexpr):
    """Return `count` rows from `first` on of matrices."""
    if len(parts) > 1:
        return (parts[0].slice(first, count, dim=0), parts[1].slice(first, count, dim=0))
    else:
        return (parts[0].slice(first, count, dim=0),)


@gluon.jit
def rows_of(buffers, i, ROWS: gl.constexpr, WIDTH: gl.constexpr, SECOND: gl.constexpr):
    """Return the `i`-th of buffers `[n, 1, 1, ROWS, width]`, or of those of packed rows, as matrices."""
    first = buffers[0].index(i).reshape([ROWS, WIDTH])
    if SECOND > 0:
        return (first, buffers[1].index(i).reshape([ROWS, SECOND]))
    else:
        return (first,)


@gluon.jit
def transposed(parts):
    """Return matrices with rows as columns."""
    first = parts[0].permute((1, 0))
    if len(parts) > 1:
        return (first, parts[1].permute((1, 0)))
    else:
        return (first,)
