"""Attention to chosen blocks on a GPU: the kernels that gather them against the definition in float64."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from chosen_calls import by_definition, check_close, drawn_call, poisoned
from chosen_cases import Case, draw
from torch import Tensor

from dmattn_ops import flash_dmattn_func, selection_mask
from dmattn_ops.call import Call
from dmattn_ops.dispatch import run
from tests.gpu.test_selection_mask import on_gpu

pytestmark = pytest.mark.gpu
KINDS = {  # block, head dimensions and query heads of a group: each is compiled for itself
    "keys": (1, (64, 64), 16),
    "blocks of 4": (4, (128, 128), 5),
    "blocks of 24": (24, (192, 128), 4),
    "blocks of 64": (64, (128, 128), 16),
    "blocks of 128": (128, (256, 256), 8),
}


def drawn(seed: int, longest: int, block: int, group: int) -> Case:
    """Return a case in which heads of a group share a list, as the kernels ask for."""
    case, pick = draw(seed, longest), random.Random(seed)
    indices = case.indices if case.indices.shape[1] in (1, case.heads_kv) else case.indices[:, : case.heads_kv]
    if pick.random() < 0.5 and indices.shape[2] > 1:  # neighbours agree
        indices = indices[:, :, :1].expand_as(indices).clone()
    indices = torch.where(indices < 0, -1, indices % -(-case.seqlen_k // block))
    return replace(case, indices=indices, block=block, heads=case.heads_kv * group)


def check(seed: int, longest: int, kind: str) -> bool:
    """Compare one case; return whether the kernels that gather took it."""
    block, dims, group = KINDS[kind]
    case, dtype = drawn(seed, longest, block, group), torch.bfloat16
    call, shown = drawn_call(case, seed, *dims, dtype)
    batch, seqlen_q, heads, _ = call.query.shape
    generator = torch.Generator().manual_seed(seed + 1)
    grad_out = torch.randn(batch, seqlen_q, heads, dims[1], generator=generator).to(dtype)
    grad_lse = torch.randn(batch, heads, seqlen_q, generator=generator)
    as_given = call._replace(query=call.query.cuda(), key=call.key.cuda(), value=call.value.cuda())
    expected = by_definition(on_device(as_given), shown.cuda(), grad_out.cuda(), grad_lse.cuda())
    call, (grad_out, grad_lse) = poisoned(call, shown, (grad_out, grad_lse))
    mask = selection_mask(case.indices.cuda(), **on_gpu(case.mask_arguments))
    primals = [part.cuda().requires_grad_() for part in (call.query, call.key, call.value)]
    sink = None if call.sink is None else call.sink.cuda().requires_grad_()
    keywords = {"softmax_scale": call.options.softmax_scale, "softcap": call.options.softcap, "sink": sink}
    wanted = [*primals, *([] if sink is None else [sink])]
    for _ in range(2):  # in full, then by a plan
        out, lse, row_max = flash_dmattn_func(*primals, mask, return_lse=True, return_max=True, **keywords)
        grads = torch.autograd.grad((out, lse), wanted, (grad_out.cuda(), grad_lse.cuda()))
        found = dict(zip(("dq", "dk", "dv", "dsink"), grads, strict=False)) | {
            "out": out,
            "lse": lse,
            "row_max": row_max,
        }
        for name, result in found.items():
            check_close(name, result.detach(), expected[name], dtype, case)
    return not run.reasons_against_lists("backward", on_device(as_given))


def on_device(call: Call) -> Call:
    """Return a call with its other tensors on the GPU."""
    assert call.chosen is not None
    chosen = call.chosen._replace(indices=call.chosen.indices.cuda())
    return call._replace(chosen=chosen, sink=None if call.sink is None else call.sink.cuda())


@pytest.mark.parametrize("first", range(0, 200, 20))
@pytest.mark.parametrize("kind", KINDS)
def test_any_short_case_is_what_the_definition_says(kind: str, first: int):
    assert sum(check(seed, 60, kind) for seed in range(first, first + 20)) > 2, "kernels that gather take most"


@pytest.mark.parametrize("first", range(0, 25, 5))
@pytest.mark.parametrize("kind", KINDS)
def test_any_longer_case_is_what_the_definition_says(kind: str, first: int):
    for seed in range(first, first + 5):
        check(seed, 700, kind)


def inputs(
    seqlen: int, heads: int = 16, dim: int = 128, block: int = 64, named: int = 8
) -> tuple[list[Tensor], Tensor]:
    """Return query, key and value with one key head, and choices that some neighbours share."""
    torch.manual_seed(0)
    primals = [
        torch.randn(1, seqlen, count, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for count in (heads, 1, 1)
    ]
    indices = torch.randint(0, -(-seqlen // block), (1, 1, seqlen, named), device="cuda")
    indices[:, :, : seqlen // 2] = indices[:, :, : seqlen // 2 : 16].repeat_interleave(16, 2)[:, :, : seqlen // 2]
    return primals, indices


@pytest.mark.parametrize("block", [4, 64])
def test_the_same_is_computed_as_by_bits(block: int):
    primals, indices = inputs(2048, block=block)
    mask = selection_mask(indices, block=block)
    assert mask.kind == "chosen"
    results = []
    for each in (mask, mask.queries(0, 2048), selection_mask(indices.cpu(), block=block).to("cuda")):
        out = flash_dmattn_func(*primals, each)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), primals)])
    for found in results[:2]:
        for one, other in zip(found, results[2], strict=True):
            assert (one.float() - other.float()).norm() <= 1e-2 * other.float().norm()


def test_a_deterministic_call_has_the_same_bits_each_time():
    primals, indices = inputs(4096)
    mask = selection_mask(indices, block=64)

    def results() -> list[Tensor]:
        out = flash_dmattn_func(*primals, mask, deterministic=True)
        return [out, *torch.autograd.grad(out.float().square().sum(), primals)]

    first = results()
    for _ in range(5):
        assert all(torch.equal(one, other) for one, other in zip(first, results(), strict=True))


def test_masks_are_made_and_used_in_compiled_graphs():
    primals, indices = inputs(1024)

    def attend(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
        return flash_dmattn_func(query, key, value, selection_mask(chosen, block=64))

    out, compiled = attend(*primals, indices), torch.compile(attend, fullgraph=True)(*primals, indices)
    torch.testing.assert_close(compiled, out)
    weights = torch.randn_like(out)
    for one, other in zip(
        torch.autograd.grad(compiled, primals, weights), torch.autograd.grad(out, primals, weights), strict=True
    ):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


def test_a_cuda_graph_repeats_forward_and_backward():
    primals, indices = inputs(2048)
    mask, weights = (
        selection_mask(indices, block=64),
        torch.randn(1, 2048, 16, 128, device="cuda", dtype=torch.bfloat16),
    )

    def step() -> list[Tensor]:
        out = flash_dmattn_func(*primals, mask)
        return [out, *torch.autograd.grad(out, primals, weights)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for part in primals:
            part.copy_(torch.randn_like(part))
    graph.replay()
    for one, other in zip(captured, step(), strict=True):
        assert (one.float() - other.float()).norm() <= 1e-2 * other.float().norm()


def test_what_is_hidden_from_all_reaches_nothing():
    primals, indices = inputs(1000, block=64)
    padding = torch.ones(1, 1000, dtype=torch.bool, device="cuda")
    padding[:, 900:] = False
    mask = selection_mask(indices, block=64, padding=padding)
    with torch.no_grad():
        for part in primals[1:]:
            part[:, 900:] = math.nan
    out = flash_dmattn_func(*primals, mask)
    grads = torch.autograd.grad(out.float().square().sum(), primals)
    assert not any(part.isnan().any() for part in (out, *grads))
    assert not any(part[:, 900:].any() for part in grads[1:])


def test_memory_follows_what_is_chosen_and_not_the_square_of_the_length():
    primals, indices = inputs(131072, heads=4, dim=64, named=32)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = flash_dmattn_func(*primals, selection_mask(indices, block=64))
    grads = torch.autograd.grad(out, primals, torch.ones_like(out))
    own = sum(part.nbytes for part in (out, *grads))
    assert torch.cuda.max_memory_allocated() - before - own < 1 << 30
