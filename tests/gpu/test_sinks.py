"""Sinks and the largest score of each row in the kernels of SM 9.0 and in the portable ones, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dmattn_ops import flash_dmattn_func
from dmattn_ops.testing import Problem, check
from tests.support.architecture import skip_file_without_hopper

pytestmark = pytest.mark.gpu
skip_file_without_hopper()

BASE = Problem(
    seed=21, dtype="bfloat16", batch=2, heads=4, heads_k=4, seqlen_q=400, seqlen_k=520, sink="float32", maximum=True
)
CASES = {
    "full": BASE,
    "causal": replace(BASE, is_causal=True, seed=22),
    "a window": replace(BASE, left=100, right=30, seed=23),
    "a dense mask": replace(BASE, mask="random", mask_shape="bhq", seed=24),
    "documents": replace(BASE, seqlen_k=400, documents=True, is_causal=True, seed=25),
    "intervals": replace(BASE, seqlen_k=400, intervals="hidden", intervals_shape="bh", seed=26),
    "grouped heads": replace(BASE, heads=8, heads_k=2, is_causal=True, seed=27),
    "a bias per key": replace(BASE, bias=True, bias_shape="h", bias_float32=True, seed=28),
    "a bias": replace(BASE, bias=True, bias_shape="hq", seed=29),
    "a soft cap": replace(BASE, softcap=5.0, magnitude=2.0, is_causal=True, seed=30),
    "dropout": replace(BASE, dropout_p=0.2, is_causal=True, seed=31),
    "deterministic": replace(BASE, deterministic=True, is_causal=True, seed=32),
    "a gradient of lse": replace(BASE, lse_grad=True, seed=33),
    "packed sequences": replace(BASE, variant="varlen", batch=5, is_causal=True, seed=34),
    "large scores": replace(BASE, softmax_scale=3.0, magnitude=3.0, seed=35),
    "rows of the lowest bias": replace(
        BASE, bias=True, bias_shape="hq", extreme="rows", bias_value=torch.finfo(torch.bfloat16).min, seed=40
    ),
    "keys of the lowest bias": replace(
        BASE, bias=True, bias_shape="", extreme="rows", bias_value=torch.finfo(torch.bfloat16).min, seed=41
    ),
    "nothing visible": replace(BASE, mask="none", mask_shape="", seed=36),
    "sinks in their own dtype": replace(BASE, sink="own", seed=37),
    "no sink": replace(BASE, sink="", is_causal=True, seed=38),
    "no maximum": replace(BASE, maximum=False, is_causal=True, seed=39),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_out_maximum_and_gradients_stay_within_the_budget(taken, dim: int, case: Problem) -> None:
    check(replace(case, dim=dim, dim_v=dim), "cuda", repeats=3)
    if not (dim == 64 and case.bias_shape == "hq"):  # where the portable kernel is faster
        assert taken[0] == "hopper"


@pytest.mark.parametrize(
    "case", ["causal", "a dense mask", "grouped heads", "a bias", "packed sequences", "nothing visible"]
)
def test_the_portable_kernels_do_the_same(case: str) -> None:
    check(replace(CASES[case], dim=64, dim_v=64, dtype="float32"), "cuda", repeats=3)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_gradients_of_empty_rows_that_are_not_numbers_reach_no_sink(dim: int) -> None:
    query, key, value = (torch.randn(2, 300, 4, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    sink = torch.zeros(4, device="cuda", requires_grad=True)
    keep = torch.ones(1, 1, 300, 300, dtype=torch.bool, device="cuda")
    keep[:, :, 5:9] = False
    out = flash_dmattn_func(query, key, value, keep, sink=sink)
    found = []
    for of_empty_rows in (0.0, float("nan")):
        grad_out = torch.ones_like(out)
        grad_out[:, 5:9] = of_empty_rows
        found += torch.autograd.grad(out, sink, grad_out, retain_graph=True)
    assert found[0].all()
    assert torch.equal(*found)
