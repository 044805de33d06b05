"""What the public functions do for DTensors: load the sharding rules, draw seeds, and say what to do about plain tensors.

Nothing here imports `torch.distributed.tensor`, which takes half a second, unless there is a DTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dmattn_ops.call import MASK_TENSORS


def is_sharded(argument: Any) -> bool:
    """Return whether this is a DTensor."""
    return isinstance(argument, Tensor) and hasattr(argument, "device_mesh")


def load_rules(*arguments: Any) -> None:
    """Register the sharding rules of the operators, if a DTensor is among the arguments or in a tuple or list there."""
    for argument in arguments:
        if type(argument) is Tensor or argument is None:
            continue
        if isinstance(argument, (tuple, list)):
            load_rules(*argument)
        elif is_sharded(argument):
            from dmattn_ops.distributed.sharding import register_sharding_rules

            register_sharding_rules()


def constants_beside(tensor: Tensor) -> AbstractContextManager[None]:
    """Return a context in which plain tensors, the same on all ranks (positions, zeros), may be combined with this DTensor."""
    if type(tensor) is Tensor or not is_sharded(tensor):
        return nullcontext()
    from torch.distributed.tensor.experimental import implicit_replication

    return implicit_replication()


def seed(query: Tensor, batch: int) -> Tensor:
    """Draw the seeds of dropout, int64 `[batch, H]`, for a query that is a DTensor and has `H` heads before its last dimension."""
    from dmattn_ops.distributed.sharding import sharded_seed

    return sharded_seed(query, batch)  # type: ignore[arg-type]


def segments_of_queries(queries: Tensor | None, keys: Tensor, seqlen_q: int) -> Tensor | None:
    """Return the segments of queries; beside keys that are a DTensor, zeros `[1, Sq]` where there are none, which say the same.

    DTensor of torch 2.11 looks for the mesh in the first argument of an operator only.
    """
    if queries is not None or type(keys) is Tensor or not is_sharded(keys):
        return queries
    return keys.new_zeros((1, seqlen_q))


def row_by_row(function: Callable[[Tensor], tuple[Tensor, ...]], rows: Tensor) -> tuple[Tensor, ...]:
    """Apply a function to rows `[B, S]` and return the tensors of that shape; of a DTensor, each rank applies it to its own rows.

    The function may use operators that DTensor does not know (`cummax` in torch 2.11), and positions.
    """
    if type(rows) is Tensor or not is_sharded(rows):
        return function(rows)
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(rows, DTensor)
    mesh, (batch, length) = rows.device_mesh, rows.shape
    placements = [place if place.is_shard(0) else Replicate() for place in rows.placements]
    own = rows.redistribute(placements=placements).to_local()
    return tuple(
        DTensor.from_local(
            made.contiguous(), mesh, placements, run_check=False, shape=torch.Size((batch, length)), stride=(length, 1)
        )
        for made in function(own)
    )


def refuse_mixture(names: Sequence[str], arguments: Sequence[Any]) -> None:
    """Refuse plain tensors beside DTensors: whether every rank holds the same, or its own part, only the caller knows."""
    given = [(name, each) for name, each in zip(names, arguments, strict=False) if isinstance(each, Tensor)]
    sharded, plain = (
        list(
            dict.fromkeys("mask" if name in MASK_TENSORS else name for name, each in given if is_sharded(each) is kind)
        )
        for kind in (True, False)
    )
    if not sharded or not plain:
        return
    prepared = " (prepare a mask from a DTensor)" if "mask" in plain else ""
    raise TypeError(
        f"{', '.join(sharded)} {_are(sharded, 'DTensor')}, but {', '.join(plain)} {_are(plain, 'plain tensor')}: make all of"
        " them DTensors, by DTensor.from_local(tensor, query.device_mesh, [Replicate()]) where every rank holds the same, or by"
        f" distribute_tensor(tensor, query.device_mesh, placements){prepared}"
    )


def _are(names: list[str], what: str) -> str:
    return f"is a {what}" if len(names) == 1 else f"are {what}s"
