"""The benchmark of dynamic masks at training lengths runs, and forces the ways that it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import bench_training
import dmattn_ops
import timing
from dmattn_ops.call import UNBOUNDED, Call, plain_options
from dmattn_ops.dispatch import run


def test_tiny_rows_have_speed_ups(tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    bench_training.main(["--tiny", "--rounds=1", "--device=cpu", "--rows", "heads16", f"--output={output}"])
    rows = json.loads(output.read_text())["rows"]
    peers = {row["implementation"] for row in rows if "missing" in row}
    assert peers == {"fa4-dense", "flex", "fa4"}  # which need a GPU
    assert {row["implementation"] for row in rows} - peers == {
        "dmattn-dense", "dmattn", "dmattn packed", "dmattn not packed",
    }  # fmt: skip
    assert all(row["speed_up"] > 0 for row in rows if "missing" not in row)


@pytest.mark.parametrize("more", [[], ["--one-thread"]])
def test_rows_of_the_cpu_are_measured_without_a_gpu(tmp_path: Path, more: list[str]) -> None:
    output = tmp_path / "rows.json"
    bench_training.main(["--cpu", "--tiny", "--rounds=1", f"--output={output}", *more])
    results = json.loads(output.read_text())
    dense, ours = results["rows"]
    assert (dense["implementation"], ours["implementation"]) == ("dmattn-dense", "dmattn")
    assert ours["case"] == "B2 S256 keep64 H2/1 D32"
    assert ours["speed_up"] == pytest.approx(dense["whole_ms"] / ours["whole_ms"], abs=1e-2)
    assert {f"{part}_ms" for part in ("select", "forward", "backward", "whole")} <= ours.keys()
    assert results["targets"] == []  # the tiny row is not the one that has a target


def test_the_least_time_is_that_of_the_fastest_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 10.0, 12.0, 20.0, 29.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    assert timing.least_ms(lambda: None, 3, "cpu") == 2000.0


def test_cpu_time_is_that_of_one_thread() -> None:
    threads, seen = torch.get_num_threads(), []
    assert 0 <= timing.one_thread_ms(lambda: seen.append(torch.get_num_threads()), 3, "cpu") < 1000
    assert seen == [1, 1, 1] and torch.get_num_threads() == threads


def test_the_row_of_the_cpu_that_has_a_target_is_measured() -> None:
    batch, *sizes = bench_training.CPU_SIZES[0]
    case = f"B{batch} {bench_training.Shape(*sizes).case}"
    row = {"part": "cpu", "case": case, "implementation": "dmattn", "speed_up": 2.0}
    (target,) = bench_training.targets_of([row], bench_training.CPU_TARGETS)
    assert (target["measured"], target["reached"]) == (2.0, "must")


def test_the_ideal_is_pairs_over_kept_pairs() -> None:
    shape = bench_training.Shape(1, 1, 64, 2048, 256)
    assert shape.ideal == pytest.approx(4.27, abs=0.01)


def test_ways_are_forced_and_given_back() -> None:
    before = run.packing_of
    rows = torch.empty(1, 300, 1, 64)
    mask = dmattn_ops.dynamic_mask(torch.randn(1, 1, 300), 40).mask
    call = Call(rows, rows, rows, None, mask, None, None, None, plain_options(1.0, -UNBOUNDED, 0))
    with bench_training.packed("packed"):
        packing, _ = run.packing_of("forward", call)
        assert packing is not None and packing.epochs.length == bench_training.own_length(call)
    with bench_training.packed("not packed"):
        assert run.packing_of("forward", call)[0] is None
    assert run.packing_of is before
