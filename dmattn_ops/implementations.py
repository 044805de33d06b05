"""The operators on real tensors: read, refuse and allocate as the fakes do, then launch. The same for CPU and CUDA.

Parameters are those of the schemas in `ops.py`, in their order; `call` is what follows bias there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmattn_ops import dispatch, meta, ops, plans, validation
from dmattn_ops.meta import fakes
from dmattn_ops.problem import UNBOUNDED, Tiles, Varlen


def forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *call: Any) -> tuple[Tensor, Tensor]:
    """Compute out `[B, Sq, H, Dv]` and lse `[B, H, Sq]`."""
    read = fakes.dense_call(query, key, value, bias, call)
    out, lse = meta.forward_outputs(query, value)
    _forward(query, key, value, bias, read, None, out, lse)
    return out, lse


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
    """Compute dq, dk, dv and dbias (empty without needs_dbias)."""
    read = fakes.dense_call(query, key, value, bias, call)
    fakes.check_dense_gradients(grad_out, grad_lse, query, value, out, lse)
    grads = meta.backward_outputs(query, key, value, bias, read.needs_dbias)
    _backward(grad_out, grad_lse, query, key, value, out, lse, bias, read, None, grads)
    return grads


def qkvpacked_forward(qkv: Tensor, bias: Tensor | None = None, *call: Any) -> tuple[Tensor, Tensor]:
    """Compute out `[B, S, H, D]` and lse `[B, H, S]` for qkv `[B, S, 3, H, D]`."""
    validation.packed_qkv(qkv)
    query, key, value = _rows(qkv).unbind(2)
    read = fakes.dense_call(query, key, value, bias, call)
    out, lse = meta.qkvpacked_forward_outputs(qkv)
    _forward(query, key, value, bias, read, None, out, lse)
    return out, lse


def qkvpacked_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None = None,
    *call: Any,
) -> tuple[Tensor, Tensor]:
    """Compute dqkv, in one buffer, and dbias (empty without needs_dbias)."""
    validation.packed_qkv(qkv)
    query, key, value = _rows(qkv).unbind(2)
    read = fakes.dense_call(query, key, value, bias, call)
    fakes.check_dense_gradients(grad_out, grad_lse, query, value, out, lse)
    dqkv, dbias = meta.qkvpacked_backward_outputs(qkv, bias, read.needs_dbias)
    dq, dk, dv = dqkv.unbind(2)
    _backward(grad_out, grad_lse, query, key, value, out, lse, bias, read, None, (dq, dk, dv, dbias))
    return dqkv, dbias


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
    """Compute out `[total_q, H, Dv]` and lse `[H, total_q]`."""
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    varlen, read = _varlen_call(query, key, value, lengths, bias, call)
    out, lse = meta.varlen_forward_outputs(query, value)
    _forward(query, key, value, bias, read, varlen, out, lse)
    return out, lse


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
    """Compute dq, dk, dv and dbias (empty without needs_dbias)."""
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    varlen, read = _varlen_call(query, key, value, lengths, bias, call)
    fakes.check_varlen_gradients(grad_out, grad_lse, query, value, out, lse)
    grads = meta.backward_outputs(query, key, value, bias, read.needs_dbias)
    _backward(grad_out, grad_lse, query, key, value, out, lse, bias, read, varlen, grads)
    return grads


def pack_mask(
    mask: Tensor,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    seqlen_q: int,
    band_lo: int = -UNBOUNDED,
    band_hi: int = UNBOUNDED,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute row_tiles, col_tiles, row_bits and col_bits of a mask `[Bm, Hm, Sq or 1, Sk]` and segments."""
    outputs = fakes.pack_mask(mask, q_segments, k_segments, seqlen_q, band_lo, band_hi)
    q_segments, k_segments = _contiguous(q_segments), _contiguous(k_segments)
    _launch(mask, dispatch.pack_mask, mask, q_segments, k_segments, seqlen_q, band_lo, band_hi, *outputs)
    return outputs


