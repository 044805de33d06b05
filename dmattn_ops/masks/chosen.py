"""Masks of blocks of keys that each query chooses by their numbers: `selection_mask`, and blocks in plain torch."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from dmattn_ops import symbolic
from dmattn_ops.bands import CausalFrom, Window, band_of, visibility
from dmattn_ops.call import Options
from dmattn_ops.checks import chosen, dtensors, require, validation
from dmattn_ops.masks.documents import Documents, as_integers, id_pair, segments_of
from dmattn_ops.masks.tile_mask import Segments, TileMask, from_chosen, from_packed, lengths_of

_NAMES_ELSEWHERE = {
    "block_indices": "indices, with block= keys in each",
    "topk_indices": "indices",
    "block_size": "block",
    "granularity": "block",
    "causal": "is_causal",
    "window": "window_size",
    "mask": "padding, [B, Sk]",
    "attention_mask": "padding, [B, Sk]",
    "cu_seqlens": f"documents, {require.IDS_OF_OFFSETS}",
}


class Selection(NamedTuple):
    """Attention to the keys of chosen blocks, inside the band and between equal segments, as kernels take it."""

    query: Tensor  # [B, Sq, H, D]
    key: Tensor  # [B, Sk, Hkv, D]
    indices: Tensor  # [B|1, Hm, Sq, k]
    q_segments: Tensor | None  # [B|1, Sq]
    k_segments: Tensor | None  # [B|1, 1, Sk]
    bias: Tensor | None
    lse: Tensor | None  # [B, H, Sq]; None: of these keys
    block: int
    options: Options


class Statistics(NamedTuple):
    """The logarithms of the rows' sums, `[B, H, Sq]`, and what rounding took from them, where that is known."""

    lse: Tensor
    lse_tail: Tensor | None


def selection_mask(
    indices: Tensor,
    *,
    block: int = 1,
    seqlen_k: int | None = None,
    is_causal: bool = True,
    causal_from: CausalFrom = "bottom_right",
    window_size: Window = (None, None),
    documents: Documents | None = None,
    padding: Tensor | None = None,
    **unknown: NoReturn,
) -> TileMask:
    """Return the mask in which each query sees the keys of the blocks that it chose: sparse attention with an indexer.

    Query `i` sees key `j` iff `j // block` is among `indices[b, h, i]`, and the causal condition, the window, the documents
    and the padding allow it. DeepSeek-V3.2 (single keys, one list for all heads), MiniMax-M3, NSA and MoBA (blocks of 64 or
    128) attend in this way. A number may repeat, which changes nothing, and the order does not matter. Not differentiable: an
    indexer is trained with `selection_mass`.

    On a GPU the mask stores the indices, in O(Sq * k) memory, and attention gathers the keys of the blocks that neighbouring
    queries chose. The kernels that do so take calls in which 4 to 128 query heads (on GPUs other than SM 9.0: 4 to 32) share a
    key head and a list, with 16-bit elements, head dimensions up to 256, no bias and no dropout, and a backward that need not
    be deterministic. For all other calls, and on the CPU, the indices become a mask of bits, once: `Sq * Sk / 4` bytes for
    each list of a batch entry (64 MiB at 16384 positions). On a GPU, the host reads nothing.

    Args:
        indices: int32 or int64 `[B|1, H|Hkv|1, Sq, k]`: for each query, or each query and head, the numbers of `k` blocks; -1
            is none. Other numbers outside of `0 .. ceil(Sk / block) - 1` raise on the CPU, also in a compiled graph. On a GPU
            they are none, and raise with `DMATTN_CHECK=1`.
        block: how many keys a block has, 1 to 128: block `n` holds the keys from `n * block` on.
        seqlen_k: `Sk`; None is `Sq`.
        is_causal, causal_from, window_size: as in `flash_dmattn_func`, but causal unless it is turned off.
        documents: ids `[B|1, S]` or a pair of ids (of queries `[B|1, Sq]`, of keys `[B|1, Sk]`), as in `prepare_mask`.
        padding: `[B|1, Sk]`, bool or integer, False or 0 for what is no key.

    Raises:
        ValueError: for shapes, sizes and values that do not fit each other.
        TypeError: for types and dtypes.
    """
    if unknown:
        require.no_unknown("selection_mask", unknown, _NAMES_ELSEWHERE)
    validation.dense(indices=indices)
    dtensors.load_rules(indices, documents, padding)
    block = require.integer("block", block)
    chosen.indices_alone(indices, block)
    causal_from, window_size = visibility(is_causal, causal_from, window_size)
    seqlen_q = indices.shape[2]
    [seqlen_k] = require.lengths(seqlen_k=seqlen_q if seqlen_k is None else seqlen_k)
    segments = segments_beside(indices, documents, padding, indices.shape[0], seqlen_q, seqlen_k)
    band = band_of(is_causal, causal_from, window_size)
    if indices.is_cuda and not dtensors.is_sharded(indices):
        chosen.in_range_if_asked(indices, chosen.block_count(seqlen_k, block))
        return from_chosen(indices, block, segments, seqlen_k, band)
    limits = band.limits(seqlen_q, seqlen_k)
    packed = torch.ops.dmattn.pack_selection(indices, *segments, block, seqlen_k, *limits)
    return from_packed(lengths_of(indices, seqlen_q, seqlen_k), packed, band)


def segments_beside(
    like: Tensor, documents: Any, padding: Tensor | None, batch: int, seqlen_q: int, seqlen_k: int
) -> Segments:
    """Return documents and padding as segments `[B|1, Sq]` and `[B|1, 1, Sk]`; refuse those that do not fit."""
    documents = as_integers(documents)
    parts: list[tuple[str, Tensor, int]] = []
    if documents is not None:
        of_queries, of_keys = id_pair(documents)
        parts += [("documents", of_keys, seqlen_k), ("documents", of_queries, seqlen_q)]
    if padding is not None:
        validation.dense(padding=padding)
        require.dtype("padding", padding, torch.bool, *validation.INTEGERS)
        parts.append(("padding", padding, seqlen_k))
    batch = symbolic.wider([batch, *(part.shape[0] for _, part, _ in parts if part.dim() > 0)])
    for name, part, seqlen in parts:
        require.sizes(name, part, (1, batch), (seqlen,))
        require.device(name, part, like.device, "indices")
    return segments_of(documents, None if padding is None else padding.unsqueeze(1))


def shown_keys(indices: Tensor, block: int, seqlen_k: int) -> Tensor:
    """Return the keys in the blocks that `indices [..., k]` name, bool `[..., Sk]`; numbers of no block name none."""
    count = chosen.block_count(seqlen_k, block)
    target = torch.where((indices >= 0) & (indices < count), indices, count).long()
    shown = torch.zeros((*indices.shape[:-1], count + 1), dtype=torch.bool, device=indices.device)
    shown = shown.scatter_(-1, target, True)[..., :count]
    return shown if block == 1 else shown.repeat_interleave(block, dim=-1)[..., :seqlen_k]


def first_of_each(indices: Tensor) -> Tensor:
    """Return `indices [..., k]` with -1 in the place of every number that stands further in front already."""
    ordered, order = indices.sort(dim=-1, stable=True)
    again = torch.zeros_like(ordered, dtype=torch.bool)
    again[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    return indices.masked_fill(torch.zeros_like(again).scatter_(-1, order, again), -1)


require.without_unknown(selection_mask)
