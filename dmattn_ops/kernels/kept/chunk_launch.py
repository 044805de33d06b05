"""Launch the kernels that append a chunk of positions to a cache of kept keys."""

from __future__ import annotations

from typing import Any

import torch
import triton

from dmattn_ops.kernels.kept.chunk_kernels import ChunkShape, begin_chunk, end_chunk, store_chunk
from dmattn_ops.kernels.portable.arguments import broadcast_stride, padded
from dmattn_ops.kernels.selection.launch import lifetimes
from dmattn_ops.launching.launch import launch, workspace
from dmattn_ops.masks.kept import Appended, Rule, Stored, Token

# Slots whose order is found by comparing each with each. An estimate, not measured: beyond, that takes a tenth of the attention.
MOST_SLOTS = 9216
BLOCK = 64  # new keys, or slots, that a program copies
LANES = 1024  # keys that a program looks at at once
_ORDERED = 16  # slots whose columns a program finds
_COMPARED = 256  # others that it compares them with at once: 512 take 168 registers of SM 9.0, and 256 take 110
_MOST_AT_ONCE = 128  # columns of keys


def takes(stored: Stored, token: Token) -> bool:
    """Return whether these kernels append a chunk."""
    return token.padding is None and stored.document is None and stored.scores.shape[2] <= MOST_SLOTS


def keep_chunk(stored: Stored, token: Token, rule: Rule, appended: Appended) -> None:
    """Append positions to each sequence, and write until where each key is seen, and keys, values and biases side by side."""
    batch, heads, slots = stored.scores.shape
    count, rows = token.key.shape[1], batch * heads
    wide, whole = stored.scores, torch.int32
    short_scores = workspace(wide, batch, heads, slots + count, dtype=wide.dtype)
    column, free = (workspace(wide, rows, slots, dtype=whole) for _ in range(2))
    best, free_count = (workspace(wide, rows, dtype=whole) for _ in range(2))
    sizes = {"heads": heads, "slots": slots, "count": count}
    scores = {f"scores_{dim}": broadcast_stride(token.scores, place) for place, dim in enumerate("bh")}
    parts, slot_parts = triton.cdiv(count, LANES), triton.cdiv(slots, _ORDERED)
    shape, strides = _shape(stored), _strides(token) | scores
    ordering = slot_parts + triton.cdiv(slots + count, LANES)
    new_parts = triton.cdiv(count, BLOCK)
    copying = triton.cdiv(slots, BLOCK) + new_parts
    launch(
        begin_chunk, (rows * (ordering + copying),),
        *stored[:4], stored.bias, *token[:4], *appended[1:], short_scores, column, best,
        **strides, **sizes, rows=rows, slot_parts=slot_parts,
        shape=shape, SLOTS=_ORDERED, LANES=_COMPARED, NEW=LANES, num_warps=4,
    )  # fmt: skip
    start, stop = (workspace(wide, batch, heads, slots + count, dtype=whole) for _ in range(2))
    lifetimes(short_scores, None, rule.keep, 0, 0, True, start, stop)
    blocks = parts * (LANES // BLOCK)
    wanted = workspace(wide, rows, blocks, dtype=whole)
    protects = {"keep_first": rule.keep_first, "keep_last": rule.keep_last, "rollback": rule.rollback}
    launch(
        end_chunk, (rows * (1 + parts),),
        stored.places, column, best, stop, stored.length, stored.first, appended.ends, free, free_count, wanted,
        **sizes, **protects, NEW=LANES, BLOCK=BLOCK, num_warps=4, follows=True,
    )  # fmt: skip
    launch(
        store_chunk, (rows * new_parts,),
        stored.key, stored.value, stored.scores, stored.places, *stored[4:8], stored.bias,
        *token[:4], best, stop, free, free_count, wanted,
        **strides, **sizes, **protects, blocks=blocks, shape=shape, LANES=LANES, num_warps=4,
    )  # fmt: skip


def _shape(stored: Stored) -> ChunkShape:
    heads, head_dim, value_dim = stored.key.shape[1], stored.key.shape[3], stored.value.shape[3]
    at_once = (min(_MOST_AT_ONCE, padded(dim)) for dim in (head_dim, value_dim))
    return ChunkShape(BLOCK, head_dim, value_dim, *at_once, 0 if stored.bias is None else stored.bias.shape[1] // heads)


def _strides(token: Token) -> dict[str, Any]:
    """Return the strides of keys, values and biases by the names of the kernels' arguments."""
    named = {
        f"{name}_{dim}": part.stride(place)
        for name, part in (("key", token.key), ("value", token.value))
        for place, dim in enumerate("bsh")
    }
    return named | {f"bias_{dim}": broadcast_stride(token.bias, place) for place, dim in enumerate("bh")}
