"""Packed sequences on the SM 9.0 kernels: bands, biases, masks of keys, uneven lengths, graphs and plans, against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import dmattn_ops
from dmattn_ops.call import NO_MASK, Call, Gradients, Mask, Result, Saved, Varlen, plain_options
from dmattn_ops.dispatch import run
from dmattn_ops.kernels.hopper.backward import launch as hopper_backward
from dmattn_ops.kernels.hopper.forward import launch as hopper_forward
from dmattn_ops.launching import plans
from dmattn_ops.testing import Problem, check
from dmattn_ops.testing.oracle import relative_error
from tests.support.architecture import skip_file_without_hopper
from tests.support.packed_cases import Packed, draw_packed, offsets_of
from tests.support.replays import replayed

pytestmark = pytest.mark.gpu
skip_file_without_hopper()

DIMS = [64, 128, 256]
BASE = Problem(
    seed=3, variant="varlen", dtype="bfloat16", batch=5, heads=4, heads_k=4, seqlen_q=400, seqlen_k=520, lse_grad=True
)
CASES = {
    "full": BASE,
    "causal": replace(BASE, is_causal=True),
    "causal from the top left": replace(BASE, is_causal=True, causal_from="top_left", seed=4),
    "causal, more queries than keys": replace(BASE, is_causal=True, seqlen_q=700, seqlen_k=200, seed=5),
    "a window": replace(BASE, left=100, right=30, seed=6),
    "a window from the top left": replace(BASE, left=70, is_causal=True, causal_from="top_left", seed=7),
    "one limit": replace(BASE, right=5, seed=8),
    "many sequences": replace(BASE, batch=60, seqlen_q=150, seqlen_k=150, is_causal=True, seed=9),
    "grouped heads": replace(BASE, heads=8, heads_k=2, is_causal=True, seed=10),
    "a bias per key": replace(BASE, bias=True, bias_shape="h", bias_float32=True, seed=11),
    "a bias of key heads": replace(BASE, bias=True, bias_shape="k", heads=8, heads_k=2, is_causal=True, seed=12),
    "a mask of keys": replace(BASE, mask="keys", mask_shape="", is_causal=True, seed=13),
    "a mask of keys of each head and a bias": replace(BASE, mask="random", mask_shape="h", bias=True, bias_shape="", seed=14),
    "nothing visible": replace(BASE, mask="none", mask_shape="", seed=15),
    "a soft cap": replace(BASE, softcap=5.0, magnitude=2.0, is_causal=True, seed=16),
    "sinks": replace(BASE, sink="float32", is_causal=True, seed=17),
    "large scores": replace(BASE, softmax_scale=3.0, magnitude=3.0, is_causal=True, seed=18),
}  # fmt: skip
RELATIVE = {torch.bfloat16: 8e-3, torch.float16: 1.2e-3}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("dim", DIMS)
def test_out_and_gradients_stay_within_the_budget(taken, dim: int, case: Problem, dtype: str) -> None:
    check(replace(case, dim=dim, dim_v=dim, dtype=dtype), "cuda", repeats=3)
    assert taken[0] == "hopper"
    assert taken[-1] == ("portable" if dim == 256 and case.softcap and (case.bias or case.mask) else _backward(dim))


@pytest.mark.parametrize("dim", DIMS)
def test_sequences_of_few_queries_have_a_portable_forward(taken, dim: int) -> None:
    """Tiles that hold rows of one sequence alone would be almost empty."""
    check(replace(BASE, batch=60, seqlen_q=30, seqlen_k=30, dim=dim, dim_v=dim, is_causal=True), "cuda", repeats=2)
    assert taken[0] == "portable"


@pytest.mark.parametrize("chunk", [2, 8])
@pytest.mark.parametrize("case", ["causal", "many sequences", "grouped heads", "a bias per key"])
@pytest.mark.parametrize("dim", [64, 128])
def test_tiles_in_chunks_stay_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, taken, dim: int, case: str, chunk: int
) -> None:
    for launcher in (hopper_forward, hopper_backward):
        monkeypatch.setattr(launcher, "chunk_of_tiles", lambda heads, rounds, device: chunk)
    check(replace(CASES[case], dim=dim, dim_v=dim), "cuda", repeats=2)
    assert taken == ["hopper"] * len(taken)
    plans.forget()


def _backward(dim: int) -> str:
    return "hopper" if dim <= 128 else "hopper256"


def test_the_portable_forward_and_this_backward_round_large_scores_alike(taken) -> None:
    """One query over many keys is computed by the portable forward, and the backward takes the mask of keys as a bias."""
    problem = Problem(
        seed=91830, variant="varlen", dtype="bfloat16", batch=2, heads=1, heads_k=1, seqlen_q=1, seqlen_k=336, dim=144,
        dim_v=144, mask="random", mask_shape="bhq", steep=1e6,
    )  # fmt: skip
    check(problem, "cuda", repeats=3)
    assert {*taken} == {"portable", "hopper256"}


@pytest.mark.parametrize("case", ["causal", "a bias per key", "many sequences"])
@pytest.mark.parametrize("dim", DIMS)
def test_deterministic_calls_repeat_bit_for_bit(taken, dim: int, case: str) -> None:
    check(replace(CASES[case], dim=dim, dim_v=dim, deterministic=True), "cuda", repeats=5)
    assert {*taken} == {"hopper", "hopper256"}


@pytest.mark.parametrize("case", ["causal", "a mask of keys", "many sequences", "grouped heads"])
@pytest.mark.parametrize("dim", DIMS)
def test_captured_graphs(dim: int, case: str) -> None:
    check(replace(CASES[case], dim=dim, dim_v=dim), "cuda", run=replayed)


@pytest.mark.parametrize("dim", [(40, 40), (96, 72), (64, 128), (192, 192)])
def test_other_head_dimensions(dim: tuple[int, int]) -> None:
    check(replace(BASE, dim=dim[0], dim_v=dim[1], is_causal=True), "cuda", repeats=2)


def spoiled(call: Call, grad_out: Tensor) -> dict[str, Tensor]:
    """Return what forward and backward of a call write over NaN."""
    query = call.query
    out = query.new_full((*query.shape[:-1], call.value.shape[-1]), math.nan)
    lse = torch.full((query.shape[1], query.shape[0]), math.nan, device="cuda")
    tail = torch.full_like(lse, math.nan)
    run.forward(call, Result(out, lse, tail, None))
    grads = [torch.full_like(each, math.nan) for each in (query, call.key, call.value)]
    dbias = None if call.bias is None else torch.full_like(call.bias, math.nan)
    run.backward(call, Saved(out, lse, tail), Gradients(grad_out, None, *grads, dbias))
    return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def defined(call: Call, keep: Tensor, grad_out: Tensor) -> dict[str, Tensor]:
    """Return the same in float64 from a mask `[total_q, total_k]`, heads as they are."""
    q, k, v = (each.double().transpose(0, 1).requires_grad_() for each in (call.query, call.key, call.value))
    group = q.shape[0] // k.shape[0]
    scores = q @ k.repeat_interleave(group, 0).mT * call.options.softmax_scale
    scores = torch.where(keep, scores, -torch.inf)
    lse = torch.where(keep.any(1), scores.logsumexp(-1), -torch.inf)
    weights = torch.where(keep, (scores - torch.where(keep.any(1), lse, 0).unsqueeze(-1)).exp(), 0)
    out = weights @ v.repeat_interleave(group, 0)
    gradients = torch.autograd.grad(out, (q, k, v), grad_out.double().transpose(0, 1))
    rows = {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    return {name: part.transpose(0, 1) for name, part in rows.items()} | {"lse": lse.detach()}


def call_of(problem: Packed, dim: int, heads: int = 2, heads_k: int = 1, dtype: torch.dtype = torch.bfloat16) -> Call:
    """Return a call with random values."""
    total_q, total_k = sum(problem.lengths_q), sum(problem.lengths_k)
    shapes = ((total_q, heads, dim), (total_k, heads_k, dim), (total_k, heads_k, dim))
    tensors = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    empty = problem.call()
    options = plain_options(dim**-0.5, *empty.options[:2])
    return Call(*tensors, None, NO_MASK, None, None, on_gpu(problem), options)


def on_gpu(problem: Packed) -> Varlen:
    varlen = problem.varlen
    offsets = varlen.cu_seqlens_q.cuda(), varlen.cu_seqlens_k.cuda()
    return varlen._replace(cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1])


UNEVEN = {
    "one long among many short": Packed((*(50,) * 40, 2500, *(50,) * 40), (*(50,) * 40, 2500, *(50,) * 40), is_causal=True),
    "a thousand short": Packed((3, 1, 0, 7) * 250, (3, 1, 0, 7) * 250, is_causal=True),
    "keys without queries": Packed((0, 300, 0, 90), (200, 300, 130, 0), is_causal=True),
    "one sequence": Packed((1000,), (1000,), is_causal=True),
    "whole tiles": Packed((128, 256, 384), (128, 256, 384), is_causal=True),
    "16 of 64 to 3500": Packed((64, 3500, 100, 1200, 90, 800, 300, 700, 64, 500, 250, 400, 150, 600, 128, 158), (64, 3500, 100,
                               1200, 90, 800, 300, 700, 64, 500, 250, 400, 150, 600, 128, 158), is_causal=True),
}  # fmt: skip


@pytest.mark.parametrize("problem", UNEVEN.values(), ids=UNEVEN.keys())
@pytest.mark.parametrize("dim", DIMS)
def test_uneven_sequences_are_whole_over_spoiled_memory_again_and_again(dim: int, problem: Packed) -> None:
    torch.manual_seed(dim)
    call = call_of(problem, dim)
    grad_out = torch.randn_like(call.query)
    keep = problem.keep().cuda()
    expected = defined(call, keep, grad_out)
    for _ in range(5):
        for name, found in spoiled(call, grad_out).items():
            assert relative_error(found, expected[name]) < RELATIVE[torch.bfloat16], name
            if name in ("dk", "dv"):
                assert not found[~keep.any(0)].any()
            elif name != "lse":
                assert not found[~keep.any(1)].any()


@pytest.mark.parametrize("seed", range(40))
def test_random_sequences(seed: int) -> None:
    problem = draw_packed(seed)
    if not sum(problem.lengths_q) or not sum(problem.lengths_k):
        problem = Packed((3, *problem.lengths_q), (2, *problem.lengths_k))
    dtype = (torch.bfloat16, torch.float16)[seed % 2]
    call = call_of(problem, DIMS[seed % 3], heads=4, heads_k=(1, 2, 4)[seed % 3], dtype=dtype)
    grad_out = torch.randn_like(call.query)
    expected = defined(call, problem.keep().cuda(), grad_out)
    for name, found in spoiled(call, grad_out).items():
        assert relative_error(found, expected[name]) < RELATIVE[dtype], (name, problem)


def test_rows_behind_the_last_sequence_are_empty_and_offsets_that_describe_nothing_stay_inside() -> None:
    problem = Packed((300, 200), (300, 200), is_causal=True)
    call = call_of(problem, 64)
    assert call.varlen is not None
    grad_out = torch.randn_like(call.query)
    short = call.varlen._replace(cu_seqlens_q=offsets_of((300, 100)).cuda(), cu_seqlens_k=offsets_of((300, 100)).cuda())
    found = spoiled(call._replace(varlen=short), grad_out)
    assert not any(found[name][400:].any() for name in ("out", "dq", "dk", "dv"))
    assert bool((found["lse"][:, 400:] == -torch.inf).all())
    wild = torch.tensor([-5, 700, 3, 2**31 - 1, -(2**31)], dtype=torch.int32, device="cuda")
    spoiled(call._replace(varlen=call.varlen._replace(cu_seqlens_q=wild, cu_seqlens_k=wild.flip(0))), grad_out)
    torch.cuda.synchronize()


@pytest.mark.parametrize("dim", [64, 128])
def test_fifty_launches_give_the_same_bits_but_for_dq(dim: int) -> None:
    """dq of heads up to 128 is added up in any order."""
    call = call_of(UNEVEN["16 of 64 to 3500"], dim)
    grad_out = torch.randn_like(call.query)
    first: dict[str, Tensor] = {}
    for _ in range(50):
        found = spoiled(call, grad_out)
        first = first or found
        for name, one in first.items():
            if name == "dq":
                assert relative_error(found[name], one.double()) < 4e-3
            else:
                assert torch.equal(one, found[name]), name


def test_lengths_that_change_between_calls_of_the_same_totals_are_read_anew() -> None:
    """The plan of a signature reads the offsets of each call."""
    q, k, v = (torch.randn(1000, 2, 64, device="cuda").bfloat16() for _ in range(3))
    for lengths in ((500, 500), (1, 999), (300, 700), (999, 1), (0, 1000)) * 2:
        offsets = offsets_of(lengths).cuda()
        found = dmattn_ops.flash_dmattn_varlen_func(q, k, v, offsets, offsets, 1000, 1000, is_causal=True)
        problem = Packed(lengths, lengths, is_causal=True)
        call = Call(q, k, v, None, NO_MASK, None, None, on_gpu(problem), plain_options(64**-0.5))
        expected = defined(call, problem.keep().cuda(), torch.zeros_like(q))["out"]
        assert relative_error(found, expected) < RELATIVE[torch.bfloat16]


def test_what_the_kernels_cannot_serve_is_refused_in_words(taken) -> None:
    problem = Packed((20, 16), (900, 1000))
    call = call_of(problem, 64)
    choice = run.offered("forward", call)
    assert choice.row.kernel == "portable"
    assert any("sequences of at most 20 queries leave most of" in each.reason for each in choice.passed_over)
    choice = run.offered("forward", call_of(UNEVEN["a thousand short"], 64))
    assert choice.row.kernel == "portable"
    assert any("1000 sequences of 2750 queries in all leave most" in each.reason for each in choice.passed_over)
    of_keys = torch.zeros(1, 1, 1900, dtype=torch.int32, device="cuda")
    capped = call_of(problem, 256)._replace(mask=Mask(k_segments=of_keys))
    choice = run.offered("backward", capped._replace(options=capped.options._replace(softcap=3.0)))
    assert choice.row.kernel == "portable"
    assert any(
        "takes no softcap with a bias, or with a mask of packed keys" in each.reason for each in choice.passed_over
    )
