"""Packed keys of dynamic masks on a GPU: the whole path against the definition, in passes, repeated, captured, broken."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import dmattn_ops
from dmattn_ops.choice import epochs
from dmattn_ops.dispatch import run
from dmattn_ops.launching import plans
from dmattn_ops.testing.oracle import EPS, relative_error

pytestmark = pytest.mark.gpu
SEQLEN, KEEP = 900, 100
PARTS = ("out", "lse", "dq", "dk", "dv", "dbias")


@pytest.fixture(autouse=True)
def packed_calls(monkeypatch: pytest.MonkeyPatch) -> list[epochs.Packing]:
    """Keys are packed although there are few; return how, by call that was computed in full. No plans of other tests."""
    plans.forget()
    monkeypatch.setattr(epochs, "pays", lambda sizes: True)
    monkeypatch.setattr(epochs, "LEAST_EPOCH", 256)
    found, plain = [], run.packing_of

    def noted(*given, **named):
        made, reasons = plain(*given, **named)
        found.extend([] if made is None else [made])
        return made, reasons

    monkeypatch.setattr(run, "packing_of", noted)
    yield found
    plans.forget()


def draw(dim: int, heads: int = 4, key_heads: int = 2, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Return query, key, value and a bias per key; the bias is the scores of the mask too."""
    torch.manual_seed(dim)
    parts = [torch.randn(2, SEQLEN, own, dim, device="cuda").to(dtype) for own in (heads, key_heads, key_heads)]
    return [*parts, torch.randn(1, key_heads, 1, SEQLEN, device="cuda")]


def mask_of(bias: Tensor, **keywords: int) -> dmattn_ops.TileMask:
    return dmattn_ops.dynamic_mask(bias.detach()[:, :, 0], KEEP, **keywords)


def step(inputs: list[Tensor], mask: dmattn_ops.TileMask, grad_out: Tensor, **keywords: bool) -> list[Tensor]:
    """Return out, lse and the gradients of leaves with memory of their own."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    query, key, value, bias = leaves
    out, lse = dmattn_ops.flash_dmattn_func(query, key, value, mask, bias, return_lse=True, **keywords)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def by_definition(inputs: list[Tensor], keep: Tensor, grad_out: Tensor, dtype: torch.dtype) -> list[Tensor]:
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    heads = leaves[0].shape[2]
    query, key, value = (part.transpose(1, 2) for part in leaves[:3])
    key, value, bias, keep = (
        part.repeat_interleave(heads // part.shape[1], 1) for part in (key, value, leaves[3], keep)
    )
    scores = torch.where(keep, query @ key.mT * query.shape[-1] ** -0.5 + bias, -torch.inf)
    out = (scores.softmax(-1) @ value).transpose(1, 2)
    return [out.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(out, leaves, grad_out.to(dtype))]


def check(found: list[Tensor], inputs: list[Tensor], keep: Tensor, grad_out: Tensor) -> None:
    exact = by_definition(inputs, keep, grad_out, torch.float64)
    eager = by_definition(inputs, keep, grad_out, inputs[0].dtype)
    for name, ours, true, plain in zip(PARTS, found, exact, eager, strict=True):
        limit = 2 * relative_error(plain, true) + EPS[inputs[0].dtype]
        assert relative_error(ours, true) <= limit, name


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_packed_calls_stay_within_the_budget_and_repeat(packed_calls, dim: int, key_heads: int, deterministic: bool):
    inputs = draw(dim, key_heads=key_heads)
    mask, grad_out = mask_of(inputs[3], keep_last=20), torch.randn_like(inputs[0])
    results = [step(inputs, mask, grad_out, deterministic=deterministic) for _ in range(5)]
    for found in results:
        check(found, inputs, mask.to_dense(), grad_out)
        for name, one, other in zip(PARTS, results[0], found, strict=True):
            assert torch.equal(one, other) or (name == "dq" and not deterministic), name
    assert len(packed_calls) == 4, "a forward and a backward, computed in full twice, then repeated"


def test_packed_calls_in_float32_stay_within_the_budget(packed_calls):
    inputs = draw(64, dtype=torch.float32)
    mask, grad_out = mask_of(inputs[3]), torch.randn_like(inputs[0])
    check(step(inputs, mask, grad_out), inputs, mask.to_dense(), grad_out)
    assert packed_calls


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_half_of_the_keys_that_leave_one_by_one(packed_calls, dim: int):
    """Intervals that begin on the diagonal, with a promise, need no dynamic mask to be packed."""
    inputs, half = draw(dim), SEQLEN // 2
    end = torch.full((1, 1, SEQLEN), SEQLEN, dtype=torch.int32, device="cuda")
    end[..., torch.randperm(half, device="cuda")] = half + torch.arange(half, dtype=torch.int32, device="cuda")
    mask = dmattn_ops.prepare_mask(intervals=(None, end), at_most=half, seqlen_q=SEQLEN, is_causal=True)
    grad_out = torch.randn_like(inputs[0])
    check(step(inputs, mask, grad_out), inputs, mask.to_dense().expand(-1, 2, -1, -1), grad_out)
    assert packed_calls and packed_calls[0].epochs.length >= 512


def test_parts_of_one_projection_are_repeated_from_a_plan(packed_calls):
    """Query, key and value share their memory, as the parts of most models' projections do."""
    inputs = draw(64)
    mask, grad_out = mask_of(inputs[3]), torch.randn_like(inputs[0])
    fused, results = torch.cat(inputs[:3], 2), []
    for _ in range(4):
        leaf = fused.clone().requires_grad_()
        query, key, value = leaf.split([4, 2, 2], 2)
        out = dmattn_ops.flash_dmattn_func(query, key, value, mask, inputs[3], deterministic=True)
        results.append((out.detach(), *torch.autograd.grad(out, leaf, grad_out)))
    assert len(plans._plans) == 2 and None not in plans._plans.values()
    assert len(packed_calls) == 4
    for found in results[1:]:
        assert all(map(torch.equal, found, results[0]))


