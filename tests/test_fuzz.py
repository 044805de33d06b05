"""Random problems over everything that the public functions take, against the float64 oracle (CPU kernels)."""

import os
import subprocess
import sys

import pytest
import torch

import dmattn_ops
from dmattn_ops.testing import Problem, check, draw, shrink

CASES = int(os.environ.get("DMATTN_FUZZ_CASES", "400"))


@pytest.mark.parametrize("seed", range(CASES))
def test_random_problem_stays_within_budget(seed: int) -> None:
    check(draw(seed))


@pytest.mark.parametrize("seed", [3, 11])
def test_a_seed_always_draws_the_same_problem(seed: int) -> None:
    assert draw(seed) == draw(seed)


@pytest.mark.parametrize("result", range(2))
def test_the_check_notices_a_small_error(result: int, monkeypatch: pytest.MonkeyPatch) -> None:
    correct = dmattn_ops.flash_dmattn_func

    def slightly_wrong(*args: object, **keywords: object) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = list(correct(*args, **keywords))
        outputs[result] = outputs[result] * 1.001
        return tuple(outputs)

    monkeypatch.setattr(dmattn_ops, "flash_dmattn_func", slightly_wrong)
    with pytest.raises(AssertionError, match="over the budget"):
        check(Problem(seqlen_q=64, seqlen_k=64, heads=2))


def test_shrink_keeps_what_makes_a_problem_fail() -> None:
    problem = Problem(
        seed=5, batch=3, heads=4, heads_k=2, seqlen_q=200, seqlen_k=100, softcap=5.0, is_causal=True, bias=True
    )
    small = shrink(problem, lambda candidate: candidate.softcap > 0 and candidate.seqlen_k >= 20)
    assert small == Problem(seed=5, seqlen_k=25, softcap=5.0, seqlen_q=small.seqlen_q) and small.seqlen_q <= 8


def test_a_printed_problem_reproduces_from_the_command_line() -> None:
    line = repr(Problem(seqlen_q=33, seqlen_k=65, is_causal=True))
    command = [sys.executable, "-m", "dmattn_ops.testing", "--device", "cpu", "--problem", line]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "1 passed, 0 failed" in done.stdout, done.stdout + done.stderr
