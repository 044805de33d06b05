"""Random problems over everything that the public functions take, against the float64 oracle (CPU kernels)."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import dmattn_ops
from dmattn_ops.call import Call, Saved
from dmattn_ops.dispatch import run as dispatch
from dmattn_ops.kernels import native, reference
from dmattn_ops.testing import Problem, check, draw, inputs, oracle, shrink
from dmattn_ops.testing.check import Results
from dmattn_ops.testing.combinations import (
    BLOCKS,
    COMBINATIONS,
    OF_A_BLOCK,
    Even,
    Random,
    block_of,
    combinations,
    draw_kernel,
)

CASES = int(os.environ.get("DMATTN_FUZZ_CASES", "400"))


@pytest.mark.parametrize("seed", range(CASES))
def test_random_problem_stays_within_budget(seed: int) -> None:
    check(draw(seed))


HIDDEN = Problem(
    seed=2, heads=2, seqlen_q=30, seqlen_k=40, mask="keys", bias=True, softcap=5.0, is_causal=True, lse_grad=True,
    sink="float32", causal_from="bottom_right", poison="nan",
)  # fmt: skip


@pytest.mark.parametrize("poison", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_what_is_hidden_reaches_nothing(monkeypatch: pytest.MonkeyPatch, kernels: str, poison: str) -> None:
    if kernels == "reference" or native.available():
        monkeypatch.setattr(dispatch, "cpu_kernels", lambda: kernels)
    for problem in (HIDDEN, replace(HIDDEN, mask="rows", seqlen_q=50), replace(HIDDEN, mask="none")):
        check(replace(problem, poison=poison))
    check(replace(HIDDEN, variant="varlen", batch=3, mask_shape="h", bias_shape="h", poison=poison))


def test_the_check_notices_hidden_values_that_reach_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "cpu_kernels", lambda: "reference")
    monkeypatch.setattr(reference, "_product", torch.matmul)
    check(replace(HIDDEN, poison=""))
    with pytest.raises(AssertionError):
        check(HIDDEN)


@pytest.mark.parametrize("seed", [3, 11])
def test_a_seed_always_draws_the_same_problem(seed: int) -> None:
    assert draw(seed) == draw(seed)


def test_problems_try_everything_that_a_call_may_ask_for() -> None:
    drawn = [draw(seed) for seed in range(CASES)]
    for name in (
        "mask",
        "documents",
        "intervals",
        "bias",
        "softcap",
        "dropout_p",
        "sink",
        "maximum",
        "prepared",
        "promise",
    ):
        tried = {getattr(problem, name) for problem in drawn}
        assert len(tried) > 1, name
    assert {problem.intervals for problem in drawn} == {"", "random", "lives", "ends", "hidden"}
    assert {problem.rows for problem in drawn} == {"", "one", "overlapping", "far"}
    assert {problem.poison for problem in drawn} == {"", "nan", "inf", "-inf"}
    assert {problem.extreme for problem in drawn} == {"", "rows", "keys", "all"}
    assert len({problem.bias_value for problem in drawn}) > 5 and len({problem.steep for problem in drawn}) > 4
    assert {draw(seed).instructions for seed in range(0, 1000, 50)} == {"", "avx2", "default"}
    assert {draw(seed, "cuda").instructions for seed in range(0, 1000, 50)} == {""}


@pytest.mark.parametrize("rows", ["one", "overlapping", "far"])
def test_rows_lie_as_a_problem_says_and_its_shape_stays(rows: str) -> None:
    tensor = torch.randn(2, 5, 3, 16)
    placed = inputs.placed(tensor, rows)
    assert placed.shape == tensor.shape and placed.stride(3) == 1
    if rows == "one":
        assert placed.stride(1) == 0
    elif rows == "overlapping":
        assert placed.stride(2) < 16 and not torch.equal(placed, tensor)
    else:
        assert torch.equal(placed, tensor) and 4 * placed.stride(1) > 1 << 31


@pytest.mark.parametrize("shape", [(2, 3000, 4, 128), (3, 1, 2, 16), (1, 1, 5, 8), (2, 2, 1, 1024)])
def test_rows_that_lie_far_apart_take_little_more_memory_than_they_must(shape: tuple[int, ...]) -> None:
    placed = inputs.placed(torch.zeros(shape), "far")
    last = sum((size - 1) * stride for size, stride in zip(shape, placed.stride(), strict=True))
    assert 1 << 31 < last < 1.01 * (1 << 31) and placed.untyped_storage().nbytes() < 1.01 * (4 << 31)


def test_the_check_notices_probabilities_that_exceed_1_in_rows_of_a_large_bias(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without `lse_tail` the backward knows the logarithm of a row's sum to a multiple of 64 only."""
    problem = Problem(
        seqlen_q=64, seqlen_k=64, heads=2, bias=True, bias_float32=True, extreme="rows", bias_value=-1e9
    )  # fmt: skip
    check(problem)
    correct = native.backward

    def without_tail(call: Call, saved: Saved, *rest: object) -> None:
        correct(call, saved._replace(lse_tail=torch.zeros_like(saved.lse_tail)), *rest)

    monkeypatch.setattr(native, "backward", without_tail)
    with pytest.raises(AssertionError, match="over the budget"):
        check(problem)


