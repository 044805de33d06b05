"""Dense masks of the largest biases, as flash_dmattn 1.2.2 makes them.

`window_size` is a number of keys here, not a distance. `dmattn_ops.dynamic_mask` selects among the keys before each query,
from one score for each key, in O(S) memory.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dynamic_mask(
    attention_bias: Tensor,
    attention_mask: Tensor | None,
    window_size: int,
    min_dtype: float,
    block_size: int | None = None,
) -> Tensor:
    """Return where each row of a bias has its `window_size` largest elements, bool, in the shape of the bias.

    Args:
        attention_bias: with shape `[B|1, H|Hkv|1, Sq|1, Sk]`.
        attention_mask: bool or integer, broadcast to the bias: what may be kept at all.
        window_size: how many elements of a row are kept; all where there are no more.
        min_dtype: the number that marks what is masked; it is never kept.
        block_size: if given, each whole block of so many keys is kept or not, by majority.
    """
    if block_size is not None and (int(block_size) != block_size or block_size <= 0):
        raise ValueError(f"block_size must be a positive integer, got {block_size}.")
    scores = attention_bias.detach()
    if attention_mask is not None:
        scores = torch.where(attention_mask != 0, scores, min_dtype)
    best = scores.topk(min(window_size, scores.shape[-1]), dim=-1, sorted=False)
    keep = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best.indices, best.values != min_dtype)
    return keep if block_size is None or block_size == 1 else _by_majority(keep, int(block_size))


def create_mask(
    attention_bias: Tensor,
    attention_mask: Tensor | None,
    batch_size: int,
    query_len: int,
    key_len: int,
    window_size: int,
    min_dtype: float,
    block_size: int | None = None,
) -> Tensor:
    """Return `dynamic_mask`; `attention_mask` may be padding, `[B, key_len]` or, of the last keys, `[B, query_len]`."""
    if attention_mask is not None and attention_mask.dim() == 2:
        given = attention_mask.shape[-1]
        if given not in (key_len, query_len):
            raise ValueError(
                f"attention_mask shape {attention_mask.shape} is not compatible with key_len {key_len} or query_len {query_len}."
            )
        before = 0 if given == key_len else max(0, key_len - query_len)
        attention_mask = torch.nn.functional.pad(attention_mask != 0, (before, 0), value=True)
        attention_mask = attention_mask.view(batch_size, 1, 1, -1)
    return dynamic_mask(attention_bias, attention_mask, window_size, min_dtype, block_size)


def _by_majority(keep: Tensor, size: int) -> Tensor:
    """Return bool `[..., Sk]` in which each block of keys is what more than half of it is, the last, shorter one too."""
    length = keep.shape[-1]
    padded = torch.nn.functional.pad(keep.to(torch.int32), (0, -length % size))
    counts = padded.unflatten(-1, (-1, size)).sum(-1)
    first = torch.arange(counts.shape[-1], device=keep.device) * size
    sizes = (length - first).clamp(max=size)
    return (counts * 2 > sizes).repeat_interleave(size, dim=-1)[..., :length]
