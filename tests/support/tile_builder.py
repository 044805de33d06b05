"""Build the tensors of a mask from a dense bool tensor, slowly and plainly: what the mask operators must agree with."""

from __future__ import annotations

import torch
from torch import Tensor

from dmattn_ops.call import HEADER, TILE, UNBOUNDED, WORD_BITS, Mask
from dmattn_ops.masks import layout


def pad_to_tiles(keep: Tensor) -> Tensor:
    """Pad `[Bm, Hm, Sq, Sk]` with False to whole tiles: `[Bm, Hm, 128 nQ, 128 nK]`."""
    rows, columns = -keep.shape[-2] % TILE, -keep.shape[-1] % TILE
    return torch.nn.functional.pad(keep, (0, columns, 0, rows))


def tile_states(keep: Tensor) -> Tensor:
    """Return 0 (empty), 1 (partial) or 2 (full) for each tile of `keep`: `[Bm, Hm, nQ, nK]`."""
    padded = pad_to_tiles(keep)
    batch, heads, rows, columns = padded.shape
    tiles = padded.view(batch, heads, rows // TILE, TILE, columns // TILE, TILE).transpose(3, 4).flatten(4)
    return tiles.any(-1).int() + (tiles.all(-1) & tiles.any(-1)).int()


def with_second_record(states: Tensor) -> Tensor:
    """Add rows of empty tiles until there are two: lists have two records for short sequences as well."""
    return torch.nn.functional.pad(states, (0, 0, 0, max(0, 2 - states.shape[-2])))


def build_lists(states: Tensor, capacity: int | None = None) -> Tensor:
    """Turn tile states `[Bm, Hm, R, C]` into records `[Bm, Hm, max(2, R), 4 + capacity]`; unspecified words hold -7."""
    states = with_second_record(states)
    batch, heads, rows, columns = states.shape
    capacity = max(2, columns) if capacity is None else capacity
    lists = torch.full((batch, heads, rows, HEADER + capacity), -7, dtype=torch.int32)
    work = states.ne(0).sum(-1)
    for b in range(batch):
        for h in range(heads):
            lists[b, h, :, 0] = torch.sort(-work[b, h], stable=True).indices.int()
            for r in range(rows):
                partial = states[b, h, r].eq(1).nonzero().flatten().int()
                full = states[b, h, r].eq(2).nonzero().flatten().int()
                lists[b, h, r, 1:HEADER] = torch.tensor([len(partial), len(full), 0])
                lists[b, h, r, HEADER : HEADER + len(partial) + len(full)] = torch.cat([partial, full])
    return lists


def pack_bits(keep: Tensor) -> Tensor:
    """Pack `[..., R, C]` into int32 words along the last dimension: bit `c & 31` of word `c >> 5`."""
    words = keep.view(*keep.shape[:-1], -1, WORD_BITS).long() << torch.arange(WORD_BITS)
    total = words.sum(-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int()


def build_tiles(keep: Tensor) -> Mask:
    """Build lists and bits of `keep` (bool, `[Bm, Hm, Sq, Sk]`); bits that nobody may read are inverted."""
    states = tile_states(keep)
    spread = states.eq(1).repeat_interleave(TILE, -2).repeat_interleave(TILE, -1)
    padded = pad_to_tiles(keep)
    padded = torch.where(spread, padded, ~padded)
    return Mask(
        row_tiles=build_lists(states),
        col_tiles=build_lists(states.mT),
        row_bits=pack_bits(padded),
        col_bits=pack_bits(padded.mT.contiguous()),
    )


def build_segment_tiles(keep: Tensor, q_segments: Tensor | None, k_segments: Tensor) -> Mask:
    """Build the lists of `keep` and pass the segments along; full tiles are those in which every pair is kept."""
    states = tile_states(keep)
    return Mask(
        row_tiles=build_lists(states),
        col_tiles=build_lists(states.mT),
        q_segments=q_segments,
        k_segments=k_segments,
    )


def build_interval_tiles(
    start: Tensor,
    end: Tensor,
    hidden_from: Tensor | None = None,
    hidden_to: Tensor | None = None,
    *,
    seqlen_q: int,
    band: tuple[int, int] = (-UNBOUNDED, UNBOUNDED),
) -> Mask:
    """Build the lists of intervals `[Bm, Hm, Sk]` inside a band; full tiles are those in which every pair is visible."""
    shown = Mask(start=start, end=end, hidden_from=hidden_from, hidden_to=hidden_to)
    states = tile_states(layout.dense(shown, *band, seqlen_q, start.shape[-1]))
    return shown._replace(row_tiles=build_lists(states), col_tiles=build_lists(states.mT))


def on_gpu(mask: Mask) -> Mask:
    """Return a mask whose tensors lie on the GPU."""
    return Mask._make([part.cuda() if isinstance(part, Tensor) else part for part in mask])
