"""How the operators split over a device mesh: their sharding rules for DTensor.

Over one dimension of a mesh, an operator takes its tensors replicated, split over sequences (the batch), or split over heads.
Which dimension of a tensor that is, a table says. A tensor whose own size is 1 there is the same for all: it is replicated,
and its gradient is `Partial`, a sum over the ranks. So are key and value where all heads of query share one head.

A query head must stay with the key head that it reads. So heads are split only where every rank gets as many key heads (or
query heads, where there is one key head) as every other. Tensors that arrive in another way are redistributed to a right one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from dmattn_ops import symbolic
from dmattn_ops.call import MASK_TENSORS
from dmattn_ops.ops import schemas

BATCH, HEADS = 0, 1  # what is split: places in the pairs of Axes
Axes = dict[str, tuple[int | None, int | None]]  # by the name of a tensor: its dimension of sequences and that of heads
Rule = tuple[list[Placement | None], list[Placement | None]]  # placements of the outputs and of the arguments

_ROWS = ("lse", "lse_tail", "row_max", "grad_lse")
_DENSE: Axes = {
    **dict.fromkeys(("query", "key", "value", "out", "grad_out"), (0, 2)),
    **dict.fromkeys((*_ROWS, "bias", "seed", *MASK_TENSORS, "mask", "scores", "mass"), (0, 1)),
    **dict.fromkeys(("q_segments", "documents", "ids", "ranks"), (0, None)),
    **dict.fromkeys(("counts", "indices", "listed"), (0, 1)),
    "seqlen_k_used": (0, None),
    "chosen": (0, 1),
    "qkv": (0, 3),
    "sink": (None, 0),
}
_PACKED: Axes = {
    **dict.fromkeys(("query", "key", "value", "out", "grad_out", "seed"), (None, 1)),
    **dict.fromkeys((*_ROWS, "bias", "mask", "sink"), (None, 0)),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), (None, None)),
}
_GRADIENT_OF = {"dq": "query", "dk": "key", "dv": "value", "dqkv": "qkv", "dbias": "bias", "dsink": "sink"}
_ASKED_BY = {"row_max": "needs_max", "dbias": "needs_dbias", "dsink": "needs_dsink"}  # these are empty unless asked for
_SEED_END = (1 << 63) - 1
_registered: set[str] = set()


def register_sharding_rules() -> None:
    """Register the rules of all operators `torch.ops.dmattn.*` with DTensor; importing `dmattn_ops.distributed` does it."""
    for name in schemas.SCHEMAS:
        if name not in _registered:
            register_sharding(schemas.overload(name))(_rules_of(name))
            _registered.add(name)


def sharded_seed(query: DTensor, batch: int) -> DTensor:
    """Draw the seeds of dropout, int64 `[batch, H]`, for a query whose last dimension but one is `H`.

    They are the numbers that a call on one device draws from the same state of torch's generator. Each rank draws all of
    them, so that generators stay in step; where they were not, the largest of the ranks' numbers counts for every rank.
    """
    mesh = query.device_mesh
    drawn = torch.randint(_SEED_END, (batch, query.shape[-2]), dtype=torch.int64, device=query.device)
    of_ranks = DTensor.from_local(drawn, mesh, [Partial("max")] * mesh.ndim, run_check=False)
    return of_ranks.redistribute(placements=[Replicate()] * mesh.ndim)


class _Choice(NamedTuple):
    """One way to split an operator over one dimension of a mesh."""

    axis: int | None  # BATCH, HEADS, or None: replicated
    placements: dict[str, Placement | None]  # by the name of a tensor; None where it is absent


def _rules_of(name: str) -> Callable[..., list[Rule]]:
    """Return the function for `register_sharding` that maps an operator's arguments to its sharding rules."""
    signature = schemas.SIGNATURES[name]
    axes = _PACKED if name.startswith("varlen") else _DENSE
    outputs = [output.name for output in schemas.overload(name)._schema.returns]
    numbers: list[Placement | None] = [None] * (len(signature.names) - signature.tensors)

    def rules(*arguments: Any) -> list[Rule]:
        read = signature.read(arguments)
        tensors = {argument: getattr(read, argument) for argument in signature.names[: signature.tensors]}
        choices = _choices(tensors, axes)
        return [
            (
                [_of_output(output, choice, axes, read) for output in outputs],
                [*choice.placements.values(), *numbers],
            )
            for choice in choices
        ]

    return rules


