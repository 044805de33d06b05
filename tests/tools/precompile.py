"""Compile the kernels of GPU tests and of random problems on a machine without a GPU, so that a GPU finds them in Triton's cache.

    export TRITON_CACHE_DIR=/tmp/kernels    # the same path on both machines: files of the cache name each other by it
    python -O -m pytest -p tests.tools.precompile --assert=plain -m gpu tests/gpu
    python -m tests.tools.precompile --problems 700000 700500 --jobs 2

Pack the folder and take it to the GPU: with the same Triton, the same minor version of Python and the same folder of the checkout
its kernels are found by their keys, with `TRITON_OVERRIDE_ARCH` and `DMATTN_ARCH` as they were here. Compiling is most of what the
GPU tests take where nothing is in the cache.

Tensors lie on the CPU and answer that they lie on an H200. Launches compile and run nothing (`api/stand_in.py`), so that outputs
hold zeros; `-O` leaves assertions about them out. A test that cannot go on that way ends early and counts as passed: the GPU
compiles what it would have launched behind that. What `torch.compile` makes is not compiled here.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from dmattn_ops.api.stand_in import compiled_launches
from dmattn_ops.choice import arch
from dmattn_ops.launching import plan, plans
from dmattn_ops.testing import Problem, draw
from dmattn_ops.testing.compiling import Compiling

GPU = torch.device("cuda", 0)
LIMIT = 90.0  # seconds that a test or a problem may take
_MAKE = (
    "full", "rand", "randn", "randint", "randperm", "arange", "tensor", "as_tensor", "eye", "linspace", "zeros", "ones",
    "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "scalar_tensor",
    "tril_indices", "triu_indices",
)  # fmt: skip
_LEAVE_UNWRITTEN = "empty", "empty_like", "empty_strided", "empty_permuted"
_OF_A_TENSOR = "new_zeros", "new_ones", "new_full", "new_tensor"
_UNWRITTEN_OF_A_TENSOR = "new_empty", "new_empty_strided"
_H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=140 << 30, L2_cache_size=60 << 20,
    shared_memory_per_block_optin=arch.KNOWN[90].shared_memory, max_threads_per_multi_processor=2048,
    shared_memory_per_multiprocessor=arch.KNOWN[90].shared_memory_per_sm,
)  # fmt: skip
_ANSWERS = {
    "is_available": True, "device_count": 1, "current_device": 0, "get_device_name": _H200.name, "is_initialized": True,
    "get_device_properties": _H200, "get_device_capability": (9, 0), "is_current_stream_capturing": False,
    "memory_reserved": 0, "memory_allocated": 0, "max_memory_allocated": 0, "mem_get_info": (140 << 30, 140 << 30),
    "get_sync_debug_mode": 0, "is_bf16_supported": True,
}  # fmt: skip
_DO_NOTHING = (
    "synchronize", "empty_cache", "reset_peak_memory_stats", "init", "set_device", "manual_seed", "manual_seed_all",
    "_sleep", "set_sync_debug_mode", "_lazy_init",
)  # fmt: skip


class TooSlow(BaseException):
    """Ends a test or a problem that takes longer than `LIMIT`; no `except Exception` of a test catches it."""


class _Nothing:
    """A stream, an event, a graph: does nothing, and is a context in which nothing changes."""

    cuda_stream = 0

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., float]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **keywords: 1.0


def _on_cpu(device: Any) -> Any:
    """Return the device on which a tensor lies that is asked for on `device`."""
    if isinstance(device, int) or str(device).startswith("cuda"):
        return torch.device("cpu")
    return device


def _making_on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*arguments: Any, **keywords: Any) -> Any:
        if keywords.get("device") is not None:
            keywords["device"] = _on_cpu(keywords["device"])
        keywords.pop("pin_memory", None)
        return make(*arguments, **keywords)

    return made


def _zeros(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes zeros where `make` leaves memory as it is: kernels would have written numbers of tiles there."""
    on_cpu = _making_on_cpu(make)

    @functools.wraps(make)
    def made(*arguments: Any, **keywords: Any) -> Any:
        tensor = on_cpu(*arguments, **keywords)
        with torch.no_grad():
            return tensor.zero_()

    return made


