"""NaN and infinities in what is hidden reach nothing, in every family of kernels on a GPU, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dmattn_ops import flash_dmattn_func, prepare_mask
from dmattn_ops.testing import Problem, check
from tests.support.architecture import needs_hopper

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

POISONS = ("nan", "inf", "-inf")
# More queries than keys under a causal band from the bottom right: the first queries see nothing.
BASE = Problem(
    seed=51, dtype="bfloat16", batch=2, heads=4, heads_k=2, seqlen_q=400, seqlen_k=330, dim=64, dim_v=64, lse_grad=True
)
PACKED = replace(BASE, variant="varlen", batch=4, seqlen_q=300, seqlen_k=260, behind=3, seed=52)
SQUARE = replace(BASE, seqlen_q=400, seqlen_k=400, seed=53)
MASKS = {
    "a window": replace(BASE, is_causal=True, left=90),
    "keys that come too late": replace(BASE, seqlen_q=200, seqlen_k=500, is_causal=True, causal_from="top_left"),
    "bits": replace(BASE, mask="keys", mask_shape="q", is_causal=True, prepared=True),
    "keys": replace(BASE, mask="keys", mask_shape="b", is_causal=True, prepared=True),
    "keys without a band": replace(BASE, mask="keys", mask_shape="b", prepared=True, seed=54),
    "documents": replace(SQUARE, documents=True, mask="keys", mask_shape="b", is_causal=True),
    "intervals": replace(SQUARE, intervals="random", intervals_shape="bk", is_causal=True),
    "hidden intervals": replace(SQUARE, intervals="hidden", intervals_shape="b", is_causal=True),
    "intervals from the diagonal on": replace(
        SQUARE, intervals="lives", intervals_shape="bk", is_causal=True, promise=True, seed=59
    ),
    "packed": replace(PACKED, is_causal=True),
    "packed windows from the top left": replace(PACKED, left=60, right=30, causal_from="top_left"),
    "packed, masked keys": replace(PACKED, mask="keys", mask_shape="h", sink="float32"),
}
# What families that share their kernels with others are tried with: a band, bits, marks of keys, and packed sequences.
FEW = ("a window", "bits", "intervals", "packed, masked keys")
FAMILIES = {
    "wide": {"dim": 128, "dim_v": 128},
    "widest": {"dim": 256, "dim_v": 256},
    "deterministic": {"deterministic": True},
}
MORE_FAMILIES = {
    "two parts": {"dim": 80, "dim_v": 80},
    "unequal": {"dim": 192, "dim_v": 128},
    "float32": {"dtype": "float32"},
    "odd": {"dim": 33, "dim_v": 41},
}
# A bias that heads share has a kernel of its own for its gradient.
SHARED_BIAS = ("a window", "bits", "keys", "keys without a band", "documents", "hidden intervals")
CASES = {
    **{f"64, {mask}": problem for mask, problem in MASKS.items()},
    **{f"{family}, {mask}": replace(MASKS[mask], **changes) for family, changes in FAMILIES.items() for mask in MASKS},
    **{
        f"{family}, {mask}": replace(MASKS[mask], **changes)
        for family, changes in MORE_FAMILIES.items()
        for mask in FEW
    },
    **{f"a shared bias, {mask}": replace(MASKS[mask], bias=True, bias_shape="q") for mask in SHARED_BIAS},
    **{
        f"a bias of key heads, {mask}": replace(MASKS[mask], bias=True, bias_shape="bk", dim=128, dim_v=128)
        for mask in FEW[:3]
    },
    **{
        f"narrow heads, {mask}": replace(MASKS[mask], bias=True, bias_shape="hq", heads_k=4, dim=32, dim_v=16)
        for mask in ("keys", "keys without a band")
    },
    "a soft cap": replace(MASKS["bits"], softcap=5.0),
    "a sink": replace(MASKS["a window"], sink="float32", lse_grad=False, maximum=True),
    "a bias per key": replace(MASKS["keys"], bias=True, bias_shape="k", bias_float32=True),
    "a whole bias": replace(MASKS["bits"], bias=True, bias_shape="bhq"),
    "a whole bias, wide": replace(MASKS["a window"], dim=128, dim_v=128, bias=True, bias_shape="bhq"),
    "a shared bias, wide": replace(MASKS["bits"], bias=True, bias_shape="q", dim=128, dim_v=128),
    "a shared bias of intervals": replace(MASKS["intervals"], bias=True, bias_shape="hq"),
    "dropout": replace(MASKS["bits"], dropout_p=0.2),
    "packed, a bias": replace(MASKS["packed"], bias=True, bias_shape="h", dim=144, dim_v=144),
    "packed, all keys masked": replace(PACKED, mask="none", mask_shape="h", dim=128, dim_v=128),
    "few queries": replace(BASE, seqlen_q=3, seqlen_k=2000, mask="keys", mask_shape="b"),
}


# Random problems that kernels for SM 9.0 once got wrong
ONCE_WRONG = (
    Problem(
        seed=100094, variant="varlen", dtype="bfloat16", batch=3, heads=2, heads_k=1, seqlen_q=32, seqlen_k=129, dim=128,
        dim_v=256, layout="bhsd", mask="none", mask_shape="h", mask_dtype="uint8", poison="-inf", behind=3, sink="float32",
    ),
    Problem(
        seed=100194, variant="varlen", dtype="float16", batch=2, seqlen_q=528, seqlen_k=129, dim=160, dim_v=64,
        layout="bhsd", mask="random", mask_shape="h", mask_dtype="int64", poison="inf", behind=4, is_causal=True,
        causal_from="top_left", left=255, sink="float32", lse_grad=True, place="stream",
    ),
    Problem(
        seed=100519, variant="varlen", dtype="bfloat16", batch=2, seqlen_q=128, seqlen_k=255, dim=144, dim_v=144, bias=True,
        bias_shape="", nan_bias=True, poison="inf", behind=2, is_causal=True, causal_from="top_left", right=44,
        deterministic=True, magnitude=0.1, lse_grad=True,
    ),
)  # fmt: skip


@pytest.mark.parametrize("problem", [pytest.param(problem, id=name) for name, problem in CASES.items()])
def test_what_is_hidden_reaches_nothing(problem: Problem) -> None:
    for poison in POISONS:
        check(replace(problem, poison=poison), "cuda", repeats=2)


@pytest.mark.parametrize("problem", ONCE_WRONG, ids=lambda problem: str(problem.seed))
def test_random_problems_that_were_once_wrong(problem: Problem) -> None:
    check(problem, "cuda", repeats=2)


@needs_hopper
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_these_problems_run_on_the_kernels_for_sm_90(family: str, mask: str, taken: list[str]) -> None:
    check(replace(MASKS[mask], **FAMILIES[family]), "cuda")
    assert set(taken) <= {"hopper", "hopper256"}


@pytest.mark.parametrize("mask", ["bits", "keys", "intervals"])
def test_a_nan_that_somebody_sees_is_not_hidden(mask: str) -> None:
    shown = torch.ones(1, 1, 300, 300, dtype=torch.bool, device="cuda").tril()
    shown[..., 40] = False
    prepared = {
        "bits": lambda: prepare_mask(shown),
        "keys": lambda: prepare_mask(shown[:, 0, -1], seqlen_q=300, is_causal=True),
        "intervals": lambda: prepare_mask(
            intervals=(torch.arange(300, dtype=torch.int32, device="cuda")[None, None],
                       torch.where(torch.arange(300, device="cuda") == 40, 0, 300).int()[None, None]), seqlen_q=300),
    }[mask]()  # fmt: skip
    query, key, value = (torch.randn(2, 300, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    value[:, 40], value[0, 200] = float("nan"), float("nan")
    out = flash_dmattn_func(query, key, value, prepared)
    assert out[0, 200:].isnan().all()
    # Queries of the same tile may get it too, those of another batch entry may not.
    assert out[0, :128].isfinite().all() and out[1].isfinite().all()
    assert flash_dmattn_func(query, key, value.nan_to_num(0.0), prepared).isfinite().all()
