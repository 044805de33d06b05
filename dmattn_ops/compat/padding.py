"""Sequences packed one behind the other, from padded ones and back, as flash-attn and flash_dmattn have it.

The lengths are read on the host, which waits for a GPU; a padding mask given to `prepare_mask` needs neither this nor copies.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dmattn_ops.checks import require


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the positions of `[B, S, ...]` that a mask `[B, S]` keeps.

    Args:
        hidden_states: with shape `[B, S, ...]`.
        attention_mask: `[B, S]`, bool or integer: 1 is valid.
        unused_mask: `[B, S]`: positions that are kept though they are not valid.

    Returns:
        What is kept, `[total, ...]`; its indices in the `B * S` positions; offsets, int32 `[B + 1]`; the greatest length; and
        how many positions of each sequence are valid, int32 `[B]`.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices, cu_seqlens, longest = unpad_data(kept)
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, longest, used


def unpad_data(mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return the indices of what a mask `[B, S]` keeps, offsets of the sequences, int32 `[B + 1]`, and the greatest length."""
    lengths = mask.sum(dim=-1, dtype=torch.int32)
    indices = mask.flatten().nonzero().flatten()
    offsets = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return indices, offsets, int(lengths.max().item()) if lengths.shape[0] else 0


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put `[total, ...]` back to where `indices` say, `[batch, seqlen, ...]`; other positions are 0."""
    batch, seqlen = require.counts(batch=batch, seqlen=seqlen)
    padded = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    return padded.index_put((indices,), hidden_states).unflatten(0, (batch, seqlen))
