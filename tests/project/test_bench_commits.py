"""The comparison of two versions: every call can be made, both sides are asked in turns, and rows say what changed."""

import json
from pathlib import Path

import pytest

import bench_commits
from bench_commits import CALLS, Drawn, rows_of, set_up

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", CALLS)
def test_every_call_has_gradients(name):
    forward, whole, call = set_up(name, Drawn("cpu", tiny=True))
    assert forward().shape[:-1] == call.leaves[0].shape[:-1]
    assert [grad.shape for grad in whole()] == [leaf.shape for leaf in call.leaves]


def test_two_folders_are_measured_in_turns(tmp_path):
    output = tmp_path / "rows.json"
    calls = ["packed sequences, D64"]
    bench_commits.main(
        [str(ROOT), str(ROOT), "--device=cpu", "--tiny", "--rounds=1", f"--output={output}", "--calls", *calls]
    )
    row, mean = json.loads(output.read_text())["rows"]
    assert row["case"] == calls[0] and len(row["forward_ms"]) == 2 and min(row["forward_ms"]) > 0
    assert mean["case"] == "geometric mean" and mean["forward_ratio"] == row["forward_ratio"]


def test_ratios_are_of_medians_and_the_backward_is_the_rest():
    times = {"a call": [[[1.0, 3.0], [1.0, 3.0], [9.0, 9.0]], [[2.0, 6.0], [2.0, 6.0], [2.0, 6.0]]]}
    row, mean = rows_of(times)
    assert row["forward_ms"] == [1.0, 2.0] and row["backward_ms"] == [2.0, 4.0]
    assert (mean["forward_ratio"], mean["backward_ratio"]) == (2.0, 2.0)
