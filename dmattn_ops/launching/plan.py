"""Repeat what a call launched, with other tensors of the same shapes, strides and dtypes."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from dmattn_ops.launching.driver import LaunchShape, launches, pack, parameter_sizes
from dmattn_ops.launching.tensor_maps import Map

_ENTRY = re.compile(r"\.entry\s+[^(]*\(([^)]*)\)")  # a kernel's head in PTX, and the parameters in it
ALIGNMENT = 16  # bytes that every address of a plan is a multiple of: what Triton specializes on
_dynamo: Any = getattr(torch._C, "_dynamo", None)
# as Inductor's own code allocates: in half of the time of torch.empty_strided
_empty_cuda: Any = getattr(getattr(_dynamo, "guards", None), "_empty_strided_cuda", None)
_current_device = torch.cuda.current_device


def raw_stream(device: int) -> int:
    """Return the address of a device's current stream."""
    return driver.active.get_current_stream(device)


class TensorLayout(NamedTuple):
    """The shape, strides and dtype of a tensor that a plan allocates."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorLayout:
        """Return the layout of `tensor`."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


class Slot(NamedTuple):
    """An address: that of a plan's tensor, plus an offset in bytes."""

    tensor: int
    offset: int


class TensorMap(NamedTuple):
    """A tensor map of memory at an address."""

    slot: Slot
    described: Map  # without a base


class Plan:
    """The steps of a call: to be run with any tensors of the shapes, strides and dtypes that it was made for."""

    def __init__(
        self, device: int, inputs: int, outputs: list[TensorLayout], steps: Sequence[Allocate | Compute | Relaunch]
    ) -> None:
        self.device, self.outputs, self.steps = device, outputs, steps
        self.with_elements = [None if 0 in layout.shape else layout for layout in outputs]
        self.stages = _stages(steps, inputs + len(outputs))
        self.computes = [step for step in steps if isinstance(step, Compute)]
        self.only_launches = not self.computes
        self.backwards: dict[Hashable, Plan] = {}  # of what this forward computed

    def is_watched(self) -> bool:
        """Return whether something is to be told of each launch."""
        return _hooked()

    def run(
        self, inputs: tuple[Tensor | None, ...], addresses: list[int] | None = None, *, all_outputs: bool = True
    ) -> tuple[tuple[Any, ...], list[int]] | None:
        """Launch everything on the current stream of the plan's device.

        Returns outputs, and the addresses of inputs (which the caller may know) and outputs; None, with no kernel of
        the plan launched, for other alignments. Without `all_outputs`, those that have no elements are None.
        """
        if addresses is None:
            addresses = [0 if tensor is None else tensor.data_ptr() for tensor in inputs]
        if _current_device() != self.device:
            with torch.cuda.device(self.device):
                return self.run(inputs, addresses, all_outputs=all_outputs)
        layouts = self.outputs if all_outputs else self.with_elements
        outputs = tuple([None if layout is None else allocate(*layout) for layout in layouts])
        known = addresses + [0 if output is None else output.data_ptr() for output in outputs]
        tensors, places, stream = [*inputs, *outputs], known, raw_stream(self.device)
        for makes, launch in self.stages:
            for make in makes:
                made = make.run(tensors)
                tensors.append(made)
                places = [*places, made.data_ptr()]
            if launch is not None and not launch(places, stream):
                return None
        return outputs, known


class Launched:
    """Launches of a plan one behind the other: through the driver where the layout of all parameters is certain, else Triton."""

    def __init__(self, relaunches: list[Relaunch], tensors: int) -> None:
        self.relaunches, self.count = relaunches, len(relaunches)
        self.driven = launches([relaunch.packed for relaunch in relaunches], tensors)

    def __call__(self, addresses: list[int], stream: int) -> bool:
        """Launch with tensors at `addresses`; False, with nothing launched, where one is not aligned."""
        done, driven = 0, self.driven
        if driven is not None and not _hooked():
            done = driven.launch(driven.made, driven.pack(*addresses), stream)
            if done == self.count:
                return True
        if done < 0 or reduce(or_, addresses) % ALIGNMENT != 0:
            return False
        for relaunch in self.relaunches[done:]:
            relaunch.run(addresses, stream)
        return True


class Stage(NamedTuple):
    """Steps of a plan that make tensors, and the launches behind them."""

    makes: list[Allocate | Compute]
    launch: Launched | None


def _stages(steps: Sequence[Allocate | Compute | Relaunch], tensors: int) -> list[Stage]:
    """Put each run of launches together with what is made before it, beside so many inputs and outputs."""
    groups: list[tuple[list[Allocate | Compute], list[Relaunch]]] = [([], [])]
    for step in steps:
        if isinstance(step, Relaunch):
            groups[-1][1].append(step)
            continue
        if groups[-1][1]:
            groups.append(([], []))
        groups[-1][0].append(step)
    stages = []
    for makes, relaunches in groups:
        tensors += len(makes)
        stages.append(Stage(makes, Launched(relaunches, tensors) if relaunches else None))
    return stages


class Allocate:
    """A step that makes a workspace."""

    def __init__(self, layout: TensorLayout) -> None:
        self.layout = layout

    def run(self, tensors: list[Any]) -> Tensor:
        """Allocate."""
        return allocate(*self.layout)


