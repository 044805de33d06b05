"""The benchmark of generation in small: every part is measured, and targets are read from its rows."""

import json

import pytest

import bench_generation
import readme_tables
from dynamic_targets import targets_of
from generation_targets import TARGETS


def test_every_part_is_measured_and_shown(tmp_path, monkeypatch):
    output = tmp_path / "results.json"
    rows = bench_generation.main(["--device", "cpu", "--tiny", "--rounds", "1", "--output", str(output)])
    named = {(row["part"], row["implementation"]): row for row in rows}
    assert {part for part, _ in named} == set(bench_generation.PARTS)
    step = named["step", "dmattn"]
    assert step["over_full"] == round(named["step", "dmattn-full"]["graph_ms"] / step["graph_ms"], 2)
    assert step["slots"] == 16 and step["cache_bytes"] > 0
    assert named["full", "dmattn"]["invariant_ratio"] > 0 and named["prompt", "dmattn"]["chunks_ratio"] > 0
    assert named["invariant", "dmattn-plain"]["ratio"] == 1.0
    monkeypatch.setattr(readme_tables, "RESULTS", tmp_path)
    table = readme_tables.table("results.json", ["step"])
    assert "dmattn_ops, keep 12" in table and table.count("\n") == 4
    assert json.loads(output.read_text())["targets"] == targets_of(rows, TARGETS)


def test_targets_are_read_from_the_rows():
    step = {
        "part": "step",
        "case": "B16 H32/8 S131072 D128",
        "implementation": "dmattn",
        "over_full": 35.0,
        "over_sdpa": 20.0,
    }
    found = {row["target"]: row["reached"] for row in targets_of([step], TARGETS)}
    assert list(found.values()) == ["must", "no"]


def test_it_asks_for_a_gpu():
    with pytest.raises(SystemExit, match="needs a GPU"):
        bench_generation.main(["--device", "cpu"])
