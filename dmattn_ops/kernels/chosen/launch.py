"""Launch the kernels of chosen blocks."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from dmattn_ops.call import Call, Gradients, Result, Saved, Takes, rows_are_aligned
from dmattn_ops.choice import arch
from dmattn_ops.kernels.chosen.choosers import choosers_of
from dmattn_ops.kernels.chosen.forward import forward_kernel
from dmattn_ops.kernels.chosen.keys import dq_kernel, keys_kernel
from dmattn_ops.kernels.chosen.queries import queries_kernel
from dmattn_ops.kernels.chosen.unions import Unions, unions_of
from dmattn_ops.kernels.chosen.work import Work, segment_arguments, work_of
from dmattn_ops.kernels.portable.arguments import factor_arguments, features_of, row_strides
from dmattn_ops.kernels.portable.statistics import row_statistics
from dmattn_ops.launching.launch import computed, launch, workspace

TAKES = Takes(("chosen",), sinks=True, oldest=80)
LEAST_GROUP, LARGEST_GROUP = 4, 128  # query heads that share a list and a key head
LARGEST_WIDTH = 256
LEAST_BLOCK = 16  # keys of blocks that gradients are computed by; smaller ones fill no product


def refusals(call: Call, direction: str) -> list[str]:
    """Return every reason why the kernels don't take a call of chosen blocks; empty where they do."""
    assert call.chosen is not None
    heads, heads_kv, lists = call.query.shape[2], call.key.shape[2], call.chosen.indices.shape[1]
    group = heads // heads_kv
    reasons = []
    if call.bias is not None:
        reasons.append("a bias is added")
    if call.options.dropout_p > 0.0:
        reasons.append("weights are dropped")
    if call.query.element_size() != 2:
        reasons.append("they take 16-bit elements")
    if max(call.query.shape[-1], call.value.shape[-1]) > LARGEST_WIDTH:
        reasons.append(f"head dimensions are at most {LARGEST_WIDTH}")
    if not LEAST_GROUP <= group <= LARGEST_GROUP or (lists == heads and group > 1):
        reasons.append(f"from {LEAST_GROUP} to {LARGEST_GROUP} query heads must share a key head and a list")
    if direction == "backward" and call.options.deterministic:
        reasons.append("sums by atomic additions are not deterministic")
    return reasons


