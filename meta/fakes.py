"""The operators on tensors without data: read and refuse the arguments, then allocate.

The real operators (`implementations.py`) begin with the same functions, so that both refuse and allocate alike.
Parameters are those of the schemas in `ops.py`, in their order; `call` is what follows bias there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dmattn_ops import meta, ops, validation
from dmattn_ops.problem import UNBOUNDED, Varlen


def forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *call: Any) -> tuple[Tensor, Tensor]:
    """Return out `[B, Sq, H, Dv]` and lse `[B, H, Sq]`."""
    dense_call(query, key, value, bias, call)
    return meta.forward_outputs(query, value)


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None = None,
    *call: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv like query, key, value, and dbias like bias (empty without needs_dbias)."""
    needs_dbias = dense_call(query, key, value, bias, call).needs_dbias
    check_dense_gradients(grad_out, grad_lse, query, value, out, lse)
    return meta.backward_outputs(query, key, value, bias, needs_dbias)


def qkvpacked_forward(qkv: Tensor, bias: Tensor | None = None, *call: Any) -> tuple[Tensor, Tensor]:
    """Return out `[B, S, H, D]` and lse `[B, H, S]` for qkv `[B, S, 3, H, D]`."""
    validation.packed_qkv(qkv)
    query, key, value = qkv.unbind(2)
    dense_call(query, key, value, bias, call)
    return meta.qkvpacked_forward_outputs(qkv)


def qkvpacked_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None = None,
    *call: Any,
) -> tuple[Tensor, Tensor]:
    """Return dqkv like qkv, and dbias like bias (empty without needs_dbias)."""
    validation.packed_qkv(qkv)
    query, key, value = qkv.unbind(2)
    needs_dbias = dense_call(query, key, value, bias, call).needs_dbias
    check_dense_gradients(grad_out, grad_lse, query, value, out, lse)
    return meta.qkvpacked_backward_outputs(qkv, bias, needs_dbias)


def varlen_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    bias: Tensor | None = None,
    *call: Any,
) -> tuple[Tensor, Tensor]:
    """Return out `[total_q, H, Dv]` and lse `[H, total_q]`."""
    varlen_call(query, key, value, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), bias, call)
    return meta.varlen_forward_outputs(query, value)


def varlen_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    bias: Tensor | None = None,
    *call: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv like query, key, value, and dbias like bias (empty without needs_dbias)."""
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    needs_dbias = varlen_call(query, key, value, lengths, bias, call)[1].needs_dbias
    check_varlen_gradients(grad_out, grad_lse, query, value, out, lse)
    return meta.backward_outputs(query, key, value, bias, needs_dbias)


def pack_mask(
    mask: Tensor,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    seqlen_q: int,
    band_lo: int = -UNBOUNDED,
    band_hi: int = UNBOUNDED,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return row_tiles, col_tiles, row_bits and col_bits of a mask `[Bm, Hm, Sq or 1, Sk]` and segments."""
    batch, heads = validation.mask_parts(mask, q_segments, k_segments, seqlen_q)
    return meta.pack_mask_outputs(mask, batch, heads, seqlen_q, band_lo, band_hi)


def list_tiles(
    q_segments: Tensor | None,
    k_segments: Tensor,
    seqlen_q: int,
    band_lo: int = -UNBOUNDED,
    band_hi: int = UNBOUNDED,
) -> tuple[Tensor, Tensor]:
    """Return row_tiles and col_tiles of segments `[B|1, Sq]` and `[B|1, Hm, Sk]`."""
    batch, heads = validation.mask_parts(None, q_segments, k_segments, seqlen_q)
    return meta.list_tiles_outputs(k_segments, batch, heads, seqlen_q, k_segments.shape[-1], band_lo, band_hi)


def dense_call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, call: tuple[Any, ...]) -> ops.Call:
    """Read the arguments of a dense operator and refuse what no kernel may see."""
    validation.dense_tensors(query, key, value, bias)
    read = ops.read_call(call, query.shape[-1])
    validation.dense_call(query, key, read.tiles, read.seed, read.options)
    return read


def varlen_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[Tensor, Tensor, int, int],
    bias: Tensor | None,
    call: tuple[Any, ...],
) -> tuple[Varlen, ops.Call]:
    """Read the arguments of an operator for variable lengths and refuse what no kernel may see."""
    validation.require_rank("query", query, 3)
    read = ops.read_varlen_call(call, query.shape[-1])
    varlen = Varlen(*lengths, read.top_left)
    validation.varlen_tensors(query, key, value, bias, read.mask, varlen)
    validation.varlen_call(query, read.seed, read.options)
    return varlen, read


def check_dense_gradients(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> None:
    """Refuse gradients and saved outputs of a dense call that do not fit it."""
    batch, seqlen_q, heads, _ = query.shape
    shapes = (batch, seqlen_q, heads, value.shape[-1]), (batch, heads, seqlen_q)
    validation.gradients(grad_out, grad_lse, out, lse, query, *shapes)


def check_varlen_gradients(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> None:
    """Refuse gradients and saved outputs of packed sequences that do not fit them."""
    total, heads, _ = query.shape
    validation.gradients(grad_out, grad_lse, out, lse, query, (total, heads, value.shape[-1]), (heads, total))


for _fake in (
    forward, backward, qkvpacked_forward, qkvpacked_backward, varlen_forward, varlen_backward, pack_mask, list_tiles
):  # fmt: skip
    torch.library.register_fake(f"dmattn::{_fake.__name__}", _fake, lib=ops.library)
