"""Bits of the blocks of keys that each query chose, on CUDA: one launch for bits and classes of tiles, then their lists.

A program has a tile of 128 queries and some tiles of keys. It clears its part of `row_bits`, sets a bit for each key of each
block that is named (repeats set it again), reads its words back a tile at a time, and writes what band and segments leave.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmattn_ops.call import TILE, WORD_BITS
from dmattn_ops.kernels.masks.launch import write_lists
from dmattn_ops.kernels.portable.arguments import broadcast_stride
from dmattn_ops.launching.launch import launch, workspace

_TILE = tl.constexpr(TILE)
_WORDS = tl.constexpr(TILE // WORD_BITS)  # of a tile's row
_TILES = 16  # of keys in a program
_ENTRIES = 32  # of a list that are read at once


def pack_selection(
    indices: Tensor,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    block: int,
    seqlen_k: int,
    band_lo: int,
    band_hi: int,
    row_tiles: Tensor,
    col_tiles: Tensor,
    row_bits: Tensor,
    col_bits: Tensor,
) -> None:
    """Write lists and bits of the blocks that `indices [B|1, Hm, Sq, k]` name, where segments and band hold too."""
    batch, heads = row_tiles.shape[:2]
    seqlen_q, count = indices.shape[2:]
    row_count, col_count = triton.cdiv(seqlen_q, TILE), triton.cdiv(seqlen_k, TILE)
    classes = workspace(indices, batch * heads, row_count, col_count, dtype=torch.int8)
    shares, parts = triton.cdiv(col_count, _TILES), (block + WORD_BITS - 2) // WORD_BITS + 1
    programs = batch * heads * row_count * shares
    if programs:
        launch(
            pack_chosen, (programs,),
            indices, q_segments, k_segments, classes, row_bits, col_bits,
            count, block, triton.cdiv(seqlen_k, block), seqlen_q, seqlen_k, band_lo, band_hi,
            heads, row_count, col_count, shares,
            broadcast_stride(indices, 0), *indices.stride()[1:], broadcast_stride(q_segments, 0), broadcast_stride(k_segments, 0),
            PARTS=parts, TILES=_TILES, ENTRIES=_ENTRIES if parts == 1 else _ENTRIES // 2, num_warps=8,
        )  # fmt: skip
    write_lists(classes, seqlen_q, seqlen_k, band_lo, band_hi, row_tiles, col_tiles, "classes")


@triton.jit(
    do_not_specialize=["count", "block", "blocks", "seqlen_q", "seqlen_k", "band_lo", "band_hi", "heads", "row_count",
                       "col_count", "shares", "indices_b", "indices_h", "q_segments_b", "k_segments_b"]
)  # fmt: skip
def pack_chosen(
    indices, q_segments, k_segments, classes, row_bits, col_bits,
    count, block, blocks, seqlen_q, seqlen_k, band_lo, band_hi, heads, row_count, col_count, shares,
    indices_b, indices_h, indices_q, indices_k, q_segments_b, k_segments_b,
    PARTS: tl.constexpr, TILES: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Write classes and, inside the band, the bits in both orientations, of a row of up to `TILES` tiles.

    The keys of a block lie in up to `PARTS` words.
    """
    share = tl.program_id(0) % shares
    row_tile = tl.program_id(0) // shares % row_count
    matrix = tl.program_id(0) // shares // row_count
    b, h = (matrix // heads).to(tl.int64), (matrix % heads).to(tl.int64)
    first_col, end_col = share * TILES, tl.minimum((share + 1) * TILES, col_count)
    first_i = row_tile * _TILE
    last_i = tl.minimum(first_i + _TILE, seqlen_q) - 1
    row = first_i + tl.arange(0, _TILE)
    is_query = row < seqlen_q
    first_word, end_word = first_col * _WORDS, end_col * _WORDS
    words = row_bits + (matrix.to(tl.int64) * row_count * _TILE + row)[:, None] * (col_count * _WORDS)
    kinds = classes + (matrix.to(tl.int64) * row_count + row_tile) * col_count

    in_band = (
        (band_lo <= band_hi) & (first_col * _TILE - last_i <= band_hi) & (end_col * _TILE - 1 - first_i >= band_lo)
    )
    if in_band:
        for tile in range(first_col, end_col):
            cleared = words + tile * _WORDS + tl.arange(0, _WORDS)[None, :]
            tl.store(cleared, tl.zeros([_TILE, _WORDS], tl.int32))
        tl.debug_barrier()
        lists = indices + b * indices_b + h * indices_h + row.to(tl.int64)[:, None] * indices_q
        for at in range(0, count, ENTRIES):
            entry = at + tl.arange(0, ENTRIES)[None, :]
            number = tl.load(lists + entry * indices_k, is_query[:, None] & (entry < count), other=-1)
            is_block = (number >= 0) & (number < blocks)
            first = tl.where(is_block, number, 0).to(tl.int32) * block
            last = tl.minimum(first + block, seqlen_k) - 1
            for part in tl.static_range(PARTS):
                word = first // 32 + part
                low, high = tl.maximum(first - 32 * word, 0), tl.minimum(last - 32 * word, 31)
                inside = is_block & (low <= high) & (word >= first_word) & (word < end_word)
                ones = tl.full([_TILE, ENTRIES], 0xFFFFFFFF, tl.uint32)
                upper, lower = (31 - high) & 31, low & 31  # of no word, where they would lie outside
                bits = (ones << lower.to(tl.uint32)) & (ones >> upper.to(tl.uint32))
                tl.atomic_or(words + word, bits.to(tl.int32, bitcast=True), mask=inside, sem="relaxed")
        tl.debug_barrier()

    queries = tl.zeros([_TILE], tl.int32)
    if q_segments is not None:
        queries = tl.load(q_segments + b * q_segments_b + row, is_query, other=0)
    places = tl.arange(0, 32)
    own_words = row_bits + (matrix.to(tl.int64) * row_count * _TILE + row) * (col_count * _WORDS)
    for tile in range(first_col, end_col):
        total = tl.full((), 0, tl.int32)
        if in_band:
            for part in tl.static_range(_WORDS):  # a word of each row at a time, which fits into registers
                column = tile * _TILE + 32 * part + places
                # not from L1, which does not see what atomics write
                word = tl.load(own_words + tile * _WORDS + part, cache_modifier=".cg")
                visible = ((word[:, None] >> places[None, :]) & 1) != 0
                distance = column[None, :] - row[:, None]
                visible = visible & (distance >= band_lo) & (distance <= band_hi)
                if k_segments is not None:
                    keys = tl.load(k_segments + b * k_segments_b + column, column < seqlen_k, other=0)
                    visible = visible & (queries[:, None] == keys[None, :])
                seen = visible.to(tl.int32)
                total += tl.sum(tl.sum(seen, axis=1), axis=0)
                tl.store(own_words + tile * _WORDS + part, tl.sum(seen << places[None, :], axis=1))
                by_column = tl.sum(tl.reshape(seen, [_WORDS, 32, 32]) << places[None, :, None], axis=1)
                place = col_bits + (matrix.to(tl.int64) * col_count * _TILE + column)[None, :] * (row_count * _WORDS)
                tl.store(place + row_tile * _WORDS + tl.arange(0, _WORDS)[:, None], by_column)
        kind = tl.where(total == 0, 0, tl.where(total == _TILE * _TILE, 2, 1))
        tl.store(kinds + tile, kind.to(tl.int8))
