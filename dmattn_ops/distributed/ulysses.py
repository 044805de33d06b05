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

    All tensors travel at once: while one is put in order, the next is on its way. Where there are fewer key heads than
    ranks, several ranks get the same head, and their gradients are added in `wide`.
    """

    @staticmethod
    def forward(ctx: Any, team: Team, layout: Layout, wide: torch.dtype, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.of, ctx.wide = (team, layout), wide
        ctx.heads, ctx.narrow = [part.shape[2] for part in parts], [part.dtype for part in parts]
        started = []
        for part in parts:
            repeats = max(1, team.size // part.shape[2])
            started.append(_start_to_heads(part.repeat_interleave(repeats, 2) if repeats > 1 else part, team))
        return tuple(_in_sequence(each, team, layout) for each in started)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        team, layout = ctx.of
        repeats = [max(1, team.size // heads) for heads in ctx.heads]
        started = [
            _start_to_sequence(grad.to(ctx.wide) if times > 1 else grad, team, layout)
            for grad, times in zip(grads, repeats, strict=True)
        ]
        found = []
        for each, times, heads, narrow in zip(started, repeats, ctx.heads, ctx.narrow, strict=True):
            back = _of_all_heads(each, team)
            found.append(back.unflatten(2, (heads, times)).sum(3).to(narrow) if times > 1 else back)
        return None, None, None, *found


class ToSequence(torch.autograd.Function):
    """From `[B, S, heads / N, D]` of some heads to `[B, s, heads, D]` of a part of the sequence; all tensors travel at once."""

    @staticmethod
    def forward(ctx: Any, team: Team, layout: Layout, *wholes: Tensor) -> tuple[Tensor, ...]:
        ctx.of = team, layout
        started = [_start_to_sequence(whole, team, layout) for whole in wholes]
        return tuple(_of_all_heads(each, team) for each in started)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        team, layout = ctx.of
        started = [_start_to_heads(grad, team) for grad in grads]
        return None, None, *[_in_sequence(each, team, layout) for each in started]


def own_heads(heads: int, team: Team) -> slice:
    """Return the heads of a mask or a bias that this rank computes: all where there is one for all."""
    if heads == 1:
        return slice(None)
    if heads >= team.size:
        each = heads // team.size
        return slice(team.rank * each, (team.rank + 1) * each)
    first = team.rank // (team.size // heads)
    return slice(first, first + 1)


def to_heads(part: Tensor, team: Team, layout: Layout) -> Tensor:
    """Return `[B, S, heads / N, D]` of `[B, s, heads, D]`, in the order of the sequence. Not differentiable."""
    return _in_sequence(_start_to_heads(part, team), team, layout)


def to_sequence(whole: Tensor, team: Team, layout: Layout) -> Tensor:
    """Return `[B, s, heads, D]` of `[B, S, heads / N, D]`. Not differentiable."""
    return _of_all_heads(_start_to_sequence(whole, team, layout), team)


def _start_to_heads(part: Tensor, team: Team) -> Tensor:
    """Start to send each rank its heads of `[B, s, heads, D]`."""
    batch, length, heads, dim = part.shape
    dealt = part.unflatten(2, (team.size, heads // team.size)).permute(2, 1, 0, 3, 4)  # N, s, B, heads / N, D
    return _start(dealt.reshape(team.size * length, batch, heads // team.size, dim), team)


def _in_sequence(started: Tensor, team: Team, layout: Layout) -> Tensor:
    """Return `[B, S, heads / N, D]` of what comes."""
    return in_order(arrived(started), layout, team.size, 0).movedim(0, 1)


def _start_to_sequence(whole: Tensor, team: Team, layout: Layout) -> Tensor:
    """Start to send each rank its positions of `[B, S, heads / N, D]`."""
    return _start(by_rank(whole.movedim(1, 0), layout, team.size, 0), team)


def _of_all_heads(started: Tensor, team: Team) -> Tensor:
    """Return `[B, s, heads, D]` of what comes."""
    found = arrived(started)
    found = found.unflatten(0, (team.size, found.shape[0] // team.size))  # N, s, B, heads / N, D
    return found.permute(2, 1, 0, 3, 4).flatten(2, 3)


def _start(rows: Tensor, team: Team) -> Tensor:
    each = [rows.shape[0] // team.size] * team.size
    return start_all_to_all(rows, each, each, team)
