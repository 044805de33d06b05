"""`flash_dmattn_func` and `flash_dmattn_varlen_func` as flash_dmattn 1.2.2 has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dmattn_ops.api import functions
from dmattn_ops.bands import band_of
from dmattn_ops.call import TILE
from dmattn_ops.checks import require, validation
from dmattn_ops.compat import weights


def flash_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool | None = None,
    *,
    scale: float | None = None,
) -> Any:
    """Compute attention under a mask and a bias, called as flash_dmattn 1.2.2 is called.

    Differences from `dmattn_ops.flash_dmattn_func` that are translated: the last dimension of mask and bias may also be 1,
    or `Sk` rounded up to 128; a floating-point mask keeps where it is positive; `deterministic=None` is False; rows without
    a visible key have an lse of +inf. Soft capping is what its documentation says, `softcap * tanh(score / softcap) + bias`;
    the kernels of 1.2.2 left out the first factor.

    Args:
        query: with shape `[B, Sq, H, D]`.
        key, value: with shape `[B, Sk, Hkv, D]`.
        attn_mask: with shape `[B|1, H|Hkv|1, Sq|1, Sk|1]`.
        attn_bias: the same shapes; differentiable.
        softmax_scale: factor of the scores; None is `1 / sqrt(D)`. `scale` is its name up to 1.2.0.
        is_causal: whether the diagonal ends in the bottom right corner and hides what follows.
        softcap, deterministic: as in `dmattn_ops.flash_dmattn_func`.
        return_attn_probs: for tests: whether to return `(out, softmax_lse, S_dmask)`, where `S_dmask` are the weights,
            `[B, H, Sq, Sk]` rounded up to 128.
    """
    validation.tensors(query=query, key=key, value=value)
    require.rank("key", key, 4, require.LAYOUTS[4])
    seqlen_k, softmax_scale = key.shape[1], _either(softmax_scale, scale)
    softcap = 0.0 if softcap is None else softcap
    mask = None if attn_mask is None else kept(fitting("attn_mask", attn_mask, seqlen_k))
    bias = None if attn_bias is None else fitting("attn_bias", attn_bias, seqlen_k)
    out, lse = functions.flash_dmattn_func(
        query,
        key,
        value,
        mask,
        bias,
        is_causal=bool(is_causal),
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=bool(deterministic),
        return_lse=True,
    )
    if not return_attn_probs:
        return out
    band = band_of(bool(is_causal), "bottom_right", (None, None))
    probabilities = weights.dense_weights(
        query, key, lse, band=band, scale=softmax_scale, softcap=softcap, keep=mask, bias=bias
    )
    return out, plus_infinity_where_empty(lse), probabilities


def flash_dmattn_varlen_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool | None = None,
    block_table: Tensor | None = None,
    *,
    scale: float | None = None,
) -> Any:
    """Compute attention of packed sequences, called as flash_dmattn 1.2.2 is called; masks and bias: `dmattn_ops`.

    Raises:
        NotImplementedError: for a `block_table`: paged keys are not supported.
    """
    if block_table is not None:
        raise NotImplementedError("block_table is not supported: keys and values must not be paged")
    softmax_scale = _either(softmax_scale, scale)
    softcap = 0.0 if softcap is None else softcap
    out, lse = functions.flash_dmattn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        is_causal=bool(is_causal),
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=bool(deterministic),
        return_lse=True,
    )
    if not return_attn_probs:
        return out
    band = band_of(bool(is_causal), "bottom_right", (None, None))
    probabilities = weights.varlen_weights(
        query, key, lse, (cu_seqlens_q, cu_seqlens_k), band=band, scale=softmax_scale, softcap=softcap
    )
    return out, plus_infinity_where_empty(lse), probabilities


def fitting(name: str, tensor: Tensor, seqlen_k: int) -> Tensor:
    """Return a mask or bias whose last dimension is `Sk`, of one that has 1, `Sk`, or `Sk` rounded up to 128."""
    if tensor.shape[-1] == seqlen_k:
        return tensor
    if tensor.shape[-1] == 1:
        return tensor.expand(*tensor.shape[:-1], seqlen_k)
    rounded = (seqlen_k + TILE - 1) // TILE * TILE
    if tensor.shape[-1] != rounded:
        raise ValueError(
            f"the last dimension of {name} must be 1, {seqlen_k} (the keys) or {rounded} (rounded up to {TILE}),"
            f" got {tensor.shape[-1]}"
        )
    return tensor[..., :seqlen_k]


def kept(mask: Tensor) -> Tensor:
    """Return a mask that has no floating-point numbers: those keep where they are positive."""
    return mask.detach() > 0 if mask.is_floating_point() else mask


def plus_infinity_where_empty(lse: Tensor) -> Tensor:
    """Return lse with +inf for rows without a visible key, as flash-attn and flash_dmattn have it."""
    return torch.where(lse == -torch.inf, torch.inf, lse)


def _either(softmax_scale: float | None, scale: float | None) -> float | None:
    if softmax_scale is not None and scale is not None:
        raise TypeError("softmax_scale and scale are two names of one argument: give one of them")
    return scale if softmax_scale is None else softmax_scale
