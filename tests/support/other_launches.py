"""Calls that launch the kernels beside attention by rows: blocks that queries choose, masses, kept keys, one query."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dmattn_ops.call import NO_MASK, UNBOUNDED, Call, Chosen, Gradients, Mask, Result, Saved, plain_options
from dmattn_ops.choice import config
from dmattn_ops.choice.chosen import Gathering
from dmattn_ops.kernels.chosen import launch as chosen
from dmattn_ops.kernels.decode import launch as decode
from dmattn_ops.kernels.kept import chunk_launch
from dmattn_ops.kernels.kept import launch as kept
from dmattn_ops.kernels.masks import chosen as bits
from dmattn_ops.kernels.mass import launch as mass
from dmattn_ops.masks.chosen import Selection, Statistics
from dmattn_ops.masks.kept import Appended, Rule, Stored, Token
from dmattn_ops.meta import keep_chunk_outputs, pack_mask_outputs

B, SEQLEN, HEADS, KV_HEADS, CHOICES = 2, 3000, 12, 3, 24
SMALL = Gathering(32, 32, 4, 1, Gathering(32, 32, 4, 1), 1.6)


def rows(seqlen: int, heads: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return uninitialised rows `[B, S, heads, D]`."""
    return torch.empty(B, seqlen, heads, dim, dtype=dtype)


def indices() -> Tensor:
    """Return uninitialised choices `[B, Hkv, Sq, k]`."""
    return torch.empty(B, KV_HEADS, SEQLEN, CHOICES, dtype=torch.int64)


def segments() -> tuple[Tensor, Tensor]:
    """Return uninitialised ids of queries `[B, Sq]` and of keys `[B, 1, Sk]`."""
    return torch.empty(B, SEQLEN, dtype=torch.int32), torch.empty(B, 1, SEQLEN, dtype=torch.int32)


def gather_blocks(block: int, dims: tuple[int, int], tested: bool) -> None:
    """Launch forward and backward of chosen blocks, all ways that a tile can go."""
    query, key, value = rows(SEQLEN, HEADS, dims[0]), rows(SEQLEN, KV_HEADS, dims[0]), rows(SEQLEN, KV_HEADS, dims[1])
    q_segments, k_segments = segments()
    beside = NO_MASK._replace(q_segments=q_segments, k_segments=k_segments) if tested else NO_MASK
    options = plain_options(0.1, -100 if tested else -UNBOUNDED, 0, softcap=30.0 if tested else 0.0)
    named = Chosen(indices(), block)
    call = Call(query, key, value, None, beside, torch.empty(HEADS), None, None, options, chosen=named)
    out, statistics = rows(SEQLEN, HEADS, dims[1]), [torch.empty(B, HEADS, SEQLEN) for _ in range(3)]
    chosen.forward_with(call, Result(out, *statistics), SMALL)
    made = [torch.empty_like(part) for part in (query, key, value)]
    grads = Gradients(out, None, *made, None, torch.empty(HEADS))
    columns = max(16, min(SMALL.columns, 1 << (block - 1).bit_length()))
    chosen.backward_with(
        call, Saved(out, *statistics[:2]), grads, replace(SMALL, apart=replace(SMALL, columns=columns))
    )


def pack_selection(block: int) -> None:
    """Launch what makes bits of chosen blocks."""
    outputs = pack_mask_outputs(indices()[..., :1].expand(-1, -1, -1, SEQLEN), B, KV_HEADS, SEQLEN, -UNBOUNDED, 0)
    bits.pack_selection(indices(), *segments(), block, SEQLEN, -UNBOUNDED, 0, *outputs)


