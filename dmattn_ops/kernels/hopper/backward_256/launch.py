"""Launch the SM 9.0 backward for wide heads: what it refuses, its tensor maps, and its three kernels.

Seven matrix products instead of five: dk/dv and dq each have a kernel that computes the scores. The registers hold dk
and dv of 64 keys; a block that made dq of its steps as well would have to add it up in float32 in global memory, and
that traffic (128 KB per step of 64 queries instead of 64) costs more than the two products. Separately both kernels
come close to the rate of a plain matrix product, so that seven are faster here than five elsewhere. Nothing is added up
between blocks: results don't depend on their order, and the only workspace is two floats per query. So it also serves
narrower heads where the faster kernel for those may not be used: B4 S4096, 428 and 472 at H16 D128, 287 and 321 at
H32 D64.

One H200, 2026-11-20, bf16, D 256, TFLOP/s of the whole backward (2.5 times the forward's work), causal and full, next
to cuDNN 9.19 in the same process: B4 H8 S4096 511 and 555 (376 and 399), B1 H8 S16384 572 and 518 (397 and 364).
A mask of random bits costs 8%.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmattn_ops.call import (
    TILE,
    UNBOUNDED,
    Call,
    Gradients,
    Saved,
    Takes,
    bias_kind,
    hides_packed_keys,
    in_natural_units,
    is_unshared,
    mappable,
)
from dmattn_ops.choice.config import HopperBackward256
from dmattn_ops.kernels.hopper.arguments import (
    MAX_DIM,
    bias_places,
    column_parts,
    heads_that_balance,
    hides_rows,
    mask_arguments,
    room_for_key_sums,
    row_strides,
    score_factors,
    sizes_of,
    statistic_strides,
    too_long,
    unused_refusals,
)
from dmattn_ops.kernels.hopper.backward_256.keys import keys_kernel
from dmattn_ops.kernels.hopper.backward_256.queries import queries_kernel
from dmattn_ops.kernels.hopper.backward_256.types import Traits
from dmattn_ops.kernels.hopper.behind import backward_with
from dmattn_ops.kernels.hopper.dbias.launch import notes as notes
from dmattn_ops.kernels.hopper.kinds import kind_of
from dmattn_ops.kernels.hopper.scores import BIAS_KINDS
from dmattn_ops.kernels.hopper.statistics import Made, Statistics, query_of, row_statistics
from dmattn_ops.kernels.hopper.views import MaskTensors
from dmattn_ops.kernels.portable.again import COUNTS, SUSPECT, entries_with_counts
from dmattn_ops.kernels.ragged import WORDS
from dmattn_ops.kernels.ragged import tiles_of as ragged_tiles
from dmattn_ops.kernels.sinks import add_parts, part_of_gradient, parts_of_gradient, take_sink
from dmattn_ops.launching.launch import launch, workspace
from dmattn_ops.launching.overlap import follow_kernel_before
from dmattn_ops.launching.tensor_maps import plain_map, rows_map

STEP = 64
TAKES = Takes(("none", "bits", "segments", "intervals"), sinks=True, oldest=90, newest=90)
# Tiles of packed sequences that go together (H200, 2026-11-24, bf16, 8 heads of D 256: 24 sequences of 64 to 2000 take 1.065 ms,
# and 1.154 with all tiles by their work)
CHUNK = 16
STAT_ROWS = 64  # rows of a statistics program
STATISTICS = 4  # of a row: lse, delta and the pair
_COUNTS, _SUSPECT = tl.constexpr(COUNTS), tl.constexpr(SUSPECT)


def refusals(call: Call) -> list[str]:
    """Return every reason why these kernels don't take a request; empty where they do."""
    query, key, value, bias = call.query, call.key, call.value, call.bias
    mask, varlen, options = call.mask, call.varlen, call.options
    dims = query.shape[-1], value.shape[-1]
    by_key = bias is not None or (varlen is not None and mask.k_segments is not None)
    wrong = {
        f"elements are {query.dtype}, not float16 or bfloat16": query.dtype not in (torch.float16, torch.bfloat16),
        f"head dimensions {dims} are over {MAX_DIM}": max(dims) > MAX_DIM,
        f"head dimensions {dims} are not multiples of 8": any(dim % 8 for dim in dims),
        "takes no bias that nothing shares (the portable kernels write its gradient as they go)": is_unshared(call),
        "takes no bias with queries at a scale of 0": bias_kind(bias) == "full" and options.softmax_scale == 0.0,
        "takes no softcap with a bias, or with a mask of packed keys": by_key and options.softcap != 0,
        "a NaN that one sequence makes of hidden packed keys has all computed again, which is not batch-invariant": (
            options.batch_invariant and hides_packed_keys(call)
        ),
        "takes no dropout": options.dropout_p != 0,
        "takes intervals with lists of tiles, which would be too long here": varlen is None and too_long(call),
    }
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        wrong[f"{name} is not aligned to 16 bytes in start and strides {tensor.stride()}"] = not mappable(tensor)
    return [reason for reason, applies in wrong.items() if applies] + unused_refusals(call)


