"""How much of a masked tile's time is saved: four patterns of masks at five sparsities.

Each mask runs through this library, through torch's attention and through flex_attention. The baseline is the time of this
library's own kernels without a mask. `saved` is the part of that time which the mask saves, forward and backward together.
`bubble` is the part of the remaining time that the density of the mask does not explain.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import dmattn_ops
from patterns import BUBBLE_PATTERNS, SPARSITIES, make_mask
from peers import Problem
from plot import draw
from table import parser, run_table

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def case_name(pattern: str, sparsity: float) -> str:
    return f"{pattern} {sparsity:.1f}"


def problems(shape: tuple[int, int, int, int], device: str, dtype: torch.dtype, seed: int) -> Iterator[Problem]:
    """Make the problem of each pattern and sparsity for `shape = (B, H, S, D)`."""
    batch, heads, seqlen, dim = shape
    for pattern in BUBBLE_PATTERNS:
        for sparsity in SPARSITIES:
            mask = make_mask(pattern, (batch, heads, seqlen), sparsity, device, seed)
            yield Problem(
                case_name(pattern, sparsity), batch, heads, seqlen, dim, mask=mask, device=device, dtype=dtype
            )


def densities(problem: Problem) -> dict[str, float]:
    """Return the part of the elements that the mask keeps, and of the 128 x 128 tiles that are visited."""
    tiles = dmattn_ops.prepare_mask(problem.mask).density().item()
    return {"density": round(problem.density, 4), "tile_density": round(tiles, 4)}


def summarise(rows: list[dict]) -> list[dict]:
    """Return, for each masked row of ours, what is saved of the dense time and how the peers compare."""

    def total(case: str, name: str) -> float | None:
        found = [row for row in rows if row["case"] == case and row["implementation"] == name]
        if not found or found[0]["backward_ms"] is None:
            return None
        return found[0]["forward_ms"] + found[0]["backward_ms"] + (found[0]["prepare_ms"] or 0.0)

    summary = []
    for row in rows:
        if row["implementation"] != "dmattn":
            continue
        kernels = row["forward_ms"] + row["backward_ms"]
        dense = total(row["case"], "dmattn-unmasked")
        ours = total(row["case"], "dmattn")
        line: dict = {"case": row["case"], "density": row["density"], "tile_density": row["tile_density"]}
        if dense is not None:
            line["saved"] = round(1 - kernels / dense, 4)
            line["bubble"] = round(1 - row["density"] * dense / kernels, 4)
        for peer in ("sdpa", "flex"):
            theirs = total(row["case"], peer)
            if theirs is not None and ours is not None:
                line[f"{peer}_over_ours"] = round(theirs / ours, 3)
        summary.append(line)
    return summary


def main(arguments: list[str]) -> list[dict]:
    """Measure all patterns, write the result file with its summary, and return the summary."""
    options = parser(__doc__)
    options.add_argument("--batch-size", type=int, default=2)
    options.add_argument("--num-heads", type=int, default=8)
    options.add_argument("--seq-len", type=int, default=1024)
    options.add_argument("--head-dim", type=int, default=64)
    options.add_argument("--dtype", choices=DTYPES, help="bfloat16 on a GPU, float32 on a CPU")
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args(arguments)
    dtype = DTYPES[chosen.dtype or ("bfloat16" if chosen.device == "cuda" else "float32")]
    shape = (chosen.batch_size, chosen.num_heads, chosen.seq_len, chosen.head_dim)
    names = ["dmattn", "dmattn-unmasked", "sdpa", "flex"]
    made = problems(shape, chosen.device, dtype, chosen.seed)
    picture, chosen.plot = chosen.plot, None  # drawn below, from the summary
    output, rows = run_table(made, names, chosen, "bubble", densities)
    summary = summarise(rows)
    for line in summary:
        print("  ".join(f"{name} {value}" for name, value in line.items()))
    add_summary(output, summary)
    if picture:
        draw(output, picture)
    return summary


def add_summary(path: Path, summary: list[dict]) -> None:
    """Write the summary into the result file, beside its rows."""
    results = json.loads(path.read_text())
    path.write_text(json.dumps({**results, "summary": summary}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
