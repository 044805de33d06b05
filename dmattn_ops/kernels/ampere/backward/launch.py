"""Launch the backward with mma.sync: statistics of rows, the five products, and dq from its sums."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dmattn_ops.call import TILE, Call, Gradients, Saved, Takes, bias_kind, mappable, rows_are_aligned
from dmattn_ops.choice.configurations import AmpereBackward
from dmattn_ops.kernels.ampere.arguments import LEAST_COLUMNS, bias_comes_in_tiles, common_refusals, far_apart
from dmattn_ops.kernels.ampere.backward.finish import finish_bias_kernel, finish_kernel
from dmattn_ops.kernels.ampere.backward.kernel import Traits, backward_kernel
from dmattn_ops.kernels.ampere.dbias import broadcast_dbias
from dmattn_ops.kernels.interval_lists import listed
from dmattn_ops.kernels.portable.arguments import (
    Extent,
    blocks_and_programs,
    ceil_div,
    extent,
    features_of,
    list_arguments,
    padded,
    row_strides,
    shape_of,
)
from dmattn_ops.kernels.portable.dbias import BiasRoom, gradient_of_bias, room_for_bias
from dmattn_ops.kernels.portable.statistics import CLEARED, gradient_arguments
from dmattn_ops.launching.launch import computed, launch, workspace

TAKES = Takes(("none", "bits", "segments", "intervals"), sinks=True, oldest=80)
FINISHED_ROWS = 64  # rows of dq that a program writes
FINISHED_BIAS_ROWS = 16  # and of the gradient of a bias


def refusals(call: Call) -> list[str]:
    """Return every reason why the kernels don't take a request; empty where they do."""
    reasons = []
    if call.options.deterministic and (call.mask.kind != "none" or call.varlen is not None):
        reasons.append(
            "adds up dq in any order where there is a mask or sequences are packed, which is not deterministic"
        )
    return reasons + common_refusals(call)


