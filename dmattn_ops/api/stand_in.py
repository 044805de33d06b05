"""A stand-in for the CUDA driver: launches compile for a named architecture and run nothing, on any machine."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from dmattn_ops.choice import arch
from dmattn_ops.launching import launch
from dmattn_ops.launching.recording import one_call


class Launch(NamedTuple):
    """One launch that was compiled and not run."""

    kernel: str  # name of the function
    compiled: Any
    log: str  # what ptxas said; empty where the kernel was compiled before


class Driver(DriverBase):
    """Answers what the JIT asks: one device for each architecture, so that their kernels are cached apart."""

    def __init__(self, sm: int) -> None:
        self.sm = sm

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.sm, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return self.sm

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self) -> None:
        return None


class _Compiled:
    """Stands for a compiled kernel that a launcher keeps: launching it again is recorded and runs nothing."""

    def __init__(self, record: Callable[[], None], compiled: Any) -> None:
        self.record, self.compiled = record, compiled

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **keywords: self.record()


@contextlib.contextmanager
def target_of(sm: int) -> Iterator[None]:
    """Let Triton take `sm` (90 for SM 9.0) for the GPU that is there: kernels ask for it while they are compiled."""
    had_driver = driver._active
    driver.set_active(Driver(sm))
    try:
        yield
    finally:
        driver._active = had_driver


@contextlib.contextmanager
def compiled_launches(sm: int) -> Iterator[list[Launch]]:
    """Make every Triton and Gluon launch compile for `sm` (90 for SM 9.0) and stop there; yield what was launched.

    Tensors may lie on the CPU: nothing reads them. `arch.physical` answers that architecture, whatever the device, and so does
    `arch.current` without DMATTN_ARCH.
    """
    hopper_forward: Any = import_module("dmattn_ops.kernels.hopper.forward.launch")
    launches: list[Launch] = []
    run, physical, current, raw_stream = JITFunction.run, arch.physical, arch.current, hopper_forward.raw_stream
    known = replace(arch.nearest(sm), sm=sm)

    def compile_only(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> _Compiled:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            compiled = run(self, *arguments, grid=grid, warmup=True, **keywords)
        made = Launch(self.__name__, compiled, said.getvalue())

        def record() -> None:
            launches.append(made)

        record()
        return _Compiled(record, compiled)

    launch._compiled.clear()  # of another architecture, or real ones
    JITFunction.run, arch.physical = compile_only, lambda device: known
    arch.current = lambda device: arch.forced() or known
    hopper_forward.raw_stream = lambda device: 1  # some stream beside the default one
    try:
        with target_of(sm), knobs.nvidia.scope(), one_call():
            knobs.nvidia.dump_ptxas_log = True
            yield launches
    finally:
        JITFunction.run, arch.physical, arch.current = run, physical, current
        hopper_forward.raw_stream = raw_stream
        launch._compiled.clear()  # cannot be launched
