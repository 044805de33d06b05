"""Sinks, the largest score of each row, scores of any size, and attention over parts of the keys, against their formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dmattn_ops
from dmattn_ops.kernels.reference import philox_keep
from dmattn_ops.meta import lse_dtype
from tests.support import call_inputs

attention = dmattn_ops.flash_dmattn_func
forward_op, backward_op = torch.ops.dmattn.forward, torch.ops.dmattn.backward
DOUBLE = {"dtype": torch.float64}
INF = float("inf")


def scores_of(query: Tensor, key: Tensor, bias: Tensor | None = None, softcap: float = 0.0) -> Tensor:
    """Return the scores `[B, H, Sq, Sk]` of the contract, unmasked."""
    key = key.repeat_interleave(query.shape[2] // key.shape[2], 2)
    scores = torch.einsum("bihd,bjhd->bhij", query, key) * query.shape[-1] ** -0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    return scores if bias is None else scores + bias


def with_sink(scores: Tensor, value: Tensor, sink: Tensor, kept: Tensor | None = None) -> Tensor:
    """Return `sum exp(s) v / (exp(sink) + sum exp(s))`; rows without visible keys are 0. Weights are multiplied by `kept`."""
    value = value.repeat_interleave(scores.shape[1] // value.shape[2], 2)
    column = sink[None, :, None, None].expand(*scores.shape[:3], 1).to(scores.dtype)
    empty = (scores == -INF).all(-1, keepdim=True) & (column == -INF)
    weights = torch.cat((scores, torch.where(empty, 0.0, column)), -1).softmax(-1)[..., :-1]
    return torch.einsum("bhij,bjhd->bihd", weights if kept is None else weights * kept, value)


CALLS = {
    "plain": {},
    "grouped": {"heads_kv": 2, "seqlen_k": 50},
    "causal": {"is_causal": True},
    "mask with empty rows": {"mask": True},
    "bias and softcap": {"bias": True, "softcap": 3.0},
}


@pytest.mark.parametrize("bad", [float("nan"), INF])
@pytest.mark.parametrize("with_lse", [False, True], ids=["out", "out and lse"])
def test_gradients_of_empty_rows_that_are_not_finite_reach_no_sink(bad: float, with_lse: bool):
    query, key, value = call_inputs.qkv()
    sink = torch.zeros(query.shape[2], requires_grad=True)
    keep = torch.ones(1, 1, query.shape[1], key.shape[1], dtype=torch.bool)
    keep[:, :, 5:9] = False
    out, lse = attention(query, key, value, keep, sink=sink, return_lse=True)
    grads = []
    for at_empty_rows in (0.0, bad):
        grad_out, grad_lse = torch.ones_like(out), torch.ones_like(lse)
        grad_out[:, 5:9], grad_lse[:, :, 5:9] = at_empty_rows, at_empty_rows
        given = ([out, lse], [grad_out, grad_lse]) if with_lse else ([out], [grad_out])
        grads.append(torch.autograd.grad(given[0], (query, key, value, sink), given[1], retain_graph=True))
    for usual, beside in zip(*grads, strict=True):
        torch.testing.assert_close(beside, usual, rtol=0, atol=0)
    assert grads[0][-1].abs().min() > 0


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("sizes", [(0.5, -1.0, 2.0, 0.0), (-INF, 30.0, -30.0, 1e4)], ids=["usual", "extreme"])
def test_a_sink_takes_its_share_of_the_softmax(name: str, sizes: tuple, attention):
    call = dict(CALLS[name])
    inputs = call_inputs.qkv(**{key: call.pop(key) for key in ("heads_kv", "seqlen_k") if key in call}, **DOUBLE)
    query, key, value = inputs
    sink = torch.tensor(sizes, dtype=torch.float64, requires_grad=True)
    leaves, mask, bias = [*inputs, sink], None, None
    keep = torch.ones(33, key.shape[1], dtype=torch.bool).tril(key.shape[1] - 33 if call.get("is_causal") else 999)
    if call.pop("mask", False):
        mask = keep = call_inputs.random_mask(2, 4, 33, 33) & (torch.arange(33) % 5 > 0)[:, None]
    if call.pop("bias", False):
        bias = call_inputs.random_bias(1, 4, 33, 33, **DOUBLE)
        leaves.append(bias)
    scores = scores_of(query, key, bias, call.get("softcap", 0.0)).masked_fill(~keep, -INF)
    out, lse = attention.flash_dmattn_func(query, key, value, mask, bias, sink=sink, return_lse=True, **call)
    expected = with_sink(scores, value, sink)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    seen = lse.detach() > -INF
    pairs = zip(
        torch.autograd.grad((out * grad_out).sum() + (lse * grad_lse)[seen].sum(), leaves),
        torch.autograd.grad((expected * grad_out).sum() + (scores.logsumexp(-1) * grad_lse)[seen].sum(), leaves),
        strict=True,
    )
    for actual, wanted in pairs:
        torch.testing.assert_close(actual, torch.where(wanted.isnan(), 0.0, wanted), atol=1e-9, rtol=1e-7)


def test_gradcheck_of_sinks():
    inputs = call_inputs.qkv(1, 5, 2, 3, heads_kv=1, **DOUBLE)
    sink = torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True)
    bias = call_inputs.random_bias(1, 1, 5, 5, **DOUBLE)

    def call(query, key, value, bias, sink):
        return attention(query, key, value, bias=bias, sink=sink, softcap=2.0, is_causal=True, return_lse=True)

    assert torch.autograd.gradcheck(call, (*inputs, bias, sink))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("own", [True, False])
def test_a_sink_has_its_own_or_the_dtype_of_query(dtype: torch.dtype, own: bool):
    inputs = call_inputs.qkv(dtype=dtype)
    sink = torch.randn(4).to(dtype if own else torch.float32).requires_grad_()
    out = attention(*inputs, sink=sink)
    assert out.dtype == dtype
    grads = torch.autograd.grad(out.float().square().sum(), (*inputs, sink))
    assert grads[-1].dtype == sink.dtype
    double = [tensor.detach().double().requires_grad_() for tensor in (*inputs, sink)]
    expected = with_sink(scores_of(*double[:2]), double[2], double[3])
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    for actual, wanted in zip(grads, torch.autograd.grad(expected.square().sum(), double), strict=True):
        assert (actual.double() - wanted).norm() <= 2e-2 * wanted.norm()
    with torch.autocast("cpu", dtype):
        cast = attention(*(tensor.float() for tensor in inputs), sink=sink)
    torch.testing.assert_close(cast, out)


def test_no_sink_is_minus_infinity_and_a_sink_alone_may_need_a_gradient():
    inputs = call_inputs.qkv(requires_grad=False)
    assert torch.equal(attention(*inputs, sink=torch.full((4,), -INF)), attention(*inputs))
    sink = torch.zeros(4, requires_grad=True)
    (gradient,) = torch.autograd.grad(attention(*inputs, sink=sink).sum(), sink)
    assert gradient.shape == (4,) and gradient.abs().sum() > 0


def test_packed_projections_and_packed_sequences_take_sinks():
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    qkv = torch.randn(2, 30, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    together = dmattn_ops.flash_dmattn_qkvpacked_func(qkv, sink=sink, is_causal=True, return_max=True)
    apart = attention(*qkv.unbind(2), sink=sink, is_causal=True, return_max=True)
    assert all(map(torch.equal, together, apart))
    grads = [torch.autograd.grad(out[0].sin().sum(), (qkv, sink)) for out in (together, apart)]
    torch.testing.assert_close(*grads)
    rows, offsets = qkv.flatten(0, 1).unbind(1), torch.tensor([0, 30, 60], dtype=torch.int32)
    packed = dmattn_ops.flash_dmattn_varlen_func(
        *rows, offsets, offsets, 30, 30, sink=sink, is_causal=True, return_max=True
    )
    torch.testing.assert_close(packed[0], apart[0].flatten(0, 1))
    torch.testing.assert_close(packed[1], apart[1].transpose(0, 1).flatten(1))
    torch.testing.assert_close(torch.autograd.grad(packed[0].sin().sum(), (qkv, sink)), grads[1])


@pytest.mark.parametrize("dropout_p", [0.25, 1.0])
def test_dropout_acts_after_the_sink_took_its_share(dropout_p: float):
    inputs = call_inputs.qkv(**DOUBLE)
    sink, seed = torch.randn(4, dtype=torch.float64, requires_grad=True), torch.randint(1 << 60, (2, 4))
    out = forward_op(*inputs, sink=sink, seed=seed, dropout_p=dropout_p)[0]
    kept = philox_keep(seed, 33, 33, dropout_p) * (0.0 if dropout_p == 1.0 else 1 / (1 - dropout_p))
    expected = with_sink(scores_of(*inputs[:2]), inputs[2], sink, kept)
    torch.testing.assert_close(out, expected)
    wanted = (*inputs, sink)
    grads = (torch.autograd.grad(tensor.sin().sum(), wanted) for tensor in (out, expected))
    torch.testing.assert_close(*grads)


# The largest score of each row.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_maximum_is_the_largest_visible_score(dtype: torch.dtype, attention):
    query, key, value = call_inputs.qkv(heads_kv=2, dtype=dtype)
    mask = call_inputs.random_mask(2, 1, 33, 33) & (torch.arange(33) != 4)[:, None]
    bias = call_inputs.random_bias(1, 4, 33, 33, dtype=dtype)
    out, lse, peak = attention.flash_dmattn_func(
        query, key, value, mask, bias, softcap=2.0, is_causal=True, return_lse=True, return_max=True
    )
    scores = scores_of(query.double(), key.double(), bias.double(), 2.0)
    scores = scores.masked_fill(~(mask & torch.ones(33, 33, dtype=torch.bool).tril()), -INF)
    assert peak.dtype == lse.dtype == lse_dtype(dtype) and not peak.requires_grad
    torch.testing.assert_close(peak.double(), scores.amax(-1).detach(), rtol=1e-5, atol=1e-5)
    assert (peak[..., 4] == -INF).all()
    only = attention.flash_dmattn_func(query, key, value, mask, bias, softcap=2.0, is_causal=True, return_max=True)
    assert len(only) == 2 and torch.equal(only[0], out) and torch.equal(only[1], peak)


# Scores of any size.


@pytest.mark.parametrize("size", [1e4, 1e9, 1e30, 3e38])
@pytest.mark.parametrize("part", ["row", "rows", "keys"])
def test_large_finite_scores_are_scores(size: float, part: str):
    """A row of them is that row less its maximum; a key of them gets all the weight or none."""
    inputs = call_inputs.qkv(1, 33, 2, 16)
    bias = torch.zeros(1, 2, 33, 33)
    index = {"row": (..., slice(3, 4), slice(None)), "rows": (...,), "keys": (..., slice(5, 9))}[part]
    grads = []
    for sign in (1, -1):
        bias[index] = sign * size
        shifted = bias.clone().requires_grad_()
        out, lse = attention(*inputs, bias=shifted, return_lse=True)
        double = [tensor.detach().double().requires_grad_() for tensor in inputs]
        exact = bias.double().requires_grad_()
        eager = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        plain = bias.clone().requires_grad_()
        results = []
        for (query, key, value), of in ((double, exact), (eager, plain)):
            scores = scores_of(query, key, of)
            expected = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), value)
            grads = torch.autograd.grad(expected.sin().sum(), (query, key, value, of))
            results.append((expected, scores.logsumexp(-1), *grads))
        ours = (out, lse, *torch.autograd.grad(out.sin().sum(), (*inputs, shifted)))
        for actual, oracle, by_eager in zip(ours, *results, strict=True):
            norm = oracle.norm()
            assert actual.isfinite().all()
            budget = 2 * (by_eager.double() - oracle).norm() + 3e-5 * norm
            assert (actual.double() - oracle).norm() <= budget


def test_lse_and_its_tail_make_weights_that_add_up_to_one():
    query, key, value = (tensor.detach() for tensor in call_inputs.qkv(1, 40, 1, 16))
    for size in (0.0, 1e9, -3e38):
        bias = torch.full((1, 1, 40, 40), size)
        _, lse, lse_tail, _ = forward_op(query, key, value, bias)
        scores = scores_of(query, key, bias)
        weights = torch.exp(((scores - lse[..., None]) - lse_tail[..., None]).clamp(max=0))
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 1, 40), rtol=1e-4, atol=0)


# Parts of the keys: what is merged, and what the backward operators make of it.


@pytest.mark.parametrize("sink", [None, torch.tensor([0.5, -INF, 1.0, 3.0], dtype=torch.float64)], ids=["", "sink"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_backward_over_parts_of_the_keys_adds_up(dropout_p: float, sink: Tensor | None):
    query, key, value = (tensor.detach() for tensor in call_inputs.qkv(2, 33, 4, 16, seqlen_k=50, heads_kv=2, **DOUBLE))
    seed = torch.randint(1 << 60, (2, 4)) if dropout_p else None
    numbers = {"dropout_p": dropout_p, "sink": sink, "seed": seed}
    out, lse, tail, _ = forward_op(query, key, value, band_hi=17, **numbers)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    whole = backward_op(grad_out, grad_lse, query, key, value, out, lse, tail, band_hi=17, **numbers)
    parts = []
    for start, stop in ((0, 13), (13, 14), (14, 50)):
        keys = slice(start, stop)
        parts.append(
            backward_op(
                grad_out, grad_lse, query, key[:, keys], value[:, keys], out, lse, tail,
                band_hi=17 - start, k_origin=start, **numbers,
            )
        )  # fmt: skip
    torch.testing.assert_close(sum(part[0] for part in parts), whole[0])
    torch.testing.assert_close(torch.cat([part[1] for part in parts], 1), whole[1])
    torch.testing.assert_close(torch.cat([part[2] for part in parts], 1), whole[2])
    rows = [
        backward_op(
            grad_out[:, part], grad_lse[..., part], query[:, part], key, value, out[:, part], lse[..., part],
            tail[..., part], band_hi=17 + part.start, q_origin=part.start, **numbers,
        )
        for part in (slice(0, 10), slice(10, 33))
    ]  # fmt: skip
    torch.testing.assert_close(torch.cat([part[0] for part in rows], 1), whole[0])
    torch.testing.assert_close(sum(part[1] for part in rows), whole[1])


def test_outputs_over_parts_of_the_keys_merge_into_the_whole():
    query, key, value = (tensor.detach() for tensor in call_inputs.qkv(seqlen_k=50, **DOUBLE))
    whole, of_all = attention(query, key, value, return_lse=True)
    parts = [attention(query, key[:, part], value[:, part], return_lse=True) for part in (slice(0, 20), slice(20, 50))]
    lse = torch.stack([part[1] for part in parts])
    shares = lse.softmax(0).transpose(-1, -2)[..., None]
    torch.testing.assert_close(sum(out * share for (out, _), share in zip(parts, shares, strict=True)), whole)
    torch.testing.assert_close(lse.logsumexp(0), of_all)


@pytest.mark.parametrize("packed", [False, True])
def test_dropout_depends_on_seed_and_position_alone(packed: bool):
    query, key, _ = (tensor.detach() for tensor in call_inputs.qkv(2, 20, 3, 16, **DOUBLE))
    seed, eye = torch.randint(1 << 60, (2, 3)), torch.eye(20, dtype=torch.float64)[None, :, None].expand(2, -1, 3, -1)
    if packed:  # one sequence behind the other: positions count inside each
        offsets = torch.tensor([0, 20, 40], dtype=torch.int32)
        rows = (tensor.flatten(0, 1) for tensor in (query, key, eye))
        weights = torch.ops.dmattn.varlen_forward(
            *rows, offsets, offsets, None, None, None, seed, 20, 20, dropout_p=0.5
        )[0]
        weights = weights.unflatten(0, (2, 20))
    else:
        weights = forward_op(query, key, eye, seed=seed, dropout_p=0.5)[0]  # [B, i, H, j]
    kept = philox_keep(seed, 20, 20, 0.5)
    assert torch.equal(weights.transpose(1, 2) != 0, kept)
    part = forward_op(query[:, 7:], key[:, 3:], eye[:, 3:], seed=seed, dropout_p=0.5, q_origin=7, k_origin=3)[0]
    assert torch.equal(part.transpose(1, 2)[..., 3:] != 0, kept[:, :, 7:, 3:])
    shared = forward_op(query, key, eye, seed=seed[:1, :1], dropout_p=0.5)[0]
    assert torch.equal(shared.transpose(1, 2) != 0, kept[:1, :1].expand(2, 3, -1, -1))


def test_seeds_of_one_call_differ_between_sequences_and_heads():
    query = torch.zeros(3, 8, 4, 16)
    seeds = dmattn_ops.api.arguments.dropout_seed(query)
    assert seeds.shape == (3, 4) and seeds.dtype == torch.int64 and len(set(seeds.flatten().tolist())) == 12
    assert dmattn_ops.api.arguments.dropout_seed(query[0], 5).shape == (5, 4)
