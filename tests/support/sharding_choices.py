"""Which placements DTensor chooses for attention, over meshes that need no processes: a script that prints JSON.

Torch's fake process group answers every collective at once, so that one process sees what a rank of any mesh would do.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dmattn_ops import flash_dmattn_func

MESHES = ((2,), (4,), (6,), (2, 2), (2, 3), (4, 2), (3, 4), (2, 2, 2))
HEADS = ((8, 8), (8, 4), (8, 2), (8, 1), (12, 12), (12, 6), (12, 4), (24, 12), (6, 3), (9, 3), (40, 10), (16, 16))


def split_over_heads(placements: tuple[Placement, ...], sizes: tuple[int, ...]) -> int:
    """Return over how many ranks heads `[B, S, heads, D]` are split."""
    return math.prod(size for size, place in zip(sizes, placements, strict=True) if place == Shard(2))


def chosen(sizes: tuple[int, ...], heads: int, heads_kv: int, given: list[tuple[Placement, ...]]) -> dict[str, Any]:
    """Run attention and its backward; return what is wrong with the placements, and over how many ranks heads are split."""
    mesh = init_device_mesh("cpu", sizes)
    shapes = [(4, 8, heads, 8), (4, 8, heads_kv, 8), (4, 8, heads_kv, 8), (4, 8, heads, 8)]
    tensors = [distribute_tensor(torch.ones(shape), mesh, own) for shape, own in zip(shapes, given, strict=True)]
    leaves = [tensor.requires_grad_() for tensor in tensors[:3]]
    out = flash_dmattn_func(*leaves)
    grads = torch.autograd.grad(out, leaves, tensors[3])
    wrong = []
    for name, tensor in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        assert isinstance(tensor, DTensor)
        ranks = split_over_heads(tensor.placements, sizes)
        if heads % ranks or (heads_kv > 1 and heads_kv % ranks):
            wrong.append(f"{name} {tensor.placements}")
    return {"wrong": wrong, "split": split_over_heads(out.placements, sizes)}


def main() -> None:
    """Print what is wrong with random placements, and how heads are split where they divide."""
    torch.set_num_threads(1)
    draw = random.Random(0)
    found: dict[str, Any] = {"wrong": [], "kept": []}
    for sizes, (heads, heads_kv) in itertools.product(MESHES, HEADS):
        dist.init_process_group("fake", rank=0, world_size=math.prod(sizes), store=FakeStore())
        choices = list(itertools.product((Replicate(), Shard(0), Shard(1), Shard(2)), repeat=len(sizes)))
        for _ in range(4):
            given = draw.choices(choices, k=4) if draw.random() < 0.5 else draw.choices(choices, k=1) * 4
            wrong = chosen(sizes, heads, heads_kv, given)["wrong"]
            found["wrong"] += [f"{sizes} {heads}:{heads_kv} {given} -> {each}" for each in wrong]
        own = (*[Shard(0)] * (len(sizes) - 1), Shard(2))  # sequences, and heads over the last dimension
        if heads_kv % sizes[-1] == 0 and math.prod(sizes[:-1]) <= 4:
            split = chosen(sizes, heads, heads_kv, [own] * 4)["split"]
            found["kept"].append([list(sizes), heads, heads_kv, split])
        dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
