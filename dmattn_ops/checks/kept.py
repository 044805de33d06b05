"""What the operators of a cache of kept keys refuse. They take what `KeptKeys` has checked, and other callers' tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dmattn_ops import symbolic
from dmattn_ops.checks import require, validation

MOST_SLOTS = 1 << 29  # what a GPU kernel knows of a head lies in four rows of them, counted in 32 bits
_NUMBERS = ("length", "floor", "first", "document")


def step(read: Any) -> None:
    """Refuse arguments of `keep_step`, read by name, that do not fit each other."""
    _positions(read, 1)


def chunk(read: Any) -> None:
    """Refuse arguments of `keep_chunk`, read by name, that do not fit each other."""
    require.rank("key", read.key, 4, "[B, n, Hkv, D]")
    if symbolic.certainly(read.key.shape[1] == 0):
        raise ValueError("key must have at least one position, got none")
    _positions(read, read.key.shape[1])


def _positions(read: Any, count: int) -> None:
    """Refuse what does not fit a cache and `count` new positions."""
    require.counts(keep=read.keep, keep_first=read.keep_first, keep_last=read.keep_last, rollback=read.rollback)
    require.flags(padding_counts=read.padding_counts)
    require.rank("key_cache", read.key_cache, 4, "[B, Hkv, N, D]")
    require.rank("value_cache", read.value_cache, 4, "[B, Hkv, N, Dv]")
    batch, heads, slots, head_dim = read.key_cache.shape
    if symbolic.certainly(slots > MOST_SLOTS):
        raise ValueError(f"key_cache must have at most {MOST_SLOTS} slots, got {slots}")
    value_dim = read.value_cache.shape[3]
    expected: dict[str, tuple[tuple[int, ...], ...]] = {
        "value_cache": ((batch,), (heads,), (slots,), (value_dim,)),
        "score_cache": ((batch,), (heads,), (slots,)),
        "places": ((batch,), (heads,), (4,), (slots,)),
        **dict.fromkeys((*_NUMBERS, "arrived"), ((batch,),)),
        "trail": ((batch,), (read.rollback + 1,), (2,)),
        "key": ((batch,), (count,), (heads,), (head_dim,)),
        "value": ((batch,), (count,), (heads,), (value_dim,)),
        "scores": ((1, batch), (1, heads), (count,)),
        "padding": ((1, batch), (count,)),
        "documents": ((1, batch), (count,)),
    }
    for name, sizes in expected.items():
        if getattr(read, name) is not None:
            require.sizes(name, getattr(read, name), *sizes)
    if read.bias_cache is not None:
        require.rank("bias_cache", read.bias_cache, 3, "[B, Hkv or H, N]")
        of_heads = read.bias_cache.shape[1]
        if heads and of_heads % heads:
            raise ValueError(f"bias_cache must have a multiple of {heads} heads, got {of_heads}")
        require.sizes("bias_cache", read.bias_cache, (batch,), (of_heads,), (slots,))
        if read.bias is not None:
            require.sizes("bias", read.bias, (1, batch), (1, of_heads), (1,), (count,))
    _dtypes(read)
    for name, part in read._asdict().items():
        if isinstance(part, Tensor):
            require.device(name, part, read.key_cache.device, "key_cache")


def _dtypes(read: Any) -> None:
    """Refuse dtypes that the operators do not take, and a cache that is not contiguous."""
    require.dtype("key_cache", read.key_cache, *validation.DTYPES)
    for name, like in (
        ("value_cache", "key_cache"),
        ("key", "key_cache"),
        ("value", "key_cache"),
        ("bias", "bias_cache"),
    ):
        if getattr(read, name) is not None and getattr(read, like) is not None:
            require.dtype(name, getattr(read, name), getattr(read, like).dtype, like=like)
    require.dtype("score_cache", read.score_cache, torch.float32, torch.float64)
    for name in ("places", *_NUMBERS, "trail"):
        if getattr(read, name) is not None:
            require.dtype(name, getattr(read, name), torch.int64)
    require.dtype("arrived", read.arrived, torch.int32)
    if (read.document is None) != (read.trail is None):
        raise ValueError("document and trail must be given together")
    for name in ("padding", "documents"):
        if getattr(read, name) is not None:
            require.dtype(name, getattr(read, name), torch.bool, *validation.INTEGERS)
    changed = ("key_cache", "value_cache", "score_cache", "places", *_NUMBERS, "arrived", "bias_cache", "trail")
    for name in changed:
        if getattr(read, name) is not None and not getattr(read, name).is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {require.text(getattr(read, name).stride())}")
