"""NaN and infinities in what is hidden reach nothing, in every family of kernels on a GPU, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dmattn_ops.testing import Problem, check

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
    "documents": replace(SQUARE, documents=True, mask="keys", mask_shape="b", is_causal=True),
    "intervals": replace(SQUARE, intervals="random", intervals_shape="bk", is_causal=True),
    "hidden intervals": replace(SQUARE, intervals="hidden", intervals_shape="b", is_causal=True),
    "intervals from the diagonal on": replace(
        SQUARE, intervals="lives", intervals_shape="bk", is_causal=True, promise=True, seed=59
    ),
    "packed": replace(PACKED, is_causal=True),
    "packed, masked keys": replace(PACKED, mask="keys", mask_shape="h", sink="float32"),
}
# What the other families are tried with: a band, bits, marks of keys, and packed sequences.
FEW = ("a window", "bits", "intervals", "packed, masked keys")
FAMILIES = {
    "two parts": {"dim": 80, "dim_v": 80},
    "wide": {"dim": 128, "dim_v": 128},
    "unequal": {"dim": 192, "dim_v": 128},
    "widest": {"dim": 256, "dim_v": 256},
    "deterministic": {"deterministic": True},
    "float32": {"dtype": "float32"},
    "odd": {"dim": 33, "dim_v": 41},
}
CASES = {
    **{f"64, {mask}": problem for mask, problem in MASKS.items()},
    **{f"{family}, {mask}": replace(MASKS[mask], **changes) for family, changes in FAMILIES.items() for mask in FEW},
    "a soft cap": replace(MASKS["bits"], softcap=5.0),
    "a sink": replace(MASKS["a window"], sink="float32", lse_grad=False, maximum=True),
    "a bias per key": replace(MASKS["keys"], bias=True, bias_shape="k", bias_float32=True),
    "a whole bias": replace(MASKS["bits"], bias=True, bias_shape="bhq"),
    "a whole bias, wide": replace(MASKS["a window"], dim=128, dim_v=128, bias=True, bias_shape="bhq"),
    "a shared bias": replace(MASKS["bits"], bias=True, bias_shape="q", dim=128, dim_v=128),
    "a shared bias of intervals": replace(MASKS["intervals"], bias=True, bias_shape="hq"),
    "few queries": replace(BASE, seqlen_q=3, seqlen_k=2000, mask="keys", mask_shape="b"),
}


def variants() -> list[Any]:
    """Return the cases; those that are known to fail say why.

    The SM 9.0 kernels for masks do not clear what a mask hides from everybody inside a tile that somebody sees in part.
    """
    known = pytest.mark.xfail(reason="masks of the SM 9.0 kernels let hidden NaN through", strict=False)
    on_hopper = torch.cuda.get_device_capability() == (9, 0)

    def fails(problem: Problem) -> bool:
        masked = bool(problem.mask or problem.documents or problem.intervals)
        return on_hopper and masked and problem.dtype != "float32"

    return [pytest.param(each, id=name, marks=[known] * fails(each)) for name, each in CASES.items()]


@pytest.mark.parametrize("problem", variants())
def test_what_is_hidden_reaches_nothing(problem: Problem) -> None:
    for poison in POISONS:
        check(replace(problem, poison=poison), "cuda", repeats=2)
