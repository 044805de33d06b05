"""What several tests on a GPU are given."""

from __future__ import annotations

import pytest

from dmattn_ops import dispatch, plans


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that launches were given to, in order; plans of other tests are forgotten."""
    plans._plans.clear()
    plans._seen.clear()
    names: list[str] = []
    choose = dispatch.choose.choose

    def noted(*arguments):
        choice = choose(*arguments)
        names.append(choice.row.kernel)
        return choice

    monkeypatch.setattr(dispatch.choose, "choose", noted)
    return names
