"""Device code that writes the lists of tiles from their classes, from ranges of segments or from hulls of intervals.

`own` are the tiles of the side whose lists are written, `other` those of the other side.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dmattn_ops.call import HEADER, TILE
from dmattn_ops.kernels.masks.ranks import work_before
from dmattn_ops.launching.overlap import follow_kernel_before

_TILE = tl.constexpr(TILE)
_HEADER = tl.constexpr(HEADER)
HULL = 8  # words of the hull of a tile of keys (`interval_lists.py`)
_HULL = tl.constexpr(HULL)


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


@triton.jit
def _classes_by_map(classes, own, other, own_count, other_count, is_row, col_count):
    """Load the classes [OWN, OTHER] of one matrix. `is_row`: lists of query tiles are written, otherwise lists of key tiles."""
    row = tl.where(is_row, own[:, None], other[None, :])
    col = tl.where(is_row, other[None, :], own[:, None])
    inside = (own < own_count)[:, None] & (other < other_count)[None, :]
    return tl.load(classes + row.to(tl.int64) * col_count + col, inside, other=0).to(tl.int32)


@triton.jit
def _classes_by_range(
    own_ranges, other_ranges, own, other, own_count, other_count, own_length, other_length, is_row,
    band_lo, band_hi, HAS_Q_SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Classify tiles [OWN, OTHER] by the ranges of their segment ids and the band. Queries without segments have id 0."""
    own_read = (own < own_count) & (HAS_Q_SEGMENTS | (is_row == 0))
    other_read = (other < other_count) & (HAS_Q_SEGMENTS | (is_row != 0))
    own_low = tl.load(own_ranges + 2 * own, own_read, other=0)[:, None]
    own_high = tl.load(own_ranges + 2 * own + 1, own_read, other=0)[:, None]
    other_low = tl.load(other_ranges + 2 * other, other_read, other=0)[None, :]
    other_high = tl.load(other_ranges + 2 * other + 1, other_read, other=0)[None, :]
    own_first, other_first = (own * _TILE)[:, None], (other * _TILE)[None, :]
    own_last = tl.minimum(own_first + _TILE, own_length) - 1
    other_last = tl.minimum(other_first + _TILE, other_length) - 1
    nearest = tl.where(is_row, other_first - own_last, own_first - other_last)  # the least key minus query
    farthest = tl.where(is_row, other_last - own_first, own_last - other_first)
    inside = (own < own_count)[:, None] & (other < other_count)[None, :]
    listed = inside & (band_lo <= band_hi) & (farthest >= band_lo) & (nearest <= band_hi)
    listed = listed & (tl.maximum(own_low, other_low) <= tl.minimum(own_high, other_high))
    full = listed & (nearest >= band_lo) & (farthest <= band_hi)
    full = full & (own_last - own_first == _TILE - 1) & (other_last - other_first == _TILE - 1)
    full = full & (own_low == own_high) & (other_low == other_high) & (own_low == other_low)
    return listed.to(tl.int32) + full.to(tl.int32)


@triton.jit
def _hull_word(hulls, word, own, other, own_count, other_count, is_row):
    """Load a word of the hulls of the keys' tiles, which are the `other` ones where rows are wanted: [OWN, OTHER]."""
    of_own = tl.load(hulls + _HULL * own + word, (own < own_count) & (is_row == 0), other=0)
    of_other = tl.load(hulls + _HULL * other + word, (other < other_count) & (is_row != 0), other=0)
    return tl.where(is_row, of_other[None, :], of_own[:, None])


