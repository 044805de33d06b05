"""The ranks that share a sequence, and what they send each other: functional collectives of torch, started early."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

Group = ProcessGroup | DeviceMesh
_all_gather: Any = (
    getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
)  # the name until torch 2.12
_TRAVELS_AS = {torch.bool: torch.uint8, torch.int16: torch.int32}
_all_to_all: Any = functional.all_to_all_single  # takes the name of a group as well, whatever it declares


class Traffic:
    """Bytes that this rank received of others in the collectives of this package, eager, since recording began."""

    def __init__(self) -> None:
        self.received = 0


_recording: list[Traffic] = []


@contextmanager
def record_traffic() -> Iterator[Traffic]:
    """Count the bytes that this rank receives, inside `with record_traffic() as traffic`."""
    traffic = Traffic()
    _recording.append(traffic)
    try:
        yield traffic
    finally:
        _recording.remove(traffic)


class Team(NamedTuple):
    """The ranks of a group, by the name of the group: nothing but constants, so that a graph can hold it."""

    name: str
    rank: int
    size: int


def process_group(group: Group | None) -> ProcessGroup:
    """Return the process group of `group`: itself, that of a one-dimensional mesh, or the default group for None."""
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise ValueError("group must be given where torch.distributed is not initialised, got None")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a mesh of one dimension, got {group.ndim}: take the one that shares the sequence, mesh['cp']"
            )
        return group.get_group()
    if not isinstance(group, ProcessGroup):
        outside = group is dist.GroupMember.NON_GROUP_MEMBER
        got = "a group that this rank is not in" if outside else type(group).__name__
        raise TypeError(f"group must be a ProcessGroup or a DeviceMesh, got {got}")
    return group


def team_of(group: Group | None) -> Team:
    """Return the ranks of a group."""
    found = process_group(group)
    return Team(found.group_name, dist.get_rank(found), dist.get_world_size(found))


def share_a_host(group: Group | None) -> bool:
    """Return whether the ranks of a group run on one host, as far as the launcher tells: torchrun sets LOCAL_WORLD_SIZE."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not local.isdigit() or int(local) == 0:
        return False
    return len({rank // int(local) for rank in dist.get_process_group_ranks(process_group(group))}) == 1


def start_all_gather(rows: Tensor, team: Team) -> Tensor:
    """Start to collect rows `[n, ...]` of all ranks, `[size * n, ...]` by rank; see `arrived`."""
    if _recording:
        _note((team.size - 1) * rows.nbytes)
    return _all_gather(rows.contiguous(), 0, team.name)


def start_all_to_all(rows: Tensor, receive: list[int], send: list[int], team: Team) -> Tensor:
    """Start to send `send[r]` rows to each rank `r` and to receive `receive[r]` from it; see `arrived`."""
    if _recording:
        _note((sum(receive) - receive[team.rank]) * _row_bytes(rows))
    return _all_to_all(rows.contiguous(), receive, send, team.name)


def start_shift(tensor: Tensor, distance: int, team: Team) -> Tensor:
    """Start to send a tensor to the rank `distance` further on, and to receive that of the rank `distance` before."""
    send, receive = [0] * team.size, [0] * team.size
    send[(team.rank + distance) % team.size] = receive[(team.rank - distance) % team.size] = tensor.shape[0]
    return start_all_to_all(tensor, receive, send, team)


def arrived(started: Tensor) -> Tensor:
    """Wait for a collective that was started, and return its result. On a GPU the stream waits, not the host."""
    return started.wait() if isinstance(started, functional.AsyncCollectiveTensor) else started


def same_on_all(tensor: Tensor, team: Team) -> Tensor:
    """Return the tensor of the first rank of the group."""
    if team.size == 1:
        return tensor
    return arrived(start_all_gather(tensor.unsqueeze(0), team))[0]


def all_ranks(rows: Tensor, team: Team) -> Tensor:
    """Return rows `[n, ...]` of all ranks, by rank. Not differentiable; dtypes that NCCL or gloo refuse travel as another."""
    rows = rows.detach()
    if rows.dtype in _TRAVELS_AS:
        return all_ranks(rows.to(_TRAVELS_AS[rows.dtype]), team).to(rows.dtype)
    return rows if team.size == 1 else arrived(start_all_gather(rows, team))


def _row_bytes(rows: Tensor) -> int:
    return math.prod(rows.shape[1:]) * rows.element_size()


def _note(received: int) -> None:
    if not is_compiling():
        for traffic in _recording:
            traffic.received += received
