"""The kernels of mma.sync and cp.async on CPU tensors (`gluon_on_cpu.py`), against attention from a dense mask in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dmattn_ops.call import UNBOUNDED
from dmattn_ops.choice import config
from dmattn_ops.choice.configurations import AmpereBackward, AmpereForward, AmpereSharedBias, Row
from tests.interpreter import oracle
from tests.interpreter import test_packed_attention as packed_attention
from tests.interpreter.cases import BIASED, NASTY, SUMMED, of_row, random_problem, row_id
from tests.interpreter.gluon_on_cpu import COPIES
from tests.interpreter.hidden import hide_unseen
from tests.interpreter.launchers import launcher_of
from tests.interpreter.problems import Problem, build, check, in_16_bits, run

pytestmark = pytest.mark.usefixtures("strict_memory")
SHARED_BIAS = AmpereSharedBias(32, 32, 4, 2, 1)
FORWARD = AmpereForward(64, 32, 4)
AHEAD = replace(FORWARD, held=True, ahead=True)
BACKWARD = AmpereBackward(32, 64, 4, 2, 2, 2, 2, 1, SHARED_BIAS)
ONE_BUFFER = replace(BACKWARD, query_stages=1)
ROWS = [
    pytest.param(forward, backward, id=row_id(backward))
    for backward in config.AMPERE_BACKWARD
    for forward in config.AMPERE_FORWARD
    if (forward.sm, forward.dim) == (backward.sm, backward.dim)
]
TWO_BUFFERS = replace(BACKWARD, block_m=64, block_n=32, grad_stages=2)


def check_here(problem: Problem, forward: AmpereForward = FORWARD, backward: AmpereBackward = BACKWARD) -> None:
    """Check a problem; no copy may be under way when a program ends."""
    try:
        check(in_16_bits(problem), forward=forward, backward=backward)
        COPIES.assert_none_is_under_way()
    finally:
        COPIES.forget()


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", NASTY)
def test_nasty_case_stays_within_budget(name: str) -> None:
    check_here(NASTY[name])


def test_what_lies_behind_the_last_query_adds_nothing_to_keys_that_all_queries_see() -> None:
    """The words of whole keys show them there, too, and 0 times an infinite key, to which no query gives a weight, is NaN."""
    problem = in_16_bits(Problem(mask="keys", seqlen_q=70, seqlen_k=150))
    case = build(problem)
    infinite = int(case.keep[0, 0, 0].nonzero()[-1])
    case.query[..., 0] = case.query[..., 0].abs() + 1
    case.key[:, infinite] = 0
    case.key[:, infinite, :, 0] = float("-inf")
    found = run(problem, hide_unseen(problem, case), forward=FORWARD, backward=BACKWARD)
    COPIES.assert_none_is_under_way()
    assert all(found[name].isfinite().all() for name in ("out", "dk", "dv"))
    assert (found["dk"][:, infinite] == 0).all() and (found["dv"][:, infinite] == 0).all()


@pytest.mark.sampled(7)
@pytest.mark.parametrize("seed", range(40, 64))
def test_random_problem_stays_within_budget(seed: int) -> None:
    check_here(random_problem(seed), backward=(BACKWARD, ONE_BUFFER, TWO_BUFFERS)[seed % 3])


@pytest.mark.parametrize("keys", [140, 136])  # read one by one, and in tiles
@pytest.mark.parametrize(
    "more",
    [{}, {"mask": "bits"}, {"band_hi": 20}, {"batch": 2, "bias": (1, 1, 100)}, {"softcap": 2.0, "dropout_p": 0.2}],
    ids=["plain", "bits", "band", "shared", "capped"],
)
def test_nothing_is_read_of_a_bias_past_the_last_key(more: dict[str, Any], keys: int) -> None:
    check_here(replace(Problem(seqlen_k=keys, bias=(1, 2, 100), bias_spacing=2), **more))


@pytest.mark.parametrize("backward", [ONE_BUFFER, TWO_BUFFERS], ids=["one buffer", "two buffers"])
def test_other_numbers_of_buffers_give_the_same(backward: AmpereBackward) -> None:
    problem = Problem(
        heads=4, kv_heads=2, seqlen_q=150, seqlen_k=170, band_lo=-60, band_hi=30, mask="bits", mask_heads=4
    )
    check_here(problem, backward=backward)


@pytest.mark.parametrize("forward", [replace(FORWARD, held=True), AHEAD], ids=["held", "ahead"])
@pytest.mark.parametrize("keys", [40, 64, 96, 200])
def test_products_of_the_next_step_beside_the_weights_of_one(keys: int, forward: AmpereForward) -> None:
    """With no steps that all rows see whole, and with even and odd numbers of them."""
    check_here(Problem(heads=2, kv_heads=1, seqlen_q=70, seqlen_k=keys, head_dim=40), forward)


@pytest.mark.parametrize("seed", range(40, 46))
def test_masks_beside_products_of_the_next_step(seed: int) -> None:
    check_here(random_problem(seed), AHEAD)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", BIASED)
def test_biases_with_queries(name: str, stages: int) -> None:
    """Tiles of a bias come by copies, and its gradient from a kernel of its own where it is shared."""
    backward = (ONE_BUFFER, TWO_BUFFERS)[stages - 1]
    check_here(BIASED[name], backward=replace(backward, shared_bias=replace(SHARED_BIAS, stages=stages)))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("backward", [ONE_BUFFER, TWO_BUFFERS], ids=["one buffer", "two buffers"])
@pytest.mark.parametrize("name", SUMMED)
def test_gradients_of_biases_are_added_up_in_memory(
    name: str, backward: AmpereBackward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel for this gradient alone is not launched."""
    if SUMMED[name].batch > 0:
        monkeypatch.delattr(launcher_of(BACKWARD), "broadcast_dbias")
    check_here(SUMMED[name], backward=replace(backward, bias_sums=1))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("band", [(-UNBOUNDED, UNBOUNDED), (-UNBOUNDED, 20), (-70, 5), (30, UNBOUNDED)], ids=str)
