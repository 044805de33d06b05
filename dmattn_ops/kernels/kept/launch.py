"""Launch the kernel of a step of a cache of kept keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dmattn_ops.kernels.kept.kernel import StepShape, keep_step_kernel
from dmattn_ops.kernels.portable.arguments import broadcast_stride, padded
from dmattn_ops.launching.launch import launch
from dmattn_ops.masks.kept import Rule, Stored, Token

MOST_AT_ONCE = 4096  # slots: as many registers as a program has room for
_SLOTS_OF_WARP = 256


def keep_step(stored: Stored, token: Token, rule: Rule, seen: Tensor) -> None:
    """Append one position to each sequence, and write which slots its query sees, int32 `[B, Hkv, N]`."""
    batch, heads, slots, head_dim = stored.key.shape
    if batch == 0:
        return
    value_dim = stored.value.shape[3]
    group = 1 if stored.bias is None else stored.bias.shape[1] // heads
    block = min(MOST_AT_ONCE, padded(slots))
    shape = StepShape(
        block, head_dim, value_dim, padded(head_dim), padded(value_dim), group, padded(group, 1), rule.padding_counts
    )
    strides: dict[str, Any] = {
        "padding_b": broadcast_stride(token.padding, 0),
        "documents_b": broadcast_stride(token.documents, 0),
        "key_b": token.key.stride(0),
        "key_h": token.key.stride(2),
        "value_b": token.value.stride(0),
        "value_h": token.value.stride(2),
    }
    for name in ("scores", "bias"):
        strides |= {
            f"{name}_b": broadcast_stride(getattr(token, name), 0),
            f"{name}_h": broadcast_stride(getattr(token, name), 1),
        }
    launch(
        keep_step_kernel,
        (batch * heads,),
        stored.key,
        stored.value,
        *stored[2:],
        *token[:4],
        _bytes_of_flags(token.padding),
        token.documents,
        seen,
        **strides,
        heads=heads,
        slots=slots,
        keep=rule.keep,
        keep_first=rule.keep_first,
        keep_last=rule.keep_last,
        rollback=rule.rollback,
        shape=shape,
        num_warps=max(4, min(16, block // _SLOTS_OF_WARP)),
    )


def _bytes_of_flags(padding: Tensor | None) -> Tensor | None:
    return padding.view(torch.uint8) if padding is not None and padding.dtype == torch.bool else padding
