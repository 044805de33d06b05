"""The file of `export_kernels`: cubins, and plans by the text of the call that each one serves. `csrc/cuda/plans.cpp` reads it.

It is text of words and numbers between spaces and line ends, with the bytes of cubins in it:

    dmattn-kernels FORMAT VERSION ARCHITECTURE MULTIPROCESSORS
    kernel NAME THREADS SHARED OVERLAPS BYTES, and the cubin on the next line
    column VALUES RUNS, and for each run: FIRST STEP COUNT
    plan CALLS THE TEXT OF A CALL, to the end of the line
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

Plans of calls that differ in whole numbers alone, such as a length and what follows from it, are written once. Where their
numbers differ stands $7 for column 7 (the first column of the file is 0), which has a value for each of the CALLS: that of
the first call, of the second, and so on. Nothing is computed from a length: each value was recorded at its own call, and the
reader puts together for each call what it would have read without columns.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from dmattn_ops.launching.driver import words
from dmattn_ops.launching.plan import Allocate, Compute, Plan, Relaunch, Slot, TensorLayout, laid_out
from dmattn_ops.launching.plans import refusal
from dmattn_ops.launching.recording import ZEROS, sum_into

FORMAT = 2  # as in `csrc/cuda/plans.cpp`
# Whole numbers of 64 bits; not parts of names and fractions
_WHOLE = re.compile(r"(?<![\w.+-])(?:0|-?[1-9]\d{0,17})(?![\w.])")
_HOLE = "$"  # stands for a whole number in what plans have in common


class PlanFile:
    """Plans and their kernels for one architecture (90 for SM 9.0) and number of multiprocessors, by a version of the library."""

    def __init__(self, version: str, sm: int, num_sms: int) -> None:
        self.head = f"dmattn-kernels {FORMAT} {version} {sm} {num_sms}\n".encode()
        self.kernels: dict[bytes, int] = {}
        self.numbers: dict[Any, int] = {}  # of the kernels, by what Triton compiled
        self.texts: set[str] = set()
        self.families: dict[str, list[array[int]]] = {}  # whole numbers of each call, by the text that they stand in
        self.lock = Lock()  # backwards of several GPUs come from several threads

    def add(self, exported: Any) -> None:
        """Add a call (`plans.Exported`); NotImplementedError, with the reason, where only Python can repeat it."""
        text = call_text(exported.name, exported.signature, exported.arguments)
        with self.lock:
            if text in self.texts:
                return
            whole = "\n".join((text, *self._lines(exported.name, exported.plan)))
            self.families.setdefault(_WHOLE.sub(_HOLE, whole), []).append(array("q", map(int, _WHOLE.findall(whole))))
            self.texts.add(text)

    def write(self, path: Path) -> None:
        """Write all."""
        columns: dict[tuple[int, ...], int] = {}
        plans = [_plan(family, sorted(calls), columns) for family, calls in self.families.items()]
        text = "".join((*[_column(values) for values in columns], *plans))
        path.write_bytes(b"".join((self.head, *self.kernels, text.encode())))

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
        number = self.numbers.get(compiled)
        if number is None:
            cubin = compiled.asm["cubin"]
            numbers = _numbers((shape.threads, shape.shared, int(shape.overlaps), len(cubin)))
            head = f"kernel {compiled.metadata.name} {numbers}\n"
            number = self.kernels.setdefault(head.encode() + cubin + b"\n", len(self.kernels))
            self.numbers[compiled] = number
        return [f"launch {number} {_numbers(shape.grid)} {len(parameters)}", *[_parameter(*one) for one in parameters]]


def _plan(family: str, calls: Sequence[Sequence[int]], columns: dict[tuple[int, ...], int]) -> str:
    """Return the plan of calls that have a text in common; numbers that differ become columns, equal ones the same."""
    first, *more = family.split(_HOLE)
    parts = [first]
    for values, behind in zip(zip(*calls, strict=True), more, strict=True):
        same = values.count(values[0]) == len(values)
        parts += (str(values[0]) if same else f"{_HOLE}{columns.setdefault(values, len(columns))}", behind)
    return f"plan {len(calls)} {''.join(parts)}\nend\n"


def _column(values: Sequence[int]) -> str:
    """Return the line of a column: runs of values that are equally far apart."""
    runs: list[list[int]] = []
    for value in values:
        last = runs[-1] if runs else None
        if last is not None and last[2] == 1:
            last[1:] = value - last[0], 2
        elif last is not None and value == last[0] + last[1] * last[2]:
            last[2] += 1
        else:
            runs.append([value, 0, 1])
    return f"column {len(values)} {len(runs)} {_numbers(number for run in runs for number in run)}\n"


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
    which, numbers = words(kind, value)
    return f"{which} {_numbers(numbers)}"


def _numbers(values: Any) -> str:
    return " ".join(map(str, values))
