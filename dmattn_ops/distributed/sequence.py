"""Which positions of a sequence each rank holds, and tensors cut and joined accordingly.

A sequence is cut into chunks of equal length. "contiguous": one chunk a rank, in order. "head_tail": two chunks a rank, of
`2 N` for `N` ranks the chunks `r` and `2 N - 1 - r`, so that a causal mask gives every rank the same work (the order of
torch's own context parallelism). A tuple of chunk numbers deals the chunks in any other way: the first `len / N` belong to
rank 0, and so on; `balanced_layout` makes one from what a mask keeps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmattn_ops import symbolic
from dmattn_ops.checks import require, validation, values
from dmattn_ops.distributed import agreement
from dmattn_ops.distributed.team import Group, Team, all_ranks, arrived, start_all_gather, start_all_to_all, team_of
from dmattn_ops.masks.documents import id_pair

Layout = str | tuple[int, ...]


class Run(NamedTuple):
    """Neighbouring positions that a rank holds: where they lie there, where in the whole sequence, and how many."""

    local: int
    origin: int
    length: int


def checked_layout(layout: Any, size: int) -> Layout:
    """Return a layout for `size` ranks, chunk numbers as a tuple of ints; refuse what is none."""
    if isinstance(layout, str) and layout in ("head_tail", "contiguous"):
        return layout
    if not isinstance(layout, (tuple, list)):
        raise ValueError(f"layout must be 'head_tail', 'contiguous' or a tuple of chunk numbers, got {layout!r}")
    numbers = tuple(require.integer("a chunk number of layout", number) for number in layout)
    if not numbers or len(numbers) % size or sorted(numbers) != list(range(len(numbers))):
        raise ValueError(
            f"layout must hold each chunk number once, and as many for each of {size} ranks, got {numbers}"
        )
    return numbers


def chunks(layout: Layout, size: int, rank: int) -> tuple[int, ...]:
    """Return the numbers of the chunks that a rank of `size` ranks holds, in the order in which it holds them."""
    if layout == "contiguous":
        return (rank,)
    if isinstance(layout, str):
        return rank, 2 * size - 1 - rank
    each = len(layout) // size
    return layout[rank * each : (rank + 1) * each]


def runs(layout: Layout, size: int, rank: int, length: int) -> tuple[Run, ...]:
    """Return the runs of positions that rank `rank` holds, `length` positions in all; adjacent chunks are one run."""
    own = chunks(layout, size, rank)
    chunk = length // len(own)
    found: list[Run] = []
    for place, number in enumerate(own):
        last = found[-1] if found else None
        if last is not None and last.origin + last.length == number * chunk:
            found[-1] = last._replace(length=last.length + chunk)
        else:
            found.append(Run(place * chunk, number * chunk, chunk))
    return tuple(found)


def check_length(name: str, length: int, layout: Layout, size: int) -> None:
    """Refuse a rank's part of a sequence that does not hold chunks of equal length."""
    each = len(chunks(layout, size, 0))
    if length % each:
        raise ValueError(
            f"the part of {name} that a rank holds must be a multiple of {each} positions with layout {layout!r}, got"
            f" {length}; pad the sequence and hide the padding by the mask"
        )


def check_ids(documents: Any, query: Tensor, key: Tensor, size: int) -> None:
    """Refuse ids of other positions than those that this rank holds of query and key."""
    for ids, part in zip(id_pair(documents), (query, key), strict=True):
        batch, length = query.shape[0], part.shape[1]
        if size > 1 and symbolic.certainly(ids.shape[1] == length * size):
            raise ValueError(
                f"documents must be ids of the {length} positions that this rank holds, got {ids.shape[1]}: cut the ids of"
                " the whole sequence with shard_sequence"
            )
        require.sizes("documents", ids, (1, batch), (length,))
        require.device("documents", ids, query.device)


def check_offsets(cu_seqlens: Any, seqlen: int) -> None:
    """Refuse what are no offsets of packed sequences in a whole sequence; their values are read on the CPU only."""
    validation.dense(cu_seqlens=cu_seqlens)
    require.rank("cu_seqlens", cu_seqlens, 1)
    require.dtype("cu_seqlens", cu_seqlens, torch.int32, torch.int64)
    if values.on_the_host(cu_seqlens):
        values.offsets_of("cu_seqlens", cu_seqlens, "the whole sequence", seqlen)


def in_order(by_rank: Tensor, layout: Layout, size: int, dim: int) -> Tensor:
    """Put what ranks hold, one behind the other along `dim`, in the order of the sequence."""
    order = _order(layout, size)
    return _dealt(by_rank, sorted(range(len(order)), key=order.__getitem__), dim)


def by_rank(in_sequence: Tensor, layout: Layout, size: int, dim: int) -> Tensor:
    """Put a tensor in the order of the sequence into that of the ranks: the inverse of `in_order`."""
    return _dealt(in_sequence, _order(layout, size), dim)


