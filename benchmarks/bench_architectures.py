"""How much the kernels for this architecture gain: dispatched kernels against those for SM 8.0, forced on the same GPU.

Lengths from 1024 to 32768 at about 16384 tokens and a model width of 2048; causal, full, and under a mask of random blocks of
128 x 128, shared by batch and heads, that keeps half of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from patterns import make_mask
from peers import Problem
from table import parser, run_table

TOKENS = 16384
WIDTH = 2048
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
DIMS = (64, 128, 256)
KINDS = ("causal", "full", "masked")


def problems(device: str) -> Iterator[Problem]:
    """Make the problems one at a time: masks of long sequences are large."""
    for dim in DIMS:
        for seqlen in LENGTHS:
            batch, heads = max(1, TOKENS // seqlen), WIDTH // dim
            for kind in KINDS:
                mask = make_mask("block128", (1, 1, seqlen), 0.5, device) if kind == "masked" else None
                case = f"B{batch} H{heads} S{seqlen} D{dim} {kind}"
                yield Problem(case, batch, heads, seqlen, dim, kind == "causal", mask=mask, device=device)


def main(arguments: list[str]) -> list[dict]:
    """Measure the table."""
    options = parser(__doc__).parse_args(arguments)
    return run_table(problems(options.device), ["dmattn", "dmattn-sm80"], options, "architectures")[1]


if __name__ == "__main__":
    main(sys.argv[1:])
