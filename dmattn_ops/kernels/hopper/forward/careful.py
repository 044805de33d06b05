"""Blocks of the SM 9.0 forward that are careful: values of keys that no query of theirs sees are set to 0 (`hopper/unseen.py`)."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.gluon_compat import meet
from dmattn_ops.kernels.hopper.unseen import CLEARED


class Sight(NamedTuple):
    """What decides which keys the queries of a block see, at one batch entry and head."""

    careful: Any  # whether values are cleared
    first: Any  # query of the block
    seqlen_q: Any
    seqlen_k: Any
    lo: Any
    hi: Any
    q_segments: Any
    k_segments: Any
    start: Any
    end: Any
    hidden_from: Any
    hidden_to: Any
    bias: Any  # of keys; -inf where a mask of packed keys hides one


@gluon.jit
def edge_of_band(begin, end, seqlen_q, seqlen_k, lo, hi, BN: gl.constexpr, HAS_LO: gl.constexpr, HAS_HI: gl.constexpr):
    """Return whether key tiles from `begin` to `end` hold a key that the band hides from every query, 1 or 0."""
    first = begin * BN
    behind = gl.minimum(end * BN, seqlen_k)
    edge = first < 0
    if HAS_LO:
        edge = edge | (first < lo)
    if HAS_HI:
        edge = edge | (behind > seqlen_q + hi)
    return edge.to(gl.int32)


@gluon.jit
def queries_that_see(key, sight, BM: gl.constexpr, MASK: gl.constexpr, HAS_LO: gl.constexpr, HAS_HI: gl.constexpr,
                     HIDDEN: gl.constexpr):  # fmt: skip
    """Return how many of a block's queries see each key, inside the band and its interval."""
    begin = gl.zeros_like(key) + sight.first
    stop = gl.zeros_like(key) + gl.minimum(sight.first + BM, sight.seqlen_q)
    if HAS_HI:
        begin = gl.maximum(begin, key - sight.hi)
    if HAS_LO:
        stop = gl.minimum(stop, key - sight.lo + 1)
    inside = key < sight.seqlen_k
    if MASK == "intervals":
        begin = gl.maximum(begin, gl.load(sight.start + key, mask=inside, other=0))
        stop = gl.minimum(stop, gl.load(sight.end + key, mask=inside, other=0))
    count = gl.maximum(stop - begin, 0)
    if HIDDEN:
        begin = gl.maximum(begin, gl.load(sight.hidden_from + key, mask=inside, other=0))
        stop = gl.minimum(stop, gl.load(sight.hidden_to + key, mask=inside, other=0))
        count -= gl.maximum(stop - begin, 0)
    return gl.where(inside, count, 0)


@gluon.jit
def seen_by_segment(key, sight, BM: gl.constexpr, HAS_LO: gl.constexpr, HAS_HI: gl.constexpr):
    """Return 1 for those of a slice of keys of which a query of the block has the same segment inside the band, else 0."""
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    own = gl.convert_layout(key, gl.SliceLayout(1, PAIRS))
    query = sight.first + gl.arange(0, BM, layout=gl.SliceLayout(0, PAIRS))
    of_key = gl.load(sight.k_segments + own, mask=own < sight.seqlen_k, other=-2)[:, None]
    if sight.q_segments is None:
        seen = of_key == gl.zeros_like(query)[None, :]
    else:
        seen = of_key == gl.load(sight.q_segments + query, mask=query < sight.seqlen_q, other=-3)[None, :]
    seen = seen & (query < sight.seqlen_q)[None, :]
    if HAS_HI:
        seen = seen & (own[:, None] <= query[None, :] + sight.hi)
    if HAS_LO:
        seen = seen & (own[:, None] >= query[None, :] + sight.lo)
    return gl.convert_layout(gl.max(seen.to(gl.int32), 1), key.type.layout)


@gluon.jit
def seen_by_bits(column, stage, words, NC: gl.constexpr):
    """Return 1 for those of 16 columns of a tile of mask bits, all in one word, that a query of the block sees, else 0."""
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    own = gl.convert_layout(column, gl.SliceLayout(1, PAIRS))
    word = gl.max(column, 0) >> 5
    slot = gl.arange(0, 4, layout=gl.SliceLayout(0, WORDS))
    seen = gl.zeros_like(own)
    for c in gl.static_range(NC):
        bits = words.index(stage * NC + c).reshape([64, 4]).load(WORDS)
        of_query = gl.sum(gl.where(slot[None, :] == word, bits, 0), 1)
        of_query = gl.convert_layout(of_query, gl.SliceLayout(0, PAIRS))
        seen = gl.maximum(seen, gl.max((of_query[None, :] >> (own & 31)[:, None]) & 1, 1))
    return gl.convert_layout(seen, column.type.layout)


@gluon.jit
def find_seen(
    found, first, column, stage, words, sight, BM: gl.constexpr, BN: gl.constexpr, NC: gl.constexpr,
    MASK: gl.constexpr, BY_BIAS: gl.constexpr, HAS_LO: gl.constexpr, HAS_HI: gl.constexpr, HIDDEN: gl.constexpr,
):  # fmt: skip
    """Store in `found`, `[BN]` in shared memory, which keys from `first` on a query of the block sees.

    `column` is where they begin in a tile of mask bits, of which stage `stage` holds the words.
    """
    KEYS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    for row in gl.static_range(0, BN, CLEARED):
        local = row + gl.arange(0, CLEARED, layout=KEYS)
        if MASK == "bits":
            seen = seen_by_bits(column + local, stage, words, NC)
        elif MASK == "segments":
            seen = seen_by_segment(first + local, sight, BM, HAS_LO, HAS_HI)
        else:
            seen = queries_that_see(first + local, sight, BM, MASK, HAS_LO, HAS_HI, HIDDEN)
        if BY_BIAS:
            added = gl.load(sight.bias + first + local, mask=first + local < sight.seqlen_k, other=0.0)
            seen = gl.where(added.to(gl.float32) != float("-inf"), seen, 0)
        found.slice(row, CLEARED, dim=0).store(seen)
    meet()
