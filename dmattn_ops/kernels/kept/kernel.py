"""A step of a cache of kept keys (definition: `dmattn_ops.kernels.kept`): one program for each key head of each sequence.

A program reads what is known of all slots once. It finds the worst of the best keys and the first slot whose key nobody needs,
and writes which slots the new query sees. That the worst key leaves the best changes neither which slots are needed (the oldest
query that counts saw it as one of the best) nor what is seen of another slot, so all of this is one pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from dmattn_ops.kernels.constants import Constants
from dmattn_ops.masks.kept import NEVER as _NEVER
from dmattn_ops.masks.kept import UNNAMED as _UNNAMED

NEVER = tl.constexpr(_NEVER)
UNNAMED = tl.constexpr(_UNNAMED)


@dataclass(frozen=True, eq=False, repr=False)
class StepShape(Constants):
    """What a step is compiled for."""

    block: int  # slots that are read at once
    head_dim: int
    value_dim: int
    padded_head: int  # powers of two
    padded_value: int
    bias_group: int  # heads of biases for each key head
    padded_group: int
    padding_counts: bool


class Sequence(NamedTuple):
    """The numbers of a sequence at the new position."""

    begin: Any  # the position, which was the length
    after: Any  # the length afterwards
    oldest: Any  # the first query that the cache must still answer
    is_key: Any
    counted: Any  # whether it is a position
    changes: Any  # whether a document begins
    first: Any
    document: Any


class Slots(NamedTuple):
    """Where the slots of a head lie: scores, the four numbers of `masks.kept.Known`, and what the query sees."""

    scores: Any
    position: Any
    outranked: Any
    protected: Any
    ended: Any
    seen: Any


class Found(NamedTuple):
    """What a pass over slots finds: how many keys are best; of the worst its place, position and slot; a slot that is free."""

    count: Any
    worst: Any
    position: Any
    slot: Any
    free: Any


@triton.jit
def place_of(score):
    """Return integers that are in the order of scores, the best first and all NaNs last, as `selection.order.places` does."""
    if score.dtype == tl.float64:
        bits = score.to(tl.int64, bitcast=True)
        GREATEST: tl.constexpr = (1 << 63) - 1
        INFINITY: tl.constexpr = 0x7FF0 << 48
    else:
        bits = score.to(tl.int32, bitcast=True)
        GREATEST: tl.constexpr = (1 << 31) - 1
        INFINITY: tl.constexpr = 0x7F80 << 16
    bits = tl.where(bits == -GREATEST - 1, 0, bits)  # -0
    ascending = tl.where(bits < 0, bits ^ GREATEST, bits)
    return tl.where((bits & GREATEST) > INFINITY, GREATEST, -1 - ascending)


@triton.jit
def sequence_of(
    batch, length, first, document, padding, padding_b, documents, documents_b, rollback, shape: tl.constexpr
):
    """Return the numbers of a sequence at its next position."""
    begin = tl.load(length + batch)
    always = begin >= 0
    is_key = always
    if padding is not None:
        is_key = tl.load(padding + batch * padding_b) != 0
    counted = is_key
    if shape.padding_counts:
        counted = always
    first_key = tl.load(first + batch)
    first_key = tl.where(is_key, tl.minimum(first_key, begin), first_key)
    changes = begin < 0
    current = begin
    if document is not None:
        current = tl.load(document + batch)
        if documents is not None:
            given = tl.where(is_key, tl.load(documents + batch * documents_b).to(tl.int64), current)
            changes = (given != current) & (current != UNNAMED)
            first_key = tl.where(changes, begin, first_key)
            current = given
    after = begin + counted.to(tl.int64)
    return Sequence(begin, after, after - tl.maximum(rollback, 1), is_key, counted, changes, first_key, current)


@triton.jit
def both(count, free, worst, other_count, other_free, other_worst):
    """Return the count, the first free slot and the worst place of two sets of slots together (see `Found`)."""
    return count + other_count, tl.minimum(free, other_free), tl.maximum(worst, other_worst)


@triton.jit
def later(position, slot, other_position, other_slot):
    """Return the greater of two positions, and its slot."""
    takes = other_position > position
    return tl.where(takes, other_position, position), tl.where(takes, other_slot, slot)


@triton.jit
def search(slots, lanes, start, count, found, sequence):
    """Return `found`, extended by the slots from `start` on; write which of them the query sees, and where documents end."""
    slot = start + lanes
    inside = slot < count
    position = tl.load(slots.position + slot, mask=inside, other=-1)
    outranked = tl.load(slots.outranked + slot, mask=inside, other=-1)
    protected = tl.load(slots.protected + slot, mask=inside, other=-1)
    ended = tl.load(slots.ended + slot, mask=inside, other=-1)
    place = place_of(tl.load(slots.scores + slot, mask=inside, other=0.0))
    ends = sequence.changes & (ended == NEVER)
    tl.store(slots.ended + slot, tl.zeros_like(ended) + sequence.begin, mask=ends)
    ended = tl.where(ends, sequence.begin, ended)
    until = tl.minimum(tl.maximum(outranked, protected), ended)
    tl.store(slots.seen + slot, ((until > sequence.begin) & sequence.counted).to(tl.int32), mask=inside)

    needed = (position >= 0) & (ended >= sequence.oldest)
    needed = needed & ((outranked >= sequence.oldest) | (protected > sequence.oldest))
    best = (outranked == NEVER) & (ended == NEVER)
    free = tl.where(inside & (needed == 0), slot, count)
    found_here = tl.reduce((best.to(tl.int32), free, tl.where(best, place, found.worst)), 0, both)
    worst = found_here[2]
    at_worst = best & (place == worst)
    latest, of_latest = tl.reduce(
        (tl.where(at_worst, position, -1), slot), 0, later
    )  # of equal ones the later key is worse
    takes = (worst > found.worst) | (latest > found.position)
    return Found(
        found.count + found_here[0],
        worst,
        tl.where(takes, latest, found.position),
        tl.where(takes, of_latest, found.slot),
        tl.minimum(found.free, found_here[1]),
    )


@triton.jit
def store_row(target, source, width: tl.constexpr, padded: tl.constexpr, write):
    """Copy a row of `width` elements where it is to be written."""
    columns = tl.arange(0, padded)
    inside = (columns < width) & write
    tl.store(target + columns, tl.load(source + columns, mask=inside, other=0.0), mask=inside)


@triton.jit
def store_known(slots, slot, position, outranked, protected, sequence):
    """Write what is known of a key into a slot, and whether the query sees it; no document has begun behind it."""
    tl.store(slots.position + slot, position)
    tl.store(slots.outranked + slot, outranked)
    tl.store(slots.protected + slot, protected)
    tl.store(slots.ended + slot, tl.zeros_like(position) + NEVER)
    sees = (tl.maximum(outranked, protected) > sequence.begin) & sequence.counted
    tl.store(slots.seen + slot, sees.to(tl.int32))


@triton.jit
def finish_sequence(batch, heads, length, floor, first, arrived, document, trail, rollback, sequence):
    """Write the numbers of a sequence, where all programs of its heads have read them."""
    tl.debug_barrier()
    if tl.atomic_add(arrived + batch, 1) == heads - 1:
        tl.store(arrived + batch, 0)
        tl.store(length + batch, sequence.after)
        tl.store(floor + batch, tl.maximum(tl.load(floor + batch), sequence.after - rollback))
        tl.store(first + batch, sequence.first)
        if document is not None:
            tl.store(document + batch, sequence.document)
            place = trail + 2 * (batch * (rollback + 1) + sequence.after % (rollback + 1))
            tl.store(place, sequence.first, mask=sequence.counted)
            tl.store(place + 1, sequence.document, mask=sequence.counted)


@triton.jit(
    do_not_specialize=["heads", "slots", "keep", "keep_first", "keep_last", "rollback", "padding_b", "documents_b"]
)
def keep_step_kernel(
    key_cache, value_cache, score_cache, places, length, floor, first, arrived, bias_cache, document, trail,
    key, value, scores, bias, padding, documents, seen,
    key_b, key_h, value_b, value_h, scores_b, scores_h, bias_b, bias_h, padding_b, documents_b,
    heads, slots, keep, keep_first, keep_last, rollback,
    shape: tl.constexpr,
):  # fmt: skip
    """Append one position to a key head of a sequence; the last program of a sequence writes what all of its heads share."""
    BLOCK: tl.constexpr = shape.block
    program = tl.program_id(0).to(tl.int64)
    batch, head = program // heads, program % heads
    sequence = sequence_of(batch, length, first, document, padding, padding_b, documents, documents_b, rollback, shape)
    own = tl.load(scores + batch * scores_b + head * scores_h).to(score_cache.dtype.element_ty)
    place = place_of(own)
    LEAST: tl.constexpr = -(1 << (place.dtype.primitive_bitwidth - 1))
    of_head = places + program * 4 * slots
    seen_of_head = seen + program * slots
    known = Slots(
        score_cache + program * slots,
        of_head,
        of_head + slots,
        of_head + 2 * slots,
        of_head + 3 * slots,
        seen_of_head,
    )
    none = tl.cast(-1, tl.int32)
    found = Found(tl.cast(0, tl.int32), place * 0 + LEAST, sequence.begin * 0 - 1, none, none + 1 + slots)
    for start in tl.range(0, slots, BLOCK):
        found = search(known, tl.arange(0, BLOCK), start, slots, found, sequence)
    tl.debug_barrier()  # what follows may write to the same places

    begin = sequence.begin
    full = found.count >= keep
    better = sequence.is_key & (place < found.worst)
    if full & better:
        tl.store(known.outranked + found.slot, begin)
        sees = (tl.maximum(begin, tl.load(known.protected + found.slot)) > begin) & sequence.counted
        tl.store(known.seen + found.slot, sees.to(tl.int32))
    write = sequence.is_key
    slot = tl.where(found.free < slots, found.free, 0)
    if write:
        outranked = tl.where((full == 0) | better, NEVER, begin)
        protected = tl.where(sequence.first + keep_first > begin, NEVER, begin + keep_last)
        store_known(known, slot, begin, outranked, protected, sequence)
        tl.store(known.scores + slot, own)
    row = program * slots + slot
    of_key, of_value = key + batch * key_b + head * key_h, value + batch * value_b + head * value_h
    store_row(key_cache + row * shape.head_dim, of_key, shape.head_dim, shape.padded_head, write)
    store_row(value_cache + row * shape.value_dim, of_value, shape.value_dim, shape.padded_value, write)
    if bias_cache is not None:
        PADDED_GROUP: tl.constexpr = shape.padded_group
        lanes = tl.arange(0, PADDED_GROUP)
        inside = (lanes < shape.bias_group) & write
        of_heads = head * shape.bias_group + lanes
        added = tl.zeros((PADDED_GROUP,), bias_cache.dtype.element_ty)
        if bias is not None:
            added = tl.load(bias + batch * bias_b + of_heads * bias_h, mask=inside, other=0.0)
        target = bias_cache + (batch * heads * shape.bias_group + of_heads) * slots + slot
        tl.store(target, added, mask=inside)
    finish_sequence(batch, heads, length, floor, first, arrived, document, trail, rollback, sequence)
