"""A `BlockMask` of flex_attention as a `TileMask`: its `mask_mod` is evaluated in chunks of queries, and packed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dmattn_ops.bands import Band
from dmattn_ops.masks.chunks import pack_in_chunks
from dmattn_ops.masks.tile_mask import Segments, TileMask, from_packed, lengths_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def from_block_mask(mask: BlockMask, segments: Segments, band: Band) -> TileMask:
    """Evaluate a BlockMask in chunks of query tiles, and join what each chunk packs into."""
    *leading, seqlen_q, seqlen_k = mask.shape
    blocks, listed = -(-seqlen_q // mask.BLOCK_SIZE[0]), mask.kv_num_blocks.shape[-1]
    if listed < blocks:
        raise ValueError(
            f"mask must have {blocks} blocks of queries, as its {seqlen_q} queries need, got {listed}: a sliced BlockMask does"
            " not say which queries it holds, so prepare the whole one, and slice that with .queries(start, stop)"
        )
    limits = band.limits(seqlen_q, seqlen_k)
    packed = pack_in_chunks(_visible_in_blocks(mask), segments, (math.prod(leading), seqlen_q, seqlen_k), limits)
    return from_packed(lengths_of(packed[2], seqlen_q, seqlen_k), packed, band)


def _visible_in_blocks(mask: BlockMask) -> Callable[[int, int], Tensor]:
    """Return a function from a range of queries to what a BlockMask shows them: bool `[B|1, H|1, stop - start, Sk]`."""
    from torch.nn.attention.flex_attention import create_mask

    *leading, _, seqlen_k = mask.shape
    batch, heads = (1,) * (2 - len(leading)) + tuple(leading)
    device = mask.kv_indices.device
    block_q, block_k = mask.BLOCK_SIZE
    blocks = (batch, heads, -1, (seqlen_k + block_k - 1) // block_k)
    partial = _listed(mask.kv_num_blocks, mask.kv_indices, blocks)
    full = None
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        full = _listed(mask.full_kv_num_blocks, mask.full_kv_indices, blocks)
    columns = torch.arange(seqlen_k, device=device) // block_k

    def visible(start: int, stop: int) -> Tensor:
        rows = torch.arange(start, stop, device=device).unsqueeze(-1) // block_q
        inside = create_mask(
            lambda b, h, i, j: mask.mask_mod(b, h, i + start, j), batch, heads, stop - start, seqlen_k, device
        )
        keep = partial[:, :, rows, columns] & inside
        return keep if full is None else keep | full[:, :, rows, columns]

    return visible


def _listed(counts: Tensor, indices: Tensor, blocks: tuple[int, ...]) -> Tensor:
    """Return bool `blocks`: those that the first `counts` of `indices [..., rows, slots]` name, whatever integers they are."""
    return torch.ops.dmattn.spread_lists(counts.int(), indices.int(), blocks[-1]).reshape(blocks)
