"""Learnable sinks in the kernels that compute the statistics of rows before a backward (formulas: `dispatch/sinks.py`)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dmattn_ops.call import Gradients
from dmattn_ops.launching.recording import computed, sum_into, workspace

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def share_of_keys(sink, lse):
    """Return the share that a sink leaves to the keys of each row: sigmoid(lse - sink), 0 where no key is visible."""
    over = sink - lse
    less = tl.exp2(-tl.abs(over) * _LOG2E)
    return tl.where(lse == float("-inf"), 0.0, tl.where(over > 0.0, less, 1.0) / (1.0 + less))


@triton.jit
def take_sink(sink, lse, tail):
    """Return (the part of lse that float32 cannot hold, with the sink in the sum; the share that the sink takes) of rows."""
    given = lse != float("-inf")
    over = tl.where(given, sink - lse, 0.0)
    less = tl.exp2(-tl.abs(over) * _LOG2E)
    taken = tl.where(over > 0.0, 1.0, less) / (1.0 + less)
    more = tl.maximum(over, 0.0) + tl.log2(1.0 + less) * _LN2
    return tl.where(given, tail + more, tail), tl.where(given, taken, 0.0)


@triton.jit
def part_of_gradient(taken, delta):
    """Return the sum over rows of the gradient of their sink; rows in which it takes no share add 0, whatever their delta is."""
    return -tl.sum(tl.where(taken > 0.0, taken * delta, 0.0), 0)


def parts_of_gradient(grads: Gradients, programs: int) -> Tensor | None:
    """Return a place for what each program adds to the gradient of its head's sink; None where nobody asks for that."""
    return None if grads.dsink is None else workspace(grads.grad_out, programs)


def add_parts(parts: Tensor | None, batch: int, heads: int, grads: Gradients) -> None:
    """Write the gradient of sinks `[H]` from the parts of programs, which are numbered by batch, then head, then block."""
    if parts is not None:
        sizes = (batch, heads, parts.numel() // (batch * heads))
        computed(sum_into, grads.dsink, parts, sizes, (0, 2))