def test_passes_give_what_one_gives_in_less_memory(packed_calls, monkeypatch: pytest.MonkeyPatch):
    """The second call, at which a plan would be recorded, takes no more memory than the others.

    Fewer heads at a time may take other blocks, so that passes and one pass only agree within the budget.
    """
    torch.manual_seed(0)
    inputs = [torch.randn(1, 4096, 8, 128, device="cuda").bfloat16() for _ in range(3)]
    inputs.append(torch.randn(1, 8, 1, 4096, device="cuda"))
    mask, grad_out = mask_of(inputs[3]), torch.randn_like(inputs[0])

    def peak() -> tuple[list[Tensor], int]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = step(inputs, mask, grad_out, deterministic=True)
        torch.cuda.synchronize()
        return found, torch.cuda.max_memory_allocated() - before

    _, of_whole = peak()
    assert packed_calls[-1].heads_per_pass == 8
    plans.forget()
    monkeypatch.setattr(epochs, "heads_per_pass", lambda *sizes: 1)
    several = [peak() for _ in range(3)]
    assert packed_calls[-1].heads_per_pass == 1
    for found, _ in several:
        check(found, inputs, mask.to_dense(), grad_out)
        assert all(map(torch.equal, found, several[0][0]))
    peaks = [of_several for _, of_several in several]
    assert max(peaks) < 1.1 * min(peaks) and max(peaks) < of_whole


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_packed_calls_are_captured(packed_calls, dim: int):
    inputs = draw(dim)
    mask, grad_out = mask_of(inputs[3]), torch.randn_like(inputs[0])
    step(inputs, mask, grad_out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(inputs, mask, grad_out)
    for _ in range(2):
        for tensor in captured:
            tensor.fill_(float("nan"))
        graph.replay()
        check(captured, inputs, mask.to_dense(), grad_out)
    assert packed_calls


def broken(dim: int, kernel: Callable[..., list[Tensor]]) -> tuple[list[Tensor], Tensor]:
    """Compute a call that keeps 300 keys under the promise of 128; return the results and which rows are concerned."""
    inputs = draw(dim)
    mask = dmattn_ops.dynamic_mask(inputs[3][:, :, 0], 300)
    promised = mask._with({"at_most": 128})
    found = kernel(inputs, promised, torch.randn_like(inputs[0]))
    return found, torch.arange(SEQLEN, device="cuda") >= 256


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rows_of_a_broken_promise_are_nan(packed_calls, dim: int):
    (out, lse, *_), concerned = broken(dim, step)
    assert packed_calls[-1].epochs.length == 256
    assert out[:, concerned].isnan().all() and lse[..., concerned].isnan().all()
    assert out[:, ~concerned].isfinite().all() and lse[..., ~concerned].isfinite().all()


def test_a_mask_that_shows_nothing_gives_zeros(packed_calls):
    """Rows behind all keys: no slot is used, and there is one block of them all the same."""
    inputs = draw(128)
    mask = dmattn_ops.dynamic_mask(inputs[3][:, :, 0], 0).queries(600, 860).keys(0, 300)
    query, key, value = inputs[0][:, 600:860], inputs[1][:, :300], inputs[2][:, :300]
    bias = inputs[3][..., :300].contiguous()
    out, lse, *gradients = step([query, key, value, bias], mask, torch.randn_like(query))
    assert packed_calls[-1].epochs.slots == 128
    assert lse.isneginf().all() and not any(part.any() for part in (out, *gradients))
