"""A hundred thousand launches from captured graphs: nothing changes but dq, whose parts are added in any order, by its rounding."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import dmattn_ops

pytestmark = pytest.mark.gpu
LAUNCHES = 100_000  # of all cases together


class Case(NamedTuple):
    dim: int
    heads_k: int = 4
    seqlen: int = 640
    causal: bool = False
    density: float | None = None  # of the elements of a mask; None: no mask
    deterministic: bool = False


CASES = {
    "causal, D 64": Case(64, causal=True),
    "grouped, D 128": Case(128, heads_k=1, causal=True),
    "elements, D 64": Case(64, density=0.5),
    "few elements, D 128": Case(128, density=0.002),
    "deterministic, D 64": Case(64, causal=True, deterministic=True),
    "deterministic, D 128": Case(128, deterministic=True),
    "causal, D 256": Case(256, heads_k=2, causal=True),
    "elements, D 256": Case(256, density=0.1),
}


def replayed(case: Case, leaves: list[Tensor], mask: Tensor | None, grad_out: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the results of the first launch, and how many elements of later ones were not what they may be."""

    def results() -> list[Tensor]:
        # what the call allocates is taken from this: NaN where nothing writes
        spoiled = [torch.full_like(tensor, float("nan"), dtype=torch.float32) for tensor in leaves * 3]
        del spoiled
        kept = None if mask is None else dmattn_ops.prepare_mask(mask)
        out = dmattn_ops.flash_dmattn_func(*leaves, kept, is_causal=case.causal, deterministic=case.deterministic)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]

    first = [tensor.clone() for tensor in results()]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index, (one, other) in enumerate(zip(first, results(), strict=True)):
            if index == 1 and not case.deterministic:
                limit = one.float().abs() * 2**-7 + one.float().square().mean().sqrt() * 2**-9
                wrong += (~((one.float() - other.float()).abs() <= limit)).sum()
            else:
                wrong += (one != other).sum()
    for _ in range(LAUNCHES // len(CASES)):
        graph.replay()
    return first, wrong


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_no_launch_differs(case: Case) -> None:
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(heads: int) -> Tensor:
        shape = (1, case.seqlen, heads, case.dim)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    leaves = [normal(heads).requires_grad_() for heads in (4, case.heads_k, case.heads_k)]
    grad_out = normal(4)
    mask = None
    if case.density is not None:
        mask = torch.rand((1, 4, case.seqlen, case.seqlen), generator=generator, device="cuda") < case.density
        mask[..., 0] = True  # a key in each row, as the expected values need
    first, wrong = replayed(case, leaves, mask, grad_out)
    assert wrong.item() == 0
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    out = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.transpose(1, 2) for tensor in exact), attn_mask=mask, is_causal=case.causal, enable_gqa=True
    ).transpose(1, 2)
    expected = [out, *torch.autograd.grad(out, exact, grad_out.double())]
    for name, mine, right in zip(("out", "dq", "dk", "dv"), first, expected, strict=True):
        assert (mine - right).norm() < 1e-2 * right.norm(), name
