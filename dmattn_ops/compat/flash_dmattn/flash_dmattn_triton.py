"""`triton_dmattn_func` as flash_dmattn 1.2.2 has it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dmattn_ops.compat.flash_dmattn.flash_dmattn_interface import flash_dmattn_func


def triton_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    *,
    scale: float | None = None,
) -> Any:
    """Compute what `flash_dmattn_func` does; by position, causality comes before the scale. Heads may be grouped here."""
    return flash_dmattn_func(
        query, key, value, attn_mask, attn_bias, softmax_scale=softmax_scale, is_causal=is_causal, scale=scale
    )