def list_tiles(
    q_segments: Tensor | None,
    k_segments: Tensor,
    seqlen_q: int,
    band_lo: int = -UNBOUNDED,
    band_hi: int = UNBOUNDED,
) -> tuple[Tensor, Tensor]:
    """Compute row_tiles and col_tiles of segments `[B|1, Sq]` and `[B|1, Hm, Sk]`."""
    outputs = fakes.list_tiles(q_segments, k_segments, seqlen_q, band_lo, band_hi)
    q_segments, k_segments = _contiguous(q_segments), k_segments.contiguous()
    _launch(k_segments, dispatch.list_tiles, q_segments, k_segments, seqlen_q, band_lo, band_hi, *outputs)
    return outputs


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    read: ops.Call,
    varlen: Varlen | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    query, key, value, bias = _rows(query), _rows(key), _rows(value), bias if bias is None else _rows(bias)
    arguments = (query, key, value, bias, _tiles(read), read.seed, varlen, read.options, out, lse)
    _launch(query, dispatch.forward, *arguments)


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    read: ops.Call,
    varlen: Varlen | None,
    grads: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    dq, dk, dv, dbias = grads
    grad_out, query, key, value, out, lse = map(_rows, (grad_out, query, key, value, out, lse))
    grad_lse, bias = (tensor if tensor is None else _rows(tensor) for tensor in (grad_lse, bias))
    saved = (grad_out, grad_lse, query, key, value, out, lse, bias)
    grads_or_none = (dq, dk, dv, dbias if bias is not None and read.needs_dbias else None)
    _launch(query, dispatch.backward, *saved, _tiles(read), read.seed, varlen, read.options, *grads_or_none)


def _launch(on: Tensor, launch: Callable[..., None], *arguments: Any) -> None:
    """Launch with the device of `on` as the current one: Triton launches on whichever that is."""
    if on.is_cuda and on.get_device() != torch.cuda.current_device():
        with torch.cuda.device(on.device):
            launch(*arguments)
    else:
        launch(*arguments)


def _rows(tensor: Tensor) -> Tensor:
    """Return the tensor with a contiguous last dimension, which kernels ask for: itself, or a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor of lists, bits, segments or offsets as kernels walk it: without strides of its own."""
    return tensor if tensor is None else tensor.contiguous()


def _varlen_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[Tensor, Tensor, int, int],
    bias: Tensor | None,
    call: tuple[Any, ...],
) -> tuple[Varlen, ops.Call]:
    varlen, read = fakes.varlen_call(query, key, value, lengths, bias, call)
    if not query.is_cuda:
        validation.offset_values(query, key, varlen)
    offsets = varlen.cu_seqlens_q.contiguous(), varlen.cu_seqlens_k.contiguous()
    return varlen._replace(cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1]), read


def _tiles(read: ops.Call) -> Tiles:
    """Return the mask as kernels read it; that of variable lengths as segments `[1, Hm, total_k]`: 0 keep, -1 drop."""
    if read.mask is None:
        return Tiles(*map(_contiguous, read.tiles))
    return Tiles(k_segments=(read.mask.contiguous() != 0).to(torch.int32).sub_(1).unsqueeze(0))


def _below_autograd(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator that autograd sees nothing of: it may be called directly, with inputs that require gradients.

    A plan that repeats it needs no such care, and entering takes time.
    """

    @functools.wraps(operator)
    def below(*arguments: Any) -> Any:
        with ops.below_autograd():
            return operator(*arguments)

    return below


_OPERATORS: tuple[Callable[..., Any], ...] = (
    forward, backward, qkvpacked_forward, qkvpacked_backward, varlen_forward, varlen_backward, pack_mask, list_tiles
)  # fmt: skip
for _operator in _OPERATORS:
    ops.implement(_operator.__name__, plans.planned(_below_autograd(_operator), ops.LAYOUTS[_operator.__name__]))
