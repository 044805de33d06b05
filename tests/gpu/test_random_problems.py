"""Random problems against the float64 oracle on the GPU, each launched twice."""

import os

import pytest

from dmattn_ops.testing import check, draw

pytestmark = pytest.mark.gpu
CASES = int(os.environ.get("DMATTN_FUZZ_CASES", "600"))


@pytest.mark.parametrize("seed", range(100000, 100000 + CASES))
def test_random_problem_stays_within_budget(seed: int) -> None:
    check(draw(seed, "cuda"), "cuda", repeats=2)
