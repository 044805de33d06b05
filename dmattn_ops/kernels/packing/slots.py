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
    "seqlen_q", "seqlen_k", "band_lo", "band_hi", "bucket", "chunks", "capacity",
)  # fmt: skip


@triton.jit
def mask_head(pointer, b, h, stride_b, stride_h, group):
    """Return where one head of `[B|1, heads|1, Sk]` begins; strides of broadcast dimensions are 0."""
    return pointer + b.to(tl.int64) * stride_b + (h // group).to(tl.int64) * stride_h


@triton.jit
def lifetime(starts, ends, key, inside, seqlen_q, band_lo, band_hi, CHECKED: tl.constexpr):
    """Return the first query that sees each key, and the one behind the last; no query sees it where start >= end.

    `starts` is None where every key is visible from where the band begins.
    """
    start = tl.maximum(key - band_hi, 0)
    if starts is not None:
        if CHECKED:
            start = tl.maximum(tl.load(starts + key, inside, other=0), start)
        else:
            start = tl.maximum(tl.load(starts + key), start)
    if CHECKED:
        end = tl.load(ends + key, inside, other=0)
    else:
        end = tl.load(ends + key)
    end = tl.minimum(tl.minimum(end, key - band_lo + 1), seqlen_q)
    return start, end


@triton.jit
def _list_block(
    starts, ends, listed, count, key, limit, first, last, seqlen_q, band_lo, band_hi, old_slots, CHECKED: tl.constexpr
):
    """List the keys `[rows, 4]` of one block, all below `limit`, that are alive in the epoch; return the new count.

    A thread has whole rows, so that only one number of each four takes part in the scan over the block.
    """
    start, end = lifetime(starts, ends, key, key < limit, seqlen_q, band_lo, band_hi, CHECKED)
    taken = (start < tl.minimum(end, last)) & (end > first)
    if CHECKED:
        taken = taken & (key < limit)
    ones = taken.to(tl.int32)
    in_row = tl.sum(ones, axis=1)
    before = tl.cumsum(in_row, axis=0) - in_row
    rank = count + before[:, None] + tl.cumsum(ones, axis=1) - ones
    tl.store(listed + rank, key, taken & (rank < old_slots))
    return count + tl.sum(in_row, axis=0)


@triton.jit
def _keys_of_block(at, KEYS: tl.constexpr):
    """Return the keys `[KEYS / 4, 4]` of a block."""
    return at + 4 * tl.arange(0, KEYS // 4)[:, None] + tl.arange(0, 4)[None, :]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def list_alive(
    starts, ends, listed, found,
    start_b, start_h, start_group, end_b, end_h, end_group, first_head, heads, epochs, epoch, old_slots,
    seqlen_q, seqlen_k, band_lo, band_hi,
    KEYS: tl.constexpr,
):  # fmt: skip
    """List, by index, the keys that are older than an epoch and alive in it, and count them. A program is one epoch.

    Later epochs have more keys to look through, so that they come first. A promise that does not hold lets the count
    exceed `old_slots`: keys beyond it are not listed.
    """
    matrices = tl.num_programs(0) // epochs
    matrix = tl.program_id(0) % matrices
    e = epochs - 1 - tl.program_id(0) // matrices
    b, h = matrix // heads, matrix % heads + first_head
    if starts is not None:
        starts = mask_head(starts, b, h, start_b, start_h, start_group)
    ends = mask_head(ends, b, h, end_b, end_h, end_group)
    record = matrix.to(tl.int64) * epochs + e
    listed += record * old_slots
    first = e * epoch
    last = first + epoch
    limit = tl.minimum(tl.maximum(first + band_hi, 0), seqlen_k)
    whole = limit // KEYS * KEYS
    count = tl.full((), 0, tl.int32)
    for at in range(0, whole, KEYS):  # without a test of the end, so that loads take 16 bytes
        count = _list_block(
            starts, ends, listed, count, _keys_of_block(at, KEYS), limit, first, last,
            seqlen_q, band_lo, band_hi, old_slots, False,
        )  # fmt: skip
    if whole < limit:
        count = _list_block(
            starts, ends, listed, count, _keys_of_block(whole, KEYS), limit, first, last,
            seqlen_q, band_lo, band_hi, old_slots, True,
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
    if starts is not None:
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


@triton.jit
def _epochs_of_chunk(starts, ends, key, seqlen_q, seqlen_k, band_lo, band_hi, epoch):
    """Return how many epochs see each key; 0 past the last key."""
    inside = key < seqlen_k
    start, end = lifetime(starts, ends, key, inside, seqlen_q, band_lo, band_hi, True)
    return tl.where(inside & (start < end), (end - 1) // epoch - start // epoch + 1, 0)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def count_chunks(
    starts, ends, totals,
    start_b, start_h, start_group, end_b, end_h, end_group, first_head, heads, chunks, epoch,
    seqlen_q, seqlen_k, band_lo, band_hi,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Count the slots of all keys of a chunk of `KEYS` keys. A program is one chunk."""
    matrix, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    b, h = matrix // heads, matrix % heads + first_head
    if starts is not None:
        starts = mask_head(starts, b, h, start_b, start_h, start_group)
    ends = mask_head(ends, b, h, end_b, end_h, end_group)
    key = chunk * KEYS + tl.arange(0, KEYS)
    count = _epochs_of_chunk(starts, ends, key, seqlen_q, seqlen_k, band_lo, band_hi, epoch)
    tl.store(totals + matrix.to(tl.int64) * chunks + chunk, tl.sum(count, axis=0))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def count_places(
    starts, ends, totals, offsets, places,
    start_b, start_h, start_group, end_b, end_h, end_group, first_head, heads, chunks, epoch, capacity,
    seqlen_q, seqlen_k, band_lo, band_hi,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Write, `[.., Sk + 1]`, how many slots all keys before each key have. A program is a chunk of `KEYS` keys.

    Places are filled with -1, which stays for keys that a broken promise leaves without a slot.
    """
    matrix, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    b, h = matrix // heads, matrix % heads + first_head
    if starts is not None:
        starts = mask_head(starts, b, h, start_b, start_h, start_group)
    ends = mask_head(ends, b, h, end_b, end_h, end_group)
    totals += matrix.to(tl.int64) * chunks
    offsets += matrix.to(tl.int64) * (seqlen_k + 1)
    places += matrix.to(tl.int64) * capacity
    earlier = tl.zeros([KEYS], tl.int32)
    for at in range(0, chunk, KEYS):
        other = at + tl.arange(0, KEYS)
        earlier += tl.load(totals + other, other < chunk, other=0)
    begin = tl.sum(earlier, axis=0)
    key = chunk * KEYS + tl.arange(0, KEYS)
    count = _epochs_of_chunk(starts, ends, key, seqlen_q, seqlen_k, band_lo, band_hi, epoch)
    tl.store(offsets + key, begin + tl.cumsum(count, axis=0) - count, key <= seqlen_k)
    behind = tl.minimum(begin + tl.sum(count, axis=0), capacity)
    for at in range(tl.maximum(begin, 0), behind, KEYS):
        place = at + tl.arange(0, KEYS)
        tl.store(places + place, tl.full([KEYS], -1, tl.int32), place < behind)
