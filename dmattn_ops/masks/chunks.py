"""Masks packed in chunks of query tiles, so that no dense mask of all pairs is ever in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dmattn_ops.bands import shifted
from dmattn_ops.call import TILE
from dmattn_ops.masks import layout
from dmattn_ops.meta import ceil_div, list_capacity, tile_records

_CHUNK = 1 << 24  # elements that are evaluated at a time: 16 MiB of bool and a few times that in between


def pack_in_chunks(
    visible: Callable[[int, int], Tensor],
    segments: tuple[Tensor | None, Tensor | None],
    sizes: tuple[int, int, int],
    limits: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pack what is visible, with segments and a band folded in; return row_tiles, col_tiles, row_bits and col_bits.

    `visible(start, stop)` returns bool `[Bm, Hm, stop - start, Sk]` of those queries; `sizes` are `Bm * Hm`, `Sq` and `Sk`.
    """
    heads, seqlen_q, seqlen_k = sizes
    rows = TILE * max(1, _CHUNK // (TILE * max(1, heads * seqlen_k)))
    chunks, tiles = [], []
    for start in range(0, max(seqlen_q, 1), rows):
        stop = min(start + rows, seqlen_q)
        queries = None if segments[0] is None else segments[0][:, start:stop]
        moved = shifted(*limits, start)
        chunks.append(torch.ops.dmattn.pack_mask(visible(start, stop), queries, segments[1], stop - start, *moved))
        tiles.append(ceil_div(stop - start, TILE))
    row_tiles, col_tiles, row_bits, col_bits = zip(*chunks, strict=True)
    if len(chunks) == 1:
        return row_tiles[0], col_tiles[0], row_bits[0], col_bits[0]
    columns = ceil_div(seqlen_k, TILE)
    pieces = [layout.classes_from_lists(lists, columns) for lists in row_tiles]
    classes = torch.cat([piece[..., :count, :] for piece, count in zip(pieces, tiles, strict=True)], dim=-2)
    return (
        _lists(classes, seqlen_q, columns, limits),
        _lists(classes.transpose(-1, -2), seqlen_k, classes.shape[-2], limits),
        torch.cat(row_bits, dim=-2),
        torch.cat(col_bits, dim=-1),
    )


def _lists(classes: Tensor, seqlen: int, columns: int, limits: tuple[int, int]) -> Tensor:
    """Return the lists of `seqlen` positions whose tiles see `columns` tiles of the other side, by their classes."""
    capacity = list_capacity(max(2, columns), *limits)
    return layout.lists_from_classes(classes, tile_records(seqlen), capacity)
