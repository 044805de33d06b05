"""A chunk of positions for a cache of kept keys, without padding and documents (definition: `dmattn_ops.kernels.kept`).

The best keys of the slots, in the order of their positions, and the new ones behind them are a short sequence, in which a key
leaves the best where it does in the whole one (`chunk_reference`). What is not among the best stands at its end, as NaN, which
is worse than every key before it. No document ends, so that of what is known of a key (`masks.kept.Known`) `ended` says nothing.

1. `begin_chunk` writes the scores of the short sequence, and in which of its columns the key of each slot stands. It also copies
   the keys of slots and the new ones side by side, for the attention.
2. The kernels of `selection` find the column in which each key leaves the best.
3. `end_chunk` makes positions of columns: what is known of the keys in slots changes, and the ends of all keys are written. It
   lists the slots whose keys nobody needs, and counts the new keys that are needed.
4. `store_chunk` writes new keys that are needed into slots from the list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from dmattn_ops.kernels.constants import Constants
from dmattn_ops.kernels.kept.kernel import NEVER, Sequence, finish_sequence
from dmattn_ops.launching.overlap import follow_kernel_before


@dataclass(frozen=True, eq=False, repr=False)
class ChunkShape(Constants):
    """What the kernels that copy keys are compiled for."""

    block: int  # keys of a program
    head_dim: int
    value_dim: int
    at_once: int  # columns of keys and of values that are copied at once, powers of two
    at_once_value: int
    bias_group: int  # heads of biases for each key head; 0 without biases


class Short(NamedTuple):
    """The short sequence of a head, and what its keys share."""

    stop: Any  # int32 [N + n]: the column in which each key leaves the best
    best: Any  # how many columns stored keys have
    count: Any  # new keys
    begin: Any  # the position of the first new one
    oldest: Any  # the first query that the cache must still answer
    first: Any  # where the document begins


class NewKeys(NamedTuple):
    """What is known of some new keys."""

    position: Any
    outranked: Any
    protected: Any
    needed: Any


@triton.jit
def order_slots(score_cache, places, short_scores, column, slots, part, SLOTS: tl.constexpr, LANES: tl.constexpr):
    """Write the `column` of some slots of a head, -1 of what is not among the best, and scores into these columns.

    A stored key stands behind as many as have smaller positions. Counting them takes no sort.
    """
    outranked = places + slots
    slot = part * SLOTS + tl.arange(0, SLOTS)
    inside = slot < slots
    own = tl.load(places + slot, mask=inside, other=-1)
    is_best = tl.load(outranked + slot, mask=inside, other=-1) == NEVER
    before = tl.zeros([SLOTS, LANES], tl.int32)
    for start in tl.range(0, slots, LANES):
        lane = start + tl.arange(0, LANES)
        other = tl.load(places + lane, mask=lane < slots, other=0)
        other_best = tl.load(outranked + lane, mask=lane < slots, other=-1) == NEVER
        before += (tl.where(other_best, other, NEVER)[None, :] < own[:, None]).to(tl.int32)
    place = tl.where(is_best, tl.sum(before, axis=1), -1)
    tl.store(column + slot, place, mask=inside)
    tl.store(short_scores + place, tl.load(score_cache + slot, mask=inside), mask=is_best)


@triton.jit
def append_scores(scores, places, short_scores, best, slots, count, part, NEW: tl.constexpr):
    """Write new scores of a head behind those of its `best` keys, and NaN behind them; the first part writes how many these are."""
    outranked = places + slots
    found = tl.zeros([NEW], tl.int32)
    for start in tl.range(0, slots, NEW):
        lane = start + tl.arange(0, NEW)
        found += (tl.load(outranked + lane, mask=lane < slots, other=-1) == NEVER).to(tl.int32)
    total = tl.sum(found, axis=0)
    tl.store(best, total, mask=part == 0)
    index = part * NEW + tl.arange(0, NEW)
    score = tl.load(scores + index, mask=index < count, other=0.0).to(short_scores.dtype.element_ty)
    score = tl.where(index < count, score, float("nan"))
    tl.store(short_scores + total + index, score, mask=index < slots + count - total)


@triton.jit
def short_sequence(stop, best, length, first, row, heads, slots, count, rollback):
    """Return what the keys of a head share."""
    begin = tl.load(length + row // heads)
    oldest = begin + count - tl.maximum(rollback, 1)
    first_key = tl.minimum(tl.load(first + row // heads), begin)
    return Short(stop + row * (slots + count), tl.load(best + row), count, begin, oldest, first_key)


@triton.jit
def leaves_at(short, column, inside):
    """Return the position at which the keys of some columns leave the best; NEVER where they stay.

    Of the best there are at most as many as are kept, so that no key leaves before new ones come.
    """
    ahead = tl.load(short.stop + column, mask=inside, other=0) - short.best
    return tl.where(ahead < short.count, short.begin + ahead, NEVER)


@triton.jit
def end_of(short, outranked, protected):
    """Return the first query of the chunk, counted from its begin, that no longer sees a key."""
    ahead = tl.maximum(outranked, protected) - short.begin
    return tl.minimum(tl.maximum(ahead, 0), short.count).to(tl.int32)


@triton.jit
def new_keys(short, index, keep_first, keep_last):
    """Return what is known of the new keys `index`."""
    inside = index < short.count
    position = short.begin + index
    outranked = leaves_at(short, short.best + index, inside)
    protected = tl.where(short.first + keep_first > position, NEVER, position + keep_last)
    needed = inside & ((outranked >= short.oldest) | (protected > short.oldest))
    return NewKeys(position, outranked, protected, needed)


@triton.jit(do_not_specialize=["heads", "slots", "count", "keep_first", "keep_last", "rollback"])
def end_chunk(
    places, column, best, stop, length, first, ends, free, free_count, wanted,
    heads, slots, count, keep_first, keep_last, rollback,
    NEW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write `ends` `[rows, N + n]`, and into `places` where keys in slots leave the best.

    `free` `[rows, N]` lists slots whose keys nobody needs, `free_count` of them; `wanted` are the numbers of new keys that are
    needed in each BLOCK, `[rows, blocks]`. The first program of a row has the slots, each other one NEW new keys.
    """
    follow_kernel_before()
    parts = tl.cdiv(count, NEW) + 1
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    short = short_sequence(stop, best, length, first, row, heads, slots, count, rollback)
    ends += row * (slots + count)
    if part == 0:
        own = places + row * 4 * slots
        many = tl.full((), 0, tl.int32)
        for start in tl.range(0, slots, NEW):
            slot = start + tl.arange(0, NEW)
            inside = slot < slots
            place = tl.load(column + row * slots + slot, mask=inside, other=-1)
            is_best = place >= 0
            position = tl.load(own + slot, mask=inside, other=-1)
            outranked = tl.load(own + slots + slot, mask=inside, other=-1)
            outranked = tl.where(is_best, leaves_at(short, place, is_best), outranked)
            protected = tl.load(own + 2 * slots + slot, mask=inside, other=-1)
            tl.store(own + slots + slot, outranked, mask=is_best)
            tl.store(ends + slot, end_of(short, outranked, protected), mask=inside)
            needed = (position >= 0) & ((outranked >= short.oldest) | (protected > short.oldest))
            is_free = (inside & (needed == 0)).to(tl.int32)
            number = many + tl.cumsum(is_free, 0) - is_free
            tl.store(free + row * slots + number, slot, mask=is_free > 0)
            many += tl.sum(is_free, axis=0)
        tl.store(free_count + row, many)
    else:
        BLOCKS: tl.constexpr = NEW // BLOCK
        index = (part - 1) * NEW + tl.arange(0, NEW)
        keys = new_keys(short, index, keep_first, keep_last)
        tl.store(ends + slots + index, end_of(short, keys.outranked, keys.protected), mask=index < count)
        needed = tl.sum(tl.reshape(keys.needed.to(tl.int32), [BLOCKS, BLOCK]), axis=1)
        tl.store(wanted + (row * (parts - 1) + part - 1) * BLOCKS + tl.arange(0, BLOCKS), needed)


