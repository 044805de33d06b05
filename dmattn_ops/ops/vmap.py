"""The operators under `torch.vmap`: one call for each element, whose results are stacked.

Without a rule torch does the same by itself, and asks to report that as a performance problem. A call on a larger batch is
faster, and is what the documentation advises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmattn_ops.ops import schemas


def _rule(operator: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[tuple[Tensor, ...], tuple[int, ...]]]:
    """Return the rule of an operator: from its arguments and the dimensions that are mapped to outputs and theirs."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        if info.batch_size == 0:
            raise ValueError(
                "torch.vmap over a dimension of size 0 has no results: give the function a batch of size 0 instead"
            )
        calls = []
        for element in range(info.batch_size):
            pairs = zip(arguments, in_dims, strict=True)
            calls.append(operator(*(each if dim is None else each.select(dim, element) for each, dim in pairs)))
        if isinstance(calls[0], Tensor):
            return torch.stack(calls), 0
        outputs = tuple(torch.stack(parts) for parts in zip(*calls, strict=True))
        return outputs, (0,) * len(outputs)

    return rule


for _name in schemas.SCHEMAS:
    _operator = schemas.overload(_name)
    torch.library.register_vmap(_operator, _rule(_operator), lib=schemas.library)
