"""The order of scores as integers, with plain torch operations; and documents that are not in one piece."""

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


def check_in_one_piece(documents: Tensor) -> None:
    """Raise ValueError where an id of `[B, S]` returns after another one. Reads values: for tensors on the CPU."""
    ids, order = torch.sort(documents, dim=-1, stable=True)
    returns = (ids[:, 1:] == ids[:, :-1]) & (order[:, 1:] != order[:, :-1] + 1)
    if not returns.any():
        return
    places_of_returns = torch.where(returns, order[:, 1:], documents.shape[1])
    position, row = min((int(position), row) for row, position in enumerate(places_of_returns.amin(-1).tolist()))
    raise ValueError(
        f"documents must be contiguous: id {int(documents[row, position])} returns at position {position} of row {row}"
        " after another id"
    )
