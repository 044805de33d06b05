"""Launch the kernels of chosen blocks: lists of what neighbouring queries chose, then attention by them."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from dmattn_ops.call import UNBOUNDED, Call, Gradients, Result, Saved, Takes, rows_are_aligned
from dmattn_ops.choice import arch
from dmattn_ops.choice.arch import Arch
from dmattn_ops.choice.chosen import Gathering, backward_tiles, forward_tiles, largest_group
from dmattn_ops.kernels.chosen.choosers import choosers_of
from dmattn_ops.kernels.chosen.forward import forward_kernel
from dmattn_ops.kernels.chosen.keys import dq_kernel, keys_kernel
from dmattn_ops.kernels.chosen.queries import queries_kernel
from dmattn_ops.kernels.chosen.unions import Apart, Unions, unions_of
from dmattn_ops.kernels.chosen.work import Work, segment_arguments, work_of
from dmattn_ops.kernels.portable.arguments import factor_arguments, features_of, row_strides
from dmattn_ops.kernels.portable.statistics import row_statistics
from dmattn_ops.launching.launch import computed, launch, workspace

TAKES = Takes(("chosen",), sinks=True, oldest=80)
LEAST_GROUP = 4  # query heads that share a list and a key head
LARGEST_WIDTH = 256
_MOST_QUERIES = 32  # of a tile: a word has a bit for each
_FINISHED_ROWS = 32  # rows of dq that a program writes


def refusals(call: Call, direction: str, on: Arch | None = None) -> list[str]:
    """Return every reason why the kernels don't take a call of chosen blocks, as its own architecture or as `on`; or none."""
    assert call.chosen is not None
    heads, heads_kv, lists = call.query.shape[2], call.key.shape[2], call.chosen.indices.shape[1]
    group = heads // heads_kv
    reasons = []
    if call.bias is not None:
        reasons.append("do not add a bias")
    if call.options.dropout_p > 0.0:
        reasons.append("do not drop weights")
    if call.query.element_size() != 2:
        reasons.append("take 16-bit elements")
    if max(call.query.shape[-1], call.value.shape[-1]) > LARGEST_WIDTH:
        reasons.append(f"take head dimensions up to {LARGEST_WIDTH}")
    largest = largest_group(on or _architecture_of(call))
    if not LEAST_GROUP <= group <= largest or (lists == heads and group > 1):
        reasons.append(f"take from {LEAST_GROUP} to {largest} query heads that share a key head and a list")
    if direction == "backward" and call.options.deterministic:
        reasons.append("add up gradients in any order, which is not deterministic")
    return reasons


def forward(call: Call, result: Result) -> None:
    """Write out `[B, Sq, H, Dv]`, lse, lse_tail and row_max `[B, H, Sq]`."""
    assert call.chosen is not None
    forward_with(call, result, forward_tiles(call.demand, call.chosen.block, _architecture_of(call)))


def backward(call: Call, saved: Saved, grads: Gradients) -> None:
    """Write dq, dk, dv and, where it is asked for, dsink."""
    assert call.chosen is not None
    backward_with(call, saved, grads, backward_tiles(call.demand, call.chosen.block, _architecture_of(call)))


def _architecture_of(call: Call) -> Arch:
    """Return the architecture that tiles are chosen for: the one that `DMATTN_ARCH` names, else that of the call's device."""
    device = call.query.device
    return arch.current(device) if call.query.is_cuda else arch.physical(device)


def forward_with(call: Call, result: Result, tiles: Gathering) -> None:
    """Write the outputs of a forward with given tiles."""
    assert call.chosen is not None
    aligned = rows_are_aligned(call.query, call.key, call.value, result.out)
    work = _work(call, tiles, aligned)
    unions = _unions(call, work)
    if tiles.apart is None or work.queries == 1:
        _launch_forward(call, result, tiles, work, unions, UNBOUNDED, None)
        return
    apart = Apart(unions, work.queries, int(tiles.limit * call.chosen.indices.shape[3]))
    _launch_forward(call, result, tiles, work, unions, apart.most, None)
    work = work_of(call, 1, tiles.apart.columns, aligned)
    _launch_forward(call, result, tiles.apart, work, _unions(call, work, apart), apart.most, apart)


