"""Repeat the launches of an earlier call with the same shapes, without validating and choosing kernels again.

A plan is found under everything that it depends on: shape, strides, dtype and device of each tensor, the numbers of the
call, and what the environment and torch's switches say. No tensor is kept. Plans are for CUDA tensors; kernels make them
(`launching/launch.py`) while the call is computed in full for the first time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dmattn_ops import environment
from dmattn_ops.call import float32_precision
from dmattn_ops.launching import node

MAX_PLANS = 512
MAX_SEEN = 4096
SAVED_OUTPUTS = 3  # out, lse and lse_tail, which a forward saves behind its inputs
MAX_BACKWARDS = 16  # of one forward: layouts of grad_out, and switches
_plans: dict[Hashable, Any] = {}  # None where a call of that key cannot be repeated
_repeats: dict[Hashable, Repeat] = {}  # by what a public function is given (`repeats.py`)
_seen: dict[Hashable, None] = {}  # keys seen once: a plan is made at the second call
_exported: Callable[[Exported], None] | None = None  # takes each call while calls are exported
_Tensors = tuple[Tensor | None, ...]
_Sequence = TypeVar("_Sequence", tuple[Any, ...], list[Any])
_Computation = Callable[..., tuple[Tensor, ...]]


class _Thread(threading.local):
    """State of one thread."""

    has_context = False


_thread = _Thread()


def enter_thread() -> None:
    """Give this thread CUDA's context, which tensor maps are encoded in.

    The CUDA runtime makes the context current at a thread's first call that needs it. Taking memory from torch's cache and
    launching through the driver are no such calls, so it is done here.
    """
    if not _thread.has_context:
        torch.cuda.is_current_stream_capturing()
        _thread.has_context = True


class Origin(NamedTuple):
    """The plan of a forward, by which its backward finds its own plan without looking at every tensor again."""

    plan: Any
    addresses: list[int]  # of the forward's inputs and outputs
    numbers: tuple[tuple[Any, ...], tuple[Any, ...]]  # those of the forward, before `needs_max` and behind it
    node: Any = None  # what repeats the forward in C++ (`node.py`), and the backward once it has the plan

    def backward(
        self,
        name: str,
        primals: int,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        saved: _Tensors,
        needs: tuple[bool, ...],
    ) -> tuple[Tensor, ...] | None:
        """Repeat the backward `name`; None where it has no plan yet. Gradients that are not needed are None.

        Saved tensors with the addresses and strides of the forward's tensors are those tensors: autograd has checked their
        versions. Strides are compared because a saved-tensor hook may return a tensor at the same address in another layout.
        """
        if _exported is not None:  # which writes a backward as every other call
            return None
        enter_thread()
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in saved]
        if addresses != self.addresses or environment.profiles_backward():
            return None
        tensors = (grad_out, grad_lse, *_in_backward(saved, primals))
        of_lse = None if grad_lse is None else grad_lse.stride()
        strides = tuple([tensor.stride() for tensor in saved if tensor is not None])
        found = (grad_out.shape, grad_out.stride(), of_lse, strides, needs, *switches(grad_out))
        plan = self.plan.backwards.get(found)
        if plan is None:
            before, appended = self.numbers
            plan = find(name, tensors, (*before, *needs, *appended))
            if plan is None:
                return None
            if len(self.plan.backwards) >= MAX_BACKWARDS:
                self.plan.backwards.clear()
            self.plan.backwards[found] = plan
        if self.node is not None:
            node.add_backward(self.node, plan, grad_out)
        gradients = [grad_out.data_ptr(), 0 if grad_lse is None else grad_lse.data_ptr()]
        ran = plan.run(tensors, gradients + _in_backward(addresses, primals), all_outputs=False)
        return None if ran is None else ran[0]


class Repeat(NamedTuple):
    """The plan of a forward, in the form of an operator that may be called directly; a row_max that is not needed is None."""

    plan: Any
    numbers: tuple[Any, ...]  # of the operator
    around_needs: tuple[tuple[Any, ...], tuple[Any, ...]]
    compute: Callable[..., tuple[Any, Origin | None]]  # for tensors at addresses that the plan does not take
    packing: list[Any]  # the plan by which a mask that is a tensor is packed, once it is known
    node: Any  # what computes out and records its derivative without Python (`node.py`); None where that cannot be done

    def __call__(self, *arguments: Any) -> tuple[Any, Origin | None]:
        """Run the plan with the arguments of the operator."""
        tensors = arguments[: -len(self.numbers)]
        enter_thread()
        ran = self.plan.run(tensors, all_outputs=False)
        if ran is None:
            return self.compute(*arguments)
        return ran[0], Origin(self.plan, ran[1][: len(tensors) + SAVED_OUTPUTS], self.around_needs)

    def attend(self, tensors: _Tensors) -> Tensor | None:
        """Return out, whose derivative is recorded; None where that is left to Python."""
        if self.node is None or _exported is not None or self.plan.is_watched() or environment.profiles_backward():
            return None
        enter_thread()
        return self.node.attend(tensors)


def repeat(found: Hashable) -> Repeat | None:
    """Return the cached repeat of a call, or None."""
    return _repeats.get(found)


def find(name: str, tensors: _Tensors, numbers: tuple[Any, ...]) -> Any:
    """Return the cached plan of an operator, or None."""
    return _plans.get(key(name, tensors, numbers))


def remember(
    call: Hashable,
    name: str,
    tensors: _Tensors,
    numbers: tuple[Any, ...],
    compute: Any,
    around_needs: Any,
    gradients: Callable[..., tuple[Tensor | None, ...] | None],
) -> None:
    """Store the plan of a forward, if there is one, under a second key, which tells calls apart as finely as its own.

    `gradients(saved, around_needs, needs, origin, grad_out)` computes its backward in Python.
    """
    plan = find(name, tensors, numbers)
    if plan is None:
        return

    def backward(of: Any, saved: _Tensors, addresses: list[int], grad_out: Tensor) -> tuple[Tensor | None, ...]:
        found = gradients(saved, around_needs, (False, False), Origin(plan, addresses, around_needs, of), grad_out)
        assert found is not None, "a gradient of out gives gradients"
        return found[:-2]  # no bias and no sink

    if len(_repeats) >= MAX_PLANS:
        _repeats.clear()
    repeats_it = node.of_forward(plan, tensors, backward)
    _repeats[call] = Repeat(plan, numbers, around_needs, compute, [], repeats_it)


def _in_backward(saved: _Sequence, primals: int) -> _Sequence:
    """Reorder the tensors that a forward saved as the backward's schema has them: primals, outputs, then the other inputs."""
    return saved[:primals] + saved[-SAVED_OUTPUTS:] + saved[primals:-SAVED_OUTPUTS]


