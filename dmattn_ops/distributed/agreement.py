"""A check that all ranks make the same call, before any rank waits for one that makes another call.

In eager mode every call compares a fingerprint of its arguments over the ranks: 8 bytes through the group's CPU backend
(gloo), from host to host, beside the GPU. A group without one, as `init_process_group("nccl")` makes it, compares only arguments
that a rank has not seen before, through the GPU. It does not notice a rank that goes back to what it asked for earlier, and where a
rank refuses a call that the others made before, these wait. So initialise with "cpu:gloo,cuda:nccl", or with no backend at
all. `DMATTN_CONTEXT_CHECK=0` turns the comparison off. Compiled graphs hold no such check.

Whatever can raise for the arguments of one rank alone belongs into `describe`: behind it, ranks exchange tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dmattn_ops import environment
from dmattn_ops.distributed.team import Group, Team, process_group
from dmattn_ops.masks.tile_mask import TileMask

MAX_SEEN = 4096  # fingerprints of one group
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name until torch 2.12
# What a group agreed on, the oldest first. Each agreement adds one on all of its ranks, so that all of them forget alike.
_seen: WeakKeyDictionary[ProcessGroup, dict[int, None]] = WeakKeyDictionary()


def agreed(function: str, group: Group | None, team: Team, describe: Callable[[], dict[str, str]]) -> None:
    """Raise on every rank where `describe` raises on one, or returns different texts."""
    if team.size == 1 or torch.compiler.is_compiling() or not environment.compares_ranks():
        describe()
        return
    refusal: Exception | None = None
    try:
        texts = describe()
    except Exception as error:  # whatever it is, others would wait
        refusal, texts = error, {"refused": f"{type(error).__name__}: {error}"}
    own = _fingerprint(function, texts)
    members = process_group(group)
    always = has_cpu_backend(members)
    if not always and own in _seen.get(members, ()):
        return
    device = torch.device("cpu") if always else _own_gpu()
    mine = torch.tensor([own], dtype=torch.int64, device=device)
    all_of_them = torch.empty(team.size, dtype=torch.int64, device=device)
    _all_gather(all_of_them, mine, group=members)
    if refusal is None and all_of_them.tolist() == [own] * team.size:
        if not always:
            _remember(members, own)
        return
    gathered: list[Any] = [None] * team.size
    dist.all_gather_object(gathered, texts, group=members)
    if refusal is not None:
        raise refusal
    raise ValueError(_difference(function, gathered))


def text_of(argument: Any) -> str:
    """Return a text of an argument that must be equal on all ranks: without the values of tensors and the number of their GPU."""
    if hasattr(argument, "of_all_ranks"):
        return argument.of_all_ranks
    if isinstance(argument, TileMask):
        return argument.text(argument.device.type)
    if isinstance(argument, (tuple, list)):
        return f"({', '.join(map(text_of, argument))})"
    if isinstance(argument, Tensor):
        grad = ", requires_grad" if argument.requires_grad else ""
        layout = "" if argument.layout == torch.strided else f" {argument.layout}"
        return f"{tuple(argument.shape)} {argument.dtype}{layout} on {argument.device.type}{grad}"
    return repr(argument.item() if hasattr(argument, "item") else argument)  # numbers of NumPy as those of Python


def _remember(members: ProcessGroup, own: int) -> None:
    seen = _seen.setdefault(members, {})
    if len(seen) >= MAX_SEEN:
        del seen[next(iter(seen))]
    seen[own] = None


def has_cpu_backend(members: ProcessGroup) -> bool:
    """Return whether the ranks of a group exchange tensors on the CPU."""
    return "cpu:" in dist.get_backend_config(members)


def _own_gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _fingerprint(function: str, texts: dict[str, str]) -> int:
    text = "\n".join([function, *(f"{name}={value}" for name, value in texts.items())])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def _difference(function: str, gathered: list[dict[str, str]]) -> str:
    """Return a message that names the first argument that differs between ranks, and its values."""
    for rank, texts in enumerate(gathered):
        if "refused" in texts:
            return f"{function} was refused on rank {rank} of the group: {texts['refused']}"
    first = gathered[0]
    for rank, texts in enumerate(gathered[1:], 1):
        for name in dict.fromkeys([*first, *texts]):
            one, other = first.get(name, "None"), texts.get(name, "None")
            if one != other:
                return (
                    f"all ranks of a group must call {function} with the same shapes and choices: {name} is {one} on rank 0"
                    f" and {other} on rank {rank}"
                )
    return f"all ranks of a group must call the same function: {function} here, another one elsewhere"