def _choices(tensors: dict[str, Any], axes: Axes) -> list[_Choice]:
    """Return the ways to split tensors, given as DTensor's specs or None, over any dimension of their mesh."""
    choices = [_Choice(None, {name: None if spec is None else Replicate() for name, spec in tensors.items()})]
    for axis in (BATCH, HEADS):
        dims = {name: axes[name][axis] for name in tensors}
        split = {
            name: dim
            for name, dim in dims.items()
            if dim is not None and tensors[name] is not None and not symbolic.known_equal(tensors[name].shape[dim], 1)
        }
        if split:
            placements = {
                name: placement if name not in split else Shard(split[name])
                for name, placement in choices[0].placements.items()
            }
            choices.append(_Choice(axis, placements))
    return choices if _heads_stay_together(tensors, choices) else [each for each in choices if each.axis != HEADS]


def _heads_stay_together(tensors: dict[str, Any], choices: list[_Choice]) -> bool:
    """Return whether no rank can get a query head without its key head if heads may be split.

    DTensor combines the rules of all dimensions of a mesh, and redistributes to the combination that costs least. It is
    enough that heads divide over any dimensions together. It is also enough that the tensors already are in one right
    combination, which then costs nothing, and where heads divide over the dimensions that split them.
    """
    if choices[-1].axis != HEADS:
        return True
    by_heads = choices[-1].placements
    counts = [tensors[name].shape[place.dim] for name, place in by_heads.items() if isinstance(place, Shard)]
    specs = {name: spec for name, spec in tensors.items() if spec is not None}
    mesh = next(iter(specs.values())).mesh
    sizes = [mesh.size(dim) for dim in range(mesh.ndim)]
    if all(_divide(counts, ranks) for ranks in _products(sizes) if ranks <= min(counts)):
        return True
    taken = [_taken(specs, dim, choices) for dim in range(mesh.ndim)]
    ranks = math.prod(size for size, choice in zip(sizes, taken, strict=True) if choice and choice.axis == HEADS)
    return None not in taken and _divide(counts, ranks)


def _taken(specs: dict[str, Any], dim: int, choices: list[_Choice]) -> _Choice | None:
    """Return the first choice that tensors already follow over one dimension of the mesh; wholly replicated ones follow any."""
    for choice in choices:
        if all(
            spec.placements[dim] == choice.placements[name] or all(place.is_replicate() for place in spec.placements)
            for name, spec in specs.items()
        ):
            return choice
    return None


def _divide(counts: list[int], ranks: int) -> bool:
    return all(count % ranks == 0 for count in counts)


def _products(sizes: list[int]) -> Iterator[int]:
    """Return over how many ranks one or more dimensions of a mesh split together."""
    for number in range(1, len(sizes) + 1):
        yield from map(math.prod, combinations(sizes, number))


def _of_output(name: str, choice: _Choice, axes: Axes, read: Any) -> Placement:
    """Return the placement of an output: split, whole, or one part of a sum (gradients of what all ranks share)."""
    asked_by = _ASKED_BY.get(name)
    if choice.axis is None or (asked_by is not None and not getattr(read, asked_by)):
        return Replicate()
    if name == "mass" and choice.axis == HEADS and _is_summed_over_ranks(choice, read):
        return Partial()
    of_input = choice.placements.get(_GRADIENT_OF.get(name, ""))
    if of_input is not None:
        return Partial() if of_input.is_replicate() else of_input
    dim = axes[name][choice.axis]
    assert dim is not None, f"no rule splits {name}"
    return Shard(dim)


def _is_summed_over_ranks(choice: _Choice, read: Any) -> bool:
    """Return whether masses are sums over query heads that several ranks have: where all heads share one head of keys."""
    by_query_head = getattr(read, "indices", None) is not None and read.indices.shape[1] == read.query.shape[2]
    key = choice.placements["key"]
    return key is not None and key.is_replicate() and not by_query_head
