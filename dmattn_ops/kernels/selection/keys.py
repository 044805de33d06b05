"""Keys as 64-bit numbers in the order of their scores, and sorted runs of them.

A key is its place, a 32-bit number that grows as scores fall, followed by `bits` bits of its position: a smaller number is
a better key, and no two of a row are equal. Runs of FINE and of CHUNK positions are sorted by document first, so that the
keys of a document have the same indices in its sorted run as in the row, in another order.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from dmattn_ops.kernels.constants import Constants
from dmattn_ops.launching.overlap import follow_kernel_before

NO_KEY = tl.constexpr((1 << 63) - 1)  # worse than every key


@dataclass(frozen=True, eq=False, repr=False)
class Traits(Constants):
    """What the kernels that sort keys and find their deaths are compiled for."""

    chunk: int  # positions, a power of two
    fine: int  # of a short run, and of a span
    kind: str  # of scores, as `load_keys` reads them
    documents: bool  # a row has several
    causal: bool

    @property
    def log_chunk(self) -> int:
        """The logarithm of a chunk's length to base 2."""
        return self.chunk.bit_length() - 1


@triton.jit
def load_keys(scores, position, inside, bits, KIND: tl.constexpr):
    """Load the keys at `position`; NO_KEY where not `inside`. KIND says what `scores` points at.

    "fp32" and "bf16" are read as integers, "fp16" as it is; "rank" is ranks, of which a smaller one is better. 16-bit
    scores give up the low bits that they do not have, so that searches by bisection take fewer steps.
    """
    if KIND == "rank":
        place = tl.load(scores + position, inside, other=0).to(tl.int64)
    else:
        if KIND == "fp16":
            word = tl.load(scores + position, inside, other=0).to(tl.float32).to(tl.int32, bitcast=True)
        else:
            word = tl.load(scores + position, inside, other=0).to(tl.int32)
        if KIND == "bf16":
            word = word << 16
        sign: tl.constexpr = -2147483648
        word = tl.where(word == sign, 0, word)  # -0
        falling = tl.where((word & 0x7FFFFFFF) > 0x7F800000, 0x7FFFFFFF, ~tl.where(word < 0, word ^ 0x7FFFFFFF, word))
        place = falling.to(tl.int64) - sign
        if KIND == "fp16":
            place = place >> 13
        if KIND == "bf16":
            place = place >> 16
    return tl.where(inside, (place << bits) | position, NO_KEY)


@triton.jit
def stop_of(death, position, first, last, keep_first, keep_last, IS_CAUSAL: tl.constexpr):
    """Return the ends of the ranges of queries that see keys which leave the best at `death`."""
    hidden = first
    if IS_CAUSAL:
        hidden = tl.minimum(tl.maximum(death, position + tl.minimum(keep_last, last - position)), last)
    return tl.where(position - first < keep_first, last, hidden)


@triton.jit(do_not_specialize=["seqlen", "size", "bits", "heads", "scores_b", "scores_h", "bounds_b"])
def sort_runs(
    scores, bounds, keys, coarse_runs, start, end,
    seqlen, size, bits, heads, scores_b, scores_h, bounds_b,
    T: tl.constexpr, COARSE: tl.constexpr,
):  # fmt: skip
    """Sort a chunk's runs, and write `start`, and `end` as if every key stayed to the end of its document.

    `size` is `seqlen` rounded up to whole chunks, `bounds` `[B or 1, 2, seqlen]` where documents begin and end. `keys`
    `[rows, chunks, 2, CHUNK]` takes a chunk's runs of FINE in its first half, `coarse_runs` `[rows, size]` all of it.
    """
    CHUNK: tl.constexpr = T.chunk
    FINE: tl.constexpr = T.fine
    KIND: tl.constexpr = T.kind
    LOG_CHUNK: tl.constexpr = T.log_chunk
    follow_kernel_before()
    chunks = size // CHUNK
    row = (tl.program_id(0) // chunks).to(tl.int64)
    origin = tl.program_id(0) % chunks * CHUNK
    local = tl.arange(0, CHUNK)
    position = origin + local
    inside = position < seqlen
    first = tl.zeros([CHUNK], tl.int32)
    last = tl.zeros([CHUNK], tl.int32) + seqlen
    if T.documents:
        own_bounds = bounds + row // heads * bounds_b
        first = tl.load(own_bounds + position, inside, other=0)
        last = tl.load(own_bounds + seqlen + position, inside, other=0)
    tl.store(start + row * seqlen + position, position if T.causal else first, inside)
    tl.store(end + row * seqlen + position, last, inside)

    key = load_keys(scores + row // heads * scores_b + row % heads * scores_h, position, inside, bits, KIND)
    word = ((key >> bits) << LOG_CHUNK) | local  # 44 bits at most
    if T.documents:
        word |= tl.maximum(first - origin, 0).to(tl.int64) << (32 + LOG_CHUNK)
    word = tl.where(inside, word, NO_KEY)
    runs = tl.reshape(tl.sort(tl.reshape(word, [CHUNK // FINE, FINE]), 1), [CHUNK])
    tl.store(keys + (row * size + origin) * 2 + local, _key_of(runs, origin, bits, CHUNK, LOG_CHUNK))
    if COARSE:
        tl.store(coarse_runs + row * size + position, _key_of(tl.sort(word), origin, bits, CHUNK, LOG_CHUNK))


@triton.jit
def _key_of(word, origin, bits, CHUNK: tl.constexpr, LOG_CHUNK: tl.constexpr):
    """Return the keys of sorted words."""
    key = (((word >> LOG_CHUNK) & 0xFFFFFFFF) << bits) | (origin + (word & (CHUNK - 1)))
    return tl.where(word == NO_KEY, NO_KEY, key)
