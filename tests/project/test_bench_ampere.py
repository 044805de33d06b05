"""The benchmark of the kernels for SM 8.x runs, with the sizes that a CPU can do."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

import bench_ampere


def test_the_benchmark_measures_each_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DMATTN_ARCH", "TRITON_OVERRIDE_ARCH"):
        monkeypatch.setenv(name, "")  # which the benchmark sets, and the test takes back
    output = tmp_path / "rows.json"
    rows = bench_ampere.main(["--tiny", "--rounds=1", "--device=cpu", f"--output={output}"])
    measured = {(row["part"], row["implementation"]) for row in rows if "forward_ms" in row}
    assert measured >= {(part, "dmattn") for part in bench_ampere.TINY}
    assert ("dynamic", "dense") in measured and output.exists()
    missing = {row["implementation"] for row in rows if "missing" in row}
    assert missing == {"fa2", "flex"}


def test_sizes_of_a_gpu_are_refused_on_a_cpu(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="needs a GPU"):
        bench_ampere.main(["--device=cpu", f"--output={tmp_path / 'rows.json'}"])
