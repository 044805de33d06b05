"""How programs of the portable kernels begin: they find the block of rows that they own, and the tensors of a head."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dmattn_ops.kernels.portable.dropout import dropout_of
from dmattn_ops.kernels.portable.places import head_offset, owned_start, place_of, record_of
from dmattn_ops.kernels.portable.scores import bias_of
from dmattn_ops.kernels.portable.visibility import mask_of_head


class Operands(NamedTuple):
    """The tensors that all heads of a call have in common, besides query, key and value."""

    lists: Any  # Lists
    mask: Any  # MaskArrays
    bias: Any  # BiasArray
    seeds: Any  # Seeds
    factors: Any  # Factors


class Head(NamedTuple):
    """One query head of one sequence: what the steps of a walk need to know of it."""

    place: Any  # Place
    record: Any  # that lists tiles for the owned block; 0 where there is none
    bias: Any  # Bias
    dropout: Any  # Dropout
    mask: Any  # HeadMask
    factors: Any  # Factors


@triton.jit
def program_of(
    program, lanes, blocks, lengths, lists, shape: tl.constexpr, features: tl.constexpr, KEYS_OWNED: tl.constexpr
):
    """Return the place of program number `program`, and the first row of the block that it owns; a head has `blocks` blocks.

    That row lies behind the end of the sequence where there is no block for the program. `lanes` are the numbers from 0 to before
    `places.SEARCHED`.
    """
    BLOCK: tl.constexpr = shape.block_n if KEYS_OWNED else shape.block_m
    GROUP: tl.constexpr = features.group if KEYS_OWNED else 1
    DESCENDING: tl.constexpr = not KEYS_OWNED
    place, block, blocks = place_of(
        program, lanes, blocks, lengths.heads // GROUP, lengths, BLOCK, features, KEYS_OWNED
    )
    tiles = 0
    if features.listed:
        tiles = lists.tiles + head_offset(place.batch, place.head * GROUP // lists.group, lists.tiles_b, lists.tiles_h)
    return place, owned_start(tiles, lists.tiles_w, block, blocks, BLOCK, features.listed, DESCENDING)


@triton.jit
def head_of(operands, place, head, start, band, features: tl.constexpr):
    """Return the tensors of query head `head` for a block that begins at `start`; `band` is that of the block's side."""
    record = record_of(operands.lists, place, head, start, features)
    bias = bias_of(operands.bias, place, head, features)
    dropout = dropout_of(operands.seeds, place, head, features)
    mask = mask_of_head(operands.mask, place, head, band, features)
    return Head(place, record, bias, dropout, mask, operands.factors)
