"""Begin and end of each position's document, in two launches: the ends of each span, then of each position."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _changes(ids, position, seqlen):
    """Return whether a document begins at each position; it does at `seqlen`, nowhere behind."""
    here = tl.load(ids + position, position < seqlen, other=0)
    before = tl.load(ids + position - 1, (position > 0) & (position < seqlen), other=0)
    return ((position == 0) | (here != before) | (position == seqlen)) & (position <= seqlen)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit(do_not_specialize=["seqlen", "spans", "ids_b"])
def find_changes(ids, changes, seqlen, spans, ids_b, SPAN: tl.constexpr):
    """Write the last begin of a document among the positions of a span (or 0), and the first among those after them.

    `changes` is `[rows, 2, spans]`; the second counts positions 1 to SPAN of the span, and is `seqlen` where none is there.
    """
    row = (tl.program_id(0) // spans).to(tl.int64)
    span = tl.program_id(0) % spans
    position = span * SPAN + tl.arange(0, SPAN)
    own = ids + row * ids_b
    last = tl.max(tl.where(_changes(own, position, seqlen), position, 0), axis=0)
    first = tl.min(tl.where(_changes(own, position + 1, seqlen), position + 1, seqlen), axis=0)
    tl.store(changes + row * 2 * spans + span, last)
    tl.store(changes + (row * 2 + 1) * spans + span, first)


@triton.jit(do_not_specialize=["seqlen", "spans", "ids_b"])
def write_bounds(ids, changes, bounds, seqlen, spans, ids_b, SPAN: tl.constexpr, MANY: tl.constexpr):
    """Write `bounds` `[rows, 2, seqlen]`: where the document of each position of a span begins, and where it ends."""
    row = (tl.program_id(0) // spans).to(tl.int64)
    span = tl.program_id(0) % spans
    position = span * SPAN + tl.arange(0, SPAN)
    own = ids + row * ids_b
    before = tl.zeros([MANY], tl.int32)
    behind = tl.zeros([MANY], tl.int32) + seqlen
    for other in range(0, spans, MANY):
        others = other + tl.arange(0, MANY)
        place = changes + row * 2 * spans + others
        before = tl.maximum(before, tl.load(place, others < span, other=0))
        behind = tl.minimum(behind, tl.load(place + spans, (others > span) & (others < spans), other=seqlen))
    begins = tl.where(_changes(own, position, seqlen), position, 0)
    ends = tl.where(_changes(own, position + 1, seqlen), position + 1, seqlen)
    first = tl.maximum(tl.associative_scan(begins, 0, _larger), tl.max(before, axis=0))
    last = tl.minimum(tl.associative_scan(ends, 0, _smaller, reverse=True), tl.min(behind, axis=0))
    inside = position < seqlen
    tl.store(bounds + row * 2 * seqlen + position, first, inside)
    tl.store(bounds + (row * 2 + 1) * seqlen + position, last, inside)
