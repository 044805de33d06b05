"""`flex_dmattn_func` as flash_dmattn 1.2.2 has it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dmattn_ops.compat.flash_dmattn.flash_dmattn_interface import flash_dmattn_func


def flex_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    is_causal: bool | None = None,
    softmax_scale: float | None = None,
    *,
    scale: float | None = None,
    **unused: Any,
) -> Any:
    """Compute what `flash_dmattn_func` does; `is_causal=None` is causal here.

    In 1.2.2 this function ignored `attn_mask`, and its diagonal started in the top left corner; here it does what the others
    do. Other keywords are ignored, as there.
    """
    causal = True if is_causal is None else is_causal
    return flash_dmattn_func(
        query, key, value, attn_mask, attn_bias, softmax_scale=softmax_scale, is_causal=causal, scale=scale
    )


flex_attention_forward = flex_dmattn_func
