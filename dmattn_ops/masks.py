"""Masks from what users have: `prepare_mask`, `dynamic_mask`, and what a call makes of a plain tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dmattn_ops import layout, validation
from dmattn_ops.bands import Band, CausalFrom, Window, band_of, shifted
from dmattn_ops.meta import list_capacity, tile_records
from dmattn_ops.problem import NO_MASK, TILE, Mask
from dmattn_ops.tile_mask import Segments, TileMask, from_dense, from_intervals, from_segments, lengths_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_NARROW_INTEGERS = (torch.uint8, torch.int8, torch.int16)  # twice any of these fits int32
_INTEGERS = (*_NARROW_INTEGERS, torch.int32, torch.int64)
_CHUNK = 1 << 24  # elements of a BlockMask that are evaluated at a time: 16 MiB of bool and a few times that in between
Documents = Tensor | tuple[Tensor, Tensor]
Pair = tuple[Tensor, Tensor]


def prepare_mask(
    mask: Tensor | BlockMask | None = None,
    *,
    documents: Documents | None = None,
    intervals: Pair | None = None,
    hidden: Pair | None = None,
    at_most: int | None = None,
    seqlen_q: int | None = None,
    is_causal: bool = False,
    causal_from: CausalFrom = "bottom_right",
    window_size: Window = (None, None),
) -> TileMask:
    """Do the work of a mask once, to use it for many layers, forward and backward.

    A key is visible where all conditions given here hold, and those that a call adds. Nothing is read on the host, unless
    documents stand beside intervals on the CPU.

    Args:
        mask: `[B|1, H|Hkv|1, Sq|1, Sk]` or, for padding, `[B|1, Sk]`: bool (True keeps) or an integer dtype (non-zero
            keeps); or a `BlockMask` of flex_attention, whose `mask_mod` is evaluated here. Not differentiable. A mask
            without a query dimension takes O(S) memory for ids and, without a window, `S^2 / 2048` bytes for lists of
            tiles.
        documents: integer ids `[B|1, S]` in any order, for `Sq == Sk == S`, or a pair of ids (of queries `[B|1, Sq]`, of
            keys `[B|1, Sk]`): a query sees keys of its own document only. Offsets `cu_seqlens` become ids by
            `torch.bucketize(torch.arange(S), cu_seqlens[1:], right=True)[None]`, with which a call on `[1, S, H, D]`
            computes what `flash_dmattn_varlen_func` does on `[S, H, D]`. Lists of tiles take `S^2 / 2048` bytes (8 MiB at
            131072) without a window, and `O(S)` with one: documents of at most `L` keys may add
            `window_size=(L - 1, L - 1)`, which hides nothing.
        intervals: `(start, end)`, int32 `[B|1, H|Hkv|1, Sk]` each: query `i` sees key `j` iff `start <= i < end`;
            `start >= end` hides the key. Takes O(S) memory and needs `seqlen_q`.
        hidden: `(from_, to)`, like `intervals`, which it needs: query `i` does not see key `j` where `from_ <= i < to`.
        at_most: a promise that no query sees more keys of a head, after everything that is given here: keys may then be
            packed (see `dynamic_mask`). A broken promise raises on the CPU; on a GPU the queries concerned get NaN.
        seqlen_q: `Sq`, only where neither the mask nor the documents tell it.
        is_causal, causal_from, window_size: as in `flash_dmattn_func`.

    Raises:
        ValueError: for shapes, sizes and values that do not fit each other.
        TypeError: for types and dtypes.
    """
    validation.visibility(is_causal, causal_from, window_size)
    if isinstance(mask, Tensor):
        validation.keep_mask(mask)
    _check_intervals(intervals, hidden, at_most)
    seqlen_q, seqlen_k = _lengths(mask, documents, intervals, seqlen_q)
    band = band_of(is_causal, causal_from, window_size)
    if intervals is not None:
        return _with_intervals(intervals, hidden, at_most, mask, documents, seqlen_q, band)
    if isinstance(mask, Tensor):
        return _from_tensor(_narrowed(mask), documents, seqlen_q, band)
    segments = _segments(documents, None)
    if mask is not None:
        return _from_block_mask(mask, segments, band)
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
) -> TileMask:
    """Return the mask in which each query sees the keys with the best scores of its prefix: dynamic mask attention.

    Query `i` sees key `j` iff `j <= i` and at least one of: `j` is among the `keep` best keys of `0 .. i`;
    `i - j < keep_last`; `j < keep_first`. The last two are beside the budget of `keep`, and the keys that they show count among
    the best as any other. Of equal scores the earlier key is better; -0 equals 0; NaNs are equal to each other and worse
    than everything. Selection is exact, runs on the device of `scores` and reads nothing on the host; the mask takes O(S)
    memory, and attention under it costs what is kept. Source: Shi et al., arXiv 2508.02124.

    Not differentiable: to train the scores, pass them as `bias` as well.

    Args:
        scores: `[B|1, H|Hkv|1, S]`, any floating dtype, compared in float32 (float64 as it is); for self-attention.
        keep: how many of the best keys a query sees; `keep >= S` hides nothing beyond causality and documents.
        keep_first: how many keys at the start of its document a query sees in any case.
        keep_last: how many keys, up to its own, a query sees in any case.
        documents: integer ids `[B|1, S]`, each document one contiguous run: prefix and first keys are those of the query's
            own document, and others are never seen. An id that returns later raises on the CPU, and is a new document on
            a GPU.
        is_causal: if False, every query sees the `keep` best and the `keep_first` first keys of its document.
        queries: `(start, stop)`: return the mask of these queries alone, as `.queries(start, stop)` would.

    Raises:
        ValueError: for shapes, negative numbers, and `keep_last` without a causal condition.
        TypeError: for types and dtypes.
    """
    validation.tensors(scores=scores)
    validation.flags(is_causal=is_causal)
    validation.integers(keep=keep, keep_first=keep_first, keep_last=keep_last)
    validation.selection(scores, documents, keep, keep_first, keep_last, is_causal)
    if documents is not None:
        validation.require_dtype("documents", documents, *_INTEGERS)
        if not documents.is_cuda and not is_compiling():
            validation.contiguous_runs("documents", documents)
    start, end = torch.ops.dmattn.key_lifetimes(scores.detach(), documents, keep, keep_first, keep_last, is_causal)
    at_most = keep + keep_first + keep_last
    made = from_intervals((start, end), None, at_most, scores.shape[-1])
    return made if queries is None else made.queries(*queries)


def resolve(mask: Tensor | TileMask | None, band: Band, seqlen_q: int, seqlen_k: int) -> tuple[Mask, int, int]:
    """Return the mask and the band that the operators take, for the mask and the band of one call.

    A plain mask `[B|1, H|Hkv|1, Sq|1, Sk]` is prepared with the band folded in. A prepared one is used as it is, unless
    the call adds a condition: then it is listed (segments) or packed (bits) again; intervals take any band.
    """
    if mask is None:
        return NO_MASK, *band.limits(seqlen_q, seqlen_k)
    if isinstance(mask, Tensor):
        mask = _from_tensor(_narrowed(mask), None, seqlen_q, band)
    elif isinstance(mask, TileMask):
        validation.mask_lengths(mask.seqlen_q, mask.seqlen_k, seqlen_q, seqlen_k)
        mask = mask.also(band)
    else:
        raise TypeError(f"mask must be a 4-D tensor or come from prepare_mask, got {type(mask).__name__}")
    return mask.mask, *mask.band.limits(seqlen_q, seqlen_k)


def _check_intervals(intervals: Pair | None, hidden: Pair | None, at_most: int | None) -> None:
    """Refuse intervals that are not pairs of int32 `[B|1, Hm, Sk]`."""
    if hidden is not None and intervals is None:
        raise ValueError("hidden needs intervals, got None")
    if at_most is not None:
        validation.integers(at_most=at_most)
        if intervals is None:
            raise ValueError("at_most needs intervals, got None")
        if type(at_most) is int and at_most < 0:
            raise ValueError(f"at_most must not be negative, got {at_most}")
    for name, pair in (("intervals", intervals), ("hidden", hidden)):
        if pair is None:
            continue
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"{name} must be a pair of tensors, got {type(pair).__name__}")
        ends = ("start", "end") if name == "intervals" else ("from_", "to")
        for end, part in zip(ends, pair, strict=True):
            validation.tensors(**{end: part})
            validation.require_rank(f"{end} of {name}", part, 3)
            validation.require_dtype(f"{end} of {name}", part, torch.int32)
            assert intervals is not None
            validation.require_shape(f"{end} of {name}", part, tuple(intervals[0].shape))
            validation.require_device(f"{end} of {name}", part, intervals[0].device)


def _lengths(
    mask: Tensor | BlockMask | None, documents: Documents | None, intervals: Pair | None, seqlen_q: int | None
) -> tuple[int, int]:
    """Return Sq and Sk; refuse shapes and types that do not fit each other."""
    of_queries, of_keys = _document_ids(documents)
    known_q: int | None = None if of_queries is None else of_queries.shape[1]
    known_k: int | None = None if of_keys is None else of_keys.shape[1]
    if isinstance(mask, Tensor):
        known_q, seqlen_k = _tensor_lengths(mask, known_q)
    elif mask is not None:
        from torch.nn.attention.flex_attention import BlockMask

        if not isinstance(mask, BlockMask):
            raise TypeError(f"mask must be a tensor, a BlockMask or None, got {type(mask).__name__}")
        known_q, seqlen_k = mask.shape[-2:]
    elif known_k is not None:
        seqlen_k = known_k
    elif intervals is not None:
        seqlen_k = intervals[0].shape[-1]
    else:
        raise ValueError("prepare_mask needs a mask or documents; causal and window conditions alone need no mask")
    _fitting_documents(mask, of_queries, of_keys, known_q, seqlen_k)
    if intervals is not None and intervals[0].shape[-1] != seqlen_k:
        raise ValueError(
            f"intervals must have {seqlen_k} keys as the mask or the documents have, got {intervals[0].shape[-1]}"
        )
    if known_q is None:
        if seqlen_q is None:
            raise ValueError("seqlen_q must be given for a mask without a query dimension, got None")
        if isinstance(seqlen_q, bool) or not isinstance(seqlen_q, (int, torch.SymInt)):
            raise TypeError(f"seqlen_q must be an int, got {type(seqlen_q).__name__}")
        if seqlen_q < 0:
            raise ValueError(f"seqlen_q must not be negative, got {seqlen_q}")
        return seqlen_q, seqlen_k
    if seqlen_q is not None and seqlen_q != known_q:
        raise ValueError(f"seqlen_q must be {known_q}, as the mask or the documents have it, got {seqlen_q}")
    return known_q, seqlen_k


def _document_ids(documents: Documents | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the ids of queries and of keys, `[B|1, S]`."""
    if documents is None:
        return None, None
    pair = documents if isinstance(documents, (tuple, list)) else (documents, documents)
    if len(pair) != 2:
        raise TypeError(f"documents must be ids or a pair of ids, got {len(pair)} of them")
    for ids in pair:
        validation.tensors(documents=ids)
        validation.require_rank("documents", ids, 2)
        validation.require_dtype("documents", ids, *_INTEGERS)
    validation.require_device("documents", pair[1], pair[0].device)
    return pair[0], pair[1]


