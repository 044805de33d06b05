"""A `BlockMask` of flex_attention as a `TileMask`: its `mask_mod` is evaluated in chunks of queries, and packed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dmattn_ops import layout
from dmattn_ops.bands import Band, shifted
from dmattn_ops.meta import list_capacity, tile_records
from dmattn_ops.problem import TILE
from dmattn_ops.tile_mask import Segments, TileMask, band_fields, lengths_of, made

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_CHUNK = 1 << 24  # elements that are evaluated at a time: 16 MiB of bool and a few times that in between


def from_block_mask(mask: BlockMask, segments: Segments, band: Band) -> TileMask:
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
    return made(
        lengths=lengths_of(row_bits[0], seqlen_q, seqlen_k),
        row_tiles=_lists(classes, seqlen_q, columns, limits),
        col_tiles=_lists(classes.transpose(-1, -2), seqlen_k, classes.shape[-2], limits),
        row_bits=torch.cat(row_bits, dim=-2),
        col_bits=torch.cat(col_bits, dim=-1),
        **band_fields(band),
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
