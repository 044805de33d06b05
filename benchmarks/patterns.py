"""Dense bool masks for benchmarks: the four patterns of bubble reduction, and random blocks of 128 x 128.

`sparsity` is what a pattern aims at; how much it really drops depends on the pattern, and rows of results say how much.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 128


def random_pattern(seqlen: int, sparsity: float, generator: torch.Generator) -> Tensor:
    """Keep each element with probability `1 - sparsity`."""
    return torch.rand(seqlen, seqlen, generator=generator, device=generator.device) >= sparsity


def block_pattern(seqlen: int, sparsity: float, generator: torch.Generator) -> Tensor:
    """Drop the rows and the columns in even-numbered stripes: half of all queries see no key."""
    width = max(16, int(seqlen * sparsity / 4))
    kept = (torch.arange(seqlen, device=generator.device) // width) % 2 == 1
    return kept[:, None] & kept[None, :]


def diagonal_pattern(seqlen: int, sparsity: float, generator: torch.Generator) -> Tensor:
    """Keep a band on both sides of the diagonal."""
    position = torch.arange(seqlen, device=generator.device)
    return (position[:, None] - position).abs() <= max(8, int(seqlen * (1 - sparsity) / 2))


def structured_pattern(seqlen: int, sparsity: float, generator: torch.Generator) -> Tensor:
    """Keep the first four keys, a band around the diagonal and some columns drawn at random."""
    position = torch.arange(seqlen, device=generator.device)
    budget = seqlen * (1 - sparsity)
    columns = torch.randperm(seqlen, generator=generator, device=generator.device)[: int(0.3 * budget)]
    kept = position < 4
    kept[columns] = True
    return kept | ((position[:, None] - position).abs() <= int(0.7 * budget) // 2)


def block128_pattern(seqlen: int, sparsity: float, generator: torch.Generator) -> Tensor:
    """Keep each block of 128 x 128 with probability `1 - sparsity`, and those on the diagonal."""
    blocks = -(-seqlen // BLOCK)
    kept = torch.rand(blocks, blocks, generator=generator, device=generator.device) >= sparsity
    kept.fill_diagonal_(True)
    return kept.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:seqlen, :seqlen]


PATTERNS: dict[str, Callable[[int, float, torch.Generator], Tensor]] = {
    "random": random_pattern,
    "block": block_pattern,
    "diagonal": diagonal_pattern,
    "structured": structured_pattern,
    "block128": block128_pattern,
}
BUBBLE_PATTERNS = ("random", "block", "diagonal", "structured")
SPARSITIES = (0.1, 0.3, 0.5, 0.7, 0.9)


def make_mask(name: str, shape: tuple[int, int, int], sparsity: float, device: str, seed: int = 0) -> Tensor:
    """Return the mask `[B, H, S, S]` for `shape = (B, H, S)`, drawn anew for each batch and head."""
    batch, heads, seqlen = shape
    generator = torch.Generator(device).manual_seed(seed)
    mask = torch.empty(batch, heads, seqlen, seqlen, dtype=torch.bool, device=device)
    for plane in mask.view(-1, seqlen, seqlen):
        plane.copy_(PATTERNS[name](seqlen, sparsity, generator))
    return mask