def planned(function: _Computation, signature: Any, name: str = "") -> Callable[..., tuple[Any, Origin | None]]:
    """Wrap the operator `function`: repeat its cached plan where there is one, and return (results, origin of its backward).

    `signature` says which arguments are tensors, and which say what is needed; `name` is by default that of the function.
    """
    name = name or function.__name__
    is_backward = name.partition(".")[0].endswith("backward")

    def call(*arguments: Any) -> tuple[Any, Origin | None]:
        on = arguments[1] if arguments[0] is None else arguments[0]
        if _exported is not None and on is not None and on.is_cuda:
            enter_thread()
            return _export(name, signature, arguments, on.get_device(), function, _exported), None
        if on is None or not may_repeat(on):
            return function(*arguments), None
        enter_thread()
        if is_backward and environment.profiles_backward():
            return function(*arguments), None
        tensors, numbers = signature.split(arguments)
        found = key(name, tensors, numbers)
        plan = _plans.get(found)
        if plan is not None:
            ran = plan.run(tensors)
            if ran is not None:
                return ran[0], Origin(plan, ran[1][: len(tensors) + SAVED_OUTPUTS], signature.around_needs(numbers))
        if found in _plans or _is_new(found):
            return function(*arguments), None
        return _make(found, on.get_device(), tensors, lambda distinct: function(*distinct, *numbers)), None

    return call


