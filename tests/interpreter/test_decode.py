"""The kernel of one query for each head: the budget of the error against float64, with every mask, bias and share of keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dmattn_ops.call import Call, Result
from dmattn_ops.choice import arch
from dmattn_ops.choice.config import DecodeForward
from dmattn_ops.kernels.decode import launch
from tests.interpreter import oracle
from tests.interpreter.problems import Problem, build, expected

CONFIG = DecodeForward(16, 16, 4, 2, per_sm=2)
ONE = Problem(batch=2, heads=6, kv_heads=2, seqlen_q=1, seqlen_k=150)
PROBLEMS = {
    "no mask": ONE,
    "one head": replace(ONE, heads=2),
    "more heads of a group than a block has rows": replace(ONE, heads=40, bias=(2, 40, 1)),
    "window": replace(ONE, band_lo=70, band_hi=99),
    "nothing inside the band": replace(ONE, band_lo=-9, band_hi=-1),
    "causal": replace(ONE, band_hi=149, dtype=torch.bfloat16),
    "intervals": replace(ONE, mask="intervals", mask_batch=2, mask_heads=2),
    "hidden intervals": replace(ONE, mask="hidden", mask_heads=2, value_dim=40),
    "bias of keys": replace(ONE, bias=(2, 2, 1), mask="intervals"),
    "bias of heads": replace(ONE, bias=(1, 6, 1), softcap=1.5, mask="intervals"),
    "bias of all": replace(ONE, bias=(1, 1, 1), bias_spacing=2, scale=-0.7),
    "zero scale": replace(ONE, scale=0.0),
    "one key": replace(ONE, seqlen_k=1),
    "wide": replace(ONE, head_dim=48, value_dim=24, transposed=True, seqlen_k=300),
}


def outputs(call: Call, sms: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Run the kernel as on a GPU with so many multiprocessors; outputs hold NaN before."""
    monkeypatch.setattr(arch, "physical", lambda _: replace(arch.KNOWN[80], num_sms=sms))
    out = torch.full((*call.query.shape[:-1], call.value.shape[-1]), float("nan"), dtype=call.query.dtype)
    statistics = [torch.full((*out.shape[:1], out.shape[2], 1), float("nan")) for _ in range(3)]
    launch.forward(call, Result(out, *statistics), CONFIG)
    return {"out": out, "lse": statistics[0], "row_max": statistics[2]}


@pytest.mark.parametrize("sms", [1, 20])
@pytest.mark.parametrize("name", PROBLEMS)
def test_one_query_stays_within_the_budget(name: str, sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = PROBLEMS[name]
    case = build(problem)
    sink = torch.linspace(-1.0, 1.0, problem.heads) if "bias" in name else None
    call = Call(case.query, case.key, case.value, case.bias, case.mask, sink, None, None, case.options)
    assert launch.refusals(call) == []
    assert (launch.splits_of(call, CONFIG, sms) > 1) == (sms > 1 and problem.seqlen_k > 140)
    found = outputs(call, sms, monkeypatch)
    exact, eager = (expected(problem, case, dtype) for dtype in (torch.float64, problem.dtype))
    for result, ours in found.items():
        truths = [exact[result], eager[result]]
        if result == "out" and sink is not None:
            truths = [
                truth * torch.sigmoid(each["lse"] - sink.view(1, -1, 1)).mT.unsqueeze(-1).to(truth.dtype)
                for truth, each in zip(truths, (exact, eager), strict=True)
            ]
        error = oracle.error(ours, truths[0])
        assert error <= 2 * oracle.error(truths[1], truths[0]) + oracle.EPSILON[problem.dtype], (result, error)


@pytest.mark.parametrize("sms", [1, 20])
def test_nan_of_what_is_not_seen_reaches_nothing(sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is used up to some key, and one with holes."""
    for holes in (False, True):
        case = build(replace(ONE, mask="intervals", mask_batch=2))
        end = (torch.arange(150) < torch.tensor([[[61]], [[0]]])).int()
        if holes:
            end = end * (torch.arange(150) % 3 == 0).int()
        hidden = end[:, 0] == 0
        key, value = (part.masked_fill(hidden[:, :, None, None], float("nan")) for part in (case.key, case.value))
        mask = case.mask._replace(start=None, end=end)
        call = Call(case.query, key, value, None, mask, None, None, None, case.options)
        found = outputs(call, sms, monkeypatch)
        keep = (end != 0)[:, :, None]
        parts = [part.double() for part in (case.query, case.key, case.value)]
        out, lse, row_max = oracle.attention(*parts, None, keep, case.options.softmax_scale)
        for name, truth in (("out", out), ("lse", lse), ("row_max", row_max)):
            torch.testing.assert_close(found[name].double(), truth, atol=1e-4, rtol=1e-4)


def test_a_visible_nan_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    case = build(ONE)
    value = case.value.clone()
    value[0, 7, 0] = float("nan")
    call = Call(case.query, case.key, value, None, case.mask, None, None, None, case.options)
    out = outputs(call, 1, monkeypatch)["out"]
    assert out[0, 0, :3].isnan().all() and out[0, 0, 3:].isfinite().all() and out[1].isfinite().all()


def test_what_it_refuses() -> None:
    case = build(replace(ONE, mask="intervals", mask_heads=2))
    call = Call(case.query, case.key, case.value, None, case.mask, None, None, None, case.options)
    assert "one query" in launch.refusals(call._replace(query=case.query.expand(-1, 2, -1, -1)))[0]
    assert "dropout" in launch.refusals(call._replace(options=case.options._replace(dropout_p=0.5)))[0]
    mask = case.mask._replace(end=torch.ones(2, 6, 150, dtype=torch.int32))
    assert "2 key heads, not for 6" in launch.refusals(call._replace(mask=mask))[0]
