"""Kernels of GPU tests are compiled where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import dmattn_ops
import pytest
import torch

@pytest.mark.parametrize("length", [100, 50])
def test_that_launches(length):
    keep = torch.rand(1, 1, length, 100, device="cuda") < 0.5
    assert keep.is_cuda and keep.device == torch.device("cuda:0")
    mask = dmattn_ops.prepare_mask(keep.to("cuda"))
    assert mask.row_tiles.sum().item() == 0, "nothing ran"

def test_that_ends_early():
    raise ValueError("a result is not what it is on a GPU")
"""


def test_launches_of_tests_compile_and_run_nothing(tmp_path):
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    options = ["-p", "tests.tools.precompile", "-p", "no:cacheprovider", "-q", "--rootdir", str(tmp_path)]
    told = dict(os.environ, TRITON_CACHE_DIR=str(tmp_path / "kernels"), PYTHONPATH=str(ROOT), TRITON_INTERPRET="0")
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS"):
        told.pop(name, None)
    command = [sys.executable, "-m", "pytest", *options, str(file)]
    done = subprocess.run(command, cwd=ROOT, env=told, capture_output=True, text=True)
    assert "3 passed" in done.stdout, done.stdout + done.stderr
    assert "tests that ended early: 1" in done.stdout
    compiled = next(line for line in done.stdout.splitlines() if "kernels" in line)
    assert not compiled.startswith("0 kernels"), compiled
    assert list((tmp_path / "kernels").glob("*/*.cubin"))