@triton.jit
def copy_rows(target, target_row, source, source_row, copies, width: tl.constexpr, AT_ONCE: tl.constexpr):
    """Copy rows of `width` elements, those that `copies` names, from and to the offsets of their first elements."""
    for start in tl.static_range(0, width, AT_ONCE):
        lane = start + tl.arange(0, AT_ONCE)
        inside = copies[:, None] & (lane < width)[None, :]
        part = tl.load(source + source_row[:, None] + lane[None, :], mask=inside, other=0.0)
        tl.store(target + target_row[:, None] + lane[None, :], part, mask=inside)


@triton.jit(do_not_specialize=["rows", "heads", "slots", "count", "slot_parts"])
def begin_chunk(
    key_cache, value_cache, score_cache, places, bias_cache, key, value, scores, bias,
    keys, values, biases, short_scores, column, best,
    key_b, key_s, key_h, value_b, value_s, value_h, scores_b, scores_h, bias_b, bias_h,
    rows, heads, slots, count, slot_parts,
    shape: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr, NEW: tl.constexpr,
):  # fmt: skip
    """Write the short sequence, and keys `[B, N + n, Hkv, D]`, values and biases `[B, heads, N + n]`: of slots, then new ones.

    `short_scores` are `[rows, N + n]`, `column` `[rows, N]`, `best` `[rows]`. The first programs write them, waiting for memory
    most of the time, while the others copy.
    """
    BLOCK: tl.constexpr = shape.block
    BIAS_GROUP: tl.constexpr = shape.bias_group
    order_parts = slot_parts + tl.cdiv(slots + count, NEW)
    cached_parts = tl.cdiv(slots, BLOCK)
    parts = cached_parts + tl.cdiv(count, BLOCK)
    orders = tl.program_id(0) < rows * order_parts
    program = tl.where(orders, tl.program_id(0), tl.program_id(0) - rows * order_parts)
    row = (program // tl.where(orders, order_parts, parts)).to(tl.int64)
    part = program % tl.where(orders, order_parts, parts)
    batch, head = row // heads, row % heads
    lane = tl.arange(0, BLOCK)
    if orders:
        own_places = places + row * 4 * slots
        own_short = short_scores + row * (slots + count)
        if part < slot_parts:
            order_slots(
                score_cache + row * slots, own_places, own_short, column + row * slots, slots, part, SLOTS, LANES
            )
        else:
            own_scores = scores + batch * scores_b + head * scores_h
            append_scores(own_scores, own_places, own_short, best + row, slots, count, part - slot_parts, NEW)
    elif part < cached_parts:
        index = (part * BLOCK + lane).to(tl.int64)
        copies = index < slots
        target = (batch * (slots + count) + index) * heads + head
        source = row * slots + index
        copy_rows(
            keys, target * shape.head_dim, key_cache, source * shape.head_dim, copies, shape.head_dim, shape.at_once
        )
        copy_rows(
            values, target * shape.value_dim, value_cache, source * shape.value_dim, copies,
            shape.value_dim, shape.at_once_value,
        )  # fmt: skip
        for of_group in tl.static_range(BIAS_GROUP):
            of_head = row * BIAS_GROUP + of_group
            added = tl.load(bias_cache + of_head * slots + index, mask=copies, other=0.0)
            tl.store(biases + of_head * (slots + count) + index, added, mask=copies)
    else:
        index = ((part - cached_parts) * BLOCK + lane).to(tl.int64)
        copies = index < count
        target = (batch * (slots + count) + slots + index) * heads + head
        of_key = batch * key_b + head * key_h + index * key_s
        of_value = batch * value_b + head * value_h + index * value_s
        copy_rows(keys, target * shape.head_dim, key, of_key, copies, shape.head_dim, shape.at_once)
        copy_rows(values, target * shape.value_dim, value, of_value, copies, shape.value_dim, shape.at_once_value)
        for of_group in tl.static_range(BIAS_GROUP):
            of_head = row * BIAS_GROUP + of_group
            added = new_biases(bias_cache, bias, batch, head * BIAS_GROUP + of_group, index, copies, bias_b, bias_h)
            tl.store(biases + of_head * (slots + count) + slots + index, added, mask=copies)


@triton.jit
def new_biases(bias_cache, bias, batch, head, index, inside, bias_b, bias_h):
    """Return the biases of some new keys: 0 where none were given."""
    added = tl.zeros(index.shape, bias_cache.dtype.element_ty)
    if bias is not None:
        added = tl.load(bias + batch * bias_b + head * bias_h + index, mask=inside, other=0.0)
    return added


@triton.jit(do_not_specialize=["heads", "slots", "count", "blocks", "keep_first", "keep_last", "rollback"])
def store_chunk(
    key_cache, value_cache, score_cache, places, length, floor, first, arrived, bias_cache,
    key, value, scores, bias, best, stop, free, free_count, wanted,
    key_b, key_s, key_h, value_b, value_s, value_h, scores_b, scores_h, bias_b, bias_h,
    heads, slots, count, blocks, keep_first, keep_last, rollback,
    shape: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the new keys of a block that are needed into free slots; the last program of a sequence writes its numbers.

    `blocks` is how many counts `wanted` has in a row.
    """
    BLOCK: tl.constexpr = shape.block
    BIAS_GROUP: tl.constexpr = shape.bias_group
    parts = tl.cdiv(count, BLOCK)
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    batch, head = row // heads, row % heads
    short = short_sequence(stop, best, length, first, row, heads, slots, count, rollback)
    before = tl.zeros([LANES], tl.int32)
    for start in tl.range(0, part, LANES):
        lane = start + tl.arange(0, LANES)
        before += tl.load(wanted + row * blocks + lane, mask=lane < part, other=0)
    index = part * BLOCK + tl.arange(0, BLOCK)
    new = new_keys(short, index, keep_first, keep_last)
    needed = new.needed.to(tl.int32)
    number = tl.sum(before, axis=0) + tl.cumsum(needed, 0) - needed
    stored = new.needed & (number < tl.load(free_count + row))
    slot = tl.load(free + row * slots + number, mask=stored, other=0).to(tl.int64)

    known = places + row * 4 * slots + slot
    tl.store(known, new.position, mask=stored)
    tl.store(known + slots, new.outranked, mask=stored)
    tl.store(known + 2 * slots, new.protected, mask=stored)
    tl.store(known + 3 * slots, tl.zeros_like(new.position) + NEVER, mask=stored)
    score = tl.load(scores + batch * scores_b + head * scores_h + index, mask=stored, other=0.0)
    tl.store(score_cache + row * slots + slot, score.to(score_cache.dtype.element_ty), mask=stored)
    target = row * slots + slot
    of_key = batch * key_b + head * key_h + index.to(tl.int64) * key_s
    of_value = batch * value_b + head * value_h + index.to(tl.int64) * value_s
    copy_rows(key_cache, target * shape.head_dim, key, of_key, stored, shape.head_dim, shape.at_once)
    copy_rows(value_cache, target * shape.value_dim, value, of_value, stored, shape.value_dim, shape.at_once_value)
    for of_group in tl.static_range(BIAS_GROUP):
        of_head = row * BIAS_GROUP + of_group
        added = new_biases(bias_cache, bias, batch, head * BIAS_GROUP + of_group, index, stored, bias_b, bias_h)
        tl.store(bias_cache + of_head * slots + slot, added, mask=stored)
    always = short.begin >= 0
    sequence = Sequence(
        short.begin, short.begin + count, short.oldest, always, always, always == 0, short.first, short.begin
    )
    finish_sequence(batch, heads * parts, length, floor, first, arrived, None, None, rollback, sequence)
