"""A chunk of kept keys on the host: plans repeat its launches, and few operations of torch are called."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon")
import torch

from dmattn_ops import KeptKeys
from dmattn_ops.dispatch import run
from dmattn_ops.launching import plans
from tests.support.called_operators import Called
from tests.support.hopper_launches import pretended_launches

SIZE = 4096


def test_a_chunk_is_repeated_by_two_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KeptKeys(1, 2, 64, 512, dtype=torch.bfloat16)
    query, key, value = (torch.empty(1, 4 * SIZE, heads, 64, dtype=torch.bfloat16) for heads in (8, 2, 2))
    scores = torch.randn(1, 2, 4 * SIZE)
    kernels = run._launcher("dmattn_ops.kernels.kept.chunk_launch")
    monkeypatch.setattr(run, "kernels_of_chunks", lambda stored, token: kernels)
    with pretended_launches(monkeypatch) as launches:
        for start in range(0, 4 * SIZE, SIZE):
            now = slice(start, start + SIZE)
            launches.clear()
            with Called() as called:
                cache.attend(query[:, now], key[:, now], value[:, now], scores[..., now])
        assert [found[0] for found, plan in plans._plans.items() if plan is not None] == ["keep_chunk", "forward"]
    names = [made.kernel for made in launches]
    assert names[:6] == ["begin_chunk", "sort_runs", "sort_alive", "write_deaths", "end_chunk", "store_chunk"]
    assert len(names) <= 12
    views = {"aten.slice.Tensor", "aten.transpose.int"}
    assert [name for name in called.names if name not in views] == [
        "dmattn.keep_chunk.default", "aten.new_empty.default", "dmattn.forward.default",
    ]  # fmt: skip
