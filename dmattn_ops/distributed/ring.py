"""Context parallelism by a ring: keys and values travel from rank to rank, and each rank merges what it sees of them.

One Function does forward and backward. Composed of differentiable collectives, a rank that sees nothing of a chunk would
have no gradient for it, never call its collective, and let the others wait for ever. The next exchange is started before
the present keys are computed. In the backward every step is given the merged statistics of its queries, and gradients of keys
travel straight home while the next step is computed; the own keys come last. Steps in which no rank sees anything are left
out, by all. Where only a causal condition hides keys, what a step computes is one piece (`context_mask.in_one_piece`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dmattn_ops.distributed.context_bias import BiasPlan
from dmattn_ops.distributed.key_exchange import Span, added
from dmattn_ops.distributed.pieces import (
    Numbers,
    Piece,
    Statistics,
    Visible,
    backward,
    cut,
    forward,
    joined,
    merged,
    no_keys,
    of_rows,
    visible_at,
)
from dmattn_ops.distributed.team import Team, arrived, start_shift


class RingPlan(NamedTuple):
    """The plan of ring attention, which is the same at every call with these sizes."""

    team: Team
    bias: BiasPlan
    length: int  # of this rank's queries
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

    def segments(self, piece: Piece | None = None) -> list[Span]:
        """Return first row and length of the stretches into which the ends of pieces cut rows: all, or those of one piece."""
        ends = {end for pieces in self.steps for each in pieces for end in (each.row, each.row + each.rows)}
        stretches = list(pairwise(sorted({0, self.length} | ends))) or [(0, 0)]
        first, stop = (0, self.length) if piece is None else (piece.row, piece.row + piece.rows)
        return [(low, high - low) for low, high in stretches if first <= low and high <= stop]

    def visible(self, masks: tuple[Tensor | None, ...], number: int) -> Visible:
        """Return the mask and band of a piece; `masks` are the tensors of all pieces."""
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
        keys = _rows_of(key, value)
        rows: dict[Span, Statistics] = {}
        for step, pieces in enumerate(plan.numbered()):
            ahead = start_shift(keys, 1, plan.team) if step + 1 < len(plan.steps) else keys
            for number, piece in pieces:
                tensors = _of_piece(plan, piece, query, keys, biases, seed)
                new = forward(tensors, plan.visible(masks, number), piece, plan.numbers, plan.needs_max)
                for segment in plan.segments(piece):
                    part = _segment(new, segment, piece)
                    rows[segment] = merged(rows[segment], part) if segment in rows else part
            keys = arrived(ahead)
        whole = joined([_finished(plan, rows, segment, query, value) for segment in plan.segments()], (1, 2))
        ctx.plan = plan
        ctx.save_for_backward(query, key, value, bias, biases, seed, whole.out, whole.lse, whole.lse_tail, *masks)
        ctx.mark_non_differentiable(whole.row_max)
        if not is_compiling():
            ctx.set_materialize_grads(False)
        return whole.out, whole.lse, whole.row_max

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        plan: RingPlan = ctx.plan
        query, key, value, bias, biases, seed, out, lse, lse_tail, *masks = ctx.saved_tensors
        statistics = Statistics(out, lse, lse_tail, lse)
        grad_out = torch.zeros_like(out) if grads[0] is None else grads[0]
        of_bias = ctx.needs_input_grad[4]
        own = _rows_of(key, value)
        wide = torch.promote_types(query.dtype, plan.reduce_dtype)
        dq: dict[Span, Tensor] = {}
        dbias: dict[int, Tensor] = {}

        def of_keys(step: int, keys: Tensor) -> Tensor:
            """Return the gradient of the keys of a step; add to that of query."""
            placed = []
            for number, piece in plan.numbered()[step]:
                mine = slice(piece.row, piece.row + piece.rows)
                of_piece = (grad_out[:, mine], None if grads[1] is None else grads[1][:, :, mine])
                tensors = _of_piece(plan, piece, query, keys, biases, seed)
                visible = plan.visible(tuple(masks), number)
                rows = of_rows(statistics, piece)
                part = backward(of_piece, tensors, rows, visible, piece, plan.numbers, of_bias)
                for segment in plan.segments(piece):
                    first, length = segment
                    new = part[0] if length == piece.rows else part[0].narrow(1, first - piece.row, length)
                    dq[segment] = dq[segment].to(wide) + new if segment in dq else new
                dbias[number] = part[3]
                placed.append((piece.column, torch.cat(part[1:3], -1).movedim(1, 0)))
            return added(placed, own.shape[0], 0, own.new_empty(own.shape, dtype=wide))

        total, going_home = None, None
        ahead = start_shift(own, 1, plan.team) if len(plan.steps) > 1 else own
        for step in range(1, len(plan.steps)):
            keys = arrived(ahead)
            ahead = start_shift(keys, 1, plan.team) if step + 1 < len(plan.steps) else keys
            sums = of_keys(step, keys)
            if going_home is not None:
                total = _sum(total, arrived(going_home))
            going_home = start_shift(sums, -step, plan.team)
        sums = of_keys(0, own)  # last: the gradients of the step before travel meanwhile
        if going_home is not None:
            sums = _sum(total, arrived(going_home)) + sums
        back, dim = sums.movedim(0, 1), key.shape[-1]
        whole_bias = None
        if of_bias:
            all_pieces = [piece for pieces in plan.steps for piece in pieces]
            parts = [dbias[number] for number in range(len(all_pieces))]
            whole_bias = plan.bias.returned([plan.bias.gradient(all_pieces, parts, biases, wide)], bias)
        dk, dv = back[..., :dim].to(key.dtype), back[..., dim:].to(value.dtype)
        return None, _whole_dq(plan, dq, query), dk, dv, whole_bias, None, *[None] * len(masks)


def _rows_of(key: Tensor, value: Tensor) -> Tensor:
    """Return keys and values as rows `[s, B, Hkv, D + Dv]`, which travel together."""
    return torch.cat((key, value), -1).movedim(1, 0).contiguous()


def _segment(rows: Statistics, segment: Span, piece: Piece) -> Statistics:
    """Return the statistics of a segment of the rows of a piece."""
    first, length = segment
    return rows if length == piece.rows else cut(rows, first - piece.row, length)


def _finished(plan: RingPlan, rows: dict[Span, Statistics], segment: Span, query: Tensor, value: Tensor) -> Statistics:
    """Return the statistics of a segment with out in the dtype of query; of no keys, where no piece has its rows."""
    if segment not in rows:
        first, length = segment
        return no_keys(query.narrow(1, first, length), value.shape[-1], plan.needs_max)
    found = rows[segment]
    # `to` would return float32 as it is. A graph of torch 2.11 then has one tensor under two names among the results of
    # the function, and takes the gradient of out for that of the other.
    return found if found.out.dtype == query.dtype else found._replace(out=found.out.to(query.dtype))


def _sum(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total + more


def _whole_dq(plan: RingPlan, dq: dict[Span, Tensor], query: Tensor) -> Tensor:
    """Return the gradient of query from those of its segments, zero where there is none."""
    parts = []
    for first, length in plan.segments():
        if (first, length) in dq:
            parts.append(dq[first, length].to(query.dtype))
        else:
            parts.append(query.new_zeros((query.shape[0], length, *query.shape[2:])))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _of_piece(
    plan: RingPlan, piece: Piece, query: Tensor, keys: Tensor, biases: Tensor | None, seed: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return query, key, value, bias and seed of a piece."""
    dim = query.shape[-1]
    own = keys[piece.column : piece.column + piece.columns].movedim(0, 1)
    bias = plan.bias.of_piece(biases, piece, slice(None))
    return query[:, piece.row : piece.row + piece.rows], own[..., :dim], own[..., dim:], bias, seed
