"""The example and the benchmark of shared sequences run under torchrun with two processes, and alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=240, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("launcher", [TORCHRUN, ()], ids=["torchrun", "alone"])
def test_the_example_trains_as_one_process_does(launcher):
    said = run(*launcher, "examples/context_parallel.py")
    processes = 2 if launcher else 1
    assert said.startswith(f"{processes} processes on")
    one, many = (
        [float(loss) for loss in line.split(":")[1].split()] for line in said.splitlines() if line.startswith("losses")
    )
    assert len(one) == 3 and many == pytest.approx(one, abs=2e-5)  # of five decimals
    assert one[2] < one[0]


def test_the_benchmark_runs_and_writes_every_row(tmp_path):
    output = tmp_path / "results.json"
    run(*TORCHRUN, "benchmarks/bench_distributed.py", "--tiny", "--rounds", "1", "--repeats", "1", "--output", output)
    results = json.loads(output.read_text())
    rows = {(row["case"], row["implementation"]): row for row in results["rows"]}
    for case in ("causal", "documents", "window", "dynamic"):
        of_case = [row for (name, _), row in rows.items() if name == case]
        assert of_case[0]["implementation"] == "one GPU" and of_case[0]["efficiency"] == 1.0
        assert len(of_case) >= 3
        for row in of_case[1:]:
            assert row["efficiency"] > 0 and row["forward_ms"] > 0 and row["backward_ms"] > 0
    itemsize = 2 if torch.cuda.device_count() >= 2 else 4  # bfloat16 on GPUs
    whole = 512 // 2 * 2 * 2 * 16 * itemsize  # the keys and values of the other rank
    assert rows["causal", "all_gather"]["received_bytes"] == whole
    assert rows["window", "all_gather"]["received_bytes"] == whole // 256 * 63
    assert rows["dynamic", "counts"]["received_bytes"] < 2 * whole / 4
    assert rows["bandwidth", "collectives"]["all_gather_gb_s"] > 0
