"""The keys that are among the best where a chunk begins, found in the sorted runs of the chunks before it."""

from __future__ import annotations

import triton
import triton.language as tl

from dmattn_ops.kernels.selection.keys import NO_KEY
from dmattn_ops.launching.overlap import follow_kernel_before

PIVOTS = tl.constexpr(4)  # that a turn compares all keys with, where lanes are left for them
_COMPARED = tl.constexpr(2048)  # pairs of a pivot and a run at most


@triton.jit
def split_runs(keys, run, low, high, count):
    """Return `low <= split <= high`, `count` in all above `low`, with every key before a split better than every one behind.

    Run `r` holds at most 4096 ascending keys, `keys + run[r] + low[r]` to `high[r] - 1`; `count` is at most what all hold.
    Each turn compares all runs with keys of a longest one that divide it evenly, and leaves one of its parts. Which one of
    equally long runs it is changes like a random number, so that few turns suffice where keys of one run are all better
    than those of the next, too. A step of the searches waits for memory: some pivots at once take fewer steps than one.
    """
    RUNS: tl.constexpr = low.shape[0]
    PARTS: tl.constexpr = max(1, min(PIVOTS, _COMPARED // RUNS))
    lane = tl.arange(0, RUNS)
    part = tl.arange(0, PARTS)
    left, within = count, tl.sum(high - low, axis=0)
    salt = tl.full((), 0x9E3779B9, tl.uint32)
    while (left > 0) & (within > left):
        mixed = (salt >> 20).to(tl.int32)  # 12 bits: no lane has the same number as another
        heaviest = tl.max(((high - low) << 12) | (lane ^ mixed), axis=0)
        length, longest = heaviest >> 12, lane == ((heaviest & 4095) ^ mixed)
        begin = tl.sum(tl.where(longest, run + low, 0), axis=0)
        pivot = tl.load(keys + begin + (length * (2 * part + 1)) // (2 * PARTS))
        first = tl.broadcast_to(low[:, None], [RUNS, PARTS])
        last = tl.broadcast_to(high[:, None], [RUNS, PARTS])
        steps = length
        while steps > 0:
            middle = (first + last) >> 1
            better = tl.load(keys + run[:, None] + middle, first < last, other=NO_KEY) <= pivot[None, :]
            first = tl.where(better, middle + 1, first)
            last = tl.where(better, last, middle)
            steps = steps >> 1
        found = tl.sum(first - low[:, None], axis=0)
        below = found <= left  # the pivot itself counts, so that it goes in either case
        behind = tl.where(below[None, :], high[:, None], first - longest[:, None].to(tl.int32))
        left -= tl.max(tl.where(below, found, 0), axis=0)
        low = tl.max(tl.where(below[None, :], first, low[:, None]), axis=1)
        high = tl.min(behind, axis=1)
        within = tl.sum(high - low, axis=0)
        salt = salt * 1664525 + 1013904223
    return tl.where(left > 0, high, low)


@triton.jit
def worst_of_best(keys, run, low, high, best, MOST: tl.constexpr):
    """Return the ranges of the runs that hold the worst MOST, or all if they are fewer, of the `best` best keys."""
    split = split_runs(keys, run, low, high, best)
    # What is further than MOST from the split in its own run is not among them.
    near = tl.maximum(low, split - MOST)
    return split_runs(keys, run, near, split, tl.maximum(best - MOST, 0) - tl.sum(near - low, axis=0)), split


@triton.jit
def _hides(first, origin, keep, CHUNK: tl.constexpr):
    """Return whether keys from before a chunk, of a document that began at `first`, may leave the best inside it."""
    return (first < origin) & (origin - first > keep - CHUNK)


@triton.jit(do_not_specialize=["size", "heads", "bounds_b", "keep"])
def sort_alive(
    coarse_runs, bounds, pieces, keys, size, heads, bounds_b, keep,
    CHUNK: tl.constexpr, RUNS: tl.constexpr, LOG_RUNS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Write, sorted, the keys that may leave the best inside a chunk, into the second half of `keys` `[rows, chunks, 2, CHUNK]`.

    They are the worst CHUNK of the best `keep` where the chunk begins. `pieces` `[rows, chunks - 1, 2, RUNS]` say which keys of
    each earlier run they are, for all chunks but the first: number `pieces[1]` and on, of which `pieces[0]` are in earlier runs.
    """
    follow_kernel_before()
    later = size // CHUNK - 1
    row = (tl.program_id(0) // later).to(tl.int64)
    chunk = tl.program_id(0) % later + 1
    origin = chunk * CHUNK
    coarse_runs += row * size
    first = 0
    if HAS_DOCUMENTS:
        first = tl.load(bounds + row // heads * bounds_b + origin)
    if _hides(first, origin, keep, CHUNK):
        best = tl.minimum(origin - first, keep)
        pieces += tl.program_id(0).to(tl.int64) * 2 * RUNS
        lane = tl.arange(0, RUNS)
        run = lane * CHUNK
        low = tl.where(lane < chunk, tl.minimum(tl.maximum(first - run, 0), CHUNK), CHUNK)
        high = tl.zeros([RUNS], tl.int32) + CHUNK
        low, high = worst_of_best(coarse_runs, run, low, high, best, CHUNK)
        length = high - low
        tl.store(pieces + lane, tl.cumsum(length, 0) - length)
        tl.store(pieces + RUNS + lane, low)
        tl.debug_barrier()
        slot = tl.arange(0, CHUNK)
        source = tl.zeros([CHUNK], tl.int32)  # the last piece that begins at the slot or before it
        for step in tl.static_range(LOG_RUNS):
            further = source + (RUNS >> (step + 1))
            source = tl.where(tl.load(pieces + further) <= slot, further, source)
        index = tl.load(pieces + RUNS + source) + slot - tl.load(pieces + source)
        key = tl.load(coarse_runs + source * CHUNK + index, slot < best, other=NO_KEY)
        tl.store(keys + (row * size + origin) * 2 + CHUNK + slot, tl.sort(key))
