"""The configuration that a call runs with, of those that a row offers: decided here, and nowhere else.

Launchers obey: what `explain` and the profile line show is the object that the launch gets.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dmattn_ops.call import (
    TILE,
    UNBOUNDED,
    Call,
    Gradients,
    Result,
    Saved,
    bias_fits_tiles,
    bias_kind,
    is_pairwise,
    rows_are_aligned,
)
from dmattn_ops.choice import arch, config

# Of the SM 9.0 forward with a bias in tiles: the columns that heads take (wider ones leave no registers for it), the bytes of
# a query's mask words for a tile of keys, and of all that is not a tile.
_COLUMNS = (16, 32, 64, 80, 96, 128)
_BYTES_OF_BITS = TILE // 8
_BYTES_OF_THE_REST = 2048
# Of the SM 9.0 backward, where several blocks share the queries of a key tile: how many at most, microseconds to add up what
# they make, and by how much that has to be faster.
_MOST_SHARES, _SUM_OF_SHARES, _WORTH_SHARING = 8, 6.0, 1.2


def forward_config(offered: config.Config, call: Call, result: Result) -> config.Config:
    """Return the configuration of a forward that a row with `offered` was chosen for."""
    if isinstance(offered, config.PortableForward):
        aligned = rows_are_aligned(call.query, call.key, call.value, result.out)
        return offered.for_call(aligned, is_pairwise(call.bias, call.options), call.demand.seqlen_q)
    if isinstance(offered, config.AmpereForward):
        options = call.options
        plain = call.mask.kind == "none" and call.bias is None and options.softcap == 0.0
        unbounded = options.band_lo == -UNBOUNDED and options.band_hi == UNBOUNDED
        return offered.for_call(plain and unbounded, options.dropout_p > 0.0, _has_narrow_bias(call))
    if isinstance(offered, config.HopperForward):
        small = offered.block_m == TILE or _takes_tiles_of_128(call) or _ends_sooner_in_tiles_of_128(offered, call)
        return _with_bias_tiles(replace(offered, block_m=TILE), call) if small else offered
    return offered


def _has_narrow_bias(call: Call) -> bool:
    """Return whether a bias with queries stands beside heads of at most `config.NARROW` columns."""
    sizes = call.sizes
    return sizes.full_bias and sizes.width <= config.NARROW


def _with_bias_tiles(offered: config.HopperForward, call: Call) -> config.HopperForward:
    """Return a configuration whose bias comes in tiles, where shared memory has room, if need be with fewer buffers of queries."""
    columns = next((columns for columns in _COLUMNS if call.demand.width <= columns), None)
    if columns is None or not bias_fits_tiles(call.bias) or (call.mask.kind == "intervals" and columns > 64):
        return offered  # intervals of wide heads leave no registers for a tile
    tiles = (
        offered.stages * offered.block_m * (2 * offered.block_n + (_BYTES_OF_BITS if call.mask.kind == "bits" else 0))
    )
    of_block = arch.KNOWN[90].shared_memory // offered.per_sm - _BYTES_OF_THE_REST
    room = of_block - tiles - 4 * offered.stages * offered.block_n * columns
    query_stages = min(offered.query_stages, room // (2 * offered.block_m * columns))
    return replace(offered, query_stages=query_stages, bias_tiles=True) if query_stages > 0 else offered


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
    if isinstance(offered, config.AmpereBackward):
        plain = call.mask.kind == "none" and call.bias is None and call.options.softcap == 0.0
        return offered.for_call(plain, call.options.dropout_p > 0.0, _has_narrow_bias(call))
    # The other order divides by the scale, and has no registers for the slope of a soft cap.
    if isinstance(offered, config.HopperBackward):
        offered = replace(offered, shares=_shares(offered, call))
        if call.options.softcap != 0.0 or call.options.softmax_scale == 0.0:
            return replace(offered, variant="two_phase")
        if 64 < call.demand.width <= 96:  # heads in two parts; H200, B2 H16 S4096 D 80 full: 0.823 ms, else 0.865
            return replace(offered, variant="overlapped")
    return offered


def _shares(offered: config.HopperBackward, call: Call) -> int:
    """Return the number of SM 9.0 backward blocks that share the queries of the same keys: several where SMs would be idle.

    That is one, unless the time by the numbers of steps falls by a sixth: of the longest block, and of all blocks on all SMs.
    In float16 what one block makes may be infinite where the sum is not.
    """
    options, demand = call.options, call.demand
    listed = call.varlen is not None or call.mask.kind != "none"
    if listed or options.deterministic or bias_kind(call.bias) == "key" or call.query.dtype == torch.float16:
        return 1
    sms, kv_heads = arch.physical(call.query.device).num_sms, call.key.shape[-2]
    tiles = -(-demand.seqlen_k // offered.block_n)
    blocks = demand.batch * kv_heads * tiles
    bounded = options.band_lo > -UNBOUNDED, options.band_hi < UNBOUNDED
    width = options.band_hi - options.band_lo + offered.block_n if all(bounded) else demand.seqlen_q
    steps = demand.heads // kv_heads * -(-min(demand.seqlen_q, width) // offered.block_m)
    uneven = bounded[0] != bounded[1]  # blocks differ in length, and short ones fill the time of the longest

    def time(shares: int) -> float:
        longest = steps / shares * offered.step + offered.ends
        if uneven:
            mean = (tiles + 1) / (2 * tiles) * steps / shares * offered.step + offered.ends
            longest = max(longest, blocks * shares * mean / sms)
        else:
            longest *= -(-blocks * shares // sms)
        return longest + (_SUM_OF_SHARES if shares > 1 else 0.0)

    best = min(range(1, max(1, min(_MOST_SHARES, steps // 2)) + 1), key=time)
    return best if time(1) >= _WORTH_SHARING * time(best) else 1


def _rows_of_backward(call: Call, saved: Saved, grads: Gradients) -> tuple[Tensor, ...]:
    return (call.query, call.key, call.value, grads.grad_out, saved.out, grads.dq, grads.dk, grads.dv)
