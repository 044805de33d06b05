"""Launch the kernel for one query of each head, and the one that merges where several programs share the keys of a head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from dmattn_ops.call import Call, Result, Takes, bias_kind, rows_are_aligned
from dmattn_ops.choice import arch
from dmattn_ops.choice.config import DecodeForward
from dmattn_ops.kernels.decode.kernel import decode_kernel
from dmattn_ops.kernels.interval_lists import laid_out_alike
from dmattn_ops.kernels.portable.arguments import (
    bias_arguments,
    broadcast_stride,
    ceil_div,
    factor_arguments,
    features_of,
    group_size,
    row_strides,
    shape_of,
)
from dmattn_ops.kernels.portable.forward import first_share, merge
from dmattn_ops.launching.launch import launch, workspace

TAKES = Takes(("none", "intervals"), sinks=True, starts=True, oldest=80)
LEAST_STEPS = 4  # dividing the keys into shares of fewer steps costs more for merging than it saves


def refusals(call: Call) -> list[str]:
    """Return every reason why this kernel cannot take a call; none means that it can."""
    reasons = []
    if call.varlen is not None or call.query.shape[1] != 1:
        reasons.append("takes one query of each head")
    if call.options.dropout_p > 0.0:
        reasons.append("takes no dropout")
    kv_heads, keys = call.key.shape[2], call.mask.end
    if keys is not None and keys.shape[1] not in (1, kv_heads):
        reasons.append(f"takes masks for all heads or for {kv_heads} key heads, not for {keys.shape[1]}")
    return reasons


def splits_of(call: Call, config: DecodeForward, num_sms: int) -> int:
    """Return how many programs share the keys of a head: where a call is batch-invariant, as if a batch entry were alone."""
    programs = _blocks(call, config) * call.key.shape[2] * call.demand.batch
    steps = ceil_div(call.key.shape[1], config.block_n)
    return max(1, min(config.per_sm * num_sms // programs, steps // LEAST_STEPS))


def _blocks(call: Call, config: DecodeForward) -> int:
    return ceil_div(call.query.shape[2] // call.key.shape[2], config.block_m)


def forward(call: Call, result: Result, config: DecodeForward) -> None:
    """Write out `[B, 1, H, Dv]`, and lse, lse_tail and row_max `[B, H, 1]`."""
    if call.mask.kind == "intervals":
        call = call._replace(mask=laid_out_alike(call.mask))
    kv_heads = call.key.shape[2]
    blocks = _blocks(call, config)
    aligned = rows_are_aligned(call.query, call.key, call.value, result.out)
    arguments = _arguments(call, kv_heads)
    arguments |= {"blocks": blocks, "sink": call.sink, "num_warps": config.num_warps, "num_stages": config.num_stages}
    arguments["shape"] = shape_of(call, config.block_m, config.block_n, aligned)
    splits = splits_of(call, config, arch.physical(call.query.device).num_sms)
    grid = (call.query.shape[0] * kv_heads * blocks, splits)
    if splits == 1:
        _launch(arguments, result, grid)
        return
    shares = Result(*[None if part is None else workspace(call.query, splits, *part.shape) for part in result])
    arguments["sink"] = None  # which takes its share of all shares together
    arguments["shape"] = shape_of(call, config.block_m, config.block_n, aligned and rows_are_aligned(shares.out))
    _launch(arguments, shares, grid)
    merge(shares, result, call.sink)


def _arguments(call: Call, kv_heads: int) -> dict[str, Any]:
    """Return the arguments of the kernel that are the same for a result and for shares of one."""
    query, key, value, mask, options = call.query, call.key, call.value, call.mask, call.options
    rows = row_strides("query", query) | row_strides("key", key) | row_strides("value", value)
    del rows["query_s"]
    bias, kind = _bias_arguments(call.bias, query.shape[2], kv_heads)
    shown = mask.end
    return {
        "query": query,
        "key": key,
        "value": value,
        **rows,
        **{name: getattr(mask, name) for name in ("start", "end", "hidden_from", "hidden_to")},
        "keys_b": broadcast_stride(shown, 0),
        "keys_h": broadcast_stride(shown, 1),
        "key_group": 1 if shown is None else group_size(kv_heads, shown.shape[1]),
        **bias,
        **factor_arguments(options),
        "heads": kv_heads,
        "seqlen_k": key.shape[1],
        "band_lo": options.band_lo,
        "band_hi": options.band_hi,
        "SPARSE": shown is not None and (mask.at_most is None or 2 * mask.at_most < key.shape[1]),
        "features": replace(features_of(call, None), bias=kind),
    }


def _bias_arguments(bias: Tensor | None, heads: int, kv_heads: int) -> tuple[dict[str, Any], str]:
    """Return the arguments of a bias `[B|1, H|Hkv|1, 1, Sk]`, and how a block of the query heads of a group reads it."""
    kind = bias_kind(bias)
    if bias is None or bias.shape[1] in (1, kv_heads):
        return bias_arguments(bias, kv_heads), kind
    own = {"bias_h": heads // kv_heads * bias.stride(1), "bias_q": bias.stride(1), "bias_group": 1}
    return bias_arguments(bias, heads) | own, "full"  # a row of the block is a head


def _launch(arguments: dict[str, Any], result: Result, grid: tuple[int, int]) -> None:
    """Launch the kernel for a result, or for shares of one: `[splits, B, 1, H, Dv]` and `[splits, B, H, 1]`."""
    one, strides = first_share(result, grid[1])
    statistics = {"lse": one.lse, "lse_tail": one.lse_tail, "row_max": one.row_max}
    assert all(part is None or part.stride(1) == 1 for part in statistics.values()), (
        "rows of statistics follow each other"
    )
    launch(
        decode_kernel,
        grid,
        out=result.out,
        out_b=one.out.stride(0),
        out_h=one.out.stride(2),
        lse=result.lse,
        lse_tail=result.lse_tail,
        row_max=result.row_max,
        **{f"{name}_b": 0 if part is None else part.stride(0) for name, part in statistics.items()},
        **strides,
        **arguments,
    )
