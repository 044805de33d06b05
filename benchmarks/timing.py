"""Time functions against each other in one process, and write what came out to a file.

A GPU that has been busy is slower than one that has rested, because its clock follows power and heat. So the functions take
turns: in each round every function runs for a short time after 0.1 s of rest, and medians over the rounds are compared.
Kernels are timed as `triton.testing.do_bench` does it: each call by itself, after the L2 cache was overwritten. The GPU
first waits, so that the host can launch ahead; otherwise short kernels would be timed by how fast Python launches them.
"""

from __future__ import annotations

import functools
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterable
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

import dmattn_ops

IDLE_SECONDS = 0.1
ROUND_SECONDS = {"cuda": 0.02, "cpu": 0.1}  # repeats fill this time in each round
AHEAD_CYCLES = 600_000  # cycles that the GPU waits for each call that the host launches ahead: 0.3 ms
FLUSH_BYTES = 256 << 20  # several times the L2 cache of any GPU
PACKAGES = ("torch", "triton", "transformers", "flash-attn-4", "numpy")

Key = TypeVar("Key", bound=Hashable)


class Sample(NamedTuple):
    """Milliseconds of one function over the rounds."""

    median: float
    low: float
    high: float


class Gauge:
    """Clock and power of the GPU while it works, where nvidia-ml-py is installed."""

    def __init__(self) -> None:
        self.megahertz: list[float] = []
        self.watts: list[float] = []
        self.handle = None
        if torch.cuda.is_available():
            try:
                import pynvml
            except ImportError:
                return
            pynvml.nvmlInit()
            self.nvml = pynvml
            uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
            self.handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def read(self) -> None:
        """Note the present clock and power."""
        if self.handle is not None:
            self.megahertz.append(self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM))
            self.watts.append(self.nvml.nvmlDeviceGetPowerUsage(self.handle) / 1000)

    def facts(self) -> dict[str, list[float]]:
        """Return the range of what was read."""
        pairs: dict[str, list[float]] = {"sm_mhz": self.megahertz, "power_w": self.watts}
        return {name: [min(values), max(values)] for name, values in pairs.items() if values}


def elapsed_ms(function: Callable[[], object], repeats: int, device: str, gauge: Gauge | None = None) -> float:
    """Return the milliseconds of one call, the mean over `repeats` calls in a row: of the host or the GPU, whichever is slower."""
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            function()
        end.record()
        if gauge is not None:
            gauge.read()  # while the device still works
        torch.cuda.synchronize()
        return start.elapsed_time(end) / repeats
    began = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - began) * 1000 / repeats


def least_ms(function: Callable[[], object], repeats: int, device: str, gauge: Gauge | None = None) -> float:
    """Return the milliseconds of the fastest of `repeats` calls: what else runs on a busy machine only adds time."""
    return min(elapsed_ms(function, 1, device, gauge) for _ in range(repeats))


def one_thread_ms(function: Callable[[], object], repeats: int, device: str, gauge: Gauge | None = None) -> float:
    """Return the milliseconds of CPU time that the cheapest of `repeats` calls takes on one thread, however busy the machine is."""
    threads, times = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for _ in range(repeats):
            began = time.process_time()
            function()
            times.append((time.process_time() - began) * 1000)
    finally:
        torch.set_num_threads(threads)
    return min(times)


@functools.cache
def _flush_buffer() -> torch.Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")


def kernels_ms(function: Callable[[], object], repeats: int, device: str, gauge: Gauge | None = None) -> float:
    """Return the milliseconds of one call, the median over `repeats` calls, each with a cold L2 cache on a GPU."""
    if device != "cuda":
        return elapsed_ms(function, repeats, device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    buffer = _flush_buffer()
    torch.cuda._sleep(repeats * AHEAD_CYCLES)
    for start, end in events:
        buffer.zero_()
        start.record()
        function()
        end.record()
    if gauge is not None:
        gauge.read()  # while the device still works
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def interleaved(
    functions: dict[Key, Callable[[], object]],
    device: str,
    *,
    rounds: int = 5,
    gauge: Gauge | None = None,
    timer: Callable[..., float] = elapsed_ms,
) -> dict[Key, Sample]:
    """Time each function in each round, in turns; `timer` is `elapsed_ms` or `kernels_ms`."""
    repeats = {}
    for key, function in functions.items():
        elapsed_ms(function, 2, device)  # compiles, and fills caches
        repeats[key] = max(1, min(100, int(ROUND_SECONDS[device] * 1000 / elapsed_ms(function, 1, device))))
    times: dict[Key, list[float]] = {key: [] for key in functions}
    for _ in range(rounds):
        for key, function in functions.items():
            if device == "cuda":
                torch.cuda.synchronize()
                time.sleep(IDLE_SECONDS)
            times[key].append(timer(function, repeats[key], device, gauge))
    return {key: Sample(statistics.median(values), min(values), max(values)) for key, values in times.items()}


def replayed(function: Callable[[], Any]) -> Callable[[], Any]:
    """Return the replay of a CUDA graph: calls of the library repeat their launches, and the host is not what is timed."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def processor(device: str) -> str:
    """Return the name of the GPU, or of the CPU with the number of threads that torch uses."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    return f"{name}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Return the versions of what takes part."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__  # metadata leaves out what the build adds
    found["dmattn-ops"] = dmattn_ops.__version__  # of the source that ran, whatever was installed
    if torch.cuda.is_available():
        found["cuda"] = torch.version.cuda or ""
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def result_facts(device: str) -> dict[str, Any]:
    """Return where, when and how results are measured."""
    return {
        "gpu": processor(device),
        "date": date.today().isoformat(),
        "versions": versions(),
        "command": shlex.join(["python", *sys.argv]),
        "mode": "interleaved",
    }


def write_results(path: Path, rows: Iterable[dict], device: str, gauge: Gauge, *, say: bool = True) -> None:
    """Write one result file, and say so: where, when and how it was measured, a row for each case and implementation."""
    results = {**result_facts(device), **gauge.facts(), "rows": list(rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    if say:
        print(f"written: {path}")
