"""The kernels behind those for SM 9.0 that compute again what a NaN in hidden rows has spoilt, on CPU tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dmattn_ops.call import Call, Gradients, Result, Saved
from dmattn_ops.choice.config import PortableBackward, PortableForward
from dmattn_ops.kernels.interval_lists import listed
from dmattn_ops.kernels.portable import again
from dmattn_ops.kernels.portable import backward as portable_backward
from dmattn_ops.kernels.portable import forward as portable_forward
from dmattn_ops.kernels.portable.dbias import reduction
from tests.interpreter.cases import NASTY
from tests.interpreter.problems import Problem, build, check

pytestmark = pytest.mark.usefixtures("strict_memory")
CASES = {
    **{name: NASTY[name] for name in (
        "all rows empty", "element mask, heads apart", "mask heads of the keys", "documents", "documents that differ per head",
        "keys kept by one bit each", "intervals of a dynamic mask under a band", "intervals with hidden ones", "scale 0",
        "bias of every element",
    )},
    "sparse bits, grouped heads": Problem(mask="bits", heads=4, kv_heads=2, density=0.02, seqlen_q=140, grad_lse=True),
    "bits and a bias per key": Problem(mask="bits", heads=4, kv_heads=2, density=0.02, bias=(1, 2, 1)),
    "bits and dropout under a soft cap": Problem(mask="bits", density=0.05, dropout_p=0.3, softcap=2.0),
}  # fmt: skip
correct = portable_backward.backward


def marked(number: int) -> Tensor:
    """Return counts that say whether a result is NaN."""
    counts = torch.zeros(again.COUNTS, dtype=torch.int32)
    counts[again.SUSPECT] = number
    return counts


@pytest.fixture
def only_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the portable launchers leave NaN in all results, which is then computed again."""

    def forward(call: Call, result: Result, row: PortableForward) -> None:
        for made in filter(lambda part: part is not None, result):
            made.fill_(float("nan"))
        counts = marked(1)
        again.forward_again(listed(call), result, counts)
        assert counts.tolist() == [0] * again.COUNTS

    def backward(call: Call, saved: Saved, grads: Gradients, row: PortableBackward) -> None:
        correct(call, saved, grads, row)
        call = listed(call)
        for made in (grads.dq, grads.dk, grads.dv):
            made.fill_(float("nan"))
        key_sums = torch.full((call.query.shape[0], call.query.shape[2], call.key.shape[1]), float("nan"))
        by_key = grads.dbias is not None and grads.dbias.shape[-2] == 1
        again.backward_again(call, saved, grads if by_key else grads._replace(dbias=None), key_sums, marked(1))
        if by_key:
            reduce, *given = reduction(key_sums, grads.dbias)
            reduce(*given)

    monkeypatch.setattr(portable_forward, "forward", forward)
    monkeypatch.setattr(portable_backward, "backward", backward)


@pytest.mark.usefixtures("only_again")
@pytest.mark.parametrize("name", CASES)
def test_what_is_computed_again_stays_within_budget(name: str) -> None:
    check(CASES[name])


def test_nothing_is_computed_again_where_no_nan_was_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    right = portable_forward.forward

    def forward(call: Call, result: Result, row: PortableForward) -> None:
        right(call, result, row)
        made = result.out.clone()
        again.forward_again(listed(call)._replace(query=call.query * 2), result, marked(0))
        assert torch.equal(made, result.out)

    monkeypatch.setattr(portable_forward, "forward", forward)
    check(NASTY["documents"])


@pytest.mark.parametrize("mask", ["bits", "hidden"])
def test_of_a_batch_invariant_call_only_entries_with_a_nan_are_computed_again(mask: str) -> None:
    problem = Problem(
        batch=3, heads=2, kv_heads=1, seqlen_q=40, seqlen_k=50, mask=mask, mask_batch=3, density=0.1, band_hi=30, grad_lse=True
    )  # fmt: skip
    case = build(problem)
    call = listed(Call(case.query, case.key, case.value, None, case.mask, None, None, None, case.options))
    invariant = call._replace(options=case.options._replace(batch_invariant=True))
    counts = torch.cat([marked(0), marked(1), marked(0)])
    shape = (*case.query.shape[:-1], case.value.shape[-1])
    rows = (shape[0], shape[2], shape[1])

    def outputs() -> Result:
        return Result(torch.full(shape, 7.0), *[torch.full(rows, 7.0) for _ in range(3)])

    whole, part = outputs(), outputs()
    again.forward_again(call, whole, marked(1))
    again.forward_again(invariant, part, counts.clone())
    saved = Saved(*whole[:3])

    def gradients() -> Gradients:
        made = [torch.full_like(each, 7.0, memory_format=torch.contiguous_format) for each in call[:3]]
        return Gradients(case.grad_out, case.grad_lse, *made, None)

    of_whole, of_part = gradients(), gradients()
    again.backward_again(call, saved, of_whole, None, marked(1))
    again.backward_again(invariant, saved, of_part, None, counts)
    pairs = [*zip(whole, part, strict=True), *zip(of_whole[2:5], of_part[2:5], strict=True)]
    for expected, found in pairs:
        assert torch.equal(found[1], expected[1]) and not (expected[1] == 7.0).all()
        assert (found[0] == 7.0).all() and (found[2] == 7.0).all()
