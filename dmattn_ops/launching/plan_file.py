"""The file of `export_kernels`: cubins, and plans by the text of the call that each one serves. `csrc/cuda/plans.cpp` reads it.

It is text of words and numbers between spaces and line ends, with the bytes of cubins in it:

    dmattn-kernels 1 ARCHITECTURE MULTIPROCESSORS
    kernel NAME THREADS SHARED OVERLAPS BYTES, and the cubin on the next line
    plan THE TEXT OF A CALL, to the end of the line
    output LAYOUT               for each result; a layout is: DTYPE RANK SIZES STRIDES
    allocate LAYOUT             a new tensor; so are those of the next two
    zeros LAYOUT
    contiguous TENSOR
    zero TENSOR, fill TENSOR VALUE
    sum TARGET SOURCE RANK SIZES COUNT DIMENSIONS
    launch KERNEL X Y Z COUNT   and the parameters: number WORD, address TENSOR OFFSET, or map TENSOR OFFSET TYPE RANK SIZES
                                STEPS BOX SWIZZLE, as the driver takes them
    end

Tensors are numbered as in a plan: the arguments of the operator that are tensors, the results, then what steps return.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmattn_ops.launching.driver import encoding, word
from dmattn_ops.launching.plan import Allocate, Compute, Plan, Relaunch, Slot, TensorLayout, laid_out
from dmattn_ops.launching.plans import refusal
from dmattn_ops.launching.recording import ZEROS, sum_into

_MAGIC = "dmattn-kernels 1"


class PlanFile:
    """Plans and their kernels for one architecture (90 for SM 9.0) and number of multiprocessors."""

    def __init__(self, sm: int, num_sms: int) -> None:
        self.head = f"{_MAGIC} {sm} {num_sms}\n".encode()
        self.kernels: dict[bytes, int] = {}
        self.plans: dict[str, list[str]] = {}

    def add(self, exported: Any) -> None:
        """Add a call (`plans.Exported`); NotImplementedError, with the reason, where only Python can repeat it."""
        text = call_text(exported.name, exported.signature, exported.arguments)
        if text not in self.plans:
            self.plans[text] = self._lines(exported.name, exported.plan)

    def write(self, path: Path) -> None:
        """Write all."""
        plans = [line for text, lines in self.plans.items() for line in (f"plan {text}", *lines, "end")]
        path.write_bytes(b"".join((self.head, *self.kernels, "\n".join((*plans, "")).encode())))

    def _lines(self, name: str, plan: Plan) -> list[str]:
        lines = [f"output {_layout(output)}" for output in plan.outputs]
        for step in plan.steps:
            if isinstance(step, Allocate):
                lines.append(f"allocate {_layout(step.layout)}")
            elif isinstance(step, Compute):
                lines.append(_computed(name, step))
            else:
                lines += self._launch(name, step)
        return lines

    def _launch(self, name: str, step: Relaunch) -> list[str]:
        compiled = step.compiled
        found = laid_out(compiled, step.grid, step.references)
        if found is None:
            raise refusal(name, f"the kernel {compiled.metadata.name}, which Triton must launch")
        shape, parameters = found
        cubin = compiled.asm["cubin"]
        head = f"kernel {compiled.metadata.name} {shape.threads} {shape.shared} {int(shape.overlaps)} {len(cubin)}\n"
        number = self.kernels.setdefault(head.encode() + cubin + b"\n", len(self.kernels))
        return [f"launch {number} {_numbers(shape.grid)} {len(parameters)}", *[_parameter(*one) for one in parameters]]


def call_text(name: str, signature: Any, arguments: tuple[Any, ...]) -> str:
    """Return the text of a call, as `csrc/cuda/operators.cpp` writes it: arguments that are not their default."""
    parts = [name]
    for argument, default, value in zip(signature.names, signature.defaults, arguments, strict=True):
        if isinstance(value, tuple):
            parts.append(f"{argument}={_tensor(*value[:3])}")
        elif value is not None and _number(value) != _number(default):
            parts.append(f"{argument}={_number(value)}")
    return " ".join(parts)


def _number(value: Any) -> str:
    return f"{value:.17g}" if isinstance(value, float) else str(value)


def _tensor(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> str:
    """Return the text of a tensor; how far apart elements of a dimension of size 1 are says nothing."""
    text = f"{str(dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]"
    expected, apart = 1, False
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        apart |= size > 1 and stride != expected
        expected *= max(size, 1)
    given = ",".join(str(stride if size > 1 else 0) for size, stride in zip(shape, strides, strict=True))
    return f"{text}/({given})" if apart else text


def _layout(layout: TensorLayout) -> str:
    shape, strides, dtype = layout
    return f"{str(dtype).removeprefix('torch.')} {len(shape)} {_numbers((*shape, *strides))}".rstrip()


def _computed(name: str, step: Compute) -> str:
    places = [of.tensor for of in step.references if type(of) is Slot and of.offset == 0]
    if step.function in ZEROS:
        return f"zeros {_layout(step.layout)}"
    if step.function is Tensor.contiguous:
        return f"contiguous {places[0]}"
    if step.function is Tensor.zero_:
        return f"zero {places[0]}"
    if step.function is sum_into:
        sizes, dims = step.references[2:]
        return f"sum {places[0]} {places[1]} {len(sizes)} {_numbers((*sizes, len(dims), *dims))}"
    if step.function is Tensor.fill_:
        return f"fill {places[0]} {_number(float(step.references[1]))}"
    raise refusal(name, f"operators of torch ({getattr(step.function, '__name__', step.function)})")


def _parameter(kind: str, value: Any) -> str:
    if kind == "map":
        tensor, offset, described, swizzle = value
        encoded, *dimensions = encoding(described.dtype, described.shape, described.strides, described.block)
        numbers = [number % (1 << 64) for part in dimensions for number in part]
        return f"map {tensor} {offset} {encoded} {len(described.shape)} {_numbers(numbers)} {swizzle}"
    if type(value) is Slot:
        return f"address {value.tensor} {value.offset}"
    return f"number {word(kind, value)}"


def _numbers(values: Any) -> str:
    return " ".join(map(str, values))
