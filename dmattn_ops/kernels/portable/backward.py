"""Backward in plain Triton, for every GPU from SM 8.0, without atomics.

Three kernels run one after the other: row statistics, then dk and dv, then dq. Both gradient kernels recompute the
probabilities from lse. The gradient of a bias is dS, summed over the dimensions that the bias broadcasts. The dk/dv kernel
writes it for a bias per key, and the dq kernel for a bias with one element per score. Where several heads or batches share
an element, a kernel of its own sums it (`dbias.py`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from dmattn_ops.call import Call, Gradients, Saved, Takes, rows_are_aligned
from dmattn_ops.choice.config import PortableBackward
from dmattn_ops.kernels.interval_lists import listed
from dmattn_ops.kernels.portable.arguments import (
    Extent,
    blocks_and_programs,
    extent,
    features_of,
    list_arguments,
    row_strides,
    shape_of,
)
from dmattn_ops.kernels.portable.dbias import broadcast_dbias, dbias_arguments, gradient_of_bias, room_for_bias
from dmattn_ops.kernels.portable.keys import keys_kernel
from dmattn_ops.kernels.portable.queries import queries_kernel
from dmattn_ops.kernels.portable.statistics import gradient_arguments
from dmattn_ops.launching.launch import computed, launch

TAKES = Takes(("none", "bits", "segments", "intervals"), sinks=True, oldest=80)


def backward(call: Call, saved: Saved, grads: Gradients, config: PortableBackward) -> None:
    """Write dq, dk, dv and, unless it is None, dbias, each in its input's shape."""
    call = listed(call)
    query, size = call.query, extent(call)
    if call.varlen is not None:  # rows that belong to no sequence
        for gradient in (grads.dq, grads.dk, grads.dv):
            computed(Tensor.zero_, gradient)
    arguments = gradient_arguments(call, saved, grads, size)
    aligned = rows_are_aligned(query, call.key, call.value, grads.grad_out, saved.out, grads.dq, grads.dk, grads.dv)

    room = room_for_bias(call, grads.dbias, size)
    _launch_keys(call, arguments, size, grads, room.key_sums, aligned, config)
    _launch_queries(call, arguments, size, grads.dq, room.scores, aligned, config)
    shared = partial(broadcast_dbias, call, arguments, size, aligned=aligned, config=config)
    gradient_of_bias(call, grads.dbias, room, shared)


def _launch_keys(
    call: Call,
    arguments: dict[str, Any],
    size: Extent,
    grads: Gradients,
    key_sums: Tensor | None,
    aligned: bool,
    config: PortableBackward,
) -> None:
    """Launch dk and dv: a program for each block of keys of each key head."""
    mask = call.mask
    blocks, programs = blocks_and_programs(size, size.seqlen_k, size.kv_heads, config.block_n, mask.col_tiles)
    if programs == 0:
        return
    launch(
        keys_kernel,
        (programs,),
        **arguments,
        **list_arguments(mask.col_tiles, mask.col_bits, size.heads),
        **row_strides("dk", grads.dk),
        **row_strides("dv", grads.dv),
        dk=grads.dk,
        dv=grads.dv,
        key_sums=key_sums,
        blocks=blocks,
        shape=shape_of(call, config.block_m, config.block_n, aligned),
        features=features_of(call, mask.col_tiles),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _launch_queries(
    call: Call,
    arguments: dict[str, Any],
    size: Extent,
    dq: Tensor,
    dbias: Tensor | None,
    aligned: bool,
    config: PortableBackward,
) -> None:
    """Launch dq, and dS into dbias `[B, H, Sq, Sk]` unless it is None: a program for each block of queries of each head."""
    mask = call.mask
    blocks, programs = blocks_and_programs(size, size.seqlen_q, size.heads, config.dq_block_m, mask.row_tiles)
    if programs == 0:
        return
    launch(
        queries_kernel,
        (programs,),
        **arguments,
        **list_arguments(mask.row_tiles, mask.row_bits, size.heads),
        **row_strides("dq", dq),
        dq=dq,
        **dbias_arguments(dbias),
        blocks=blocks,
        shape=shape_of(call, config.dq_block_m, config.dq_block_n, aligned),
        features=features_of(call, mask.row_tiles),
        num_warps=config.dq_num_warps,
        num_stages=config.dq_num_stages,
    )
