"""The kernels of mma.sync and cp.async on a GPU, which any from SM 8.0 on runs: named and random problems, and each configuration.

With `TRITON_OVERRIDE_ARCH=sm80` Triton writes the instructions of SM 8.0 for them on newer GPUs too.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from dmattn_ops.call import UNBOUNDED  # noqa: E402
from dmattn_ops.choice import config  # noqa: E402
from dmattn_ops.choice.configurations import AmpereBackward, AmpereForward  # noqa: E402
from dmattn_ops.kernels.ampere.backward import launch as launcher  # noqa: E402
from tests.interpreter.cases import BIASED, NASTY, SUMMED, of_row, random_problem, row_id  # noqa: E402
from tests.interpreter.problems import Problem, build, check, in_16_bits, run  # noqa: E402

DIMS = (8, 32, 40, 64, 80, 96, 128, 160, 192, 256)
DTYPES = (torch.float16, torch.bfloat16)


def configurations(problem: Problem, sm: int) -> tuple[AmpereForward, AmpereBackward]:
    """Return the configurations for a problem on an architecture."""
    width = max(problem.head_dim, problem.value_dim)
    rows = (
        next(row for row in of if row.sm == sm and row.dim >= width)
        for of in (config.AMPERE_FORWARD, config.AMPERE_BACKWARD)
    )
    forward, backward = (row.config for row in rows)
    assert isinstance(forward, AmpereForward) and isinstance(backward, AmpereBackward)
    return forward, backward


@pytest.mark.parametrize("sm", [80, 89])
@pytest.mark.parametrize("name", NASTY)
def test_nasty_case_stays_within_budget(name: str, sm: int) -> None:
    problem = in_16_bits(NASTY[name])
    check(problem, "cuda", *configurations(problem, sm))


@pytest.mark.parametrize("sm", [80, 89])
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize("name", BIASED)
def test_bias_with_queries_stays_within_budget(name: str, dim: int, sm: int) -> None:
    problem = replace(in_16_bits(BIASED[name]), head_dim=dim, value_dim=dim, scale=dim**-0.5)
    check(problem, "cuda", *configurations(problem, sm))


def narrow(problem: Problem, dim: int, dtype: torch.dtype) -> tuple[Problem, AmpereForward, AmpereBackward]:
    """Return a problem with narrow heads, and configurations for it that add its bias's gradient up in memory."""
    problem = replace(in_16_bits(replace(problem, dtype=dtype)), head_dim=dim, value_dim=dim, scale=dim**-0.5)
    forward, backward = configurations(problem, 80)
    assert forward.narrow_bias is not None and backward.narrow_bias is not None
    return problem, forward.narrow_bias, replace(backward.narrow_bias, bias_sums=1)


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [8, 16, 32])
@pytest.mark.parametrize("name", SUMMED)
def test_gradients_of_biases_are_added_up_in_memory(
    name: str, dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, *made = narrow(SUMMED[name], dim, dtype)
    if problem.batch > 0:
        monkeypatch.delattr(launcher, "broadcast_dbias")
    check(problem, "cuda", *made)


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("mask", ["none", "keys", "bits"])
def test_repeated_launches_differ_by_the_order_of_the_sums_alone(mask: str) -> None:
    """The sums begin at 0 each time; dk and dv, which nothing is added to in memory, are the same bit for bit."""
    problem = Problem(batch=150, heads=4, seqlen_q=190, seqlen_k=200, bias=(1, 4, 190), mask=mask, mask_batch=150)
    problem, *made = narrow(problem, 32, torch.bfloat16)
    check(problem, "cuda", *made)
    case = build(problem)
    first = run(problem, case, "cuda", *made)
    for _ in range(20):
        again = run(problem, case, "cuda", *made)
        assert all(torch.equal(again[name], first[name]) for name in ("out", "lse", "dk", "dv"))
        for name in ("dq", "dbias"):
            assert (again[name].float() - first[name].float()).norm() < 1e-2 * first[name].float().norm(), name


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("band", [(-UNBOUNDED, UNBOUNDED), (-UNBOUNDED, 100), (-300, 20)], ids=str)
def test_deterministic_launches_are_the_same_bit_for_bit(band: tuple[int, int], dim: int) -> None:
    problem = Problem(
        batch=2, heads=8, kv_heads=4, seqlen_q=2000, seqlen_k=2100, head_dim=dim, value_dim=dim, dtype=torch.bfloat16,
        band_lo=band[0], band_hi=band[1], scale=dim**-0.5, deterministic=True,
    )  # fmt: skip
    made = configurations(problem, 80)
    check(problem, "cuda", *made)
    case = build(problem)
    first = run(problem, case, "cuda", *made)
    for _ in range(30):
        again = run(problem, case, "cuda", *made)
        assert all(torch.equal(again[name], first[name]) for name in ("out", "lse", "dq", "dk", "dv"))


@pytest.mark.parametrize("seed", range(60))
def test_random_problem_stays_within_budget(seed: int) -> None:
    problem = in_16_bits(random_problem(seed))
    check(problem, "cuda", *configurations(problem, (80, 89)[seed % 2]))


@pytest.mark.parametrize("sm", [80, 89])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_element_mask_at_every_dimension(dim: int, dtype: torch.dtype, sm: int) -> None:
    problem = Problem(
        batch=2, heads=4, seqlen_q=257, seqlen_k=300, head_dim=dim, value_dim=dim, dtype=dtype, mask="bits",
        mask_heads=4, scale=dim**-0.5, transposed=True, grad_lse=True,
    )  # fmt: skip
    check(problem, "cuda", *configurations(problem, sm))


@pytest.mark.parametrize("sm", [80, 89])
@pytest.mark.parametrize("dim", DIMS)
def test_biased_band_at_every_dimension(dim: int, sm: int) -> None:
    problem = Problem(
        seqlen_q=300, seqlen_k=400, head_dim=dim, value_dim=DIMS[-1 - DIMS.index(dim)], dtype=torch.bfloat16,
        band_hi=100, bias=(1, 1, 300), softcap=20.0, scale=dim**-0.5, dropout_p=0.2,
    )  # fmt: skip
    check(problem, "cuda", *configurations(problem, sm))


@pytest.mark.parametrize(
    "index", range(len(config.AMPERE_BACKWARD)), ids=lambda index: row_id(config.AMPERE_BACKWARD[index])
)
def test_row_stays_within_budget(index: int) -> None:
    row = config.AMPERE_BACKWARD[index]
    problem = of_row(row, pairwise=False)
    check(problem, "cuda", *configurations(problem, row.sm))


@pytest.mark.parametrize("mask", ["none", "bits", "hidden"])
def test_repeated_launches_differ_by_the_order_of_the_sums_of_dq_alone(mask: str) -> None:
    problem = Problem(
        batch=2, heads=8, kv_heads=2, seqlen_q=1000, seqlen_k=1100, head_dim=128, value_dim=128, mask=mask,
        dtype=torch.bfloat16, band_hi=100, scale=128**-0.5,
    )  # fmt: skip
    case, made = build(problem), configurations(problem, 80)
    first = run(problem, case, "cuda", *made)
    for _ in range(20):
        again = run(problem, case, "cuda", *made)
        for name in ("out", "lse", "dk", "dv"):
            assert torch.equal(again[name], first[name]), name
        assert (again["dq"].float() - first["dq"].float()).norm() < 1e-2 * first["dq"].float().norm()


def test_dispatch_takes_these_kernels_on_their_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    import dmattn_ops

    monkeypatch.setenv("DMATTN_ARCH", "8.0")
    query, key, value = (
        torch.randn(1, 300, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    said = str(dmattn_ops.explain(query, key, value, is_causal=True))
    assert said.count("ampere") >= 2
    out = dmattn_ops.flash_dmattn_func(query, key, value, is_causal=True)
    grads = torch.autograd.grad(out.float().square().sum(), (query, key, value))
    heads_first = (each.transpose(1, 2) for each in (query, key, value))
    other = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
    others = torch.autograd.grad(other.float().square().sum(), (query, key, value))
    for ours, theirs in zip((out, *grads), (other, *others), strict=True):
        assert (ours.float() - theirs.float()).norm() < 1e-2 * theirs.float().norm()
