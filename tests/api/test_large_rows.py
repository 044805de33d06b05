"""Rows of large finite scores on the CPU: results and gradients stay within the budget of eager attention."""

from __future__ import annotations

import pytest
import torch

from tests.support.large_rows import LOWEST, check, check_finite, draw, results, unheld


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", ["rows", "keys", "all"])
@pytest.mark.parametrize("value", [-1e4, -1e9, -1e29, LOWEST, 1e9])
def test_a_large_bias(value: float, bias: str, dtype: torch.dtype) -> None:
    rows = draw("cpu", dtype, 16, bias=bias, value=value, seqlen=130)
    check(rows, results(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1e3, 1e6, 1e8])
def test_a_large_scale(scale: float, dtype: torch.dtype) -> None:
    rows = draw("cpu", dtype, 16, scale=scale, seqlen=130)
    check(rows, results(rows))


@pytest.mark.parametrize("scale", [1e3, 1e6, 1e8, 1e10, 1e20])
def test_a_large_scale_in_float16(scale: float) -> None:
    """The gradients are 0 or small. What adds up dP and delta in another order may not hold them."""
    rows = draw("cpu", torch.float16, 64, scale=scale, seqlen=130)
    check(rows, results(rows))
    check_finite(rows, results(rows, is_causal=True))
    left_out = unheld(rows)
    assert [bool(each.any()) for each in left_out.values()] == [scale > 1e8] * 2
    assert not left_out["dk"].all()  # a key that no query sees best has a gradient of 0 in any order


@pytest.mark.parametrize("value", [-1e9, LOWEST, 1e9])
def test_a_large_bias_under_a_soft_cap(value: float) -> None:
    rows = draw("cpu", torch.float32, 16, bias="keys", value=value, softcap=30.0, seqlen=130)
    check(rows, results(rows))