def _fitting_documents(
    mask: Tensor | BlockMask | None,
    of_queries: Tensor | None,
    of_keys: Tensor | None,
    known_q: int | None,
    seqlen_k: int,
) -> None:
    """Refuse ids that do not fit the mask beside them."""
    if of_queries is None or of_keys is None:
        return
    if isinstance(mask, Tensor):
        validation.require_device("documents", of_keys, mask.device)
        batches = {mask.shape[0], of_queries.shape[0], of_keys.shape[0]} - {1}
        if len(batches) > 1:
            raise ValueError(f"documents must have shape ({mask.shape[0]}|1, {seqlen_k}), got {tuple(of_keys.shape)}")
    if seqlen_k != of_keys.shape[1]:
        raise ValueError(f"documents must have shape (B|1, {seqlen_k}), got {tuple(of_keys.shape)}")
    if known_q != of_queries.shape[1]:
        raise ValueError(
            f"mask must have as many queries as documents has, got {known_q} and {of_queries.shape[1]}"
            if of_queries is not of_keys
            else f"mask must have as many queries as keys where documents are given, got {known_q} and {seqlen_k}"
        )


def _tensor_lengths(mask: Tensor, known_q: int | None) -> tuple[int | None, int]:
    """Return Sq, where mask or documents tell it, and Sk of a mask `[B|1, Hm, Sq|1, Sk]` or `[B|1, Sk]`."""
    if mask.dim() == 2:
        return known_q, mask.shape[1]
    if mask.dim() != 4:
        raise ValueError(f"mask must have shape (B|1, H|Hkv|1, Sq|1, Sk) or (B|1, Sk), got {tuple(mask.shape)}")
    return (known_q if mask.shape[2] == 1 else mask.shape[2]), mask.shape[3]


