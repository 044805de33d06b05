"""Device code that reads a dense mask once, packs its bits in both orientations, and classifies its tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dmattn_ops.call import TILE

_TILE = tl.constexpr(TILE)


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


class Columns(NamedTuple):
    """Two neighbouring columns of tiles of one matrix of the mask: what a program reads of it, and where it writes."""

    mask: Any  # byte 0 of the matrix
    skew: Any  # of that byte, from a multiple of 4 bytes
    q_segments: Any  # of query 0
    k_segments: Any  # of key 0
    classes: Any
    row_bits: Any
    matrix: Any  # its number
    number: Any  # of the two columns
    seqlen_q: Any
    seqlen_k: Any
    band_lo: Any
    band_hi: Any
    row_count: Any  # tiles of queries
    col_count: Any  # and of keys
    stride_q: Any
    extent: Any  # bytes from byte 0 of the matrix to the end of the mask


@triton.jit
def _pack_row_of_tiles(
    columns, row, ALIGNED: tl.constexpr, HAS_Q_SEGMENTS: tl.constexpr, HAS_K_SEGMENTS: tl.constexpr
):  # fmt: skip
    """Pack the two tiles in row `row` of tiles: classes and row bits. Return their columns' bits and whether one is partial.

    Rows are split [16, 8]: Triton spreads the first of these dimensions over threads and keeps the second in each
    thread, which loads 16 bytes of the eight rows that make a byte of a column's bits.
    """
    seqlen_q, seqlen_k, stride_q = columns.seqlen_q, columns.seqlen_k, columns.stride_q
    band_lo, band_hi = columns.band_lo, columns.band_hi
    row_count, col_count = columns.row_count, columns.col_count
    first_i, first_j = row * _TILE, columns.number * 2 * _TILE
    nearest = first_j - (tl.minimum(first_i + _TILE, seqlen_q) - 1)
    farthest = tl.minimum(first_j + 2 * _TILE, seqlen_k) - 1 - first_i
    kinds = tl.zeros([2], tl.int32)
    eight_rows = tl.zeros([16, 64], tl.uint32)
    partial = 0
    if (row < row_count) & (farthest >= band_lo) & (nearest <= band_hi):
        in_tile = 8 * tl.arange(0, 16)[:, None, None] + tl.arange(0, 8)[None, :, None]
        rows_left, columns_left = seqlen_q - first_i, seqlen_k - first_j
        ahead = first_i.to(tl.int64) * stride_q + first_j
        tile = columns.mask + ahead
        if ALIGNED:
            four = _load_aligned(tile, stride_q, in_tile, rows_left, columns_left)
        else:
            past_word = (columns.skew + ahead) & 3
            four = _load_unaligned(
                tile - past_word, past_word, stride_q, in_tile, rows_left, columns_left, columns.extent - ahead
            )
        flags = (((four & 0x7F7F7F7F) + 0x7F7F7F7F) | four) & 0x80808080  # bit 7 of each byte that is not zero
        if HAS_K_SEGMENTS:
            flags &= _equal_segments(
                columns.q_segments + first_i,
                columns.k_segments,
                in_tile,
                first_j,
                rows_left,
                columns_left,
                HAS_Q_SEGMENTS,
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
            first_row = (columns.matrix.to(tl.int64) * row_count + row) * _TILE
            _store_row_bits(columns.row_bits, words, first_row, columns.number, col_count)
    col = 2 * columns.number + tl.arange(0, 2)
    place = columns.classes + (columns.matrix.to(tl.int64) * row_count + row) * col_count + col
    tl.store(place, kinds.to(tl.int8), (row < row_count) & (col < col_count))
    return eight_rows, partial


@triton.jit(do_not_specialize=["skew", "seqlen_q", "band_lo", "band_hi", "heads", "row_count", "col_count", "extent"])
def pack_tiles(
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
    skewed, row = skew + offset, 2 * block_row
    columns = Columns(
        mask + offset, skewed, queries, keys, classes, row_bits, matrix, block_col,
        seqlen_q, seqlen_k, band_lo, band_hi, row_count, col_count, stride_q, extent - offset,
    )  # fmt: skip
    upper, upper_partial = _pack_row_of_tiles(columns, row, ALIGNED, HAS_Q_SEGMENTS, HAS_K_SEGMENTS)
    lower, lower_partial = _pack_row_of_tiles(columns, row + 1, ALIGNED, HAS_Q_SEGMENTS, HAS_K_SEGMENTS)
    if upper_partial + lower_partial > 0:
        first_col = matrix.to(tl.int64) * col_count * _TILE + block_col * 2 * _TILE
        cols_left = (col_count - 2 * block_col) * _TILE
        _store_col_bits(col_bits, upper, lower, first_col, block_row, row_count, cols_left)
