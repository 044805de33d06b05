"""Measure in how long epochs keys are best packed: the part of `dmattn_ops.tune` for dynamic masks.

The rule of `choice/epochs.py` says from sizes alone whether keys are packed and how many queries an epoch has. Here the lengths
around its own, and keys as they lie, are timed with everything that belongs to a call: finding, copying, attention, sums.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dmattn_ops import meta
from dmattn_ops.call import Call, Gradients, Result, Saved
from dmattn_ops.choice import arch, epochs, tuning
from dmattn_ops.choice.arch import Arch
from dmattn_ops.choice.epochs import Sizes
from dmattn_ops.choice.tuning import EpochCase, Shape
from dmattn_ops.dispatch import run as dispatch
from dmattn_ops.launching.recording import one_call
from dmattn_ops.tune.calls import MARGIN, Measure, disagreement, interleaved, make_call, written


class EpochTask(NamedTuple):
    """One direction of one shape whose keys may be packed, and the length of epochs that the rule gives it."""

    direction: str
    call: Call
    sizes: Sizes
    own: int  # queries; 0 where the rule does not pack
    on: Arch
    case: EpochCase


class EpochResult(NamedTuple):
    """Measured times of lengths of epochs, and the length that is kept: the rule's own where nothing was faster."""

    task: EpochTask
    length: int
    milliseconds: dict[int, float]
    refused: dict[int, str]

    def entry(self, date: str) -> tuning.Entry:
        """Return the entry of the tuning cache for the fastest length."""
        own, times = self.task.own, self.milliseconds
        return tuning.epoch_entry(own, self.length, times[own], times[self.length], date)

    def table(self) -> str:
        """Return a line for each length under that of the result."""
        shown = {length: f"{time:.4f} ms" for length, time in self.milliseconds.items()} | self.refused
        return "\n".join(
            [str(self), *(f"  {tuning.epochs_text(length):<30} {shown[length]}" for length in sorted(shown))]
        )

    def __str__(self) -> str:
        own, times = self.task.own, self.milliseconds
        kept = "which stays"
        if self.length != own:
            kept = f"now {times[self.length]:.4f} ms {tuning.epochs_text(self.length)}"
        return f"{self.task.case}: {times[own]:.4f} ms {tuning.epochs_text(own)}, {kept} ({len(times)} tried)"


def architecture(device: torch.device, on: Arch | None) -> Arch | None:
    """Return the architecture that calls on a device are dispatched for; None is the CPU."""
    return on or (arch.current(device) if device.type == "cuda" else None)


def prepare(direction: str, shape: Shape, device: torch.device, on: Arch | None = None) -> EpochTask | None:
    """Return the measurements to make for one direction of a shape; None where its keys are no candidates for packing."""
    on = architecture(device, on)
    if on is None or shape.mask != "intervals":
        return None
    call = make_call(shape, device)
    if dispatch.reasons_against_packing(call, on):
        return None
    sizes = epochs.sizes_of(call)
    return EpochTask(
        direction, call, sizes, epochs.epoch_by_sizes(sizes), on, tuning.epoch_case(direction, call, sizes)
    )


def tune(
    task: EpochTask, measure: Measure | None = None, show: Callable[[str], None] = lambda text: None
) -> EpochResult:
    """Find the length of epochs with which a task takes the least time; `measure` and `show` as in `dmattn_ops.tune`."""
    run, outputs = _runs(task)
    own = partial(run, task.own)
    expected = written(own, outputs)
    usable: dict[int, Callable[[], None]] = {task.own: own}
    refused: dict[int, str] = {}
    for length in epochs.offered_epochs(task.sizes):
        show(f"{task.case} {tuning.epochs_text(length)}")
        attempt = partial(run, length)
        reason = "" if length == task.own else disagreement(attempt, outputs, expected)
        if reason:
            refused[length] = reason
        else:
            usable[length] = attempt
    times = (measure or interleaved)(usable)
    best = min(times, key=times.__getitem__)
    length = best if times[best] <= MARGIN * times[task.own] else task.own
    return EpochResult(task, length, times, refused)


def _runs(task: EpochTask) -> tuple[Callable[[int], None], list[Tensor]]:
    """Return a function that computes the task in epochs of a length, and the outputs that it writes."""
    call = task.call
    out, lse, lse_tail, _ = meta.forward_outputs(call.query, call.value, False)
    result = Result(out, lse, lse_tail, None)

    def forward(length: int) -> None:
        dispatch.run_forward(call, result, epochs.packing_for(call, length))

    if task.direction == "forward":
        return one_call()(forward), [out, lse]
    forward(task.own)
    dq, dk, dv, dbias, _ = meta.backward_outputs(call.query, call.key, call.value, call.bias, None)
    saved = Saved(out, lse, lse_tail)
    grads = Gradients(torch.randn_like(out), None, dq, dk, dv, None if call.bias is None else dbias)

    def backward(length: int) -> None:
        dispatch.run_backward(call, saved, grads, epochs.packing_for(call, length))

    return one_call()(backward), [dq, dk, dv] if call.bias is None else [dq, dk, dv, dbias]
