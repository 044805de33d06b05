"""Masks for flex_attention: a `TileMask` as a `BlockMask`. The way back is `prepare_mask(block_mask)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dmattn_ops.call import TILE, UNBOUNDED, WORD_BITS
from dmattn_ops.checks import require
from dmattn_ops.masks import layout
from dmattn_ops.masks.tile_mask import TileMask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def to_block_mask(mask: TileMask, heads: int | None = None) -> BlockMask:
    """Return a mask as flex_attention takes it, in blocks of 128 x 128, with the tiles that our kernels would visit.

    Args:
        mask: of `[Bm, Hm, Sq, Sk]`.
        heads: `H` of the queries, where the mask has one head for each key head: flex_attention wants one for each query head.

    Raises:
        ValueError: where `heads` is not positive, or no multiple of the mask's heads.
    """
    from torch.nn.attention.flex_attention import BlockMask

    classes = tile_classes(mask)
    own = mask.shape[1]
    group = 1
    heads = None if heads is None else require.integer("heads", heads)
    if heads is not None and heads < 1:
        raise ValueError(f"heads must be positive, got {heads}")
    if heads is not None and own > 1:
        if heads % own:
            raise ValueError(f"heads must be a multiple of {own}, the heads of the mask, got {heads}")
        group = heads // own
        classes = classes.repeat_interleave(group, dim=1)
    listed = [_listed(classes == kind) for kind in (layout.PARTIAL, layout.FULL)]
    return BlockMask.from_kv_blocks(
        *listed[0],
        *listed[1],
        BLOCK_SIZE=TILE,
        mask_mod=mask_mod(mask, group),
        seq_lengths=(mask.seqlen_q, mask.seqlen_k),
    )


def tile_classes(mask: TileMask) -> Tensor:
    """Return the class of each tile, `[Bm, Hm, nQ, nK]`: `layout.EMPTY`, `PARTIAL` or `FULL`; of intervals none is full."""
    _require_prepared(mask)
    rows, columns = (-(-length // TILE) for length in (mask.seqlen_q, mask.seqlen_k))
    parts = mask.mask
    if parts.row_tiles is None:
        limits = mask.band.limits(mask.seqlen_q, mask.seqlen_k)
        visited = layout.interval_tiles(parts, *limits, mask.seqlen_q, mask.seqlen_k)
        return torch.where(visited, layout.PARTIAL, layout.EMPTY)[..., :rows, :columns]
    return layout.classes_from_lists(parts.row_tiles, columns)[..., :rows, :]


def mask_mod(mask: TileMask, group: int = 1) -> MaskMod:
    """Return a function that says of a sequence, a head, a query and a key whether it is visible."""
    _require_prepared(mask)
    lo, hi = mask.band.limits(mask.seqlen_q, mask.seqlen_k)
    parts = mask.mask
    row_bits, q_segments, k_segments = parts.row_bits, parts.q_segments, parts.k_segments
    start, end, hidden_from, hidden_to = parts.start, parts.end, parts.hidden_from, parts.hidden_to

    def pick(part: Tensor, b: Tensor, h: Tensor, *place: Tensor) -> Tensor:
        own = (b if part.shape[0] > 1 else 0, h // group if part.shape[1] > 1 else 0)
        return part[own + place]

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        inside = j - i >= lo if lo > -UNBOUNDED else j >= 0
        if hi < UNBOUNDED:
            inside = inside & (j - i <= hi)
        if row_bits is not None:
            return inside & ((pick(row_bits, b, h, i, j // WORD_BITS) >> (j % WORD_BITS)) & 1 != 0)
        if k_segments is not None:
            own = 0 if q_segments is None else q_segments[b if q_segments.shape[0] > 1 else 0, i]
            return inside & (pick(k_segments, b, h, j) == own)
        if start is not None:
            inside = inside & (i >= pick(start, b, h, j))
        if end is not None:
            inside = inside & (i < pick(end, b, h, j))
        if hidden_from is None or hidden_to is None:
            return inside
        return inside & ~((i >= pick(hidden_from, b, h, j)) & (i < pick(hidden_to, b, h, j)))

    return visible


def _require_prepared(mask: object) -> None:
    """Refuse what `prepare_mask` and `dynamic_mask` did not return."""
    if not isinstance(mask, TileMask):
        raise TypeError(f"mask must come from prepare_mask or dynamic_mask, got {require.type_text(mask)}")


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of chosen tiles of each row, and the indices of tiles, chosen ones first, both int32."""
    counts = chosen.sum(-1, dtype=torch.int32)
    order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return counts, order.to(torch.int32).contiguous()
