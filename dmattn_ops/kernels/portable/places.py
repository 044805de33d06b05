"""The place of a program of the portable kernels: its sequence and head, the rows that it owns, and those that it walks.

A program *owns* the rows of one side and *walks* the other in steps: queries own and keys are walked in the forward and
in dq, keys own and queries are walked in dk/dv. Everything here is written in these two words, so that each kernel uses
the same code; blocks are `[owned, walked]` throughout.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dmattn_ops.call import HEADER as _HEADER
from dmattn_ops.call import TILE as _TILE

TILE = tl.constexpr(_TILE)
HEADER = tl.constexpr(_HEADER)
SEARCHED = tl.constexpr(128)  # offsets of sequences that a step of a search reads at once


class Lengths(NamedTuple):
    """The sizes of a call. Lengths are totals and upper bounds where sequences are packed, else the same twice."""

    heads: Any
    seqlen_q: Any
    seqlen_k: Any
    longest_q: Any
    longest_k: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any


class Band(NamedTuple):
    """The band of a call: query `i` sees key `j` iff `i + lo <= j <= i + hi`, counted from the diagonal of a packed sequence."""

    lo: Any
    hi: Any


class Lists(NamedTuple):
    """The lists of tiles of the owned side with their strides; records follow each other."""

    tiles: Any
    tiles_b: Any
    tiles_h: Any
    tiles_w: Any  # words of a record
    group: Any  # query heads that share a head of the lists


class Place(NamedTuple):
    """The head and the sequence of a program, and where the sequence begins in packed tensors."""

    sequence: Any
    batch: Any  # index of the batch dimension: 0 where sequences are packed
    head: Any
    q_begin: Any
    length_q: Any
    k_begin: Any
    length_k: Any
    shift: Any  # what a packed sequence adds to the limits of the band


class Walk(NamedTuple):
    """The steps of a walk, `STEP` rows each, in two parts.

    ```
    band of a block:   . . [partial: left steps][full: gap steps][partial: the rest] . .
    ```
    `partial_first` and `full_first` count steps too: from row 0 without lists, from a record's first entry with them.
    """

    record: Any  # of the list, where there are lists
    length: Any  # of the walked side
    n_full: Any
    full_first: Any
    n_partial: Any
    partial_first: Any
    left: Any
    gap: Any


class Part(NamedTuple):
    """Steps `begin ... end` of a walk, all of them full, or all to be tested."""

    record: Any
    last: Any  # tile that a list may name
    begin: Any
    end: Any
    first: Any
    left: Any
    gap: Any


@triton.jit
def place_of(
    program, lanes, blocks, heads, lengths, BLOCK: tl.constexpr, features: tl.constexpr, KEYS_OWNED: tl.constexpr
):
    """Return (place of a program, its block, the blocks of its sequence): blocks of a head follow each other, then come heads.

    Then come sequences. Packed ones are part of a head instead, which has `arguments.blocks_and_programs` blocks.
    """
    block = program % blocks
    head = (program // blocks) % heads
    sequence = program // blocks // heads
    zero = tl.cast(0, tl.int32)
    batch = sequence
    q_begin, k_begin, shift = zero, zero, zero
    length_q, length_k = lengths.seqlen_q, lengths.seqlen_k
    if features.varlen:
        batch = zero
        if KEYS_OWNED:
            sequence, block = packed_block(block, lanes, blocks, lengths.cu_seqlens_k, lengths.seqlen_k, BLOCK)
        else:
            sequence, block = packed_block(block, lanes, blocks, lengths.cu_seqlens_q, lengths.seqlen_q, BLOCK)
        q_begin, length_q = packed_sequence(lengths.cu_seqlens_q, sequence, lengths.seqlen_q, lengths.longest_q)
        k_begin, length_k = packed_sequence(lengths.cu_seqlens_k, sequence, lengths.seqlen_k, lengths.longest_k)
        if KEYS_OWNED:
            blocks = tl.cdiv(length_k, BLOCK)
        else:
            blocks = tl.cdiv(length_q, BLOCK)
        if not features.top_left:
            shift = length_k - length_q
    return Place(sequence, batch, head, q_begin, length_q, k_begin, length_k, shift), block, blocks


@triton.jit
def packed_block(block, lanes, blocks, cu_seqlens, total, BLOCK: tl.constexpr):
    """Return (sequence, block of it) of one of the `blocks` blocks of a head; one behind the sequence's last has no rows.

    Sequence `i`, which begins at row `c`, has the blocks from `c // BLOCK + i` on. That leaves room for its last one, whatever
    the lengths are, and all of them together have at most `total // BLOCK` and one for each sequence.
    """
    first = tl.cast(0, tl.int32)
    count = blocks - total // BLOCK
    while count > 1:
        apart = tl.cdiv(count, SEARCHED)
        tried = first + lanes * apart
        known = tried < first + count
        begins = tl.load(cu_seqlens + tried, mask=known, other=0) // BLOCK + tried
        passed = tl.maximum(tl.sum((known & (begins <= block)).to(tl.int32), 0) - 1, 0) * apart
        first += passed
        count = tl.minimum(apart, count - passed)
    local = block - tl.load(cu_seqlens + first) // BLOCK - first
    most = total // BLOCK + 1
    return first, tl.where((local < 0) | (local > most), most, local)  # offsets may be anything


@triton.jit
def packed_sequence(cu_seqlens, index, total, longest):
    """Return the begin and the length of a packed sequence; offsets that lie outside of the tensor are pulled in."""
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + index), 0), total)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens + index + 1), begin), total)
    return begin, tl.minimum(end - begin, longest)


@triton.jit
def head_offset(batch, head, stride_b, stride_h):
    """Return the offset of one head of a tensor with a batch dimension."""
    return batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h


@triton.jit
def head_rows(pointer, batch, head, begin, stride_b, stride_s, stride_h):
    """Return a pointer to row `begin` of one head of `[B, S, heads, D]`."""
    return pointer + head_offset(batch, head, stride_b, stride_h) + begin.to(tl.int64) * stride_s


@triton.jit
def owned_start(tiles, tile_stride, block, blocks, BLOCK: tl.constexpr, LISTED: tl.constexpr, DESCENDING: tl.constexpr):
    """Return the first row of the `block`-th program of a head or packed sequence: programs take the longest walks first."""
    if LISTED:
        per_tile: tl.constexpr = TILE // BLOCK
        tile = named_tile(tiles + (block // per_tile).to(tl.int64) * tile_stride, blocks // per_tile - 1)
        start = (tile * per_tile + block % per_tile) * BLOCK
    elif DESCENDING:
        start = tl.where(block < blocks, blocks - 1 - block, block) * BLOCK
    else:
        start = block * BLOCK
    return start


@triton.jit
def named_tile(place, last):
    """Return the tile that a word of a list names, at most `last`, which is not negative: lists may hold any numbers."""
    return tl.minimum(tl.load(place).to(tl.uint32, bitcast=True), last.to(tl.uint32)).to(tl.int32)


@triton.jit
def counts_of(record, room):
    """Return (n_partial, n_full) of a record with `room` entries: at most so many together, whatever it holds."""
    n_partial = tl.minimum(tl.maximum(tl.load(record + 1), 0), room)
    return n_partial, tl.minimum(tl.maximum(tl.load(record + 2), 0), room - n_partial)


@triton.jit
def last_owned(place, start, shape: tl.constexpr, KEYS_OWNED: tl.constexpr):
    """Return the last row of the owned block that begins at `start`."""
    if KEYS_OWNED:
        last = tl.minimum(start + shape.block_n, place.length_k) - 1
    else:
        last = tl.minimum(start + shape.block_m, place.length_q) - 1
    return last


@triton.jit
def band_of(band, place, KEYS_OWNED: tl.constexpr):
    """Return the band as owned rows of a place have it: owned `o` meets walked `w` iff `o + lo <= w <= o + hi`."""
    if KEYS_OWNED:
        turned = Band(-(band.hi + place.shift), -(band.lo + place.shift))
    else:
        turned = Band(band.lo + place.shift, band.hi + place.shift)
    return turned


@triton.jit
def record_of(lists, place, head, start, features: tl.constexpr):
    """Return the record of query head `head` that lists tiles for the owned block that begins at `start`."""
    record = 0
    if features.listed:
        record = lists.tiles + head_offset(place.batch, head // lists.group, lists.tiles_b, lists.tiles_h)
        record += (start // TILE).to(tl.int64) * lists.tiles_w
    return record


@triton.jit
def plan_walk(head, start, last, lists, shape: tl.constexpr, features: tl.constexpr, KEYS_OWNED: tl.constexpr):
    """Return the walk of owned rows `start ... last` through the other side of a head."""
    STEP: tl.constexpr = shape.block_m if KEYS_OWNED else shape.block_n
    place, band, record = head.place, head.mask, head.record
    length = place.length_q if KEYS_OWNED else place.length_k
    zero = tl.cast(0, tl.int32)
    if features.listed:
        per_tile: tl.constexpr = TILE // STEP
        room = tl.where(length > 0, lists.tiles_w - HEADER, 0)
        n_partial, n_full = counts_of(record, room)
        n_partial *= per_tile
        n_full = tl.where(length >= TILE, n_full, 0) * per_tile
        partial_first = zero
        full_first = n_partial
        left = zero
        gap = zero
    else:
        partial_first = tl.maximum(start + band.lo, 0) // STEP
        end = tl.maximum((tl.minimum(last + band.hi + 1, length) + STEP - 1) // STEP, partial_first)
        if features.mask == "segments" or features.mask == "intervals":  # which hide more than the band
            full_first = end
            n_full = zero
        else:
            full_first = (tl.maximum(last + band.lo, 0) + STEP - 1) // STEP
            full_first = tl.minimum(tl.maximum(full_first, partial_first), end)
            full_end = tl.maximum(tl.minimum(start + band.hi + 1, length), 0) // STEP
            n_full = tl.maximum(tl.minimum(full_end, end) - full_first, 0)
        left = full_first - partial_first
        gap = n_full
        n_partial = end - partial_first - n_full
    return Walk(record, length, n_full, full_first, n_partial, partial_first, left, gap)


@triton.jit
def part_of(walk, PARTIAL: tl.constexpr):
    """Return the steps of a walk that are to be tested, or those that are full."""
    if PARTIAL:
        last = tl.cdiv(walk.length, TILE) - 1
        part = Part(walk.record, last, 0, walk.n_partial, walk.partial_first, walk.left, walk.gap)
    else:
        part = Part(walk.record, walk.length // TILE - 1, 0, walk.n_full, walk.full_first, 0, 0)
    return part


@triton.jit
def share_of(part, split, splits):
    """Return one of `splits` shares of a part."""
    share = (part.end + splits - 1) // splits
    begin = tl.minimum(split * share, part.end)
    end = tl.minimum(begin + share, part.end)
    return Part(part.record, part.last, begin, end, part.first, part.left, part.gap)


@triton.jit
def walked_start(part, step, STEP: tl.constexpr, features: tl.constexpr):
    """Return the first row of step `step` of a part."""
    if features.listed:
        per_tile: tl.constexpr = TILE // STEP
        entry = part.first + step
        tile = named_tile(part.record + HEADER + entry // per_tile, part.last)
        start = (tile * per_tile + entry % per_tile) * STEP
    else:
        start = (part.first + step + tl.where(step < part.left, 0, part.gap)) * STEP
    return start
