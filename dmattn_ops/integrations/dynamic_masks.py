"""Dynamic masks for a model of transformers that has none: scores of keys from their values, learned beside its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dmattn_ops import environment
from dmattn_ops.checks import require, validation
from dmattn_ops.integrations.forward_mask import ForwardMask
from dmattn_ops.masks.tile_mask import TileMask
from dmattn_ops.nn import KeyScores


class DynamicMask(nn.Module):
    """A part of one attention layer: its parameters score the keys, of which each query sees the best `keep`."""

    def __init__(
        self, heads: int, head_dim: int, keep: int, keep_first: int, keep_last: int, recency: float | None
    ) -> None:
        super().__init__()
        self.scores = KeyScores(heads, head_dim, recency=recency)
        self.keep, self.keep_first, self.keep_last = keep, keep_first, keep_last

    def select(self, value: Tensor, mask: Any) -> tuple[TileMask, Tensor]:
        """Return the mask for values `[B, Sk, Hkv, D]` beside a mask of the forward, and the scores as a bias."""
        if not isinstance(mask, ForwardMask):
            raise NotImplementedError(
                f"dynamic masks take masks made by transformers beside them, got {type(mask).__name__}"
            )
        scores = self.scores(value)
        return mask.with_best(scores.detach(), self.keep, self.keep_first, self.keep_last), scores.unsqueeze(2)

    def extra_repr(self) -> str:
        """Say what is kept."""
        return f"keep={self.keep}, keep_first={self.keep_first}, keep_last={self.keep_last}"


def add_dynamic_masks(
    model: nn.Module, keep: int, *, keep_first: int = 0, keep_last: int = 0, recency: float | None = 1e-4
) -> nn.Module:
    """Give each attention layer of a model of transformers a dynamic mask, in place, and return the model.

    The model must attend through `attn_implementation="dmattn"`: other attention knows nothing of these masks, and a warning
    says so. Each layer gets a submodule `dynamic_mask`, so that the
    parameters train, move and are saved with the model; load them after calling this. Layers with a sliding window are
    left as they are. Scores start equal but for `recency`, a slope over positions, so that near keys are kept first and the
    attention scores hardly change: with `keep` of a sequence's length or more the model is what it was, but for that slope.

    Args:
        model: any of transformers whose attention layers have `v_proj` and `head_dim`.
        keep, keep_first, keep_last: as in `dynamic_mask`.
        recency: where the slope starts; None is without one.

    Raises:
        ValueError: where no such layer is found, and for negative numbers.
        TypeError: for numbers of keys that are no integers.
    """
    keep, keep_first, keep_last = require.counts(keep=keep, keep_first=keep_first, keep_last=keep_last)
    recency = None if recency is None else validation.number("recency", recency)
    layers = [module for module in model.modules() if _is_attention(module)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no attention layer with v_proj and head_dim outside of sliding windows"
        )
    for layer in layers:
        heads = layer.v_proj.out_features // layer.head_dim  # type: ignore[union-attr,operator]
        made = DynamicMask(heads, layer.head_dim, keep, keep_first, keep_last, recency)  # type: ignore[arg-type]
        layer.dynamic_mask = made.to(device=_device_of(layer.v_proj), dtype=torch.float32)  # type: ignore[arg-type]
    _warn_of_other_attention(layers)
    return model


def _device_of(module: nn.Module) -> torch.device | str | int:
    """Return the device that a module computes on. Where accelerate offloads its parameters to meta, its hook knows it."""
    held = next((part.device for part in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    if held.type != "meta":
        return held
    hook = getattr(module, "_hf_hook", None)
    devices = (getattr(each, "execution_device", None) for each in getattr(hook, "hooks", (hook,)))
    return next((device for device in devices if device is not None), held)


def _warn_of_other_attention(layers: list[nn.Module]) -> None:
    """Warn where a layer attends through something that does not read its dynamic mask."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from dmattn_ops.integrations.transformers import attention_forward

    chosen = {str(getattr(getattr(layer, "config", None), "_attn_implementation", None)) for layer in layers}
    others = [repr(name) for name in sorted(chosen) if ALL_ATTENTION_FUNCTIONS.get(name) is not attention_forward]
    if others:
        environment.warn(
            f"dmattn_ops: the model attends through {' and '.join(others)}, which does not read dynamic masks: call"
            " replace_attention_with_flash_dmattn(model), or make it with attn_implementation='dmattn'"
        )


def _is_attention(module: nn.Module) -> bool:
    """Return whether a module is a layer of attention over the whole sequence."""
    names = ("layer_idx", "v_proj", "head_dim")
    return all(hasattr(module, name) for name in names) and getattr(module, "sliding_window", None) is None
