"""Kernels for programs without Python: `export_kernels`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dmattn_ops.choice import arch as architectures
from dmattn_ops.launching import plans
from dmattn_ops.version import __version__


def export_kernels(
    target: Any,
    path: str | os.PathLike[str],
    *,
    inputs: Iterable[tuple[Any, ...]] | None = None,
    arch: str | None = None,
) -> None:
    """Write the GPU kernels of some calls to a file, from which `libdmattn.so` launches them without Python and Triton.

    Each call of an operator of this library that a target makes on a GPU, in a backward too, is written: the compiled
    kernels, and a plan of how they are launched. A plan serves calls with the same shapes, strides, dtypes and numbers, on GPUs
    of the same architecture with at least as many multiprocessors.

    A range of lengths is exported by a call at each of them: `inputs=(make(length) for length in range(64, 4097, 64))`. Which
    kernels are launched, and how, may change between any two lengths, so nothing is concluded from one to another. Calls that
    differ in numbers alone share one plan in the file, and a kernel is written once.

    Args:
        target: a function, or a program of `torch.export`; or a list or tuple of these.
        path: the file to write.
        inputs: tuples of arguments; the target is called with each, one after another. A generator is asked for the next one
            when the call before has returned. By default a program is called with its example inputs, a function with nothing.
        arch: a compute capability such as "9.0"; by default that of this GPU. For another one kernels are compiled and not
            run, so that the results of `target` mean nothing.

    Raises:
        NotImplementedError: a call takes operators of torch besides kernels. The message says which.
        ValueError: the targets call no operator of this library on a GPU, there are inputs for several targets, or `arch` names
            no architecture.
    """
    runs = _runs(target, inputs)
    wanted = None if arch is None else architectures.parse(arch, "arch")
    if not torch.cuda.is_available():
        raise RuntimeError("export_kernels runs its target on a GPU, and there is none that torch can use")
    own = architectures.physical(torch.device("cuda"))
    from dmattn_ops.launching.plan_file import PlanFile

    compiling: AbstractContextManager[Any] = nullcontext()
    if wanted is not None and wanted.sm != own.sm:
        from dmattn_ops.api.stand_in import compiled_launches

        compiling = compiled_launches(wanted.sm)
    with compiling:
        on = architectures.physical(torch.device("cuda"))
        made = PlanFile(__version__, on.sm, on.num_sms)
        with plans.exporting(made.add):
            for run in runs:
                run()
    if not made.families:
        raise ValueError("target made no call of an operator of dmattn_ops on a GPU")
    made.write(Path(path))


def _runs(target: Any, inputs: Iterable[tuple[Any, ...]] | None) -> Iterable[Callable[[], Any]]:
    """Return functions that make the calls, in their order."""
    targets = [_called(one) for one in (target if isinstance(target, (list, tuple)) else [target])]
    if inputs is None:
        return [partial(function, *given, **named) for function, given, named in targets]
    if len(targets) != 1:
        raise ValueError(f"inputs are those of one target, got {len(targets)} targets")
    return _with_inputs(targets[0][0], inputs)


def _with_inputs(function: Callable[..., Any], inputs: Iterable[tuple[Any, ...]]) -> Iterator[Callable[[], Any]]:
    """Yield functions that make the call with each of the inputs."""
    for place, given in enumerate(inputs):
        if not isinstance(given, tuple):
            raise TypeError(f"inputs must hold tuples of arguments, got {type(given).__name__} at place {place}")
        yield partial(function, *given)


def _called(target: Any) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return a target as a function, with the arguments and keywords that it is called with by default."""
    from torch.export import ExportedProgram

    if isinstance(target, ExportedProgram):
        module = target.module()

        def run(*given: Any, **named: Any) -> Any:
            with torch.no_grad():
                return module(*given, **named)

        return run, *(target.example_inputs or ((), {}))
    if not callable(target):
        raise TypeError(f"target must be a function or an ExportedProgram, got {type(target).__name__}")
    return target, (), {}
