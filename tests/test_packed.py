"""Packed query, key and value: no copies, and one gradient buffer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import dmattn_ops
from dmattn_ops import native


def allocated(call: Callable[[], Any]) -> tuple[list[int], Any]:
    """Return the sizes in bytes of what a call allocates on the CPU, and its result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    events = profiler.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0], result


@pytest.mark.skipif(not native.available(), reason="counts the allocations of the C++ kernels: " + native.reason())
def test_packed_inputs_are_not_copied_and_have_one_gradient():
    packed = torch.randn(2, 1024, 3, 4, 64, requires_grad=True)
    part, statistics = packed.numel() // 3 * 4, 2 * 4 * 1024 * 4
    forward, out = allocated(lambda: dmattn_ops.flash_dmattn_qkvpacked_func(packed, is_causal=True))
    assert forward == [part, statistics, statistics]  # out, lse and lse_tail
    grad = torch.randn_like(out)
    backward, (gradient,) = allocated(lambda: torch.autograd.grad(out, packed, grad))
    assert backward == [3 * part]
    assert gradient.is_contiguous() and gradient.shape == packed.shape


def test_the_packed_gradient_is_that_of_its_parts():
    packed = torch.randn(2, 130, 3, 4, 24, requires_grad=True)
    parts = [part.detach().clone().requires_grad_() for part in packed.unbind(2)]
    mask, bias = torch.rand(2, 1, 130, 130) < 0.7, torch.randn(1, 4, 130, 130)
    keywords = {"is_causal": True, "softcap": 8.0}
    together = dmattn_ops.flash_dmattn_qkvpacked_func(packed, mask, bias, **keywords)
    apart = dmattn_ops.flash_dmattn_func(*parts, mask, bias, **keywords)
    assert torch.equal(together, apart)
    (gradient,) = torch.autograd.grad(together.square().sum(), packed)
    torch.testing.assert_close(gradient.unbind(2), torch.autograd.grad(apart.square().sum(), parts))
