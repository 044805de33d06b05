"""Make calls of all kinds for a while: valid and refused ones, compiled, captured, in several threads and streams.

`python -m tests.tools.soak --seconds 480 --output soak.json` continues with the seeds after those of earlier runs in the
file. Every valid call is a random problem and is checked like one; shapes change from call to call.

On a GPU, problems take the combinations that cover all pairs (`combinations.py`), and begin with few of them: `--jobs` other
processes compile the kernels of one after the other into Triton's cache on disk. A combination is added once one of them is done
with it, and while this process has compiled for less than `COMPILES` of its time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dmattn_ops
from dmattn_ops.testing import Problem, check, draw
from dmattn_ops.testing.combinations import COMBINATIONS, combinations
from dmattn_ops.testing.compiling import Compiling
from dmattn_ops.testing.workers import give_memory_back

TOGETHER = 4  # threads, each with a stream of its own
COMPILES = 0.25
AHEAD = 6  # problems of a combination for which kernels are compiled ahead: sizes decide about a few more of them
TRACEBACKS = 5
SILENCE = 300.0  # seconds after which a call counts as hanging
REFUSALS = (ValueError, TypeError, RuntimeError, NotImplementedError)
Results = dict[str, Tensor]


def refused_calls(device: str) -> list[Callable[[], Any]]:
    """Return calls that must raise."""
    query, key = (torch.randn(1, seqlen, heads, 16, device=device) for seqlen, heads in ((60, 4), (70, 2)))
    library: Any = dmattn_ops
    call, prepare, packed = library.flash_dmattn_func, library.prepare_mask, library.flash_dmattn_varlen_func

    def offsets(*ends: int) -> Tensor:
        return torch.tensor(ends, dtype=torch.int32, device=device)

    one_less = torch.ones(1, 1, 60, 69, device=device)
    return [
        lambda: call(query, key[..., :8], key), lambda: call(query, key, key[:, :3]), lambda: call(query.double(), key, key),
        lambda: call(query, key, key, one_less), lambda: call(query, key, key, bias=one_less),
        lambda: call(query, key, key, dropout_p=1.5), lambda: call(query, key, key, softcap=float("nan")),
        lambda: call(query, key, key, window_size=(-1, 0)), lambda: call(query, key, key, is_causal=1),
        lambda: call(None, key, key), lambda: call(query.int(), key.int(), key.int()),
        lambda: call(query, key, key, prepare(one_less)), lambda: prepare(torch.ones(3, 3, device=device)),
        lambda: prepare(documents=torch.rand(1, 3, device=device)), lambda: call(query[..., :0], key, key),
        lambda: packed(query[0], key[0], key[0], offsets(0, 60), offsets(0, 30, 70), 60, 70),
        lambda: library.flash_dmattn_qkvpacked_func(torch.randn(1, 10, 2, 4, 16, device=device)),
        lambda: torch.ops.dmattn.forward(query, key, key, None, offsets(1)),
    ]  # fmt: skip


def captured(results: Callable[[], Results]) -> Results:
    """Capture the call and its gradients in a CUDA graph, and return the results of a replay.

    What waits for the GPU is found before the capture, where torch raises at the line that waits and nothing is left behind.
    """
    results()  # compiles
    torch.cuda.synchronize()
    _without_waiting(results)
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            found = results()
    except BaseException:
        _leave_capture(stream)
        raise
    for tensor in found.values():
        tensor.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return found


def _without_waiting(results: Callable[[], Results]) -> None:
    """Make the call and its gradients once; raise where torch waits for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results()
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _leave_capture(stream: torch.cuda.Stream) -> None:
    """Undo what a failed capture leaves: its stream as the current one, and a generator that believes it is still captured.

    `torch.cuda.graph` raises at the end of such a capture before it restores either; calls with dropout would then fail.
    """
    torch.cuda.set_stream(stream)
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(torch.Generator(generator.device).graphsafe_get_state())


def first_of(error: BaseException) -> BaseException:
    """Return the error that an error followed from: of a failed capture, what broke it, and not that it is broken."""
    while True:
        earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if earlier is None:
            return error
        error = earlier


