"""What a mask shows inside a step of the portable kernels: bits, segments or intervals, the band, and the ends."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dmattn_ops.call import WORD_BITS as _WORD_BITS
from dmattn_ops.kernels.portable.places import head_offset

WORD_BITS = tl.constexpr(_WORD_BITS)


class BitArray(NamedTuple):
    """The bits of the owned side with their strides."""

    bits: Any
    bits_b: Any
    bits_h: Any
    bits_r: Any
    group: Any  # query heads that share a head of them


class KeyArrays(NamedTuple):
    """The arrays of a mask that have an element for each key: segments, or the ends of intervals. All have the same strides."""

    segments: Any
    start: Any
    end: Any
    hidden_from: Any
    hidden_to: Any
    keys_b: Any
    keys_h: Any
    group: Any  # query heads that share a head of them


class MaskArrays(NamedTuple):
    """The tensors of a mask, but for its lists."""

    bits: Any  # BitArray
    keys: Any  # KeyArrays
    q_segments: Any
    q_segments_b: Any


class HeadMask(NamedTuple):
    """The mask of one head of one sequence, and the band: owned `o` meets walked `w` iff `o + lo <= w <= o + hi`."""

    bits: Any
    bits_r: Any
    q_segments: Any
    k_segments: Any
    start: Any
    end: Any
    hidden_from: Any
    hidden_to: Any
    lo: Any
    hi: Any


class Marks(NamedTuple):
    """Loaded elements of a mask for some rows: segments of either side, or the interval of queries that see each key."""

    segment: Any
    start: Any
    end: Any
    hidden_from: Any
    hidden_to: Any


class Reach(NamedTuple):
    """The walked rows that band and end let a block of owned rows see: others hold nothing for it."""

    begin: Any  # the first
    end: Any  # one behind the last


@triton.jit
def mask_of_head(arrays, place, head, band, features: tl.constexpr):
    """Return the mask of a query head; `band` is that of the owned side (`places.band_of`)."""
    bits, q_segments, k_segments = 0, 0, 0
    start, end = 0, 0
    hidden_from, hidden_to = 0, 0
    of_bits, of_keys = arrays.bits, arrays.keys
    keys = head_offset(place.batch, head // of_keys.group, of_keys.keys_b, of_keys.keys_h) + place.k_begin
    if features.mask == "bits":
        bits = of_bits.bits + head_offset(place.batch, head // of_bits.group, of_bits.bits_b, of_bits.bits_h)
    if features.query_segments:
        q_segments = arrays.q_segments + place.batch.to(tl.int64) * arrays.q_segments_b + place.q_begin
    if features.mask == "segments":
        k_segments = of_keys.segments + keys
    if features.mask == "intervals":
        start, end = of_keys.start + keys, of_keys.end + keys
        if features.hidden:
            hidden_from, hidden_to = of_keys.hidden_from + keys, of_keys.hidden_to + keys
    return HeadMask(bits, of_bits.bits_r, q_segments, k_segments, start, end, hidden_from, hidden_to, band.lo, band.hi)


@triton.jit
def query_marks(head, queries, features: tl.constexpr):
    """Load the marks of `queries`: their segments, 0 where there are none; past the end that of the last."""
    segment = queries * 0
    if features.query_segments:
        segment = tl.load(head.mask.q_segments + tl.minimum(queries, head.place.length_q - 1))
    return Marks(segment, 0, 0, 0, 0)


@triton.jit
def key_marks(head, keys, features: tl.constexpr):
    """Load the marks of `keys`: their segments, or their intervals up to the end of the queries."""
    mask = head.mask
    inside = keys < head.place.length_k
    segment, start, end = 0, 0, 0
    hidden_from, hidden_to = 0, 0
    if features.mask == "segments":
        segment = tl.load(mask.k_segments + keys, mask=inside, other=0)
    if features.mask == "intervals":
        start = tl.load(mask.start + keys, mask=inside, other=0)
        end = tl.minimum(tl.load(mask.end + keys, mask=inside, other=0), head.place.length_q)
        if features.hidden:
            hidden_from = tl.load(mask.hidden_from + keys, mask=inside, other=0)
            hidden_to = tl.load(mask.hidden_to + keys, mask=inside, other=0)
    return Marks(segment, start, end, hidden_from, hidden_to)


@triton.jit
def visibility(
    head,
    queries,
    keys,
    owned,
    walked,
    walked_first,
    features: tl.constexpr,
    KEYS_OWNED: tl.constexpr,
):
    """Return the visible pairs `[owned, walked]` of a partial step: by bits alone, or by marks, band and end.

    `queries` and `keys` are marks; `owned` and `walked` are the numbers of rows, those of `walked` from `walked_first` on.
    """
    mask = head.mask
    OWNED: tl.constexpr = owned.shape[0]
    WALKED: tl.constexpr = walked.shape[0]
    if features.mask == "bits":
        # A word holds 32 walked rows. One column of words at a time keeps the block in the layout of the scores: a
        # [OWNED, words, 32] tensor would have to pass through shared memory.
        place = walked - walked_first
        words = mask.bits + owned.to(tl.int64) * mask.bits_r + walked_first // WORD_BITS
        word = tl.broadcast_to(tl.load(words)[:, None], (OWNED, WALKED))
        for index in tl.static_range(1, WALKED // WORD_BITS):
            within = place // WORD_BITS == index
            word = tl.where(within[None, :], tl.load(words + index)[:, None], word)
        visible = ((word >> (walked % WORD_BITS)[None, :]) & 1) != 0
    else:
        walked_end = head.place.length_q if KEYS_OWNED else head.place.length_k
        visible = tl.broadcast_to((walked < walked_end)[None, :], (OWNED, WALKED))
        if features.banded:
            distance = walked[None, :] - owned[:, None]
            visible = visible & (distance >= mask.lo) & (distance <= mask.hi)
        if features.mask == "segments":
            if KEYS_OWNED:
                visible = visible & (keys.segment[:, None] == queries.segment[None, :])
            else:
                visible = visible & (queries.segment[:, None] == keys.segment[None, :])
        if features.mask == "intervals":
            if KEYS_OWNED:
                visible = visible & in_interval(walked[None, :], keys.start[:, None], keys.end[:, None])
                if features.hidden:
                    hidden = in_interval(walked[None, :], keys.hidden_from[:, None], keys.hidden_to[:, None])
                    visible = visible & (hidden == 0)
            else:
                visible = visible & in_interval(owned[:, None], keys.start[None, :], keys.end[None, :])
                if features.hidden:
                    hidden = in_interval(owned[:, None], keys.hidden_from[None, :], keys.hidden_to[None, :])
                    visible = visible & (hidden == 0)
    return visible


@triton.jit
def rows_in_reach(mask, first_owned, last_owned, walked_end, features: tl.constexpr):
    """Return the walked rows that owned rows `first_owned ... last_owned` may see, by band and end.

    Steps that are tested load no others: a product of a probability of 0 and a NaN is NaN.
    """
    begin = 0
    if features.banded:
        begin = first_owned + mask.lo
        walked_end = tl.minimum(walked_end, tl.where(mask.lo <= mask.hi, last_owned + mask.hi + 1, 0))
    return Reach(begin, walked_end)


@triton.jit
def some_nan(sums):
    """Return whether one of `sums` `[COUNT, WIDTH]` is NaN: what nobody sees may be why, and all is computed again without it.

    Under a band alone that is not loaded. Other masks would cost each tested step a pass over its rows.
    """
    rows = tl.max((sums != sums).to(tl.int32), 1)
    return tl.max(tl.reshape(rows, (1, sums.shape[0])), 1).item() != 0


@triton.jit
def in_interval(query, start, end):
    """Return whether `start <= query < end`."""
    return (query >= start) & (query < end)
