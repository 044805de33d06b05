"""Scores that strain float32, through the C++ kernels: large biases and scales, soft caps, and statistics of more keys."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from native_calls import Call, check, launch, plain, run_backward, run_forward

from dmattn_ops.call import Saved
from dmattn_ops.kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason=f"THE C++ KERNELS ARE NOT TESTED: {native.reason()}")

LOWEST = torch.finfo(torch.float32).min


def biased(value: float, rows: slice, dtype: torch.dtype = torch.float32) -> Call:
    """Return a problem in which all scores of some rows have a large constant added."""
    call = plain(dtype=dtype)
    call.bias = torch.zeros(1, 1, 300, 260)
    call.bias[:, :, rows] = value
    return call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [-1e4, -1e9, 1e9, -1e29, 3e38, LOWEST])
def test_a_large_constant_over_whole_rows_changes_nothing_but_lse(value, dtype):
    call = check(biased(value, slice(20), dtype))
    assert call[0][:, :20].ne(0).all()
    assert call[1][..., :20].isfinite().all()


def test_rows_of_the_lowest_number_average_all_values():
    call = biased(LOWEST, slice(None))
    result = run_forward(call)
    torch.testing.assert_close(result.out, call.value.mean(1, keepdim=True).expand_as(result.out))
    assert result.row_max.eq(LOWEST).all()


def weights_of_all_keys(call: Call) -> torch.Tensor:
    """Return the sum of P over the keys of all queries, by the backward: the sum of dv, where grad_out is 1."""
    call = dataclasses.replace(call, grad_out=torch.ones_like(call.grad_out))
    return launch(call)[4].sum(1)


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e6, 1e9])
def test_probabilities_of_the_backward_add_up_to_one_at_any_scale(scale):
    call = plain()
    call.scale = scale
    total = weights_of_all_keys(call)
    torch.testing.assert_close(total, torch.full_like(total, 300), rtol=1e-4, atol=0)


@pytest.mark.parametrize("value", [1e7, -1e7, 1e30])
def test_probabilities_of_the_backward_add_up_to_one_beside_a_large_bias(value):
    call = plain()
    call.bias = value * torch.rand(1, 1, 300, 260)
    total = weights_of_all_keys(call)
    torch.testing.assert_close(total, torch.full_like(total, 300), rtol=1e-4, atol=0)


def test_the_tail_of_lse_is_what_rounding_took_from_it():
    call = biased(1e9, slice(100))
    result = run_forward(call)
    scores = torch.einsum("bihd,bjhd->bhij", call.query.double(), call.key.double()) * call.scale
    rounded = scores.float() + call.bias  # the scores as a float32 softmax sees them
    exact = rounded.double().logsumexp(-1)
    torch.testing.assert_close(result.lse.double() + result.lse_tail, exact, rtol=0, atol=1e-5)
    assert result.lse_tail[..., :100].abs().max() > 1


def test_the_row_maximum_is_the_largest_visible_score():
    call = plain()
    call.bias, call.softcap = torch.randn(1, 2, 300, 260), 2.0
    call.bias[:, :, 40] = -math.inf
    scores = torch.einsum("bihd,bjhd->bhij", call.query, call.key) * call.scale
    scores = 2 * torch.tanh(scores / 2) + call.bias
    torch.testing.assert_close(run_forward(call).row_max, scores.amax(-1))


def test_parts_of_the_keys_add_up_under_the_statistics_of_all():
    # A tail of any size serves as well as lse itself.
    call = plain()
    whole = run_forward(call)
    saved = Saved(whole.out, whole.lse - 40, whole.lse_tail + 40)
    expected, total = launch(call), torch.zeros_like(call.query)
    for part in (slice(0, 100), slice(100, 260)):
        piece = dataclasses.replace(call, key=call.key[:, part], value=call.value[:, part])
        dq, dk, dv, _ = run_backward(piece, saved)
        total += dq
        torch.testing.assert_close(dk, expected[3][:, part], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(dv, expected[4][:, part], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(total, expected[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("softcap", [1e-60, 1e-40, 1e-30, 1e20, 1e38, 1e39, 1e300])
def test_soft_caps_at_the_ends_of_the_range_stay_finite(softcap):
    call = plain()
    call.key[:, ::3] = 0
    call.softcap = softcap
    actual = launch(call)
    assert all(x.isfinite().all() for x in actual if x is not None)
    uncapped = launch(dataclasses.replace(call, softcap=0.0, scale=call.scale if softcap > 1 else 0.0))
    torch.testing.assert_close(actual[0], uncapped[0], rtol=1e-5, atol=1e-5)
