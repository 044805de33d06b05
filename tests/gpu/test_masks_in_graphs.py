"""Every kind of mask, made inside a graph that Inductor compiles, of what the graph computes itself, compared with eager calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.made_in_graphs import KINDS, Attention

pytestmark = pytest.mark.gpu

LENGTHS = (2, 129, 200, 1000, 5000, 65536)
# of pairs that take memory for each, eager and in between
OF_PAIRS = ("dense", "part of dense", "intervals and", "intervals, ", "padding of each head")
HEADS, DIM, LONGEST_OF_PAIRS = 4, 64, 5000


def results(model: Attention, hidden: Tensor) -> list[Tensor]:
    """Return out and the gradients of the input and of the scale."""
    hidden = hidden.detach().requires_grad_()
    out = model(hidden)
    return [out, *torch.autograd.grad(out.sin().sum(), (hidden, model.scale))]


def inputs(seqlen: int) -> Tensor:
    """Return tokens whose scores a compiler cannot round differently: products of small powers of two."""
    generator = torch.Generator().manual_seed(seqlen)
    hidden = torch.randint(-2, 3, (2 if seqlen < 10000 else 1, seqlen, HEADS, DIM), generator=generator)
    return hidden.to("cuda", torch.bfloat16) / 2


def compare(model: Attention, compiled: Attention, seqlen: int) -> None:
    expected, actual = (results(each, inputs(seqlen)) for each in (model, compiled))
    for name, one, other in zip(("out", "hidden", "scale"), actual, expected, strict=True):
        error = (one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-6)
        assert error < 2e-2, (seqlen, name, float(error))


def made(kind: str) -> Attention:
    model = Attention(kind, HEADS, DIM).to("cuda")
    with torch.no_grad():  # sums of products are exact in float32, in any order
        model.score.copy_((model.score * 64).round() / 64)
    return model.to(torch.bfloat16)


def lengths(kind: str) -> tuple[int, ...]:
    return tuple(length for length in LENGTHS if length <= LONGEST_OF_PAIRS or not kind.startswith(OF_PAIRS))


@pytest.mark.parametrize("kind", KINDS)
def test_masks_made_in_static_graphs(kind: str) -> None:
    model = made(kind)
    for seqlen in lengths(kind):
        torch._dynamo.reset()
        compare(model, torch.compile(model, fullgraph=True, dynamic=False), seqlen)


@pytest.mark.parametrize("kind", KINDS)
def test_masks_made_in_one_dynamic_graph(kind: str) -> None:
    torch._dynamo.reset()
    model = made(kind)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for seqlen in lengths(kind)[::-1]:
        compare(model, compiled, seqlen)