class Compute:
    """A step that computes a tensor; `layout` is that of its result."""

    def __init__(self, function: Callable[..., Tensor], references: list[Any], layout: TensorLayout) -> None:
        self.function, self.references, self.layout = function, references, layout
        self.takes_tensors = any(type(of) is Slot for of in references)

    def run(self, tensors: list[Any]) -> Tensor:
        """Compute."""
        if not self.takes_tensors:
            return self.function(*self.references)
        return self.function(*[tensors[of.tensor] if type(of) is Slot else of for of in self.references])


class Relaunch:
    """A step that launches a kernel: through the driver where the layout of its parameters is certain, else Triton."""

    def __init__(self, compiled: Any, grid: tuple[int, ...], references: list[Any]) -> None:
        self.compiled, self.grid, self.references = compiled, grid, references

    @cached_property
    def packed(self) -> tuple[int, ...] | None:
        """The launch as the driver gets it; None where that is not certain."""
        return _packed(self.compiled, self.grid, self.references)

    def run(self, addresses: list[int], stream: int) -> None:
        """Launch through Triton."""
        arguments = [_value(reference, addresses) for reference in self.references]
        self.compiled[self.grid](*arguments, stream=stream)


def _empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


allocate = _empty_cuda if _empty_cuda is not None else _empty_strided  # uninitialised memory on the current device


def _value(reference: Any, addresses: list[int]) -> Any:
    """Return an argument as a compiled kernel takes it."""
    if type(reference) is Slot:
        return addresses[reference.tensor] + reference.offset
    if type(reference) is TensorMap:
        return reference.described.at(addresses[reference.slot.tensor] + reference.slot.offset)
    return reference


def _hooked() -> bool:
    """Return whether launch hooks are installed in Triton, for example by the profiler Proton."""
    runtime = knobs.runtime
    entering, leaving = runtime.launch_enter_hook, runtime.launch_exit_hook
    return (entering is not None and bool(getattr(entering, "calls", True))) or (
        leaving is not None and bool(getattr(leaving, "calls", True))
    )


def _packed(compiled: Any, grid: tuple[int, ...], references: list[Any]) -> tuple[int, ...] | None:
    """Pack a launch, or return None where anything about it is not as it is known here."""
    found = laid_out(compiled, grid, references)
    if found is None or not _is_loaded(compiled):
        return None
    return pack(compiled.function, *found, _parameter_sizes(compiled))


def laid_out(
    compiled: Any, grid: tuple[int, ...], references: list[Any]
) -> tuple[LaunchShape, list[tuple[str, Any]]] | None:
    """Return how a kernel is launched and its parameters as `driver.pack` takes them, None where they are not known here.

    The layout is Triton's (3.6 to 3.9): the arguments that are no constants, of a tensor map the map, its shape (int32)
    and its strides (int64), then two pointers to scratch memory.
    """
    if not _is_plain(compiled):
        return None
    laid: list[tuple[str, Any]] = []  # (type, value)
    descriptors = list(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    for kind, reference in zip(compiled.src.signature.values(), references, strict=True):
        if type(reference) is TensorMap and descriptors:
            shape, strides = reference.described.shape, reference.described.strides
            compiled_for = descriptors.pop(0)
            if not {"block_size", "swizzle"} <= compiled_for.keys() or compiled_for.get("fp4_padded"):
                return None
            described = reference.described._replace(block=tuple(compiled_for["block_size"]))
            laid.append(("map", (*reference.slot, described, compiled_for["swizzle"])))
            laid += [("i32", size) for size in shape]
            laid += [("i64", stride) for stride in strides]
        elif kind != "constexpr":
            laid.append((kind, reference))
    laid += [("*", None), ("*", None)]
    warps, _, shared = compiled.packed_metadata
    return LaunchShape(grid, 32 * warps, shared, bool(compiled.metadata.launch_pdl)), laid


@lru_cache(maxsize=1024)
def _parameter_sizes(compiled: Any) -> list[int]:
    """Return the sizes of a kernel's parameters: the driver takes 5 us for each of a hundred."""
    return parameter_sizes(compiled.function, _declared(compiled))


def _declared(compiled: Any) -> int | None:
    """Return the number of parameters that the PTX of a kernel declares; None where there is no PTX to be read."""
    entry = _ENTRY.search(getattr(compiled, "asm", {}).get("ptx", ""))
    return None if entry is None else entry[1].count(".param")


def _is_plain(compiled: Any) -> bool:
    """Return whether a launch needs nothing but what a `LaunchShape` has, and parameters."""
    try:
        of = compiled.metadata
        special = (of.launch_cooperative_grid, of.global_scratch_size, of.profile_scratch_size)
        _, blocks_in_cluster, _ = compiled.packed_metadata
        return not any(special) and blocks_in_cluster == 1 and isinstance(of.launch_pdl, int)
    except (AttributeError, TypeError, ValueError):
        return False


def _is_loaded(compiled: Any) -> bool:
    """Return whether a kernel can be found by its handle."""
    try:
        compiled._init_handles()
        return isinstance(compiled.function, int)
    except (AttributeError, TypeError, ValueError):
        return False
