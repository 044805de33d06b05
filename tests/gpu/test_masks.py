"""The edges of masks on the GPU: called eagerly, compiled, and replayed from a captured graph; many launches of many masks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import dmattn_ops
from dmattn_ops.testing import Problem, check
from tests.support.replays import replayed

pytestmark = pytest.mark.gpu

BASE = Problem(
    seed=7, dtype="bfloat16", batch=2, heads=4, heads_k=2, seqlen_q=300, seqlen_k=420, dim=64, dim_v=64, mask="random"
)
EDGES = {
    "rows with no key": replace(BASE, mask="rows"),
    "keys nobody sees": replace(BASE, mask="keys", dim=128, dim_v=128),
    "whole tiles empty": replace(BASE, mask="block", seqlen_q=640, seqlen_k=640),
    "nothing visible": replace(BASE, mask="none"),
    "one key in a row": replace(BASE, seqlen_k=1),
    "one query": replace(BASE, seqlen_q=1),
    "a mask for each key head": replace(BASE, mask_shape="bkq"),
    "a mask for all heads": replace(BASE, mask_shape="q", dim=256, dim_v=256),
    "per key": replace(BASE, mask_shape="b", is_causal=True),
    "NaN in masked bias": replace(BASE, bias=True, nan_bias=True),
    "NaN in masked bias of float32": replace(BASE, bias=True, nan_bias=True, bias_float32=True, mask="block"),
    "documents": replace(BASE, mask="", documents=True, seqlen_k=300, is_causal=True),
    "a window": replace(BASE, left=70, right=10),
    "prepared": replace(BASE, prepared=True, is_causal=True),
    "float32": replace(BASE, dtype="float32"),
}


@pytest.mark.parametrize("edge", EDGES.values(), ids=EDGES.keys())
def test_edge_in_eager_calls(edge: Problem) -> None:
    check(edge, "cuda", repeats=3)


@pytest.mark.parametrize("edge", EDGES.values(), ids=EDGES.keys())
def test_edge_in_compiled_calls(edge: Problem) -> None:
    torch._dynamo.reset()
    check(replace(edge, compiled=True), "cuda", repeats=2)


@pytest.mark.parametrize("edge", EDGES.values(), ids=EDGES.keys())
def test_edge_in_captured_graphs(edge: Problem) -> None:
    check(edge, "cuda", run=replayed)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_thousand_launches_of_random_masks(dim: int) -> None:
    """Out, dk and dv repeat bitwise; dq, whose parts are added in any order, to the rounding of bfloat16."""
    batch, seqlen, heads, heads_k = 2, 700, 4, 2
    generator = torch.Generator("cuda").manual_seed(dim)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)

    query, grad_out = normal(batch, seqlen, heads, dim), normal(batch, seqlen, heads, dim)
    key, value = normal(batch, seqlen, heads_k, dim), normal(batch, seqlen, heads_k, dim)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    side = torch.cuda.Stream()
    noise = torch.randn(2048, 2048, device="cuda")
    for density in torch.linspace(0.01, 1.0, 20).tolist():
        elements = torch.rand((batch, heads, seqlen, seqlen), generator=generator, device="cuda") < density
        drawn = torch.rand((batch, heads, 6, 6), generator=generator, device="cuda")
        drawn = drawn.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :seqlen, :seqlen]
        mask = dmattn_ops.prepare_mask((drawn < density) & (elements | (drawn < density / 3)))  # a third is full
        first: list[Tensor] = []
        for _ in range(50):
            with torch.cuda.stream(side):
                noise @ noise  # another kernel competes for the SMs
            out = dmattn_ops.flash_dmattn_func(*leaves, mask)
            results = [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]
            first = first or results
            for name, one, other in zip(("out", "dq", "dk", "dv"), first, results, strict=True):
                if name == "dq":
                    limit = one.float().abs() * 2**-7 + one.float().square().mean().sqrt() * 2**-9
                    assert bool(((one.float() - other.float()).abs() <= limit).all()), f"dq at density {density}"
                else:
                    assert torch.equal(one, other), f"{name} changed at density {density}"
