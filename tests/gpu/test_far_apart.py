"""Tensors of more than 2^31 elements, and elements that lie further apart, on a GPU with room for them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dmattn_ops
from dmattn_ops import environment
from tests.support.far_apart import PLACES, SHAPE, far_apart

pytestmark = pytest.mark.gpu
GIGABYTE = 1 << 30


def need(gigabytes: int) -> None:
    """Skip where the GPU has not so much memory left."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] // GIGABYTE
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes} GiB of GPU memory, {free} are free")


def results(leaves: list[Tensor], grad_out: Tensor, *mask_and_bias: Tensor | None, **options: object) -> list[Tensor]:
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = dmattn_ops.flash_dmattn_func(*leaves, *mask_and_bias, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def agree(one: Tensor, other: Tensor) -> bool:
    """Return whether two results of one problem differ by no more than the order of additions and the rounding."""
    return bool((one.double() - other.double()).norm() <= 5e-3 * other.double().norm())


@pytest.mark.parametrize("version", ["8.0", "9.0"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_far_elements(dim: int, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need(16)
    monkeypatch.setenv(environment.ARCHITECTURE, version)
    batch, seqlen, heads, _ = SHAPE
    near = [torch.randn(batch, seqlen, heads, dim, device="cuda").bfloat16() for _ in range(4)]
    expected = results(near[:3], near[3], is_causal=True)
    for place in PLACES:
        *leaves, grad_out = far_apart(near, place)
        for name, mine, right in zip(
            ("out", "dq", "dk", "dv"), results(leaves, grad_out, is_causal=True), expected, strict=True
        ):
            assert agree(mine, right), f"{name} with far {place}"
        del leaves, grad_out


def test_far_rows_of_a_mask_and_of_a_bias() -> None:
    need(16)
    batch, seqlen, heads, _ = SHAPE
    near = [torch.randn(SHAPE, device="cuda").bfloat16() for _ in range(4)]
    bias = torch.randn(1, seqlen, 1, seqlen, device="cuda").bfloat16()
    mask = torch.rand(batch, seqlen, heads, seqlen, device="cuda") < 0.5
    expected = results(near[:3], near[3], mask.transpose(1, 2), bias.transpose(1, 2))
    [far_bias], [far_mask] = far_apart([bias], "rows"), far_apart([mask], "rows")
    for mine, right in zip(
        results(near[:3], near[3], far_mask.transpose(1, 2), far_bias.transpose(1, 2)), expected, strict=True
    ):
        assert agree(mine, right)


@pytest.mark.parametrize(("dim", "version"), [(64, "9.0"), (128, "9.0"), (256, "9.0"), (128, "8.0")])
def test_more_than_2_to_the_31_elements(dim: int, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last head of the last batch, at its end, is what it is in a small call that begins a window earlier."""
    need(64)
    monkeypatch.setenv(environment.ARCHITECTURE, version)
    heads, seqlen, window = 8192 // dim, 136 * 1024, 200
    shape = (2, seqlen, heads, dim)
    assert torch.Size(shape).numel() > 1 << 31
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    large = results(tensors[:3], tensors[3], is_causal=True, window_size=(window, 0))
    tail, exact = 2048, 1024  # the last `exact` queries and keys do not see what is left out
    parts = [tensor[1:, -tail:, -1:].clone() for tensor in tensors]
    small = results(parts[:3], parts[3], is_causal=True, window_size=(window, 0))
    for name, mine, right in zip(("out", "dq", "dk", "dv"), large, small, strict=True):
        assert agree(mine[1:, -exact:, -1:], right[:, -exact:]), name


def test_a_mask_of_more_than_2_to_the_31_elements() -> None:
    need(32)
    seqlen = 48 * 1024
    near = [torch.randn(1, seqlen, 1, 64, device="cuda").bfloat16() for _ in range(4)]
    mask = torch.ones(seqlen, seqlen, dtype=torch.bool, device="cuda").tril_()[None, None]
    assert mask.numel() > 1 << 31
    expected = results(near[:3], near[3], is_causal=True)
    for name, mine, right in zip(("out", "dq", "dk", "dv"), results(near[:3], near[3], mask), expected, strict=True):
        assert agree(mine, right), name
