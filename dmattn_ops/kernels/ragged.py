"""Tiles of packed sequences: which rows of which sequence a block works on, and what these see of the other side.

A tile never holds rows of two sequences. It begins at a multiple of its height inside its own sequence, and what lies
behind the end of that is neither read nor written: tensor maps are bounded by the sequence (`launching/tensor_maps.py`). So
what one sequence holds reaches no other one, whatever it is, and the results of a sequence do not depend on its neighbours.
`tiles_of` writes, on the device and in one pass over the offsets, a record for each tile of one side:

```
word   0        1       2       3        4             5              6          7        8      9       10, 11
     [ ranked | first | begin | length | other_begin | other_length | diagonal | padded | work | tiles | unspecified ]
```

The tile holds rows `first ...` of a sequence whose rows are `begin` to `begin + length`; row `r` of it sees rows from `r +
diagonal + low` to `r + diagonal + high` of the other side's sequence, which are `other_begin` to `other_begin +
other_length` in its tensor. `padded` counts the rows of the other side before that sequence where each sequence is padded
to whole tiles of 128. `tiles` is how many tiles there are, the same in each record. Word 0 of record `r` does not belong to
tile `r`: it names the tile that comes `r`-th. Tiles come in chunks of tiles that lie next to each other, so that L2 holds
what those read that run at the same time: first the chunk with the longest tile, and inside a chunk the tiles with the most
work. Without chunks they come by their work alone, as in the lists of masks.

Rows before the first offset and behind the last one count as two more sequences, which see nothing: their outputs are
written like those of every row. There are as many records as the offsets allow, `capacity`; those without a tile have
lengths of 0 and come last. Whatever the offsets are, no sequence reaches out of the tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmattn_ops.call import TILE, Call
from dmattn_ops.launching.launch import launch, workspace
from dmattn_ops.launching.overlap import follow_kernel_before

WORDS = 12  # of a record
_WORDS = tl.constexpr(WORDS)
_WORK = tl.constexpr(8)  # the word that holds the work
TILES = 9  # the word that holds the number of tiles
_TILES = tl.constexpr(TILES)
_PADDED = tl.constexpr(TILE)  # rows that a sequence of the other side is padded to
_UNIT = tl.constexpr(64)  # rows of the other side that count as one piece of work
_FEW, _MANY = 128, 1024  # sequences that a program reads at a time
_OWN, _OTHERS = 64, 128  # tiles that a program ranks, and with how many at a time it compares them


class _Side(NamedTuple):
    """The offsets of one side's sequences, and the rows of its tensor."""

    offsets: Any
    total: Any


@triton.jit
def _begin_of(side, number, sequences):
    """Return the first row of a sequence; number 0 is the rows before the first offset, `sequences + 1` those after the last."""
    known = (number > 0) & (number <= sequences + 1)
    begin = tl.load(side.offsets + number - 1, known, other=0)
    begin = tl.where(number > sequences + 1, side.total, begin)
    return tl.minimum(tl.maximum(begin, 0), side.total)


@triton.jit
def _bounds(side, number, sequences):
    """Return (begin, length) of sequences inside the tensor, whatever the offsets are."""
    begin = _begin_of(side, number, sequences)
    return begin, tl.maximum(_begin_of(side, number + 1, sequences) - begin, 0)


