"""Which key lies in which slot: the kernels that find the keys of each epoch and order them.

Queries are cut into epochs of `epoch` queries, and each epoch has slots of its own for the keys that it sees:

```
slots of an epoch:  | alive when the epoch begins, the longest-lived first, unused | born in the epoch, by birth, unused |
                    | <----------------------- old_slots ------------------------> | <----------- born_slots ----------> |
```

A key is born at its position on the diagonal, query `key - band_hi`, or is there from the first query on. Slots of keys
that die within the same 128 queries lie together, so that whole blocks of 128 slots appear and vanish together.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNSPECIALIZED = (
    "start_group", "end_group", "first_head", "heads", "epochs", "epoch", "old_slots", "born_slots",
    "seqlen_q", "seqlen_k", "band_lo", "band_hi", "bucket", "chunks",
)  # fmt: skip


@triton.jit
def mask_head(pointer, b, h, stride_b, stride_h, group):
    """Return where one head of `[B|1, heads|1, Sk]` begins; strides of broadcast dimensions are 0."""
    return pointer + b.to(tl.int64) * stride_b + (h // group).to(tl.int64) * stride_h


@triton.jit
def lifetime(starts, ends, key, inside, seqlen_q, band_lo, band_hi, CHECKED: tl.constexpr):
    """Return the first query that sees each key, and the one behind the last; no query sees it where start >= end."""
    if CHECKED:
        start = tl.load(starts + key, inside, other=0)
        end = tl.load(ends + key, inside, other=0)
    else:
        start, end = tl.load(starts + key), tl.load(ends + key)
    start = tl.maximum(tl.maximum(start, key - band_hi), 0)
    end = tl.minimum(tl.minimum(end, key - band_lo + 1), seqlen_q)
    return start, end


@triton.jit
def _epochs_alive(start, end, epoch):
    """Return the first epoch that sees each key, and in how many it is seen."""
    first = start // epoch
    return first, tl.where(start < end, (end - 1) // epoch - first + 1, 0)


@triton.jit
def _list_block(
    starts, ends, listed, offsets, places, count, key, limit, first, last, e, capacity,
    seqlen_q, band_lo, band_hi, epoch, old_slots, INVERSE: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """List the keys of one block that are older than the epoch and alive in it; return the new count."""
    start, end = lifetime(starts, ends, key, key < limit, seqlen_q, band_lo, band_hi, CHECKED)
    taken = (start < tl.minimum(end, last)) & (end > first)
    if CHECKED:
        taken = taken & (key < limit)
    ones = taken.to(tl.int32)
    rank = count + tl.cumsum(ones, axis=0) - ones
    tl.store(listed + rank, key, taken & (rank < old_slots))
    if INVERSE:  # keys beyond what was promised have no slot
        left_out = taken & (rank >= old_slots)
        place = tl.load(offsets + key, left_out, other=0) + e - start // epoch
        nowhere = tl.full(place.shape, -1, tl.int32)
        tl.store(places + place, nowhere, left_out & (place >= 0) & (place < capacity))
    return count + tl.sum(ones, axis=0)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def list_alive(
    starts, ends, listed, found, offsets, places,
    start_b, start_h, start_group, end_b, end_h, end_group, first_head, heads, epochs, epoch, old_slots, born_slots,
    seqlen_q, seqlen_k, band_lo, band_hi,
    INVERSE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """List, by index, the keys that are older than an epoch and alive in it, and count them. A program is one epoch.

    Later epochs have more keys to look through, so that they come first. A promise that does not hold lets the count
    exceed `old_slots`: keys beyond it are not listed.
    """
    matrices = tl.num_programs(0) // epochs
    matrix = tl.program_id(0) % matrices
    e = epochs - 1 - tl.program_id(0) // matrices
    b, h = matrix // heads, matrix % heads + first_head
    starts = mask_head(starts, b, h, start_b, start_h, start_group)
    ends = mask_head(ends, b, h, end_b, end_h, end_group)
    record = matrix.to(tl.int64) * epochs + e
    listed += record * old_slots
    capacity = epochs * (old_slots + born_slots)
    if INVERSE:
        offsets += matrix.to(tl.int64) * (seqlen_k + 1)
        places += matrix.to(tl.int64) * capacity
    first = e * epoch
    last = tl.minimum(first + epoch, seqlen_q)
    limit = tl.minimum(tl.maximum(first + band_hi, 0), seqlen_k)
    whole = limit // KEYS * KEYS
    count = tl.full((), 0, tl.int32)
    for at in range(0, whole, KEYS):
        key = at + tl.arange(0, KEYS)
        count = _list_block(
            starts, ends, listed, offsets, places, count, key, limit, first, last, e, capacity,
            seqlen_q, band_lo, band_hi, epoch, old_slots, INVERSE, False,
        )  # fmt: skip
    if whole < limit:
        key = whole + tl.arange(0, KEYS)
        count = _list_block(
            starts, ends, listed, offsets, places, count, key, limit, first, last, e, capacity,
            seqlen_q, band_lo, band_hi, epoch, old_slots, INVERSE, True,
        )  # fmt: skip
    tl.store(found + record, count)


@triton.jit
def _write_slots(
    slots, slot, key, start, end, inside, offsets, places, e, epoch, first_slot, capacity, INVERSE: tl.constexpr
):
    """Write key, start and end of slots of an epoch, and in `places` where the key is found in this epoch."""
    slot_keys, slot_starts, slot_ends = slots
    first, last = e * epoch, (e + 1) * epoch
    tl.store(slot_keys + slot, key, inside)
    tl.store(slot_starts + slot, tl.maximum(start, first), inside)
    tl.store(slot_ends + slot, tl.minimum(end, last), inside)
    if INVERSE:
        place = tl.load(offsets + key, inside, other=0) + e - start // epoch
        tl.store(places + place, first_slot + slot, inside & (place >= 0) & (place < capacity))


@triton.jit
def _clear_slots(slots, begin, end, SLOTS: tl.constexpr):
    """Mark slots `begin` to `end - 1` as unused: no key, an empty interval."""
    for at in range(begin, end, SLOTS):
        slot = at + tl.arange(0, SLOTS)
        nothing = tl.zeros([SLOTS], tl.int32)
        tl.store(slots[0] + slot, nothing - 1, slot < end)
        tl.store(slots[1] + slot, nothing, slot < end)
        tl.store(slots[2] + slot, nothing, slot < end)


@triton.jit
def _by_death(end, last, inside, bucket, KEYS: tl.constexpr, BUCKETS: tl.constexpr):
    """Return `[KEYS, BUCKETS]` ones: bucket 0 outlives the epoch, which ends at `last`; the next ones die ever earlier."""
    early = (last - tl.minimum(end, last) + bucket - 1) // bucket
    return ((early[:, None] == tl.arange(0, BUCKETS)[None, :]) & inside[:, None]).to(tl.int32)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def place_keys(
    starts, ends, listed, found, slot_keys, slot_starts, slot_ends, broken, offsets, places,
    start_b, start_h, start_group, end_b, end_h, end_group, first_head, heads, epochs, epoch, old_slots, born_slots,
    seqlen_q, seqlen_k, band_lo, band_hi, bucket,
    INVERSE: tl.constexpr, LISTED: tl.constexpr, BUCKETS: tl.constexpr, BORN: tl.constexpr,
):  # fmt: skip
    """Write all slots of an epoch, and whether the promise was broken in it. A program is one epoch.

    The old keys are sorted by counting: once to learn how many die in each `bucket` of queries, once to place them.
    """
    matrix, e = tl.program_id(0) // epochs, tl.program_id(0) % epochs
    b, h = matrix // heads, matrix % heads + first_head
    starts = mask_head(starts, b, h, start_b, start_h, start_group)
    ends = mask_head(ends, b, h, end_b, end_h, end_group)
    record = matrix.to(tl.int64) * epochs + e
    listed += record * old_slots
    per_epoch = old_slots + born_slots
    capacity = epochs * per_epoch
    first_slot = e * per_epoch
    if INVERSE:
        offsets += matrix.to(tl.int64) * (seqlen_k + 1)
        places += matrix.to(tl.int64) * capacity
    slots = (slot_keys + record * per_epoch, slot_starts + record * per_epoch, slot_ends + record * per_epoch)
    first, last = e * epoch, (e + 1) * epoch

    total = tl.load(found + record)
    tl.store(broken + record, (total > old_slots).to(tl.int32))
    count = tl.minimum(total, old_slots)
    dying = tl.zeros([BUCKETS], tl.int32)
    for at in range(0, count, LISTED):
        index = at + tl.arange(0, LISTED)
        key = tl.load(listed + index, index < count, other=0)
        _, end = lifetime(starts, ends, key, index < count, seqlen_q, band_lo, band_hi, True)
        dying += tl.sum(_by_death(end, last, index < count, bucket, LISTED, BUCKETS), axis=0)
    begin = tl.cumsum(dying, axis=0) - dying
    for at in range(0, count, LISTED):
        index = at + tl.arange(0, LISTED)
        key = tl.load(listed + index, index < count, other=0)
        start, end = lifetime(starts, ends, key, index < count, seqlen_q, band_lo, band_hi, True)
        ones = _by_death(end, last, index < count, bucket, LISTED, BUCKETS)
        before = begin[None, :] + tl.cumsum(ones, axis=0) - ones
        slot = tl.sum(ones * before, axis=1)
        _write_slots(
            slots, slot, key, start, end, index < count, offsets, places, e, epoch, first_slot, capacity, INVERSE
        )
        begin += tl.sum(ones, axis=0)
    _clear_slots(slots, count, old_slots, BORN)

    used = old_slots
    for at in range(0, born_slots, BORN):
        index = at + tl.arange(0, BORN)
        key = first + band_hi + index
        inside = (index < born_slots) & (key >= 0) & (key < seqlen_k)
        start, end = lifetime(starts, ends, key, inside, seqlen_q, band_lo, band_hi, True)
        taken = inside & (start < tl.minimum(end, last))
        ones = taken.to(tl.int32)
        slot = used + tl.cumsum(ones, axis=0) - ones
        _write_slots(slots, slot, key, start, end, taken, offsets, places, e, epoch, first_slot, capacity, INVERSE)
        used += tl.sum(ones, axis=0)
    _clear_slots(slots, used, per_epoch, BORN)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def count_places(
    starts, ends, offsets,
    start_b, start_h, start_group, end_b, end_h, end_group, first_head, heads, chunks, epoch,
    seqlen_q, seqlen_k, band_lo, band_hi,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Write, `[.., Sk + 1]`, how many slots all keys before each key have. A program is a chunk of `KEYS` keys.

    Counting the chunks before it again costs each program less than a launch that passes on their sums.
    """
    matrices = tl.num_programs(0) // chunks
    matrix = tl.program_id(0) % matrices
    chunk = chunks - 1 - tl.program_id(0) // matrices
    b, h = matrix // heads, matrix % heads + first_head
    starts = mask_head(starts, b, h, start_b, start_h, start_group)
    ends = mask_head(ends, b, h, end_b, end_h, end_group)
    offsets += matrix.to(tl.int64) * (seqlen_k + 1)
    earlier = tl.zeros([KEYS], tl.int32)
    for at in range(0, chunk * KEYS, KEYS):
        key = at + tl.arange(0, KEYS)
        start, end = lifetime(starts, ends, key, True, seqlen_q, band_lo, band_hi, False)
        earlier += _epochs_alive(start, end, epoch)[1]
    key = chunk * KEYS + tl.arange(0, KEYS)
    start, end = lifetime(starts, ends, key, key < seqlen_k, seqlen_q, band_lo, band_hi, True)
    own = tl.where(key < seqlen_k, _epochs_alive(start, end, epoch)[1], 0)
    sums = tl.sum(earlier, axis=0) + tl.cumsum(own, axis=0)
    tl.store(offsets + key, sums - own, key <= seqlen_k)
