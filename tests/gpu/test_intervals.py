"""Masks of intervals in the SM 9.0 kernels: every kind against the oracle, parts that add up, repeats and graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import dmattn_ops
from dmattn_ops.call import Call, Gradients, Result, Saved, plain_options
from dmattn_ops.dispatch import run
from dmattn_ops.testing import Problem, check
from dmattn_ops.testing.inputs import make_inputs
from dmattn_ops.testing.oracle import EPS, relative_error
from tests.support.architecture import HOPPER, needs_hopper
from tests.support.replays import replayed

pytestmark = pytest.mark.gpu
DIMS = [64, 128, 256]
BASE = Problem(
    seed=5, dtype="bfloat16", batch=2, heads=4, heads_k=2, seqlen_q=333, seqlen_k=517, intervals="random",
    intervals_shape="bk", lse_grad=True,
)  # fmt: skip
KINDS = {
    "random": BASE,
    "random, whole tiles": replace(BASE, seqlen_k=512),
    "the same for all": replace(BASE, intervals_shape="", seqlen_q=640, seqlen_k=640),
    "of each query head": replace(BASE, intervals_shape="bh"),
    "causal lifetimes": replace(BASE, intervals="lives", seqlen_q=700, seqlen_k=700, is_causal=True),
    "causal lifetimes, whole tiles": replace(BASE, intervals="lives", seqlen_q=768, seqlen_k=768, is_causal=True),
    "hidden parts": replace(BASE, intervals="hidden", seed=8),
    "hidden parts, whole tiles": replace(BASE, intervals="hidden", seqlen_k=640, intervals_shape="h"),
    "a window on top": replace(BASE, seqlen_q=600, seqlen_k=600, left=150, right=30),
    "hidden from whole tiles": replace(BASE, intervals="hidden", seed=12, seqlen_q=1200, seqlen_k=640),
    "hidden from whole tiles, causal": replace(
        BASE, intervals="hidden", seed=12, seqlen_q=1200, seqlen_k=640, is_causal=True
    ),
    "a window on top of hidden parts": replace(BASE, intervals="hidden", left=99, is_causal=True),
    "from the top left": replace(BASE, is_causal=True, causal_from="top_left"),
    "one query": replace(BASE, seqlen_q=1),
    "one key": replace(BASE, seqlen_k=1),
    "a bias per key": replace(BASE, bias=True, bias_shape="bk", bias_float32=True, nan_bias=True),
    "a bias per key, whole tiles": replace(BASE, bias=True, bias_shape="k", seqlen_k=384),
    "a shared bias per pair": replace(BASE, bias=True, bias_shape="q", nan_bias=True),
    "a soft cap": replace(BASE, softcap=5.0, magnitude=2.0),
    "sinks": replace(BASE, sink="float32"),
}


@needs_hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("dim", DIMS)
def test_out_and_gradients_stay_within_the_budget(taken, dim: int, kind: Problem, dtype: str) -> None:
    check(replace(kind, dim=dim, dim_v=dim, dtype=dtype), "cuda", repeats=3)
    assert {*taken} & {"hopper", "hopper256"}


@needs_hopper
@pytest.mark.parametrize("kind", ["random", "causal lifetimes, whole tiles", "hidden parts", "a bias per key"])
@pytest.mark.parametrize("dim", DIMS)
def test_deterministic_calls_repeat_bit_for_bit_and_end(taken, dim: int, kind: str) -> None:
    """The fixed order of additions that narrower heads have without lists would wait for tiles that no list names."""
    check(replace(KINDS[kind], dim=dim, dim_v=dim, deterministic=True), "cuda", repeats=5)
    assert "hopper256" in taken


def test_a_problem_hides_whole_tiles() -> None:
    """So that calls of "hidden from whole tiles" walk lists from which tiles are missing."""
    inputs = make_inputs(KINDS["hidden from whole tiles"], "cuda")
    start, end, *hidden = inputs.intervals
    shown, less = (
        dmattn_ops.prepare_mask(intervals=(start, end), hidden=gap, seqlen_q=1200) for gap in (None, tuple(hidden))
    )
    assert less.density() < 0.9 * shown.density()


@needs_hopper
@pytest.mark.parametrize("kind", ["random, whole tiles", "causal lifetimes", "hidden parts", "sinks"])
@pytest.mark.parametrize("dim", DIMS)
def test_captured_graphs(dim: int, kind: str) -> None:
    check(replace(KINDS[kind], dim=dim, dim_v=dim), "cuda", run=replayed)


@pytest.mark.parametrize("dim", DIMS)
def test_fifty_launches_give_the_same_bits_but_for_dq(dim: int) -> None:
    """dq of heads up to 128, and on SM 8.x of all heads, is added up in any order."""
    start = torch.randint(0, 700, (1, 2, 700), device="cuda", dtype=torch.int32)
    mask = dmattn_ops.prepare_mask(intervals=(start, start + 200), seqlen_q=700)
    leaves = [torch.randn(1, 700, 2, dim, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    grad_out = torch.randn(1, 700, 2, dim, device="cuda").bfloat16()
    first: list[Tensor] = []
    for _ in range(50):
        out = dmattn_ops.flash_dmattn_func(*leaves, mask)
        found = [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]
        first = first or found
        for name, one, other in zip(("out", "dq", "dk", "dv"), first, found, strict=True):
            if name == "dq" and (dim <= 128 or not HOPPER):
                limit = one.float().abs() * 2**-7 + one.float().square().mean().sqrt() * 2**-9
                assert ((one.float() - other.float()).abs() <= limit).all()
            else:
                assert torch.equal(one, other), name


@pytest.mark.parametrize("dim", DIMS)
def test_any_int32_may_be_an_end(dim: int) -> None:
    """Ends far outside of the queries mean the same as their nearest ones."""
    least, most = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
    ends = torch.tensor([least, -1, 0, 100, 299, 300, most], dtype=torch.int32, device="cuda")
    start, end, hidden_from, hidden_to = (ends[torch.randint(0, 7, (1, 2, 384), device="cuda")] for _ in range(4))
    tensors = [torch.randn(1, s, 2, dim, device="cuda").bfloat16() for s in (300, 384, 384)]
    grad_out = torch.randn(1, 300, 2, dim, device="cuda").bfloat16()
    results = []
    for near in (False, True):
        parts = [each.clamp(0, 300) if near else each for each in (start, end, hidden_from, hidden_to)]
        mask = dmattn_ops.prepare_mask(intervals=(parts[0], parts[1]), hidden=(parts[2], parts[3]), seqlen_q=300)
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        out, lse = dmattn_ops.flash_dmattn_func(*leaves, mask, return_lse=True, deterministic=True)
        results.append([out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad_out)])
    for far, clamped in zip(*results, strict=True):
        assert torch.equal(far, clamped)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dim", DIMS)
def test_gradients_of_parts_of_the_keys_add_up_with_the_statistics_of_all(dim: int, with_bias: bool) -> None:
    """What context parallelism and chunks do: out and the pair of lse of all keys, a backward for each part of them."""
    torch.manual_seed(dim)
    query, key, value, grad_out = (torch.randn(1, 384, 2, dim, device="cuda").bfloat16() for _ in range(4))
    start = torch.randint(0, 200, (1, 2, 384), device="cuda", dtype=torch.int32)
    mask = dmattn_ops.prepare_mask(intervals=(start, start + 150), seqlen_q=384)
    bias = torch.randn(1, 2, 1, 384, device="cuda") * 1e5 if with_bias else None  # rows that need the pair
    call = Call(query, key, value, bias, mask.mask, None, None, None, plain_options(dim**-0.5))
    saved = Saved(torch.empty_like(query), *(torch.empty(1, 2, 384, device="cuda") for _ in range(2)))
    run.forward(call, Result(*saved, None))
    whole = backward(call, saved, grad_out)
    parts = []
    for part in (slice(0, 256), slice(256, 384)):
        of_part = mask.keys(part.start, part.stop).mask
        added = None if bias is None else bias[..., part].contiguous()
        parts.append(
            backward(call._replace(key=key[:, part], value=value[:, part], bias=added, mask=of_part), saved, grad_out)
        )
    (dq, *first), (more, *second) = parts
    together = [dq.float() + more.float(), *(torch.cat(pair, 1) for pair in zip(first, second, strict=True))]
    for name, one, other in zip(("dq", "dk", "dv"), together, whole, strict=True):
        assert relative_error(one, other.double()) < EPS[torch.bfloat16], name


def backward(call: Call, saved: Saved, grad_out: Tensor) -> list[Tensor]:
    """Return dq, dk and dv, which held NaN before."""
    found = [torch.full_like(each, float("nan")) for each in (call.query, call.key, call.value)]
    dbias = None if call.bias is None else torch.full_like(call.bias, float("nan"))
    run.backward(call, saved, Gradients(grad_out, None, *found, dbias))
    return found
