"""Device code that writes the lists of tiles from their classes, from ranges of segments or from hulls of intervals.

`own` are the tiles of the side whose lists are written, `other` those of the other side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from dmattn_ops.call import HEADER, TILE
from dmattn_ops.kernels.constants import Constants
from dmattn_ops.kernels.masks.ranks import work_before
from dmattn_ops.launching.overlap import follow_kernel_before

_TILE = tl.constexpr(TILE)
_HEADER = tl.constexpr(HEADER)
HULL = 8  # words of the hull of a tile of keys (`interval_lists.py`)
_HULL = tl.constexpr(HULL)


@dataclass(frozen=True, eq=False, repr=False)
class Traits(Constants):
    """What `list_tiles_kernel` is compiled for."""

    source: str  # what classes of tiles are made of: "classes", "ranges" of segments, or "hulls" of intervals
    q_segments: bool  # queries have segments, too
    own: int  # tiles whose lists a program writes
    other: int  # tiles of the other side that it classifies at a time
    ranked: int  # records of a side, padded, that it sorts by length; 0: another kernel does that


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "q_tiles", "k_tiles", "row_count", "col_count"])
def segment_ranges(
    q_segments, k_segments, ranges, seqlen_q, seqlen_k, q_tiles, k_tiles, row_count, col_count, TILES: tl.constexpr
):
    """Write the least and greatest segment of each tile: first `q_tiles` of queries, then `k_tiles` of keys."""
    q_programs = tl.cdiv(q_tiles, TILES)
    program = tl.program_id(0)
    if program < q_programs:
        _write_ranges(q_segments, ranges, program, seqlen_q, q_tiles, row_count, TILES)
    else:
        _write_ranges(k_segments, ranges + 2 * q_tiles, program - q_programs, seqlen_k, k_tiles, col_count, TILES)


@triton.jit
def _write_ranges(segments, ranges, program, seqlen, tiles, count, TILES: tl.constexpr):
    """Write the ranges of `TILES` tiles, `count` to each sequence."""
    tile = program * TILES + tl.arange(0, TILES)
    position = (tile % count * _TILE)[:, None] + tl.arange(0, _TILE)[None, :]
    inside = (tile < tiles)[:, None] & (position < seqlen)
    pointers = segments + (tile // count).to(tl.int64)[:, None] * seqlen + position
    tl.store(ranges + 2 * tile, tl.min(tl.load(pointers, inside, other=0x7FFFFFFF), axis=1), tile < tiles)
    tl.store(ranges + 2 * tile + 1, tl.max(tl.load(pointers, inside, other=-0x80000000), axis=1), tile < tiles)


class Sides(NamedTuple):
    """What the classes of one matrix of tiles are made of, seen from the side whose lists are written, the `own` one."""

    own_source: Any  # classes, ranges or hulls, as `Traits.source` says; ranges of the two sides lie apart
    other_source: Any
    own_count: Any  # tiles of a side
    other_count: Any
    own_length: Any  # positions of a side
    other_length: Any
    is_row: Any  # whether lists of query tiles are written, otherwise lists of key tiles
    seqlen_q: Any
    seqlen_k: Any
    col_count: Any  # tiles of keys
    band_lo: Any
    band_hi: Any


@triton.jit
def _classes(sides, own, other, T: tl.constexpr):
    """Return the classes [OWN, OTHER] of tiles: 0 where nothing is visible, 1 where some pairs are, 2 where all are."""
    if T.source == "ranges":
        kinds = _classes_by_range(sides, own, other, T.q_segments)
    elif T.source == "hulls":
        kinds = _classes_by_hull(sides, own, other)
    else:
        kinds = _classes_by_map(sides, own, other)
    return kinds


@triton.jit
def _classes_by_map(sides, own, other):
    """Load the classes [OWN, OTHER] of one matrix."""
    row = tl.where(sides.is_row, own[:, None], other[None, :])
    col = tl.where(sides.is_row, other[None, :], own[:, None])
    inside = (own < sides.own_count)[:, None] & (other < sides.other_count)[None, :]
    return tl.load(sides.own_source + row.to(tl.int64) * sides.col_count + col, inside, other=0).to(tl.int32)


@triton.jit
def _classes_by_range(sides, own, other, HAS_Q_SEGMENTS: tl.constexpr):
    """Classify tiles [OWN, OTHER] by the ranges of their segment ids and the band. Queries without segments have id 0."""
    is_row = sides.is_row
    own_read = (own < sides.own_count) & (HAS_Q_SEGMENTS | (is_row == 0))
    other_read = (other < sides.other_count) & (HAS_Q_SEGMENTS | (is_row != 0))
    own_low = tl.load(sides.own_source + 2 * own, own_read, other=0)[:, None]
    own_high = tl.load(sides.own_source + 2 * own + 1, own_read, other=0)[:, None]
    other_low = tl.load(sides.other_source + 2 * other, other_read, other=0)[None, :]
    other_high = tl.load(sides.other_source + 2 * other + 1, other_read, other=0)[None, :]
    own_first, other_first = (own * _TILE)[:, None], (other * _TILE)[None, :]
    own_last = tl.minimum(own_first + _TILE, sides.own_length) - 1
    other_last = tl.minimum(other_first + _TILE, sides.other_length) - 1
    nearest = tl.where(is_row, other_first - own_last, own_first - other_last)  # the least key minus query
    farthest = tl.where(is_row, other_last - own_first, own_last - other_first)
    inside = (own < sides.own_count)[:, None] & (other < sides.other_count)[None, :]
    listed = inside & (sides.band_lo <= sides.band_hi) & (farthest >= sides.band_lo) & (nearest <= sides.band_hi)
    listed = listed & (tl.maximum(own_low, other_low) <= tl.minimum(own_high, other_high))
    full = listed & (nearest >= sides.band_lo) & (farthest <= sides.band_hi)
    full = full & (own_last - own_first == _TILE - 1) & (other_last - other_first == _TILE - 1)
    full = full & (own_low == own_high) & (other_low == other_high) & (own_low == other_low)
    return listed.to(tl.int32) + full.to(tl.int32)


@triton.jit
def _hull_word(sides, word, own, other):
    """Load a word of the hulls of the keys' tiles, which are the `other` ones where rows are wanted: [OWN, OTHER]."""
    hulls, is_row = sides.own_source, sides.is_row
    of_own = tl.load(hulls + _HULL * own + word, (own < sides.own_count) & (is_row == 0), other=0)
    of_other = tl.load(hulls + _HULL * other + word, (other < sides.other_count) & (is_row != 0), other=0)
    return tl.where(is_row, of_other[None, :], of_own[:, None])


