"""The configuration that a call runs with, of those that a row offers: decided here, and nowhere else.

Launchers obey: what `explain` and the profile line show is the object that the launch gets.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from dmattn_ops import arch, config
from dmattn_ops.call import Call, Gradients, Result, Saved, is_pairwise, rows_are_aligned
from dmattn_ops.problem import TILE, UNBOUNDED


def forward_config(offered: config.Config, call: Call, result: Result) -> config.Config:
    """Return the configuration of a forward that a row with `offered` was chosen for."""
    if isinstance(offered, config.PortableForward):
        aligned = rows_are_aligned(call.query, call.key, call.value, result.out)
        return offered.for_call(aligned, is_pairwise(call.bias, call.options), call.demand.seqlen_q)
    if isinstance(offered, config.HopperForward):
        small = offered.block_m == TILE or _takes_tiles_of_128(call) or _ends_sooner_in_tiles_of_128(offered, call)
        return replace(offered, block_m=TILE) if small else offered
    return offered


def _ends_sooner_in_tiles_of_128(offered: config.HopperForward, call: Call) -> bool:
    """Return whether the last multiprocessor is done sooner with smaller pieces, as it may be where each has few of them."""
    sms = arch.physical(call.query.device).num_sms
    demand, options = call.demand, call.options
    causal = options.band_hi < UNBOUNDED and options.band_lo == -UNBOUNDED  # else pieces are equally long
    times = []
    for rows, step in ((offered.block_m, offered.step), (TILE, offered.step_of_128)):
        tiles = -(-demand.seqlen_q // rows)
        pieces = demand.batch * demand.heads * tiles
        rounds = max(1.0, pieces * (tiles + 1) / (2 * tiles) / sms) if causal else -(-pieces // sms)
        times.append(rounds * step)
    return times[1] < times[0]


def _takes_tiles_of_128(call: Call) -> bool:
    """Return whether the SM 9.0 forward takes 128 queries at a time.

    Lists name tiles of that height; a third consumer has no registers for a bias or dropout; packed sequences are faster
    so (H200, D 64, 16 sequences of 64 to 3500: 0.119 ms, with 192 queries 0.144).
    """
    listed = call.mask.kind != "none" or call.varlen is not None
    return listed or call.bias is not None or call.options.dropout_p > 0.0


def backward_config(offered: config.Config, call: Call, saved: Saved, grads: Gradients) -> config.Config:
    """Return the configuration of a backward that a row with `offered` was chosen for."""
    if isinstance(offered, config.PortableBackward):
        aligned = rows_are_aligned(*_rows_of_backward(call, saved, grads))
        return offered.for_call(aligned, is_pairwise(call.bias, call.options))
    # The other order divides by the scale, and has no registers for the slope of a soft cap.
    if isinstance(offered, config.HopperBackward):
        if call.options.softcap != 0.0 or call.options.softmax_scale == 0.0:
            return replace(offered, variant="two_phase")
        if 64 < call.demand.width <= 96:  # heads in two parts; H200, B2 H16 S4096 D 80 full: 0.823 ms, else 0.865
            return replace(offered, variant="overlapped")
    return offered


def _rows_of_backward(call: Call, saved: Saved, grads: Gradients) -> tuple[Tensor, ...]:
    return (call.query, call.key, call.value, grads.grad_out, saved.out, grads.dq, grads.dk, grads.dv)
