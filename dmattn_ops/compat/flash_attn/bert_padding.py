"""Packing padded sequences, as `flash_attn.bert_padding` has it (2.7 and newer: `unpad_input` returns five)."""

from __future__ import annotations

from torch import Tensor

from dmattn_ops.compat.padding import pad_input, unpad_input

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Return the rows of `[B * S, ...]` at `indices` (flash_dmattn's wants `[B, S, ...]`)."""
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Return `[first_axis_dim, ...]`, 0 but for rows of `values` at `indices`."""
    return pad_input(values, indices, 1, first_axis_dim).squeeze(0)
