"""What the rows of packed sequences see of each other, for kernels that take all sequences as one.

Inside a band, a query sees keys that follow each other, and a key is seen by queries that follow each other: their *span*, from
`start` to before `end` in the packed tensor of the other side. So variable lengths need neither lists of tiles nor a grid
with the longest sequence in it: `spans_of` writes, on the device and in O(total) memory,

```
starts, ends   [rows]      the span of each row of one side; 0, 0 where it is empty
tiles          [tiles, 8]  a record for each tile of rows

word   0        1       2     3            4          5      6, 7
     [ ranked | begin | end | full_begin | full_end | work | unspecified ]
```

`begin` to `end` holds the spans of all rows of the tile, and rows `full_begin` to `full_end` lie in each of them, where that is not
empty. Rows behind the last query are passed over; behind the last key they have an empty span, so that tiles there are tested.
Word 0 of record `r` does not belong to tile `r`: it names the tile that comes `r`-th. Tiles come in chunks of tiles that lie
next to each other, so that L2 holds what those read that run at the same time: first the chunk with the longest tile, and inside
a chunk the tiles with the most work. Without chunks they come by their work alone, as in the lists of masks.

Whatever the offsets are, no span reaches out of the tensors: a row is only given a sequence that it lies in.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmattn_ops.call import Call
from dmattn_ops.kernels.launching.launch import launch, workspace
from dmattn_ops.kernels.launching.overlap import follow_kernel_before

WORDS = 8  # of a record
_WORDS = tl.constexpr(WORDS)
_UNIT = tl.constexpr(64)  # rows of the other side that count as one piece of work
_LAST = tl.constexpr(0x7FFFFFFF)
_RANKED = 1024  # up to this many tiles, each program ranks its own: that is faster than another launch
_OWN, _OTHERS = 64, 128  # tiles that a program of that launch ranks, and with how many at a time it compares them


class Spans(NamedTuple):
    """The spans of one side, int32."""

    starts: Tensor
    ends: Tensor
    tiles: Tensor


class _Sides(NamedTuple):
    """The offsets and sizes of the side whose rows have spans, and of the side that they see; the band between them."""

    cu_own: Any
    cu_other: Any
    sequences: Any
    first_step: Any  # the greatest power of two that is not above `sequences`
    own_total: Any
    other_total: Any
    own_longest: Any
    other_longest: Any
    low: Any
    high: Any


@triton.jit
def _sequence_of(row, sides):
    """Return the last sequence that begins at or before each row, -1 where there is none."""
    count = tl.zeros(row.shape, tl.int32)  # sequences that begin at or before the row
    step = sides.first_step
    while step > 0:
        tried = count + step
        begin = tl.load(sides.cu_own + tried - 1, tried <= sides.sequences, other=_LAST)
        count = tl.where(begin <= row, tried, count)
        step = step // 2
    return count - 1


@triton.jit
def _bounds(cu_seqlens, sequence, known, total, longest):
    """Return (begin, length) of sequences; offsets that lie outside of the tensor are pulled in."""
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence, known, other=0), 0), total)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence + 1, known, other=0), begin), total)
    return begin, tl.minimum(end - begin, longest)


@triton.jit
def _spans_of_rows(row, inside, sides, TOP_LEFT: tl.constexpr):
    """Return (start, end) of the span of each row; both 0 where it is empty."""
    sequence = _sequence_of(row, sides)
    known = inside & (sequence >= 0)
    begin, length = _bounds(sides.cu_own, sequence, known, sides.own_total, sides.own_longest)
    other_begin, other_length = _bounds(sides.cu_other, sequence, known, sides.other_total, sides.other_longest)
    local = row - begin
    diagonal = local
    if not TOP_LEFT:
        diagonal += other_length - length
    first = tl.maximum(diagonal + sides.low, 0)
    last = tl.minimum(diagonal + sides.high, other_length - 1)
    seen = known & (local < length) & (first <= last)
    return tl.where(seen, other_begin + first, 0), tl.where(seen, other_begin + last + 1, 0)


@triton.jit
def _work(start, end):
    """Return the pieces of the other side that spans from `start` to `end` touch."""
    return tl.where(start < end, tl.cdiv(end, _UNIT) - start // _UNIT, 0)


@triton.jit
def _work_of_tiles(tile, sides, ROWS: tl.constexpr, TOP_LEFT: tl.constexpr):
    """Return the work of tiles as far as their first and last rows tell: exact where those see something."""
    first = tile * ROWS
    last = tl.minimum(first + ROWS, sides.own_total) - 1
    inside = first < sides.own_total
    start, end = _spans_of_rows(first, inside, sides, TOP_LEFT)
    last_start, last_end = _spans_of_rows(last, inside, sides, TOP_LEFT)
    start = tl.where(start < end, start, last_start)
    start = tl.where(last_start < last_end, tl.minimum(start, last_start), start)
    return _work(start, tl.maximum(end, last_end))


@triton.jit
def _chunk_of(tile, work, N: tl.constexpr, CHUNK: tl.constexpr):
    """Return (the most work of a tile of the same chunk, the chunk) of `N` tiles that follow each other, 0 without chunks."""
    if CHUNK == 0:
        most, chunk = work * 0, tile * 0
    else:
        most = tl.max(tl.reshape(work, [N // CHUNK, CHUNK]), axis=1)
        most = tl.broadcast_to(most[:, None], [N // CHUNK, CHUNK])
        most, chunk = tl.reshape(most, [N]), tile // CHUNK
    return most, chunk


@triton.jit
def _comes_before(most, chunk, work, tile, other_most, other_chunk, other_work, other):
    """Return whether the other tile comes first: its chunk has a longer tile, or it has more work; ties go by number."""
    sooner = (other_work > work) | ((other_work == work) & (other < tile))
    sooner = (other_chunk < chunk) | ((other_chunk == chunk) & sooner)
    return (other_most > most) | ((other_most == most) & sooner)


@triton.jit(
    do_not_specialize=["sequences", "first_step", "own_total", "other_total", "own_longest", "other_longest", "low",
                       "high", "tiles"]
)  # fmt: skip
def _write_spans(
    cu_own, cu_other, starts, ends, records, sequences, first_step, own_total, other_total, own_longest, other_longest,
    low, high, tiles, ROWS: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr, TOP_LEFT: tl.constexpr,
    RANKED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the spans of a tile of `ROWS` rows and its record; word 0 of another one, where `RANKED` tiles are all."""
    follow_kernel_before()
    sides = _Sides(
        cu_own, cu_other, sequences, first_step, own_total, other_total, own_longest, other_longest, low, high
    )
    tile = tl.program_id(0)
    place = tl.arange(0, PADDED)
    row = tile * ROWS + place
    inside = (place < ROWS) & (row < own_total)
    start, end = _spans_of_rows(row, inside, sides, TOP_LEFT)
    tl.store(starts + row, start, inside)
    tl.store(ends + row, end, inside)

    some = start < end
    least, most = tl.min(tl.where(some, start, _LAST), axis=0), tl.max(end, axis=0)
    least = tl.minimum(least, most)  # both are 0 where no row sees anything
    counted = place < ROWS
    if not KEYS:
        counted = inside
    record = records + tile * _WORDS
    tl.store(record + 1, least)
    tl.store(record + 2, most)
    tl.store(record + 3, tl.max(start, axis=0))
    tl.store(record + 4, tl.min(tl.where(counted, end, _LAST), axis=0))
    tl.store(record + 5, _work(least, most))
    if RANKED:
        other = tl.arange(0, RANKED)
        work = _work_of_tiles(other, sides, ROWS, TOP_LEFT)
        most, chunk = _chunk_of(other, work, RANKED, CHUNK)
        own = tl.sum(tl.where(other == tile, work, 0), axis=0)
        own_most = tl.sum(tl.where(other == tile, most, 0), axis=0)
        own_chunk = tl.sum(tl.where(other == tile, chunk, 0), axis=0)
        before = _comes_before(own_most, own_chunk, own, tile, most, chunk, work, other)
        rank = tl.sum((before & (other < tiles)).to(tl.int32), axis=0)
        tl.store(records + rank * _WORDS, tile)


