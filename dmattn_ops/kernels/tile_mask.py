"""Masks on CUDA: read a dense mask once, and write the lists and bits of its tiles (layout: DESIGN.md).

`pack_mask` launches two kernels: one packs bits and classifies tiles (a program for every four tiles), one writes the lists
from the classes. Above 128 tiles a side a third kernel sorts the lists by their length. `list_tiles` first computes the
range of the segment ids in each tile, and the same kernel writes the lists from the ranges. Outputs are contiguous.

A program packs 2 x 2 tiles, so that it writes whole sectors of 32 bytes in both orientations. A program for one tile would
write half sectors; it took 1.6 times as long for random masks. H200, triton 3.6, 2026-11-20, bytes of the mask over the
time of all launches in a CUDA graph, bool [2, 8, 8192, 8192]: random 3.31 TB/s, 128-blocks 4.26 (a copy reads and writes 4.22).
In the functions below, `own` are the tiles of the side whose lists are written, `other` those of the other side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmattn_ops.kernels.launching.launch import computed, launch, workspace
from dmattn_ops.problem import HEADER, TILE

_TILE = tl.constexpr(TILE)
_HEADER = tl.constexpr(HEADER)
HULL = 6  # words of the hull of a tile of keys (`interval_lists.py`)
_HULL = tl.constexpr(HULL)
_BYTES = (torch.bool, torch.uint8, torch.int8)
_LONGEST_ROW = 1 << 26  # bytes from row to row with which the words of a tile have 32-bit offsets
_LISTS = 16  # lists that one program writes
_RANKED_TILES = 128  # up to this many tiles a side, the program that writes the lists also sorts them by length
RANKED_AT_ONCE = 64  # records that a program ranks
_RANGE_TILES = 8  # tiles of segments in a program of `_segment_ranges`


@triton.jit
def _load_aligned(tile, stride_q, row, rows_left, columns_left):
    """Load bytes [16, 8, 64 words] of rows that begin and end at multiples of 16 bytes, so that every word is loaded whole."""
    word = tl.arange(0, 64)[None, None, :]
    inside = (row < rows_left) & (word < columns_left // 4)
    words = tile.to(tl.pointer_type(tl.uint32), bitcast=True) + row * (stride_q // 4) + word
    return tl.load(words, inside, other=0)  # without "evict_first": 8% less time on 1 GiB, H200


@triton.jit
def _load_unaligned(start, past_word, stride_q, row, rows_left, columns_left, bytes_left):
    """Load bytes [16, 8, 64 words] of rows that begin anywhere, each from two words; the first is at `start`.

    The mask's memory ends `bytes_left` after the tile's first byte, `start + past_word`: nothing behind it is read.
    """
    column = 4 * tl.arange(0, 64)[None, None, :]
    offset = row.to(tl.int64) * stride_q + past_word
    late = (offset & 3).to(tl.int32)
    word = (offset >> 2) + tl.arange(0, 64)[None, None, :]
    words_left = (bytes_left + past_word) >> 2  # whole ones
    words = start.to(tl.pointer_type(tl.uint32), bitcast=True) + word
    first_inside = (row < rows_left) & (column < columns_left)
    second_inside = first_inside & (late > 0) & (column + 4 - late < columns_left)
    first = tl.load(words, first_inside & (word < words_left), other=0)
    second = tl.load(words + 1, second_inside & (word + 1 < words_left), other=0)
    last = _load_tail(start + 4 * words_left, (bytes_left + past_word) & 3)
    first = tl.where(first_inside & (word == words_left), last, first)
    second = tl.where(second_inside & (word + 1 == words_left), last, second)
    return (first >> (8 * late).to(tl.uint32)) | _from_byte(second, 4 - late)


@triton.jit
def _load_tail(last, tail):
    """Load the mask's last word, of which `tail` bytes belong to it; the others are 0."""
    word = tl.full((), 0, tl.uint32)
    for byte in tl.static_range(3):
        word |= tl.load(last + byte, byte < tail, other=0).to(tl.uint32) << (8 * byte)
    return word


