"""Kernels for programs without Python: `export_kernels`."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from dmattn_ops.choice import arch as architectures
from dmattn_ops.launching import plans


def export_kernels(target: Any, path: str | os.PathLike[str], *, arch: str | None = None) -> None:
    """Write the GPU kernels of some calls to a file, from which `libdmattn.so` launches them without Python and Triton.

    Each call of an operator of this library that the target makes on a GPU, in a backward too, is written: the compiled
    kernels, and a plan of how they are launched. A plan serves calls with the same shapes, strides, dtypes and numbers, on GPUs
    of the same architecture with at least as many multiprocessors. A length that differs needs a call of its own.

    Args:
        target: a function without arguments, or a program of `torch.export`, which is run with its example inputs.
        path: the file to write.
        arch: a compute capability such as "9.0"; by default that of this GPU. For another one kernels are compiled and not
            run, so that the results of `target` mean nothing.

    Raises:
        NotImplementedError: a call takes operators of torch besides kernels. The message says which.
        ValueError: the target calls no operator of this library on a GPU, or `arch` names no architecture.
    """
    run = _runner(target)
    wanted = None if arch is None else architectures.parse(arch, "arch")
    if not torch.cuda.is_available():
        raise RuntimeError("export_kernels runs its target on a GPU, and there is none that torch can use")
    own = architectures.physical(torch.device("cuda"))
    from dmattn_ops.launching.plan_file import PlanFile

    compiling: AbstractContextManager[Any] = nullcontext()
    if wanted is not None and wanted.sm != own.sm:
        from dmattn_ops.api.stand_in import compiled_launches

        compiling = compiled_launches(wanted.sm)
    with compiling, plans.exporting() as exported:
        run()
        on = architectures.physical(torch.device("cuda"))
    made = PlanFile(on.sm, on.num_sms)
    for call in exported:
        made.add(call)
    if not exported:
        raise ValueError("target made no call of an operator of dmattn_ops on a GPU")
    made.write(Path(path))


def _runner(target: Any) -> Callable[[], Any]:
    """Return a function that makes the calls."""
    from torch.export import ExportedProgram

    if isinstance(target, ExportedProgram):
        given, named = target.example_inputs or ((), {})
        module = target.module()

        def run() -> Any:
            with torch.no_grad():
                return module(*given, **named)

        return run
    if not callable(target):
        raise TypeError(f"target must be a function or an ExportedProgram, got {type(target).__name__}")
    made: Callable[[], Any] = target
    return made
