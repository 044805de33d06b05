"""Backward in plain Triton, for every GPU from SM 8.0, without atomics.

Three kernels run one after the other: row statistics, then dk and dv, then dq. Both gradient kernels recompute the
probabilities from lse. The gradient of a bias is dS, summed over the dimensions that the bias broadcasts. The dk/dv kernel
writes it for a bias per key, and the dq kernel for a bias with one element per score. Where several heads or batches share
an element, a third kernel sums it (`dbias.py`).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dmattn_ops import problem
from dmattn_ops.call import Call, Gradients, Saved, bias_kind, is_whole, rows_are_aligned
from dmattn_ops.config import PortableBackward
from dmattn_ops.kernels.launching.launch import computed, launch, workspace
from dmattn_ops.kernels.portable.arguments import (
    ROW_TENSORS,
    UNSPECIALIZED,
    Extent,
    ceil_div,
    extent,
    lse_strides,
    mask_arguments,
    padded,
    row_strides,
    shared_arguments,
)
from dmattn_ops.kernels.portable.dbias import broadcast_dbias, reduce_key_sums
from dmattn_ops.kernels.portable.keys import keys_kernel
from dmattn_ops.kernels.portable.primitives import LOG2E, head_offset, load_rows
from dmattn_ops.kernels.portable.queries import queries_kernel
from dmattn_ops.problem import Mask

STATISTICS_ROWS = 32


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def statistics_kernel(
    grad_out,
    out,
    lse,
    grad_lse,
    log_sum,
    delta,
    grad_out_b,
    grad_out_s,
    grad_out_h,
    out_b,
    out_s,
    out_h,
    lse_b,
    lse_h,
    grad_lse_b,
    grad_lse_h,
    grad_lse_s,
    heads,
    seqlen_q,
    blocks,
    ROWS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    ALIGNED: tl.constexpr,
    LSE_GRADIENT: tl.constexpr,
):
    """Write delta = rowsum(grad_out * out) - grad_lse and lse in base 2, `[B, H, Sq]`; empty rows get 0 and +inf.

    In empty rows exp2(score - log_sum) is therefore 0, whatever the score is.
    """
    program = tl.program_id(0)
    head = (program % heads).to(tl.int64)
    batch = (program // heads // blocks).to(tl.int64)
    start = (program // heads) % blocks * ROWS
    grad_out += head_offset(batch, head, grad_out_b, grad_out_h)
    out += head_offset(batch, head, out_b, out_h)
    rows = start + tl.arange(0, ROWS)
    inside = rows < seqlen_q
    gradient = load_rows(grad_out, start, grad_out_s, seqlen_q, ROWS, VALUE_DIM, PADDED_VALUE, ALIGNED, True).to(
        tl.float32
    )
    output = load_rows(out, start, out_s, seqlen_q, ROWS, VALUE_DIM, PADDED_VALUE, ALIGNED, True).to(tl.float32)
    row_delta = tl.sum(gradient * output, 1)
    if LSE_GRADIENT:
        grad_lse += head_offset(batch, head, grad_lse_b, grad_lse_h)
        row_delta -= tl.load(grad_lse + rows.to(tl.int64) * grad_lse_s, mask=inside, other=0.0).to(tl.float32)
    row_lse = tl.load(lse + head_offset(batch, head, lse_b, lse_h) + rows, mask=inside, other=0.0)
    empty = row_lse == float("-inf")
    statistics = (batch * heads + head) * seqlen_q + rows
    tl.store(log_sum + statistics, tl.where(empty, float("inf"), row_lse * LOG2E), mask=inside)
    tl.store(delta + statistics, tl.where(empty, 0.0, row_delta), mask=inside)


def backward(call: Call, saved: Saved, grads: Gradients, config: PortableBackward) -> None:
    """Write dq, dk, dv and, unless it is None, dbias, each in its input's shape."""
    query, bias, tiles, varlen = call.query, call.bias, call.mask, call.varlen
    grad_out, grad_lse, dq, dk, dv, dbias = grads
    out, lse, _ = saved
    size = extent(call)
    aligned = rows_are_aligned(query, call.key, call.value, grad_out, out, dq, dk, dv)
    if varlen is not None:  # rows that belong to no sequence
        for gradient in (dq, dk, dv):
            computed(Tensor.zero_, gradient)
    log_sum = workspace(query, query.shape[0] if varlen is None else 1, size.heads, size.seqlen_q)
    delta = workspace(query, *log_sum.shape)
    _launch_statistics(grad_out, grad_lse, out, lse, log_sum, delta, aligned)
    arguments = shared_arguments(call, size)
    arguments |= {"grad_out": grad_out, **row_strides("grad_out", grad_out), "log_sum": log_sum, "delta": delta}
    arguments["ALIGNED"] = aligned

    kind = bias_kind(bias) if dbias is not None else "none"
    key_sums = None
    if kind == "key":
        key_sums = workspace(query, log_sum.shape[0], size.heads, size.seqlen_k)
        if varlen is not None:
            computed(Tensor.zero_, key_sums)
    owned_dbias = None
    if dbias is not None and is_whole(bias, query):
        owned_dbias = dbias
        if tiles.row_tiles is not None or arguments["BANDED"]:
            computed(Tensor.zero_, dbias)  # tiles that are skipped
    _launch_keys(arguments, tiles, size, dk, dv, key_sums, config)
    _launch_queries(arguments, tiles, size, dq, owned_dbias, config)
    if key_sums is not None:
        computed(reduce_key_sums, key_sums, dbias)
    elif kind == "full" and owned_dbias is None:
        broadcast_dbias(arguments, tiles, size, dbias, config)


