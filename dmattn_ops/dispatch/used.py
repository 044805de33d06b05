"""How many keys of each batch entry a call uses, as part of its mask: kernels need not know of it.

An interval of queries for each key says exactly which keys are used, and which queries a band shows them to that is aligned
with the last used key. So no mask and masks of intervals become masks of intervals, in O(Sk) for each entry and a few small
operations. So do masks of keys (segments without those of queries), and all masks where there is one query, as in decoding.
Other segments give keys that are not used an id that no query has. Bits, and segments under a band that is aligned with the
last used key, become bits again. Nothing is read on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dmattn_ops.call import UNBOUNDED, Call, Mask, Used
from dmattn_ops.launching.recording import computed, do_not_repeat
from dmattn_ops.masks import layout
from dmattn_ops.masks.chunks import pack_in_chunks

_SMALLEST, _LARGEST = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max


def in_mask(call: Call) -> Call:
    """Return a call whose mask hides keys that are not used, and what the aligned band hides."""
    used = call.used
    if used is None or call.query.numel() == 0 or call.key.numel() == 0:
        return call
    mask, seqlen_q = call.mask, call.query.shape[1]
    aligned = used.lo > -UNBOUNDED or used.hi < UNBOUNDED
    if mask.kind in ("none", "intervals"):
        return call._replace(mask=_cut_intervals(mask, used, seqlen_q, call.key.shape[1]))
    if seqlen_q == 1 or (mask.kind == "segments" and mask.q_segments is None):
        return call._replace(mask=_cut_intervals(_as_intervals(call), used, seqlen_q, call.key.shape[1]))
    do_not_repeat()  # what is below calls operators
    if mask.kind == "segments" and not aligned:
        return call._replace(mask=_cut_segments(call, used))
    return call._replace(mask=_cut_bits(call, used))


def visible_keys(used: Used, seqlen_q: int, seqlen_k: int) -> tuple[Tensor, Tensor]:
    """Return the first query that sees each key, and the first that no longer does: int32 `[B, 1, Sk]`, both clamped to `0..Sq`."""
    return _starts(used.lengths, seqlen_q, seqlen_k, used.hi), _ends(used.lengths, seqlen_q, seqlen_k, used.lo)


def _starts(lengths: Tensor, seqlen_q: int, seqlen_k: int, hi: int) -> Tensor:
    lengths, keys = _places(lengths, seqlen_k)
    return (keys - (lengths - seqlen_q + hi)).clamp_(0, seqlen_q).to(torch.int32)


def _ends(lengths: Tensor, seqlen_q: int, seqlen_k: int, lo: int) -> Tensor:
    lengths, keys = _places(lengths, seqlen_k)
    ends = (keys - (lengths - seqlen_q + lo) + 1).clamp_(0, seqlen_q)
    return ends.masked_fill_(keys >= lengths, 0).to(torch.int32)


def _places(lengths: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of used keys, int64 `[B, 1, 1]`, inside of what there is, and the positions of keys."""
    return lengths.long().clamp(0, seqlen_k)[:, None, None], torch.arange(seqlen_k, device=lengths.device)


def _cut_intervals(mask: Mask, used: Used, seqlen_q: int, seqlen_k: int) -> Mask:
    """Return the mask of the intervals of a mask, if it has any, less what is not used or outside of the aligned band."""
    lengths, batch = used.lengths, used.lengths.shape[0]
    end = computed(_earlier_ends, lengths, seqlen_q, seqlen_k, used.lo, mask.end)
    start = None if mask.start is None else computed(_of_batch, mask.start, batch)
    if used.hi < UNBOUNDED:
        heads = 1 if mask.end is None else mask.end.shape[1]
        start = computed(_later_starts, lengths, seqlen_q, seqlen_k, used.hi, mask.start, heads)
    hidden = [None if part is None else computed(_of_batch, part, batch) for part in (mask.hidden_from, mask.hidden_to)]
    return Mask(start=start, end=end, hidden_from=hidden[0], hidden_to=hidden[1], at_most=mask.at_most)