def _launch_forward(
    call: Call, result: Result, tiles: Gathering, work: Work, unions: Unions, most: int, apart: Apart | None
) -> None:
    """Launch the forward for tiles that chose up to `most` blocks, or for the queries of those `apart`."""
    launch(
        forward_kernel,
        (_groups(call) * unions.counts.shape[2],),
        **_shared(call),
        **_of_unions(unions),
        wide_counts=None if apart is None else apart.unions.counts,
        wide=1 if apart is None else apart.queries,
        most=most,
        **row_strides("out", result.out),
        out=result.out,
        lse=result.lse,
        lse_tail=result.lse_tail,
        row_max=result.row_max,
        sink=call.sink,
        work=work,
        features=features_of(call, None),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def backward_with(call: Call, saved: Saved, grads: Gradients, tiles: Gathering) -> None:
    """Write the gradients of a backward with given tiles.

    Tiles of queries add what their keys get to sums in float32. Where `tiles.apart`, tiles whose queries chose too many blocks
    together are left to blocks of keys, which add to the same sums.
    """
    assert call.chosen is not None
    aligned = rows_are_aligned(call.query, call.key, call.value, grads.grad_out, saved.out)
    statistics = row_statistics(call, saved, grads, rows_are_aligned(grads.grad_out, saved.out))
    work = _work(call, tiles, aligned)
    batch, seqlen_k, heads_kv, _ = call.key.shape
    dk_sums, dv_sums = (
        workspace(call.key, batch, heads_kv, seqlen_k, width.whole) for width in (work.keys, work.values)
    )
    for sums in (dk_sums, dv_sums):
        computed(Tensor.zero_, sums)
    scale = float(call.options.softmax_scale)
    arguments = {
        **_shared(call),
        **row_strides("grad_out", grads.grad_out),
        **{name: computed(_by_query, part) for name, part in statistics._asdict().items()},
        "grad_out": grads.grad_out,
        "dk_sums": dk_sums,
        "dv_sums": dv_sums,
        "features": features_of(call, None),
    }
    unions = _unions(call, work)
    most = UNBOUNDED if tiles.apart is None else int(tiles.limit * call.chosen.indices.shape[3])
    launch(
        queries_kernel,
        (_groups(call) * unions.counts.shape[2],),
        **arguments,
        **_of_unions(unions),
        **row_strides("dq", grads.dq),
        dq=grads.dq,
        most=most,
        softmax_scale=scale,
        work=work,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if tiles.apart is not None:
        _backward_apart(call, grads, tiles.apart, Apart(unions, work.queries, most), arguments, aligned)
    computed(_finish, grads.dk, dk_sums, scale)
    computed(_finish, grads.dv, dv_sums, 1.0)


def _backward_apart(
    call: Call, grads: Gradients, tiles: Gathering, apart: Apart, arguments: dict[str, Any], aligned: bool
) -> None:
    """Launch the five products by blocks of keys for queries that chose `apart`, and what makes dq of its sums."""
    (batch, seqlen_q, heads, _), (_, seqlen_k, heads_kv, _) = call.query.shape, call.key.shape
    assert call.chosen is not None
    work = _work(call, tiles, aligned)
    blocks, parts = triton.cdiv(seqlen_k, work.block), triton.cdiv(work.block, work.columns)
    choosers = choosers_of(call.chosen.indices, _of_lists(call), blocks, apart)
    dq_sums = workspace(call.query, batch, seqlen_q, heads, work.keys.whole)
    counts, finished = (
        apart.unions.counts,
        work_of(call, max(1, _FINISHED_ROWS // work.padded_group), work.columns, aligned),
    )
    grid = (_groups(call) * triton.cdiv(seqlen_q, finished.queries),)
    of_sums = {
        **row_strides("dq", grads.dq),
        **_strides(counts, counts.shape[2]),
        "dq_sums": dq_sums,
        "dq": grads.dq,
        "wide_counts": counts,
        "wide": apart.queries,
        "most": apart.most,
        "heads_kv": heads_kv,
        "seqlen_q": seqlen_q,
        "softmax_scale": float(call.options.softmax_scale),
        "work": finished,
    }
    launch(dq_kernel, grid, **of_sums, CLEAR=True, num_warps=4)
    launch(
        keys_kernel,
        (_groups(call) * blocks * parts,),
        **arguments,
        **_strides(choosers.counts, 1),
        dq_sums=dq_sums,
        starts=choosers.starts,
        counts=choosers.counts,
        choosers=choosers.queries,
        blocks=blocks,
        parts=parts,
        capacity=choosers.queries.shape[2],
        work=work,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    launch(dq_kernel, grid, **of_sums, CLEAR=False, num_warps=4)


def _by_query(statistic: Tensor) -> Tensor:
    """Return a statistic `[B, H, Sq]` as `[B, Sq, H]`: the heads of a query are read together."""
    return statistic.transpose(1, 2).contiguous()


def _finish(grad: Tensor, sums: Tensor, scale: float) -> Tensor:
    """Write a gradient `[B, Sk, Hkv, D]` from sums `[B, Hkv, Sk, ..]`."""
    return grad.copy_(sums[..., : grad.shape[-1]].transpose(1, 2).mul_(scale))


def _work(call: Call, tiles: Gathering, aligned: bool) -> Work:
    """Return the blocks of a kernel: as many queries as fill the rows of its tiles."""
    group = triton.next_power_of_2(call.query.shape[2] // call.key.shape[2])
    return work_of(call, max(1, min(tiles.rows // group, _MOST_QUERIES)), tiles.columns, aligned)


def _groups(call: Call) -> int:
    """Return how many key heads all batch entries have."""
    return call.query.shape[0] * call.key.shape[2]


def _unions(call: Call, work: Work, apart: Apart | None = None) -> Unions:
    """List what the queries of each tile chose, or of those `apart`."""
    assert call.chosen is not None
    blocks, num_sms = triton.cdiv(call.key.shape[1], work.block), arch.physical(call.query.device).num_sms
    return unions_of(call.chosen.indices, _of_lists(call), blocks, work.queries, work.tested, num_sms, apart)


def _of_unions(unions: Unions) -> dict[str, Any]:
    """Return the arguments that name lists of tiles of queries."""
    tiles = unions.counts.shape[2]
    return {**unions._asdict(), **_strides(unions.counts, tiles), "tiles": tiles, "capacity": unions.entries.shape[3]}


def _strides(lists: Tensor, records: int) -> dict[str, int]:
    """Return how many records lie between the lists of two batch entries and heads; 0 where one serves all."""
    batch, heads = lists.shape[:2]
    return {"lists_b": 0 if batch == 1 else heads * records, "lists_h": 0 if heads == 1 else records}


def _of_lists(call: Call) -> dict[str, Any]:
    """Return the arguments that say which keys of named blocks are visible: block, lengths, band and segments."""
    assert call.chosen is not None
    return {
        **segment_arguments(call.mask.q_segments, call.mask.k_segments),
        "block": call.chosen.block,
        "seqlen_q": call.query.shape[1],
        "seqlen_k": call.key.shape[1],
        "band_lo": call.options.band_lo,
        "band_hi": call.options.band_hi,
    }


def _shared(call: Call) -> dict[str, Any]:
    """Return the arguments that all kernels of attention take."""
    of_lists = {name: value for name, value in _of_lists(call).items() if name != "block"}
    return {
        **of_lists,
        **row_strides("query", call.query),
        **row_strides("key", call.key),
        **row_strides("value", call.value),
        **factor_arguments(call.options),
        "query": call.query,
        "key": call.key,
        "value": call.value,
        "heads_kv": call.key.shape[2],
    }
