"""NaN and infinities in everything that is hidden in a problem for the portable kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tests.interpreter import oracle

if TYPE_CHECKING:
    from tests.interpreter.problems import Case, Problem


def band(rows: int, columns: int, low: int, high: int, shift: int = 0) -> Tensor:
    """Return which keys a band shows: `[rows, columns]`."""
    distance = torch.arange(columns)[None, :] - torch.arange(rows)[:, None] - shift
    return (distance >= low) & (distance <= high)


def visible_pairs(problem: Problem, case: Case) -> Tensor:
    """Return which pairs of the rows of a case meet: `[B, H, Sq, Sk]`, or packed `[1, H, total_q, total_k]`."""
    p = problem
    if case.varlen is None:
        return oracle.spread_heads(case.keep, p.heads, 1).expand(p.batch, p.heads, p.seqlen_q, p.seqlen_k)
    cu_q, cu_k = case.varlen.cu_seqlens_q.tolist(), case.varlen.cu_seqlens_k.tolist()
    seen = torch.zeros(1, p.heads, len(case.query), len(case.key), dtype=torch.bool)
    keep = oracle.spread_heads(case.keep, p.heads, 0)
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        n, m = b - a, d - c
        inside = band(n, m, p.band_lo, p.band_hi, 0 if p.top_left else m - n)
        seen[0, :, a:b, c:d] = keep[:, None, c:d] & inside
    return seen


def amid_nan(like: Tensor, device: str) -> Tensor:
    """Return a view with the strides of another that is full of NaN, as is what lies between its rows."""
    last = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    room = 0 if like.numel() == 0 else last + 1
    return torch.full((room,), float("nan"), dtype=like.dtype, device=device).as_strided(like.shape, like.stride())


def hide_unseen(problem: Problem, case: Case) -> Case:
    """Put NaN and infinities into all that is hidden: it may reach nothing."""
    seen = visible_pairs(problem, case)
    if 0 in seen.shape:
        return case
    poison = (float("nan"), float("inf"), float("-inf"))

    def spoiled(tensor: Tensor | None, hidden: Tensor) -> Tensor | None:
        if tensor is None:
            return None
        spoil = torch.tensor(
            [poison[(index + problem.seed) % 3] for index in range(tensor.numel())], dtype=tensor.dtype
        )
        return torch.where(hidden, spoil.view(tensor.shape), tensor)

    def like_rows(of: Tensor) -> Tensor:
        """Turn `[B, heads, S]` into `[B, S, heads, 1]`, or into packed `[total, heads, 1]`."""
        moved = of.transpose(1, 2)[..., None]
        return moved if case.varlen is None else moved[0]

    no_key = ~seen.any(3)
    no_query = ~seen.unflatten(1, (problem.kv_heads, -1)).any(3).any(2)
    bias = case.bias
    if bias is not None:
        heads = bias.shape[-2] if bias.dim() == 2 else bias.shape[1]
        shown = seen.unflatten(1, (heads, -1)).any(2)  # [B, heads, Sq, Sk]
        if bias.dim() == 2:
            shown = shown.any(2)[0]
        else:
            shown = shown if bias.shape[0] == problem.batch else shown.any(0, keepdim=True)
            shown = shown if bias.shape[2] == problem.seqlen_q else shown.any(2, keepdim=True)
        bias = amid_nan(bias, "cpu").copy_(spoiled(bias, ~shown))
    return replace(
        case,
        query=spoiled(case.query, like_rows(no_key)),
        key=spoiled(case.key, like_rows(no_query)),
        value=spoiled(case.value, like_rows(no_query)),
        bias=bias,
        grad_out=spoiled(case.grad_out, like_rows(no_key)),
        grad_lse=spoiled(case.grad_lse, no_key if case.varlen is None else no_key[0]),
    )
