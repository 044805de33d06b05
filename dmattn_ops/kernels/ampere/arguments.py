"""Refusals that the launchers of the forward and the backward share."""

from __future__ import annotations

import torch
from torch import Tensor

from dmattn_ops.call import Call, bias_fits_tiles, mappable

MAX_DIM = 256
LEAST_COLUMNS = 32  # of a tile in shared memory
MOST_ROWS = 256  # of a tile: their distances are numbers of 32 bits


def common_refusals(call: Call) -> list[str]:
    """Return every reason why neither direction takes a request."""
    dims = call.query.shape[-1], call.value.shape[-1]
    wrong = {
        f"elements are {call.query.dtype}, not float16 or bfloat16": call.query.dtype
        not in (torch.float16, torch.bfloat16),
        f"head dimensions {dims} are over {MAX_DIM}": max(dims) > MAX_DIM,
        f"head dimensions {dims} are not multiples of 8": any(dim % 8 for dim in dims),
    }
    for name, tensor in (("query", call.query), ("key", call.key), ("value", call.value)):
        wrong[f"rows of {name} are not pieces of 16 bytes: strides {tensor.stride()}"] = not mappable(tensor)
        wrong[f"rows of {name} lie too far from each other: strides {tensor.stride()}"] = far_apart(tensor)
    return [reason for reason, applies in wrong.items() if applies]


def far_apart(tensor: Tensor) -> bool:
    """Return whether offsets inside a tile of rows do not fit into 32 bits."""
    return _distant(tensor.stride(-3))


def bias_comes_in_tiles(call: Call) -> bool:
    """Return whether tiles of a bias with queries can be copied as keys are: in pieces of 16 bytes, of the queries' type."""
    bias = call.bias
    if bias is None or not bias_fits_tiles(bias):
        return False
    return bias.dtype == call.query.dtype and bias.shape[-1] % 8 == 0 and not _distant(bias.stride(-2))


def _distant(stride: int) -> bool:
    return abs(stride) * MOST_ROWS >= 1 << 31
