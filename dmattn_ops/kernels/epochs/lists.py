"""Tile lists of packed keys: which blocks of 128 slots each tile of 128 queries sees, and the other way round.

The slots of an epoch are seen by queries of this epoch alone, so that both lists are short: at most the blocks of one
epoch, or its query tiles. A pair is full where each of the 128 slots is visible to each of 128 queries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dmattn_ops.call import HEADER as _HEADER
from dmattn_ops.call import TILE as _TILE

TILE = tl.constexpr(_TILE)
HEADER = tl.constexpr(_HEADER)


@triton.jit
def list_query_tiles(
    slot_starts, slot_ends, hulls, col_tiles, blocks, col_width, BLOCKS: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """Write the lists of the `blocks` blocks of slots of an epoch, and the ranges of query tiles that see them.

    A hull is `[first tile, behind the last, first full tile, behind the last full one]`.
    """
    for at in range(0, blocks, BLOCKS):
        _list_query_tiles(slot_starts, slot_ends, hulls, col_tiles, blocks, col_width, at + tl.arange(0, BLOCKS), TILES)


@triton.jit
def _list_query_tiles(slot_starts, slot_ends, hulls, col_tiles, blocks, col_width, block, TILES: tl.constexpr):
    """Write the lists and hulls of some blocks `[blocks at once]` of an epoch."""
    mine = block < blocks
    slot = block[:, None] * TILE + tl.arange(0, TILE)[None, :]
    start = tl.load(slot_starts + slot, mine[:, None], other=0)
    end = tl.load(slot_ends + slot, mine[:, None], other=0)
    live = start < end
    first = tl.min(tl.where(live, start, 0x7FFFFFFF), axis=1) // TILE
    behind = tl.cdiv(tl.max(tl.where(live, end, 0), axis=1), TILE)
    first = tl.minimum(first, behind)  # both are 0 where no slot is used
    full_first = tl.cdiv(tl.max(tl.where(live, start, 0), axis=1), TILE)
    full_behind = tl.min(tl.where(live, end, 0), axis=1) // TILE  # 0 where a slot is not used
    none_full = full_behind <= full_first
    full_first = tl.where(none_full, behind, full_first)
    full_behind = tl.where(none_full, behind, full_behind)
    hull = hulls + block * 4
    tl.store(hull, first, mine)
    tl.store(hull + 1, behind, mine)
    tl.store(hull + 2, full_first, mine)
    tl.store(hull + 3, full_behind, mine)

    full = full_behind - full_first
    partial = behind - first - full
    record = col_tiles + block.to(tl.int64) * col_width
    tl.store(record + 1, partial, mine)
    tl.store(record + 2, full, mine)
    tl.store(record + 3, (first >= behind).to(tl.int32), mine)  # nobody reads what slots without keys get
    for at in range(0, tl.max(behind - first, axis=0), TILES):
        index = at + tl.arange(0, TILES)[None, :]
        tile = first[:, None] + index
        past = tile >= full_behind[:, None]
        place = tl.where(past, index - full[:, None], partial[:, None] + tile - full_first[:, None])
        place = tl.where(tile < full_first[:, None], index, place)
        tl.store(record[:, None] + HEADER + place, tile, (tile < behind[:, None]) & mine[:, None])


@triton.jit
def _kinds(hulls, tile, block, blocks):
    """Return the kinds of pairs `[tiles, blocks]` of an epoch: 0 empty, 1 partial, 2 full."""
    inside = block < blocks
    hull = hulls + 4 * block
    first, behind = tl.load(hull, inside, other=0), tl.load(hull + 1, inside, other=0)
    full_first, full_behind = tl.load(hull + 2, inside, other=0), tl.load(hull + 3, inside, other=0)
    tile = tile[:, None]
    seen = (first[None, :] <= tile) & (tile < behind[None, :])
    full = (full_first[None, :] <= tile) & (tile < full_behind[None, :])
    return seen.to(tl.int32) + full.to(tl.int32)


@triton.jit
def list_blocks(
    hulls, row_tiles, blocks, e, epoch_tiles, row_count, row_width, OWN: tl.constexpr, OTHER: tl.constexpr
):  # fmt: skip
    """Write the lists of the query tiles of epoch `e`, which has `blocks` blocks of slots, with these hulls."""
    for at in range(0, epoch_tiles, OWN):
        _list_blocks(hulls, row_tiles, blocks, e, at + tl.arange(0, OWN), epoch_tiles, row_count, row_width, OWN, OTHER)


@triton.jit
def _list_blocks(
    hulls, row_tiles, blocks, e, own, epoch_tiles, row_count, row_width, OWN: tl.constexpr, OTHER: tl.constexpr
):  # fmt: skip
    """Write the lists of the `own` query tiles of an epoch."""
    tile = e * epoch_tiles + own
    mine = (own < epoch_tiles) & (tile < row_count)
    record = row_tiles + tile.to(tl.int64) * row_width
    partial = tl.zeros([OWN], tl.int32)
    full = tl.zeros([OWN], tl.int32)
    for at in range(0, blocks, OTHER):
        kinds = _kinds(hulls, tile, at + tl.arange(0, OTHER), blocks)
        partial += tl.sum((kinds == 1).to(tl.int32), axis=1)
        full += tl.sum((kinds == 2).to(tl.int32), axis=1)
    tl.store(record + 1, partial, mine)
    tl.store(record + 2, full, mine)
    tl.store(record + 3, tl.zeros([OWN], tl.int32), mine)
    next_partial = tl.zeros([OWN], tl.int32)
    next_full = partial
    for at in range(0, blocks, OTHER):
        block = at + tl.arange(0, OTHER)
        kinds = _kinds(hulls, tile, block, blocks)
        ones = (kinds == 1).to(tl.int32) + ((kinds == 2).to(tl.int32) << 16)  # both counts in one scan
        before = tl.cumsum(ones, axis=1) - ones
        place = tl.where(kinds == 1, next_partial[:, None] + (before & 0xFFFF), next_full[:, None] + (before >> 16))
        named = tl.broadcast_to((e * blocks + block)[None, :], [OWN, OTHER])
        tl.store(record[:, None] + HEADER + place, named, (kinds != 0) & mine[:, None])
        total = tl.sum(ones, axis=1)
        next_partial += total & 0xFFFF
        next_full += total >> 16
