"""Run random problems in separate processes: a problem that crashes or hangs its process does not end the run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from dmattn_ops.testing.check import check, refused, shrink
from dmattn_ops.testing.combinations import COMBINATIONS, OF_A_BLOCK, combination
from dmattn_ops.testing.compiling import Compiling
from dmattn_ops.testing.problem import ALIKE, Problem, draw, instructions

SILENCE = 150.0  # a worker that prints nothing for this many seconds counts as hanging; compiling takes a tenth of that
ALONE = 120.0  # seconds that one problem may take in a process of its own
LARGE = 32 << 30  # bytes of a GPU that a problem takes whose keys and values lie far apart
REPORTED = 100  # problems between two lines of progress
_BEGIN, _CANCELLED, _FAILED, _ALIVE, _DONE = "begin ", "cancelled", "FAILED ", "shrinking", "done "
CAPABILITY = "ATEN_CPU_CAPABILITY"
_ALONE = """
import sys
from dmattn_ops.testing import Problem
from dmattn_ops.testing.workers import Prober
sys.exit(1 if Prober(sys.argv[2])(eval(sys.argv[1])) else 0)
"""


def environment(wanted: str) -> dict[str, str]:
    """Return the environment of a process whose C++ kernels use the `wanted` instructions, as far as the processor has them."""
    best = torch.backends.cpu.get_cpu_capability()
    if wanted == "default" or (wanted == "avx2" and best == "AVX512"):
        return {**os.environ, CAPABILITY: wanted}
    return dict(os.environ)


def give_memory_back(problem: Problem, device: str) -> None:
    """Give back what torch keeps of the memory of a problem, where that is gigabytes, which other processes need."""
    if problem.rows == "far" and device != "cpu":
        with contextlib.suppress(RuntimeError):  # CUDA is unusable
            torch.cuda.empty_cache()


def breaks_the_context(error: Exception) -> bool:
    """Return whether an error leaves CUDA unusable in its process, so that everything after it fails too."""
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)


class Prober:
    """Tells whether a problem fails, where being refused is no failure. Once CUDA is unusable in this process, it uses new ones."""

    def __init__(self, device: str, unusable: bool = False) -> None:
        self.device, self.unusable = device, unusable

    def __call__(self, problem: Problem) -> bool:
        if self.unusable or environment(problem.instructions) != dict(os.environ):
            return self._fails_alone(problem)
        try:
            check(problem, self.device)
        except Exception as error:
            self.unusable = breaks_the_context(error)
            return not refused(error)
        finally:
            give_memory_back(problem, self.device)
        return False

    def _fails_alone(self, problem: Problem) -> bool:
        command = [sys.executable, "-c", _ALONE, repr(problem), self.device]
        try:
            done = subprocess.run(command, capture_output=True, timeout=ALONE, env=environment(problem.instructions))
            return done.returncode != 0
        except subprocess.TimeoutExpired:
            return True


def work(parts: Iterable[str], device: str, repeats: int) -> int:
    """Check the problems of each part, a line "start stop step" of seeds; return 1 where CUDA became unusable.

    Each problem is named on a line before it begins. A last line says of a part what was compiled and how large errors were.
    """
    compiling = Compiling()
    if device != "cpu":
        compiling.listen()
    for part in parts:
        worst: dict[str, tuple[float, int]] = {}
        for seed in range(*map(int, part.split())):
            print(f"{_BEGIN}{seed}", flush=True)
            margins: dict[str, float] = {}
            if not _passes(seed, device, repeats, margins):
                return 1
            for name, margin in margins.items():
                worst[name] = max(worst.get(name, (0.0, seed)), (margin, seed))
        print(_DONE + json.dumps([compiling.taken(), worst]), flush=True)
    return 0


def _passes(seed: int, device: str, repeats: int, margins: dict[str, float]) -> bool:
    """Check the problem of a seed and print what was wrong; return False where CUDA became unusable."""
    problem = draw(seed, device)
    try:
        if check(problem, device, repeats, margins=margins):
            print(_CANCELLED, flush=True)
    except Exception as error:
        unusable = breaks_the_context(error)
        traceback.clear_frames(error.__traceback__)  # they hold the problem's tensors
        prober = Prober(device, unusable)

        def probe(candidate: Problem) -> bool:
            print(_ALIVE, flush=True)
            return prober(candidate)

        small = shrink(problem, probe)
        print(_failure(seed, f"{type(error).__name__}: {error}", small), flush=True)
        return not unusable
    finally:
        give_memory_back(problem, device)
    return True


def _failure(seed: int, reason: str, problem: Problem) -> str:
    return f"{_FAILED}seed {seed}: {' '.join(reason.split())[:300]} | {problem!r}"


class Part(NamedTuple):
    """Seeds that one process checks in a row."""

    seeds: range
    instructions: str = ""  # of a CPU
    large: bool = False  # its problems take `LARGE` bytes of a GPU


class Parts:
    """Parts that are left to be done, for several threads, which do no more large ones at the same time than are allowed."""

    def __init__(self, parts: Iterable[Part], large: int = 1) -> None:
        self.left = list(parts)
        self.large = large  # that may begin
        self.changed = threading.Condition()

    def next(self, done: Part | None = None) -> Part | None:
        """Return a part to do after `done`; wait where all that are left are large and no more of them may begin."""
        with self.changed:
            if done is not None and done.large:
                self.large += 1
                self.changed.notify_all()
            while self.left:
                part = next((each for each in self.left if self.large or not each.large), None)
                if part is not None:
                    self.left.remove(part)
                    self.large -= part.large
                    return part
                self.changed.wait()
        return None


@dataclass
class Tally:
    """What all workers have done, and the lock that keeps their lines apart."""

    cases: int
    begun: int = 0
    bad_ends: int = 0  # processes that ended badly when all their problems were done
    cancelled: int = 0  # over the budget only by the rounding errors of a sum whose terms cancel
    failures: int = 0
    kernels: dict[str, float] = field(default_factory=dict)  # seconds that each compiled kernel took
    worst: dict[str, tuple[float, int]] = field(default_factory=dict)  # error over budget by result, and the seed
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        with self.lock:
            self.begun += 1
            if self.begun % REPORTED == 0:
                print(f"{self.begun} of {self.cases}, {self.failures} failed", flush=True)

    def cancel(self) -> None:
        with self.lock:
            self.cancelled += 1

    def fail(self, line: str) -> None:
        with self.lock:
            self.failures += 1
            print(line, flush=True)

    def end(self, status: int) -> None:
        """Note how a process ended that had nothing left to do."""
        if status != 0:
            with self.lock:
                self.bad_ends += 1
                print(f"a process ended with {status} after its last problem", flush=True)

    def finish(self, kernels: dict[str, float], worst: dict[str, list]) -> None:
        """Add what a worker says at the end of a part. Two processes may have compiled the same kernel."""
        with self.lock:
            for name, seconds in kernels.items():
                self.kernels[name] = self.kernels.get(name, 0.0) + seconds
            for name, (margin, seed) in worst.items():
                self.worst[name] = max(self.worst.get(name, (0.0, seed)), (margin, seed))

    def lines(self) -> Iterator[str]:
        """Yield what to print at the end."""
        if self.kernels:
            compiled = sum(seconds > 0 for seconds in self.kernels.values())
            yield f"{len(self.kernels)} kernels, {compiled} of them compiled in {sum(self.kernels.values()):.0f} s of all processes"
        if self.worst:
            named = (f"{name} {margin:.2f} (seed {seed})" for name, (margin, seed) in self.worst.items())
            yield f"largest error over its budget: {', '.join(named)}"
        by_rounding = (
            f", {self.cancelled} of them with what rounding leaves of a sum that cancels" if self.cancelled else ""
        )
        bad_ends = f", {self.bad_ends} processes ended badly" if self.bad_ends else ""
        yield f"{self.cases - self.failures} passed{by_rounding}, {self.failures} failed{bad_ends}"


def run(seeds: range, device: str, repeats: int, jobs: int) -> Tally:
    """Check the problems of `seeds` in `jobs` processes and print those that fail."""
    tally = Tally(len(seeds))
    parts = parts_for_cpu(seeds, jobs) if device == "cpu" else parts_for_gpu(seeds)
    memory = 0 if device == "cpu" else torch.cuda.get_device_properties(device).total_memory
    left, count = Parts(parts, max(1, memory // LARGE)), max(1, min(jobs, len(parts)))
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda _: _supervise(left, device, repeats, jobs, tally), range(count)))
    return tally


def parts_for_gpu(seeds: range) -> list[Part]:
    """Divide seeds by what is compiled for them, so that no two processes compile the same; what takes long comes first."""
    parts = []
    for block in range(seeds.start // OF_A_BLOCK, -(-seeds.stop // OF_A_BLOCK)):
        first, end = block * OF_A_BLOCK, (block + 1) * OF_A_BLOCK
        low = max(first, seeds.start)
        for start in range(low, min(low + COMBINATIONS, end, seeds.stop)):
            alike = range(start, min(end, seeds.stop), COMBINATIONS)
            parts.append(Part(alike, large=combination(start).far))
    return sorted(parts, key=lambda part: -combination(part.seeds[0]).cost)


def parts_for_cpu(seeds: range, jobs: int) -> list[Part]:
    """Divide seeds by the instructions that they ask for, and these among processes."""
    parts: list[Part] = []
    for begin in range(seeds.start // ALIKE * ALIKE, seeds.stop, ALIKE):
        alike = range(max(begin, seeds.start), min(begin + ALIKE, seeds.stop))
        wanted = instructions(begin)
        if parts and parts[-1].instructions == wanted and jobs == 1:
            alike = range(parts.pop().seeds.start, alike.stop)
        parts += [Part(alike[first::jobs], wanted) for first in range(min(jobs, len(alike)))]
    return parts


def _supervise(parts: Parts, device: str, repeats: int, jobs: int, tally: Tally) -> None:
    """Run a worker over parts until none are left; another one where it dies, or where other instructions are asked for."""
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    part = parts.next()
    while part is not None:
        wanted, died = part.instructions, False
        variables = {**environment(wanted), "OMP_NUM_THREADS": threads, "PYTHONFAULTHANDLER": "1"}
        command = _command(device, repeats)
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        ) as worker:
            while part is not None and part.instructions == wanted and not died:
                rest = _follow(worker, part.seeds, device, tally)
                died = rest is not None
                part = part._replace(seeds=rest) if rest else parts.next(part)
        if not died:
            tally.end(worker.returncode)


def _follow(worker: subprocess.Popen[str], seeds: range, device: str, tally: Tally) -> range | None:
    """Let a worker check the problems of a part; return what is left of it where the worker dies, None where it did all."""
    begun, failed = 0, False
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died at once
        print(seeds.start, seeds.stop, seeds.step, file=worker.stdin, flush=True)
    for line in _lines(worker):
        if line.startswith(_BEGIN):
            begun, failed = begun + 1, False
            tally.begin()
        elif line.startswith(_CANCELLED):
            tally.cancel()
        elif line.startswith(_FAILED):
            failed = True
            tally.fail(line.rstrip())
        elif line.startswith(_DONE):
            tally.finish(*json.loads(line.removeprefix(_DONE)))
            return None
    seed, status = seeds[max(begun - 1, 0)], worker.wait()
    if not failed:
        small = shrink(draw(seed, device), Prober(device, unusable=True))
        tally.fail(_failure(seed, f"its process ended with {status}", small))
    return seeds[max(begun, 1) :]


def _command(device: str, repeats: int) -> list[str]:
    return [sys.executable, "-m", "dmattn_ops.testing", "--device", device, "--repeats", str(repeats), "--worker"]


def _lines(worker: subprocess.Popen[str]) -> Iterator[str]:
    """Yield what a worker prints, and kill it when it is silent for too long."""
    assert worker.stdout is not None
    watchdog = _watch(worker.kill)
    for line in worker.stdout:
        watchdog.cancel()
        yield line
        watchdog = _watch(worker.kill)
    watchdog.cancel()


def _watch(alarm: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(SILENCE, alarm)
    timer.daemon = True
    timer.start()
    return timer
