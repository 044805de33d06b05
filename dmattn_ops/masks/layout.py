"""The layout of a mask in plain torch: words of bits, lists of tiles, and back to a dense mask (tables: DESIGN.md).

Nothing here reads a value on the host, so all of it can be traced, captured and run on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dmattn_ops.call import HEADER, TILE, UNBOUNDED, WORD_BITS, Mask
from dmattn_ops.meta import tile_records

EMPTY, PARTIAL, FULL = 0, 1, 2  # classes of a tile


def pack_words(keep: Tensor) -> Tensor:
    """Pack bool `[..., 32 n]` into int32 words `[..., n]`, the first element in the lowest bit."""
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=keep.device)
    places = torch.arange(0, WORD_BITS, 8, dtype=torch.int32, device=keep.device)
    groups = keep.reshape(*keep.shape[:-1], keep.shape[-1] // WORD_BITS, 4, 8)
    return ((groups * bits).sum(-1, dtype=torch.int32) << places).sum(-1, dtype=torch.int32)


def pad_to_tiles(keep: Tensor) -> Tensor:
    """Pad the last two dimensions with False to multiples of a tile."""
    rows, cols = keep.shape[-2:]
    return torch.nn.functional.pad(keep, (0, -cols % TILE, 0, -rows % TILE))


def classify(keep: Tensor) -> Tensor:
    """Return the class of each tile, int64 `[..., nQ, nK]`, of a dense mask padded to tiles."""
    rows, cols = keep.shape[-2] // TILE, keep.shape[-1] // TILE
    visible = keep.reshape(*keep.shape[:-2], rows, TILE, cols, TILE).sum((-3, -1))
    return (visible > 0).long() + (visible == TILE * TILE).long()


def lists_from_classes(classes: Tensor, records: int, capacity: int) -> Tensor:
    """Return the lists `[..., records, 4 + capacity]` of a map of classes `[..., rows, columns]`; rows that lack are empty."""
    classes = torch.nn.functional.pad(
        classes, (0, max(0, capacity - classes.shape[-1]), 0, records - classes.shape[-2])
    )
    partial, full = (classes == PARTIAL).sum(-1), (classes == FULL).sum(-1)
    ranked = torch.argsort(partial + full, dim=-1, descending=True, stable=True)
    order = torch.where(classes == EMPTY, FULL + 1, classes)  # partial tiles, then full ones, then the rest
    indices = torch.argsort(order, dim=-1, stable=True)[..., :capacity]
    header = torch.stack((ranked, partial, full, torch.zeros_like(full)), dim=-1)
    return torch.cat((header, indices), dim=-1).to(torch.int32)


def classes_from_lists(lists: Tensor, columns: int) -> Tensor:
    """Return the map of classes, int8 `[..., rows, columns]`, that lists `[..., rows, 4 + capacity]` describe."""
    return _spread(lists, columns)[..., :columns]


def _spread(lists: Tensor, columns: int) -> Tensor:
    """Return the map of classes with one more column, of empty tiles, so that no size is 1 for some lengths only."""
    indices, partial = lists[..., HEADER:], lists[..., 1]
    listed = torch.ops.dmattn.spread_lists(partial + lists[..., 2], indices, columns + 1)
    return listed.to(torch.int8) + (listed & ~torch.ops.dmattn.spread_lists(partial, indices, columns + 1)).to(
        torch.int8
    )


def spread_lists(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Return bool `[..., columns]`, True at the columns that the first `counts [...]` of `indices [..., slots]` name."""
    slot = torch.arange(indices.shape[-1], device=indices.device)
    target = torch.where(slot < counts.unsqueeze(-1), indices, columns).long()  # other slots name the column too many
    listed = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    return listed.scatter_(-1, target, True)[..., :columns].contiguous()


def rank_ids(ids: Tensor) -> Tensor:
    """Number the distinct ids of each row of `[B, S]` in ascending order, int32; no id is read on the host."""
    ordered, order = ids.sort(dim=-1)
    numbers = (ordered != before(ordered)).cumsum(-1, dtype=torch.int32)
    return torch.empty_like(numbers).scatter_(-1, order, numbers)


def band_mask(band_lo: int, band_hi: int, seqlen_q: int, seqlen_k: int, device: torch.device | None) -> Tensor:
    """Return the dense band `[Sq, Sk]`: `i + band_lo <= j <= i + band_hi`."""
    keys, rows = torch.arange(seqlen_k, device=device), torch.arange(seqlen_q, device=device).unsqueeze(-1)
    return (keys >= rows + band_lo) & (keys <= rows + band_hi)  # no number of a pair is in memory


def segments_mask(q_segments: Tensor | None, k_segments: Tensor) -> Tensor:
    """Return bool `[B|1, Hm, Sq|1, Sk]`, True where the segments of queries `[B|1, Sq]` and of keys `[B|1, Hm, Sk]` are equal."""
    keys = k_segments.unsqueeze(-2)
    return keys == 0 if q_segments is None else q_segments[:, None, :, None] == keys