@pytest.mark.parametrize("result", range(3))
def test_the_check_notices_a_small_error(result: int, monkeypatch: pytest.MonkeyPatch) -> None:
    correct = dmattn_ops.flash_dmattn_func

    def slightly_wrong(*args: object, **keywords: object) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = list(correct(*args, **keywords))
        outputs[result] = outputs[result] * 1.001
        return tuple(outputs)

    monkeypatch.setattr(dmattn_ops, "flash_dmattn_func", slightly_wrong)
    with pytest.raises(AssertionError, match="over the budget"):
        check(Problem(seqlen_q=64, seqlen_k=64, heads=2, maximum=True))


def multiply_the_gradient_of_query(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    correct = dmattn_ops.flash_dmattn_func

    def wrong(query: torch.Tensor, *rest: object, **keywords: object) -> object:
        return correct(factor * query - (factor - 1) * query.detach(), *rest, **keywords)

    monkeypatch.setattr(dmattn_ops, "flash_dmattn_func", wrong)


def test_a_gradient_that_cancels_gets_the_room_of_its_rounding_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few keys that have all the weight, dS is the small difference of dP and a delta that out's dtype rounds."""
    usual = Problem(
        seed=103534, dtype="bfloat16", seqlen_q=2, seqlen_k=256, dim=233, dim_v=128, bias=True, bias_shape="bhq",
        is_causal=True, causal_from="top_left",
    )  # fmt: skip
    problem = replace(usual, magnitude=3.0)
    assert check(problem) and not check(usual)
    multiply_the_gradient_of_query(monkeypatch, 10)
    with pytest.raises(AssertionError, match="with the rounding of out"):
        check(problem)


DROPPED = Problem(dtype="float16", seqlen_q=17, seqlen_k=64, magnitude=3.0, bias=True, dropout_p=1.0, lse_grad=True)
BEYOND = replace(DROPPED, bias_float32=True, extreme="rows", bias_value=1e9)  # what float16 has


@pytest.mark.parametrize("problem", [BEYOND, replace(BEYOND, bias_value=-1e9)], ids=["above", "below"])
def test_scores_beyond_a_dtype_are_noticed_where_all_weights_are_dropped(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out is 0 then, in any precision. The gradients of lse are as good as float32 scores are: to multiples of 64."""
    check(problem)
    multiply_the_gradient_of_query(monkeypatch, 5)
    with pytest.raises(AssertionError, match=r"dq: error .* over the budget"):
        check(problem)


def test_dropped_weights_alone_make_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    check(DROPPED)
    multiply_the_gradient_of_query(monkeypatch, 1.02)
    with pytest.raises(AssertionError, match=r"dq: error .* over the budget"):
        check(DROPPED)


def test_no_rounding_makes_room_for_what_is_not_finite() -> None:
    right = dict.fromkeys(("out", "lse", "dq"), torch.ones(2, dtype=torch.float64))
    wrong = {**right, "dq": torch.tensor([1.0, math.nan])}
    assert not oracle.compare(Problem(), right, right, right, lambda: {"dq": math.inf}, list)
    with pytest.raises(AssertionError, match="dq: error inf"):
        oracle.compare(Problem(), wrong, right, right, lambda: {"dq": math.inf}, list)


@pytest.mark.parametrize(("truth", "accepted"), [(1e-22, True), (1e-5, False)])
def test_what_a_dtype_cannot_hold_is_no_error(truth: float, accepted: bool) -> None:
    expected = {"dsink": torch.tensor([truth, -truth], dtype=torch.float64)}
    eager = {"dsink": expected["dsink"].float()}
    found = {"dsink": torch.zeros(2, dtype=torch.float16)}
    problem = Problem(dtype="float16")
    if accepted:
        assert not oracle.compare(problem, found, expected, eager, lambda: {"dsink": 0.0}, list)
    else:
        with pytest.raises(AssertionError, match="dsink: error 1 over the budget"):
            oracle.compare(problem, found, expected, eager, lambda: {"dsink": 0.0}, list)


@pytest.mark.parametrize(
    "problem",
    [
        Problem(
            seed=90823, variant="varlen", dtype="float16", batch=1, heads=4, heads_k=1, seqlen_q=144, seqlen_k=80, dim=256,
            dim_v=256, mask="random", mask_shape="k", left=122, softmax_scale=2**-8, sink="own", magnitude=3.0, steep=100.0,
        ),
        Problem(
            seed=403452, dtype="float32", batch=1, heads=4, heads_k=1, seqlen_q=8, seqlen_k=128, dim=32, dim_v=16,
            softmax_scale=1000.0, sink="float32", magnitude=0.1,
        ),
    ],
    ids=["1e-22 in float16", "4e-45 in float32"],
)  # fmt: skip
def test_the_gradient_of_a_sink_too_small_for_its_dtype(problem: Problem) -> None:
    check(problem)


FEW = {"seqlen_q": 22, "heads": 1, "heads_k": 1}
LARGE = {
    "fp32 tells apart what bf16 cannot": Problem(
        seed=15725, dtype="bfloat16", seqlen_k=2368, dim=160, dim_v=16, bias=True, bias_shape="bhq", softmax_scale=0.3,
        magnitude=3.0, extreme="keys", bias_value=1e9, **FEW,
    ),
    "a scale of 100": Problem(
        seed=806148, seqlen_q=153, seqlen_k=307, heads=1, heads_k=1, dim=256, dim_v=16, softmax_scale=100.0,
    ),
    "a fused operation rounds once": Problem(
        seed=501444, variant="varlen", batch=2, heads=12, heads_k=3, seqlen_q=32, seqlen_k=1913, dim=128, dim_v=128,
        layout="expanded", mask="block", mask_shape="", mask_dtype="uint8", bias=True, bias_shape="k", bias_float32=True,
        sink="float32", rows="one", steep=1e9, place="threads",
    ),
}  # fmt: skip


@pytest.mark.parametrize("problem", LARGE.values(), ids=LARGE.keys())
def test_keys_that_float32_cannot_tell_apart_share_a_row_as_any_rounding_may(problem: Problem) -> None:
    """All were over the budget: eager in the dtype of the inputs was nearer to the truth by chance."""

    def wrong(call: Callable[[], Results]) -> Results:
        results = call()
        return {**results, "dv": 100 * results["dv"]}

    check(problem)
    with pytest.raises(AssertionError, match=r"dv: error .* over the budget"):
        check(problem, run=wrong)


def test_a_gradient_beyond_its_dtype_is_infinite_and_its_sign_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one key under a scale of 1000, whose gradient is 80,000: float16 ends at 65,504."""
    problem = Problem(
        seed=10419, dtype="float16", heads=4, heads_k=1, seqlen_q=257, seqlen_k=1, dim=16, dim_v=16, softmax_scale=1000.0,
        lse_grad=True,
    )  # fmt: skip
    found: list[Results] = []

    def kept(call: Callable[[], Results]) -> Results:
        found.append(call())
        return found[-1]

    check(problem, run=kept)
    assert found[0]["dk"].isinf().any()
    for wrong in (lambda of: -of, lambda of: of.clamp(-3e4, 3e4), lambda of: of.masked_fill(of.isinf(), math.nan)):
        with pytest.raises(AssertionError, match="dk: error"):
            check(problem, run=lambda call, wrong=wrong: {**call(), "dk": wrong(found[0]["dk"])})


@pytest.mark.parametrize("name", ["lse", "row_max"])
def test_a_score_that_cancels_may_be_off_by_the_rounding_of_its_terms_and_no_more(name: str) -> None:
    """A product and a bias of about 1 that leave 0.004: half a unit of their last place is much of that."""
    problem = Problem(
        seed=502001, variant="qkvpacked", heads=2, heads_k=2, seqlen_q=1, seqlen_k=1, dim=40, dim_v=40, documents=True,
        intervals="hidden", intervals_shape="bh", bias=True, bias_shape="bq", is_causal=True, right=250, sink="own",
        maximum=True, layout="sliced", mask_shape="k", mask_dtype="int32", nan_bias=True,
    )  # fmt: skip

    def moved(by: float) -> Callable[[Callable[[], Results]], Results]:
        def run(call: Callable[[], Results]) -> Results:
            results = call()
            return {**results, name: results[name] + by}

        return run

    check(problem, run=moved(0.0))
    check(problem, run=moved(2e-7))
    with pytest.raises(AssertionError, match=f"{name}: error"):
        check(problem, run=moved(1e-5))


def test_shrink_keeps_what_makes_a_problem_fail() -> None:
    problem = Problem(
        seed=5, batch=3, heads=4, heads_k=2, seqlen_q=200, seqlen_k=100, softcap=5.0, is_causal=True, bias=True
    )
    small = shrink(problem, lambda candidate: candidate.softcap > 0 and candidate.seqlen_k >= 20)
    assert small == Problem(seed=5, seqlen_k=25, softcap=5.0, seqlen_q=small.seqlen_q) and small.seqlen_q <= 8


def test_a_shrunk_problem_has_a_bias_of_finite_numbers() -> None:
    """A float32 bias of 1e9 is infinite in float16, whatever else a problem asks for."""
    problem = replace(BEYOND, seed=5, seqlen_q=64, softcap=5.0)

    def fails(candidate: Problem) -> bool:
        bias = inputs.make_inputs(candidate, "cpu").bias
        return bias is not None and not (bias.abs() < 100).all()

    assert shrink(problem, fails) == replace(
        BEYOND, seed=5, seqlen_q=4, seqlen_k=4, lse_grad=False, dropout_p=0.0, magnitude=1.0
    )
    ordinary = replace(problem, bias_value=1e4)
    assert shrink(ordinary, fails).bias_float32 is False


def test_the_combinations_bring_all_pairs_together_that_a_call_may_have() -> None:
    tried = set().union(*(kernel.pairs() for kernel in combinations(0)))
    random = Even(20261123)
    legal = set().union(*(draw_kernel(random, True).pairs() for _ in range(3000)))
    assert legal <= tried and len(legal) > 3000, legal - tried
    listed = {1, 8, 16, 32, 40, 64, 80, 96, 128, 144, 160, 192, 256, 320, 512, 1024}
    assert listed <= {kernel.dim for kernel in combinations(0)}
    assert len(set(combinations(0))) == len(combinations(0)) == COMBINATIONS
    assert sum(all(kernel.hopper) for kernel in combinations(0)) > COMBINATIONS // 4


def test_a_kernel_of_every_seed_can_be_any_that_a_call_may_ask_for() -> None:
    """Pairs among common and rare draws alike: nothing is left out of the combinations because it is rare."""
    random = Random(5)
    common = set().union(*(draw_kernel(random, True).pairs() for _ in range(3000)))
    assert common <= set().union(*(kernel.pairs() for kernel in combinations(0)))


def test_every_run_takes_the_same_combinations_first_and_longer_ones_take_new_triples() -> None:
    assert [block_of(seed) for seed in (0, 9_999, 100_000, 509_999)] == [0] * 4
    assert block_of(10_000) == 1 and block_of(95_000) == 9 and block_of(110_000) == BLOCKS + 1
    first, later = combinations(0), combinations(1)
    known = set().union(*(kernel.triples() for kernel in first))
    assert len(set(later)) == COMBINATIONS
    assert len(set().union(*(kernel.triples() for kernel in later)) - known) > 1000
    for seed in (3, 100_003, 500_003, 3 + COMBINATIONS):
        assert draw(seed, "cuda").dim == first[3].dim
    assert draw(OF_A_BLOCK + 3, "cuda").dim == later[3].dim


GPU_DRAWN = {
    "variant": {"dense", "varlen", "qkvpacked"}, "dtype": {"float32", "float16", "bfloat16"}, "batch": {0, 1, 2, 3},
    "heads_k": {1, 2, 3}, "layout": {"bshd", "bhsd", "sliced", "strided", "expanded"},
    "mask": {"", "random", "block", "rows", "keys", "none"}, "mask_shape": {"bhq", "bq", "q", "hq", "bkq", "bh", "b", "k", "", "h"},
    "mask_dtype": {"bool", "uint8", "int64", "int32"}, "prepared": {True, False}, "documents": {True, False},
    "intervals": {"", "random", "lives", "ends", "hidden"}, "intervals_shape": {"bh", "b", "k", ""}, "promise": {True, False},
    "bias": {True, False}, "bias_shape": {"bhq", "bq", "q", "hq", "bkq", "bh", "b", "k", "", "h"}, "bias_float32": {True, False},
    "nan_bias": {True, False}, "is_causal": {True, False}, "causal_from": {"top_left", "bottom_right"},
    "softcap": {0.0, 5.0, 30.0}, "dropout_p": {0.0, 0.1, 0.5, 1.0}, "deterministic": {True, False},
    "sink": {"", "own", "float32"}, "maximum": {True, False}, "magnitude": {1.0, 0.1, 3.0}, "lse_grad": {True, False},
    "place": {"", "stream", "threads", "backward thread"}, "rows": {"", "one", "overlapping", "far"},
    "extreme": {"", "rows", "keys", "all"},
}  # fmt: skip


def test_problems_for_a_gpu_share_kernels_and_still_take_every_value() -> None:
    drawn = [draw(seed, "cuda") for seed in range(100_000, 100_000 + 12 * COMBINATIONS)]
    assert len(set(drawn)) == len(drawn)
    for name, values in GPU_DRAWN.items():
        assert {getattr(problem, name) for problem in drawn} == values, name
    assert {0, 1, 2, 17, 63, 64, 127, 128, 129, 256} <= {problem.seqlen_q for problem in drawn}
    assert {0, 1, 3, 65, 128, 255} <= {problem.seqlen_k for problem in drawn}
    assert {(p.is_causal, p.left is None, p.right is None) for p in drawn} >= {
        (causal, left, right) for causal in (True, False) for left in (True, False) for right in (True, False)
    }
    assert {p.heads // p.heads_k for p in drawn} == {1, 2, 4} and max(p.seqlen_k for p in drawn) > 2000
    assert {round(p.softmax_scale, 3) for p in drawn if p.softmax_scale} >= {0.3, 100.0, 1000.0}
    alike: dict[int, set] = {}
    for problem in drawn:
        decides = (problem.variant, problem.dtype, problem.dim, problem.dim_v, problem.sink, problem.dropout_p > 0)
        alike.setdefault(problem.seed % OF_A_BLOCK % COMBINATIONS, set()).add(decides)
    assert len(alike) == COMBINATIONS and all(len(kinds) == 1 for kinds in alike.values())


def test_a_printed_problem_reproduces_from_the_command_line() -> None:
    line = repr(Problem(seqlen_q=33, seqlen_k=65, is_causal=True))
    command = [sys.executable, "-m", "dmattn_ops.testing", "--device", "cpu", "--problem", line]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "1 passed, 0 failed" in done.stdout, done.stdout + done.stderr
