"""The benchmarks of dynamic masks and intervals in small on a GPU: peers take part or say why not, and packing is timed."""

import json

import pytest

import bench_dynamic
import bench_intervals
import bench_rows
import varlen_rows
from bench_dynamic import Shape

pytestmark = pytest.mark.gpu


def test_dynamic_masks_are_measured_with_packing_and_memory(tmp_path, monkeypatch):
    packed = Shape(32, 8, 8192, 512, 64)
    monkeypatch.setattr(
        bench_dynamic, "TINY", {"heads32": [packed], "lengths": [packed], "peers": [Shape(4, 2, 1024, 64, 64)]}
    )
    monkeypatch.setattr(bench_dynamic, "PARTS", ("heads32", "lengths", "peers"))
    output = tmp_path / "results.json"
    rows = bench_dynamic.main(["--tiny", "--rounds=1", "--seconds=300", f"--output={output}"])
    own = [row for row in rows if row["implementation"] == "dmattn"]
    assert len(own) == 3 and all(row["peak_bytes"] > row["workspace_bytes"] for row in own)
    for row in own[:2]:
        assert 0 < row["pack_forward_ms"] < row["forward_ms"] and 0 < row["pack_backward_ms"] < row["backward_ms"]
        assert 0 < row["share"] < 1
    named = {row["implementation"]: row for row in rows if row["part"] == "peers"}
    assert {"flex", "fa4", "fa4-dense"} <= named.keys()
    assert named["flex"].get("missing") is None and named["flex"]["prepare_ms"] > 0
    assert json.loads(output.read_text())["rows"] == rows


def test_masks_of_intervals_are_measured_beside_the_peers(tmp_path):
    arguments = ["--tiny", "--rounds=1", "--seconds=300", "--rows", "8192", "--masks", "global + sliding", "document"]
    rows = bench_intervals.main([*arguments, f"--output={tmp_path / 'results.json'}"])
    named = {(row["mask"], row["implementation"]): row for row in rows}
    for mask in ("global + sliding", "document"):
        assert named[mask, "dmattn"]["forward_tflops"] > 0
        assert named[mask, "flex"].get("missing") is None
        assert (mask, "fa4") in named
    assert ("document", "dmattn-intervals") in named


def has_fa4():
    """Return whether FlashAttention-4 is installed with all that it needs."""
    try:
        from flash_attn.cute import flash_attn_varlen_func  # noqa: F401
    except ImportError:
        return False
    return True


def test_rows_of_packed_sequences_are_measured_beside_the_peers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(varlen_rows, "LENGTHS", {"small": (70, 300, 1, 130)})
    monkeypatch.setattr(varlen_rows, "SHAPES", (("small", 4, 4, 64, (1.0, 1.0)), ("small", 4, 2, 128, (0.0, 0.0))))
    rows = bench_rows.main(["--rounds=1", "--only=varlen", f"--output={tmp_path / 'results.json'}"])
    assert len(rows) == 2
    told = capsys.readouterr().err
    for row in rows:
        assert row["forward_ms"] > 0 and row["backward_ms"] > 0
        for peer in ("fa4", "torch varlen_attn"):  # each was measured, or it is told why not
            measured = {peer in row[f"{part}_peers_ms"] for part in ("forward", "backward")}
            assert measured == {f"{peer} does not run {row['case']}: " not in told}
        if has_fa4():
            assert row["forward_peers_ms"]["fa4"] > 0
    peers = bool(rows[1]["forward_peers_ms"])
    assert rows[1]["forward_held"] is rows[1]["backward_held"] is (True if peers else None)
    assert rows[0]["forward_peers_ms"]  # torch has an attention of packed sequences without grouped heads
    assert json.loads((tmp_path / "results.json").read_text())["rows"] == rows
