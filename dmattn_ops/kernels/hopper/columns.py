"""The columns of a head in one tile or two, since a tile's sides are powers of two: 80 is 64 and 16, 96 is 64 and 32, 192 is 128 and 64.

Tiles, buffers of shared memory and accumulators of a head are tuples of one or two. A product over the columns (of queries
and keys, of grad_out and values) adds both parts up in the same accumulator; one whose result has these columns (out and the
gradients) is a product for each part. A second width of 0 means that there is one part, and what is compiled is what would be
without tuples. Each part has its own tensor map: the second one's box begins at column `WIDTH`, and what lies past the end of
the head is read as 0 and not written.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.gluon_compat import warpgroup_mma


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
    first = gl.zeros([64, WIDTH], gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16]))
    if SECOND > 0:
        second = gl.zeros([64, SECOND], gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SECOND, 16]))
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
def as_operand(left, WIDTH: gl.constexpr):
    """Return a tile `[64, ..]` in the registers in which it is multiplied by `WIDTH` columns."""
    PARENT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    return gl.convert_layout(left, gl.DotOperandLayout(operand_index=0, parent=PARENT, k_width=2))


@gluon.jit
def rows_of(buffers, i, ROWS: gl.constexpr, WIDTH: gl.constexpr, SECOND: gl.constexpr):
    """Return the `i`-th of buffers `[n, 1, 1, ROWS, width]` as matrices."""
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