def intervals_mask(mask: Mask, stop: int, start: int = 0) -> Tensor:
    """Return bool `[Bm, Hm, rows, Sk]`, True where intervals of keys `[Bm, Hm, Sk]` hold queries `start` to `stop - 1`."""
    assert mask.end is not None
    rows = torch.arange(start, stop, device=mask.end.device).unsqueeze(-1)
    keep = rows < mask.end.unsqueeze(-2)
    if mask.start is not None:
        keep = keep & (rows >= mask.start.unsqueeze(-2))
    if mask.hidden_from is not None and mask.hidden_to is not None:
        keep = keep & ~((rows >= mask.hidden_from.unsqueeze(-2)) & (rows < mask.hidden_to.unsqueeze(-2)))
    return keep


def bits_mask(mask: Mask, seqlen_k: int, stop: int, start: int = 0) -> Tensor:
    """Return the bits of the queries from `start` to `stop - 1` as bool `[Bm, Hm, rows, Sk]`."""
    assert mask.row_bits is not None and mask.row_tiles is not None
    first, tiles = start // TILE * TILE, slice(start // TILE, (stop + TILE - 1) // TILE)
    part = Mask(row_tiles=mask.row_tiles[:, :, tiles], row_bits=mask.row_bits[:, :, first:stop])
    return dense(part, -UNBOUNDED, UNBOUNDED, stop - first, seqlen_k)[:, :, start - first :]


def keys_seen(mask: Mask, band_lo: int, band_hi: int, seqlen_q: int) -> Tensor:
    """Return the number of keys that each query sees by intervals inside the band, int64 `[Bm, Hm, Sq]`, in O(Sq + Sk)."""
    assert mask.end is not None
    keys = torch.arange(mask.end.shape[-1], device=mask.end.device).expand(mask.end.shape)
    low, high = keys - band_hi, torch.minimum(mask.end, keys - band_lo + 1)
    if mask.start is not None:
        low = torch.maximum(low, mask.start)
    seen = _covered(low, high, seqlen_q)
    if mask.hidden_from is not None and mask.hidden_to is not None:
        seen = seen - _covered(torch.maximum(low, mask.hidden_from), torch.minimum(high, mask.hidden_to), seqlen_q)
    return seen


def _covered(low: Tensor, high: Tensor, size: int) -> Tensor:
    """Return the number of ranges `low .. high - 1`, `[..., n]`, that hold each of `size` places: `[..., size]`."""
    low, high = low.clamp(0, size), high.clamp(0, size)
    some = (low < high).long()
    steps = torch.zeros((*low.shape[:-1], size + 1), dtype=torch.int64, device=low.device)
    return steps.scatter_add(-1, low, some).scatter_add(-1, high, -some).cumsum(-1)[..., :-1]


