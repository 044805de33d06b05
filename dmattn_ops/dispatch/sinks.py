"""Learnable sinks: a logit of each head that takes its share of the softmax and gives nothing.

With `g = sigmoid(lse - sink)`, the share that is left for the keys, `out` is `g` times attention without the sink, and the
probabilities are those of a softmax whose logarithm of a sum is `lse - log(g)`. So every backward kernel serves a call with
sinks: it is given that sum, through `lse_tail`. Where lse has a gradient too, which is one of probabilities without the sink,
it is given `g * grad_out` instead. The gradient of a sink is `-(1 - g) * (grad_out . out)`, summed.

CUDA kernels do this as they read and write the rows anyway (`kernels/sinks.py`). What is here does it with operators of
torch: for the CPU, whose kernels take far longer than that, for packed keys, and where lse has a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from dmattn_ops.call import Call, Gradients, Result, Saved
from dmattn_ops.launching.recording import computed


def take_share(sink: Tensor | None, result: Result) -> None:
    """Multiply out by the share of the keys, in place; without a sink they have all."""
    if sink is not None:
        computed(_scale_rows, result.out, result.lse, sink)


def without_sink(call: Call, saved: Saved, grads: Gradients) -> tuple[Call, Saved, Gradients]:
    """Write the gradient of the sinks; return what a backward that knows none is given to compute with the share of the keys."""
    sink = call.sink
    if sink is None:
        return call, saved, grads
    if grads.dsink is not None:
        computed(_sink_gradient, grads.dsink, grads.grad_out, saved.out, saved.lse, sink)
    call, grads = call._replace(sink=None), grads._replace(dsink=None)
    if grads.grad_lse is not None:
        return call, saved, grads._replace(grad_out=computed(_scaled_rows, grads.grad_out, saved.lse, sink))
    return call, saved._replace(lse_tail=computed(_tail_with_share, saved.lse, saved.lse_tail, sink)), grads


def _log_odds(lse: Tensor, sink: Tensor) -> Tensor:
    """Return `lse - sink`, -inf for rows without visible keys, for lse `[B, H, Sq]` or `[H, total_q]`."""
    return torch.where(lse == -torch.inf, lse, lse - sink.to(lse.dtype).unsqueeze(-1))


def _scale_rows(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    return out.mul_(_share_of_rows(lse, sink))


def _scaled_rows(grad_out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    return (grad_out * _share_of_rows(lse, sink)).to(grad_out.dtype)


def _share_of_rows(lse: Tensor, sink: Tensor) -> Tensor:
    """Return the share of the keys, like rows `[.., heads, 1]` of out."""
    return torch.sigmoid(_log_odds(lse, sink)).transpose(-1, -2).unsqueeze(-1)


def _tail_with_share(lse: Tensor, lse_tail: Tensor, sink: Tensor) -> Tensor:
    return torch.where(lse == -torch.inf, lse_tail, lse_tail - logsigmoid(_log_odds(lse, sink)))


def _sink_gradient(dsink: Tensor, grad_out: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    products = torch.linalg.vecdot(grad_out.to(lse.dtype), out.to(lse.dtype)).transpose(-1, -2)
    taken = torch.sigmoid(-_log_odds(lse, sink)) * products
    rows = [dim for dim in range(lse.dim()) if dim != lse.dim() - 2]
    # An empty row gives nothing, not even where its grad_out is NaN, as behind a normalisation of its zeros.
    return dsink.copy_(taken.masked_fill_(lse == -torch.inf, 0.0).sum(rows).neg_())
