"""`flash_dynamic_mask_attention_forward` as flash_dmattn 1.2.2 has it, which Doge's example model calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dmattn_ops.api import functions
from dmattn_ops.checks import require
from dmattn_ops.compat.flash_dmattn.flash_dmattn_interface import fitting, kept
from dmattn_ops.compat.flash_dmattn.utils.mask import create_mask
from dmattn_ops.masks.prepare import prepare_mask
from dmattn_ops.masks.tile_mask import TileMask


def flash_dynamic_mask_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attention_bias: Tensor | None,
    scaling: float | None = None,
    window_size: int | None = None,
    softcap: float | None = None,
    *,
    scale: float | None = None,
    keep_window_size: int | None = None,
    is_causal: bool | None = None,
    deterministic: bool | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Compute attention of heads-first tensors, with the keys of the largest biases where `window_size` is given.

    Args:
        module: asked for `is_causal` where that is None, and for a dtype where query is float32 beside narrower weights.
        query: with shape `[B, H, Sq, D]`.
        key, value: with shape `[B, Hkv, Sk, D]`.
        attention_mask: padding `[B, Sk]`, whose queries give 0, or a mask `[B|1, H|Hkv|1, Sq|1, Sk|1]`.
        attention_bias: with shape `[B|1, H|Hkv|1, Sq|1, Sk|1]`.
        scaling: factor of the scores; `scale` is its name up to 1.2.0.
        window_size: with a bias and more keys than this, each row of the bias keeps its largest elements only;
            `keep_window_size` is its name up to 1.2.0.
        softcap, is_causal, deterministic: as in `dmattn_ops.flash_dmattn_func`.
        s_aux: sinks `[H]`.
        position_ids: `[1, S]`; where they return to 0 a new sequence begins.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: packed sequences, with a batch of 1.

    Returns:
        out with shape `[B, Sq, H, D]`, and None.
    """
    query, key, value, attention_bias = _in_weights_dtype(module, query, key, value, attention_bias)
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    seqlen_q, seqlen_k = query.shape[1], key.shape[1]
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal) and seqlen_q != 1
    options: dict[str, Any] = {
        "is_causal": causal,
        "softmax_scale": scale if scaling is None else scaling,
        "softcap": 0.0 if softcap is None else softcap,
        "deterministic": bool(deterministic),
        "sink": s_aux,
    }
    if attention_mask is None and cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        packed_q, packed_k, packed_v = (part.flatten(0, 1) for part in (query, key, value))
        out = functions.flash_dmattn_varlen_func(
            packed_q,
            packed_k,
            packed_v,
            cu_seq_lens_q,
            cu_seq_lens_k,
            seqlen_q if max_length_q is None else max_length_q,
            seqlen_k if max_length_k is None else max_length_k,
            **options,
        )
        return out.unflatten(0, (query.shape[0], -1)), None  # type: ignore[union-attr]
    documents = None
    if attention_mask is not None and attention_mask.dim() == 2:
        seqlen_k = min(seqlen_k, attention_mask.shape[1])  # the rest of a static cache is empty
        key, value, documents = key[:, :seqlen_k], value[:, :seqlen_k], _valid(attention_mask, seqlen_q)
    elif attention_mask is not None:
        attention_mask = kept(fitting("attention_mask", attention_mask, seqlen_k)) != 0
    elif position_ids is not None and tuple(position_ids.shape) == (1, seqlen_q) == (query.shape[0], seqlen_k):
        begun = (position_ids == 0).cumsum(-1)
        documents = begun, begun
    bias = None if attention_bias is None else fitting("attention_bias", attention_bias, seqlen_k)
    best = keep_window_size if window_size is None else window_size
    best = None if best is None else require.integer("window_size", best)
    keep = None if documents is not None else attention_mask
    if bias is not None and best is not None and seqlen_k > best:
        allowed = None if attention_mask is None else attention_mask != 0
        keep = create_mask(bias, allowed, query.shape[0], seqlen_q, seqlen_k, best, torch.finfo(bias.dtype).min)
    mask: Tensor | TileMask | None = keep if documents is None else prepare_mask(keep, documents=documents)
    out = functions.flash_dmattn_func(query, key, value, mask, bias, **options)
    return out, None  # type: ignore[return-value]


def _valid(keep: Tensor, seqlen_q: int) -> tuple[Tensor, Tensor]:
    """Return ids of queries and keys for padding `[B, Sk]`: queries are its last positions, and padded ones see nothing."""
    of_keys = (keep != 0).int() - 1
    if seqlen_q == 1:
        return torch.zeros_like(of_keys[:, :1]), of_keys
    return (keep[:, -seqlen_q:] == 0).int(), of_keys


def _in_weights_dtype(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Cast float32 inputs to the dtype of narrower weights, as adapters that keep norms in float32 need it."""
    if query.dtype != torch.float32 or torch.is_autocast_enabled(query.device.type):
        return query, key, value, bias
    dtype = getattr(getattr(module, "config", None), "_pre_quantization_dtype", None)
    if dtype is None:
        weights = (part.weight.dtype for part in module.modules() if isinstance(part, nn.Linear))
        dtype = next((each for each in weights if each.is_floating_point), torch.float32)  # packed bits are no dtype
    if dtype == torch.float32:
        return query, key, value, bias
    return query.to(dtype), key.to(dtype), value.to(dtype), None if bias is None else bias.to(dtype)