@triton.jit(do_not_specialize=["tiles"])
def _rank_tiles(records, tiles, OWN: tl.constexpr, OTHER: tl.constexpr, CHUNK: tl.constexpr):
    """Write word 0 of the records: the tiles in their order."""
    follow_kernel_before()
    tile = tl.program_id(0) * OWN + tl.arange(0, OWN)
    work = tl.load(records + tile * _WORDS + 5, tile < tiles, other=0)
    most, chunk = _chunk_of(tile, work, OWN, CHUNK)
    rank = tl.zeros([OWN], tl.int32)
    for at in range(0, tiles, OTHER):
        other = at + tl.arange(0, OTHER)
        other_work = tl.load(records + other * _WORDS + 5, other < tiles, other=0)
        other_most, other_chunk = _chunk_of(other, other_work, OTHER, CHUNK)
        before = _comes_before(
            most[:, None], chunk[:, None], work[:, None], tile[:, None],
            other_most[None, :], other_chunk[None, :], other_work[None, :], other[None, :],
        )  # fmt: skip
        rank += tl.sum((before & (other < tiles)[None, :]).to(tl.int32), axis=1)
    tl.store(records + rank * _WORDS, tile, tile < tiles)


def spans_of(call: Call, rows: int, *, of_keys: bool, chunk: int = 0) -> Spans:
    """Return the spans of the queries of a call of packed sequences, or of its keys, with a record for each `rows` of them.

    `chunk`, a power of two, is how many tiles a chunk has that comes before others do; 0 orders all tiles by their work. They
    are workspaces of one call.
    """
    varlen, options = call.varlen, call.options
    assert varlen is not None
    own = varlen.cu_seqlens_q, call.query.shape[0], varlen.max_seqlen_q
    other = varlen.cu_seqlens_k, call.key.shape[0], varlen.max_seqlen_k
    low, high = options.band_lo, options.band_hi
    if of_keys:
        own, other, low, high = other, own, -high, -low
    (cu_own, total, longest), (cu_other, other_total, other_longest) = own, other
    sequences, tiles = cu_own.shape[0] - 1, triton.cdiv(total, rows)
    room = triton.cdiv(total, 4) * 4  # so that what follows is aligned
    made = workspace(call.query, 2 * room + tiles * WORDS, dtype=torch.int32)
    spans = Spans(made, made[room:], made[2 * room :].view(tiles, WORDS))
    ranked = max(16, triton.next_power_of_2(tiles)) if tiles <= _RANKED else 0
    chunk = chunk if 1 < chunk < tiles else 0
    launch(
        _write_spans, (tiles,), cu_own, cu_other, *spans,
        sequences, 1 << sequences.bit_length() >> 1, total, other_total, min(longest, total), min(other_longest, other_total),
        low, high, tiles,
        ROWS=rows, PADDED=triton.next_power_of_2(rows), KEYS=of_keys, TOP_LEFT=varlen.top_left, RANKED=ranked,
        CHUNK=chunk if ranked else 0, num_warps=4, follows=of_keys,
    )  # fmt: skip
    if not ranked:
        chunk = min(chunk, _OTHERS)
        at_once = max(_OWN, chunk)
        constants = {"OWN": at_once, "OTHER": _OTHERS, "CHUNK": chunk}
        launch(
            _rank_tiles, (triton.cdiv(tiles, at_once),), spans.tiles, tiles, **constants, num_warps=4, follows=of_keys
        )
    return spans
