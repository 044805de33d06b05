"""Models of transformers whose own code computes with masks: which they are, and what of it is not followed here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dmattn_ops import environment, symbolic
from dmattn_ops.bands import band_of
from dmattn_ops.integrations.forward_mask import ForwardMask
from dmattn_ops.masks.chosen import shown_keys
from dmattn_ops.masks.prepare import prepare_mask
from dmattn_ops.masks.tile_mask import TileMask, from_packed, lengths_of

# model types whose own code computes with the mask: they get it as a tensor, bool or, where that code adds to it, additive
TENSOR_MASKS = {
    "axk2",
    "deepseek_v32",
    "doge",
    "dots3_note_text",
    "glm_moe_dsa",
    "hy_v4",
    "mistral_large4_text",
    "qwen4_exp_text",
}
ADDITIVE_MASKS = {"deepseek_v4"}

_REFUSED = {  # what some models ask of their attention, and what it means
    "sinks": "a sink for each query",
}


def check_others(others: dict[str, Any]) -> None:
    """Refuse what a model asks of its attention beyond what is computed here, and say that weights are not returned."""
    for name, meaning in _REFUSED.items():
        if others.get(name) is not None:
            raise NotImplementedError(f"{name}= ({meaning}) is not supported: let this model attend through 'eager'")
    if others.get("output_attentions") and not is_compiling():
        environment.warn_once(
            "dmattn_ops: output_attentions=True is not followed, because attention weights are never computed: let the model"
            " attend through 'eager' to get them"
        )


def check_length(mask: ForwardMask, kv_length: int) -> None:
    """Refuse keys that the model's own code has added to those that the mask was made for."""
    if symbolic.certainly(kv_length > mask.kv_length):
        raise ValueError(
            f"the model attends to {kv_length} keys, and its mask was made for {mask.kv_length}: add its config.model_type to"
            " dmattn_ops.integrations.transformers.TENSOR_MASKS, or to ADDITIVE_MASKS beside it"
        )


def among(mask: Any, indices: Tensor, kv_length: int) -> Tensor:
    """Return a mask tensor `[B|1, 1, Sq, Sk]` without the keys that are not among the `indices`, `[B, Sq, n]`."""
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        given = "padding" if isinstance(mask, Tensor) else type(mask).__name__
        raise NotImplementedError(
            f"indices= (the keys that each query sees) takes a mask tensor [B, 1, Sq, Sk] beside it, got {given}: add the"
            " model's config.model_type to dmattn_ops.integrations.transformers.TENSOR_MASKS"
        )
    chosen = indices.new_zeros((*indices.shape[:2], kv_length), dtype=torch.bool)
    chosen = chosen.scatter(-1, indices.long(), True).unsqueeze(1)
    mask = mask[..., :kv_length]
    if mask.is_floating_point():
        return mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)
    return (mask != 0) & chosen


def among_blocks(mask: ForwardMask | TileMask | None, block_indices: Tensor, module: Any, kv_length: int) -> TileMask:
    """Return a mask without the keys outside of the blocks `[B, heads, Sq, n]` that queries choose; -1 is none.

    How many keys a block has, the layer's indexer says.
    """
    block = getattr(getattr(module, "indexer", None), "block_size", None)
    if not isinstance(block, int):
        raise NotImplementedError(
            "block_indices= (the blocks of keys that each query sees) needs a layer whose indexer.block_size says how many keys a"
            f" block has, got {type(module).__name__}"
        )
    if isinstance(mask, ForwardMask) and not mask.dense and mask.keywords:
        check_length(mask, kv_length)
        segments, plain = mask._segments(), mask.documents is None and mask.padding is None
        if segments is not None or plain:
            band, q_length = band_of(**mask.keywords), block_indices.shape[2]
            limits = band.limits(q_length, kv_length)
            packed = torch.ops.dmattn.pack_selection(
                block_indices, *(segments or (None, None)), block, kv_length, *limits
            )
            return from_packed(lengths_of(block_indices, q_length, kv_length), packed, band)
    keep = shown_keys(block_indices, block, kv_length)
    if isinstance(mask, ForwardMask):
        keep = keep & mask.tensor()
    elif mask is not None:
        keep = keep & mask.to_dense()
    return prepare_mask(keep, seqlen_q=block_indices.shape[2])
