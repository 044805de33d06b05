"""What several tests on a GPU are given."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dmattn_ops.dispatch import run
from dmattn_ops.launching import plans

KEPT = 1 << 30  # bytes that a test process may keep for its next test: other processes use the same GPU


@pytest.fixture(autouse=True)
def memory_is_given_back() -> Iterator[None]:
    """Give the memory of a large test back, so that many processes can share a GPU."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > KEPT:
        torch.cuda.empty_cache()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that launches were given to, in order; plans of other tests are forgotten."""
    plans.forget()
    names: list[str] = []
    choose = run.choose.choose

    def noted(*arguments):
        choice = choose(*arguments)
        names.append(choice.row.kernel)
        return choice

    monkeypatch.setattr(run.choose, "choose", noted)
    return names


@pytest.fixture
def nan_in_new_memory() -> None:
    """Memory that a call allocates holds NaN where nothing was written yet: the allocator hands out what was filled with it."""
    torch.cuda.empty_cache()
    poisoned = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(8)]
    poisoned += [torch.full((1 << 14,), float("nan"), device="cuda") for _ in range(64)]
    del poisoned