@triton.jit(do_not_specialize=["sequences", "own_total", "other_total", "low", "high"])
def _write_tiles(
    own_offsets, other_offsets, records, sequences, own_total, other_total, low, high,
    ROWS: tl.constexpr, TOP_LEFT: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Write the record of a tile of `ROWS` rows, but for word 0."""
    follow_kernel_before()
    own, other = _Side(own_offsets, own_total), _Side(other_offsets, other_total)
    tile = tl.program_id(0)
    counted = tile * 0  # tiles of the sequences that have been read
    sequence = counted  # how many of these end before this tile
    tiles_before = counted  # and how many tiles they have
    padded = counted
    for at in range(0, sequences + 2, AT_ONCE):
        number = at + tl.arange(0, AT_ONCE)
        inside = number < sequences + 2
        _, length = _bounds(own, number, sequences)
        tiles = tl.where(inside, tl.cdiv(length, ROWS), 0)
        before = inside & (counted + tl.cumsum(tiles, 0) <= tile)
        _, other_length = _bounds(other, number, sequences)
        counted += tl.sum(tiles, 0)
        sequence += tl.sum(before.to(tl.int32), 0)
        tiles_before += tl.sum(tl.where(before, tiles, 0), 0)
        padded += tl.sum(tl.where(before, tl.cdiv(other_length, _PADDED), 0), 0)
    begin, length = _bounds(own, sequence, sequences)
    other_begin, other_length = _bounds(other, sequence, sequences)
    exists = sequence < sequences + 2
    length = tl.where(exists, length, 0)
    # `capacity` of the other side: only where offsets fall, which describes nothing, more rows are counted
    room = other_total // _PADDED + tl.minimum(other_total, sequences + 2)
    fits = padded + tl.cdiv(other_length, _PADDED) <= room
    other_length = tl.where((sequence > 0) & (sequence <= sequences) & fits, other_length, 0)
    first = tl.where(exists, (tile - tiles_before) * ROWS, 0)
    diagonal = sequence * 0
    if not TOP_LEFT:
        diagonal += other_length - length
    last = tl.minimum(first + ROWS, length) - 1
    start = tl.maximum(first + diagonal + low, 0)
    end = tl.minimum(last + diagonal + high + 1, other_length)
    record = records + tile.to(tl.int64) * _WORDS
    tl.store(record + 1, first)
    tl.store(record + 2, tl.where(exists, begin, 0))
    tl.store(record + 3, length)
    tl.store(record + 4, tl.where(exists, other_begin, 0))
    tl.store(record + 5, other_length)
    tl.store(record + 6, diagonal)
    tl.store(record + 7, padded * _PADDED)
    tl.store(record + _WORK, tl.where(exists, tl.maximum(tl.cdiv(end, _UNIT) - start // _UNIT, 0), -1))
    tl.store(record + _TILES, tl.minimum(counted, tl.num_programs(0)))


@triton.jit
def _chunk_of(tile, work, N: tl.constexpr, CHUNK: tl.constexpr):
    """Return (the most work of a tile of the same chunk, the chunk) of `N` tiles that follow each other, 0 without chunks."""
    if CHUNK == 0:
        most, chunk = work * 0, tile * 0
    else:
        most = tl.max(tl.reshape(work, [N // CHUNK, CHUNK]), axis=1)
        most = tl.broadcast_to(most[:, None], [N // CHUNK, CHUNK])
        # a record without a tile comes last, although it lies in the chunk of the last tiles
        most, chunk = tl.where(work < 0, -1, tl.reshape(most, [N])), tile // CHUNK
    return most, chunk


@triton.jit
def _comes_before(most, chunk, work, tile, other_most, other_chunk, other_work, other):
    """Return whether the other tile comes first: its chunk has a longer tile, or it has more work; ties go by number."""
    sooner = (other_work > work) | ((other_work == work) & (other < tile))
    sooner = (other_chunk < chunk) | ((other_chunk == chunk) & sooner)
    return (other_most > most) | ((other_most == most) & sooner)


@triton.jit(do_not_specialize=["tiles"])
def _rank_tiles(records, tiles, OWN: tl.constexpr, OTHER: tl.constexpr, CHUNK: tl.constexpr):
    """Write word 0 of the records: the tiles in their order."""
    follow_kernel_before()
    tile = tl.program_id(0) * OWN + tl.arange(0, OWN)
    work = tl.load(records + tile.to(tl.int64) * _WORDS + _WORK, tile < tiles, other=0)
    most, chunk = _chunk_of(tile, work, OWN, CHUNK)
    rank = tl.zeros([OWN], tl.int32)
    for at in range(0, tiles, OTHER):
        other = at + tl.arange(0, OTHER)
        other_work = tl.load(records + other.to(tl.int64) * _WORDS + _WORK, other < tiles, other=0)
        other_most, other_chunk = _chunk_of(other, other_work, OTHER, CHUNK)
        before = _comes_before(
            most[:, None], chunk[:, None], work[:, None], tile[:, None],
            other_most[None, :], other_chunk[None, :], other_work[None, :], other[None, :],
        )  # fmt: skip
        rank += tl.sum((before & (other < tiles)[None, :]).to(tl.int32), axis=1)
    tl.store(records + rank.to(tl.int64) * _WORDS, tile, tile < tiles)


def capacity(total: int, sequences: int, rows: int) -> int:
    """Return the most tiles of `rows` rows that `total` rows of `sequences` sequences and what lies around them can have."""
    return total // rows + min(total, sequences + 2)


def tiles_of(
    call: Call, rows: int, *, of_keys: bool, ranked: bool = True, chunk: int = 0, follows: bool = False
) -> Tensor:
    """Return the records `[tiles, WORDS]` of the tiles of `rows` queries of a call of packed sequences, or of its keys, as int32.

    Args:
        call: the call.
        rows: the height of a tile.
        of_keys: whether these are tiles of keys.
        ranked: whether word 0 is needed: else it is unspecified.
        chunk: how many tiles a chunk has that comes before others do, a power of two; 0 orders all tiles by their work.
        follows: whether the kernels may begin while the one before them ends (`launching/overlap.py`).
    """
    varlen, options = call.varlen, call.options
    assert varlen is not None
    own, other = (varlen.cu_seqlens_q, call.query.shape[0]), (varlen.cu_seqlens_k, call.key.shape[0])
    low, high = options.band_lo, options.band_hi
    if of_keys:
        own, other, low, high = other, own, -high, -low
    (own_offsets, own_total), (other_offsets, other_total) = own, other
    sequences = own_offsets.shape[0] - 1
    tiles = capacity(own_total, sequences, rows)
    records = workspace(call.query, tiles, WORDS, dtype=torch.int32)
    launch(
        _write_tiles, (tiles,), own_offsets, other_offsets, records, sequences, own_total, other_total, low, high,
        ROWS=rows, TOP_LEFT=varlen.top_left, AT_ONCE=_FEW if sequences + 2 <= _FEW else _MANY, num_warps=4, follows=follows,
    )  # fmt: skip
    if ranked:
        chunk = min(chunk, _OWN) if 1 < chunk < tiles else 0
        constants = {"OWN": _OWN, "OTHER": _OTHERS, "CHUNK": chunk}
        launch(_rank_tiles, (triton.cdiv(tiles, _OWN),), records, tiles, **constants, num_warps=4, follows=True)
    return records