def _arguments_of(call: Call, of_keys: bool, heads: int, seqlen_q: int, placeholder: Tensor) -> MaskTensors:
    """Return the mask of a call for blocks of keys, or for blocks of queries."""
    mask = call.mask
    if call.varlen is None:
        parts = (mask.col_tiles, mask.col_bits) if of_keys else (mask.row_tiles, mask.row_bits)
        return mask_arguments(*parts, mask, heads, seqlen_q, placeholder)
    records = ragged_tiles(call, STEP if of_keys else TILE, of_keys=of_keys, chunk=CHUNK, follows=of_keys)
    given = mask_arguments(None, None, mask, heads, seqlen_q, placeholder)
    return given._replace(lists=records, list_width=WORDS)


def _heads_side_by_side(call: Call, config: HopperBackward256, uneven: bool, heads: int, blocks: int) -> int:
    """Return how many of `heads` heads' blocks alternate: where they differ in length, longest first, and still in L2.

    `blocks` is how many a head has. How their lengths differ is known of causal calls alone; heads that share keys and packed
    sequences read more, and are left as they were (measured up to D 128: `_order` of the other backward).
    """
    if not uneven:
        return 1
    causal = call.varlen is None and call.mask.row_tiles is None and call.options.band_lo == -UNBOUNDED
    if not causal or call.query.shape[2] != call.key.shape[2]:
        return config.heads_per_group
    return max(config.heads_per_group, heads_that_balance(blocks, heads, call.query.device))


def backward(call: Call, saved: Saved, grads: Gradients, config: HopperBackward256) -> None:
    """Write dq, dk and dv of tensors that `refusals` accepts, dense or packed, and dbias unless it is None."""
    backward_with(_gradients, call, saved, grads, config)


