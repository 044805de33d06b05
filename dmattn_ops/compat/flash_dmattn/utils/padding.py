"""Packing padded sequences, as flash_dmattn 1.2.2 has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmattn_ops.checks import require
from dmattn_ops.compat.padding import pad_input, unpad_data, unpad_input

__all__ = ["get_unpad_data", "index_first_axis", "pad_input", "unpad_input", "upad_input"]

get_unpad_data = unpad_data


def index_first_axis(tensor: Tensor, indices: Tensor) -> Tensor:
    """Return the rows of `[B, S, ...]` at indices into its `B * S` positions (flash-attn's wants `[B * S, ...]`)."""
    return tensor.flatten(0, 1)[indices]


def upad_input(
    query_layer: Tensor,
    key_layer: Tensor,
    value_layer: Tensor,
    attention_mask: Tensor,
    query_length: int,
    unpad_input_func: Callable[..., Any] = unpad_input,
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor], tuple[int, int]]:
    """Pack query, key and value `[B, S, heads, D]` by a mask of the keys `[B, Sk]`.

    With fewer queries than keys, the queries are the last ones of the mask, so that padding must be on the left.

    Returns:
        Packed query, key and value, the indices of the queries, the offsets of queries and keys, and their greatest lengths.
    """
    query_length = require.integer("query_length", query_length)
    indices_k, cu_seqlens_k, longest_k = unpad_data(attention_mask)
    key_layer, value_layer = (part[:, : attention_mask.shape[-1]] for part in (key_layer, value_layer))
    batch, seqlen_k = key_layer.shape[:2]
    key_layer, value_layer = (index_first_axis(part, indices_k) for part in (key_layer, value_layer))
    if query_length == seqlen_k:
        queries = index_first_axis(query_layer, indices_k)
        return queries, key_layer, value_layer, indices_k, (cu_seqlens_k, cu_seqlens_k), (longest_k, longest_k)
    if query_length == 1:
        each = torch.arange(batch + 1, dtype=torch.int32, device=query_layer.device)
        return query_layer.squeeze(1), key_layer, value_layer, each[:-1], (each, cu_seqlens_k), (1, longest_k)
    queries, indices_q, cu_seqlens_q, longest_q, *_ = unpad_input_func(query_layer, attention_mask[:, -query_length:])
    return queries, key_layer, value_layer, indices_q, (cu_seqlens_q, cu_seqlens_k), (longest_q, longest_k)
