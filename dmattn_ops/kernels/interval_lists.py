"""Lists of tiles for a mask of intervals, made for one call: the mask itself holds O(S), and its lists are O(S^2 / 128^2).

1. `_write_hulls` reads the intervals once, and writes eight numbers for each tile of 128 keys, its hull;
2. the kernel that lists tiles (`tile_mask.py`) classifies pairs of tiles by hulls and the band.

A hull says which queries see

```
first, end             at least one of the tile's keys: from the least start to the greatest end
full_first, full_end   all of its 128 keys, but for hidden ones; full_end is 0 where a key is never seen
some_first, some_end   not all of its keys: from the least hidden_from to the greatest hidden_to
none_first, none_end   none of its keys, because every key that is seen at all is hidden from them
```

where a range that ends before it begins holds no query. So a tile that is listed may show nothing, and a full one shows
everything: lists may be longer than they must, never shorter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmattn_ops.call import HEADER, TILE, Call, Mask
from dmattn_ops.kernels.masks.launch import write_lists
from dmattn_ops.kernels.masks.lists import HULL
from dmattn_ops.launching.launch import computed, launch, workspace
from dmattn_ops.launching.overlap import follow_kernel_before
from dmattn_ops.meta import list_capacity, tile_records

_TILE = tl.constexpr(TILE)
_HULL = tl.constexpr(HULL)
_TILES = 8  # of keys in a program
_LONGEST_LISTS = 1 << 29  # words of both lists, 2 GiB: 128 heads of 180k queries and keys
_LONGEST_OF_ENTRY = 1 << 26  # the same for each batch entry of a batch-invariant call, 256 MiB
_LAST = tl.constexpr(0x7FFFFFFF)
SIDES = ("rows", "cols")


@triton.jit(do_not_specialize=["seqlen_k", "tiles", "col_count", "heads", "stride_b", "stride_h"])
def _write_hulls(
    start, end, hidden_from, hidden_to, hulls, seqlen_k, tiles, col_count, heads, stride_b, stride_h,
    HIDDEN: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Write the hulls of `TILES` tiles of keys, of which each matrix has `col_count`."""
    follow_kernel_before()
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    mine = tile < tiles
    matrix = (tile // col_count).to(tl.int64)
    key = (tile % col_count * _TILE)[:, None] + tl.arange(0, _TILE)[None, :]
    place = (matrix // heads * stride_b + matrix % heads * stride_h)[:, None] + key
    inside = mine[:, None] & (key < seqlen_k)
    first, behind = tl.load(start + place, inside, other=0), tl.load(end + place, inside, other=0)
    seen = first < behind
    hull = hulls + tile.to(tl.int64) * _HULL
    tl.store(hull, tl.min(tl.where(seen, first, _LAST), axis=1), mine)
    tl.store(hull + 1, tl.max(tl.where(seen, behind, 0), axis=1), mine)
    tl.store(hull + 2, tl.max(tl.where(seen, first, 0), axis=1), mine)
    tl.store(hull + 3, tl.min(tl.where(seen, behind, 0), axis=1), mine)
    some_first = tl.full([TILES], _LAST, tl.int32)
    some_behind = tl.zeros([TILES], tl.int32)
    none_first, none_behind = some_first, some_behind
    if HIDDEN:
        first, behind = tl.load(hidden_from + place, inside, other=0), tl.load(hidden_to + place, inside, other=0)
        hides = first < behind
        some_first = tl.min(tl.where(hides, first, _LAST), axis=1)
        some_behind = tl.max(tl.where(hides, behind, 0), axis=1)
        none_first = tl.max(tl.where(seen, tl.where(hides, first, _LAST), 0), axis=1)
        none_behind = tl.min(tl.where(seen, tl.where(hides, behind, 0), _LAST), axis=1)
    tl.store(hull + 4, some_first, mine)
    tl.store(hull + 5, some_behind, mine)
    tl.store(hull + 6, none_first, mine)
    tl.store(hull + 7, none_behind, mine)


def interval_lists(
    mask: Mask, band_lo: int, band_hi: int, seqlen_q: int, seqlen_k: int, sides: tuple[str, ...] = SIDES
) -> tuple[Tensor | None, ...]:
    """Return row_tiles and col_tiles `[Bm, Hm, records, 4 + capacity]` of intervals `[Bm, Hm, Sk]` inside a band.

    They are workspaces of one call; a side that is not asked for is None. The tensors of the mask must be laid out alike
    (`laid_out_alike`).
    """
    assert mask.start is not None
    start = mask.start
    batch, heads = start.shape[:2]
    records = tile_records(seqlen_q), tile_records(seqlen_k)
    row_tiles, col_tiles = (
        workspace(start, batch, heads, own, HEADER + list_capacity(other, band_lo, band_hi), dtype=torch.int32)
        if side in sides
        else None
        for side, own, other in zip(SIDES, records, reversed(records), strict=True)
    )
    col_count = triton.cdiv(seqlen_k, TILE)
    tiles = batch * heads * col_count
    hulls = workspace(start, batch * heads, col_count, HULL, dtype=torch.int32)
    if tiles:
        launch(
            _write_hulls, (triton.cdiv(tiles, _TILES),),
            start, mask.end, mask.hidden_from, mask.hidden_to, hulls,
            seqlen_k, tiles, col_count, heads, start.stride(0), start.stride(1),
            HIDDEN=mask.hidden_from is not None, TILES=_TILES, num_warps=4,
        )  # fmt: skip
    write_lists(hulls, seqlen_q, seqlen_k, band_lo, band_hi, row_tiles, col_tiles, "hulls")
    return row_tiles, col_tiles


def too_long(call: Call) -> bool:
    """Return whether the lists that intervals need would take more than `_LONGEST_LISTS` words."""
    mask, options = call.mask, call.options
    if mask.kind != "intervals" or mask.row_tiles is not None:
        return False
    parts = (mask.start, mask.end, mask.hidden_from, mask.hidden_to)
    batch, heads = (max(part.shape[dim] for part in parts if part is not None) for dim in (0, 1))
    rows, cols = tile_records(call.query.shape[1]), tile_records(call.key.shape[1])
    words = rows * (list_capacity(cols, options.band_lo, options.band_hi) + HEADER)
    words += cols * (list_capacity(rows, options.band_lo, options.band_hi) + HEADER)
    if options.batch_invariant:  # lists and bands name tiles in different orders
        return heads * words > _LONGEST_OF_ENTRY
    return batch * heads * words > _LONGEST_LISTS


def listed(call: Call, sides: tuple[str, ...] = SIDES) -> Call:
    """Return a call whose mask of intervals has lists of tiles, made for this call; other calls as they are.

    Its kernels walk the lists of these `sides`. Where the lists would be too long, kernels that can walk the band instead, and test
    every tile in it.
    """
    if call.mask.kind != "intervals":
        return call
    mask, options = laid_out_alike(call.mask), call.options
    if mask.row_tiles is None and not too_long(call):
        lengths = call.query.shape[1], call.key.shape[1]
        row_tiles, col_tiles = interval_lists(mask, options.band_lo, options.band_hi, *lengths, sides)
        mask = mask._replace(row_tiles=row_tiles, col_tiles=col_tiles)
    return call._replace(mask=mask)


def laid_out_alike(mask: Mask) -> Mask:
    """Return a mask of intervals whose tensors have the same shape and strides, the last one 1: kernels take one set."""
    names = ("start", "end", "hidden_from", "hidden_to")
    parts = {name: part for name in names if (part := getattr(mask, name)) is not None}
    layouts = {(tuple(part.shape), part.stride()) for part in parts.values()}
    if len(layouts) == 1 and next(iter(layouts))[1][-1] == 1:
        return mask
    sizes = [max(part.shape[dim] for part in parts.values()) for dim in range(3)]
    copies = {name: computed(_repeated, part, sizes[0], sizes[1]) for name, part in parts.items()}
    return mask._replace(**copies)


def _repeated(part: Tensor, batch: int, heads: int) -> Tensor:
    """Return a contiguous copy `[batch, heads, Sk]` of `[batch|1, a divisor of heads, Sk]`."""
    repeated = part.repeat_interleave(heads // part.shape[1], dim=1)
    return repeated.expand(batch, -1, -1).contiguous()
