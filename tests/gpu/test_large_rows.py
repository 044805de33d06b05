"""Rows of large finite scores on a GPU, where outputs and workspaces hold NaN before: the budget of eager attention."""

from __future__ import annotations

import pytest
import torch

from tests.support.architecture import HOPPER
from tests.support.large_rows import LOWEST, check, check_finite, draw, results

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nan_in_new_memory")]
DIMS = [64, 128, 256]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", ["rows", "keys", "all"])
@pytest.mark.parametrize("value", [-1e4, -1e9, -1e29, LOWEST, 1e9])
@pytest.mark.parametrize("dim", DIMS)
def test_a_large_bias(dim: int, value: float, bias: str, dtype: torch.dtype) -> None:
    rows = draw("cuda", dtype, dim, bias=bias, value=value)
    for _ in range(3):  # the second call makes a plan, the third repeats it
        check(rows, results(rows))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e3, 1e6, 1e8, 1e10, 1e20])
@pytest.mark.parametrize("dim", DIMS)
def test_a_large_scale(dim: int, scale: float, dtype: torch.dtype) -> None:
    rows = draw("cuda", dtype, dim, scale=scale)
    check(rows, results(rows))
    check_finite(rows, results(rows, is_causal=True), exact_weights=HOPPER)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e6])
@pytest.mark.parametrize("times", [1e3, 1e4])
@pytest.mark.parametrize("dim", DIMS)
def test_large_queries_beside_others(dim: int, times: float, scale: float, dtype: torch.dtype) -> None:
    """Rows of scores of any size share warps with others, and grow or shrink over more than one tile of keys."""
    rows = draw("cuda", dtype, dim, scale=scale, times=times)
    check(rows, results(rows))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", ["rows", "keys"])
@pytest.mark.parametrize("value", [-1e9, LOWEST, 1e9])
@pytest.mark.parametrize("dim", DIMS)
def test_a_large_bias_under_a_soft_cap(dim: int, value: float, bias: str, dtype: torch.dtype) -> None:
    rows = draw("cuda", dtype, dim, bias=bias, value=value, softcap=30.0)
    check(rows, results(rows))


@pytest.mark.parametrize("dim", DIMS)
def test_a_large_row_does_not_change_the_gradients_of_the_others(dim: int) -> None:
    """One such row makes all rows of a call take the exact path of the kernels."""
    rows = draw("cuda", torch.bfloat16, dim, bias="rows", value=0.0)
    calm = results(rows)
    with torch.no_grad():
        rows.leaves[3][:, :, 299] = 1e9
    large = results(rows)
    torch.testing.assert_close(large[0][:, :299], calm[0][:, :299], rtol=0, atol=0)
    torch.testing.assert_close(large[2][:, :299], calm[2][:, :299], rtol=2e-2, atol=2e-3)
