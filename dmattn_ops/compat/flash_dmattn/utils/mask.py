"""Dense masks of the largest or the positive biases, as flash_dmattn 1.2.2 and 1.2.3 make them.

`window_size` is a number of keys here, not a distance. `dmattn_ops.dynamic_mask` selects among the keys before each query,
from one score for each key, in O(S) memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dmattn_ops.checks import require, validation


def dynamic_mask(
    attention_bias: Tensor,
    attention_mask: Tensor | None,
    window_size: int,
    min_dtype: float,
    block_size: int | None = None,
) -> Tensor:
    """Return a bool mask in the shape of a bias, True at the `window_size` largest elements of each row.

    Args:
        attention_bias: with shape `[B|1, H|Hkv|1, Sq|1, Sk]`.
        attention_mask: bool or integer, broadcast to the bias: what may be kept at all.
        window_size: how many elements of a row are kept; all where there are no more.
        min_dtype: the number that marks what is masked; it is never kept.
        block_size: if given, each whole block of so many keys is kept or not, by majority.
    """
    [window_size] = require.counts(window_size=window_size)
    scores, size = _allowed(attention_bias, attention_mask, min_dtype), _block(block_size)
    best = scores.topk(min(window_size, scores.shape[-1]), dim=-1, sorted=False)
    keep = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best.indices, best.values != min_dtype)
    return _by_majority(keep, size)


topk_mask = dynamic_mask


def relu_mask(
    attention_bias: Tensor,
    attention_mask: Tensor | None,
    window_size: int,
    min_dtype: float,
    block_size: int | None = None,
) -> Tensor:
    """Return a bool mask in the shape of a bias, True where it is positive; `window_size` is ignored, the rest as above."""
    require.counts(window_size=window_size)
    size = _block(block_size)
    return _by_majority(_allowed(attention_bias, attention_mask, min_dtype) > 0, size)


def create_mask(
    attention_bias: Tensor,
    attention_mask: Tensor | None,
    batch_size: int,
    query_len: int,
    key_len: int,
    window_size: int,
    min_dtype: float,
    block_size: int | None = None,
    type: str = "topk",
) -> Tensor:
    """Return `dynamic_mask`, or with the type "relu" `relu_mask`.

    `attention_mask` may be padding, `[B, key_len]` or, of the last keys, `[B, query_len]`.
    """
    if type not in _TYPES:
        raise ValueError(f"type must be 'topk' or 'relu', got {type!r}")
    batch_size, query_len, key_len = require.counts(batch_size=batch_size, query_len=query_len, key_len=key_len)
    if attention_mask is not None and attention_mask.dim() == 2:
        given = attention_mask.shape[-1]
        if given not in (key_len, query_len):
            raise ValueError(
                f"attention_mask shape {attention_mask.shape} is not compatible with key_len {key_len} or query_len {query_len}."
            )
        before = 0 if given == key_len else max(0, key_len - query_len)
        attention_mask = torch.nn.functional.pad(attention_mask != 0, (before, 0), value=True)
        attention_mask = attention_mask.view(batch_size, 1, 1, -1)
    return _TYPES[type](attention_bias, attention_mask, window_size, min_dtype, block_size)


_TYPES = {"topk": dynamic_mask, "relu": relu_mask}


def _allowed(bias: Tensor, mask: Tensor | None, min_dtype: float) -> Tensor:
    """Return a bias without its gradient, `min_dtype` where a mask hides it."""
    min_dtype = validation.number("min_dtype", min_dtype)
    return bias.detach() if mask is None else torch.where(mask != 0, bias.detach(), min_dtype)


def _block(block_size: int | None) -> int:
    """Return the number of neighbouring keys that are kept or hidden together."""
    if block_size is None:
        return 1
    if not require.is_integer(block_size) or block_size <= 0:
        raise ValueError(f"block_size must be a positive integer, got {block_size}.")
    return int(block_size)


def _by_majority(keep: Tensor, size: int) -> Tensor:
    """Return bool `[..., Sk]` in which each block of keys is what more than half of it is, the last, shorter one too."""
    if size == 1:
        return keep
    length = keep.shape[-1]
    padded = torch.nn.functional.pad(keep.to(torch.int32), (0, -length % size))
    counts = padded.unflatten(-1, (-1, size)).sum(-1)
    first = torch.arange(counts.shape[-1], device=keep.device) * size
    sizes = (length - first).clamp(max=size)
    return (counts * 2 > sizes).repeat_interleave(size, dim=-1)[..., :length]