def _launch_statistics(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    log_sum: Tensor,
    delta: Tensor,
    aligned: bool,
) -> None:
    """Fill log_sum and delta `[B, H, Sq]`, or `[1, H, total_q]` where sequences are packed."""
    batch, heads, seqlen_q = log_sum.shape
    blocks = ceil_div(seqlen_q, STATISTICS_ROWS)
    programs = batch * heads * blocks
    if programs == 0:
        return
    if grad_lse is None:
        grad_lse_strides = {"grad_lse_b": 0, "grad_lse_h": 0, "grad_lse_s": 0}
    else:
        grad_lse_strides = {**lse_strides("grad_lse", grad_lse), "grad_lse_s": grad_lse.stride(-1)}
    launch(
        statistics_kernel,
        (programs,),
        grad_out,
        out,
        lse,
        grad_lse,
        log_sum,
        delta,
        **row_strides("grad_out", grad_out),
        **row_strides("out", out),
        **lse_strides("lse", lse),
        **grad_lse_strides,
        heads=heads,
        seqlen_q=seqlen_q,
        blocks=blocks,
        ROWS=STATISTICS_ROWS,
        VALUE_DIM=out.shape[-1],
        PADDED_VALUE=padded(out.shape[-1]),
        ALIGNED=aligned,
        LSE_GRADIENT=grad_lse is not None,
        num_warps=4,
    )


def _launch_keys(
    arguments: dict[str, Any],
    tiles: Mask,
    size: Extent,
    dk: Tensor,
    dv: Tensor,
    key_sums: Tensor | None,
    config: PortableBackward,
) -> None:
    """Launch dk and dv: a program for each block of keys of each key head."""
    blocks = ceil_div(size.longest_k, config.block_n)
    if tiles.col_tiles is not None:
        blocks = tiles.col_tiles.shape[2] * (problem.TILE // config.block_n)
    programs = blocks * size.kv_heads * size.batch
    if programs == 0:
        return
    launch(
        keys_kernel,
        (programs,),
        **arguments,
        **mask_arguments(tiles.col_tiles, tiles.col_bits, size.heads),
        **row_strides("dk", dk),
        **row_strides("dv", dv),
        dk=dk,
        dv=dv,
        key_sums=key_sums,
        blocks=blocks,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        KEY_SUMS=key_sums is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _launch_queries(
    arguments: dict[str, Any], tiles: Mask, size: Extent, dq: Tensor, dbias: Tensor | None, config: PortableBackward
) -> None:
    """Launch dq, and dS into dbias `[B, H, Sq, Sk]` unless it is None: a program for each block of queries of each head."""
    blocks = ceil_div(size.longest_q, config.dq_block_m)
    if tiles.row_tiles is not None:
        blocks = tiles.row_tiles.shape[2] * (problem.TILE // config.dq_block_m)
    programs = blocks * size.heads * size.batch
    if programs == 0:
        return
    strides = (0, 0, 0, 0) if dbias is None else dbias.stride()
    launch(
        queries_kernel,
        (programs,),
        **arguments,
        **mask_arguments(tiles.row_tiles, tiles.row_bits, size.heads),
        **row_strides("dq", dq),
        dq=dq,
        dbias=dbias,
        dbias_b=strides[0],
        dbias_h=strides[1],
        dbias_q=strides[2],
        dbias_k=strides[3],
        blocks=blocks,
        BLOCK_M=config.dq_block_m,
        BLOCK_N=config.dq_block_n,
        STORE_DBIAS=dbias is not None,
        num_warps=config.dq_num_warps,
        num_stages=config.dq_num_stages,
    )