@triton.jit
def _from_byte(word, n):
    """Shift a word up by `n` bytes, 0 to 4. Two shifts are needed, because a shift by 32 bits is not defined."""
    half = (4 * n).to(tl.uint32)
    return (word << half) << half


@triton.jit
def _between_bytes(low, high):
    """Return words whose bytes `low` to `high - 1` are all ones; both may lie outside of 0 to 4."""
    ones = tl.full([16, 8, 64], 0xFFFFFFFF, tl.uint32)
    beyond = _from_byte(ones, tl.minimum(tl.maximum(high, 0), 4))
    return _from_byte(ones, tl.minimum(tl.maximum(low, 0), 4)) & (ones ^ beyond)


@triton.jit
def _equal_segments(
    q_segments, k_segments, row, first_j, rows_left, columns_left, HAS_Q_SEGMENTS: tl.constexpr
):  # fmt: skip
    """Return words whose bytes are all ones where query and key have the same segment."""
    queries = tl.zeros([16, 8, 1], tl.int32)
    if HAS_Q_SEGMENTS:
        queries = tl.load(q_segments + row, row < rows_left, other=0)
    equal = tl.zeros([16, 8, 64], tl.uint32)
    for byte in tl.static_range(4):
        column = 4 * tl.arange(0, 64)[None, None, :] + byte
        keys = tl.load(k_segments + first_j + column, column < columns_left, other=0)
        equal |= (queries == keys).to(tl.uint32) * (0xFF << (8 * byte))
    return equal


@triton.jit
def _store_row_bits(row_bits, words, first_row, block_col, col_count):
    """Store the words [16, 8, 8] of a row of two tiles: 32 bytes of each row, a whole sector of memory."""
    row = first_row + 8 * tl.arange(0, 16)[:, None, None] + tl.arange(0, 8)[None, :, None]
    word = 8 * block_col + tl.arange(0, 8)[None, None, :]
    tl.store(row_bits + row * (4 * col_count) + word, words, word < 4 * col_count)


