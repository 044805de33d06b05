"""The portable kernels on CPU tensors, against attention from a dense mask in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dmattn_ops.call import NO_MASK, Call, Gradients, Result, Saved, Varlen, plain_options
from dmattn_ops.choice import config
from dmattn_ops.choice.config import PortableBackward, PortableForward
from dmattn_ops.kernels.portable import backward as portable_backward
from dmattn_ops.kernels.portable import forward as portable_forward
from tests.interpreter import oracle
from tests.interpreter.cases import NASTY, random_problem
from tests.interpreter.problems import BACKWARD, FORWARD, Problem, build, check, run

pytestmark = pytest.mark.usefixtures("strict_memory")
SMALL_FORWARD = PortableForward(16, 32, 4, 1)
SMALL_BACKWARD = PortableBackward(32, 16, 4, 1, 16, 128, 4, 1)
LARGE_FORWARD = PortableForward(128, 128, 4, 1)
LARGE_BACKWARD = PortableBackward(128, 128, 4, 1, 128, 128, 4, 1)


@pytest.mark.parametrize("name", NASTY)
def test_nasty_case_stays_within_budget(name: str) -> None:
    check(NASTY[name])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(40))
def test_random_problem_stays_within_budget(seed: int) -> None:
    check(random_problem(seed))


@pytest.mark.parametrize(
    ("forward", "backward"), [(SMALL_FORWARD, SMALL_BACKWARD), (LARGE_FORWARD, LARGE_BACKWARD)], ids=["small", "large"]
)
@pytest.mark.parametrize(
    "problem",
    [
        Problem(mask="bits", seqlen_q=150, seqlen_k=140, mask_heads=2, bias=(1, 1, 150)),
        Problem(mask="segments", seqlen_q=140, seqlen_k=200, band_lo=-100, band_hi=60),
        Problem(seqlen_q=90, seqlen_k=140, band_hi=50, dropout_p=0.3, bias=(1, 2, 1)),
        Problem(lengths_q=(30, 100), lengths_k=(64, 170), band_hi=0),
    ],
    ids=["bits", "segments", "dropout", "packed"],
)
def test_blocks_smaller_and_larger_than_usual(
    problem: Problem, forward: PortableForward, backward: PortableBackward
) -> None:
    check(problem, forward=forward, backward=backward)


@pytest.mark.parametrize(("dim", "dtype"), [(320, torch.float32), (512, torch.bfloat16), (1024, torch.bfloat16)])
@pytest.mark.parametrize("mask", ["none", "bits"])
def test_head_dimensions_above_256(dim: int, dtype: torch.dtype, mask: str) -> None:
    problem = Problem(
        heads=2, kv_heads=1, seqlen_q=40, seqlen_k=50, head_dim=dim, value_dim=dim - 3, dtype=dtype, mask=mask,
        bias=(1, 1, 40), grad_lse=True, band_hi=10, scale=dim**-0.5,
    )  # fmt: skip

    def row(rows: tuple[config.Row, ...]) -> config.Config:
        return next(r.config for r in rows if r.kernel == "portable" and r.dim >= dim and r.itemsize >= dtype.itemsize)

    check(problem, forward=row(config.FORWARD), backward=row(config.BACKWARD))


@pytest.mark.parametrize(
    "problem",
    [
        Problem(batch=1, heads=2, seqlen_q=1, seqlen_k=1500),
        Problem(batch=1, heads=2, seqlen_q=3, seqlen_k=1500, band_hi=1400, dropout_p=0.2, value_dim=24),
        Problem(batch=2, heads=2, seqlen_q=5, seqlen_k=1200, mask="bits", density=0.1),
        Problem(heads=4, seqlen_q=4, seqlen_k=1300, mask="keys", density=0.02, bias=(1, 4, 1), transposed=True),
        Problem(lengths_q=(1, 3, 0, 2), lengths_k=(1500, 40, 7, 0), band_hi=0),
        Problem(seqlen_q=2, seqlen_k=1200, band_lo=5000),
    ],
    ids=["one query", "dropout", "bits", "keys", "packed", "empty"],
)
def test_programs_that_share_the_keys_of_few_queries(problem: Problem) -> None:
    forward = PortableForward(16, 64, 4, 2, per_sm=2)
    longest = max(problem.lengths_k or (problem.seqlen_k,))
    assert portable_forward.split_count(len(problem.lengths_q or (0,)) * problem.heads, longest, forward, 40) > 1
    check(problem, forward=forward)


def test_enough_programs_share_nothing() -> None:
    row = PortableForward(64, 64, 4, 2, per_sm=2)
    assert portable_forward.split_count(67, 1 << 20, row, 132) == 1
    assert portable_forward.split_count(1, 256, row, 132) == 1
    assert portable_forward.split_count(1, 1 << 20, row, 132) == 264


def test_dropout_does_not_depend_on_blocks() -> None:
    problem = Problem(seqlen_q=90, seqlen_k=140, dropout_p=0.5)
    case = build(problem)
    usual, small = run(problem, case), run(problem, case, forward=SMALL_FORWARD, backward=SMALL_BACKWARD)
    for name in usual:
        assert oracle.error(usual[name], small[name]) < 1e-5, name


@pytest.mark.parametrize("mask", ["none", "bits"])
def test_repeated_calls_are_bitwise_equal(mask: str) -> None:
    problem = Problem(heads=4, bias=(1, 1, 100), mask=mask)
    case = build(problem)
    first, second = run(problem, case), run(problem, case)
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_rows_whose_scores_are_all_minus_infinity_count_as_empty() -> None:
    problem = Problem(bias=(1, 2, 100), grad_lse=True)
    case = build(problem)
    assert case.bias is not None
    case.bias[:, :, 10:20] = float("-inf")
    ours = run(problem, case)
    assert (ours["lse"][:, :, 10:20] == float("-inf")).all()
    for name in ("out", "dq"):
        assert (ours[name][:, 10:20] == 0).all()
    assert all(ours[name].isfinite().all() for name in ("out", "dq", "dk", "dv", "dbias"))


def test_a_visible_nan_is_not_hidden() -> None:
    problem = Problem(seqlen_q=20, seqlen_k=20)
    case = build(problem)
    case.query[0, 3, 0] = float("nan")
    ours = run(problem, case)
    assert ours["out"][0, 3, 0].isnan().all()
    assert ours["out"][0, :, 1].isfinite().all()


def test_gradients_of_an_empty_row_ignore_what_arrives_for_its_lse() -> None:
    problem = Problem(seqlen_q=40, seqlen_k=30, band_hi=-10, grad_lse=True)
    case = build(problem)
    assert case.grad_lse is not None
    case.grad_lse[:, :, :10] = float("nan")
    ours = run(problem, case)
    assert (ours["dq"][:, :10] == 0).all()
    assert all(ours[name].isfinite().all() for name in ("dq", "dk", "dv"))


def test_more_sequences_than_a_step_of_the_search_reads_stay_within_budget() -> None:
    lengths_q = (0, 0, 1, 0, 0, 0, 2) * 19 + (70, 0, 1)
    lengths_k = (0, 0, 2, 1, 0, 0, 0) * 19 + (20, 40, 0)
    check(Problem(batch=1, heads=1, kv_heads=1, lengths_q=lengths_q, lengths_k=lengths_k, band_hi=0))


@pytest.mark.parametrize("problem", [NASTY["packed"], NASTY["packed, causal"]], ids=["full", "causal"])
def test_bounds_of_lengths_change_nothing_however_loose_they_are(problem: Problem) -> None:
    case = build(problem)
    assert case.varlen is not None
    exact = run(problem, case)
    case.varlen = case.varlen._replace(max_seqlen_q=1 << 40, max_seqlen_k=1 << 40)
    for name, loose in run(problem, case).items():
        assert torch.equal(loose, exact[name]), name


@pytest.mark.parametrize(
    "offsets",
    [[0, 999, 40], [-50, 20, 40], [30, 10, 40], [0, 2**31 - 1, -(2**31)]],
    ids=["long", "low", "back", "wild"],
)
def test_garbage_offsets_stay_inside_the_packed_tensors(offsets: list[int]) -> None:
    problem = Problem(lengths_q=(20, 20), lengths_k=(20, 20), band_hi=0)
    case = build(problem)
    assert case.varlen is not None
    garbage = torch.tensor(offsets, dtype=torch.int32)
    case.varlen = Varlen(garbage, garbage.flip(0).contiguous(), 23, 23, False)
    for tensor in run(problem, case).values():
        assert not tensor.isnan().any()


def test_strides_of_a_packed_gradient_are_kept() -> None:
    problem = Problem(seqlen_q=100, seqlen_k=100)
    case = build(problem)
    packed = torch.full((1, 100, 3, 2, 16), float("nan"))
    dq, dk, dv = packed.unbind(2)
    out, lse, lse_tail = torch.empty(1, 100, 2, 16), torch.empty(1, 2, 100), torch.empty(1, 2, 100)
    call = Call(case.query, case.key, case.value, None, NO_MASK, None, None, None, plain_options(0.25))
    portable_forward.forward(call, Result(out, lse, lse_tail, None), FORWARD)
    grads = Gradients(case.grad_out, None, dq, dk, dv, None)
    portable_backward.backward(call, Saved(out, lse, lse_tail), grads, BACKWARD)
    ours = run(problem, case)
    assert torch.equal(packed, torch.stack([ours["dq"], ours["dk"], ours["dv"]], 2))


def test_a_read_outside_of_the_tensors_is_noticed() -> None:
    query, key, value = torch.randn(1, 8, 1, 16), torch.randn(1, 80, 1, 16), torch.randn(1, 64, 1, 16)
    result = Result(torch.empty(1, 8, 1, 16), torch.empty(1, 1, 8), torch.empty(1, 1, 8), None)
    call = Call(query, key, value, None, NO_MASK, None, None, None, plain_options(0.25))
    with pytest.raises(Exception, match="outside of its tensors"):
        portable_forward.forward(call, result, FORWARD)


def test_the_check_notices_a_small_error(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = portable_backward.backward

    def slightly_wrong(call: Call, saved: Saved, grads: Gradients, row: PortableBackward) -> None:
        correct(call, saved, grads, row)
        grads.dk.mul_(1.001)

    monkeypatch.setattr(portable_backward, "backward", slightly_wrong)
    with pytest.raises(AssertionError, match="dk: error"):
        check(replace(NASTY["dropout"], grad_lse=True))


GARBAGE = {
    **{f"tiles of {number}": (slice(4, None), number) for number in (2**31 - 1, 10**6, -1, 1, -(2**31))},
    **{f"{word} of {number}": (slice(at, at + 1), number) for at, word in enumerate(("rank", "partial", "full"))
       for number in (7, 2**31 - 1, -1, -(2**31))},
}  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("mask", ["bits", "segments"])
def test_lists_of_any_numbers_lead_no_kernel_out_of_its_tensors(mask: str, garbage: str) -> None:
    problem = Problem(
        batch=1, heads=2, kv_heads=2, seqlen_q=150, seqlen_k=140, mask=mask, bias=(1, 1, 150), density=0.5
    )
    case = build(problem)
    words, number = GARBAGE[garbage]
    for lists in (case.mask.row_tiles, case.mask.col_tiles):
        assert lists is not None
        lists[..., words] = number
    query, key, value = case.query, case.key, case.value
    result = Result(torch.empty_like(case.grad_out), torch.empty(1, 2, 150), torch.empty(1, 2, 150), None)
    call = Call(query, key, value, case.bias, case.mask, None, None, None, case.options)
    portable_forward.forward(call, result, FORWARD)
    grads = Gradients(case.grad_out, None, *map(torch.empty_like, (query, key, value)), torch.empty_like(case.bias))
    saved = Saved(torch.zeros_like(result.out), torch.zeros_like(result.lse), torch.zeros_like(result.lse))
    portable_backward.backward(call, saved, grads, BACKWARD)