def _moving(move: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Tensor.to` for tensors that stay where they are."""

    def moved(tensor: Any, *arguments: Any, **keywords: Any) -> Any:
        if arguments and isinstance(arguments[0], (str, torch.device)):
            arguments = (_on_cpu(arguments[0]), *arguments[1:])
        if keywords.get("device") is not None:
            keywords["device"] = _on_cpu(keywords["device"])
        return move(tensor, *arguments, **keywords)

    return moved


def _answering(answer: Any) -> Callable[..., Any]:
    return lambda *arguments, **keywords: answer


def _patch_tensors() -> None:
    functions: Any = torch
    tensor, generator = functions.Tensor, functions.Generator
    for place, names, wrap in (
        (functions, _MAKE, _making_on_cpu), (tensor, _OF_A_TENSOR, _making_on_cpu),
        (functions, _LEAVE_UNWRITTEN, _zeros), (tensor, _UNWRITTEN_OF_A_TENSOR, _zeros),
    ):  # fmt: skip
        for name in names:
            setattr(place, name, wrap(getattr(place, name)))
    tensor.to, tensor.cuda, tensor.get_device = _moving(tensor.to), lambda self, *_, **__: self, _answering(0)
    tensor.is_cuda, tensor.device = property(_answering(True)), property(_answering(GPU))
    functions.Generator = lambda device="cpu": generator(_on_cpu(device))


def _patch_cuda() -> None:
    cuda: Any = torch.cuda
    for name, answer in {**_ANSWERS, **dict.fromkeys(_DO_NOTHING)}.items():
        setattr(cuda, name, _answering(answer))
    for name in ("Stream", "Event", "CUDAGraph", "device", "stream", "graph", "current_stream", "default_stream"):
        setattr(cuda, name, _Nothing)
    cuda.default_generators = (torch.default_generator,)


@contextlib.contextmanager
def pretended_gpu() -> Iterator[Compiling]:
    """Let torch answer as with one H200, and launches compile; yield what is compiled. What is changed of torch stays so."""
    from triton.runtime import driver

    with compiled_launches(90):
        made_for: Any = driver.active
        made_for.get_current_device, made_for.get_active_torch_device = _answering(0), _answering(GPU)
        changed: Any = plan
        changed._current_device, changed.raw_stream = _answering(0), _answering(0)
        changed.allocate = lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)
        repeats: Any = plans
        repeats.may_repeat, repeats.enter_thread = _answering(False), _answering(None)
        _patch_tensors()
        _patch_cuda()
        yield Compiling().listen()


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raise `TooSlow` where what is below takes longer than `LIMIT`."""

    def stop(*_: Any) -> None:
        raise TooSlow

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def launch_problem(problem: Problem, device: str = "cuda", *_: Any, **__: Any) -> bool:
    """Launch what a random problem launches, in the place of `testing.check`; gigabytes are not allocated for it."""
    if problem.rows == "far":
        return False
    check: Any = importlib.import_module("dmattn_ops.testing.check")
    problem = replace(problem, compiled=False, place="")
    packed = problem.variant == "varlen"
    inputs = (check.make_varlen_inputs if packed else check.make_inputs)(problem, device)
    (check._varlen_results if packed else check._dense_results)(problem, inputs)
    return False


class Plugin:
    """Runs each test as far as it goes, and lets it pass."""

    def __init__(self) -> None:
        self.undo = contextlib.ExitStack()
        self.compiling = self.undo.enter_context(pretended_gpu())
        self.early = 0
        for name in ("dmattn_ops.testing", "dmattn_ops.testing.check", "dmattn_ops.testing.workers"):
            module: Any = importlib.import_module(name)
            module.check = launch_problem
        compares: Any = torch.testing
        compares.assert_close = _answering(None)
        torch.set_num_threads(1)

    def pytest_runtest_call(self, item: Any) -> None:
        """Run a test here, and give pytest one that does nothing."""
        try:
            with _limited():
                item.runtest()
        except (Exception, TooSlow):
            self.early += 1
        item.runtest = _answering(None)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what was compiled."""
        terminalreporter.write_line(f"{_counted(self.compiling)}; tests that ended early: {self.early}")


def _counted(compiling: Compiling) -> str:
    made = compiling.made.values()
    return f"{len(made)} kernels, {sum(map(bool, made))} of them compiled, in {compiling.seconds:.0f} s"


def pytest_configure(config: Any) -> None:
    """Take the place of a GPU in this process, or in each worker of pytest-xdist."""
    plugin = Plugin()
    config.pluginmanager.register(plugin, "kernels compiled without a GPU")
    config.add_cleanup(plugin.undo.close)


def compile_problems(seeds: range) -> None:
    """Compile the kernels of the problems of seeds."""
    torch.set_num_threads(1)
    early, begun = 0, time.time()
    with pretended_gpu() as compiling:
        for seed in seeds:
            try:
                with _limited():
                    launch_problem(draw(seed, "cuda"))
            except (Exception, TooSlow):
                early += 1
    print(f"seeds {seeds}: {_counted(compiling)} of {time.time() - begun:.0f}; that ended early: {early}", flush=True)


def main() -> int:
    """Divide the problems among processes; return how many of these failed."""
    parser = argparse.ArgumentParser(description="compile the kernels of random problems without a GPU")
    parser.add_argument("--problems", type=int, nargs=2, required=True, metavar=("FIRST", "STOP"), help="their seeds")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)  # which of the processes this is
    options = parser.parse_args()
    first, stop = options.problems
    if options.share is not None:
        compile_problems(range(first + options.share, stop, options.jobs))
        return 0
    command = [sys.executable, "-O", "-m", "tests.tools.precompile", "--problems", str(first), str(stop)]
    shares = [
        subprocess.Popen([*command, "--jobs", str(options.jobs), "--share", str(each)]) for each in range(options.jobs)
    ]
    return sum(share.wait() != 0 for share in shares)


if __name__ == "__main__":
    sys.exit(main())
