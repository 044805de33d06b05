"""Deterministic gradients of the SM 9.0 backward on a GPU: correct, and the same bits however busy the GPU is."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.support.architecture import skip_file_without_hopper

pytestmark = pytest.mark.gpu
skip_file_without_hopper()

from dmattn_ops.call import NO_MASK, UNBOUNDED, Call, Gradients, Saved, plain_options  # noqa: E402
from dmattn_ops.kernels.hopper.backward import launch as hopper_backward  # noqa: E402
from tests.gpu.test_hopper_backward import BANDS, LENGTHS, check, configuration, draw  # noqa: E402

FULL, CAUSAL, WINDOW = (-UNBOUNDED, UNBOUNDED), (-UNBOUNDED, 0), (-300, 200)
MORE_BANDS = [FULL, CAUSAL, (-UNBOUNDED, 333), (-UNBOUNDED, -450), WINDOW, (-200, UNBOUNDED), (150, 900)]


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("seqlens", LENGTHS, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_bands_and_tails(dim: int, seqlens: tuple[int, int], band: tuple[int, int]) -> None:
    check(2, seqlens, (4, 2), dim, band, with_grad_lse=True, deterministic=True)


@pytest.mark.parametrize("band", MORE_BANDS, ids=str)
@pytest.mark.parametrize("seqlens", [(2000, 1200), (1200, 2000), (1536, 1536)], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_many_tiles(dim: int, seqlens: tuple[int, int], band: tuple[int, int]) -> None:
    check(1, seqlens, (2, 2), dim, band, deterministic=True)


def launcher(seqlens: tuple[int, int], heads: tuple[int, int], dim: int, band: tuple[int, int]):
    """Return a function that computes dq, dk and dv of fixed random inputs into new memory."""
    query, grad_out, out = (draw(2, seqlens[0], heads[0], dim, torch.bfloat16) for _ in range(3))
    key, value = (draw(2, seqlens[1], heads[1], dim, torch.bfloat16) for _ in range(2))
    lse = torch.full((2, heads[0], seqlens[0]), math.log(seqlens[1]) + 0.5, device="cuda")
    options = plain_options(dim**-0.5, *band, deterministic=True)
    call = Call(query, key, value, None, NO_MASK, None, None, None, options)
    saved = Saved(out, lse, torch.zeros_like(lse))

    def launch() -> tuple[Tensor, ...]:
        gradients = tuple(torch.full_like(x, math.nan) for x in (query, key, value))
        hopper_backward.backward(call, saved, Gradients(grad_out, None, *gradients, None), configuration(dim))
        return gradients

    return launch


@pytest.mark.parametrize(
    ("seqlens", "heads", "band"),
    [
        ((2048, 2048), (16, 16), FULL),
        ((2048, 2048), (16, 16), CAUSAL),
        ((2000, 2777), (8, 8), (-UNBOUNDED, 777)),
        ((2048, 2048), (16, 2), CAUSAL),
        ((2048, 2048), (16, 16), WINDOW),
        ((200, 20000), (1, 1), FULL),  # more key tiles of a head than the GPU runs at a time
    ],
    ids=["full", "causal", "lengths", "grouped", "window", "long"],
)
@pytest.mark.parametrize("dim", [64, 128])
def test_fifty_launches_give_the_same_bits_while_the_gpu_is_busy(
    dim: int, seqlens: tuple[int, int], heads: tuple[int, int], band: tuple[int, int]
) -> None:
    launch = launcher(seqlens, heads, dim, band)
    first = launch()
    assert all(gradient.isfinite().all() for gradient in first)
    other = torch.cuda.Stream()
    matrix = torch.randn(3000, 3000, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    differing = torch.zeros(3, dtype=torch.int64, device="cuda")
    for _ in range(50):
        with torch.cuda.stream(other):
            matrix @ matrix
        for i, (gradient, before) in enumerate(zip(launch(), first, strict=True)):
            differing[i] += (gradient != before).sum()
    assert differing.tolist() == [0, 0, 0]


def test_replays_of_a_graph_give_the_same_bits() -> None:
    launch = launcher((1024, 1024), (4, 4), 128, CAUSAL)
    eager = launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = launch()
    for _ in range(5):
        for gradient in captured:
            gradient.fill_(math.nan)
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(eager, captured, strict=True))
