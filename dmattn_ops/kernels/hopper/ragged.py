"""Where rows of a tile lie in the tensors of SM 9.0 kernels: in a batch entry, or in one of packed sequences.

The kind of a call's tensor maps says which: those of packed sequences have two dimensions more (`launching/tensor_maps.py`) and are
bounded by a sequence. To kernels the place of both is one value: the number of a batch entry, or `Rows`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.ragged import TILES as _TILES
from dmattn_ops.launching.tensor_maps import RAGGED_ROWS as _RAGGED_ROWS

RAGGED_ROWS = gl.constexpr(_RAGGED_ROWS)
TILES = gl.constexpr(_TILES)


class Rows(NamedTuple):
    """The rows of one sequence in a packed tensor."""

    begin: Any
    length: Any


class Tile(NamedTuple):
    """A tile of one sequence, as `kernels/ragged.py` records it, and what that sees of the other side."""

    first: Any  # row inside the sequence
    own: Any  # Rows
    other: Any  # Rows
    diagonal: Any  # row r sees other rows from r + diagonal + low to r + diagonal + high
    padded: Any  # rows of the other side before this sequence where all are padded to whole tiles


@gluon.jit
def load_tile(record):
    """Return the tile of a record."""
    own = Rows(gl.load(record + 2), gl.load(record + 3))
    other = Rows(gl.load(record + 4), gl.load(record + 5))
    return Tile(gl.load(record + 1), own, other, gl.load(record + 6), gl.load(record + 7))


@gluon.jit
def count_tiles(records):
    """Return how many of the records have a tile."""
    return gl.load(records + TILES)


@gluon.jit
def corner_of(map, place, row, head, column):
    """Return the coordinates of `row` and `column` of a head in a map of `[.., rows, heads, columns]`."""
    if len(map.block_type.shape) == 5:
        return [RAGGED_ROWS, place.begin + place.length, RAGGED_ROWS - place.length + row, head, column]
    else:
        return [place, row, head, column]


@gluon.jit
def head_corner_of(map, place, row, head, column):
    """Return the coordinates of `row` and `column` of a head in a map of `[.., heads, rows, columns]`."""
    if len(map.block_type.shape) == 5:
        return [RAGGED_ROWS, place.begin + place.length, head, RAGGED_ROWS - place.length + row, column]
    else:
        return [place, head, row, column]
