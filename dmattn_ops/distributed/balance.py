"""Dealing a sequence to ranks by the work that a mask leaves."""

from __future__ import annotations

import torch
from torch import Tensor

from dmattn_ops.call import TILE
from dmattn_ops.checks import require
from dmattn_ops.distributed.team import Group, team_of
from dmattn_ops.masks import layout as mask_layout
from dmattn_ops.masks.tile_mask import TileMask


def balanced_layout(mask: TileMask, group: Group | None, *, chunks_per_rank: int = 4) -> tuple[int, ...]:
    """Return a layout that gives every rank about the same work under a mask: documents of many lengths, say.

    The sequence is cut into `chunks_per_rank` chunks a rank. The work of their queries is counted in tiles that are visited (of
    a dynamic mask, in keys that are seen), and each chunk, the one with the most work first, goes to the rank that has the
    least so far. Reads the counts on the host, once. All ranks get the same layout from the same mask.

    Args:
        mask: of the whole sequence, with the causal condition folded in: `prepare_mask(documents=ids, is_causal=True)`.
        group: the ranks that share the sequence.
        chunks_per_rank: more chunks balance better; a rank fetches more keys, and makes more and smaller calls of kernels unless
            it knows where documents end (`read_documents` of `prepare_context_mask`). At least 1.

    Raises:
        ValueError: where the sequence cannot be cut into so many chunks of equal length.
    """
    size = team_of(group).size
    chunks_per_rank = require.integer("chunks_per_rank", chunks_per_rank)
    count = size * chunks_per_rank
    if chunks_per_rank < 1 or mask.seqlen_q % count:
        raise ValueError(
            f"the sequence must be a multiple of {size} ranks times {chunks_per_rank} chunks long, got {mask.seqlen_q}"
        )
    return dealt(work_of_queries(mask).view(count, -1).sum(1).tolist(), size)


def dealt(work: list[float], size: int) -> tuple[int, ...]:
    """Return the numbers of the chunks with this work by rank: as many for each, in ascending order for each."""
    each = len(work) // size
    own: list[list[int]] = [[] for _ in range(size)]
    load = [0.0] * size
    for number in sorted(range(len(work)), key=lambda number: (-work[number], number)):
        rank = min((rank for rank in range(size) if len(own[rank]) < each), key=lambda rank: (load[rank], rank))
        own[rank].append(number)
        load[rank] += work[number]
    return tuple(number for numbers in own for number in sorted(numbers))


def work_of_queries(mask: TileMask) -> Tensor:
    """Return a measure of the work of each query, float32 `[Sq]`."""
    parts = mask.mask
    if parts.row_tiles is None:
        limits = mask.band.limits(mask.seqlen_q, mask.seqlen_k)
        return mask_layout.keys_seen(parts, *limits, mask.seqlen_q).sum((0, 1), dtype=torch.float32)
    tiles = parts.row_tiles[..., 1:3].sum((0, 1, 3), dtype=torch.float32)
    return tiles.repeat_interleave(TILE)[: mask.seqlen_q]
