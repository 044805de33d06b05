"""Which query tiles see a key tile in the SM 9.0 backward, and in which order: the same for all partitions."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.backward.order import downward_span
from dmattn_ops.kernels.hopper.backward.types import Block, Span, downwards
from dmattn_ops.kernels.hopper.constants import HEADER, TILE
from dmattn_ops.kernels.hopper.kinds import RAGGED, has_lists
from dmattn_ops.kernels.hopper.lists import counts_of, last_tile, named_tile
from dmattn_ops.kernels.hopper.ragged import load_tile


@gluon.jit
def block_at(place, record, problem, T: gl.constexpr):
    """Return the block of a place's key tile, or of the tile of packed sequences that has this record."""
    block = Block(
        place.tile, place.batch, place.batch, problem.seqlen_q, problem.seqlen_k, problem.band_lo, problem.band_hi, 0, 0
    )
    if T.MASK == RAGGED:
        own = load_tile(record)
        block = Block(
            own.first // T.BN, own.other, own.own, own.other.length, own.own.length,
            problem.band_lo - own.diagonal, problem.band_hi - own.diagonal, own.padded, own.own.begin,
        )  # fmt: skip
    return block


@gluon.jit
def band_tiles(tile, seqlen_q, seqlen_k, band_lo, band_hi, BM: gl.constexpr, BN: gl.constexpr):
    """Return the query tiles that see key tile `tile`, and those that see it all.

    Queries past the end are harmless (their lse is +inf), keys past the end are not: the last tile of a length that is
    not a multiple of BN has no full tiles.
    """
    key = tile * BN
    key_end = gl.minimum(key + BN, seqlen_k)
    q_first = gl.maximum(key - band_hi, 0)
    q_end = gl.minimum(key_end - band_lo, seqlen_q)
    first = q_first // BM
    end = gl.where(q_end > q_first, gl.maximum((gl.maximum(q_end, 0) + BM - 1) // BM, first), first)
    full_first = gl.minimum(gl.maximum((gl.maximum(key + BN - 1 - band_hi, 0) + BM - 1) // BM, first), end)
    full_q_end = gl.maximum(key - band_lo + 1, 0)
    full_end = gl.where(full_q_end >= seqlen_q, end, full_q_end // BM)
    full_end = gl.minimum(gl.maximum(full_end, full_first), end)
    full_end = gl.where(key + BN > seqlen_k, full_first, full_end)
    return Span(first, full_first, full_end, end)


@gluon.jit
def share_of_tiles(span, share, shares):
    """Return the `share`-th of equal shares of the query tiles of a span; shares follow each other."""
    tiles = span.end - span.first
    begin = span.first + tiles * share // shares
    stop = span.first + tiles * (share + 1) // shares
    full_first = gl.minimum(gl.maximum(span.full_first, begin), stop)
    return Span(begin, full_first, gl.minimum(gl.maximum(span.full_end, begin), stop), stop)


@gluon.jit
def span_of(block, share, shares, list_width, T: gl.constexpr):
    """Return the query tiles of a block as `band_tiles` or `downward_span` does.

    Where key tiles have several blocks each, they are those of its `share`. Where lists are walked, `full_end` is how many words
    a list has, and `end` the last tile that it may name.
    """
    span = Span(0, 0, 0, 0)
    if has_lists(T.MASK):
        span = Span(0, 0, list_width, last_tile(block.seqlen_q))
    else:
        span = band_tiles(block.tile, block.seqlen_q, block.seqlen_k, block.band_lo, block.band_hi, T.BM, T.BN)
        if shares is not None:
            span = share_of_tiles(span, share, shares)
        if downwards(T):
            span = downward_span(span, T.HAS_LO)
    return span


@gluon.jit
def rounds_of(group, INTERLEAVED: gl.constexpr):
    """Return (rounds over the query tiles, query heads at each tile of a round), for `group` query heads."""
    if INTERLEAVED:
        return 1, group
    return group, 1


@gluon.jit
def head_steps(record, span, T: gl.constexpr):
    """Return (steps without a test, steps with one) of one query head."""
    if has_lists(T.MASK):
        n_partial, n_full = counts_of(record, span.full_end)
        n_partial *= TILE // T.BM
        n_full *= TILE // T.BM
    else:
        n_full = span.full_end - span.full_first
        n_partial = span.end - span.first - n_full
    return n_full, n_partial


@gluon.jit
def full_tile(t, record, n_partial, span, T: gl.constexpr):
    """Return the query tile of the `t`-th step without a test."""
    R: gl.constexpr = TILE // T.BM
    if has_lists(T.MASK):
        m = named_tile(gl.load(record + HEADER + (n_partial + t) // R), span.end) * R + t % R
    else:
        m = span.full_first + t
        if downwards(T):
            m = span.full_end - 1 - t
    return m


@gluon.jit
def partial_tile(t, record, n_partial, span, T: gl.constexpr):
    """Return the query tile of the `t`-th step with a test; anything where there is no such step."""
    R: gl.constexpr = TILE // T.BM
    if has_lists(T.MASK):
        m = named_tile(gl.load(record + HEADER + t // R, mask=t < n_partial, other=0), span.end) * R + t % R
    else:
        before = span.full_first - span.first
        m = gl.where(t < before, span.first + t, span.full_end + t - before)
        if downwards(T):
            m = span.full_first - 1 - t
    return m


@gluon.jit
def step_tile(t, n_full, n_partial, record, span, T: gl.constexpr):
    """Return the query tile of the `t`-th step of a head: those without a test come first."""
    if t < n_full:
        m = full_tile(t, record, n_partial, span, T)
    else:
        m = partial_tile(t - n_full, record, n_partial, span, T)
    return m
