"""Tensors whose elements lie more than 2^31 elements apart, and use no more memory than near ones where memory is lazy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

SHAPE = (3, 80, 4, 64)  # batch, length, heads, head dimension of what the tests attend to
PLACES = {  # the dimension that is spread, and by how many elements: its last index lies beyond 2^31
    "batches": (0, (1 << 30) + 64),
    "rows": (1, (1 << 25) + (1 << 21)),
    "heads": (2, (1 << 30) + 64),
}


def far_apart(tensors: Sequence[Tensor], place: str) -> list[Tensor]:
    """Return copies `[B, S, heads, D]` of tensors of one dtype, side by side in one buffer."""
    spread, stride = PLACES[place]
    views, sizes = [], []
    for tensor in tensors:
        near = [size for dim, size in enumerate(tensor.shape) if dim != spread]
        steps = list(torch.empty(near, device="meta").stride())
        steps.insert(spread, stride)
        sizes.append(-(-torch.Size(near).numel() // 64) * 64)
        views.append((tensor, steps))
    assert sum(sizes) <= stride
    longest = max(tensor.shape[spread] for tensor in tensors)
    assert (longest - 1) * stride > 1 << 31
    try:
        buffer = torch.empty(longest * stride, dtype=tensors[0].dtype, device=tensors[0].device)
    except RuntimeError as error:
        pytest.skip(f"no room for {longest * stride} elements: {str(error).splitlines()[0]}")
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        buffer.as_strided(tensor.shape, steps, start).copy_(tensor)
        for (tensor, steps), start in zip(views, starts, strict=True)
    ]