@triton.jit
def _classes_by_hull(
    hulls, own, other, own_count, other_count, is_row, seqlen_q, seqlen_k, band_lo, band_hi
):  # fmt: skip
    """Classify tiles [OWN, OTHER] by the hulls of the keys' intervals (`interval_lists.py`) and the band."""
    q_first = tl.where(is_row, own[:, None], other[None, :]) * _TILE
    k_first = tl.where(is_row, other[None, :], own[:, None]) * _TILE
    q_last, k_last = tl.minimum(q_first + _TILE, seqlen_q) - 1, tl.minimum(k_first + _TILE, seqlen_k) - 1
    nearest, farthest = k_first - q_last, k_last - q_first
    listed = (own < own_count)[:, None] & (other < other_count)[None, :]
    listed = listed & (band_lo <= band_hi) & (farthest >= band_lo) & (nearest <= band_hi)
    listed = listed & (q_last >= _hull_word(hulls, 0, own, other, own_count, other_count, is_row))
    listed = listed & (q_first < _hull_word(hulls, 1, own, other, own_count, other_count, is_row))
    full = listed & (nearest >= band_lo) & (farthest <= band_hi)
    full = full & (q_last - q_first == _TILE - 1) & (k_last - k_first == _TILE - 1)
    full = full & (q_first >= _hull_word(hulls, 2, own, other, own_count, other_count, is_row))
    full = full & (q_last < _hull_word(hulls, 3, own, other, own_count, other_count, is_row))
    some = q_last >= _hull_word(hulls, 4, own, other, own_count, other_count, is_row)
    some = some & (q_first < _hull_word(hulls, 5, own, other, own_count, other_count, is_row))
    none = q_first >= _hull_word(hulls, 6, own, other, own_count, other_count, is_row)
    none = none & (q_last < _hull_word(hulls, 7, own, other, own_count, other_count, is_row))
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
    SOURCE: tl.constexpr, HAS_Q_SEGMENTS: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """Write the lists of `OWN` tiles of a side, and their places in the order by work where `RANKED` records are all.

    A side has a record for each of its tiles, and at least two: the records of no tile are empty.
    """
    follow_kernel_before()
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
    if SOURCE == "ranges":
        b, h = (matrix // heads).to(tl.int64), (matrix % heads).to(tl.int64)
        q_offset = b * q_ranges_b
        k_offset = q_tiles + b * k_ranges_b + h * k_ranges_h
        own_source = source + 2 * tl.where(is_row, q_offset, k_offset)
        other_source = source + 2 * tl.where(is_row, k_offset, q_offset)
    elif SOURCE == "hulls":
        own_source = source + matrix.to(tl.int64) * col_count * _HULL
        other_source = own_source
    else:
        own_source = source + matrix.to(tl.int64) * row_count * col_count
        other_source = own_source

    # Tiles of the other side that the band lets this block see: keys i + lo .. i + hi, queries j - hi .. j - lo.
    first, last = block * OWN * _TILE, tl.minimum((block + 1) * OWN * _TILE, own_length) - 1
    start = tl.maximum(tl.where(is_row, first + band_lo, first - band_hi), 0) // _TILE
    end = tl.maximum(tl.where(is_row, last + band_hi, last - band_lo) + 1, 0)
    end = tl.minimum(tl.cdiv(end, _TILE), other_count)

    partial = tl.zeros([OWN], tl.int32)
    full = tl.zeros([OWN], tl.int32)
    for at in range(start, end, OTHER):
        other = at + tl.arange(0, OTHER)
        if SOURCE == "ranges":
            kinds = _classes_by_range(
                own_source, other_source, own, other, own_count, other_count, own_length, other_length, is_row,
                band_lo, band_hi, HAS_Q_SEGMENTS,
            )  # fmt: skip
        elif SOURCE == "hulls":
            kinds = _classes_by_hull(
                own_source, own, other, own_count, other_count, is_row, seqlen_q, seqlen_k, band_lo, band_hi
            )
        else:
            kinds = _classes_by_map(own_source, own, other, own_count, other_count, is_row, col_count)
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
        if SOURCE == "ranges":
            kinds = _classes_by_range(
                own_source, other_source, own, other, own_count, other_count, own_length, other_length, is_row,
                band_lo, band_hi, HAS_Q_SEGMENTS,
            )  # fmt: skip
        elif SOURCE == "hulls":
            kinds = _classes_by_hull(
                own_source, own, other, own_count, other_count, is_row, seqlen_q, seqlen_k, band_lo, band_hi
            )
        else:
            kinds = _classes_by_map(own_source, own, other, own_count, other_count, is_row, col_count)
        ones = (kinds == 1).to(tl.int32) + ((kinds == 2).to(tl.int32) << 16)  # both counts in one scan
        before = tl.cumsum(ones, axis=1) - ones
        slot = tl.where(kinds == 1, next_partial[:, None] + (before & 0xFFFF), next_full[:, None] + (before >> 16))
        others = tl.broadcast_to(other[None, :], [OWN, OTHER])
        tl.store(record[:, None] + _HEADER + slot, others, kinds != 0)
        total = tl.sum(ones, axis=1)
        next_partial += total & 0xFFFF
        next_full += total >> 16

    if RANKED:  # counting the work of the whole side again is faster than waiting for a launch that knows it
        every, other = tl.arange(0, RANKED), tl.arange(0, RANKED)
        if SOURCE == "hulls":
            kinds = _classes_by_hull(
                own_source, every, other, own_count, other_count, is_row, seqlen_q, seqlen_k, band_lo, band_hi
            )
        else:
            kinds = _classes_by_map(own_source, every, other, own_count, other_count, is_row, col_count)
        work = tl.sum((kinds != 0).to(tl.int32), axis=1)
        place = work_before(partial + full, own, work, every, records)
        tl.store(lists + place.to(tl.int64) * width, own, mine)