def interval_tiles(mask: Mask, band_lo: int, band_hi: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Return the tiles that kernels visit for intervals inside the band, bool `[Bm, Hm, nQ, nK]`: by the hulls of intervals.

    The hull of a tile of keys goes from the first query that sees one of them to the last; queries from which all of them
    are hidden do not visit it.
    """
    assert mask.end is not None
    start = torch.zeros_like(mask.end) if mask.start is None else mask.start
    seen = start < mask.end
    low, _ = _tile_ranges(torch.where(seen, start, seqlen_q))
    _, high = _tile_ranges(torch.where(seen, mask.end, 0).clamp(max=seqlen_q))
    q_first, q_last = (end.unsqueeze(-1) for end in _tile_ends(seqlen_q, start.device))
    k_first, k_last = _tile_ends(seqlen_k, start.device)
    inside = (k_last - q_first >= band_lo) & (k_first - q_last <= band_hi)
    inside = inside & (q_last >= low.unsqueeze(-2)) & (q_first < high.unsqueeze(-2))
    if mask.hidden_from is None or mask.hidden_to is None:
        return inside
    hides = mask.hidden_from < mask.hidden_to
    _, first = _tile_ranges(torch.where(seen, torch.where(hides, mask.hidden_from, seqlen_q), 0))
    behind, _ = _tile_ranges(torch.where(seen, torch.where(hides, mask.hidden_to, 0), seqlen_q))
    return inside & ~((q_first >= first.unsqueeze(-2)) & (q_last < behind.unsqueeze(-2)))


def dense(mask: Mask, band_lo: int, band_hi: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Return the mask as bool `[Bm, Hm, Sq, Sk]`; a tile is what its list says it is."""
    if mask.end is not None:
        return intervals_mask(mask, seqlen_q) & band_mask(band_lo, band_hi, seqlen_q, seqlen_k, mask.end.device)
    partial = None
    if mask.k_segments is not None:
        band = band_mask(band_lo, band_hi, seqlen_q, seqlen_k, mask.k_segments.device)
        partial = segments_mask(mask.q_segments, mask.k_segments) & band
    elif mask.row_bits is not None:
        rows, columns = (torch.arange(size, device=mask.row_bits.device) for size in (seqlen_q, seqlen_k))
        words = mask.row_bits[..., rows.unsqueeze(-1), columns // WORD_BITS]
        shifted = torch.bitwise_right_shift(
            words, (columns % WORD_BITS).to(torch.int32)
        )  # `>>` of a DTensor does nothing
        partial = (shifted & 1).bool()
    if partial is None:
        raise ValueError("a mask must hold bits, segments or intervals")
    if mask.row_tiles is None:
        return partial
    rows, columns = (torch.arange(size, device=partial.device) // TILE for size in (seqlen_q, seqlen_k))
    classes = _spread(mask.row_tiles, (seqlen_k + TILE - 1) // TILE)[..., rows.unsqueeze(-1), columns]
    return (classes == FULL) | ((classes == PARTIAL) & partial)


def segment_classes(q_segments: Tensor | None, k_segments: Tensor, seqlen_q: int, band_lo: int, band_hi: int) -> Tensor:
    """Return the class of each tile `[Bm, Hm, nQ, nK]`, from the range of its segments.

    An empty tile may count as partial.
    """
    seqlen_k = k_segments.shape[-1]
    q_low, q_high = _tile_ranges(q_segments if q_segments is not None else k_segments.new_zeros((1, seqlen_q)))
    k_low, k_high = _tile_ranges(k_segments)
    q_low, q_high = q_low[:, None, :, None], q_high[:, None, :, None]
    k_low, k_high = k_low.unsqueeze(-2), k_high.unsqueeze(-2)
    q_first, q_last = _tile_ends(seqlen_q, k_segments.device)
    k_first, k_last = _tile_ends(seqlen_k, k_segments.device)
    nearest, farthest = k_first - q_last.unsqueeze(-1), k_last - q_first.unsqueeze(-1)  # least and greatest j - i
    inside = (farthest >= band_lo) & (nearest <= band_hi) & (band_lo <= band_hi)
    listed = inside & (torch.maximum(q_low, k_low) <= torch.minimum(q_high, k_high))
    whole = (nearest >= band_lo) & (farthest <= band_hi)
    whole = whole & ((q_last - q_first).unsqueeze(-1) == TILE - 1) & (k_last - k_first == TILE - 1)
    full = whole & (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
    return listed.long() + (listed & full).long()


def _tile_ranges(segments: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest segment of each tile of `[..., S]`: two `[..., nS]`.

    The second tile of a short sequence is empty: its least segment is larger than any, its greatest smaller.
    """
    first, _ = _tile_ends(segments.shape[-1], segments.device)
    places = first.unsqueeze(-1) + torch.arange(TILE, device=segments.device)
    low, high = (
        torch.nn.functional.pad(segments, (0, 2 * TILE), value=value)[..., places]
        for value in (torch.iinfo(torch.int32).max, torch.iinfo(torch.int32).min)
    )
    return low.amin(-1), high.amax(-1)


def _tile_ends(seqlen: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first and the last position of each tile: two `[nS]`."""
    first = torch.arange(tile_records(seqlen), device=device) * TILE
    return first, (first + TILE - 1).clamp(max=seqlen - 1)


def runs(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first position and the end of the run of equal neighbours that each of `ids [B, S]` lies in, int32."""
    seqlen = ids.shape[-1]
    place = torch.arange(seqlen, dtype=torch.int32, device=ids.device)
    first = torch.where(ids != before(ids), place, 0).cummax(-1).values
    behind = before(ids.flip(-1)).flip(-1)
    last = torch.where(ids != behind, place + 1, seqlen).flip(-1).cummin(-1).values.flip(-1)
    return first, last


def before(row: Tensor) -> Tensor:
    """Return `[B, S]` shifted by one: each element's left neighbour, and the first element itself at the first place.

    DTensor of torch 2.11 does not know roll; a slice that is one shorter would make length 2 a graph of its own.
    """
    return torch.cat((row[:, :1], row), dim=-1)[:, :-1]


def is_one_run_each(ids: Tensor) -> bool:
    """Return whether no id of `[B, S]` returns after another one. Reads the ids on the host."""
    ordered = ids.sort(-1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]).sum(-1)  # DTensor of torch 2.11 does not know !=
    return bool(((ids[:, 1:] == ids[:, :-1]).sum(-1) == repeated).all())


def own(part: Tensor) -> Tensor:
    """Return a contiguous copy for a mask to hold: a view would change with the caller's tensor, and keep and save all of it."""
    return part.clone(memory_format=torch.contiguous_format)
