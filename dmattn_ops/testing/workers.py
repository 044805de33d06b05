"""Run random problems in separate processes: a problem that crashes or hangs its process does not end the run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from dmattn_ops.testing.check import check, refused, shrink
from dmattn_ops.testing.problem import ALIKE, KERNELS, Problem, draw, instructions

SILENCE = 150.0  # a worker that prints nothing for this many seconds counts as hanging; compiling takes a tenth of that
ALONE = 120.0  # seconds that one problem may take in a process of its own
REPORTED = 100  # problems between two lines of progress
_BEGIN, _CANCELLED, _FAILED, _ALIVE = "begin ", "cancelled", "FAILED ", "shrinking"
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
        return False

    def _fails_alone(self, problem: Problem) -> bool:
        command = [sys.executable, "-c", _ALONE, repr(problem), self.device]
        try:
            done = subprocess.run(command, capture_output=True, timeout=ALONE, env=environment(problem.instructions))
            return done.returncode != 0
        except subprocess.TimeoutExpired:
            return True


def work(seeds: range, device: str, repeats: int) -> int:
    """Check the problems of `seeds`, naming each on a line before it begins; return 1 where CUDA became unusable."""
    for seed in seeds:
        print(f"{_BEGIN}{seed}", flush=True)
        problem = draw(seed, device)
        try:
            if check(problem, device, repeats):
                print(_CANCELLED, flush=True)
        except Exception as error:
            unusable = breaks_the_context(error)
            prober = Prober(device, unusable)

            def probe(candidate: Problem, prober: Prober = prober) -> bool:
                print(_ALIVE, flush=True)
                return prober(candidate)

            small = shrink(problem, probe)
            print(_failure(seed, f"{type(error).__name__}: {error}", small), flush=True)
            if unusable:
                return 1
    return 0


def _failure(seed: int, reason: str, problem: Problem) -> str:
    return f"{_FAILED}seed {seed}: {' '.join(reason.split())[:300]} | {problem!r}"


@dataclass
class _Tally:
    """What all workers have done, and the lock that keeps their lines apart."""

    cases: int
    begun: int = 0
    cancelled: int = 0
    failures: int = 0
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


def run(seeds: range, device: str, repeats: int, jobs: int) -> tuple[int, int]:
    """Check the problems of `seeds` in `jobs` processes and print those that fail.

    Return how many failed, and how many were over the budget only by the rounding errors of a sum whose terms cancel.

    Every process takes each `jobs`-th seed. On a GPU, `jobs` is lowered to a divisor of `KERNELS`: then no two processes
    compile the same kernels (see `draw`).
    """
    if device != "cpu":
        jobs = max(divisor for divisor in range(1, jobs + 1) if KERNELS % divisor == 0)
    tally = _Tally(len(seeds))
    shares = [seeds[first::jobs] for first in range(min(jobs, len(seeds)))]
    with ThreadPoolExecutor(max(1, len(shares))) as pool:
        list(pool.map(lambda share: _supervise(share, device, repeats, jobs, tally), shares))
    return tally.failures, tally.cancelled


def _supervise(seeds: range, device: str, repeats: int, jobs: int, tally: _Tally) -> None:
    """Run a worker over `seeds`, another one over the rest where it dies, and one for each of the instructions of a CPU."""
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    while len(seeds):
        begun, failed = 0, False
        part, wanted = _alike(seeds) if device == "cpu" else (seeds, "")
        variables = {**environment(wanted), "OMP_NUM_THREADS": threads}
        command = _command(part, device, repeats)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as worker:
            for line in _lines(worker):
                if line.startswith(_BEGIN):
                    begun, failed = begun + 1, False
                    tally.begin()
                elif line.startswith(_CANCELLED):
                    tally.cancel()
                elif line.startswith(_FAILED):
                    failed = True
                    tally.fail(line.rstrip())
        if worker.returncode == 0:
            seeds = seeds[len(part) :]
            continue
        seed = seeds[max(begun - 1, 0)]
        if not failed:
            problem = draw(seed, device)
            small = shrink(problem, Prober(device, unusable=True))
            tally.fail(_failure(seed, f"its process ended with {worker.returncode}", small))
        seeds = seeds[max(begun, 1) :]


def _alike(seeds: range) -> tuple[range, str]:
    """Return the first of `seeds`, as many as ask for the same instructions, and these."""
    wanted = instructions(seeds[0])
    end = (seeds[0] // ALIKE + 1) * ALIKE
    return range(seeds.start, min(end, seeds.stop), seeds.step), wanted


def _command(seeds: range, device: str, repeats: int) -> list[str]:
    share = [str(bound) for bound in (seeds.start, seeds.stop, seeds.step)]
    options = ["--device", device, "--repeats", str(repeats), "--worker", *share]
    return [sys.executable, "-m", "dmattn_ops.testing", *options]


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
