"""The process that compiles kernels before they are launched: what `launching/ahead.py` starts.

It reads descriptions of calls from its standard input. For each it runs the operator as it would run on the GPU that is
described, on tensors without memory, and keeps what would be launched. Then it forks for each kernel, as many at a time as there
are cores, and a fork compiles one, through Triton as a launch does, into Triton's cache. The process initializes no GPU and starts
no threads, so that forks are safe. It tells on its standard output how far it is. It ends when its input is closed, as it is when
the process that started it ends, or after a minute without work.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from dmattn_ops.api.stand_in import Driver
from dmattn_ops.choice import arch
from dmattn_ops.dispatch import operators
from dmattn_ops.launching import launch
from dmattn_ops.launching.ahead import Described
from dmattn_ops.launching.recording import one_call

IDLE = 60.0  # seconds without work, after which it ends
_POLL = 0.02  # seconds between looks for forks that have ended
_GPU = torch.device("cuda", 0)
_PR_SET_PDEATHSIG = 1


class OnGPU(Tensor):
    """A tensor without memory that says that it lies on a GPU, at an address of its own that is a multiple of 16."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    device = property(lambda self: _GPU)  # type: ignore[assignment]

    def get_device(self) -> int:
        """Return the index of the GPU."""
        return 0

    def data_ptr(self) -> int:
        """Return the address: that of its storage is 0."""
        return int(self.storage_offset()) * self.element_size()


class WithoutMemory(TorchFunctionMode):
    """Let functions of torch compute with such tensors, and make them where a GPU is asked for."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        given = dict(named or {})
        if given.get("device") is not None and torch.device(given["device"]).type == "cuda":
            given["device"] = "meta"
        with torch._C.DisableTorchFunctionSubclass():
            arguments, given = tree_map_only(OnGPU, lambda each: each.as_subclass(Tensor), (arguments, given))
            made = function(*arguments, **given)
            return tree_map_only(Tensor, lambda each: each.as_subclass(OnGPU) if each.is_meta else each, made)


class Kernel(NamedTuple):
    """A kernel that would be launched."""

    name: str
    arguments: int  # how many it has: those with more take longer to compile
    compile: Callable[[], Any]
    cache: str  # the folder to compile it into


class _Later:
    """Stands for a kernel that is compiled later: launching it does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **keywords: None


def pretend(call: Described) -> None:
    """Let this process take the described GPU for its own, from now on."""
    here = call.arch
    arch.physical = lambda device: here
    arch.current = lambda device: arch.forced() or here
    arch.name = lambda device: call.gpu
    operators.launch_on = one_call()(lambda on, launch, *arguments: launch(*arguments))  # no device is the current one
    with contextlib.suppress(ImportError):  # another Triton may lack what its kernels need
        hopper_forward: Any = import_module("dmattn_ops.kernels.hopper.forward.launch")
        hopper_forward.raw_stream = lambda device: 1  # some stream beside the default one
    if not isinstance(driver._active, Driver) or driver._active.sm != here.sm:
        driver.set_active(Driver(here.sm))
        launch._compiled.clear()  # for another architecture


