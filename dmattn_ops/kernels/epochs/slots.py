"""The kernel that plans each epoch: which key lies in which slot, and which tiles of slots which tiles of queries see.

Queries are cut into epochs of `epoch` queries, and each epoch has slots of its own for the keys that it sees:

```
slots of an epoch:  | alive when the epoch begins, the longest-lived first, unused | born in the epoch, by birth, unused |
                    | <----------------------- old_slots ------------------------> | <----------- born_slots ----------> |
```

A key is born at its position on the diagonal, query `key - band_hi`, or is there from the first query on. Slots of keys
that die within the same 128 queries lie together, so that whole blocks of 128 slots appear and vanish together.

One program does all of this for one epoch, because a launch takes longer than most of the steps. A step reads what the one
before wrote to memory, behind a barrier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from dmattn_ops.kernels.constants import Constants
from dmattn_ops.kernels.epochs.lists import list_blocks, list_query_tiles
from dmattn_ops.launching.overlap import follow_kernel_before

UNSPECIALIZED = (
    "start_group", "end_group", "first_head", "heads", "epochs", "epoch", "old_slots", "born_slots",
    "seqlen_q", "seqlen_k", "band_lo", "band_hi", "bucket", "magic", "shift", "row_count", "row_width", "col_width",
)  # fmt: skip
COUNT_BITS = tl.constexpr(11)  # of the number of keys that one bucket may have among those sorted at once
MOST_COUNTED = tl.constexpr((1 << COUNT_BITS.value) - 1)
COUNTED_IN_WORD = tl.constexpr(63 // COUNT_BITS.value)


@dataclass(frozen=True, eq=False, repr=False)
class Planned(Constants):
    """What a program that plans an epoch works on at once: one constant of it."""

    keys: int  # that it looks through
    listed: int  # old keys that it sorts
    born: int  # keys born in the epoch
    blocks: int  # of slots whose query tiles it lists
    own: int  # tiles whose blocks it lists ...
    other: int  # ... by so many


class Intervals(NamedTuple):
    """The queries that see each key of a head, and how many keys there are."""

    starts: Any  # None where every interval begins with the band
    ends: Any
    seqlen_k: Any


class Epoch(NamedTuple):
    """One epoch, the band, and what `epoch_of` divides by."""

    number: Any
    length: Any  # queries of each epoch
    seqlen_q: Any
    band_lo: Any
    band_hi: Any
    magic: Any
    shift: Any


class Listed(NamedTuple):
    """The keys that are alive when an epoch begins, in the order of their positions."""

    keys: Any
    places: Any  # of each in `Inverse.places`
    old_slots: Any  # as many as there is room for


class SlotArrays(NamedTuple):
    """The slots of one epoch."""

    keys: Any
    starts: Any
    ends: Any
    first: Any  # number of its first slot among those of all epochs


class Inverse(NamedTuple):
    """The slots of each key of a head."""

    offsets: Any
    places: Any
    capacity: Any  # slots of all epochs


def division_by(epoch: int) -> tuple[int, int]:
    """Return `magic` and `shift` with which `epoch_of` divides queries below 2^31 by a multiple of 128, exactly."""
    tiles = epoch // 128
    shift = tiles.bit_length() - 1
    return -(-(1 << (30 + shift)) // tiles), shift


@triton.jit
def epoch_of(query, magic, shift):
    """Return the epoch of each query, not negative: with `division_by`, since a division takes ten times as long."""
    tile = query.to(tl.uint32) >> 7
    return (tl.umulhi(tile << 2, tl.zeros_like(tile) + magic.to(tl.uint32)) >> shift.to(tl.uint32)).to(tl.int32)


@triton.jit
def mask_head(pointer, b, h, stride_b, stride_h, group):
    """Return where one head of `[B|1, heads|1, Sk]` begins; strides of broadcast dimensions are 0."""
    return pointer + b.to(tl.int64) * stride_b + (h // group).to(tl.int64) * stride_h


@triton.jit
def _limits(starts, ends, key, inside):
    """Load end and, if there is one, start of the keys inside; where that is a scalar, loads of 16 bytes stay whole."""
    if starts is None:
        return (tl.load(ends + key, inside, other=0),)
    else:
        return (tl.load(ends + key, inside, other=0), tl.load(starts + key, inside, other=0))


@triton.jit
def _lifetime(limits, key, epoch):
    """Return the first query that sees each key, and the one behind the last; no query sees it where start >= end.

    Without limits of the start every key is visible from where the band begins.
    """
    start = tl.maximum(key - epoch.band_hi, 0)
    if len(limits) > 1:
        start = tl.maximum(limits[1], start)
    return start, tl.minimum(tl.minimum(limits[0], key - epoch.band_lo + 1), epoch.seqlen_q)


@triton.jit
def _epochs_of(start, end, inside, epoch):
    """Return how many epochs see each key: 0 where none does, and where not `inside`."""
    seen = inside & (start < end)
    first, last = tl.where(seen, start, 0), tl.where(seen, end - 1, 0)
    magic, shift = epoch.magic, epoch.shift
    return tl.where(seen, epoch_of(last, magic, shift) - epoch_of(first, magic, shift) + 1, 0)


@triton.jit
def _list_block(
    limits, listed, inverse, count, slots_before, key, limit, epoch, CHECKED: tl.constexpr, INVERSE: tl.constexpr
):
    """List the keys `[rows, 4]` of one block, all below `limit`, that are alive when an epoch begins.

    Return the new count of them and, with INVERSE, of the slots that all keys so far have in all epochs. A thread has whole
    rows, so that only one number of each four takes part in the scan over the block.
    """
    first, last = epoch.number * epoch.length, (epoch.number + 1) * epoch.length
    old_slots = listed.old_slots
    inside = key < limit
    start, end = _lifetime(limits, key, epoch)
    taken = (start < tl.minimum(end, last)) & (end > first)
    if CHECKED:
        taken = taken & inside
    ones = taken.to(tl.int32)
    in_row = tl.sum(ones, axis=1)
    if INVERSE:  # both numbers in one scan: a block has less than 2^40 slots
        slots = _epochs_of(start, end, inside, epoch)
        slots_in_row = tl.sum(slots, axis=1)
        both = (in_row.to(tl.int64) << 40) | slots_in_row.to(tl.int64)
        scanned = tl.cumsum(both, axis=0)
        before = (scanned >> 40).to(tl.int32) - in_row
        offset = slots_before + (scanned & 0xFFFFFFFF).to(tl.int32)[:, None] - slots_in_row[:, None]
        offset += tl.cumsum(slots, axis=1) - slots
        total = tl.sum(both, axis=0)
        found = (total >> 40).to(tl.int32)
        slots_before += (total & 0xFFFFFFFF).to(tl.int32)
    else:
        before = tl.cumsum(in_row, axis=0) - in_row
        found = tl.sum(in_row, axis=0)
    rank = count + before[:, None] + tl.cumsum(ones, axis=1) - ones
    tl.store(listed.keys + rank, key, taken & (rank < old_slots))
    if INVERSE:
        place = offset + epoch.number - epoch_of(tl.where(taken, start, 0), epoch.magic, epoch.shift)
        tl.store(listed.places + rank, place, taken & (rank < old_slots))
        lost = taken & (rank >= old_slots) & (place >= 0) & (place < inverse.capacity)
        tl.store(inverse.places + place, tl.full(place.shape, -1, tl.int32), lost)
        # keys that are there from the first query on
        tl.store(inverse.offsets + key, offset, inside & (epoch.number == 0))
    return count + found, slots_before


@triton.jit
def _keys_of_block(at, KEYS: tl.constexpr):
    """Return the keys `[KEYS / 4, 4]` of a block."""
    return at + 4 * tl.arange(0, KEYS // 4)[:, None] + tl.arange(0, 4)[None, :]


@triton.jit
def _list_alive(intervals, listed, inverse, epoch, KEYS: tl.constexpr, INVERSE: tl.constexpr):
    """List, by index, the keys that are older than an epoch and alive in it; return how many, and the slots before the epoch.

    A promise that does not hold lets the count exceed `old_slots`: keys beyond it are not listed, and -1 is their place.
    """
    starts, ends = intervals.starts, intervals.ends
    limit = tl.minimum(tl.maximum(epoch.number * epoch.length + epoch.band_hi, 0), intervals.seqlen_k)
    whole = limit // KEYS * KEYS
    count = tl.full((), 0, tl.int32)
    slots_before = tl.full((), 0, tl.int32)
    following = _limits(starts, ends, _keys_of_block(0, KEYS), whole > 0)
    for at in range(0, whole, KEYS):
        limits = following
        following = _limits(starts, ends, _keys_of_block(at + KEYS, KEYS), at + KEYS < whole)  # on its way meanwhile
        key = _keys_of_block(at, KEYS)
        count, slots_before = _list_block(
            limits, listed, inverse, count, slots_before, key, limit, epoch, False, INVERSE
        )
    if whole < limit:
        key = _keys_of_block(whole, KEYS)
        limits = _limits(starts, ends, key, key < limit)
        count, slots_before = _list_block(
            limits, listed, inverse, count, slots_before, key, limit, epoch, True, INVERSE
        )
    return count, slots_before


@triton.jit
def _write_slots(slots, slot, key, start, end, inside, inverse, place, epoch, INVERSE: tl.constexpr):
    """Write key, start and end of slots of an epoch, and in `inverse` where the key is found in this epoch."""
    first, last = epoch.number * epoch.length, (epoch.number + 1) * epoch.length
    tl.store(slots.keys + slot, key, inside)
    tl.store(slots.starts + slot, tl.maximum(start, first), inside)
    tl.store(slots.ends + slot, tl.minimum(end, last), inside)
    if INVERSE:
        tl.store(inverse.places + place, slots.first + slot, inside & (place >= 0) & (place < inverse.capacity))


@triton.jit
def _clear_slots(slots, begin, end, SLOTS: tl.constexpr):
    """Mark slots `begin` to `end - 1` as unused: no key, an empty interval."""
    for at in range(begin, end, SLOTS):
        slot = at + tl.arange(0, SLOTS)
        nothing = tl.zeros([SLOTS], tl.int32)
        tl.store(slots.keys + slot, nothing - 1, slot < end)
        tl.store(slots.starts + slot, nothing, slot < end)
        tl.store(slots.ends + slot, nothing, slot < end)


@triton.jit
def _bucket_of(end, last, bucket):
    """Return the bucket of each key: 0 outlives the epoch, which ends at `last`; the next ones die ever earlier."""
    return (last - tl.minimum(end, last) + bucket - 1) // bucket


@triton.jit
def _rank_in_bucket(of, inside, buckets, LISTED: tl.constexpr):
    """Return how many keys `inside` before each one are in the same of the `buckets` buckets.

    Each scan counts in as many buckets as have room side by side in 64 bits.
    """
    tl.static_assert(LISTED <= MOST_COUNTED)
    word, shift = of // COUNTED_IN_WORD, (of % COUNTED_IN_WORD * COUNT_BITS).to(tl.int64)
    one = tl.full([LISTED], 1, tl.int64) << shift
    rank = tl.zeros([LISTED], tl.int32)
    for number in range(tl.cdiv(buckets, COUNTED_IN_WORD)):
        mine = inside & (word == number)
        ones = tl.where(mine, one, 0)
        before = ((tl.cumsum(ones, axis=0) - ones) >> shift) & MOST_COUNTED
        rank += tl.where(mine, before.to(tl.int32), 0)
    return rank


@triton.jit
def _place_old(
    intervals,
    listed,
    slots,
    inverse,
    count,
    epoch,
    bucket,
    LISTED: tl.constexpr,
    BUCKETS: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Write the slots of the `count` listed keys, sorted by counting: how many die in each `bucket` of queries, then where."""
    starts, ends = intervals.starts, intervals.ends
    last = (epoch.number + 1) * epoch.length
    dying = tl.zeros([BUCKETS], tl.int32)
    for at in range(0, count, LISTED):
        index = at + tl.arange(0, LISTED)
        inside = index < count
        key = tl.load(listed.keys + index, inside, other=0)
        _, end = _lifetime(_limits(None, ends, key, inside), key, epoch)
        dying += tl.histogram(tl.where(inside, _bucket_of(end, last, bucket), 0), BUCKETS, mask=inside)
    begin = tl.cumsum(dying, axis=0) - dying
    for at in range(0, count, LISTED):
        index = at + tl.arange(0, LISTED)
        inside = index < count
        key = tl.load(listed.keys + index, inside, other=0)
        place = index
        if INVERSE:
            place = tl.load(listed.places + index, inside, other=-1)
        start, end = _lifetime(_limits(starts, ends, key, inside), key, epoch)
        of = tl.where(inside, _bucket_of(end, last, bucket), 0)
        slot = tl.gather(begin, of, 0) + _rank_in_bucket(of, inside, tl.cdiv(epoch.length, bucket) + 1, LISTED)
        _write_slots(slots, slot, key, start, end, inside, inverse, place, epoch, INVERSE)
        begin += tl.histogram(of, BUCKETS, mask=inside)