def _earlier_ends(lengths: Tensor, seqlen_q: int, seqlen_k: int, lo: int, end: Tensor | None) -> Tensor:
    ends = _ends(lengths, seqlen_q, seqlen_k, lo)
    return ends if end is None else torch.minimum(ends, end)


def _later_starts(lengths: Tensor, seqlen_q: int, seqlen_k: int, hi: int, start: Tensor | None, heads: int) -> Tensor:
    starts = _starts(lengths, seqlen_q, seqlen_k, hi)
    return starts.expand(-1, heads, -1).contiguous() if start is None else torch.maximum(starts, start)


def _of_batch(part: Tensor, batch: int) -> Tensor:
    return part.expand(batch, -1, -1).contiguous()


def _as_intervals(call: Call) -> Mask:
    """Return the intervals of a mask that says the same of all queries; the band stays that of the call."""
    mask, options, seqlen_q, seqlen_k = call.mask, call.options, call.query.shape[1], call.key.shape[1]
    if mask.kind == "segments" and mask.q_segments is None:
        assert mask.k_segments is not None
        return Mask(end=computed(_ends_of_zeros, mask.k_segments, seqlen_q), at_most=mask.at_most)
    do_not_repeat()
    shown = layout.dense(mask, options.band_lo, options.band_hi, seqlen_q, seqlen_k)
    return Mask(end=shown[:, :, 0].to(torch.int32), at_most=mask.at_most)


def _ends_of_zeros(k_segments: Tensor, seqlen_q: int) -> Tensor:
    return (k_segments == 0).to(torch.int32) * seqlen_q


def _cut_segments(call: Call, used: Used) -> Mask:
    """Return segments in which keys that are not used have an id that no query has, with the lists of their tiles."""
    mask, options, seqlen_q = call.mask, call.options, call.query.shape[1]
    assert mask.q_segments is not None and mask.k_segments is not None
    lengths, keys = _places(used.lengths, call.key.shape[1])
    missing = _id_of_nobody(mask.q_segments)[:, None, None]
    k_segments = torch.where(keys < lengths, mask.k_segments, missing).contiguous()
    lists = torch.ops.dmattn.list_tiles(mask.q_segments, k_segments, seqlen_q, options.band_lo, options.band_hi)
    return mask._replace(row_tiles=lists[0], col_tiles=lists[1], k_segments=k_segments)


def _id_of_nobody(ids: Tensor) -> Tensor:
    """Return an id that none of `[B, S]` is, for each row: beside the least or the greatest, or in the first gap between two."""
    ordered = ids.sort(dim=-1).values
    least, greatest = ordered[:, 0], ordered[:, -1]
    after = torch.where(ordered[:, 1:].long() - ordered[:, :-1] > 1, ordered[:, :-1] + 1, _LARGEST)
    inside = after.amin(-1) if after.shape[-1] else greatest
    return torch.where(least > _SMALLEST, least - 1, torch.where(greatest < _LARGEST, greatest + 1, inside))


def _cut_bits(call: Call, used: Used) -> Mask:
    """Return bits of the pairs that a mask shows, less those of keys that are not used or outside of the aligned band."""
    mask, options, (batch, seqlen_q, _, _), seqlen_k = call.mask, call.options, call.query.shape, call.key.shape[1]
    start, end = visible_keys(used, seqlen_q, seqlen_k)
    segments, limits, heads = (mask.q_segments, mask.k_segments), (options.band_lo, options.band_hi), 1
    if mask.k_segments is not None:
        heads = mask.k_segments.shape[1]
    elif mask.row_bits is not None:  # which hold the band
        heads, limits = mask.row_bits.shape[1], (-UNBOUNDED, UNBOUNDED)

    def visible(first: int, stop: int) -> Tensor:
        shown = layout.intervals_mask(Mask(start=start, end=end), stop, first)
        return shown if mask.row_bits is None else shown & layout.bits_mask(mask, seqlen_k, stop, first)

    packed = pack_in_chunks(visible, segments, (batch * heads, seqlen_q, seqlen_k), limits)
    return Mask(*packed, at_most=mask.at_most)
