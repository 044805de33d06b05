"""Numbers of the SM 9.0 kernels, and the layout of their accumulators."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.call import TILE as _TILE

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
TILE = gl.constexpr(_TILE)  # queries and keys of a tile of lists and mask words
HEADER = gl.constexpr(4)  # words of a list before its tiles
ROWS = gl.constexpr(64)  # of a warp group's matrix instruction


@gluon.constexpr_function
def accumulator(columns):
    """Return the layout of an accumulator `[64, columns]`."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
