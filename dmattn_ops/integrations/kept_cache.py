"""A cache of transformers that holds what the dynamic masks of a model can still show: see `kept_cache` beside it.

transformers hands a layer's new keys to the cache, and what the cache returns to the attention. Here the cache returns the new keys
as they are, and the attention (`attention_forward`) finds the cache of its layer by the tensor of keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils.weak import WeakIdKeyDictionary
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

from dmattn_ops.generation import KeptKeys
from dmattn_ops.integrations.forward_mask import ForwardMask

if TYPE_CHECKING:
    from dmattn_ops.integrations.dynamic_masks import DynamicMask

_layers: WeakIdKeyDictionary = WeakIdKeyDictionary()  # from the keys that a cache returned to the layer of that cache


class KeptLayer(CacheLayerMixin):
    """The cache of one attention layer with a dynamic mask."""

    is_sliding = False

    def __init__(self, rollback: int = 0) -> None:
        super().__init__()
        self.rollback, self.is_croppable = rollback, rollback > 0
        self.kept: KeptKeys | None = None
        self.seen, self.waits = 0, False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: room is made by the attention, which knows how many keys are kept."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *others: Any, **more: Any) -> tuple[Tensor, Tensor]:
        """Return the new keys and values `[B, Hkv, n, D]`; the attention stores them."""
        if is_compiling():
            raise NotImplementedError(
                "kept_cache works in eager mode: compile a model without it, or DynamicMaskAttention"
            )
        if self.waits:
            raise RuntimeError(
                "the keys that the cache returned did not reach the attention: kept_cache needs attn_implementation='dmattn',"
                " and a model that hands them over as they are"
            )
        self.is_initialized, self.waits = True, True
        self.seen += key_states.shape[-2]
        _layers[key_states] = self
        return key_states, value_states

    def attend(
        self, selector: DynamicMask | None, tensors: tuple[Tensor, Tensor, Tensor], mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Return the attention `[B, n, H, D]` of query, key and value `[B, n, heads, D]`, whose keys are stored."""
        self.waits = False
        if selector is None:
            raise ValueError(
                "kept_cache needs a dynamic mask in each layer of full attention: call add_dynamic_masks(model)"
            )
        if options.pop("dropout_p"):
            raise ValueError("kept_cache is for generation: call model.eval() first")
        query, key, value = tensors
        if not isinstance(mask, ForwardMask) or mask.dense or mask.documents is not None or not mask.is_causal:
            raise NotImplementedError(
                "kept_cache takes causal masks and padding, and no packed sequences or other masks"
            )
        if self.kept is None:
            self.kept = KeptKeys(
                key.shape[0],
                key.shape[2],
                key.shape[3],
                selector.keep,
                keep_first=selector.keep_first,
                keep_last=selector.keep_last,
                value_dim=value.shape[3],
                dtype=key.dtype,
                device=key.device,
                rollback=self.rollback,
            )
        scores = selector.scores(value, self.kept.length)
        parts = query, key, value, scores, scores.unsqueeze(2)
        return self.kept.attend_beside(parts, mask.padding, None, True, options)  # type: ignore[return-value]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that a mask is made for, which are the new ones, and the position of the first."""
        return query_length, self.seen

    def get_seq_length(self) -> int:
        """Return the number of positions that were stored so far, those that were dropped included."""
        return self.seen

    def get_max_length(self) -> int:
        """Return -1: a text may have any length."""
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 5.0

    def reset(self) -> None:
        """Forget all keys."""
        self.seen, self.waits = 0, False
        if self.kept is not None:
            self.kept.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Replace each sequence by the one that `beam_idx` `[B]` names, as beam search does."""
        if self.kept is not None:
            self.kept.reorder(beam_idx.to(self.kept.device))

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` positions; a positive number is the length that stays."""
        count = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.seen - tokens_to_remove)
        if self.kept is not None and count:
            self.kept.crop(count)
            self.seen -= count

    def offload(self) -> None:
        """Move the keys to the CPU."""
        raise NotImplementedError("kept_cache does not offload: its size is constant")

    prefetch = offload


class KeptCache(DynamicCache):
    """Keys of constant size in layers of full attention, whose masks are dynamic; sliding windows keep their own."""

    def __init__(self, config: Any, rollback: int = 0) -> None:
        super().__init__(config=config)
        self.layer_class_to_replicate = None
        layers: list[Any] = self.layers
        self.layers: list[Any] = [KeptLayer(rollback) if type(each) is DynamicLayer else each for each in layers]

    @property
    def nbytes(self) -> int:
        """How many bytes the keys, the values and what is known of them take."""
        kept = [layer.kept for layer in self.layers if isinstance(layer, KeptLayer)]
        others = [layer for layer in self.layers if not isinstance(layer, KeptLayer) and layer.is_initialized]
        return sum(each.nbytes for each in kept if each is not None) + sum(
            layer.keys.nbytes + layer.values.nbytes for layer in others
        )


def layer_beside(key: Tensor) -> KeptLayer | None:
    """Return the layer of the cache that returned keys; None of others."""
    return _layers.get(key)
