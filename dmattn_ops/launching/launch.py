"""Launch kernels, and note what a call launched as a `Plan` that later calls of the same shapes repeat.

A launcher runs in full at the first call of a signature (shapes, strides, dtypes, options); what a later one does with
its plan is in `plan.py`. A launcher therefore

- launches through `launch(kernel, grid, *arguments, **named)`, which reads like `kernel[grid](*arguments, **named)`;
- passes tensors of the call, or views of them, and describes tensor maps as a `Map`;
- makes everything else that is done to tensors on the device through `computed`, and workspaces through `workspace`.

A tensor that is none of these, or one that is changed in another way, makes the signature one without a plan: each call
then runs its launcher in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from dmattn_ops.launching import ahead
from dmattn_ops.launching.overlap import kernels_overlap
from dmattn_ops.launching.plan import ALIGNMENT, Allocate, Compute, Plan, Relaunch, Slot, TensorLayout, TensorMap
from dmattn_ops.launching.recording import computed as computed
from dmattn_ops.launching.recording import makes_zeros as makes_zeros
from dmattn_ops.launching.recording import sum_into as sum_into
from dmattn_ops.launching.recording import thread
from dmattn_ops.launching.recording import workspace as workspace
from dmattn_ops.launching.tensor_maps import Map

# Of all kernels: products and sums become one instruction, whatever an environment variable or a later Triton (3.10) makes the
# default. The exponents of probabilities, and the registers that kernels fit into, depend on it.
OPTIONS = {"enable_fp_fusion": True}
_MAX_COMPILED = 1024
_PART = 512  # bytes that a workspace begins at a multiple of, as torch's own memory does
_compiled: dict[tuple[Any, ...], Any] = {}  # kernels by what they are specialized on


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, follows: bool = False, **named: Any) -> None:
    """Launch `kernel[grid](*arguments, **named)`, and note it where a plan is being made.

    `follows`: where the kernel comes after another one of the call, it may begin before that has ended (`overlap.py`).
    """
    if thread.launches is not None:
        follows, thread.launches = follows and thread.launches > 0, thread.launches + 1
    else:
        follows = False
    if not isinstance(kernel, JITFunction):  # the interpreter
        kernel[grid](*map(_argument, arguments), **{name: _argument(value) for name, value in named.items()})
        return
    if follows and kernels_overlap():
        named["launch_pdl"] = True
    names, whole = kernel.arg_names, (*grid, 1, 1)[:3]
    given = dict(zip(names, arguments, strict=False)) | named
    varying = _varying(kernel)
    values = [_specialization(given[name]) if name in varying else given[name] for name in names]
    key = (kernel, *values, *[option for option in named.items() if option[0] not in names])
    compiled = _compiled.get(key)
    if compiled is None:
        ahead.wait_for(kernel.__name__)
        compiled = kernel[grid](**{name: _argument(value) for name, value in given.items()}, **OPTIONS)
        if len(_compiled) >= _MAX_COMPILED:
            _compiled.clear()
        _compiled[key] = compiled
    else:
        compiled[whole](*[_argument(given[name]) for name in names])
    if thread.recorder is not None:
        thread.recorder.launches(compiled, whole, [given[name] for name in names])


@cache
def _varying(kernel: Any) -> frozenset[str]:
    """Return the names of a kernel's arguments that are no compile-time constants."""
    return frozenset(parameter.name for parameter in kernel.params if not parameter.is_constexpr)


def _specialization(argument: Any) -> Any:
    """Return the part of a launch key that an argument adds: at least as fine as Triton's specialization, and faster to compute."""
    if type(argument) is int:
        return argument == 1, argument % ALIGNMENT == 0, -(1 << 31) <= argument < 1 << 31
    if isinstance(argument, Tensor):
        return argument.dtype, argument.get_device(), argument.data_ptr() % ALIGNMENT == 0
    if isinstance(argument, Map):
        return argument.dtype, argument.block
    return type(argument)


def _argument(argument: Any) -> Any:
    """Return an argument as Triton takes it."""
    return argument.descriptor() if isinstance(argument, Map) else argument


class _Watch(TorchDispatchMode):
    """A dispatch mode that notices operators that change a tensor, since a plan would not repeat them."""

    def __init__(self) -> None:
        super().__init__()
        self.looks, self.changes = True, ""  # what changed a tensor first

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if self.looks and operator._schema.is_mutable:
            self.changes = self.changes or f"operators of torch ({operator})"
        return operator(*arguments, **(keywords or {}))

    @contextmanager
    def without_watching(self) -> Iterator[None]:
        """Allow operators that change tensors, because the recorder knows of them."""
        before, self.looks = self.looks, False
        try:
            yield
        finally:
            self.looks = before


