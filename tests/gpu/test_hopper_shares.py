"""Several blocks for each key tile of the SM 9.0 backward: each a share of the queries, against the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.architecture import skip_file_without_hopper

pytestmark = pytest.mark.gpu
skip_file_without_hopper()

import dmattn_ops  # noqa: E402
from dmattn_ops.choice import resolve  # noqa: E402
from dmattn_ops.launching import plans  # noqa: E402
from dmattn_ops.testing import check  # noqa: E402
from dmattn_ops.testing.problem import Problem  # noqa: E402

GROUPED = Problem(
    variant="dense", dtype="bfloat16", batch=2, heads=4, heads_k=2, seqlen_q=517, seqlen_k=333, lse_grad=True
)


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch):
    """A function that gives each key tile so many blocks."""

    def by(shares: int) -> None:
        plans.forget()
        monkeypatch.setattr(resolve, "_shares", lambda offered, call: shares)

    yield by
    plans.forget()


@pytest.mark.parametrize("shares", [2, 3, 8])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "causal_from": "top_left", "left": 90},
        {"left": 40, "right": 5},
        {"heads_k": 4, "dtype": "float16", "is_causal": True},
        {"heads": 8, "heads_k": 1},
        {"softcap": 5.0, "magnitude": 3.0},
        {"dropout_p": 0.3, "is_causal": True},
        {"bias": True, "bias_shape": "kq"},
        {"sink": "float32", "is_causal": True},
        {"seqlen_q": 1},
        {"seqlen_q": 5000, "seqlen_k": 77},
        {"seqlen_q": 65, "seqlen_k": 1000, "is_causal": True},
    ],
    ids=lambda changes: " ".join(f"{name}={value}" for name, value in changes.items()) or "full",
)
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_shares_add_up_to_the_gradients(taken, sharing, dim: int, changes: dict, shares: int) -> None:
    sharing(shares)
    check(replace(GROUPED, **({"dim": dim, "dim_v": dim} | changes)), "cuda", repeats=3)
    assert set(taken[1::2]) == {"hopper"}


@pytest.mark.parametrize("shares", [2, 5])
def test_values_may_be_narrower_and_rows_may_lie_anywhere(taken, sharing, shares: int) -> None:
    sharing(shares)
    check(replace(GROUPED, dim=128, dim_v=64, is_causal=True, layout="bhsd"), "cuda", repeats=2)
    assert set(taken[1::2]) == {"hopper"}


def test_a_call_of_few_blocks_shares_queries_and_repeats_bit_for_bit_but_for_dq() -> None:
    """Shares are added up in a fixed order; dq is added up by whoever is first, as without shares."""
    leaves = [torch.randn(1, 4096, 2, 128, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    assert "shares=4" in str(dmattn_ops.explain(*leaves, is_causal=True))
    out = dmattn_ops.flash_dmattn_func(*leaves, is_causal=True)
    grad_out = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    for _ in range(20):
        again = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        assert torch.equal(first[1], again[1]) and torch.equal(first[2], again[2])
        torch.testing.assert_close(first[0], again[0], rtol=1e-2, atol=1e-3)
