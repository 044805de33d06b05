"""The deaths of keys: for each FINE positions, which of the best keys leave there, and when."""

from __future__ import annotations

import triton
import triton.language as tl

from dmattn_ops.kernels.selection.alive import worst_of_best
from dmattn_ops.kernels.selection.keys import load_keys, stop_of

_BLOCK = tl.constexpr(8)  # keys that are compared with all others at a time


@triton.jit
def _ones(word):
    """Count the bits of 32-bit words that are set."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return ((((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _place_of_bit(word, number):
    """Return the place of set bit `number`, counted from 1, of which a word has so many."""
    place = tl.zeros_like(number)
    for step in tl.static_range(5):
        half: tl.constexpr = 16 >> step
        here = _ones(word & ((1 << half) - 1))
        beyond = number > here
        number = tl.where(beyond, number - here, number)
        place = tl.where(beyond, place + half, place)
        word = tl.where(beyond, word >> half, word)
    return place


@triton.jit
def _nth_better(
    key, first, number, scores, own_bounds, origin, seqlen, bits,
    FINE: tl.constexpr, KIND: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Return the position of the `number`-th better key of the same document from `origin` on; `seqlen` if too far.

    32 keys at a time become the bits of a word for each of `key`.
    """
    words = tl.zeros([FINE], tl.uint32)
    begin = tl.zeros([FINE], tl.int32) + seqlen
    nth = tl.zeros([FINE], tl.int32)
    for word_begin in range(origin, origin + FINE, 32):
        word = tl.zeros([FINE], tl.uint32)
        for block in range(0, 32, _BLOCK):
            bit = block + tl.arange(0, _BLOCK)
            position = word_begin + bit
            other = load_keys(scores, position, position < seqlen, bits, KIND)
            better = other[:, None] < key[None, :]
            if HAS_DOCUMENTS:
                other_first = tl.load(own_bounds + position, position < seqlen, other=0)
                better &= other_first[:, None] == first[None, :]
            word |= tl.sum(better.to(tl.uint32) << bit[:, None].to(tl.uint32), axis=0)
        count = _ones(word)
        here = (number > 0) & (number <= count)
        words = tl.where(here, word, words)
        begin = tl.where(here, word_begin, begin)
        nth = tl.where(here, number, nth)
        number -= count
    return tl.where(nth > 0, begin + _place_of_bit(words, nth), seqlen)


@triton.jit
def _gather(keys, run, low, high, count, FINE: tl.constexpr):
    """Load the `count` keys, at most FINE, that lie in the runs' ranges, and sort them; -1 comes first where they are fewer."""
    slot = tl.arange(0, FINE)
    length = high - low
    begin = tl.cumsum(length, 0) - length
    after = slot[:, None] - begin[None, :]
    there = (after >= 0) & (after < length[None, :])
    place = tl.sum(tl.where(there, (run + low)[None, :] + after, 0), axis=1)
    return tl.sort(tl.load(keys + place, slot < count, other=-1))


@triton.jit(do_not_specialize=[
    "seqlen", "size", "bits", "heads", "alive_offset", "scores_b", "scores_h", "bounds_b", "keep", "keep_first", "keep_last"
])  # fmt: skip
def write_deaths(
    scores, bounds, keys, end,
    seqlen, size, bits, heads, alive_offset, scores_b, scores_h, bounds_b, keep, keep_first, keep_last,
    CHUNK: tl.constexpr, FINE: tl.constexpr, KIND: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Write `end` of the keys that leave the best `keep` at one of FINE positions, those that never enter them included.

    `keys` are the sorted runs of FINE positions, and `alive_offset` further the best keys at the begin of each chunk. A key
    that was among the best before can leave only if it was among the worst FINE of them, and does so at the position
    at which as many better keys have come as there were places for them.
    """
    spans = tl.cdiv(seqlen, FINE)
    row = (tl.program_id(0) // spans).to(tl.int64)
    origin = tl.program_id(0) % spans * FINE
    chunk_origin = origin // CHUNK * CHUNK
    own_scores = scores + row // heads * scores_b + row % heads * scores_h
    own_bounds = bounds
    position = origin + tl.arange(0, FINE)
    inside = position < seqlen
    first = tl.zeros([FINE], tl.int32)
    last = tl.zeros([FINE], tl.int32) + seqlen
    first_origin, last_origin = 0, seqlen
    if HAS_DOCUMENTS:
        own_bounds += row // heads * bounds_b
        first = tl.load(own_bounds + position, inside, other=seqlen)
        last = tl.load(own_bounds + seqlen + position, inside, other=seqlen)
        first_origin, last_origin = tl.load(own_bounds + origin), tl.load(own_bounds + seqlen + origin)
    if tl.max(position - first, axis=0) >= keep:
        own = load_keys(own_scores, position, inside, bits, KIND)
        best = tl.minimum(origin - first_origin, keep)
        ahead = tl.zeros([FINE], tl.int32)
        if HAS_DOCUMENTS:
            ahead = tl.where(first == first_origin, best, 0)
        else:
            ahead += best
        if (best > 0) & (origin - first_origin > keep - FINE):
            lane = tl.arange(0, CHUNK // FINE)  # the last one takes the keys from before the chunk
            is_alive = lane == CHUNK // FINE - 1
            begin = chunk_origin + lane * FINE
            low = tl.where(begin < origin, tl.minimum(tl.maximum(first_origin - begin, 0), FINE), FINE)
            high = tl.zeros_like(low) + FINE
            before = tl.maximum(tl.minimum(chunk_origin - first_origin, keep), 0)
            kept = tl.minimum(before, CHUNK)
            low = tl.where(is_alive, 0, low)
            high = tl.where(is_alive, kept, high)
            run = tl.where(is_alive, alive_offset + chunk_origin, begin.to(tl.int64))
            own_keys = keys + row * size
            low, high = worst_of_best(own_keys, run, low, high, best - (before - kept), FINE)
            count = tl.minimum(best - (before - kept), FINE)
            candidate = _gather(own_keys, run, low, high, count, FINE)
            not_better = tl.sum((candidate[:, None] >= own[None, :]).to(tl.int32), axis=0)
            ahead -= tl.where(first == first_origin, not_better, 0)
            rank = tl.arange(0, FINE)
            its_first = tl.zeros([FINE], tl.int32) + first_origin
            death = _nth_better(
                candidate, its_first, keep - best + FINE - rank, own_scores, own_bounds, origin, seqlen, bits,
                FINE, KIND, HAS_DOCUMENTS,
            )  # fmt: skip
            its_position = (candidate & ((tl.full((), 1, tl.int64) << bits) - 1)).to(tl.int32)
            stop = stop_of(death, its_position, first_origin, last_origin, keep_first, keep_last, IS_CAUSAL)
            tl.store(end + row * seqlen + its_position, stop, (rank >= FINE - count) & (death < seqlen))
        number = keep - ahead
        death = _nth_better(
            own, first, number, own_scores, own_bounds, origin, seqlen, bits, FINE, KIND, HAS_DOCUMENTS
        )  # fmt: skip
        death = tl.where(number <= 0, position, tl.maximum(position, death))
        stop = stop_of(death, position, first, last, keep_first, keep_last, IS_CAUSAL)
        tl.store(end + row * seqlen + position, stop, inside & (death < seqlen))
