"""How random problems are divided among processes, and what happens to processes that die (`dmattn_ops.testing.workers`)."""

import sys
import threading
from pathlib import Path

import pytest
import torch

from dmattn_ops.testing import Problem, draw, workers
from dmattn_ops.testing.combinations import COMBINATIONS, OF_A_BLOCK, block_of, combination, combinations
from dmattn_ops.testing.workers import Part, Parts


def test_problems_of_other_instructions_run_in_processes_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written = """if True:
        import os, sys
        for line in sys.stdin:
            start, stop, _ = line.split()
            print(os.environ.get('ATEN_CPU_CAPABILITY', ''), start, stop, file=open(sys.argv[1], 'a'))
            print('done [{}, {}]', flush=True)"""

    def command(device: str, repeats: int) -> list[str]:
        return [sys.executable, "-c", written, str(tmp_path / "seen")]

    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    monkeypatch.setattr(workers, "_command", command)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    workers.run(range(400, 800), "cpu", 1, jobs=1)
    assert (tmp_path / "seen").read_text().splitlines() == [" 400 500", "avx2 500 750", "default 750 800"]
    (tmp_path / "seen").unlink()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert "ATEN_CPU_CAPABILITY" not in workers.environment("avx2")


WORKER = """
import os, sys
for line in sys.stdin:
    for seed in range(*map(int, line.split())):
        print("begin", seed, flush=True)
        if seed == 4:
            os.abort()
        if seed == 7:
            print("FAILED seed 7: CUDA error | Problem()", flush=True)
            sys.exit(1)
    print('done [{"k": 0.5}, {"out": [0.25, %d]}]' % seed, flush=True)
"""


def test_a_worker_that_dies_costs_its_problem_only(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    def command(device: str, repeats: int) -> list[str]:
        return [sys.executable, "-c", WORKER]

    monkeypatch.setattr(workers, "_command", command)
    monkeypatch.setattr(workers.Prober, "__call__", lambda self, problem: self.unusable and problem.seqlen_k > 50)
    tally = workers.run(range(1, 11), "cpu", 1, jobs=2)
    assert (tally.failures, tally.cancelled, tally.begun) == (2, 0, 10)
    assert tally.kernels == {"k": 1.0} and tally.worst["out"] == (0.25, 10)
    first, second, last = tally.lines()
    assert first == "1 kernels, 1 of them compiled in 1 s of all processes"
    assert second == "largest error over its budget: out 0.25 (seed 10)" and last == "8 passed, 2 failed"
    printed = capfd.readouterr().out
    assert "FAILED seed 4: its process ended with -6" in printed and "FAILED seed 7: CUDA error" in printed


def test_a_worker_that_is_silent_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_command", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(workers, "SILENCE", 0.5)
    monkeypatch.setattr(workers.Prober, "__call__", lambda self, problem: False)
    assert workers.run(range(1), "cpu", 1, jobs=1).failures == 1


def test_candidates_run_in_new_processes_once_cuda_is_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(workers, "check", broken)
    prober = workers.Prober("cpu")
    assert prober(Problem()) and prober.unusable
    assert not prober(Problem()), "in a process of its own, nothing is broken"


def test_what_shares_kernels_goes_to_one_process_and_what_compiles_longest_begins() -> None:
    seeds = range(9_500, 21_000)
    parts = workers.parts_for_gpu(seeds)
    assert sorted(seed for part in parts for seed in part.seeds) == list(seeds)
    groups = {(block_of(seed), seed % OF_A_BLOCK % COMBINATIONS) for seed in seeds}
    assert len(parts) == len(groups) == 3 * COMBINATIONS
    first, last = (
        combinations(block_of(part.seeds[0]))[part.seeds[0] % OF_A_BLOCK % COMBINATIONS]
        for part in (parts[0], parts[-1])
    )
    assert all(first.hopper) and not any(last.hopper)


def test_a_process_that_ends_badly_when_all_is_done_is_counted(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    worker = "import os\nfor _ in open(0): print('done [{}, {}]', flush=True)\nos.abort()"
    monkeypatch.setattr(workers, "_command", lambda *_: [sys.executable, "-c", worker])
    tally = workers.run(range(2), "cpu", 1, jobs=1)
    assert (tally.failures, tally.bad_ends) == (0, 1) and "1 processes ended badly" in list(tally.lines())[-1]
    assert "a process ended with -6 after its last problem" in capfd.readouterr().out


def test_no_more_parts_that_take_much_memory_are_done_at_a_time_than_may_be() -> None:
    first, large, larger = (Part(range(count), large=True) for count in (3, 1, 2))
    small = Part(range(4))
    parts = Parts([first, large, larger, small], large=2)
    assert parts.next() == first and parts.next() == large and parts.next() == small
    taken: list[Part | None] = []
    waiting = threading.Thread(target=lambda: taken.append(parts.next(small)))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive() and not taken
    taken.append(parts.next(large))
    waiting.join(5)
    assert set(taken) == {larger, None}


def test_the_parts_of_a_gpu_say_which_take_much_memory() -> None:
    parts = workers.parts_for_gpu(range(10_000))
    assert {(part.large, combination(part.seeds[0]).far) for part in parts} == {(True, True), (False, False)}
    assert {draw(part.seeds[0], "cuda").rows == "far" for part in parts if part.large} == {True}