def _gradients(call: Call, saved: Saved, grads: Gradients, config: HopperBackward256, watched: bool) -> Made:
    """Write dq, dk and dv; `watched`: a NaN in them is noted."""
    query, key, value, bias, mask, options = call.query, call.key, call.value, call.bias, call.mask, call.options
    grad_out, grad_lse, dq, dk, dv = grads[:5]
    batch, seqlen_q, seqlen_k, heads, kv_heads = sizes_of(call)
    (width, second), (width_v, second_v) = column_parts(query.shape[-1]), column_parts(value.shape[-1])
    # the tiles of packed queries serve the kernel that makes dq, too
    of_queries = None if call.varlen is None else _arguments_of(call, False, heads, seqlen_q, query)
    query_tiles = None if of_queries is None else of_queries.lists
    rows = (-(-seqlen_q // TILE) if query_tiles is None else query_tiles.shape[0]) * TILE
    total = batch * heads * rows
    n_flags = total // STAT_ROWS
    behind = STATISTICS * total + -(-n_flags // 16) * 4  # the flags, so that what follows is aligned
    entries = entries_with_counts(call) if watched else None
    room = workspace(query, behind + COUNTS * (entries or 1) * watched)
    stats, flags = room[: STATISTICS * total].view(STATISTICS, total), room[STATISTICS * total : behind]
    flags, counts = flags.view(torch.int8), room[behind:].view(torch.int32) if watched else None
    columns_v = 1 << (width_v + second_v - 1).bit_length()
    sink_parts = parts_of_gradient(grads, total // STAT_ROWS)
    _statistics(
        grad_out, grad_lse, call.sink, sink_parts, saved, stats, flags, counts, entries or 1, query_tiles,
        (seqlen_q, heads, rows), columns_v, in_natural_units(call),
    )  # fmt: skip
    add_parts(sink_parts, batch, heads, grads)
    scale_log2, cap = score_factors(options)
    key_sums = room_for_key_sums(call)
    band_lo, band_hi = options[:2]
    has_lo, has_hi = band_lo > -UNBOUNDED, band_hi < UNBOUNDED
    uneven = has_lo or has_hi or mask.row_tiles is not None or call.varlen is not None
    wide, wide_v = (query, key, dq, dk), (value, grad_out, dv)
    q_map, k_map, dq_map, dk_map = (rows_map(tensor, STEP, width) for tensor in wide)
    v_map, o_map, dv_map = (rows_map(tensor, STEP, width_v) for tensor in wide_v)
    q2_map, k2_map, dq2_map, dk2_map = (rows_map(tensor, STEP, second) if second else None for tensor in wide)
    v2_map, o2_map, dv2_map = (rows_map(tensor, STEP, second_v) if second_v else None for tensor in wide_v)
    maps, more_maps = (q_map, k_map, v_map, o_map), (q2_map, k2_map, v2_map, o2_map)
    given = _arguments_of(call, True, heads, seqlen_q, stats)
    blocks = -(-seqlen_k // STEP) if mask.kind == "none" else -(-seqlen_k // TILE) * 2
    if call.varlen is not None:
        blocks = given.lists.shape[0]
    together = _heads_side_by_side(call, config, uneven, batch * kv_heads, blocks)
    common = {
        **bias_places(bias, heads)._asdict(), "bias": bias, "scale": options.softmax_scale, "scale_log2": scale_log2, "cap": cap,
        "group": heads // kv_heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "stat_rows": rows, "band_lo": band_lo,
        "band_hi": band_hi, "total": total, "counts": counts, "num_warps": 4, "follows": True,
        "counts_b": None if entries is None else COUNTS,
    }  # fmt: skip
    traits = Traits(
        width, second, width_v, second_v, kind_of(call), BIAS_KINDS[bias_kind(bias)], options.softcap > 0.0, PARTIAL=uneven,
        HAS_LO=has_hi, HAS_HI=has_lo, HIDDEN=mask.hidden_from is not None, NATURAL=in_natural_units(call), EDGES=hides_rows(call),
        WATCH=watched,
    )  # fmt: skip
    launch(
        keys_kernel, (batch * kv_heads * blocks,),
        *maps, plain_map(stats, (2, total), (1, STEP)), dk_map, dv_map, *more_maps, dk2_map, dv2_map,
        stats, flags, **given._asdict(), **common, key_sums=key_sums, kv_heads=kv_heads, heads_per_group=together,
        n_heads=batch * kv_heads, n_blocks=blocks, T=traits,
    )  # fmt: skip
    given = of_queries or _arguments_of(call, False, heads, seqlen_q, stats)
    together = _heads_side_by_side(call, config, uneven, batch * heads, rows // TILE)
    traits = replace(traits, PARTIAL=uneven or seqlen_k % STEP != 0, HAS_LO=has_lo, HAS_HI=has_hi)
    launch(
        queries_kernel, (batch * heads * (rows // TILE),),
        *maps, dq_map, *more_maps, dq2_map, stats, flags, **given._asdict(), **common, heads=heads, heads_per_group=together,
        n_heads=batch * heads, n_tiles=rows // TILE, T=traits,
    )  # fmt: skip
    return Made(Statistics(stats, flags, rows, n_flags), key_sums, counts)


def _statistics(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    sink: Tensor | None,
    sink_parts: Tensor | None,
    saved: Saved,
    stats: Tensor,
    flags: Tensor,
    counts: Tensor | None,
    entries: int,
    query_tiles: Tensor | None,
    sizes: tuple[int, int, int],
    width: int,
    natural: bool,
) -> None:
    """Fill stats `[4, B * H * rows]` as `hopper/statistics.py` says, and a flag for each program, and 0 where a NaN is noted.

    `counts` of `entries` follow each other; `sizes` are those of queries, heads, and rows of a head in `stats`.
    """
    out, lse, lse_tail = saved
    statistics = (lse, lse_tail, lse if grad_lse is None else grad_lse)
    strides = [
        *row_strides(out),
        *row_strides(grad_out),
        *(step for each in statistics for step in statistic_strides(each)),
    ]
    launch(
        statistics_kernel, (stats.shape[1] // STAT_ROWS,),
        out, grad_out, lse, lse_tail, grad_lse, sink, sink_parts, stats, flags, counts, entries, *strides, query_tiles,
        *sizes, stats.shape[1], out.shape[-1], BLOCK=STAT_ROWS, WIDTH=width, NATURAL=natural, num_warps=8,
        follows=query_tiles is not None,
    )  # fmt: skip


@triton.jit
def statistics_kernel(
    out, grad_out, lse, lse_tail, grad_lse, sink, sink_parts, stats, flags, counts, entries,
    out_b, out_s, out_h, grad_b, grad_s, grad_h, lse_b, lse_h, lse_s, tail_b, tail_h, tail_s,
    grad_lse_b, grad_lse_h, grad_lse_s, query_tiles,
    seqlen_q, heads, rows, total_rows, dim, BLOCK: tl.constexpr, WIDTH: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """Write the statistics of BLOCK rows of one head; where a row is empty or past the end such that P = 0."""
    follow_kernel_before()
    block = tl.program_id(0)
    index = block // (rows // BLOCK)
    start = (block - index * (rows // BLOCK)) * BLOCK
    row = start + tl.arange(0, BLOCK)
    batch = (index // heads).to(tl.int64)
    head = (index % heads).to(tl.int64)
    column = tl.arange(0, WIDTH)
    query, inside = query_of(row, start, query_tiles, seqlen_q)
    mask = inside[:, None] & (column < dim)[None, :]
    at = query.to(tl.int64)
    out += batch * out_b + head * out_h
    o = tl.load(out + at[:, None] * out_s + column[None, :], mask=mask, other=0.0)
    grad_out += batch * grad_b + head * grad_h
    g = tl.load(grad_out + at[:, None] * grad_s + column[None, :], mask=mask, other=0.0)
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    value = tl.load(lse + batch * lse_b + head * lse_h + at * lse_s, mask=inside, other=float("-inf"))
    tail = tl.load(lse_tail + batch * tail_b + head * tail_h + at * tail_s, mask=inside, other=0.0)
    if sink is not None:
        tail, taken = take_sink(tl.load(sink + head).to(tl.float32), value, tail)
        if sink_parts is not None:
            tl.store(sink_parts + block, part_of_gradient(taken, delta))
    made = row_statistics(value, tail, NATURAL)
    if grad_lse is not None:
        delta -= tl.load(grad_lse + batch * grad_lse_b + head * grad_lse_h + at * grad_lse_s, mask=inside, other=0.0)
    to = stats + index.to(tl.int64) * rows + row
    tl.store(to, made.minus_lse)
    tl.store(to + total_rows, tl.where(value == float("-inf"), 0.0, delta))
    tl.store(to + 2 * total_rows.to(tl.int64), made.first)
    tl.store(to + 3 * total_rows.to(tl.int64), made.second)
    tl.store(flags + block, tl.max(made.large.to(tl.int32), 0).to(tl.int8))
    if counts is not None:
        tl.store(counts + block * _COUNTS + _SUSPECT, 0, mask=block < entries)
