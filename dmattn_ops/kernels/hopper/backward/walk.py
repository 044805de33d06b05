"""Which query tiles see a key tile in the SM 9.0 backward, and in which order: the same for all partitions."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.call import HEADER as _HEADER
from dmattn_ops.call import TILE as _TILE
from dmattn_ops.kernels.hopper.backward.order import downward_span
from dmattn_ops.kernels.hopper.ragged import load_tile

HEADER = gl.constexpr(_HEADER)
TILE = gl.constexpr(_TILE)
NO_LISTS = gl.constexpr(0)
BIT_LISTS = gl.constexpr(1)
SEGMENT_LISTS = gl.constexpr(2)
INTERVAL_LISTS = gl.constexpr(3)
RAGGED = gl.constexpr(4)  # no list, but a record for each key tile of packed sequences (`kernels/ragged.py`)


class Block(NamedTuple):
    """Where a block's keys and the queries that may see them lie: in the whole call, or in one of packed sequences."""

    tile: Any  # of keys
    queries: Any  # the place of rows (`ragged.py`)
    keys: Any
    seqlen_q: Any
    seqlen_k: Any
    band_lo: Any
    band_hi: Any
    padded: Any  # rows of the workspaces before the first query
    first_key: Any  # in tensors that have a number for each key of all sequences


@gluon.jit
def block_at(tile, batch, record, limits, LISTS: gl.constexpr, BN: gl.constexpr):
    """Return the block of key tile `tile` of a batch entry, or of the tile of packed sequences that has this record."""
    seqlen_q, seqlen_k, band_lo, band_hi, _ = limits
    block = Block(tile, batch, batch, seqlen_q, seqlen_k, band_lo, band_hi, 0, 0)
    if LISTS == RAGGED:
        own = load_tile(record)
        block = Block(
            own.first // BN, own.other, own.own, own.other.length, own.own.length,
            band_lo - own.diagonal, band_hi - own.diagonal, own.padded, own.own.begin,
        )  # fmt: skip
    return block


@gluon.jit
def band_tiles(tile, seqlen_q, seqlen_k, band_lo, band_hi, BM: gl.constexpr, BN: gl.constexpr):
    """Return (first, full_first, full_end, end): the query tiles that see key tile `tile`, and those that see it all.

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
    return first, full_first, full_end, end


@gluon.jit
def share_of_tiles(span, share, shares):
    """Return the `share`-th of equal shares of the query tiles of a span; shares follow each other."""
    first, full_first, full_end, end = span
    tiles = end - first
    begin = first + tiles * share // shares
    stop = first + tiles * (share + 1) // shares
    full_first = gl.minimum(gl.maximum(full_first, begin), stop)
    return begin, full_first, gl.minimum(gl.maximum(full_end, begin), stop), stop


@gluon.jit
def span_of(
    block, share, shares, LISTS: gl.constexpr, HAS_LO: gl.constexpr, DOWNWARDS: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr,
):  # fmt: skip
    """Return the query tiles of a block as `band_tiles` or `downward_span` does, zeros where lists are walked.

    Where key tiles have several blocks each, they are those of its `share`.
    """
    span = (0, 0, 0, 0)
    if LISTS == NO_LISTS or LISTS == RAGGED:
        span = band_tiles(block.tile, block.seqlen_q, block.seqlen_k, block.band_lo, block.band_hi, BM, BN)
        if shares is not None:
            span = share_of_tiles(span, share, shares)
        if DOWNWARDS:
            span = downward_span(span, HAS_LO)
    return span


@gluon.jit
def rounds_of(group, INTERLEAVED: gl.constexpr):
    """Return (rounds over the query tiles, query heads at each tile of a round), for `group` query heads."""
    if INTERLEAVED:
        return 1, group
    return group, 1


@gluon.jit
def head_steps(record, span, LISTS: gl.constexpr, BM: gl.constexpr):
    """Return (steps without a test, steps with one) of one query head."""
    first, full_first, full_end, end = span
    if LISTS == NO_LISTS or LISTS == RAGGED:
        n_full = full_end - full_first
        n_partial = end - first - n_full
    else:
        n_full = gl.load(record + 2) * (TILE // BM)
        n_partial = gl.load(record + 1) * (TILE // BM)
    return n_full, n_partial


@gluon.jit
def full_tile(t, record, n_partial, span, LISTS: gl.constexpr, BM: gl.constexpr, DOWNWARDS: gl.constexpr):
    """Return the query tile of the `t`-th step without a test."""
    R: gl.constexpr = TILE // BM
    if LISTS == NO_LISTS or LISTS == RAGGED:
        m = span[1] + t
        if DOWNWARDS:
            m = span[2] - 1 - t
    else:
        m = gl.load(record + HEADER + (n_partial + t) // R) * R + t % R
    return m


@gluon.jit
def partial_tile(t, record, n_partial, span, LISTS: gl.constexpr, BM: gl.constexpr, DOWNWARDS: gl.constexpr):
    """Return the query tile of the `t`-th step with a test; anything where there is no such step."""
    R: gl.constexpr = TILE // BM
    if LISTS == NO_LISTS or LISTS == RAGGED:
        first, full_first, full_end, _ = span
        before = full_first - first
        m = gl.where(t < before, first + t, full_end + t - before)
        if DOWNWARDS:
            m = full_first - 1 - t
    else:
        m = gl.load(record + HEADER + t // R, mask=t < n_partial, other=0) * R + t % R
    return m


@gluon.jit
def step_tile(t, n_full, n_partial, record, span, LISTS: gl.constexpr, BM: gl.constexpr, DOWNWARDS: gl.constexpr):
    """Return the query tile of the `t`-th step of a head: those without a test come first."""
    if t < n_full:
        m = full_tile(t, record, n_partial, span, LISTS, BM, DOWNWARDS)
    else:
        m = partial_tile(t - n_full, record, n_partial, span, LISTS, BM, DOWNWARDS)
    return m