@triton.jit
def _classes_by_hull(sides, own, other):
    """Classify tiles [OWN, OTHER] by the hulls of the keys' intervals (`interval_lists.py`) and the band."""
    q_first = tl.where(sides.is_row, own[:, None], other[None, :]) * _TILE
    k_first = tl.where(sides.is_row, other[None, :], own[:, None]) * _TILE
    q_last = tl.minimum(q_first + _TILE, sides.seqlen_q) - 1
    k_last = tl.minimum(k_first + _TILE, sides.seqlen_k) - 1
    nearest, farthest = k_first - q_last, k_last - q_first
    listed = (own < sides.own_count)[:, None] & (other < sides.other_count)[None, :]
    listed = listed & (sides.band_lo <= sides.band_hi) & (farthest >= sides.band_lo) & (nearest <= sides.band_hi)
    listed = listed & (q_last >= _hull_word(sides, 0, own, other))
    listed = listed & (q_first < _hull_word(sides, 1, own, other))
    full = listed & (nearest >= sides.band_lo) & (farthest <= sides.band_hi)
    full = full & (q_last - q_first == _TILE - 1) & (k_last - k_first == _TILE - 1)
    full = full & (q_first >= _hull_word(sides, 2, own, other))
    full = full & (q_last < _hull_word(sides, 3, own, other))
    some = q_last >= _hull_word(sides, 4, own, other)
    some = some & (q_first < _hull_word(sides, 5, own, other))
    none = q_first >= _hull_word(sides, 6, own, other)
    none = none & (q_last < _hull_word(sides, 7, own, other))
    listed = listed & (none == 0)
    return listed.to(tl.int32) + (listed & full & (some == 0)).to(tl.int32)