class Recording:
    """The steps that one call launches. Tensors are named once its outputs are known: by `plan`."""

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        self.inputs = inputs
        self.watch = _Watch()
        self.steps: list[Callable[[_Names], Any]] = []
        self.workspaces: list[Tensor] = []
        self.taken: set[int] = set()  # tensors by id that are computed with

    def gives_up(self) -> None:
        """Note that the call cannot be repeated, and let go of its tensors: it may free workspaces on its way."""
        self.watch.changes = "parts of the call one after another"
        self.steps.clear()
        self.workspaces.clear()

    def without_watching(self) -> AbstractContextManager[None]:
        """Return a context in which operators may change tensors, because the recorder is told of them."""
        return self.watch.without_watching()

    def allocates(self, made: Tensor) -> None:
        """Note that a workspace is made."""
        if not self.watch.changes:
            self.workspaces.append(made)

    def computes(self, function: Callable[..., Tensor], arguments: tuple[Any, ...], made: Tensor) -> None:
        """Note that a tensor is computed."""

        def step(names: _Names) -> Compute:
            references = [names.whole(argument) for argument in arguments]
            names.add(made)
            return Compute(function, references, TensorLayout.of(made))

        self.taken.update(id(argument) for argument in arguments if isinstance(argument, Tensor))
        self._note(step)

    def launches(self, compiled: Any, grid: tuple[int, ...], arguments: list[Any]) -> None:
        """Note that a kernel is launched; `arguments` are those of its Python function."""

        def step(names: _Names) -> Relaunch:
            return Relaunch(compiled, grid, [names.reference(argument) for argument in arguments])

        self._note(step)

    def _note(self, step: Callable[[_Names], Any]) -> None:
        """Keep a step, and so its tensors, unless the call cannot be repeated any more."""
        if not self.watch.changes:
            self.steps.append(step)

    def plan(self, outputs: Sequence[Tensor], device: int) -> Plan | None:
        """Return the plan of the call that returned `outputs`; None where it launched nothing, or cannot be repeated."""
        try:
            return self.certain_plan(outputs, device)
        except LookupError:
            return None

    def certain_plan(self, outputs: Sequence[Tensor], device: int) -> Plan:
        """Return the plan of the call that returned `outputs`; LookupError, with the reason, where there can be none."""
        steps = self.named(outputs)
        if self.watch.changes:
            raise LookupError(self.watch.changes)
        if not any(isinstance(step, Relaunch) for step in steps):
            raise LookupError("no kernel: there is nothing to compute, or operators of torch do")
        return Plan(device, len(self.inputs), [TensorLayout.of(output) for output in outputs], steps)

    def named(self, outputs: Sequence[Tensor]) -> list[Any]:
        """Return the steps of a plan; LookupError for a tensor that it does not know."""
        names = _Names()
        for tensor in (*self.inputs, *outputs):
            names.add(tensor)
        return [*names.add_workspaces(self.workspaces, self.taken), *[step(names) for step in self.steps]]


class _Names:
    """From a tensor to its place among those that a plan knows: inputs, outputs, workspaces, then what its steps make."""

    def __init__(self) -> None:
        self.count = 0
        self.known: dict[int, tuple[Tensor, Slot]] = {}  # by id: the tensors live as long

    def add(self, tensor: Tensor | None) -> None:
        """Give the next place to a tensor, which keeps one that it has (it was changed in place)."""
        if tensor is not None:
            self.known.setdefault(id(tensor), (tensor, Slot(self.count, 0)))
        self.count += 1

    def add_workspaces(self, workspaces: list[Tensor], taken: set[int]) -> list[Allocate]:
        """Return the steps that make workspaces: one for each that is `taken` by a computation, one for all others together."""
        alone = [one for one in workspaces if id(one) in taken]
        for one in alone:
            self.add(one)
        size, together = 0, [one for one in workspaces if id(one) not in taken]
        for one in together:
            self.known[id(one)] = (one, Slot(self.count, size))
            size += -(-max(1, one.nbytes) // _PART) * _PART
        layouts = [TensorLayout.of(one) for one in alone]
        if together:
            self.count += 1
            layouts.append(TensorLayout((size,), (1,), torch.uint8))
        return [Allocate(layout) for layout in layouts]

    def reference(self, argument: Any) -> Any:
        """Return the plan's place-holder of an argument; LookupError for a tensor that the plan does not know."""
        if isinstance(argument, Tensor):
            return self.slot(argument, 0)
        if isinstance(argument, Map):
            return TensorMap(self.slot(argument.base, argument.offset), argument._replace(base=None))
        return argument

    def whole(self, argument: Any) -> Any:
        """Return the place-holder of an argument of a computation; LookupError also for a view of a known tensor."""
        if isinstance(argument, Tensor) and id(argument) not in self.known:
            raise LookupError("a view of a tensor, or another one")
        return self.reference(argument)

    def slot(self, tensor: Tensor, offset: int) -> Slot:
        """Return the slot of the address `offset` bytes behind a tensor's start."""
        address = tensor.data_ptr() + offset
        if address % ALIGNMENT != 0:
            raise LookupError("an address that is no multiple of 16 bytes")
        known, slot = self.known.get(id(tensor)) or self._base(tensor)
        return Slot(slot.tensor, slot.offset + address - known.data_ptr())

    def _base(self, view: Tensor) -> tuple[Tensor, Slot]:
        """Return the only tensor of which a tensor is a view, and its place."""
        storage = view.untyped_storage().data_ptr()
        found = [known for known in self.known.values() if known[0].untyped_storage().data_ptr() == storage]
        if len(found) != 1 or storage == 0:
            raise LookupError("a tensor that is neither one of the call nor computed")
        return found[0]


@contextmanager
def recording(inputs: Sequence[Tensor | None]) -> Iterator[Recording]:
    """Note what this thread launches meanwhile for a call with these inputs, of which no two are the same tensor."""
    outer, made = thread.recorder, Recording(inputs)
    thread.recorder = made
    try:
        with made.watch:
            yield made
    finally:
        thread.recorder = outer
