"""Attention without a mask against cuDNN, FlashAttention 4, flex_attention and torch's own choice.

On a GPU in bfloat16 at the sizes of language models; on a CPU in float32 at one size. Prints milliseconds and TFLOP/s
of the forward and of the backward (2.5 times the forward's operations; causal counts half).
"""

from __future__ import annotations

import sys

import torch

from peers import Problem
from table import parser, run_table

# batch, heads, key heads (None: as many), length, head dimension
GPU_SHAPES = (
    (4, 32, None, 4096, 64),
    (1, 32, None, 16384, 64),
    (4, 16, None, 4096, 128),
    (1, 16, None, 16384, 128),
    (4, 8, None, 4096, 256),
    (1, 8, None, 16384, 256),
)
GROUPED = (2, 64, 8, 8192, 128)
CPU_SHAPES = ((1, 8, None, 2048, 64),)


def problem(shape: tuple[int, int, int | None, int, int], causal: bool, device: str) -> Problem:
    """Name and make one problem."""
    batch, heads, kv_heads, seqlen, dim = shape
    grouped = f" Hkv{kv_heads}" if kv_heads else ""
    case = f"B{batch} H{heads}{grouped} S{seqlen} D{dim} {'causal' if causal else 'full'}"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return Problem(case, batch, heads, seqlen, dim, causal, kv_heads, device=device, dtype=dtype)


def main(arguments: list[str]) -> list[dict]:
    """Measure the table."""
    options = parser(__doc__).parse_args(arguments)
    shapes = GPU_SHAPES if options.device == "cuda" else CPU_SHAPES
    problems = [problem(shape, causal, options.device) for shape in shapes for causal in (True, False)]
    names = ["dmattn", "fa4", "cudnn", "flex", "sdpa"]
    if options.device == "cpu":
        names = ["dmattn", "sdpa"]  # flex_attention has no backward there
    else:
        problems.append(problem(GROUPED, True, options.device))
        names.append("dmattn-sm80")
    return run_table(problems, names, options, "dense")[1]


if __name__ == "__main__":
    main(sys.argv[1:])
