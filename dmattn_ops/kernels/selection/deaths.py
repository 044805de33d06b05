"""The deaths of keys: for each FINE positions, which of the best keys leave there, and when."""

from __future__ import annotations

import triton
import triton.language as tl

from dmattn_ops.kernels.selection.alive import worst_of_best
from dmattn_ops.kernels.selection.keys import NO_KEY, load_keys, stop_of


@triton.jit
def _ones(word):
    """Count the bits of 32-bit words that are set."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return ((((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _bits_below(place):
    """Return 32-bit words in which all bits below `place` are set, which may be outside of 0 to 32."""
    count = tl.minimum(tl.maximum(place, 0), 32).to(tl.uint32)
    ones = tl.full(place.shape, 0xFFFFFFFF, tl.uint32)
    return ones ^ ((ones << (count >> 1)) << (count - (count >> 1)))  # in two shifts: none by 32 is defined


@triton.jit
def _place_of_bit(word, number):
    """Return the place of set bit `number`, counted from 1, of which a word has so many."""
    place = tl.zeros_like(number)
    for step in tl.static_range(5):
        here = _ones(word & ((1 << (16 >> step)) - 1))
        beyond = number > here
        number = tl.where(beyond, number - here, number)
        place = tl.where(beyond, place + (16 >> step), place)
        word = tl.where(beyond, word >> (16 >> step), word)
    return place


@triton.jit
def _nth_better(valid, number, position, first, last, origin, seqlen, FINE: tl.constexpr):
    """Return the position of the `number`-th better key of the same document from `origin` on; `seqlen` if too far.

    The keys that these describe are ascending. Those from `origin` on have a bit each, so that the running sum of bits
    before a key is the set of the better ones, 32 positions a word.
    """
    word = tl.zeros([2 * FINE], tl.uint32)
    begin = tl.zeros([2 * FINE], tl.int32) + seqlen
    nth = tl.zeros([2 * FINE], tl.int32)
    for step in tl.static_range(FINE // 32):
        place = position - origin - 32 * step
        own = tl.where(
            valid & (place >= 0) & (place < 32), tl.full([2 * FINE], 1, tl.uint32) << (place & 31).to(tl.uint32), 0
        )
        better = tl.cumsum(own, 0) - own
        better &= _bits_below(last - origin - 32 * step) ^ _bits_below(first - origin - 32 * step)
        count = _ones(better)
        here = (number > 0) & (number <= count)
        word = tl.where(here, better, word)
        begin = tl.where(here, origin + 32 * step, begin)
        nth = tl.where(here, number, nth)
        number -= count
    return tl.where(nth > 0, begin + _place_of_bit(word, nth), seqlen)


@triton.jit
def _gather(keys, run, low, high, FINE: tl.constexpr):
    """Load the keys, at most FINE, that lie in the runs' ranges; NO_KEY behind them."""
    slot = tl.arange(0, FINE)
    length = high - low
    begin = tl.cumsum(length, 0) - length
    after = slot[:, None] - begin[None, :]
    there = (after >= 0) & (after < length[None, :])
    place = tl.sum(tl.where(there, (run + low)[None, :] + after, 0), axis=1)
    return tl.load(keys + place, slot < tl.sum(length, axis=0), other=NO_KEY)


@triton.jit
def _candidates(keys, origin, first, best, keep, CHUNK: tl.constexpr, FINE: tl.constexpr):
    """Load the worst FINE of the `best` best keys before `origin`, of a document that began at `first`.

    `keys` are the chunk's sorted runs of FINE keys, and behind them the worst CHUNK of the best at its begin.
    """
    chunk_origin = origin // CHUNK * CHUNK
    before = tl.maximum(tl.minimum(chunk_origin - first, keep), 0)  # how many were the best there
    kept = tl.minimum(before, CHUNK)
    lane = tl.arange(0, CHUNK // FINE)
    is_before = lane == CHUNK // FINE - 1  # no span needs its chunk's last run
    begin = lane * FINE
    low = tl.minimum(tl.maximum(first - chunk_origin - begin, 0), FINE)
    low = tl.where(is_before, 0, tl.where(chunk_origin + begin < origin, low, FINE))
    high = tl.where(is_before, kept, FINE)
    run = tl.where(is_before, CHUNK, begin)
    low, high = worst_of_best(keys, run, low, high, best - (before - kept), FINE)
    return _gather(keys, run, low, high, FINE)


@triton.jit(do_not_specialize=[
    "seqlen", "size", "bits", "heads", "scores_b", "scores_h", "bounds_b", "keep", "keep_first", "keep_last"
])  # fmt: skip
def write_deaths(
    scores, bounds, keys, end,
    seqlen, size, bits, heads, scores_b, scores_h, bounds_b, keep, keep_first, keep_last,
    T: tl.constexpr,
):  # fmt: skip
    """Write `end` of the keys that leave the best `keep` at one of FINE positions, those that never enter them included.

    A key that was among the best before can leave only if it was among the worst FINE of them. It does so, as any key, at
    the position at which so many better ones have come, since `origin`, that `keep` are ahead of it.
    """
    CHUNK: tl.constexpr = T.chunk
    FINE: tl.constexpr = T.fine
    KIND: tl.constexpr = T.kind
    spans = tl.cdiv(seqlen, FINE)
    row = (tl.program_id(0) // spans).to(tl.int64)
    origin = tl.program_id(0) % spans * FINE
    own_scores = scores + row // heads * scores_b + row % heads * scores_h
    own_bounds = bounds
    here = origin + tl.arange(0, FINE)
    inside = here < seqlen
    longest, first_origin = origin + FINE, 0
    if T.documents:
        own_bounds += row // heads * bounds_b
        longest = tl.max(here + 1 - tl.load(own_bounds + here, inside, other=seqlen), axis=0)
        first_origin = tl.load(own_bounds + origin)
    if longest > keep:
        best = tl.minimum(origin - first_origin, keep)
        candidate = tl.full([FINE], NO_KEY, tl.int64)
        if (best > 0) & (origin - first_origin > keep - FINE):
            own_keys = keys + (row * size + origin // CHUNK * CHUNK) * 2
            candidate = _candidates(own_keys, origin, first_origin, best, keep, CHUNK, FINE)
        own = load_keys(own_scores, here, inside, bits, KIND)
        # All 2 * FINE in order, with a last bit that is set for candidates.
        candidate = tl.where(candidate == NO_KEY, NO_KEY, 2 * candidate + 1)
        own = tl.where(inside, 2 * own, NO_KEY)
        word = tl.sort(tl.reshape(tl.join(candidate, own), [2 * FINE]))
        valid = word != NO_KEY
        is_candidate = (valid & ((word & 1) == 1)).to(tl.int32)
        not_better = tl.sum(is_candidate, axis=0) - tl.cumsum(is_candidate, 0) + is_candidate
        key = word >> 1
        position = tl.where(valid, key & ((tl.full((), 1, tl.int64) << bits) - 1), 0).to(tl.int32)
        first = tl.zeros([2 * FINE], tl.int32)
        last = first + seqlen
        ahead = best - not_better
        if T.documents:
            first = tl.load(own_bounds + position, valid, other=0)
            last = tl.load(own_bounds + seqlen + position, valid, other=0)
            ahead = tl.where(first == first_origin, ahead, 0)
        number = keep - ahead
        death = _nth_better(valid, number, position, first, last, origin, seqlen, FINE)
        death = tl.where(number <= 0, position, tl.maximum(position, death))
        stop = stop_of(death, position, first, last, keep_first, keep_last, T.causal)
        tl.store(end + row * seqlen + position, stop, valid & (death < seqlen))
