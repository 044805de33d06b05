"""Time dense causal attention of the checkout that PYTHONPATH names; print the milliseconds of each shape as JSON.

`bench_dynamic.py --old ROOT` runs this in a process of its own, on the same machine: a speed-up may be against the dense
kernels as they were at an earlier commit.
"""

from __future__ import annotations

import functools
import json
import sys

import torch

import dmattn_ops
from timing import interleaved, kernels_ms


def main(shapes: list[tuple[int, int, int, int]], device: str, rounds: int) -> dict[str, dict[str, float]]:
    """Time forward and backward for each (heads, key heads, S, D)."""
    found = {}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for heads, kv_heads, seqlen, dim in shapes:
        leaves = [
            torch.randn(1, seqlen, count, dim, device=device, dtype=dtype, requires_grad=True)
            for count in (heads, kv_heads, kv_heads)
        ]
        attend = functools.partial(dmattn_ops.flash_dmattn_func, *leaves, is_causal=True)
        out = attend()
        backward = functools.partial(torch.autograd.grad, out, leaves, torch.randn_like(out), retain_graph=True)
        samples = interleaved({"forward": attend, "backward": backward}, device, rounds=rounds, timer=kernels_ms)
        times = {f"{part}_ms": round(sample.median, 4) for part, sample in samples.items()}
        found[f"{heads} {kv_heads} {seqlen} {dim}"] = times
    return found


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    times = main([tuple(shape) for shape in asked["shapes"]], asked["device"], asked["rounds"])
    print(json.dumps({"package": dmattn_ops.__file__, "times": times}))
