"""Context parallelism by fetching keys and values: every rank computes its queries against all the keys that they see.

Key heads are fetched in groups: while one group is computed, the next travels; in the backward, gradients of the group
before travel home meanwhile. The backward fetches keys and values again, so that a layer keeps its own part of them only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dmattn_ops.distributed.context_bias import BiasPlan
from dmattn_ops.distributed.key_exchange import KeyExchange, added
from dmattn_ops.distributed.pieces import (
    Numbers,
    Piece,
    Statistics,
    Visible,
    backward,
    forward,
    joined,
    of_rows,
    visible_at,
)


class Plan(NamedTuple):
    """The plan of attention by all_gather, which is the same at every call with these sizes."""

    exchange: KeyExchange
    bias: BiasPlan
    pieces: tuple[Piece, ...]  # one for each run of queries, in their order
    limits: tuple[tuple[int, int, int | None], ...]  # of each piece: band_lo, band_hi, at_most
    numbers: Numbers
    groups: int  # of key heads
    needs_max: bool
    reduce_dtype: torch.dtype
    alone: bool  # every rank has one piece: no gradients meet before they travel, as they are. The same on all ranks

    def visible(self, masks: tuple[Tensor | None, ...], group: int, place: int) -> Visible:
        """Return the mask and band of a piece; `masks` are the tensors of all pieces of all groups."""
        return visible_at(group * len(self.pieces) + place, self.limits[place], masks)


class AllGather(torch.autograd.Function):
    """out, lse and row_max of this rank's queries; `masks` are the tensors of the pieces of each group."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        seed: Tensor | None,
        *masks: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        exchange = plan.exchange
        biases = plan.bias.fetched(bias)
        rows = torch.cat((key, value), -1).movedim(1, 0)
        found = []
        ahead = exchange.start(_head_group(rows, 0, plan.groups))
        for group in range(plan.groups):
            fetched = exchange.finish(ahead)
            if group + 1 < plan.groups:
                ahead = exchange.start(_head_group(rows, group + 1, plan.groups))
            parts = []
            for place, piece in enumerate(plan.pieces):
                tensors = _of_piece(plan, group, piece, query, fetched, biases, seed)
                visible = plan.visible(masks, group, place)
                parts.append(forward(tensors, visible, piece, plan.numbers, plan.needs_max))
            found.append(joined(parts, (1, 2)))
        whole = joined(found, (2, 1))
        ctx.plan = plan
        ctx.save_for_backward(query, key, value, bias, biases, seed, whole.out, whole.lse, whole.lse_tail, *masks)
        ctx.mark_non_differentiable(whole.row_max)
        if not is_compiling():
            ctx.set_materialize_grads(False)
        return whole.out, whole.lse, whole.row_max

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        plan: Plan = ctx.plan
        query, key, value, bias, biases, seed, out, lse, lse_tail, *masks = ctx.saved_tensors
        statistics = Statistics(out, lse, lse_tail, lse)
        grad_out = torch.zeros_like(out) if grads[0] is None else grads[0]
        of_bias = ctx.needs_input_grad[4]
        exchange, rows = plan.exchange, torch.cat((key, value), -1).movedim(1, 0)
        wide = torch.promote_types(query.dtype, plan.reduce_dtype)
        dq, home, dbias = [], [], []
        ahead = exchange.start(_head_group(rows, 0, plan.groups))
        for group in range(plan.groups):
            fetched = exchange.finish(ahead)
            if group + 1 < plan.groups:
                ahead = exchange.start(_head_group(rows, group + 1, plan.groups))
            parts, heads = [], _heads(query.shape[2], group, plan.groups)
            for place, piece in enumerate(plan.pieces):
                own = slice(piece.row, piece.row + piece.rows)
                of_piece = (grad_out[:, own, heads], None if grads[1] is None else grads[1][:, heads, own])
                tensors = _of_piece(plan, group, piece, query, fetched, biases, seed)
                visible = plan.visible(tuple(masks), group, place)
                parts.append(
                    backward(
                        of_piece, tensors, of_rows(statistics, piece, heads), visible, piece, plan.numbers, of_bias
                    )
                )
            dq.append(torch.cat([part[0] for part in parts], 1))
            placed = [
                (piece.column, torch.cat(part[1:3], -1).movedim(1, 0))
                for piece, part in zip(plan.pieces, parts, strict=True)
            ]
            travelling = placed[0][1].dtype if plan.alone else wide
            home.append(exchange.start_back(added(placed, exchange.length, 0, placed[0][1][:0].to(travelling))))
            if of_bias:
                dbias.append(plan.bias.gradient(plan.pieces, [part[3] for part in parts], biases, wide))
        back = torch.cat([exchange.finish_back(started, wide).to(key.dtype) for started in home], 2).movedim(0, 1)
        dim = key.shape[-1]
        dk, dv = back[..., :dim].contiguous(), back[..., dim:].contiguous()
        whole_bias = plan.bias.returned(dbias, bias) if of_bias else None
        return None, torch.cat(dq, 2), dk, dv, whole_bias, None, *[None] * len(masks)


def _heads(heads: int, group: int, groups: int) -> slice:
    """Return the heads of a group; all of them where there is one for all."""
    if heads == 1:
        return slice(None)
    each = heads // groups
    return slice(group * each, (group + 1) * each)


def _head_group(rows: Tensor, group: int, groups: int) -> Tensor:
    """Return the heads of a group of rows `[n, B, heads, D]`."""
    return rows[:, :, _heads(rows.shape[2], group, groups)]


def _of_piece(
    plan: Plan, group: int, piece: Piece, query: Tensor, fetched: Tensor, biases: Tensor | None, seed: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return query, key, value, bias and seed of a piece and a group of heads."""
    dim = query.shape[-1]
    rows, columns = slice(piece.row, piece.row + piece.rows), slice(piece.column, piece.column + piece.columns)
    heads = _heads(query.shape[2], group, plan.groups)
    keys = fetched[columns].movedim(0, 1)
    bias = None
    if biases is not None:
        bias = plan.bias.of_piece(biases, piece, _heads(biases.shape[1], group, plan.groups))
    seeds = None if seed is None else seed[:, heads]
    return query[:, rows, heads], keys[..., :dim], keys[..., dim:], bias, seeds