def _told(error: BaseException) -> str:
    """Return an error in one line: its type, its message, and the line of the program that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{at}: {' '.join(str(error).split())[:300]}"


class Ahead:
    """Processes that compile the kernels of combinations, and which of these are done."""

    def __init__(self, device: str, jobs: int) -> None:
        self.done: list[int] = []
        command = [sys.executable, "-m", "tests.tools.soak", "--device", device, "--ahead"]
        self.processes = [
            subprocess.Popen([*command, str(first), str(jobs)], stdout=subprocess.PIPE, text=True)
            for first in range(jobs)
        ]
        for process in self.processes:
            threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.done.append(int(line))

    def end(self) -> None:
        """End the processes, whatever they do."""
        for process in self.processes:
            process.kill()
            process.wait()


def compile_ahead(device: str, first: int, step: int) -> None:
    """Run problems of each `step`-th combination, and print its number. What fails here fails again where it is checked."""
    for index in range(first, COMBINATIONS, step):
        for seed in range(AHEAD * index, AHEAD * (index + 1)):
            with contextlib.suppress(Exception):
                check(draw(seed, device, combinations(0)[index]), device)
            if device != "cpu":
                torch.cuda.empty_cache()  # gigabytes, which the calls that are checked need
        print(index, flush=True)


class Soak:
    """Calls one after the other, each drawn from the next seed.

    Compiled and captured ones are without dropout, whose seeds a graph draws as it likes. On a GPU, problems take the
    combinations that are `ready`, as far as compiling leaves time.
    """

    def __init__(self, device: str, seed: int, ready: list[int] | None = None) -> None:
        self.device, self.seed = device, seed
        self.ready = list(range(COMBINATIONS)) if ready is None else ready
        self.in_use = 1
        self.compiling, self.start = Compiling(), time.time()
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.tracebacks: list[str] = []  # of the first wrong calls, which may be the cause of later ones
        self.begun = time.time()  # of the last call
        self.refused = refused_calls(device)
        self.lock = threading.Lock()

    def next_problem(self) -> Problem:
        """Draw a problem."""
        self.seed += 1
        if self.device == "cpu":
            return replace(draw(self.seed, self.device), instructions="")
        if self.in_use < len(self.ready) and self.compiling.seconds < COMPILES * (time.time() - self.start):
            self.in_use += 1
        ready = self.ready[: self.in_use] or [0]
        return draw(self.seed, self.device, combinations(0)[ready[self.seed % len(ready)]])

    def step(self) -> None:
        """Make one call, or several at once."""
        self.begun = time.time()
        chance = random.Random(self.seed).random()
        if chance < 0.25:
            self.seed += 1
            self._refuse(self.refused[self.seed % len(self.refused)])
        elif chance < 0.35:
            # Without what belongs to the whole process: the seed of its random numbers, and a switch of torch.
            drawn = [self.next_problem() for _ in range(TOGETHER)]
            problems = [replace(each, dropout_p=0.0, place="stream") for each in drawn]
            with ThreadPoolExecutor(TOGETHER) as pool:
                list(pool.map(lambda problem: self._check("together", problem), problems))
        elif chance < 0.37:
            self._check("compiled", replace(self.next_problem(), compiled=True, dropout_p=0.0, place=""))
        elif chance < 0.42 and self.device != "cpu":
            self._check("captured", replace(self.next_problem(), dropout_p=0.0, place=""), captured)
        else:
            self._check("eager", self.next_problem())

    def _check(self, kind: str, problem: Problem, run: Callable[..., Results] | None = None) -> None:
        try:
            check(problem, self.device, run=run)
        except Exception as error:
            first = first_of(error)
            told = _told(error) if first is error else f"{_told(first)}, then {_told(error)}"
            self._note(f"{kind}: {told} | {problem!r}", "".join(traceback.format_exception(error)))
        finally:
            give_memory_back(problem, self.device)
        self.done[kind] += 1

    def _refuse(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except REFUSALS:
            self.done["refused"] += 1
            return
        self._note(f"call {self.refused.index(call)} was not refused")

    def _note(self, wrong: str, trace: str = "") -> None:
        """Keep what was wrong; print it, and the traceback of the first ones."""
        with self.lock:
            self.wrong.append(wrong)
            print(wrong, flush=True)
            if trace and len(self.tracebacks) < TRACEBACKS:
                self.tracebacks.append(trace)
                print(trace, flush=True)


def _watch(soak: Soak) -> None:
    """End the process where a call takes too long: a kernel that hangs is ended by nothing else."""
    import faulthandler

    while True:
        time.sleep(5)
        if time.time() - soak.begun > SILENCE:
            print(f"a call hangs, of seed {soak.seed}", flush=True)
            faulthandler.dump_traceback()
            os._exit(7)


def run(seconds: float, device: str, seed: int, jobs: int = 0) -> dict[str, Any]:
    """Make calls for so many seconds, while `jobs` processes compile ahead; return what was done, and the seed to continue with."""
    torch._dynamo.config.recompile_limit = 10_000  # type: ignore[assignment]
    torch._dynamo.config.accumulated_recompile_limit = 10_000  # type: ignore[assignment]
    ahead = Ahead(device, jobs) if jobs and device != "cpu" else None
    try:
        return _run(Soak(device, seed, None if ahead is None else ahead.done), seconds)
    finally:
        if ahead is not None:
            ahead.end()


def _run(soak: Soak, seconds: float) -> dict[str, Any]:
    """Make calls for so many seconds; return what was done, what was wrong, and the seed to continue with."""
    device, seed = soak.device, soak.seed
    if device != "cpu":
        soak.compiling.listen()
    threading.Thread(target=_watch, args=(soak,), daemon=True).start()
    begun = soak.start = time.time()
    held: list[int] = []  # MiB
    done: list[float] = []  # when each call ended
    while not held or time.time() - begun < seconds:
        soak.step()
        held.append(_held(device))
        done += [time.time() - begun] * (soak.done.total() - len(done))
    took = time.time() - begun
    by_quarter = [sum(took * quarter / 4 < at <= took * (quarter + 1) / 4 for at in done) for quarter in range(4)]
    return {
        "device": torch.cuda.get_device_name() if device != "cpu" else "cpu", "torch": torch.__version__,
        "seconds": round(took, 1), "first seed": seed, "next seed": soak.seed + 1,
        "calls": dict(soak.done), "calls per second, by quarter": [round(4 * count / took, 1) for count in by_quarter],
        "combinations": soak.in_use if device != "cpu" else "as drawn",
        "kernels": len(soak.compiling.made), "seconds compiling": round(soak.compiling.seconds, 1),
        "wrong": soak.wrong, "tracebacks of the first": soak.tracebacks,
        "MiB held between calls": {"first": held[0], "middle": held[len(held) // 2], "last": held[-1], "most": max(held)},
        "peak MiB of the process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }  # fmt: skip


def _held(device: str) -> int:
    """Return the MiB that tensors hold on the device; of a CPU, what the process holds."""
    if device != "cpu":
        return torch.cuda.memory_allocated() >> 20
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20


def main() -> int:
    """Run what the arguments ask for; return how many calls were wrong."""
    parser = argparse.ArgumentParser(description="calls of all kinds for a while, each checked")
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--start", type=int, help="the first seed; by default those of the file are continued")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--output", type=Path, default=Path("soak.json"), help="a list of runs, to which this one is added"
    )
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 1), help="processes that compile ahead"
    )
    parser.add_argument("--ahead", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ahead:
        compile_ahead(options.device, *options.ahead)
        return 0
    runs = json.loads(options.output.read_text()) if options.output.exists() else []
    start = options.start if options.start is not None else runs[-1]["next seed"] if runs else 500_000
    runs.append(run(options.seconds, options.device, start, options.jobs))
    options.output.write_text(json.dumps(runs, indent=1) + "\n")
    total = sum(sum(each["calls"].values()) for each in runs)
    print(json.dumps(runs[-1]))
    first, *_, last = runs[-1]["calls per second, by quarter"]
    print(f"{first} calls per second in the first quarter, {last} in the last")
    print(
        f"{total} calls in {sum(each['seconds'] for each in runs):.0f} s, {sum(len(each['wrong']) for each in runs)} wrong"
    )
    return len(runs[-1]["wrong"])


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