def masses(block: int) -> None:
    """Launch what tells how much attention blocks and keys get."""
    query, key = rows(SEQLEN, HEADS, 64), rows(SEQLEN, KV_HEADS, 64)
    bias, lse = torch.empty(1).expand(B, HEADS, SEQLEN, SEQLEN), torch.empty(B, HEADS, SEQLEN)
    options = plain_options(0.1, -100, 0)
    choice = Selection(query, key, indices(), *segments(), bias, lse, block, options)
    mass.selection_mass(choice, torch.empty(B, KV_HEADS, SEQLEN, CHOICES))
    ends = [torch.empty(B, HEADS, SEQLEN, dtype=torch.int32) for _ in range(4)]
    for mask in (NO_MASK, Mask(start=ends[0], end=ends[1], hidden_from=ends[2], hidden_to=ends[3])):
        call = Call(query, key, key, bias, mask, None, None, None, options)
        mass.key_mass(call, Statistics(lse, torch.empty_like(lse)), torch.empty(B, KV_HEADS, SEQLEN))


def cache_of(slots: int) -> Stored:
    """Return an uninitialised cache of kept keys."""
    of_batch = [torch.empty(B, dtype=torch.int64) for _ in range(4)]
    return Stored(
        *[torch.empty(B, KV_HEADS, slots, 64, dtype=torch.bfloat16) for _ in range(2)],
        torch.empty(B, KV_HEADS, slots), torch.empty(B, KV_HEADS, 4, slots, dtype=torch.int64), *of_batch[:3],
        torch.empty(B, dtype=torch.int32), torch.empty(B, HEADS, slots), of_batch[3], torch.empty(B, 3, 2, dtype=torch.int64),
    )  # fmt: skip


def keep_step() -> None:
    """Launch a step of a cache of kept keys."""
    flags = torch.empty(B, 1, dtype=torch.bool), torch.empty(B, 1, dtype=torch.int64)
    new = rows(1, KV_HEADS, 64), rows(1, KV_HEADS, 64), torch.empty(B, KV_HEADS, 1), torch.empty(B, HEADS, 1, 1)
    kept.keep_step(
        cache_of(200), Token(*new, *flags), Rule(9, 1, 1, 2, False), torch.empty(B, KV_HEADS, 200, dtype=torch.int32)
    )


def keep_chunk() -> None:
    """Launch a chunk of a cache of kept keys."""
    stored, new = cache_of(200)._replace(document=None, trail=None), [rows(SEQLEN, KV_HEADS, 64) for _ in range(2)]
    token = Token(*new, torch.empty(B, KV_HEADS, SEQLEN), torch.empty(B, HEADS, 1, SEQLEN), None, None)
    appended = Appended(*keep_chunk_outputs(stored.key, stored.value, stored.bias, SEQLEN))
    chunk_launch.keep_chunk(stored, token, Rule(9, 1, 1, 2, False), appended)


def attend_one_query() -> None:
    """Launch the attention of one query for each sequence."""
    row = config.DECODE_FORWARD[0]
    query, key = rows(1, HEADS, row.dim), rows(SEQLEN, KV_HEADS, row.dim)
    shown = [torch.empty(B, KV_HEADS, SEQLEN, dtype=torch.int32) for _ in range(4)]
    mask = Mask(None, None, None, None, None, None, *shown)
    options = plain_options(0.1)._replace(softcap=30.0, band_lo=5)
    call = Call(query, key, key, torch.empty(B, HEADS, 1, SEQLEN), mask, torch.empty(HEADS), None, None, options)
    decode.forward(call, Result(torch.empty_like(query), *[torch.empty(B, HEADS, 1) for _ in range(3)]), row.config)


def cases() -> Iterator[tuple[str, int, Callable[[], None]]]:
    """Yield a name, an architecture and what launches kernels for it."""
    for sm in (80, 90):
        for block, dims, tested in (
            (64, (64, 64), False),
            (24, (40, 72), True),
            (4, (192, 128), True),
            (1, (64, 64), False),
        ):
            yield f"chosen {block} {dims} SM {sm}", sm, partial(gather_blocks, block, dims, tested)
    for block in (1, 64):
        yield f"bits of blocks of {block}", 90, partial(pack_selection, block)
        yield f"masses of blocks of {block}", 90, partial(masses, block)
    yield "one query", 90, attend_one_query
    yield "a kept key", 90, keep_step
    yield "a chunk of kept keys", 90, keep_chunk
