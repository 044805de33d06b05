"""Context parallelism by a ring: keys and values travel from rank to rank, and each rank merges what it sees of them.

One Function does forward and backward. Composed of differentiable collectives, a rank that sees nothing of a chunk would
have no gradient for it, never call its collective, and let the others wait for ever. The next exchange is started before
the present keys are computed. In the backward every step is given the merged statistics of its queries, and the sums of
the gradients of the keys travel with them, and then home. Steps in which no rank sees anything are left out, by all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dmattn_ops.distributed.context_bias import BiasPlan
from dmattn_ops.distributed.key_exchange import added
from dmattn_ops.distributed.pieces import (
    Numbers,
    Piece,
    Statistics,
    Visible,
    backward,
    forward,
    joined,
    merged,
    no_keys,
    of_rows,
    visible_at,
    widened,
)
from dmattn_ops.distributed.sequence import Run
from dmattn_ops.distributed.team import Team, arrived, start_shift


class RingPlan(NamedTuple):
    """What is the same at every call with these sizes."""

    team: Team
    bias: BiasPlan
    query_runs: tuple[Run, ...]
    steps: tuple[tuple[Piece, ...], ...]  # what this rank computes with the keys of the rank `step` before it
    limits: tuple[tuple[int, int, int | None], ...]  # of all pieces, in their order: band_lo, band_hi, at_most
    numbers: Numbers
    needs_max: bool
    reduce_dtype: torch.dtype

    def numbered(self) -> list[list[tuple[int, Piece]]]:
        """Return the pieces of each step with their number among all."""
        found, number = [], 0
        for pieces in self.steps:
            found.append(list(enumerate(pieces, number)))
            number += len(pieces)
        return found

    def visible(self, masks: tuple[Tensor | None, ...], number: int) -> Visible:
        """Return what is visible in a piece."""
        return visible_at(number, self.limits[number], masks)


class Ring(torch.autograd.Function):
    """out, lse and row_max of this rank's queries; `masks` are the tensors of all pieces."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: RingPlan,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        seed: Tensor | None,
        *masks: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        biases = plan.bias.fetched(bias)
        keys = torch.cat((key, value), -1).movedim(1, 0).contiguous()
        rows = [
            no_keys(query[:, run.local : run.local + run.length], value.shape[-1], plan.needs_max)
            for run in plan.query_runs
        ]
        seen = [False] * len(rows)
        for step, pieces in enumerate(plan.numbered()):
            ahead = start_shift(keys, 1, plan.team) if step + 1 < len(plan.steps) else keys
            for number, piece in pieces:
                tensors = _of_piece(plan, piece, query, keys, biases, seed)
                new = widened(forward(tensors, plan.visible(masks, number), piece, plan.numbers, plan.needs_max))
                rows[piece.run] = merged(rows[piece.run], new) if seen[piece.run] else new
                seen[piece.run] = True
            keys = arrived(ahead)
        whole = joined(rows, (1, 2))
        # `to` would return float32 as it is. A graph of torch 2.11 then has one tensor under two names among the results of
        # this function, and takes the gradient of out for that of the other.
        out = whole.out if whole.out.dtype == query.dtype else whole.out.to(query.dtype)
        ctx.plan = plan
        ctx.save_for_backward(query, key, value, bias, biases, seed, out, whole.lse, whole.lse_tail, *masks)
        ctx.mark_non_differentiable(whole.row_max)
        if not is_compiling():
            ctx.set_materialize_grads(False)
        return out, whole.lse, whole.row_max

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        plan: RingPlan = ctx.plan
        query, key, value, bias, biases, seed, out, lse, lse_tail, *masks = ctx.saved_tensors
        statistics = Statistics(out, lse, lse_tail, lse)
        grad_out = torch.zeros_like(out) if grads[0] is None else grads[0]
        of_bias = ctx.needs_input_grad[4]
        keys = torch.cat((key, value), -1).movedim(1, 0).contiguous()
        wide = torch.promote_types(query.dtype, plan.reduce_dtype)
        none = keys.new_zeros(keys.shape, dtype=wide)
        dq: list[tuple[int, Tensor]] = []
        dbias: list[Tensor] = []
        travelling: Tensor | None = None
        for step, pieces in enumerate(plan.numbered()):
            ahead = start_shift(keys, 1, plan.team) if step + 1 < len(plan.steps) else keys
            placed = []
            for number, piece in pieces:
                own = slice(piece.row, piece.row + piece.rows)
                of_piece = (grad_out[:, own], None if grads[1] is None else grads[1][:, :, own])
                tensors = _of_piece(plan, piece, query, keys, biases, seed)
                visible = plan.visible(tuple(masks), number)
                rows = of_rows(statistics, piece)
                part = backward(of_piece, tensors, rows, visible, piece, plan.numbers, of_bias)
                dq.append((piece.row, part[0]))
                dbias.append(part[3])
                placed.append((piece.column, torch.cat(part[1:3], -1).movedim(1, 0)))
            sums = added(placed, keys.shape[0], 0, none)
            if travelling is not None:
                sums = arrived(travelling) + sums
            last = step + 1 == len(plan.steps)
            travelling = start_shift(sums, 1, plan.team) if not last else sums
            keys = arrived(ahead)
        assert travelling is not None
        steps_away = len(plan.steps) - 1
        home = arrived(start_shift(travelling, -steps_away, plan.team)) if steps_away else travelling
        back, dim = home.movedim(0, 1), key.shape[-1]
        whole_bias = None
        if of_bias:
            all_pieces = [piece for pieces in plan.steps for piece in pieces]
            whole_bias = plan.bias.returned([plan.bias.gradient(all_pieces, dbias, biases, wide)], bias, bias.shape[1])
        whole_dq = added(dq, query.shape[1], 1, query.new_empty(query.shape, dtype=wide)).to(query.dtype)
        dk, dv = back[..., :dim].to(key.dtype), back[..., dim:].to(value.dtype)
        return None, whole_dq, dk, dv, whole_bias, None, *[None] * len(masks)


def _of_piece(
    plan: RingPlan, piece: Piece, query: Tensor, keys: Tensor, biases: Tensor | None, seed: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return query, key, value, bias and seed of a piece."""
    dim = query.shape[-1]
    own = keys[piece.column : piece.column + piece.columns].movedim(0, 1)
    bias = plan.bias.of_piece(biases, piece, slice(None))
    return query[:, piece.row : piece.row + piece.rows], own[..., :dim], own[..., dim:], bias, seed
