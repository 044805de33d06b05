"""What stands in for torch's operators: their signatures, and the shapes and strides that compilers are told of them.

Operators named `_scaled_dot_product_*` take `[B, heads, S, D]` and are causal from the top left corner; `_flash_attention_*` take
`[B, S, heads, D]`, or packed `[total, heads, D]`, and are causal from the bottom right one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dmattn_ops.sdpa.calls import (
    backward,
    flash_band,
    forward,
    like,
    new_state,
    no_offset,
    packed_offsets,
    refuse,
    sdpa_backward,
    sdpa_forward,
)


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:
    """Compute `aten::_flash_attention_forward`: `[B, S, heads, D]`, or packed `[total, heads, D]`, from the bottom right corner."""
    asked = {
        "a debug mask": return_debug_mask,
        "seqused_k": seqused_k is not None,
        "alibi_slopes": alibi_slopes is not None,
        "block_table": block_table is not None,
        "num_splits": num_splits is not None,
    }
    refuse([name for name, given in asked.items() if given])
    state = new_state(query, dropout_p)
    band = flash_band(is_causal, window_size_left, window_size_right)
    offsets = packed_offsets(cum_seq_q, cum_seq_k, max_q, max_k)
    out, lse = forward(query, key, value, offsets, band, scale, dropout_p, state)
    return out, lse, state.view(torch.uint64), no_offset(query), query.new_empty(0)


def flash_forward_into(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **keywords: Any
) -> Tensor:
    """Compute `aten::_flash_attention_forward_no_dropout_inplace`, which writes `out` and returns lse."""
    result, lse, *_ = flash_forward(query, key, value, *arguments, **keywords)
    out.copy_(result)
    return lse


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `aten::_flash_attention_backward`."""
    band = flash_band(is_causal, window_size_left, window_size_right)
    offsets = packed_offsets(cum_seq_q, cum_seq_k, max_q, max_k)
    tensors = (grad_out, query, key, value, out, logsumexp)
    gradients = backward(tensors, offsets, band, scale, dropout_p, rng_state.view(torch.int64))
    return like(gradients[0], query), like(gradients[1], key), like(gradients[2], value)


def sdpa_flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Compute `aten::_scaled_dot_product_flash_attention`, of `[B, heads, S, D]`."""
    refuse(["a debug mask"] if return_debug_mask else [])
    out, lse, state = sdpa_forward(query, key, value, None, dropout_p, is_causal, scale)
    lengths = (query.shape[2], key.shape[2])
    return (
        like(out, query), lse, None, None, *lengths, state.view(torch.uint64), no_offset(query), query.new_empty(0)
    )  # fmt: skip


def sdpa_flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `aten::_scaled_dot_product_flash_attention_backward`."""
    tensors = (grad_out, query, key, value, out, logsumexp)
    dq, dk, dv, _ = sdpa_backward(tensors, None, dropout_p, is_causal, scale, philox_seed.view(torch.int64), False)
    return like(dq, query), like(dk, key), like(dv, value)


def sdpa_efficient_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Compute `aten::_scaled_dot_product_efficient_attention`: its lse is padded to a multiple of 32 rows, its seed a scalar."""
    out, lse, state = sdpa_forward(query, key, value, attn_bias, dropout_p, is_causal, scale)
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32)) if compute_log_sumexp else lse[..., :0]
    return out, lse, state[0].clone(), state[1].clone()


def sdpa_efficient_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    """Compute `aten::_scaled_dot_product_efficient_attention_backward`, with the gradient of the bias where it is asked for."""
    tensors = (grad_out_, query, key, value, out, logsumexp[..., : query.shape[2]])
    learned = attn_bias is not None and attn_bias.numel() > 0 and grad_input_mask[3]
    state = philox_seed.reshape(1).to(torch.int64)
    return sdpa_backward(tensors, attn_bias, dropout_p, is_causal, scale, state, learned)


def sdpa_cudnn_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Compute `aten::_scaled_dot_product_cudnn_attention`: its lse has a last dimension of 1."""
    refuse(["a debug mask"] if return_debug_mask else [])
    out, lse, state = sdpa_forward(query, key, value, attn_bias, dropout_p, is_causal, scale)
    lengths = (query.shape[2], key.shape[2])
    out = like(out, query) if out.shape == query.shape else out
    return out, lse.unsqueeze(-1), None, None, *lengths, state[0].clone(), state[1].clone(), None


def sdpa_cudnn_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `aten::_scaled_dot_product_cudnn_attention_backward`."""
    tensors = (grad_out, query, key, value, out, logsumexp.squeeze(-1))
    state = philox_seed.reshape(1).to(torch.int64)
    dq, dk, dv, _ = sdpa_backward(tensors, attn_bias, dropout_p, is_causal, scale, state, False)
    return like(dq, query), like(dk, key), like(dv, value)