def kernels_of(call: Described) -> list[Kernel]:
    """Return the kernels that a call would launch and that no earlier one did."""
    pretend(call)
    found, run = [], JITFunction.run

    def later(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> _Later:
        build = functools.partial(run, self, *arguments, grid=grid, warmup=True, **named)
        found.append(Kernel(self.__name__, len(self.arg_names), build, call.cache))
        return _Later()

    JITFunction.run = later
    try:
        with WithoutMemory():
            tensors = [None if each is None else without_memory(*each) for each in call.tensors]
            operators.functions[call.name](*tensors, *call.numbers)
    finally:
        JITFunction.run = run
    return found


def without_memory(shape: tuple[int, ...], strides: tuple[int, ...], offset: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor without memory that lies as described."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    base = torch.empty(0 if 0 in shape else offset + last + 1, dtype=dtype, device=_GPU)
    return base.as_strided(shape, strides, 0 if 0 in shape else offset)


def compile_kernel(kernel: Kernel) -> None:
    """Compile a kernel into the cache, and what Triton launches it with."""
    os.environ["TRITON_CACHE_DIR"] = kernel.cache
    compiled = kernel.compile()
    with contextlib.suppress(Exception):  # it needs a C compiler and the driver's library, and later Tritons do without
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(compiled.src, compiled.metadata)


class Server:
    """Reads calls and compiles their kernels, in forks."""

    def __init__(self, input: int, output: int, at_a_time: int) -> None:
        self.input, self.output, self.at_a_time = input, output, at_a_time
        self.buffer = b""
        self.todo: list[Kernel] = []
        self.forks: dict[int, Kernel] = {}
        self.marks: list[Path] = []  # of the calls whose kernels are compiled
        self.failed = False  # once: what is in the cache is not known any more

    def serve(self) -> None:
        """Work until the input ends, or there was nothing to do for a while."""
        last = time.monotonic()
        while time.monotonic() - last < IDLE:
            if not self.read(_POLL if self.forks or self.todo else 1.0):
                break
            self.step()
            if self.forks:
                last = time.monotonic()
        if self.forks and os.getpgrp() == os.getpid():  # so it was started: forks and what they started end with it
            os.killpg(os.getpid(), signal.SIGKILL)

    def step(self) -> None:
        """Note which forks have ended, and let others take their places; mark the cache when all is done."""
        self.reap()
        while self.todo and len(self.forks) < self.at_a_time:
            self.fork(self.todo.pop(0))
        if not self.forks:
            self.mark()

    def read(self, patience: float) -> bool:
        """Take up the calls that have come; return False where no more will."""
        if not select.select([self.input], [], [], patience)[0]:
            return True
        read = os.read(self.input, 1 << 16)
        self.buffer += read
        while len(self.buffer) >= 8:
            end = 8 + int.from_bytes(self.buffer[:8], "little")
            if len(self.buffer) < end:
                break
            call, self.buffer = pickle.loads(self.buffer[8:end]), self.buffer[end:]
            self.take_up(call)
        return read != b""

    def take_up(self, call: Described) -> None:
        """Find out which kernels a call launches: those that take longest come first."""
        found: list[Kernel] = []
        try:
            found = kernels_of(call)
        except Exception:  # what it launches is compiled when it does
            self.failed = True
        for kernel in found:
            self.say(kernel=kernel.name, more=1)
        self.say(calls=1)
        self.marks.append(Path(call.cache, call.mark))
        self.todo = sorted([*self.todo, *found], key=lambda kernel: -kernel.arguments)

    def fork(self, kernel: Kernel) -> None:
        """Compile a kernel in a process of its own."""
        pid = os.fork()
        if pid:
            self.forks[pid] = kernel
            return
        status = 1
        try:
            with contextlib.suppress(OSError, AttributeError):  # it ends with this process, on Linux
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            compile_kernel(kernel)
            status = 0
        finally:
            os._exit(status)

    def reap(self) -> None:
        """Tell of the forks that have ended; other children of this process are left to those who started them."""
        for pid, kernel in list(self.forks.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.forks[pid]
                self.failed |= status != 0
                self.say(kernel=kernel.name, more=-1)

    def mark(self) -> None:
        """Mark the cache, now that it holds the kernels of all calls."""
        marks, self.marks = self.marks, []
        for mark in [] if self.failed else marks:
            with contextlib.suppress(OSError):
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()

    def say(self, **news: Any) -> None:
        """Tell the process that launches."""
        with contextlib.suppress(OSError):  # it has ended, which `read` finds out
            os.write(self.output, json.dumps(news).encode() + b"\n")


def main() -> None:
    """Serve the process that started this one; compilers may write to standard output, which then goes nowhere."""
    output = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    torch.set_num_threads(1)
    Server(0, output, int(sys.argv[1])).serve()