def _order(layout: Layout, size: int) -> list[int]:
    return [number for rank in range(size) for number in chunks(layout, size, rank)]


def _dealt(tensor: Tensor, order: list[int], dim: int) -> Tensor:
    if order == list(range(len(order))):
        return tensor
    parts = tensor.chunk(len(order), dim) if tensor.shape[dim] else (tensor,) * len(order)
    return torch.cat([parts[number] for number in order], dim)


def shard_sequence(tensor: Tensor, group: Group | None, *, dim: int = 1, layout: Layout = "head_tail") -> Tensor:
    """Return the part of a tensor that this rank holds. Nothing is sent: every rank has the whole tensor.

    Differentiable: the gradient of the whole tensor is this rank's share of it, zero elsewhere; the shares of all ranks add
    up to the gradient of one process.

    Args:
        tensor: with the whole sequence along `dim`, the same on every rank.
        group: the ranks that share the sequence: a process group, a mesh of one dimension, or None for the default group.
        dim: the dimension of the sequence: 1 for `[B, S, H, D]` and ids `[B, S]`, 3 for `[B, H, 1, S]`.
        layout: "head_tail", "contiguous" or a tuple of chunk numbers (see the module).

    Raises:
        ValueError: where the sequence cannot be cut into chunks of equal length.
    """
    team = team_of(group)
    layout = checked_layout(layout, team.size)
    dim = _dimension(tensor, dim)
    size = tensor.shape[dim]
    count = len(chunks(layout, team.size, 0)) * team.size
    if size % count:
        raise ValueError(
            f"the sequence must be a multiple of {count} positions long on {team.size} ranks with layout {layout!r}, got"
            f" {size}; pad it and hide the padding by the mask"
        )
    own = runs(layout, team.size, team.rank, size // team.size)
    return torch.cat([tensor.narrow(dim, run.origin, run.length) for run in own], dim)


def unshard_sequence(tensor: Tensor, group: Group | None, *, dim: int = 1, layout: Layout = "head_tail") -> Tensor:
    """Return the whole sequence, on every rank, from the part that each holds: the inverse of `shard_sequence`.

    Differentiable: the gradients that all ranks have of the whole are added up, in float32 for narrower dtypes. All ranks of
    the group call it alike; in eager mode what one rank refuses is an error on all, if the group has a CPU backend.
    """
    team = team_of(group)
    named: dict[str, Any] = {"tensor": tensor, "dim": dim, "layout": layout}
    dims: list[int] = []

    def describe() -> dict[str, str]:
        dims.append(_dimension(tensor, dim))
        named["layout"] = checked_layout(layout, team.size)
        check_length("tensor", tensor.shape[dims[0]], named["layout"], team.size)
        return {name: agreement.text_of(argument) for name, argument in named.items()}

    agreement.agreed("unshard_sequence", group, team, describe)
    [dim], layout = dims, named["layout"]
    if not tensor.is_floating_point():
        return in_order(all_ranks(tensor.movedim(dim, 0), team), layout, team.size, 0).movedim(0, dim)
    whole = GatheredRows.apply(team, torch.float32, tensor.movedim(dim, 0))
    return in_order(whole, layout, team.size, 0).movedim(0, dim)


def sequence_positions(
    seqlen: int, group: Group | None, *, layout: Layout = "head_tail", device: torch.device | str | None = None
) -> Tensor:
    """Return the positions, int64 `[seqlen / N]`, that this rank holds of a sequence: for rotary embeddings, labels and ids."""
    [seqlen] = require.counts(seqlen=seqlen)
    return shard_sequence(torch.arange(seqlen, device=device), group, dim=0, layout=layout)


def _dimension(tensor: Any, dim: int) -> int:
    """Return `dim`; refuse what is no tensor with such a dimension."""
    validation.dense(tensor=tensor)
    dim = require.integer("dim", dim)
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"dim must be a dimension of tensor, whose shape is {require.text(tensor.shape)}, got {dim}")
    return dim


class GatheredRows(torch.autograd.Function):
    """Rows `[n, ...]` of all ranks, by rank. Their gradients are added up in `reduce_dtype`, in the order of the ranks."""

    @staticmethod
    def forward(ctx: Any, team: Team, reduce_dtype: torch.dtype, rows: Tensor) -> Tensor:
        ctx.team, ctx.wide, ctx.narrow = team, torch.promote_types(rows.dtype, reduce_dtype), rows.dtype
        return arrived(start_all_gather(rows, team))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, summed_over_ranks(grads[0].to(ctx.wide), ctx.team).to(ctx.narrow)


def summed_over_ranks(rows: Tensor, team: Team) -> Tensor:
    """Return this rank's rows `[n, ...]` of the sum over all ranks of `[size * n, ...]`, added in the order of the ranks."""
    each = [rows.shape[0] // team.size] * team.size
    received = arrived(start_all_to_all(rows, each, each, team))
    return received.unflatten(0, (team.size, each[0])).sum(0)