def forward(call: Call, result: Result) -> None:
    """Write out `[B, Sq, H, Dv]`, lse, lse_tail and row_max `[B, H, Sq]`."""
    assert call.chosen is not None
    config = FORWARD[call.demand.width > 128]
    launch_forward(call, *call.chosen, result, max(1, config[0] // _padded_group(call)), *config[1:])


def backward(call: Call, saved: Saved, grads: Gradients) -> None:
    """Write dq, dk, dv and, where it is asked for, dsink."""
    assert call.chosen is not None
    by_keys = call.chosen.block >= LEAST_BLOCK
    config = (KEYS if by_keys else QUERIES)[call.demand.width > 128]
    run = backward_keys if by_keys else backward_queries
    run(call, *call.chosen, saved, grads, max(1, config[0] // _padded_group(call)), *config[1:])


def _padded_group(call: Call) -> int:
    return triton.next_power_of_2(call.query.shape[2] // call.key.shape[2])


FORWARD = ((128, 64, 8, 2), (128, 64, 8, 2))
KEYS = ((128, 64, 8, 1), (64, 64, 8, 1))
QUERIES = ((128, 64, 8, 1), (128, 64, 8, 1))


def _parts(call: Call, indices: Tensor, block: int) -> tuple[dict[str, Any], int]:
    """Return the arguments of lists: block, lengths, band and segments; and how many blocks there are."""
    seqlen_q, seqlen_k = call.query.shape[1], call.key.shape[1]
    return {
        **segment_arguments(call.mask.q_segments, call.mask.k_segments),
        "block": block, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k,
        "band_lo": call.options.band_lo, "band_hi": call.options.band_hi,
    }, triton.cdiv(seqlen_k, block)  # fmt: skip


def _of_call(call: Call, lists: Tensor) -> dict[str, Any]:
    """Return the arguments that the kernels of attention share; `lists [Bm, Hm, count]` are of tiles or of blocks."""
    return {
        "query": call.query, "key": call.key, "value": call.value,
        **row_strides("query", call.query), **row_strides("key", call.key), **row_strides("value", call.value),
        **segment_arguments(call.mask.q_segments, call.mask.k_segments),
        **factor_arguments(call.options),
        "heads_kv": call.key.shape[2], "seqlen_q": call.query.shape[1], "seqlen_k": call.key.shape[1],
        "band_lo": call.options.band_lo, "band_hi": call.options.band_hi,
    }  # fmt: skip


def _strides(lists: Tensor, each: int) -> dict[str, int]:
    """Return how many records of `each` batch entry and head there are to pass; 0 where one serves all."""
    batch, heads = lists.shape[:2]
    return {"lists_b": 0 if batch == 1 else heads * each, "lists_h": 0 if heads == 1 else each}


def launch_forward(
    call: Call, indices: Tensor, block: int, result: Result, queries: int, columns: int, warps: int, stages: int
) -> None:
    """Write out, lse, lse_tail and row_max."""
    aligned = rows_are_aligned(call.query, call.key, call.value, result.out)
    work = work_of(call, block, queries, columns, aligned)
    shared, blocks = _parts(call, indices, block)
    unions = unions_of(indices, shared, blocks, queries, work.tested, arch.physical(call.query.device).num_sms)
    tiles = unions.counts.shape[2]
    launch(
        forward_kernel, (call.query.shape[0] * call.key.shape[2] * tiles,),
        **_of_call(call, indices), **_strides(unions.counts, tiles),
        out=result.out, **row_strides("out", result.out),
        lse=result.lse, lse_tail=result.lse_tail, row_max=result.row_max, sink=call.sink,
        **unions._asdict(), tiles=tiles, capacity=unions.entries.shape[3],
        work=work, features=features_of(call, None), num_warps=warps, num_stages=stages,
    )  # fmt: skip


def backward_keys(
    call: Call,
    indices: Tensor,
    block: int,
    saved: Saved,
    grads: Gradients,
    queries: int,
    columns: int,
    warps: int,
    stages: int,
) -> None:
    """Write dq, dk and dv, by blocks of keys."""
    aligned = rows_are_aligned(call.query, call.key, call.value, grads.grad_out, saved.out)
    work = work_of(call, block, queries, columns, aligned)
    shared, blocks = _parts(call, indices, block)
    choosers = choosers_of(indices, shared, blocks)
    statistics = row_statistics(call, saved, grads, rows_are_aligned(grads.grad_out, saved.out))
    batch, seqlen_q, heads, _ = call.query.shape
    dq_sums = workspace(call.query, batch, seqlen_q, heads, work.keys.whole)
    computed(Tensor.zero_, dq_sums)
    parts = triton.cdiv(block, columns)
    scale = float(call.options.softmax_scale)
    launch(
        keys_kernel, (batch * call.key.shape[2] * blocks * parts,),
        **_of_call(call, indices), **_strides(choosers.counts, 1),
        grad_out=grads.grad_out, **row_strides("grad_out", grads.grad_out), **statistics._asdict(),
        dq_sums=dq_sums, dk=grads.dk, dv=grads.dv, **row_strides("dk", grads.dk), **row_strides("dv", grads.dv),
        starts=choosers.starts, counts=choosers.counts, choosers=choosers.queries,
        blocks=blocks, parts=parts, capacity=choosers.queries.shape[2], softmax_scale=scale,
        work=work, features=features_of(call, None), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    finish = work_of(call, block, max(1, 32 // work.padded_group), columns, aligned)
    launch(
        dq_kernel, (batch * call.key.shape[2] * triton.cdiv(seqlen_q, finish.queries),),
        dq_sums=dq_sums, dq=grads.dq, **row_strides("dq", grads.dq), heads_kv=call.key.shape[2], seqlen_q=seqlen_q,
        softmax_scale=scale, work=finish, num_warps=4,
    )  # fmt: skip


def backward_queries(
    call: Call,
    indices: Tensor,
    block: int,
    saved: Saved,
    grads: Gradients,
    queries: int,
    columns: int,
    warps: int,
    stages: int,
) -> None:
    """Write dq, dk and dv, by tiles of queries."""
    aligned = rows_are_aligned(call.query, call.key, call.value, grads.grad_out, saved.out)
    work = work_of(call, block, queries, columns, aligned)
    shared, blocks = _parts(call, indices, block)
    unions = unions_of(indices, shared, blocks, queries, work.tested, arch.physical(call.query.device).num_sms)
    statistics = row_statistics(call, saved, grads, rows_are_aligned(grads.grad_out, saved.out))
    batch, seqlen_k, heads_kv, _ = call.key.shape
    dk_sums = workspace(call.key, batch, heads_kv, seqlen_k, work.keys.whole)
    dv_sums = workspace(call.key, batch, heads_kv, seqlen_k, work.values.whole)
    for sums in (dk_sums, dv_sums):
        computed(Tensor.zero_, sums)
    tiles = unions.counts.shape[2]
    scale = float(call.options.softmax_scale)
    launch(
        queries_kernel, (batch * heads_kv * tiles,),
        **_of_call(call, indices), **_strides(unions.counts, tiles),
        grad_out=grads.grad_out, **row_strides("grad_out", grads.grad_out), **statistics._asdict(),
        dq=grads.dq, **row_strides("dq", grads.dq), dk_sums=dk_sums, dv_sums=dv_sums,
        **unions._asdict(), tiles=tiles, capacity=unions.entries.shape[3], softmax_scale=scale,
        work=work, features=features_of(call, None), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    computed(_finish, grads.dk, dk_sums, scale)
    computed(_finish, grads.dv, dv_sums, 1.0)


def _finish(grad: Tensor, sums: Tensor, scale: float) -> Tensor:
    return grad.copy_(sums[..., : grad.shape[-1]].transpose(1, 2) * scale)
