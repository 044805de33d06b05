"""Choices of blocks that `bench_selection.py` measures: each query draws alone, or keeps what the query before it chose."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

NEIGHBOURS = (4, 8, 32, 128)
DRAWN_ANEW = 0.02  # of the entries of a clustered choice, from one query to the next


class Shape(NamedTuple):
    """Attention to some blocks of keys, with a list for each query and key head."""

    seqlen: int
    heads: int
    heads_kv: int
    dim: int
    dim_v: int
    block: int
    named: int  # blocks of a list


SHAPES = {
    "blocks of 64": Shape(32768, 64, 4, 128, 128, 64, 32),
    "blocks of 4": Shape(16384, 32, 2, 256, 256, 4, 512),
    "tokens": Shape(16384, 64, 1, 192, 128, 1, 2048),
    "long": Shape(131072, 64, 4, 128, 128, 64, 32),
}
TINY = {
    "blocks of 64": Shape(300, 4, 1, 32, 32, 64, 2),
    "blocks of 4": Shape(100, 8, 2, 48, 48, 4, 5),
    "tokens": Shape(100, 4, 1, 48, 32, 1, 9),
    "long": Shape(600, 4, 1, 32, 32, 64, 2),
}


def clustered(shape: Shape, seed: int = 0) -> Tensor:
    """Return choices int32 `[1, Hkv, S, k]` in which neighbours agree: -1 is none.

    A query keeps the choice of the query before it, but for 2% of its entries drawn anew, and never fewer than one at every
    second query.
    """
    generator, named = np.random.default_rng(seed), shape.named
    rate = max(DRAWN_ANEW * named, 0.5)
    found = np.full((shape.heads_kv, shape.seqlen, named), -1, np.int32)
    for head in range(shape.heads_kv):
        is_chosen = np.zeros(-(-shape.seqlen // shape.block), bool)
        is_chosen[:named] = True
        current, turn = np.arange(named, dtype=np.int32), 0
        for query in range(shape.seqlen):
            visible = query // shape.block + 1
            if visible <= named:
                found[head, query, :visible] = np.arange(visible)
                continue
            drawn = min(int((query + 1) * rate) - int(query * rate), visible - named)
            if drawn > 0:
                places = (turn + np.arange(drawn)) % named
                turn = (turn + 7 * drawn + 1) % named
                anew = _others(generator, is_chosen, visible, drawn)
                is_chosen[current[places]] = False
                current[places] = anew
            found[head, query] = current
    return torch.from_numpy(found)[None]


def _others(generator: np.random.Generator, is_chosen: np.ndarray, visible: int, count: int) -> list[int]:
    """Draw blocks that are not chosen, and note that they are."""
    found: list[int] = []
    while len(found) < count:
        for number in generator.integers(0, visible, 2 * count):
            if not is_chosen[number] and len(found) < count:
                found.append(int(number))
                is_chosen[number] = True
    return found


def independent(shape: Shape, device: str, seed: int = 0) -> Tensor:
    """Return choices int32 `[1, Hkv, S, k]` that each query draws alone from the blocks that it may see: -1 is none."""
    generator = torch.Generator(device=device).manual_seed(seed)
    blocks = torch.arange(-(-shape.seqlen // shape.block), device=device)
    parts = []
    for _ in range(shape.heads_kv):
        for start in range(0, shape.seqlen, 4096):
            rows = torch.arange(start, min(start + 4096, shape.seqlen), device=device)
            order = torch.rand(len(rows), len(blocks), device=device, generator=generator)
            drawn, number = order.masked_fill(blocks > rows[:, None] // shape.block, -1.0).topk(shape.named)
            parts.append(number.masked_fill(drawn < 0, -1).int())
    return torch.cat(parts).view(1, shape.heads_kv, shape.seqlen, shape.named)


def unions(indices: Tensor, neighbours: int) -> float:
    """Return how many times as many blocks neighbours choose together as one of them, over some tiles of the last half."""
    seqlen = indices.shape[2]
    starts = range(
        seqlen // 2 // neighbours * neighbours,
        seqlen - neighbours + 1,
        max(neighbours, seqlen // 64 // neighbours * neighbours),
    )
    found = [
        len(torch.unique(tile)) / max(1, tile.shape[1])
        for start in starts
        for tile in indices[0, :, start : start + neighbours].cpu()
    ]
    return round(sum(found) / max(1, len(found)), 2)
