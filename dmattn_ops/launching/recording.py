"""What a launcher does to tensors on the device besides launching kernels, in a form that a recorder can note.

A launcher makes whatever it computes with operators of torch through `computed`, and its workspaces through `workspace`.
Both do just that; where a recorder is attached to the thread, it is told as well, so that it can repeat the call
(`plans.py`, `launching`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

_Made = TypeVar("_Made", bound=Tensor)
_Function = TypeVar("_Function", bound=Callable[..., Tensor])
ZEROS: set[Callable[..., Tensor]] = {torch.zeros_like}  # functions that return new memory full of zeros


class Recorder(Protocol):
    """An observer of one call: its methods are told of each step."""

    def allocates(self, made: Tensor) -> None:
        """Note that a workspace is made."""

    def computes(self, function: Callable[..., Tensor], arguments: tuple[Any, ...], made: Tensor) -> None:
        """Note that a tensor is computed."""

    def launches(self, compiled: Any, grid: tuple[int, ...], arguments: list[Any]) -> None:
        """Note that a kernel is launched; `arguments` are those of its Python function."""

    def gives_up(self) -> None:
        """Note that the call cannot be repeated."""

    def without_watching(self) -> AbstractContextManager[None]:
        """Return a context in which operators may change tensors, because the recorder is told of them."""


class Thread(threading.local):
    """The state of one thread: the recorder of the call that it makes, or None, and how many kernels it has launched for it."""

    recorder: Recorder | None = None
    launches: int | None = None  # None outside of a call


thread = Thread()


@contextlib.contextmanager
def one_call() -> Iterator[None]:
    """Let a thread launch the kernels of one call: only there may one begin before another one has ended.

    What a caller launched before is not known, so the first kernel of a call waits for it as usual (`overlap.py`).
    """
    outer, thread.launches = thread.launches, 0
    try:
        yield
    finally:
        thread.launches = outer


def computed(function: Callable[..., _Made], *arguments: Any) -> _Made:
    """Return the tensor `function(*arguments)`: a copy, zeros, a sum, or one of its arguments changed in place."""
    recorder = thread.recorder
    if recorder is None:
        return function(*arguments)
    with recorder.without_watching():
        made = function(*arguments)
    recorder.computes(function, arguments, made)
    return made


def makes_zeros(function: _Function) -> _Function:
    """Return a function, and note that it returns new memory full of zeros, which programs without Python can make too."""
    ZEROS.add(function)
    return function


def sum_into(target: Tensor, source: Tensor, sizes: tuple[int, ...], dims: tuple[int, ...]) -> Tensor:
    """Return `target`, into which the sum of `source`, seen with these sizes, over some of its dimensions is written."""
    seen = source.view(sizes)
    return target.copy_((seen.sum(dims, keepdim=True) if dims else seen).view(target.shape))


def workspace(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return uninitialised memory for one call on the device of `like`."""
    made = like.new_empty(shape, dtype=dtype)
    if thread.recorder is not None:
        thread.recorder.allocates(made)
    return made


def do_not_repeat() -> None:
    """Say that a recorded call must run in full each time: it frees workspaces on the way, which a plan would keep."""
    if thread.recorder is not None:
        thread.recorder.gives_up()