def backward(call: Call, saved: Saved, grads: Gradients, config: AmpereBackward) -> None:
    """Write dq, dk, dv and, unless it is None, dbias, each in its input's shape."""
    call = listed(call)
    size = extent(call)
    if not mappable(grads.grad_out) or far_apart(grads.grad_out):  # an expanded gradient, such as that of out.sum()
        grads = grads._replace(grad_out=computed(Tensor.contiguous, grads.grad_out))
    if call.varlen is not None:  # rows that belong to no sequence
        for gradient in (grads.dq, grads.dk, grads.dv):
            computed(Tensor.zero_, gradient)
    room = room_for_bias(call, grads.dbias, size)
    adds_to_bias = room.scores is None and _adds_to_bias(call, grads.dbias, config)
    step = config.block_m if call.mask.col_tiles is None else max(config.block_m, TILE)  # lists name whole tiles
    dq_rows = blocks_and_programs(size, size.seqlen_q, size.heads, step, None)[0] * step
    batch = call.query.shape[0] if call.varlen is None else 1
    of_dq = batch * size.heads * dq_rows * padded(call.query.shape[-1], LEAST_COLUMNS)
    of_bias = 0
    if adds_to_bias:
        of_bias = call.bias.shape[1] * dq_rows * ceil_div(size.seqlen_k, config.block_n) * config.block_n
    sums = workspace(call.query, ceil_div(of_dq + of_bias, CLEARED) * CLEARED)
    arguments = gradient_arguments(call, saved, grads, size, sums)
    bias_sums = sums[of_dq:] if adds_to_bias else None
    turns = None
    if call.options.deterministic:
        turns = workspace(call.query, batch, size.heads, dq_rows // config.block_m, dtype=torch.int32)
        computed(Tensor.zero_, turns)
    arguments |= {"dq_sums": sums, "bias_sums": bias_sums, "turns": turns, "dq_rows": dq_rows}
    _launch_keys(call, arguments, size, grads, room, config)
    _launch_finish(call, arguments, size, grads.dq, config)
    if bias_sums is not None:
        _launch_finish_bias(arguments, size, grads.dbias, config)
        return
    assert config.shared_bias is not None
    shared = partial(broadcast_dbias, call, arguments, size, config=config.shared_bias)
    gradient_of_bias(call, grads.dbias, room, shared)


def _launch_keys(
    call: Call, arguments: dict[str, Any], size: Extent, grads: Gradients, room: BiasRoom, config: AmpereBackward
) -> None:
    """Launch the five products: a program for each block of keys of each key head."""
    mask = call.mask
    blocks, programs = blocks_and_programs(size, size.seqlen_k, size.kv_heads, config.block_n, mask.col_tiles)
    if programs == 0:
        return
    dbias, adds = room.scores, arguments["bias_sums"] is not None
    assert dbias is None or dbias.is_contiguous()
    launch(
        backward_kernel,
        (programs,),
        **{name: value for name, value in arguments.items() if name != "bias_sums"},
        **list_arguments(mask.col_tiles, mask.row_bits, size.heads),
        **row_strides("dk", grads.dk),
        **row_strides("dv", grads.dv),
        dk=grads.dk,
        dv=grads.dv,
        dbias=arguments["bias_sums"] if adds else dbias,
        dbias_q=0 if dbias is None else dbias.stride(2),
        key_sums=room.key_sums,
        blocks=blocks,
        shape=shape_of(call, config.block_m, config.block_n, rows_are_aligned(grads.dk, grads.dv), LEAST_COLUMNS),
        features=features_of(call, mask.col_tiles),
        T=Traits(
            config.score_warps,
            config.key_warps,
            config.query_warps,
            config.query_stages,
            config.grad_stages,
            call.query.stride(-3) == grads.grad_out.stride(-3),
            bias_comes_in_tiles(call),
            call.options.deterministic,
            room.key_sums is not None,
            adds,
        ),
        num_warps=config.num_warps,
    )


def _launch_finish(call: Call, arguments: dict[str, Any], size: Extent, dq: Tensor, config: AmpereBackward) -> None:
    """Launch what makes dq of its sums."""
    blocks, programs = blocks_and_programs(size, size.seqlen_q, size.heads, FINISHED_ROWS, None)
    if programs == 0:
        return
    wanted = finish_kernel.arg_names
    launch(
        finish_kernel,
        (programs,),
        **{name: value for name, value in arguments.items() if name in wanted},
        **row_strides("dq", dq),
        dq=dq,
        blocks=blocks,
        shape=shape_of(call, FINISHED_ROWS, 0, rows_are_aligned(dq), LEAST_COLUMNS),
        features=features_of(call, None),
        STEP=config.block_m,
        num_warps=4,
    )


def _launch_finish_bias(arguments: dict[str, Any], size: Extent, dbias: Tensor, config: AmpereBackward) -> None:
    """Launch what makes the gradient of a bias of its sums."""
    blocks, key_blocks = ceil_div(size.seqlen_q, FINISHED_BIAS_ROWS), ceil_div(size.seqlen_k, config.block_n)
    programs = dbias.shape[1] * blocks * key_blocks
    if programs == 0:
        return
    wanted = finish_bias_kernel.arg_names
    launch(
        finish_bias_kernel,
        (programs,),
        **{name: value for name, value in arguments.items() if name in wanted},
        dbias=dbias,
        dbias_h=dbias.stride(1),
        dbias_q=dbias.stride(2),
        blocks=blocks,
        M=config.block_m,
        N=config.block_n,
        ROWS=FINISHED_BIAS_ROWS,
        num_warps=4,
    )


def _adds_to_bias(call: Call, dbias: Tensor | None, config: AmpereBackward) -> bool:
    """Return whether the kernel adds the gradient of a bias that batches share up in memory, in an order of no account."""
    if dbias is None or call.options.deterministic or bias_kind(call.bias) != "full" or config.bias_sums == 0:
        return False
    return dbias.shape[0] == 1 and call.query.shape[0] >= config.bias_sums
