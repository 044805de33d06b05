"""Attention under a mask that keeps few keys: copy the keys of each epoch side by side, and run on the copies.

The launchers of packed calls are given as functions, so that dispatch chooses them as for any call. Keys are packed anew in
the backward: nothing packed is kept between the two. Heads go in passes, each in a workspace of bounded size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor

from dmattn_ops.call import UNBOUNDED, Call, Gradients, Mask, Result, Saved
from dmattn_ops.choice.epochs import Epochs, Packing
from dmattn_ops.kernels.epochs.launch import (
    Slots,
    gather_bias,
    gather_rows,
    plan_slots,
    poison_rows,
    sum_bias,
    sum_rows,
)
from dmattn_ops.launching.recording import do_not_repeat, workspace

Forward = Callable[[Call, Result], None]
Backward = Callable[[Call, Saved, Gradients], None]


class Pass(NamedTuple):
    """A range of heads that is packed at a time."""

    first: int  # packed head
    count: int
    queries: slice  # the query heads that read them


def forward(call: Call, result: Result, packing: Packing, run: Forward) -> None:
    """Write out, lse and lse_tail by `run` on packed keys; NaN where more keys are visible than `at_most` promises."""
    for part in _passes(call, packing):
        _forward_pass(call, result, packing, part, run)


def _forward_pass(call: Call, result: Result, packing: Packing, part: Pass, run: Forward) -> None:
    """Write out, lse and lse_tail of the heads of one pass, whose workspaces are free again at its end."""
    slots = _slots(call, packing.epochs, part, inverse=False)
    out, lse, lse_tail = _heads(result.out, 2, part), _heads(result.lse, 1, part), _heads(result.lse_tail, 1, part)
    run(_packed_call(call, packing, part, slots), Result(out, lse, lse_tail, None))
    poison_rows(out, lse, slots)


def backward(call: Call, saved: Saved, grads: Gradients, packing: Packing, run: Backward) -> None:
    """Write dq, dk, dv and, where it is given, dbias by `run` on packed keys, whose gradients are summed by key."""
    for part in _passes(call, packing):
        _backward_pass(call, saved, grads, packing, part, run)


def _backward_pass(call: Call, saved: Saved, grads: Gradients, packing: Packing, part: Pass, run: Backward) -> None:
    """Write the gradients of the heads of one pass, whose workspaces are free again at its end."""
    slots = _slots(call, packing.epochs, part, inverse=True)
    packed = _packed_call(call, packing, part, slots)
    dk, dv = (workspace(of_key, *of_key.shape, dtype=of_key.dtype) for of_key in (packed.key, packed.value))
    dbias = None
    if grads.dbias is not None:
        assert packed.bias is not None
        dbias = workspace(packed.bias, *packed.bias.shape, dtype=packed.bias.dtype)
    grad_lse = None if grads.grad_lse is None else _heads(grads.grad_lse, 1, part)
    known = Saved(_heads(saved.out, 2, part), _heads(saved.lse, 1, part), _heads(saved.lse_tail, 1, part))
    grad_out, dq = _heads(grads.grad_out, 2, part), _heads(grads.dq, 2, part)
    run(packed, known, Gradients(grad_out, grad_lse, dq, dk, dv, dbias))
    sum_rows((dk, dv), slots, (grads.dk, grads.dv), part.first, packing.group)
    if dbias is not None and grads.dbias is not None:
        of, shared = part.queries, part.first > 0 and grads.dbias.shape[1] == 1
        sum_bias(dbias, slots, grads.dbias, call.query.shape[2], of.start, of.stop - of.start, add=shared)


def first_pass(call: Call, packing: Packing) -> Call:
    """Return the call on packed keys that kernels get for the heads of the first pass: what tuning measures them with."""
    part = next(_passes(call, packing))
    return _packed_call(call, packing, part, _slots(call, packing.epochs, part, inverse=False))


def _passes(call: Call, packing: Packing) -> Iterator[Pass]:
    """Return the ranges of packed heads; more than one are not repeated from a plan, which would keep all workspaces."""
    readers = call.query.shape[2] // packing.heads  # query heads that read one packed head
    if packing.heads_per_pass < packing.heads:
        do_not_repeat()
    for first in range(0, packing.heads, packing.heads_per_pass):
        count = min(packing.heads_per_pass, packing.heads - first)
        yield Pass(first, count, slice(first * readers, (first + count) * readers))


def _slots(call: Call, cut: Epochs, part: Pass, *, inverse: bool) -> Slots:
    mask, options = call.mask, call.options
    assert mask.end is not None
    shared = mask.end.shape[1] == 1
    first, count = (0, 1) if shared else (part.first, part.count)
    return plan_slots(
        mask.start, mask.end, cut, call.query.shape[1], options.band_lo, options.band_hi, first, count, inverse=inverse
    )


def _heads(tensor: Tensor, dim: int, part: Pass) -> Tensor:
    """Return the query heads of a pass, along dimension `dim`.

    All of them are the tensor itself: a plan cannot tell of which tensor another view is one where query, key and value
    share their memory, as parts of one projection do.
    """
    first, count = part.queries.start, part.queries.stop - part.queries.start
    return tensor if count == tensor.shape[dim] else tensor.narrow(dim, first, count)


def _packed_call(call: Call, packing: Packing, part: Pass, slots: Slots) -> Call:
    """Return the call on the copies of one pass."""
    key, value = gather_rows((call.key, call.value), slots, part.count, part.first, packing.group)
    bias = call.bias
    if bias is not None:
        of = part.queries
        bias = gather_bias(bias, slots, call.query.shape[2], of.start, of.stop - of.start)
    mask = Mask(row_tiles=slots.row_tiles, col_tiles=slots.col_tiles, start=slots.start, end=slots.end)
    options = call.options._replace(band_lo=-UNBOUNDED, band_hi=UNBOUNDED)
    query = _heads(call.query, 2, part)
    return call._replace(query=query, key=key, value=value, bias=bias, mask=mask, options=options, used=None)