class Exported(NamedTuple):
    """A call of an operator whose plan is written to a file."""

    name: str
    signature: Any
    arguments: tuple[Any, ...]  # as `described` has tensors, then numbers
    plan: Any


@contextmanager
def exporting(take: Callable[[Exported], None]) -> Iterator[None]:
    """Give every call of an operator on a GPU to `take`, whichever thread makes it, with its plan. A call without one raises."""
    global _exported
    forget()
    _exported = take
    node.set_replays(False)
    try:
        yield
    finally:
        _exported = None
        node.set_replays(True)


def refuse_export(name: str, on: Tensor, takes: str = "operators of torch") -> None:
    """Raise NotImplementedError while calls are exported: this one, where it is on a GPU, has no plan."""
    if _exported is not None and on.is_cuda:
        raise refusal(name, takes)


def refusal(name: str, takes: str) -> NotImplementedError:
    """Return the error of a call that cannot be exported."""
    return NotImplementedError(f"export_kernels cannot write this call of {name}: it takes {takes}")


def _export(
    name: str, signature: Any, arguments: tuple[Any, ...], device: int, function: Any, take: Callable[[Exported], None]
) -> tuple[Tensor, ...]:
    """Compute in full, and give the plan to what exports it."""
    tensors, numbers = signature.split(signature.fill(arguments))
    outputs, recorded = _recorded(tensors, lambda distinct: function(*distinct, *numbers))
    try:
        plan = recorded.certain_plan(outputs, device)
    except LookupError as error:
        raise refusal(name, str(error)) from None
    take(Exported(name, signature, (*described(tensors), *numbers), plan))
    return outputs


def _is_new(found: Hashable) -> bool:
    """Return whether a key comes for the first time."""
    if found in _seen:
        return False
    if len(_seen) >= MAX_SEEN:
        _seen.clear()
    _seen[found] = None
    return True


def forget() -> None:
    """Drop all plans: what the next call would launch may have changed."""
    _plans.clear()
    _repeats.clear()
    _seen.clear()


def may_repeat(tensor: Tensor) -> bool:
    """Return whether a call that begins with the tensor may be repeated: on a GPU, unless each call is to be checked."""
    return tensor.is_cuda and not environment.checks()


def key(name: str, tensors: _Tensors, numbers: tuple[Any, ...]) -> Hashable:
    """Return the key under which the plan of an operator is cached."""
    return (name, *described(tensors), numbers, *switches(tensors[0]))


def described(tensors: _Tensors) -> tuple[tuple[Any, ...] | None, ...]:
    """Return the parts of a plan's key that tensors add: shape, strides, dtype, device."""
    return tuple(
        [
            None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device())
            for tensor in tensors
        ]
    )


def switches(tensor: Tensor | None) -> tuple[Any, ...]:
    """Return the global settings that are part of a plan's key: DMATTN_ARCH, DMATTN_RECORD, TF32 for float32."""
    tf32 = float32_precision() if tensor is not None and tensor.dtype is torch.float32 else None
    return environment.architecture(), environment.record_file(), tf32


def _make(found: Hashable, device: int, tensors: _Tensors, function: _Computation) -> tuple[Tensor, ...]:
    """Compute in full, and keep a plan of what was launched where it can be repeated."""
    outputs, recorded = _recorded(tensors, function)
    if len(_plans) >= MAX_PLANS:
        _plans.clear()
    _plans[found] = recorded.plan(outputs, device)
    return outputs


def _recorded(tensors: _Tensors, function: _Computation) -> tuple[tuple[Tensor, ...], Any]:
    """Compute in full; return outputs, and what was launched."""
    from dmattn_ops.launching.launch import recording

    # a plan identifies tensors by identity, so a tensor that is passed twice becomes two views
    distinct = tuple(
        tensor if tensor is None or not any(tensor is other for other in tensors[:index]) else tensor.view_as(tensor)
        for index, tensor in enumerate(tensors)
    )
    with recording(distinct) as recorded:
        return function(distinct), recorded
