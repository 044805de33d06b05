"""The gradient of a bias with queries that batches or heads share, as the SM 9.0 kernel writes it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.architecture import skip_file_without_hopper

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nan_in_new_memory")]
skip_file_without_hopper()

from dmattn_ops import flash_dmattn_func  # noqa: E402
from dmattn_ops.choice import config  # noqa: E402
from dmattn_ops.kernels.ampere.backward import launch as of_sm_80  # noqa: E402
from dmattn_ops.kernels.hopper.dbias import launch as shared_bias  # noqa: E402
from dmattn_ops.testing import check  # noqa: E402
from dmattn_ops.testing.problem import Problem  # noqa: E402
from tests.support import large_rows  # noqa: E402

SHAPES = ["q", "bq", "hq", "bkq"]  # dimensions of a bias that are not broadcast; "k" stands for Hkv heads
GROUPED = Problem(
    variant="dense", dtype="bfloat16", batch=2, heads=4, heads_k=2, seqlen_q=333, seqlen_k=517, bias=True, lse_grad=True
)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch, taken: list[str]) -> list[shared_bias.Plan]:
    """How the SM 9.0 kernel used shared memory at each of its launches that were no repetitions of a plan."""
    plans: list[shared_bias.Plan] = []
    plan_of = shared_bias.plan_of

    def noted(*arguments) -> shared_bias.Plan:
        plans.append(plan_of(*arguments))
        return plans[-1]

    monkeypatch.setattr(shared_bias, "plan_of", noted)
    return plans


def run(written: list[shared_bias.Plan], dim: int, **changes) -> None:
    """Compare one problem with the oracle, the third time from its plan, and see that the SM 9.0 kernel wrote dbias."""
    check(replace(GROUPED, **({"dim": dim, "dim_v": dim} | changes)), "cuda", repeats=3)
    assert written


@pytest.mark.parametrize("float32", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dim", [64, 128])
def test_every_broadcast_in_both_dtypes_and_with_a_float32_bias(
    written, dim: int, shape: str, dtype: str, float32: bool
) -> None:
    run(written, dim, dtype=dtype, bias_shape=shape, bias_float32=float32)


@pytest.mark.parametrize("batch", [2, 3, 4, 5, 9])
@pytest.mark.parametrize("dim", [64, 128])
def test_queries_of_few_members_stay_in_shared_memory_and_those_of_many_take_turns(
    written, dim: int, batch: int
) -> None:
    run(written, dim, batch=batch, bias_shape="hq")
    most = 2 if dim == 128 else 5
    assert {plan.resident for plan in written} == {batch <= most}


@pytest.mark.parametrize("dims", [(80, 80), (96, 96), (64, 128), (128, 64), (40, 120), (40, 8), (112, 96)])
@pytest.mark.parametrize("shape", ["hq", "q"])
def test_heads_of_other_widths(written, shape: str, dims: tuple[int, int]) -> None:
    run(written, dims[0], dim_v=dims[1], bias_shape=shape)


@pytest.mark.parametrize("dims", [(16, 8), (32, 32)])
def test_narrow_heads_with_a_bias_for_each_head_take_the_kernels_of_sm_80(written, dims: tuple[int, int]) -> None:
    check(replace(GROUPED, dim=dims[0], dim_v=dims[1], bias_shape="hq"), "cuda", repeats=3)
    assert not written


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("masked", [{}, {"mask": "random", "mask_shape": "bkq"}, {"mask": "keys", "mask_shape": "b"}])
def test_narrow_heads_of_many_batches_add_it_up_in_memory_unless_calls_are_deterministic(
    written, monkeypatch: pytest.MonkeyPatch, masked: dict[str, str], deterministic: bool
) -> None:
    """The first launches are recorded, and repeated from their plan."""
    decisions: list[bool] = []
    adds = of_sm_80._adds_to_bias
    monkeypatch.setattr(of_sm_80, "_adds_to_bias", lambda *given: decisions.append(adds(*given)) or decisions[-1])
    many = replace(GROUPED, batch=config.SUMMED_BATCHES, seqlen_q=133, seqlen_k=217)
    problem = replace(many, dim=32, dim_v=32, bias_shape="hq", deterministic=deterministic)
    check(replace(problem, **masked), "cuda", repeats=3)
    assert not any(decisions) if deterministic else decisions and all(decisions) and not written


@pytest.mark.parametrize(
    "lengths", [(2, 1), (2, 300), (300, 1), (63, 65), (128, 128), (129, 64), (640, 1024), (1025, 191)]
)
@pytest.mark.parametrize("shape", ["hq", "q"])
@pytest.mark.parametrize("dim", [64, 128])
def test_lengths_at_the_edges_of_blocks(written, dim: int, shape: str, lengths: tuple[int, int]) -> None:
    run(written, dim, bias_shape=shape, seqlen_q=lengths[0], seqlen_k=lengths[1])


@pytest.mark.parametrize("causal_from", ["top_left", "bottom_right"])
@pytest.mark.parametrize(("left", "right"), [(None, None), (90, 0), (70, 33), (None, 100), (0, None)])
@pytest.mark.parametrize("shape", ["hq", "bkq"])
def test_bands_with_nan_in_the_bias_of_pairs_that_no_query_sees(
    written, shape: str, left: int | None, right: int | None, causal_from: str
) -> None:
    for lengths in ((333, 517), (517, 333)):
        run(
            written, 128, bias_shape=shape, nan_bias=True, is_causal=left is None and right is None, left=left, right=right,
            causal_from=causal_from, seqlen_q=lengths[0], seqlen_k=lengths[1],
        )  # fmt: skip


@pytest.mark.parametrize(
    ("mask", "mask_shape"), [("random", "bkq"), ("rows", "bq"), ("block", "hq"), ("none", "bhq"), ("keys", "bk")]
)
@pytest.mark.parametrize("shape", ["hq", "q", "bkq"])
@pytest.mark.parametrize("dim", [64, 128])
def test_masks_with_nan_where_the_bias_is_hidden(written, dim: int, shape: str, mask: str, mask_shape: str) -> None:
    run(written, dim, bias_shape=shape, nan_bias=True, mask=mask, mask_shape=mask_shape, is_causal=True)
    run(
        written, dim, bias_shape=shape, nan_bias=True, mask=mask, mask_shape=mask_shape, bias_float32=True, seqlen_q=700
    )


@pytest.mark.parametrize("intervals", ["random", "lives", "hidden"])
@pytest.mark.parametrize("shape", ["hq", "q"])
@pytest.mark.parametrize("dim", [64, 128])
def test_intervals_of_keys(written, dim: int, shape: str, intervals: str) -> None:
    lengths = {"seqlen_q": 517, "seqlen_k": 517}
    run(written, dim, bias_shape=shape, intervals=intervals, intervals_shape="bh", **lengths)
    run(written, dim, bias_shape=shape, intervals=intervals, intervals_shape="b", is_causal=True, **lengths)


@pytest.mark.parametrize("shape", ["hq", "q"])
def test_documents(written, shape: str) -> None:
    run(written, 128, bias_shape=shape, documents=True, prepared=True, is_causal=True, seqlen_q=517, seqlen_k=517)


@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
@pytest.mark.parametrize("shape", ["hq", "q"])
@pytest.mark.parametrize("dim", [64, 128])
def test_dropout(written, dim: int, shape: str, dropout_p: float) -> None:
    run(written, dim, bias_shape=shape, dropout_p=dropout_p)
    run(written, dim, bias_shape=shape, dropout_p=dropout_p, mask="random", mask_shape="bkq", is_causal=True)


@pytest.mark.parametrize("mask", ["", "block"])
def test_a_deterministic_call_repeats_bit_for_bit(written, mask: str) -> None:
    run(written, 128, bias_shape="q", deterministic=True, mask=mask, mask_shape="bkq")


@pytest.mark.parametrize("scale", [-0.2, 1e-3, 3.0])
def test_other_scales(written, scale: float) -> None:
    run(written, 128, bias_shape="hq", softmax_scale=scale)


@pytest.mark.parametrize("value", [-1e4, -1e9, large_rows.LOWEST, 1e9, 1e29])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_large_finite_scores(written, dim: int, dtype: torch.dtype, value: float) -> None:
    """One bias for two heads: the rows of large scores take the exact statistics of all."""
    rows = large_rows.draw("cuda", dtype, dim, bias="rows", value=value)
    for _ in range(3):
        large_rows.check(rows, large_rows.results(rows))
    assert written


@pytest.mark.parametrize("batch", [2, 4])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_larger_call_agrees_with_the_portable_kernel_and_repeats_bit_for_bit(
    written, monkeypatch: pytest.MonkeyPatch, dim: int, batch: int
) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(batch, 1500, 8, dim, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    bias = torch.randn(1, 8, 1500, 1500, device="cuda").bfloat16().requires_grad_()
    grad_out = torch.randn_like(leaves[0])
    recompute, recomputed = shared_bias.recompute_dbias, []
    monkeypatch.setattr(shared_bias, "recompute_dbias", lambda *given: recomputed.append(recompute(*given)))

    def gradient() -> torch.Tensor:
        out = flash_dmattn_func(*leaves, None, bias, is_causal=True)
        return torch.autograd.grad(out, bias, grad_out)[0]

    first = gradient()
    for _ in range(20):
        assert torch.equal(gradient(), first)
    assert written and not recomputed
    monkeypatch.setattr(shared_bias, "refusals", lambda call: ["for this test"])
    monkeypatch.setattr("dmattn_ops.launching.plans._plans", {})
    written.clear()
    portable = gradient()
    assert recomputed and not written
    assert (first.float() - portable.float()).norm() <= 2e-3 * portable.float().norm()


def test_wider_heads_are_left_to_the_portable_kernel(written, taken) -> None:
    check(replace(GROUPED, dim=192, dim_v=192, bias_shape="hq"), "cuda")
    assert taken[1] == "hopper256" and not written
    assert config.HOPPER_BACKWARD_256.config.dbias is not None
