"""The benchmark of dynamic masks at training lengths runs, and forces the ways that it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import bench_training
import dmattn_ops
from dmattn_ops.call import UNBOUNDED, Call, plain_options
from dmattn_ops.dispatch import run


def test_tiny_rows_have_speed_ups(tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    bench_training.main(["--tiny", "--rounds=1", "--device=cpu", "--rows", "heads16", f"--output={output}"])
    rows = json.loads(output.read_text())["rows"]
    assert {row["implementation"] for row in rows} == {
        "dmattn-dense", "dmattn", "dmattn packed", "dmattn not packed",
    }  # fmt: skip
    assert all(row["speed_up"] > 0 for row in rows)


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