def test_dq_is_added_up_in_order(band: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run one after the other here, so that the turn of each one has come when it asks."""
    turns: dict[int, int] = {}

    def await_turn(counter: Any, turn: Any) -> None:
        assert turns.setdefault(int(counter.handle.data[0]), 0) == int(turn.handle.data[0])

    def pass_turn(counter: Any) -> None:
        turns[int(counter.handle.data[0])] += 1

    kernel = launcher_of(BACKWARD).backward_kernel.fn.__globals__
    monkeypatch.setitem(kernel, "await_turn", await_turn)
    monkeypatch.setitem(kernel, "pass_turn", pass_turn)
    problem = Problem(
        batch=2, heads=4, kv_heads=2, seqlen_q=250, seqlen_k=300, band_lo=band[0], band_hi=band[1], deterministic=True
    )
    check_here(problem)
    assert max(turns.values()) > 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(80, 96), (96, 40), (160, 32), (24, 192), (128, 112)])
def test_widths_that_are_no_powers_of_two(head_dim: int, value_dim: int) -> None:
    check_here(
        Problem(heads=1, kv_heads=1, seqlen_q=70, seqlen_k=90, head_dim=head_dim, value_dim=value_dim, band_hi=20)
    )


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("forward", "backward"), ROWS)
def test_row_stays_within_budget(forward: Row, backward: Row) -> None:
    assert isinstance(forward, Row)
    check_here(of_row(forward, pairwise=False), forward.config, backward.config)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("forward", "backward"), ROWS)
def test_narrow_keys_beside_wide_values(forward: Row, backward: Row) -> None:
    """All threads copy more narrow rows at once than a step has."""
    problem = Problem(heads=1, kv_heads=1, seqlen_q=70, seqlen_k=90, head_dim=8, value_dim=backward.dim, band_hi=20)
    check_here(problem, forward.config, backward.config)


def test_heads_are_computed_a_few_at_a_time() -> None:
    problem = Problem(batch=2, heads=10, kv_heads=5, seqlen_q=150, seqlen_k=170, band_hi=30)
    check_here(problem)


def test_programs_share_the_keys_of_few_queries() -> None:
    problem = Problem(batch=1, heads=2, seqlen_q=40, seqlen_k=1500, mask="bits", density=0.1, seed=3)
    check_here(problem, AmpereForward(64, 32, 4, per_sm=2))


def test_packed_keys_of_a_dynamic_mask_equal_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that no key lies in are not written, and hold NaN."""
    forward, backward = launcher_of(FORWARD), launcher_of(BACKWARD)
    monkeypatch.setattr(packed_attention.launch_packing, "workspace", packed_attention.workspace_of_nan)
    monkeypatch.setattr(packed_attention, "run_forward", lambda *given: forward.forward(*given, FORWARD))
    monkeypatch.setattr(packed_attention, "run_backward", lambda *given: backward.backward(*given, BACKWARD))
    case = packed_attention.Case(200, 40, 128, 2, 2)
    call, keep, grad_out = packed_attention.draw(case, 4, 2, 2, 0)
    call = call._replace(query=call.query.bfloat16(), key=call.key.bfloat16(), value=call.value.bfloat16())
    cut = packed_attention.epochs(case.seqlen, case.seqlen, case.at_most, 0, case.length)
    hidden, grad_hidden = packed_attention.hide_unseen(call, keep, grad_out.bfloat16())
    found = packed_attention.compute(hidden, packed_attention.packed(cut, 2, 2, 1), grad_hidden)
    for name, exact in packed_attention.expected(call, keep, grad_out.bfloat16()).items():
        assert oracle.error(found[name], exact) < 2e-2, name


def test_a_product_that_does_not_wait_for_its_copy_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(COPIES), "wait_group", lambda self, number: None)
    with pytest.raises(AssertionError):
        check_here(Problem(heads=1, kv_heads=1, seqlen_q=40, seqlen_k=40))
