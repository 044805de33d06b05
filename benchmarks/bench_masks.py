"""Attention under a dense bool mask against flex_attention and torch's attention with the same mask.

`--table patterns`: many kinds of masks at one size. `--table proportional`: random blocks of 128 x 128 at several densities,
and a mask that keeps everything, against no mask. It shows whether time falls in proportion to the density. `--table
elements`: random elements, so that every tile is partial, against no mask. It shows what testing bits costs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from patterns import make_mask
from peers import Problem
from table import parser, run_table

GPU_SHAPE = (2, 8, 4096, 128)  # batch, heads, length, head dimension
GPU_LONG_SHAPE = (2, 8, 8192, 128)
CPU_SHAPE = (1, 8, 2048, 64)
PATTERN_ROWS: tuple[tuple[str, float], ...] = (
    ("random", 0.1),
    ("random", 0.5),
    ("random", 0.9),
    ("structured", 0.1),
    ("structured", 0.5),
    ("structured", 0.9),
    ("block", 0.5),
    ("diagonal", 0.5),
    ("diagonal", 0.9),
    ("block128", 0.1),
    ("block128", 0.5),
    ("block128", 0.9),
)
PROPORTIONAL_SPARSITIES = (0.0, 0.25, 0.5, 0.75, 0.9)
ELEMENT_SHAPES = ((4, 32, 4096, 64), (4, 16, 4096, 128), (4, 8, 4096, 256))


def problems(table: str, device: str) -> Iterator[Problem]:
    """Make the rows of one table, one mask at a time."""
    on_gpu = device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    for (batch, heads, seqlen, dim), name, sparsity in _rows(table, on_gpu):
        mask = make_mask(name, (batch, heads, seqlen), sparsity, device)
        case = f"{name} {mask.float().mean().item():.2f} B{batch} H{heads} S{seqlen} D{dim}"
        yield Problem(case, batch, heads, seqlen, dim, mask=mask, device=device, dtype=dtype)


def _rows(table: str, on_gpu: bool) -> list[tuple[tuple[int, int, int, int], str, float]]:
    """Return shape, pattern and sparsity of each row of a table."""
    if table == "patterns":
        return [(GPU_SHAPE if on_gpu else CPU_SHAPE, *row) for row in PATTERN_ROWS]
    if table == "proportional":
        shape = GPU_LONG_SHAPE if on_gpu else CPU_SHAPE
        return [(shape, "block128", sparsity) for sparsity in PROPORTIONAL_SPARSITIES]
    return [(shape, "random", 0.5) for shape in (ELEMENT_SHAPES if on_gpu else (CPU_SHAPE,))]


def main(arguments: list[str]) -> list[dict]:
    """Measure one of the tables."""
    options = parser(__doc__)
    options.add_argument("--table", choices=["patterns", "proportional", "elements"], default="patterns")
    chosen = options.parse_args(arguments)
    names = ["dmattn", "dmattn-unmasked"]
    if chosen.table == "patterns":
        names += ["flex", "sdpa", "sdpa-efficient"]
    what = "masks" if chosen.table == "patterns" else chosen.table
    return run_table(problems(chosen.table, chosen.device), names, chosen, what)[1]


if __name__ == "__main__":
    main(sys.argv[1:])