@triton.jit(
    do_not_specialize=["seqlen_q", "seqlen_k", "band_lo", "band_hi", "heads", "row_records", "col_records",
                       "row_width", "col_width", "q_tiles", "q_ranges_b", "k_ranges_b", "k_ranges_h"]
)  # fmt: skip
def list_tiles_kernel(
    source, row_tiles, col_tiles,
    seqlen_q, seqlen_k, band_lo, band_hi, heads, row_records, col_records, row_width, col_width,
    q_tiles, q_ranges_b, k_ranges_b, k_ranges_h,
    T: tl.constexpr,
):  # fmt: skip
    """Write the lists of `T.own` tiles of a side, and their places in the order by work where `T.ranked` records are all.

    A side has a record for each of its tiles, and at least two: the records of no tile are empty.
    """
    follow_kernel_before()
    OWN: tl.constexpr = T.own
    OTHER: tl.constexpr = T.other
    row_count, col_count = tl.cdiv(seqlen_q, _TILE), tl.cdiv(seqlen_k, _TILE)
    row_blocks = tl.cdiv(row_records, OWN)
    blocks = row_blocks + tl.cdiv(col_records, OWN)
    matrix = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    is_row = block < row_blocks
    block = tl.where(is_row, block, block - row_blocks)
    own_count, other_count = tl.where(is_row, row_count, col_count), tl.where(is_row, col_count, row_count)
    own_length, other_length = tl.where(is_row, seqlen_q, seqlen_k), tl.where(is_row, seqlen_k, seqlen_q)
    width = tl.where(is_row, row_width, col_width)
    lists = row_tiles
    if not is_row:
        lists = col_tiles
    records = tl.where(is_row, row_records, col_records)
    lists += matrix.to(tl.int64) * records * width
    own = block * OWN + tl.arange(0, OWN)
    if T.source == "ranges":
        b, h = (matrix // heads).to(tl.int64), (matrix % heads).to(tl.int64)
        q_offset = b * q_ranges_b
        k_offset = q_tiles + b * k_ranges_b + h * k_ranges_h
        own_source = source + 2 * tl.where(is_row, q_offset, k_offset)
        other_source = source + 2 * tl.where(is_row, k_offset, q_offset)
    elif T.source == "hulls":
        own_source = source + matrix.to(tl.int64) * col_count * _HULL
        other_source = own_source
    else:
        own_source = source + matrix.to(tl.int64) * row_count * col_count
        other_source = own_source
    sides = Sides(
        own_source, other_source, own_count, other_count, own_length, other_length, is_row, seqlen_q, seqlen_k, col_count,
        band_lo, band_hi,
    )  # fmt: skip

    # Tiles of the other side that the band lets this block see: keys i + lo .. i + hi, queries j - hi .. j - lo.
    first, last = block * OWN * _TILE, tl.minimum((block + 1) * OWN * _TILE, own_length) - 1
    start = tl.maximum(tl.where(is_row, first + band_lo, first - band_hi), 0) // _TILE
    end = tl.maximum(tl.where(is_row, last + band_hi, last - band_lo) + 1, 0)
    end = tl.minimum(tl.cdiv(end, _TILE), other_count)

    partial = tl.zeros([OWN], tl.int32)
    full = tl.zeros([OWN], tl.int32)
    for at in range(start, end, OTHER):
        other = at + tl.arange(0, OTHER)
        kinds = _classes(sides, own, other, T)
        partial += tl.sum((kinds == 1).to(tl.int32), axis=1)
        full += tl.sum((kinds == 2).to(tl.int32), axis=1)

    record = lists + own.to(tl.int64) * width
    mine = own < records
    tl.store(record + 1, partial, mine)
    tl.store(record + 2, full, mine)
    tl.store(record + 3, tl.zeros([OWN], tl.int32), mine)

    next_partial = tl.zeros([OWN], tl.int32)
    next_full = partial
    for at in range(start, end, OTHER):
        other = at + tl.arange(0, OTHER)
        kinds = _classes(sides, own, other, T)
        ones = (kinds == 1).to(tl.int32) + ((kinds == 2).to(tl.int32) << 16)  # both counts in one scan
        before = tl.cumsum(ones, axis=1) - ones
        slot = tl.where(kinds == 1, next_partial[:, None] + (before & 0xFFFF), next_full[:, None] + (before >> 16))
        others = tl.broadcast_to(other[None, :], [OWN, OTHER])
        tl.store(record[:, None] + _HEADER + slot, others, kinds != 0)
        total = tl.sum(ones, axis=1)
        next_partial += total & 0xFFFF
        next_full += total >> 16

    if T.ranked:  # counting the work of the whole side again is faster than waiting for a launch that knows it
        every, other = tl.arange(0, T.ranked), tl.arange(0, T.ranked)
        work = tl.sum((_classes(sides, every, other, T) != 0).to(tl.int32), axis=1)
        place = work_before(partial + full, own, work, every, records)
        tl.store(lists + place.to(tl.int64) * width, own, mine)
