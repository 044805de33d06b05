"""Every configuration of the portable kernels, for whichever architecture: its blocks give right results."""

from __future__ import annotations

import pytest

from dmattn_ops.choice.config import Row
from tests.interpreter.cases import PORTABLE_ROWS, of_row, row_id
from tests.interpreter.problems import check


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pairwise", [False, True], ids=["", "pairwise"])
@pytest.mark.parametrize(("forward", "backward"), PORTABLE_ROWS, ids=row_id)
def test_row_stays_within_budget(forward: Row, backward: Row, pairwise: bool) -> None:
    problem = of_row(forward, pairwise)
    check(problem, forward=forward.config, backward=backward.config)
