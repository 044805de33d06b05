"""Tensor parallelism, sequence parallelism, FSDP2 and DDP of `examples/tensor_parallel.py` give the gradients of one device."""

import os
import re
import subprocess
import sys
from pathlib import Path

import parallel_cases as cases
import pytest

ROOT = Path(__file__).parents[2]
CLOSE = 1e-4  # of the largest element: float32, sums in another order through two layers


@pytest.mark.parametrize("checkpoints", [False, True], ids=["", "checkpoints"])
@pytest.mark.parametrize("dtensor", [False, True], ids=["local", "dtensor"])
def test_tensor_parallel(two_ranks, dtensor, checkpoints):
    assert max(two_ranks(cases.tensor_parallel, dtensor, False, checkpoints)) < CLOSE


@pytest.mark.parametrize("dtensor", [False, True], ids=["local", "dtensor"])
def test_tensor_parallel_compiled(two_ranks, dtensor):
    assert max(two_ranks(cases.tensor_parallel, dtensor, True, False, limit=240.0)) < CLOSE


@pytest.mark.parametrize("dtensor", [False, True], ids=["local", "dtensor"])
def test_sequence_parallel(two_ranks, dtensor):
    assert max(two_ranks(cases.sequence_parallel, dtensor)) < CLOSE


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_fsdp(two_ranks, compiled):
    assert max(two_ranks(cases.fsdp, compiled, limit=240.0)) < CLOSE


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_ddp(two_ranks, compiled):
    assert max(two_ranks(cases.ddp, compiled, limit=240.0)) < CLOSE


@pytest.mark.parametrize("dtensor", [False, True], ids=["local", "dtensor"])
def test_selective_checkpoints_save_attention(two_ranks, dtensor):
    layers = 2
    assert two_ranks(cases.forwards_under_checkpoints, dtensor) == [(layers, 2 * layers)] * 2


def test_transformers_tensor_parallel_plan(two_ranks):
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert max(max(errors) for errors in two_ranks(cases.transformers_llama, limit=240.0)) < CLOSE


def test_key_heads_that_do_not_divide_raise_on_every_rank(two_ranks):
    failures = two_ranks.failures(cases.key_heads_that_do_not_divide)
    assert [failure.message for failure in failures] == ["1 key heads do not divide over 2 ranks"] * 2


@pytest.mark.parametrize("options", [[], ["--tensor", "1", "--checkpoint"]], ids=" ".join)
def test_the_example_runs_under_torchrun(options):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "examples/tensor_parallel.py", "--steps", "6", *options],
        capture_output=True, text=True, cwd=ROOT, timeout=180, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert losses == pytest.approx([4.3504, 4.0076], abs=2e-3)  # whatever is parallel
