"""Launch the Triton kernels of masses, on every GPU from SM 8.0."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from dmattn_ops.call import Call, float32_precision, rows_are_aligned
from dmattn_ops.kernels.interval_lists import listed
from dmattn_ops.kernels.mass.keys import key_mass_kernel
from dmattn_ops.kernels.mass.selection import Traits, first_numbers, selection_mass_kernel
from dmattn_ops.kernels.portable.arguments import (
    bias_arguments,
    blocks_and_programs,
    broadcast_stride,
    extent,
    factor_arguments,
    features_of,
    list_arguments,
    mask_arguments,
    padded,
    row_strides,
    shape_of,
)
from dmattn_ops.launching.launch import launch, workspace
from dmattn_ops.masks.chosen import Selection, Statistics

NEEDS_STATISTICS = True
_COMPARED = 64  # numbers of a list, each with as many others
_SLOTS = 64  # keys that are gathered at a time; half as many of float32, and of wide heads
_MOST_HEADS = 32  # of queries in a product; half as many in float32


def selection_mass(choice: Selection, mass: Tensor) -> None:
    """Write the probability of each chosen block, `[B, Hkv, Sq, k]` (`[B, H, Sq, k]` for indices of H heads)."""
    query, key, indices, options, block = choice.query, choice.key, choice.indices, choice.options, choice.block
    batch, seqlen_q, heads, dim = query.shape
    units, lists, count = mass.shape[1], indices.shape[1], indices.shape[3]
    group = heads // units
    firsts = workspace(query, *indices.shape, dtype=torch.int32)
    launch(
        first_numbers, (indices.shape[0] * lists * seqlen_q,),
        indices, firsts, count, triton.cdiv(key.shape[1], block), lists, seqlen_q, *indices.stride(),
        ENTRIES=_COMPARED, num_warps=4,
    )  # fmt: skip
    halved = query.element_size() // 4
    slots = _SLOTS >> halved >> (dim > 128)
    wide = min(slots, triton.next_power_of_2(block))
    launch(
        selection_mass_kernel, (batch * units * seqlen_q,),
        query, key, firsts, choice.q_segments, choice.k_segments,
        lse=choice.lse, mass=mass, count=count, block=block, units=units, heads=heads, seqlen_q=seqlen_q,
        seqlen_k=key.shape[1], band_lo=options.band_lo, band_hi=options.band_hi,
        **factor_arguments(options), **row_strides("query", query), **row_strides("key", key),
        firsts_b=broadcast_stride(firsts, 0), firsts_h=broadcast_stride(firsts, 1),
        q_segments_b=broadcast_stride(choice.q_segments, 0), k_segments_b=broadcast_stride(choice.k_segments, 0),
        **bias_arguments(choice.bias, heads),
        T=Traits(
            group, key_group=heads // key.shape[2], list_group=heads // lists,
            rows=min(_MOST_HEADS >> halved, max(16, triton.next_power_of_2(group))), entries=slots // wide, wide=wide,
            head_dim=dim, padded_head=padded(dim), softcap=options.softcap != 0, precision=_precision(query),
        ),
        num_warps=4,
    )  # fmt: skip


def key_mass(call: Call, statistics: Statistics | None, mass: Tensor) -> None:
    """Write the probabilities of each key, summed over the queries and the heads of a group, `[B, Hkv, Sk]`."""
    assert statistics is not None
    call = listed(call)
    query, key, mask, options, size = call.query, call.key, call.mask, call.options, extent(call)
    block = 64 if query.element_size() == 2 and query.shape[-1] <= 128 else 32  # of queries and of keys
    blocks, programs = blocks_and_programs(size, size.seqlen_k, size.kv_heads, block, mask.col_tiles)
    launch(
        key_mass_kernel, (programs,),
        query=query, key=key, lse=statistics.lse, lse_tail=statistics.lse_tail, mass=mass,
        **list_arguments(mask.col_tiles, mask.col_bits, size.heads), **mask_arguments(mask, size.heads),
        **row_strides("query", query), **row_strides("key", key), **bias_arguments(call.bias, size.heads),
        **factor_arguments(options),
        blocks=blocks, heads=size.heads, seqlen_q=size.seqlen_q, seqlen_k=size.seqlen_k,
        band_lo=options.band_lo, band_hi=options.band_hi,
        shape=shape_of(call, block, block, rows_are_aligned(query, key)), features=features_of(call, mask.col_tiles),
        num_warps=4, num_stages=2,
    )  # fmt: skip


def _precision(query: Tensor) -> str:
    """Return the precision of float32 products, as Triton names it."""
    return float32_precision() if query.dtype == torch.float32 else "tf32"
