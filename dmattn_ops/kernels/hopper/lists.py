"""Words of lists of tiles as SM 9.0 kernels read them: whatever a list holds, it leads nowhere outside of a tensor."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.constants import HEADER, TILE


@gluon.jit
def named_tile(word, last):
    """Return the tile that a word of a list names, at most `last`, which is not negative."""
    return gl.minimum(word.to(gl.uint32, bitcast=True), last.to(gl.uint32, bitcast=True)).to(gl.int32, bitcast=True)


@gluon.jit
def last_tile(length):
    """Return the last tile of `length` rows, 0 where there are none."""
    return gl.maximum(length - 1, 0) // TILE


@gluon.jit
def counts_of(record, width):
    """Return (n_partial, n_full) of a record of `width` words: together no more than it has room for."""
    return bounded(gl.load(record + 1), gl.load(record + 2), width)


@gluon.jit
def bounded(n_partial, n_full, width):
    """Return the two counts of a record of `width` words: not negative, and together no more than it has room for."""
    room = width - HEADER
    n_partial = gl.minimum(gl.maximum(n_partial, 0), room)
    return n_partial, gl.minimum(gl.maximum(n_full, 0), room - n_partial)
