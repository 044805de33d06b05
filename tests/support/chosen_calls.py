"""Calls of attention to chosen blocks, drawn at random, and their outputs and gradients by definition in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from chosen_cases import Case, visible
from torch import Tensor

from dmattn_ops.bands import band_of
from dmattn_ops.call import Call, Chosen, Mask, plain_options
from dmattn_ops.masks.chosen import segments_beside
from dmattn_ops.testing.oracle import EPS


def drawn_call(case: Case, seed: int, dim: int, dim_v: int, dtype: torch.dtype) -> tuple[Call, Tensor]:
    """Return a call of a case, and the mask by definition `[B, H, Sq, Sk]`."""
    generator, seqlen_q = torch.Generator().manual_seed(seed), case.indices.shape[2]

    def rows(seqlen: int, heads: int, width: int) -> Tensor:
        return torch.randn(case.batch, seqlen, heads, width, generator=generator).to(dtype)

    query, key = rows(seqlen_q, case.heads, dim), rows(case.seqlen_k, case.heads_kv, dim)
    value = rows(case.seqlen_k, case.heads_kv, dim_v)
    indices = case.indices
    if indices.shape[1] == case.heads and case.heads != case.heads_kv:
        indices = indices[:, : case.heads_kv]
    case = replace(case, indices=indices)
    limits = band_of(**case.keywords).limits(seqlen_q, case.seqlen_k)
    segments = segments_beside(indices, case.documents, case.padding, case.batch, seqlen_q, case.seqlen_k)
    sink = torch.randn(case.heads, generator=generator) if seed % 3 == 0 else None
    options = plain_options(dim**-0.5, *limits, softcap=2.0 if seed % 4 == 1 else 0.0)
    mask = Mask(q_segments=segments[0], k_segments=segments[1])
    call = Call(query, key, value, None, mask, sink, None, None, options, chosen=Chosen(indices, case.block))
    shown = visible(case).expand(case.batch, -1, -1, -1)
    return call, shown.repeat_interleave(case.heads // shown.shape[1], 1)


def by_definition(call: Call, shown: Tensor, grad_out: Tensor, grad_lse: Tensor) -> dict[str, Tensor]:
    """Return outputs and gradients in float64."""
    primals = [part.double().requires_grad_() for part in (call.query, call.key, call.value)]
    sink = None if call.sink is None else call.sink.double().requires_grad_()
    query, (key, value) = (
        primals[0],
        (part.repeat_interleave(call.query.shape[2] // part.shape[2], 2) for part in primals[1:]),
    )
    score = torch.einsum("bihd,bjhd->bhij", query, key) * call.options.softmax_scale
    if call.options.softcap:
        score = call.options.softcap * torch.tanh(score / call.options.softcap)
    empty = ~shown.any(-1)
    score = score.masked_fill(~shown, -math.inf).masked_fill(empty.unsqueeze(-1), 0.0)
    lse = score.logsumexp(-1)
    weights = torch.where(shown, (score - lse.unsqueeze(-1)).exp(), 0.0)
    if sink is not None:
        weights = weights * torch.sigmoid(lse - sink[:, None]).unsqueeze(-1)
    out = torch.einsum("bhij,bjhd->bihd", weights, value)
    loss = (out * grad_out.double()).sum() + torch.where(empty, 0.0, lse * grad_lse.double()).sum()
    wanted = [*primals, *([] if sink is None else [sink])]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    names = ("dq", "dk", "dv", "dsink")
    found = {
        name: torch.zeros_like(of) if grad is None else grad
        for name, of, grad in zip(names, wanted, grads, strict=False)
    }
    peak = torch.where(shown, score, -math.inf).amax(-1)
    return {"out": out.detach(), "lse": lse.masked_fill(empty, -math.inf).detach(), "row_max": peak.detach(), **found}


def poisoned(call: Call, shown: Tensor, grads: tuple[Tensor, Tensor]) -> tuple[Call, tuple[Tensor, Tensor]]:
    """Return a call, grad_out and grad_lse with NaN in keys that no query sees, and in queries that see no key."""
    heads_kv = call.key.shape[2]
    of_keys = shown.any(2).unflatten(1, (heads_kv, -1)).any(2).transpose(1, 2).unsqueeze(-1)
    of_rows = shown.any(3)
    of_queries = of_rows.transpose(1, 2).unsqueeze(-1)
    key, value = (part.masked_fill(~of_keys, math.nan) for part in (call.key, call.value))
    call = call._replace(query=call.query.masked_fill(~of_queries, math.nan), key=key, value=value)
    return call, (grads[0].masked_fill(~of_queries, math.nan), grads[1].masked_fill(~of_rows, math.nan))


def check_close(name: str, found: Tensor, expected: Tensor, dtype: torch.dtype, case: Case) -> None:
    assert not found.isnan().any(), f"{name} of {case!r}"
    if name in ("lse", "row_max"):
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-5, msg=f"{name} of {case!r}")
        return
    error = (found.double() - expected).norm() / expected.norm().clamp(min=1e-2)
    assert error <= EPS[dtype], f"{name} is off by {error:.1e}: {case!r}"
