"""The order of scores as integers, with plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor


def places(scores: Tensor) -> Tensor:
    """Return integers that are in the order of the scores, the best first and all NaNs last: int32, int64 for float64.

    Comparing bits leaves nothing to a device: not how it sorts NaN and -0, nor whether it flushes denormal numbers.
    """
    wide = scores.dtype == torch.float64
    bits = scores.contiguous().view(torch.int64) if wide else scores.float().contiguous().view(torch.int32)
    limits = torch.iinfo(bits.dtype)
    infinity = 0x7FF0 << 48 if wide else 0x7F80 << 16
    bits = torch.where(bits == limits.min, 0, bits)
    ascending = torch.where(bits < 0, bits ^ limits.max, bits)
    return torch.where((bits & limits.max) > infinity, limits.max, ~ascending)


def ranks(scores: Tensor) -> Tensor:
    """Return for each score how many different better scores its row has, int32."""
    values, order = torch.sort(places(scores), dim=-1)
    steps = torch.zeros_like(values, dtype=torch.int32)
    steps[..., 1:] = values[..., 1:] != values[..., :-1]
    return torch.empty_like(steps).scatter_(-1, order, steps.cumsum(-1, dtype=torch.int32))
