"""Context parallelism by heads (DeepSpeed-Ulysses, Jacobs et al., arXiv 2309.14509): every rank computes some of the heads,
over the whole sequence. Two exchanges: queries, keys and values from sequence to heads, and out back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dmattn_ops.distributed.sequence import Layout, by_rank, in_order
from dmattn_ops.distributed.team import Team, arrived, start_all_to_all


def refusals(heads: int, heads_kv: int, size: int) -> list[str]:
    """Return why heads cannot be dealt to ranks; empty where they can."""
    reasons = []
    if heads % size:
        reasons.append(f"the heads of query must be a multiple of the {size} ranks, got {heads}")
    if heads_kv % size and size % heads_kv:
        reasons.append(f"the heads of key must be a multiple or a divisor of the {size} ranks, got {heads_kv}")
    return reasons


class ToHeads(torch.autograd.Function):
    """From `[B, s, heads, D]` of a part of the sequence to `[B, S, heads / N, D]` of some heads, in the order of the sequence.

    Where there are fewer key heads than ranks, several ranks get the same head, and their gradients are added in `wide`.
    """

    @staticmethod
    def forward(ctx: Any, team: Team, layout: Layout, wide: torch.dtype, part: Tensor) -> Tensor:
        ctx.of, ctx.wide, ctx.heads, ctx.narrow = (team, layout), wide, part.shape[2], part.dtype
        repeats = max(1, team.size // part.shape[2])
        return to_heads(part.repeat_interleave(repeats, 2) if repeats > 1 else part, team, layout)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        team, layout = ctx.of
        repeats = max(1, team.size // ctx.heads)
        grad = grads[0].to(ctx.wide) if repeats > 1 else grads[0]
        back = to_sequence(grad, team, layout)
        if repeats > 1:
            back = back.unflatten(2, (ctx.heads, repeats)).sum(3).to(ctx.narrow)
        return None, None, None, back


class ToSequence(torch.autograd.Function):
    """From `[B, S, heads / N, D]` of some heads to `[B, s, heads, D]` of a part of the sequence."""

    @staticmethod
    def forward(ctx: Any, team: Team, layout: Layout, whole: Tensor) -> Tensor:
        ctx.of = team, layout
        return to_sequence(whole, team, layout)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, to_heads(grads[0], *ctx.of)


def own_heads(heads: int, team: Team) -> slice:
    """Return which of the heads of a mask or a bias this rank computes: all where there is one for all."""
    if heads == 1:
        return slice(None)
    if heads >= team.size:
        each = heads // team.size
        return slice(team.rank * each, (team.rank + 1) * each)
    first = team.rank // (team.size // heads)
    return slice(first, first + 1)


def to_heads(part: Tensor, team: Team, layout: Layout) -> Tensor:
    """Return `[B, S, heads / N, D]` of `[B, s, heads, D]`, in the order of the sequence. Not differentiable."""
    batch, length, heads, dim = part.shape
    dealt = part.unflatten(2, (team.size, heads // team.size)).permute(2, 1, 0, 3, 4)  # N, s, B, heads / N, D
    found = _exchanged(dealt.reshape(team.size * length, batch, heads // team.size, dim), team)
    return in_order(found, layout, team.size, 0).movedim(0, 1)


def to_sequence(whole: Tensor, team: Team, layout: Layout) -> Tensor:
    """Return `[B, s, heads, D]` of `[B, S, heads / N, D]`. Not differentiable."""
    batch, length, heads, dim = whole.shape
    rows = by_rank(whole.movedim(1, 0), layout, team.size, 0)
    found = _exchanged(rows, team).unflatten(0, (team.size, length // team.size))  # N, s, B, heads / N, D
    return found.permute(2, 1, 0, 3, 4).reshape(batch, length // team.size, team.size * heads, dim)


def _exchanged(rows: Tensor, team: Team) -> Tensor:
    each = [rows.shape[0] // team.size] * team.size
    return arrived(start_all_to_all(rows, each, each, team))
