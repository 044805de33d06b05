"""Elements of inputs may lie more than 2^31 elements apart."""

from __future__ import annotations

import pytest
import torch

import dmattn_ops
from tests.support.far_apart import PLACES, SHAPE, far_apart


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_far_inputs_give_what_near_ones_give(place: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    near = [torch.randn(SHAPE, generator=generator).to(dtype) for _ in range(4)]
    results = []
    for *leaves, grad_out in (near, far_apart(near, place)):
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        out = dmattn_ops.flash_dmattn_func(*leaves, is_causal=True)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad_out)])
    for name, one, other in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        assert torch.equal(one, other), name


def test_far_rows_of_a_mask_and_of_a_bias() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(SHAPE, generator=generator).bfloat16() for _ in range(3))
    batch, seqlen, heads, _ = SHAPE
    bias = torch.randn((1, seqlen, 1, seqlen), generator=generator).bfloat16()
    mask = torch.rand((batch, seqlen, heads, seqlen), generator=generator) < 0.5
    [far_bias], [far_mask] = far_apart([bias], "rows"), far_apart([mask], "rows")
    results = [
        dmattn_ops.flash_dmattn_func(query, key, value, m.transpose(1, 2), b.transpose(1, 2))
        for m, b in ((mask, bias), (far_mask, far_bias))
    ]
    assert torch.equal(*results)
