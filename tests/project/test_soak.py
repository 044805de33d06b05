"""The program that makes calls of all kinds for a while (`tests/tools/soak.py`): here without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import dmattn_ops
from dmattn_ops.testing import check, draw
from dmattn_ops.testing.check import _dense_results, _varlen_results
from dmattn_ops.testing.combinations import COMBINATIONS, combinations
from dmattn_ops.testing.inputs import make_inputs, make_varlen_inputs
from tests.tools import soak


def test_a_soak_continues_with_the_seeds_of_its_file(tmp_path: Path) -> None:
    output = tmp_path / "soak.json"
    command = [sys.executable, "-m", "tests.tools.soak", "--device", "cpu", "--output", str(output)]
    for _ in range(2):
        done = subprocess.run([*command, "--seconds", "4"], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
    first, second = json.loads(output.read_text())
    assert second["first seed"] == first["next seed"] > first["first seed"] and not first["wrong"] + second["wrong"]
    assert sum(first["calls"].values()) >= 4 and " 0 wrong" in done.stdout
    rates = second["calls per second, by quarter"]
    assert f"{rates[0]} calls per second in the first quarter, {rates[3]} in the last" in done.stdout and max(rates) > 0


def test_a_soak_adds_combinations_that_are_compiled_while_its_own_compiling_leaves_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(soak, "refused_calls", lambda device: [])
    ready: list[int] = []
    tried = soak.Soak("cuda", 500_000, ready)
    tried.start -= 100

    def taken() -> set[int]:
        drawn = [tried.next_problem() for _ in range(60)]
        features = {(kernel.dim, kernel.dim_v, kernel.dtype): index for index, kernel in enumerate(combinations(0))}
        assert len({(problem.seqlen_q, problem.seqlen_k) for problem in drawn}) > 10
        return {features[problem.dim, problem.dim_v, problem.dtype] for problem in drawn}

    kinds = [(kernel.dim, kernel.dim_v, kernel.dtype) for kernel in combinations(0)]
    alone = [index for index, kind in enumerate(kinds) if kinds.count(kind) == 1]
    tried.compiling.seconds = 50.0
    ready += alone[:3]
    assert taken() == set(alone[:1]), "half of the time was spent compiling"
    tried.compiling.seconds = 10.0
    assert taken() == set(alone[:3])
    ready.append(alone[3])
    assert taken() == set(alone[:4])


def test_other_processes_compile_ahead_whatever_a_problem_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    checked = []

    def fails(problem: Any, device: str) -> None:
        checked.append(problem)
        raise AssertionError("over the budget")

    monkeypatch.setattr(soak, "check", fails)
    soak.compile_ahead("cuda", COMBINATIONS - 3, 2)
    assert capsys.readouterr().out == f"{COMBINATIONS - 3}\n{COMBINATIONS - 1}\n"
    assert len(set(checked)) == 2 * soak.AHEAD and checked[-1].dim == combinations(0)[-1].dim


def test_a_soak_notices_wrong_results_and_calls_that_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = dmattn_ops.flash_dmattn_func

    def slightly_wrong(*arguments: object, **keywords: object) -> object:
        found = correct(*arguments, **keywords)  # type: ignore[arg-type]
        return tuple(each * 1.2 for each in found) if isinstance(found, tuple) else found

    monkeypatch.setattr(dmattn_ops, "flash_dmattn_func", slightly_wrong)
    tried = soak.Soak("cpu", 0)
    tried._check("eager", soak.Problem(seqlen_q=20, seqlen_k=20))
    assert len(tried.wrong) == 1 and "over the budget" in tried.wrong[0]
    tried.refused = [lambda: torch.zeros(1)]
    tried._refuse(tried.refused[0])
    assert tried.wrong[1] == "call 0 was not refused"


CAPTURED = (500_001, 500_012, 500_020)  # intervals with a promise, which must not be read inside the capture


def _without_memory(inputs: Any, mode: FakeTensorMode) -> Any:
    """Return inputs whose tensors have no values."""

    def fake(value: Any) -> Any:
        if isinstance(value, Tensor):
            return mode.from_tensor(value)
        return type(value)(fake(each) for each in value) if isinstance(value, (list, tuple)) else value

    named = {field.name: getattr(inputs, field.name) for field in fields(inputs) if field.name != "parts"}
    return replace(inputs, **{name: fake(value) for name, value in named.items()})


@pytest.mark.parametrize("seeds", [CAPTURED, range(500_000, 500_040)], ids=["with a promise", "of every kernel"])
def test_what_a_captured_call_runs_asks_for_no_value_of_a_tensor(seeds: tuple[int, ...] | range) -> None:
    promises = 0
    for seed in seeds:
        problem = replace(draw(seed, "cuda"), instructions="", dropout_p=0.0, place="", rows="")
        varlen = problem.variant == "varlen"
        inputs = make_varlen_inputs(problem, "cpu") if varlen else make_inputs(problem, "cpu")
        promises += inputs.at_most is not None
        mode = FakeTensorMode()
        results = _varlen_results if varlen else _dense_results
        with mode:  # to ask for a value raises here, as it does in a capture
            found = results(problem, _without_memory(inputs, mode))
        assert found["out"].shape == inputs.grad_out.shape, problem
    assert promises >= 2


def test_a_problem_promises_what_its_intervals_show() -> None:
    seen: dict[bool, int] = {}
    for seed in range(40):
        problem = replace(soak.Problem(), seed=seed, intervals="random", promise=True, is_causal=True, seqlen_q=9)
        problem = replace(problem, seqlen_k=9)
        inputs = make_inputs(problem, "cpu")
        start, end = inputs.intervals
        shown = [[int(start[0, 0, j]) <= i < int(end[0, 0, j]) for j in range(9)] for i in range(9)]
        folded = seed % 2 == 1
        most = max(sum(shown[i][j] and (j <= i or not folded) for j in range(9)) for i in range(9))
        assert inputs.at_most == most
        seen[folded] = seen.get(folded, 0) + most
        check(problem)
    assert 0 < seen[True] < seen[False], "a band that is folded in shows fewer"
    assert make_inputs(replace(problem, promise=False), "cpu").at_most is None


def _pretended_gpu(monkeypatch: pytest.MonkeyPatch, breaks: bool) -> list[str]:
    """Let the names of torch that a capture takes write down that they were called; the capture fails where it `breaks`."""
    said: list[str] = []

    @contextmanager
    def graph(_: Any) -> Any:
        said.append("begin")
        try:
            yield
        finally:
            said.append("end")
            if breaks:
                raise RuntimeError("previous error during capture")

    generator = SimpleNamespace(device="cpu", graphsafe_set_state=lambda state: said.append("new generator"))
    pretended = {
        "synchronize": lambda: said.append("synchronize"),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: said.append("replay")),
        "current_stream": lambda: "first stream", "set_stream": lambda stream: said.append(f"back to the {stream}"),
        "get_sync_debug_mode": lambda: 0, "set_sync_debug_mode": lambda mode: said.append(f"waiting: {mode}"), "graph": graph,
        "default_generators": [generator], "current_device": lambda: 0,
    }  # fmt: skip
    for name, value in pretended.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "Generator", lambda device: SimpleNamespace(graphsafe_get_state=lambda: None))
    return said


def test_a_call_must_not_wait_before_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    said = _pretended_gpu(monkeypatch, breaks=False)

    def results() -> dict[str, Tensor]:
        said.append("call")
        return {"out": torch.zeros(2)}

    assert soak.captured(results)["out"].isnan().all(), "nothing but a replay writes what is returned"
    waits = ["synchronize", "waiting: error", "call", "waiting: 0", "synchronize"]
    assert said == ["call", *waits, "begin", "call", "end", "replay", "synchronize"]


def test_a_failed_capture_is_left_and_its_first_error_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    said = _pretended_gpu(monkeypatch, breaks=True)

    def results() -> dict[str, Tensor]:
        if said[-1:] == ["begin"]:
            raise ValueError("read inside the capture")
        return {"out": torch.zeros(2)}

    tried = soak.Soak("cpu", 0)
    monkeypatch.setattr(soak, "check", lambda problem, device, run: run(results))
    for _ in range(soak.TRACEBACKS + 1):
        tried._check("captured", soak.Problem(), soak.captured)
    assert said[-3:] == ["end", "back to the first stream", "new generator"]
    wrong = tried.wrong[0]
    assert wrong.startswith("captured: ValueError at test_soak.py:")
    assert (
        wrong.index("read inside the capture") < wrong.index("previous error during capture") < wrong.index("Problem(")
    )
    assert len(tried.wrong) == soak.TRACEBACKS + 1 and len(tried.tracebacks) == soak.TRACEBACKS
    assert "in results" in tried.tracebacks[0] and tried.tracebacks[0] in capsys.readouterr().out