@triton.jit
def _place_born(
    intervals, slots, inverse, used, slots_before, born_slots, epoch, BORN: tl.constexpr, INVERSE: tl.constexpr
):
    """Write the slots of the keys born in an epoch, from slot `used` on; return the slot behind, and the slots of all so far."""
    starts, ends = intervals.starts, intervals.ends
    last = (epoch.number + 1) * epoch.length
    for at in range(0, born_slots, BORN):
        index = at + tl.arange(0, BORN)
        key = epoch.number * epoch.length + epoch.band_hi + index
        inside = (index < born_slots) & (key >= 0) & (key < intervals.seqlen_k)
        start, end = _lifetime(_limits(starts, ends, key, inside), key, epoch)
        taken = inside & (start < tl.minimum(end, last))
        ones = taken.to(tl.int32)
        place = index
        if INVERSE:
            count = _epochs_of(start, end, inside, epoch)
            both = (ones.to(tl.int64) << 40) | count.to(tl.int64)
            scanned = tl.cumsum(both, axis=0)
            slot = used + (scanned >> 40).to(tl.int32) - ones
            offset = slots_before + (scanned & 0xFFFFFFFF).to(tl.int32) - count
            tl.store(inverse.offsets + key, offset, inside)
            place = offset + epoch.number - epoch_of(tl.where(taken, start, 0), epoch.magic, epoch.shift)
            total = tl.sum(both, axis=0)
            found = (total >> 40).to(tl.int32)
            slots_before += (total & 0xFFFFFFFF).to(tl.int32)
        else:
            slot = used + tl.cumsum(ones, axis=0) - ones
            found = tl.sum(ones, axis=0)
        _write_slots(slots, slot, key, start, end, taken, inverse, place, epoch, INVERSE)
        used += found
    return used, slots_before