def _narrowed(mask: Tensor) -> Tensor:
    """Cut expanded dimensions back to 1, so that what they repeat is read once."""
    for dim in range(mask.dim() - 1):
        if mask.shape[dim] > 1 and mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _from_tensor(mask: Tensor, documents: Documents | None, seqlen_q: int, band: Band) -> TileMask:
    """Prepare a mask `[B|1, Hm, Sq|1, Sk]` or `[B|1, Sk]`, and documents."""
    if mask.dim() == 2:
        mask = mask[:, None, None, :]
    if mask.shape[2] == 1:
        return from_segments(_segments(documents, mask.squeeze(2) != 0), seqlen_q, mask.shape[3], band)
    return from_dense(mask, _segments(documents, None), seqlen_q, band)


def _with_intervals(
    intervals: Pair,
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
    if mask is None and isinstance(documents, Tensor) and not documents.is_cuda and not is_compiling():
        clipped = _clipped_to_runs(intervals, documents)
        if clipped is not None:
            return from_intervals(clipped, hidden, at_most, seqlen_q, band)
    keep = made.to_dense()
    if mask is None:
        return from_dense(keep, _segments(documents, None), seqlen_q, band)
    return from_dense(
        keep & prepare_mask(mask, documents=documents, seqlen_q=seqlen_q).to_dense(), (None, None), seqlen_q, band
    )


def _clipped_to_runs(intervals: Pair, documents: Tensor) -> Pair | None:
    """Return intervals that end with the document of their key, or None where an id returns later. Reads the ids."""
    first, last = layout.runs(documents)
    if not layout.is_one_run_each(documents):
        return None
    start, end = torch.broadcast_tensors(*intervals)
    start = torch.maximum(start, first.unsqueeze(1))
    return start, torch.minimum(end.expand_as(start), last.unsqueeze(1))


def _segments(documents: Documents | None, keep: Tensor | None) -> Segments:
    """Return int32 segments `[B|1, Sq]` of queries and `[B|1, Hm, Sk]` of keys; `keep` is bool `[B|1, Hm, Sk]`.

    With both, a dropped key gets an odd number next to its own document's even one: no query has it, and the range of
    numbers in a tile of keys stays that of its documents. Both are contiguous, whatever they come from.
    """
    keep = keep if keep is None else keep.contiguous()
    if documents is None:
        return None, None if keep is None else keep.to(torch.int32) - 1
    of_queries, of_keys = _numbered(documents, keep is not None)
    if keep is None:
        return of_queries, of_keys.unsqueeze(1).clone()
    return 2 * of_queries, 2 * of_keys.unsqueeze(1) + (~keep).to(torch.int32)


def _numbered(documents: Documents, doubled: bool) -> tuple[Tensor, Tensor]:
    """Return ids `[B|1, Sq]` and `[B|1, Sk]` as int32 numbers, small enough to be `doubled`."""
    of_queries, of_keys = documents if isinstance(documents, (tuple, list)) else (documents, documents)
    narrow = all(
        ids.dtype in _NARROW_INTEGERS or (not doubled and ids.dtype == torch.int32) for ids in (of_queries, of_keys)
    )
    if narrow:
        return tuple(ids.to(torch.int32, copy=True).contiguous() for ids in (of_queries, of_keys))  # type: ignore[return-value]
    if of_queries is of_keys:
        numbers = _ranks(of_keys.contiguous())
        return numbers, numbers
    batch = max(of_queries.shape[0], of_keys.shape[0])
    both = torch.cat([ids.to(torch.int64).expand(batch, -1) for ids in (of_queries, of_keys)], dim=1)
    ranks = _ranks(both)
    return ranks[:, : of_queries.shape[1]].contiguous(), ranks[:, of_queries.shape[1] :].contiguous()


def _ranks(ids: Tensor) -> Tensor:
    """Number the distinct ids of each row of `[B, S]` in ascending order, int32; no id is read on the host."""
    ordered, order = ids.sort(dim=-1)
    before = ordered.roll(1, dims=-1)
    changes = (ordered != before).cumsum(-1, dtype=torch.int32)
    numbers = changes - changes[:, :1]
    return torch.zeros_like(numbers).scatter(-1, order, numbers)


def _from_block_mask(mask: BlockMask, segments: Segments, band: Band) -> TileMask:
    """Evaluate a BlockMask in chunks of query tiles, and join what each chunk packs into."""
    *leading, seqlen_q, seqlen_k = mask.shape
    limits = band.limits(seqlen_q, seqlen_k)
    rows = TILE * max(1, _CHUNK // (TILE * max(1, math.prod(leading) * seqlen_k)))
    visible = _visible_in_blocks(mask)
    chunks = []
    for start in range(0, max(seqlen_q, 1), rows):
        stop = min(start + rows, seqlen_q)
        queries = None if segments[0] is None else segments[0][:, start:stop]
        moved = (shifted(limit, start) for limit in limits)
        chunks.append(torch.ops.dmattn.pack_mask(visible(start, stop), queries, segments[1], stop - start, *moved))
    row_tiles, _, row_bits, col_bits = zip(*chunks, strict=True)
    columns = (seqlen_k + TILE - 1) // TILE
    pieces = [layout.classes_from_lists(lists, columns) for lists in row_tiles]
    tiles = [-(-(min(start + rows, seqlen_q) - start) // TILE) for start in range(0, max(seqlen_q, 1), rows)]
    classes = torch.cat([piece[..., :count, :] for piece, count in zip(pieces, tiles, strict=True)], dim=-2)
    return TileMask(
        _lists(classes, seqlen_q, columns, limits),
        _lists(classes.transpose(-1, -2), seqlen_k, classes.shape[-2], limits),
        torch.cat(row_bits, dim=-2),
        torch.cat(col_bits, dim=-1),
        *(None,) * 6,
        lengths_of(row_bits[0], seqlen_q, seqlen_k),
        None,
        *band,
    )


def _lists(classes: Tensor, seqlen: int, columns: int, limits: tuple[int, int]) -> Tensor:
    """Return the lists of `seqlen` positions whose tiles see `columns` tiles of the other side, by their classes."""
    capacity = list_capacity(max(2, columns), *limits)
    return layout.lists_from_classes(classes, tile_records(seqlen), capacity)


def _visible_in_blocks(mask: BlockMask) -> Callable[[int, int], Tensor]:
    """Return a function from a range of queries to what a BlockMask shows them: bool `[B|1, H|1, stop - start, Sk]`."""
    from torch.nn.attention.flex_attention import create_mask

    *leading, _, seqlen_k = mask.shape
    batch, heads = (1,) * (2 - len(leading)) + tuple(leading)
    device = mask.kv_indices.device
    block_q, block_k = mask.BLOCK_SIZE
    blocks = (batch, heads, -1, (seqlen_k + block_k - 1) // block_k)
    partial = _listed_blocks(mask.kv_num_blocks, mask.kv_indices, blocks[-1]).reshape(blocks)
    full = None
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        full = _listed_blocks(mask.full_kv_num_blocks, mask.full_kv_indices, blocks[-1]).reshape(blocks)
    columns = torch.arange(seqlen_k, device=device) // block_k

    def visible(start: int, stop: int) -> Tensor:
        rows = torch.arange(start, stop, device=device).unsqueeze(-1) // block_q
        inside = create_mask(
            lambda b, h, i, j: mask.mask_mod(b, h, i + start, j), batch, heads, stop - start, seqlen_k, device
        )
        keep = partial[:, :, rows, columns] & inside
        return keep if full is None else keep | full[:, :, rows, columns]

    return visible


def _listed_blocks(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Return bool `[..., rows, columns]`: the blocks that the first `counts` of `indices [..., rows, slots]` name."""
    slot = torch.arange(indices.shape[-1], device=indices.device)
    target = torch.where(slot < counts.unsqueeze(-1), indices, columns).long()
    listed = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    return listed.scatter(-1, target, True)[..., :columns]
