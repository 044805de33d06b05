"""Masks from what users have: `prepare_mask`, `dynamic_mask`, and what a call makes of a plain tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from dmattn_ops import symbolic
from dmattn_ops.bands import NO_BAND, Band, CausalFrom, Window, band_of, visibility
from dmattn_ops.call import NO_MASK, UNBOUNDED, Mask
from dmattn_ops.checks import dtensors, require, validation, values
from dmattn_ops.masks import layout
from dmattn_ops.masks.block_mask import from_block_mask
from dmattn_ops.masks.documents import (
    Documents,
    Intervals,
    Pair,
    as_integers,
    clipped_to_runs,
    id_pair,
    require_fitting,
    segments_of,
)
from dmattn_ops.masks.tile_mask import TileMask, from_dense, from_intervals, from_packed, from_segments
from dmattn_ops.ops import schemas

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_NAMES_ELSEWHERE = {
    "causal": "is_causal",
    "attn_mask": "mask",
    "attention_mask": "mask",
    "padding_mask": "mask, [B, Sk]",
    "padding": "documents: padding on one side of each sequence, [B, S], is a document of its own; DynamicMaskAttention of"
    " dmattn_ops.nn takes padding as it is",
    "block_mask": "mask",
    "window": "window_size",
    "cu_seqlens": f"documents, {require.IDS_OF_OFFSETS}",
    "top_k": "keep",
    "k": "keep",
}


def prepare_mask(
    mask: Tensor | BlockMask | None = None,
    *,
    documents: Documents | None = None,
    intervals: Intervals | None = None,
    hidden: Pair | None = None,
    at_most: int | None = None,
    seqlen_q: int | None = None,
    is_causal: bool = False,
    causal_from: CausalFrom = "bottom_right",
    window_size: Window = (None, None),
    **unknown: NoReturn,
) -> TileMask:
    """Do the work of a mask once, to use it for many layers, forward and backward.

    A key is visible where all conditions given here hold, and those that a call adds. Nothing is read on the host, unless
    documents stand beside intervals on the CPU.

    Args:
        mask: `[B|1, H|Hkv|1, Sq|1, Sk]` or, for padding, `[B|1, Sk]`: bool (True keeps) or an integer dtype (non-zero
            keeps); or a `BlockMask` of flex_attention, whose `mask_mod` is evaluated here. Not differentiable. A mask
            without a query dimension takes O(S) memory for ids and, without a window, `S^2 / 2048` bytes for lists of
            tiles.
        documents: integer or bool ids `[B|1, S]` in any order, for `Sq == Sk == S`, or a pair of ids (of queries `[B|1, Sq]`, of
            keys `[B|1, Sk]`): a query sees keys of its own document only. Offsets `cu_seqlens` become ids by
            `torch.bucketize(torch.arange(S), cu_seqlens[1:], right=True)[None]`, with which a call on `[1, S, H, D]`
            computes what `flash_dmattn_varlen_func` does on `[S, H, D]`. Lists of tiles take `S^2 / 2048` bytes (8 MiB at
            131072) without a window, and `O(S)` with one: documents of at most `L` keys may add
            `window_size=(L - 1, L - 1)`, which hides nothing.
        intervals: `(start, end)`, int32 `[B|1, H|Hkv|1, Sk]` each: query `i` sees key `j` iff `start <= i < end`;
            `start >= end` hides the key. With None as `start`, a key is seen from the first query on that a causal
            condition or a window lets see it: only then, and without documents, can keys be packed. Takes O(S) memory and
            needs `seqlen_q`.
        hidden: `(from_, to)`, like `intervals`, which it needs: query `i` does not see key `j` where `from_ <= i < to`.
        at_most: a promise that no query sees more keys of a head, after everything that is given here: keys may then be
            packed (see `dynamic_mask`). A broken promise raises on the CPU, in the call that attends by the mask, compiled or
            not; on a GPU the queries concerned get NaN. What reads the mask alone (`to_dense`, `density`) does not count.
        seqlen_q: `Sq`, only where neither the mask nor the documents tell it.
        is_causal, causal_from, window_size: as in `flash_dmattn_func`.

    Raises:
        ValueError: for shapes, sizes and values that do not fit each other.
        TypeError: for types and dtypes.
    """
    if unknown:
        require.no_unknown("prepare_mask", unknown, _NAMES_ELSEWHERE)
    documents = as_integers(documents)
    causal_from, window_size = visibility(is_causal, causal_from, window_size)
    seqlen_q = None if seqlen_q is None else require.integer("seqlen_q", seqlen_q)
    dtensors.load_rules(mask, documents, intervals)
    if isinstance(mask, Tensor):
        validation.keep_mask(mask)
    at_most = None if at_most is None else _promised(at_most, intervals)
    if intervals is not None:
        intervals, hidden = _equal_intervals(intervals, hidden)
    elif hidden is not None:
        raise ValueError("hidden needs intervals, got None")
    seqlen_q, seqlen_k = _lengths(mask, documents, intervals, seqlen_q)
    values.warn_of_pairs(mask, seqlen_q)
    band = band_of(is_causal, causal_from, window_size)
    if intervals is not None:
        return _with_intervals(intervals, hidden, at_most, mask, documents, seqlen_q, band)
    if isinstance(mask, Tensor):
        return _from_tensor(narrowed(mask), documents, seqlen_q, band)
    segments = segments_of(documents, None)
    if mask is not None:
        return from_block_mask(mask, segments, band)
    return from_segments(segments, seqlen_q, seqlen_k, band)


def dynamic_mask(
    scores: Tensor,
    keep: int,
    *,
    keep_first: int = 0,
    keep_last: int = 0,
    documents: Tensor | None = None,
    is_causal: bool = True,
    queries: tuple[int, int] | None = None,
    **unknown: NoReturn,
) -> TileMask:
    """Return the mask in which each query sees the keys with the best scores of its prefix: dynamic mask attention.

    Query `i` sees key `j` iff `j <= i` and at least one of: `j` is among the `keep` best keys of `0 .. i`;
    `i - j < keep_last`; `j < keep_first`. Keys that the last two conditions show do not count against `keep`, and may be among
    the best keys as well. Of equal scores the earlier key is better; -0 equals 0; NaNs are equal to each other and worse
    than everything. Selection is exact and runs on the device of `scores`; the host reads nothing. The mask takes O(S)
    memory, and the cost of attention under it grows with the kept keys. Source: Shi et al., arXiv 2508.02124.

    Not differentiable: to train the scores, pass them as `bias` as well.

    Args:
        scores: `[B|1, H|Hkv|1, S]`, any floating dtype, compared in float32 (float64 as it is); for self-attention.
        keep: how many of the best keys a query sees; `keep >= S` hides nothing beyond causality and documents.
        keep_first: how many keys at the start of its document a query sees in any case.
        keep_last: how many keys, up to its own, a query sees in any case.
        documents: integer or bool ids `[B|1, S]`, each document one contiguous run: prefix and first keys are those of the query's
            own document, and others are never seen. An id that returns later raises on the CPU, and is a new document on
            a GPU.
        is_causal: if False, every query sees the `keep` best and the `keep_first` first keys of its document.
        queries: `(start, stop)`: return the mask of these queries alone, as `.queries(start, stop)` would.

    Raises:
        ValueError: for shapes, negative numbers, and `keep_last` without a causal condition.
        TypeError: for types and dtypes.
    """
    if unknown:
        require.no_unknown("dynamic_mask", unknown, _NAMES_ELSEWHERE)
    validation.dense(scores=scores)
    documents = as_integers(documents)
    dtensors.load_rules(scores, documents)
    validation.flags(is_causal=is_causal)
    counts = validation.integers(keep=keep, keep_first=keep_first, keep_last=keep_last)
    if documents is not None:
        validation.dense(documents=documents)
        require.dtype("documents", documents, *validation.INTEGERS)
    if queries is not None and not (isinstance(queries, (tuple, list)) and len(queries) == 2):
        raise TypeError(f"queries must be a pair (start, stop), got {queries!r}")
    if queries is not None and scores.dim() > 0:
        queries = require.part("queries", *queries, scores.shape[-1])
    if scores.is_floating_point() and scores.dtype not in validation.DTYPES:
        scores = scores.float()
    keep, keep_first, keep_last = map(_countable, counts)
    validation.selection(scores, documents, keep, keep_first, keep_last, is_causal)
    start, end = torch.ops.dmattn.key_lifetimes(scores.detach(), documents, keep, keep_first, keep_last, is_causal)
    at_most = _countable(keep + keep_first + keep_last)
    # Keys that are shown at all are shown from their own query on, which the band says, or from the first one where no
    # document begins later: kernels may then pack them.
    visible = (None, end) if is_causal or documents is None else (start, end)
    band = Band(hi=0) if is_causal else NO_BAND
    made = from_intervals(visible, None, at_most, scores.shape[-1], band)
    return made if queries is None else made.queries(*queries)


def resolve(mask: Tensor | TileMask | None, band: Band, seqlen_q: int, seqlen_k: int) -> tuple[Mask, int, int]:
    """Return the mask and the band that the operators take, for the mask and the band of one call.

    A plain mask `[B|1, H|Hkv|1, Sq|1, Sk]` is prepared with the band folded in. A prepared one is used as it is, unless
    the call adds a condition: then it is listed (segments) or packed (bits) again; intervals take any band.
    """
    if mask is None:
        return NO_MASK, *band.limits(seqlen_q, seqlen_k)
    if isinstance(mask, Tensor):
        dtensors.load_rules(mask)
        mask = _from_tensor(narrowed(mask), None, seqlen_q, band)
    elif isinstance(mask, TileMask):
        validation.mask_lengths(mask.seqlen_q, mask.seqlen_k, seqlen_q, seqlen_k)
        mask = mask.also(band)
    else:
        raise TypeError(f"mask must be a 4-D tensor or come from prepare_mask, got {require.type_text(mask)}")
    return mask.mask, *mask.band.limits(seqlen_q, seqlen_k)


def packed(mask: Tensor, seqlen_q: int, *limits: int) -> Mask:
    """Return what `resolve` returns of a plain mask that it took before, of the same shape, by the kernels alone."""
    mask = narrowed(mask)
    if mask.shape[2] != 1:
        made, _ = schemas.implementations["pack_mask"](mask, None, None, seqlen_q, *limits)
        return Mask(*made)
    segments = segments_of(None, mask.squeeze(2))
    made, _ = schemas.implementations["list_tiles"](*segments, seqlen_q, *limits)
    return Mask(made[0], made[1], None, None, *segments)


def _promised(at_most: int, intervals: Intervals | None) -> int:
    """Return a promise as the operators take it; refuse one that is no number, or stands alone."""
    at_most = require.integer("at_most", at_most)
    if intervals is None:
        raise ValueError(
            "at_most needs intervals, got None: only keys whose queries are given as intervals can be packed"
        )
    if symbolic.decided(at_most < 0):
        raise ValueError(f"at_most must not be negative, got {require.number_text(at_most)}")
    return _countable(at_most)


def _countable(count: int) -> int:
    """Return a count of keys as the operators take it: there are never as many keys as the largest."""
    return UNBOUNDED if symbolic.decided(count > UNBOUNDED) else count


def _equal_intervals(intervals: Intervals, hidden: Pair | None) -> tuple[Intervals, Pair | None]:
    """Refuse what is no pair of int32 `[B|1, Hm, Sk]`; return copies of one shape. A start may be None.

    One that has the heads of keys says the same to all of their queries.
    """
    parts: dict[str, Any] = {}
    for name, pair, ends in (("intervals", intervals, ("start", "end")), ("hidden", hidden, ("from_", "to"))):
        if pair is None:
            continue
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            got = type(pair).__name__ if isinstance(pair, Tensor) else f"a {type(pair).__name__} of {len(pair)}"
            raise TypeError(f"{name} must be a pair of tensors, got {got}")
        parts |= {f"{end} of {name}": part for end, part in zip(ends, pair, strict=True)}
    if intervals[0] is None:
        del parts["start of intervals"]
    first = next(iter(parts))
    for name, part in parts.items():
        validation.dense(**{name: part})
        require.rank(name, part, 3, "[B, heads, Sk]")
        require.dtype(name, part, torch.int32)
        require.device(name, part, parts[first].device, first)
    batch = symbolic.wider(part.shape[0] for part in parts.values())
    parts = _of_equal_heads(parts)
    heads = symbolic.wider(part.shape[1] for part in parts.values())
    shape = (batch, heads, parts[first].shape[-1])
    for name, part in parts.items():
        require.sizes(name, part, (1, batch), (1, heads), shape[2:])
    own = {name: layout.own(part.expand(shape)) for name, part in parts.items()}
    others = None if hidden is None else (own["from_ of hidden"], own["to of hidden"])
    return (own.get("start of intervals"), own["end of intervals"]), others


def _of_equal_heads(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return parts `[B|1, Hm, Sk]`, those with heads of keys repeated for the heads of queries that another one has."""
    heads = [part.shape[1] for part in parts.values()]
    widest = symbolic.wider(heads)
    if all(symbolic.known_equal(own, 1) or symbolic.known_equal(own, widest) for own in heads) or 0 in heads:
        return parts
    most = max(heads)
    return {
        name: part.repeat_interleave(most // own, dim=1) if 1 < own < most and most % own == 0 else part
        for (name, part), own in zip(parts.items(), heads, strict=True)
    }


def _lengths(
    mask: Tensor | BlockMask | None, documents: Documents | None, intervals: Intervals | None, seqlen_q: int | None
) -> tuple[int, int]:
    """Return Sq and Sk; refuse shapes and types that do not fit each other."""
    of_queries, of_keys = (None, None) if documents is None else id_pair(documents)
    known_q: int | None = None if of_queries is None else of_queries.shape[1]
    known_k: int | None = None if of_keys is None else of_keys.shape[1]
    if isinstance(mask, Tensor):
        known_q, seqlen_k = _tensor_lengths(mask, known_q)
    elif mask is not None:
        from torch.nn.attention.flex_attention import BlockMask

        if not isinstance(mask, BlockMask):
            raise TypeError(
                f"mask must be a tensor, a BlockMask or None, got {require.type_text(mask)}{_way_out(mask)}"
            )
        known_q, seqlen_k = mask.shape[-2:]
    elif known_k is not None:
        seqlen_k = known_k
    elif intervals is not None:
        seqlen_k = intervals[1].shape[-1]
    else:
        raise ValueError(
            "prepare_mask needs a mask, documents or intervals; causal and window conditions alone need no mask"
        )
    require_fitting(mask, of_queries, of_keys, known_q, seqlen_k)
    if intervals is not None and not symbolic.same(intervals[1].shape[-1], seqlen_k):
        keys, expected = require.size_text(intervals[1].shape[-1]), require.size_text(seqlen_k)
        raise ValueError(f"intervals must have {expected} keys as the mask or the documents have, got {keys}")
    if known_q is None:
        if seqlen_q is None:
            raise ValueError(
                "seqlen_q must be given (1 for decoding) for intervals, for padding [B, Sk] and for a mask whose query dimension"
                " is 1, got None; a mask of queries and keys has four dimensions"
            )
        [seqlen_q] = require.lengths(seqlen_q=seqlen_q)
        return seqlen_q, seqlen_k
    if seqlen_q is not None and not symbolic.same(seqlen_q, known_q):
        expected, given = require.size_text(known_q), require.size_text(seqlen_q)
        raise ValueError(f"seqlen_q must be {expected}, as the mask or the documents have it, got {given}")
    return known_q, seqlen_k


def _way_out(mask: Any) -> str:
    """Return advice, as the end of a message, for something that is no mask yet, or a prepared one."""
    if isinstance(mask, TileMask):
        return ": a prepared mask goes to calls as it is, with further conditions beside it"
    return ": create_block_mask of flex_attention makes a BlockMask of a function" if callable(mask) else ""


def _tensor_lengths(mask: Tensor, known_q: int | None) -> tuple[int | None, int]:
    """Return Sq, where mask or documents tell it, and Sk of a mask `[B|1, Hm, Sq|1, Sk]` or `[B|1, Sk]`."""
    if mask.dim() == 2:
        return known_q, mask.shape[1]
    if mask.dim() != 4:
        raise ValueError(f"mask must have shape (B|1, H|Hkv|1, Sq|1, Sk) or (B|1, Sk), got {require.text(mask.shape)}")
    return (known_q if symbolic.known_equal(mask.shape[2], 1) else mask.shape[2]), mask.shape[3]


def narrowed(mask: Tensor) -> Tensor:
    """Cut expanded dimensions back to 1, so that what they repeat is read once."""
    for dim in range(mask.dim() - 1):
        repeated = symbolic.known_equal(mask.stride(dim), 0)
        if repeated and not any(symbolic.known_equal(mask.shape[dim], size) for size in (0, 1)):
            mask = mask.narrow(dim, 0, 1)
    return mask


def _from_tensor(mask: Tensor, documents: Documents | None, seqlen_q: int, band: Band) -> TileMask:
    """Prepare a mask `[B|1, Hm, Sq|1, Sk]` or `[B|1, Sk]`, and documents."""
    if mask.dim() == 2:
        mask = mask[:, None, None, :]
    if symbolic.known_equal(mask.shape[2], 1):
        return from_segments(segments_of(documents, mask.squeeze(2)), seqlen_q, mask.shape[3], band)
    return from_dense(mask, segments_of(documents, None), seqlen_q, band)


def _with_intervals(
    intervals: Intervals,
    hidden: Pair | None,
    at_most: int | None,
    mask: Tensor | BlockMask | None,
    documents: Documents | None,
    seqlen_q: int,
    band: Band,
) -> TileMask:
    """Prepare intervals and what stands beside them: alone they stay intervals, with ids or a mask they become bits."""
    made = from_intervals(intervals, hidden, at_most, seqlen_q, band)
    if mask is None and documents is None:
        return made
    if mask is None and isinstance(documents, Tensor) and values.on_the_host(documents):
        require.sizes("documents", documents, _choices(made.shape[0], documents.shape[0]), (documents.shape[1],))
        with dtensors.constants_beside(documents):
            clipped = clipped_to_runs(intervals, documents)
        if clipped is not None:
            if hidden is not None:  # the documents may have a batch where the intervals have none
                hidden = hidden[0].expand_as(clipped[0]).contiguous(), hidden[1].expand_as(clipped[0]).contiguous()
            return from_intervals(clipped, hidden, at_most, seqlen_q, band)
    if mask is not None and not isinstance(mask, Tensor):  # a function: what it shows is evaluated first
        mask = from_block_mask(mask, (None, None), NO_BAND).to_dense()
    elif mask is not None:
        mask = narrowed(mask)
        mask = mask[:, None, None, :] if mask.dim() == 2 else mask
    limits = band.limits(seqlen_q, made.seqlen_k)
    start, end = intervals
    hides = (None, None) if hidden is None else hidden
    packed = torch.ops.dmattn.pack_intervals(end, start, *hides, mask, *segments_of(documents, None), seqlen_q, *limits)
    bits = from_packed(made.lengths, packed, band)
    if at_most is None:
        return bits
    if not values.on_the_host(end):  # of a graph or on a GPU: each call checks it, as it checks that of intervals
        return bits.promising(at_most)
    values.promise(at_most, bits.to_dense().sum(-1))
    return bits


def _choices(batch: int, other: int) -> tuple[int, ...]:
    """Return the batch sizes that fit beside `batch`: 1 and itself, or `other` where `batch` is 1."""
    return (other,) if symbolic.known_equal(batch, 1) else (1, batch)


for _function in (prepare_mask, dynamic_mask):
    require.without_unknown(_function)
