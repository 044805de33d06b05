"""Plain calls of the forward and their backward without Python between the launches: `csrc/autograd/node.cpp`.

The module is a second C++ library, made for one torch and one Python where there is a compiler (setup.py). Where it is not there,
or a call needs more than allocations and launches by `libdmattn.so`, Python does the same work (`launching/plans.py`).
"""

from __future__ import annotations

import ctypes
import importlib.util
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dmattn_ops import environment
from dmattn_ops.version import node_library

if TYPE_CHECKING:  # it needs Triton
    from dmattn_ops.launching.plan import Compute, Plan

ROW_MAX = 3  # its place among the outputs of a forward


@cache
def module() -> Any:
    """Return the module; None where it was not built for this torch and this Python."""
    path = Path(__file__).parents[1] / node_library(torch.__version__)
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location("dmattn_ops._autograd", path)
    assert spec is not None and spec.loader is not None
    try:
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    except ImportError as error:
        warnings.warn(
            f"dmattn_ops: {path.name} does not load ({error}): install the package again. Calls compute the same without it, but"
            " each takes some microseconds more on the host.",
            stacklevel=2,
        )
        return None
    found.set_variables(list(environment.OF_BACKWARD))
    return found


class Forward(NamedTuple):
    """What repeats a forward."""

    native: Any
    makes: list[Compute]  # what a call makes before it: counters, say

    def attend(self, tensors: tuple[Tensor | None, ...]) -> Tensor | None:
        """Return out, whose derivative is recorded; None where a launch was refused."""
        return self.native.attend(tensors, tuple([make.run([]) for make in self.makes]))


def of_forward(plan: Plan, tensors: tuple[Tensor | None, ...], backward: Callable[..., Any]) -> Forward | None:
    """Return what repeats a forward with such tensors; None where Python has to do it.

    `backward(native, saved, addresses, grad_out)` is called for a derivative that `native` has no plan of.
    """
    if module() is None or plan.with_elements[ROW_MAX] is not None or any(each.takes_tensors for each in plan.computes):
        return None
    if tensors[0] is None or tensors[0].dtype is torch.float32:  # whose backward follows torch's switch for TF32
        return None
    parts = _parts(plan, tensors[0])
    if parts is None:
        return None
    strides = [None if tensor is None else tensor.stride() for tensor in tensors]
    return Forward(module().Forward(*parts, strides, backward), plan.computes)


def add_backward(native: Any, plan: Plan, grad_out: Tensor) -> None:
    """Let gradients of out with these strides be computed by a plan from now on, if it does nothing but allocate and launch.

    It is not kept if it was made while a variable was set that a backward follows: C++ takes plans where none is set.
    """
    parts = _parts(plan, grad_out) if plan.only_launches and not environment.steers_backward() else None
    if parts is not None:
        native.add_backward(grad_out.stride(), module().Plan(*parts))


def _parts(plan: Plan, on: Tensor | None) -> tuple[Any, ...] | None:
    launches, launch = [], None
    for stage in plan.stages:
        if stage.launch is not None:
            if stage.launch.driven is None:
                return None
            launch = stage.launch.driven.launch
            launches.append((stage.launch.driven.made, stage.launch.count))
    if on is None or launch is None:
        return None
    makes = [make for stage in plan.stages for make in stage.makes]
    workspaces = [None if make in plan.computes else make.layout for make in makes]
    device, address = plan.device if on.is_cuda else -1, ctypes.cast(launch, ctypes.c_void_p).value
    return device, plan.with_elements, workspaces, launches, address, plan


def set_replays(value: bool) -> None:
    """Say whether backwards take their plans; where not, each is computed in Python."""
    if module() is not None:
        module().set_replays(value)