@triton.jit(do_not_specialize=UNSPECIALIZED)
def plan_epochs(
    starts, ends, listed, listed_places, slot_keys, slot_starts, slot_ends, broken, hulls, row_tiles, col_tiles,
    offsets, places,
    start_b, start_h, start_group, end_b, end_h, end_group, first_head, heads, epochs, epoch, old_slots, born_slots,
    seqlen_q, seqlen_k, band_lo, band_hi, bucket, magic, shift, row_count, row_width, col_width,
    INVERSE: tl.constexpr, BUCKETS: tl.constexpr, planned: tl.constexpr,
):  # fmt: skip
    """Write all slots of an epoch, whether the promise was broken in it, and the lists of its tiles but their order.

    With INVERSE also `offsets` `[.., Sk + 1]`, how many slots all keys before each key have, of the keys that are born in the
    epoch, and their slots and those of older keys in `places`. A program is one epoch; later epochs have more keys to look
    through, so that they come first. `listed` and `listed_places` `[.., epochs, old_slots]` are for this program alone.
    """
    follow_kernel_before()
    matrices = tl.num_programs(0) // epochs
    matrix = tl.program_id(0) % matrices
    e = epochs - 1 - tl.program_id(0) // matrices
    b, h = matrix // heads, matrix % heads + first_head
    if starts is not None:
        starts = mask_head(starts, b, h, start_b, start_h, start_group)
    ends = mask_head(ends, b, h, end_b, end_h, end_group)
    record = matrix.to(tl.int64) * epochs + e
    listed += record * old_slots
    per_epoch = old_slots + born_slots
    capacity = epochs * per_epoch
    first_slot = e * per_epoch
    if INVERSE:
        listed_places += record * old_slots
        offsets += matrix.to(tl.int64) * (seqlen_k + 1)
        places += matrix.to(tl.int64) * capacity
    of_epoch = record * per_epoch
    slots = SlotArrays(slot_keys + of_epoch, slot_starts + of_epoch, slot_ends + of_epoch, first_slot)
    intervals = Intervals(starts, ends, seqlen_k)
    alive, inverse = Listed(listed, listed_places, old_slots), Inverse(offsets, places, capacity)
    this = Epoch(e, epoch, seqlen_q, band_lo, band_hi, magic, shift)
    BORN: tl.constexpr = planned.born

    found, slots_before = _list_alive(intervals, alive, inverse, this, planned.keys, INVERSE)
    tl.store(broken + record, (found > old_slots).to(tl.int32))
    count = tl.minimum(found, old_slots)
    _clear_slots(slots, count, old_slots, BORN)
    used, slots_before = _place_born(
        intervals, slots, inverse, old_slots, slots_before, born_slots, this, BORN, INVERSE
    )
    _clear_slots(slots, used, per_epoch, BORN)
    if INVERSE:
        if e == epochs - 1:  # keys that no query sees, and the end
            for at in range(tl.minimum(tl.maximum((e + 1) * epoch + band_hi, 0), seqlen_k), seqlen_k + 1, BORN):
                key = at + tl.arange(0, BORN)
                tl.store(offsets + key, tl.zeros([BORN], tl.int32) + slots_before, key <= seqlen_k)
    tl.debug_barrier()
    _place_old(intervals, alive, slots, inverse, count, this, bucket, planned.listed, BUCKETS, INVERSE)
    tl.debug_barrier()
    blocks, epoch_tiles = per_epoch // 128, epoch // 128
    hulls += record * blocks * 4
    col_tiles += record * blocks * col_width
    list_query_tiles(slots.starts, slots.ends, hulls, col_tiles, blocks, col_width, planned.blocks, planned.other)
    tl.debug_barrier()
    row_tiles += matrix.to(tl.int64) * row_count * row_width
    list_blocks(hulls, row_tiles, blocks, e, epoch_tiles, row_count, row_width, planned.own, planned.other)