@triton.jit
def _store_col_bits(col_bits, upper, lower, first_col, block_row, row_count, cols_left):
    """Store the transpose: byte `g` of a column holds its rows 8 g to 8 g + 7; a tile of rows is [16, 64 words]."""
    both = tl.reshape(tl.permute(tl.join(upper, lower), 2, 0, 1), [32, 64])
    places = (8 * tl.arange(0, 4)[None, None, :]).to(tl.uint32)
    groups = tl.trans(tl.reshape((both[:, :, None] >> places).to(tl.uint8), [32, 256]))
    column, group = tl.arange(0, 256)[:, None], tl.arange(0, 32)[None, :]
    start = col_bits.to(tl.pointer_type(tl.uint8), bitcast=True) + (first_col + column) * (16 * row_count)
    inside = (column < cols_left) & (2 * block_row + group // 16 < row_count)
    tl.store(start + 32 * block_row + group, groups, inside)


@triton.jit
def _pack_row_of_tiles(
    tile, skew, q_segments, k_segments, classes, row_bits, matrix, row, block_col,
    seqlen_q, seqlen_k, band_lo, band_hi, row_count, col_count, stride_q, bytes_left,
    ALIGNED: tl.constexpr, HAS_Q_SEGMENTS: tl.constexpr, HAS_K_SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Pack two neighbouring tiles: their classes and row bits. Return their columns' bits and whether one is partial.

    Rows are split [16, 8]: Triton spreads the first of these dimensions over threads and keeps the second in each
    thread, which loads 16 bytes of the eight rows that make a byte of a column's bits.
    """
    first_i, first_j = row * _TILE, block_col * 2 * _TILE
    nearest = first_j - (tl.minimum(first_i + _TILE, seqlen_q) - 1)
    farthest = tl.minimum(first_j + 2 * _TILE, seqlen_k) - 1 - first_i
    kinds = tl.zeros([2], tl.int32)
    eight_rows = tl.zeros([16, 64], tl.uint32)
    partial = 0
    if (row < row_count) & (farthest >= band_lo) & (nearest <= band_hi):
        in_tile = 8 * tl.arange(0, 16)[:, None, None] + tl.arange(0, 8)[None, :, None]
        rows_left, columns_left = seqlen_q - first_i, seqlen_k - first_j
        ahead = first_i.to(tl.int64) * stride_q + first_j
        tile += ahead
        if ALIGNED:
            four = _load_aligned(tile, stride_q, in_tile, rows_left, columns_left)
        else:
            past_word = (skew + ahead) & 3
            four = _load_unaligned(
                tile - past_word, past_word, stride_q, in_tile, rows_left, columns_left, bytes_left - ahead
            )
        flags = (((four & 0x7F7F7F7F) + 0x7F7F7F7F) | four) & 0x80808080  # bit 7 of each byte that is not zero
        if HAS_K_SEGMENTS:
            flags &= _equal_segments(
                q_segments + first_i, k_segments, in_tile, first_j, rows_left, columns_left, HAS_Q_SEGMENTS
            )
        column = 4 * tl.arange(0, 64)[None, None, :]
        if (nearest < band_lo) | (farthest > band_hi):
            position = first_i + in_tile - first_j - column
            flags &= _between_bytes(position + band_lo, position + band_hi + 1)
        if not ALIGNED:
            if columns_left < 2 * _TILE:
                flags &= _between_bytes(tl.zeros([16, 8, 64], tl.int32), columns_left - column)
        # This product moves bits 7, 15, 23 and 31 to bits 28 to 31. No two partial products overlap, so there is no carry.
        nibbles = (flags * 0x204081) >> 28
        places = (4 * (tl.arange(0, 64) % 8)[None, None, :]).to(tl.uint32)
        words = tl.sum(tl.reshape(nibbles << places, [16, 8, 8, 8]), axis=3)
        shifts = (7 - tl.arange(0, 8)[None, :, None]).to(tl.uint32)
        eight_rows = tl.sum(flags >> shifts, axis=1)  # a byte for each of four columns
        counts = (words != 0).to(tl.int32) + ((words == 0xFFFFFFFF).to(tl.int32) << 16)
        counts = tl.sum(tl.reshape(tl.sum(counts, axis=1), [16, 2, 4]), axis=2)
        counts = tl.sum(counts, axis=0)
        kinds = tl.where(counts == 0, 0, tl.where(counts >> 16 == _TILE * 4, 2, 1))
        partial = tl.max((kinds == 1).to(tl.int32), axis=0)
        if partial != 0:
            _store_row_bits(row_bits, words, (matrix.to(tl.int64) * row_count + row) * _TILE, block_col, col_count)
    col = 2 * block_col + tl.arange(0, 2)
    place = classes + (matrix.to(tl.int64) * row_count + row) * col_count + col
    tl.store(place, kinds.to(tl.int8), (row < row_count) & (col < col_count))
    return eight_rows, partial


@triton.jit(do_not_specialize=["skew", "seqlen_q", "band_lo", "band_hi", "heads", "row_count", "col_count", "extent"])
def _pack(
    mask, skew, q_segments, k_segments, classes, row_bits, col_bits,
    seqlen_q, seqlen_k, band_lo, band_hi, heads, row_count, col_count,
    stride_b, stride_h, stride_q, extent, q_segments_b, k_segments_b, k_segments_h,
    ALIGNED: tl.constexpr, HAS_Q_SEGMENTS: tl.constexpr, HAS_K_SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Pack 2 x 2 tiles: each class, and the bits in both orientations where one of the four is partial.

    `extent` is the number of bytes from the first element of the mask to the end of its last.
    """
    block_cols, block_rows = tl.cdiv(col_count, 2), tl.cdiv(row_count, 2)
    block_col = tl.program_id(0) % block_cols
    block_row = tl.program_id(0) // block_cols % block_rows
    matrix = tl.program_id(0) // block_cols // block_rows
    b, h = (matrix // heads).to(tl.int64), (matrix % heads).to(tl.int64)
    offset = b * stride_b + h * stride_h
    queries, keys = q_segments + b * q_segments_b, k_segments + b * k_segments_b + h * k_segments_h
    skewed = skew + offset
    upper, upper_partial = _pack_row_of_tiles(
        mask + offset, skewed, queries, keys, classes, row_bits, matrix, 2 * block_row, block_col,
        seqlen_q, seqlen_k, band_lo, band_hi, row_count, col_count, stride_q, extent - offset,
        ALIGNED, HAS_Q_SEGMENTS, HAS_K_SEGMENTS,
    )  # fmt: skip
    lower, lower_partial = _pack_row_of_tiles(
        mask + offset, skewed, queries, keys, classes, row_bits, matrix, 2 * block_row + 1, block_col,
        seqlen_q, seqlen_k, band_lo, band_hi, row_count, col_count, stride_q, extent - offset,
        ALIGNED, HAS_Q_SEGMENTS, HAS_K_SEGMENTS,
    )  # fmt: skip
    if upper_partial + lower_partial > 0:
        first_col = matrix.to(tl.int64) * col_count * _TILE + block_col * 2 * _TILE
        cols_left = (col_count - 2 * block_col) * _TILE
        _store_col_bits(col_bits, upper, lower, first_col, block_row, row_count, cols_left)


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "q_tiles", "k_tiles", "row_count", "col_count"])
def _segment_ranges(
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
    hidden = q_last >= _hull_word(hulls, 4, own, other, own_count, other_count, is_row)
    hidden = hidden & (q_first < _hull_word(hulls, 5, own, other, own_count, other_count, is_row))
    return listed.to(tl.int32) + (full & (hidden == 0)).to(tl.int32)


@triton.jit(
    do_not_specialize=["seqlen_q", "seqlen_k", "band_lo", "band_hi", "heads", "row_records", "col_records",
                       "row_width", "col_width", "q_tiles", "q_ranges_b", "k_ranges_b", "k_ranges_h"]
)  # fmt: skip
def _lists(
    source, row_tiles, col_tiles,
    seqlen_q, seqlen_k, band_lo, band_hi, heads, row_records, col_records, row_width, col_width,
    q_tiles, q_ranges_b, k_ranges_b, k_ranges_h,
    SOURCE: tl.constexpr, HAS_Q_SEGMENTS: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """Write the lists of `OWN` tiles of a side, and their places in the order by work where `RANKED` records are all.

    A side has a record for each of its tiles, and at least two: the records of no tile are empty.
    """
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
        kinds = _classes_by_map(own_source, every, other, own_count, other_count, is_row, col_count)
        work = tl.sum((kinds != 0).to(tl.int32), axis=1)
        place = _work_before(partial + full, own, work, every, records)
        tl.store(lists + place.to(tl.int64) * width, own, mine)


@triton.jit
def _work_before(work, tile, other_work, other, count):
    """Count the `other` tiles that come before each `tile`: those with more work, or as much and a lower index."""
    more = other_work[None, :] > work[:, None]
    tie = (other_work[None, :] == work[:, None]) & (other[None, :] < tile[:, None])
    return tl.sum(((more | tie) & (other < count)[None, :]).to(tl.int32), axis=1)


@triton.jit(do_not_specialize=["row_records", "col_records", "row_width", "col_width"])
def _ranks(
    row_tiles, col_tiles, row_records, col_records, row_width, col_width, OWN: tl.constexpr, OTHER: tl.constexpr
):
    """Write word 0 of the records: the tiles of a side, those with the most work first."""
    rank_block(tl.program_id(0), row_tiles, col_tiles, row_records, col_records, row_width, col_width, OWN, OTHER)


@triton.jit
def rank_block(
    index, row_tiles, col_tiles, row_records, col_records, row_width, col_width, OWN: tl.constexpr, OTHER: tl.constexpr
):
    """Write word 0 of the records of the `index`-th block of `OWN` tiles: first those of rows, then of columns."""
    row_blocks = tl.cdiv(row_records, OWN)
    blocks = row_blocks + tl.cdiv(col_records, OWN)
    matrix = index // blocks
    block = index % blocks
    is_row = block < row_blocks
    block = tl.where(is_row, block, block - row_blocks)
    records = tl.where(is_row, row_records, col_records)
    width = tl.where(is_row, row_width, col_width)
    lists = row_tiles
    if not is_row:
        lists = col_tiles
    lists += matrix.to(tl.int64) * records * width
    own = block * OWN + tl.arange(0, OWN)
    record = lists + own.to(tl.int64) * width
    work = tl.load(record + 1, own < records, other=0) + tl.load(record + 2, own < records, other=0)
    place = tl.zeros([OWN], tl.int32)
    for at in range(0, records, OTHER):
        other = at + tl.arange(0, OTHER)
        others = lists + other.to(tl.int64) * width
        other_work = tl.load(others + 1, other < records, other=0) + tl.load(others + 2, other < records, other=0)
        place += _work_before(work, own, other_work, other, records)
    tl.store(lists + place.to(tl.int64) * width, own, own < records)


def pack_mask(
    mask: Tensor,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    seqlen_q: int,
    band_lo: int,
    band_hi: int,
    row_tiles: Tensor,
    col_tiles: Tensor,
    row_bits: Tensor,
    col_bits: Tensor,
) -> None:
    """Write the lists and bits of a dense mask `[Bm, Hm, Sq or 1, Sk]` where segments and band hold too."""
    batch, heads = row_tiles.shape[:2]
    seqlen_k = mask.shape[3]
    row_count, col_count = triton.cdiv(seqlen_q, TILE), triton.cdiv(seqlen_k, TILE)
    mask = _as_bytes(mask)
    strides = [0 if size == 1 else stride for size, stride in zip(mask.shape[:3], mask.stride(), strict=False)]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
    skew = mask.data_ptr() % 16
    aligned = not any(number % 16 for number in (skew, seqlen_k, *strides)) and strides[2] < _LONGEST_ROW
    q_segments = None if q_segments is None else _contiguous(q_segments)
    k_segments = None if k_segments is None else _contiguous(k_segments)
    classes = workspace(mask, batch * heads, row_count, col_count, dtype=torch.int8)
    programs = batch * heads * triton.cdiv(row_count, 2) * triton.cdiv(col_count, 2)
    if programs:
        launch(
            _pack, (programs,),
            mask, skew % 4, mask if q_segments is None else q_segments, mask if k_segments is None else k_segments,
            classes, row_bits, col_bits, seqlen_q, seqlen_k, band_lo, band_hi, heads, row_count, col_count,
            *strides, extent, _stride(q_segments, 0), _stride(k_segments, 0), _stride(k_segments, 1),
            ALIGNED=aligned, HAS_Q_SEGMENTS=q_segments is not None, HAS_K_SEGMENTS=k_segments is not None, num_warps=8,
        )  # fmt: skip
    write_lists(classes, seqlen_q, seqlen_k, band_lo, band_hi, row_tiles, col_tiles, "classes")


def list_tiles(
    q_segments: Tensor | None,
    k_segments: Tensor,
    seqlen_q: int,
    band_lo: int,
    band_hi: int,
    row_tiles: Tensor,
    col_tiles: Tensor,
) -> None:
    """Write the lists of `[B|1, Sq]` and `[B|1, Hm, Sk]` segments inside the band."""
    seqlen_k = k_segments.shape[2]
    row_count, col_count = triton.cdiv(seqlen_q, TILE), triton.cdiv(seqlen_k, TILE)
    q_tiles = 0 if q_segments is None else q_segments.shape[0] * row_count
    k_tiles = k_segments.shape[0] * k_segments.shape[1] * col_count
    ranges = workspace(k_segments, q_tiles + k_tiles, 2, dtype=torch.int32)
    programs = triton.cdiv(q_tiles, _RANGE_TILES) + triton.cdiv(k_tiles, _RANGE_TILES)
    if programs:
        k_segments = _contiguous(k_segments)
        launch(
            _segment_ranges, (programs,),
            k_segments if q_segments is None else _contiguous(q_segments), k_segments, ranges,
            seqlen_q, seqlen_k, q_tiles, k_tiles, row_count, col_count, TILES=_RANGE_TILES, num_warps=4,
        )  # fmt: skip
    strides = (
        q_tiles,
        0 if q_segments is None or q_segments.shape[0] == 1 else row_count,
        0 if k_segments.shape[0] == 1 else k_segments.shape[1] * col_count,
        0 if k_segments.shape[1] == 1 else col_count,
    )
    write_lists(ranges, seqlen_q, seqlen_k, band_lo, band_hi, row_tiles, col_tiles, "ranges", strides)


def write_lists(
    source: Tensor,
    seqlen_q: int,
    seqlen_k: int,
    band_lo: int,
    band_hi: int,
    row_tiles: Tensor,
    col_tiles: Tensor,
    made_from: str,
    range_strides: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> None:
    """Write the lists from "classes" `[Bm * Hm, nQ, nK]`, "hulls" `[Bm * Hm, nK, 6]`, or "ranges" of segments."""
    batch, heads, row_records, row_width = row_tiles.shape
    col_records, col_width = col_tiles.shape[2:]
    longest = max(row_records, col_records)
    ranked = 0 if made_from != "classes" or longest > _RANKED_TILES else 64 if longest <= 64 else _RANKED_TILES
    blocks = triton.cdiv(row_records, _LISTS) + triton.cdiv(col_records, _LISTS)
    if not batch * heads * blocks:
        return
    q_tiles, *strides = range_strides
    launch(
        _lists, (batch * heads * blocks,), source, row_tiles, col_tiles,
        seqlen_q, seqlen_k, band_lo, band_hi, heads, row_records, col_records, row_width, col_width, q_tiles, *strides,
        SOURCE=made_from, HAS_Q_SEGMENTS=q_tiles > 0,
        OWN=_LISTS, OTHER=64 if ranked else 128, RANKED=ranked, num_warps=16 if ranked > 64 else 8,
    )  # fmt: skip
    if not ranked:
        rank_tiles(row_tiles, col_tiles)


def rank_tiles(row_tiles: Tensor, col_tiles: Tensor) -> None:
    """Write word 0 of all records, `[Bm, Hm, tiles, width]`, whose lists are written: longest lists first."""
    batch, heads, row_records, row_width = row_tiles.shape
    col_records, col_width = col_tiles.shape[2:]
    launch(
        _ranks, (batch * heads * rank_blocks(row_records, col_records),),
        row_tiles, col_tiles, row_records, col_records, row_width, col_width, OWN=RANKED_AT_ONCE, OTHER=128, num_warps=4,
    )  # fmt: skip


def rank_blocks(row_records: int, col_records: int) -> int:
    """Return how many blocks `rank_block` has to rank of one matrix."""
    return triton.cdiv(row_records, RANKED_AT_ONCE) + triton.cdiv(col_records, RANKED_AT_ONCE)


def _as_bytes(mask: Tensor) -> Tensor:
    """Return a mask of one-byte elements with a contiguous last dimension: itself, or a copy."""
    if mask.dtype not in _BYTES:
        mask = computed(
            torch.ne, mask, 0
        )  # 1.13 times the time of reading float32 directly, H200; one path instead of two
    if mask.stride(3) != 1 and mask.shape[3] != 1:
        mask = computed(Tensor.contiguous, mask)
    return mask.view(torch.uint8)


def _stride(segments: Tensor | None, dim: int) -> int:
    """Return the stride of a leading dimension of segments, 0 where it is broadcast."""
    return 0 if segments is None or segments.shape[dim] == 1 else segments.stride(dim)


def _contiguous(segments: Tensor) -> Tensor:
    return segments if segments.is_contiguous() else computed(Tensor.contiguous, segments)
