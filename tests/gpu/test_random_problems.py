"""Random problems against the float64 oracle on the GPU, each launched twice."""

import os

import pytest

from dmattn_ops.testing import check, draw
from dmattn_ops.testing.combinations import COMBINATIONS

pytestmark = pytest.mark.gpu
CASES = int(os.environ.get("DMATTN_FUZZ_CASES", "600"))
SEEDS = sorted(range(100000, 100000 + CASES), key=lambda seed: seed % COMBINATIONS)  # what shares kernels in a row


@pytest.mark.parametrize("seed", SEEDS)
def test_random_problem_stays_within_budget(seed: int) -> None:
    check(draw(seed, "cuda"), "cuda", repeats=2)
