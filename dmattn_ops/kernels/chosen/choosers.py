"""Lists of the queries that chose each block of keys, in ascending order: what the gradients of keys walk.

Bits of all pairs of a block and a query are set by atomic ors; each block then counts its own, and writes its list behind
those of the blocks before it. The lists of a head are together as long as its choices, whatever these are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmattn_ops.kernels.chosen.unions import Apart, is_seen
from dmattn_ops.kernels.chosen.work import UNSPECIALIZED, index_arguments, list_batch
from dmattn_ops.launching.launch import computed, launch, workspace

_WORDS = 32  # of a row of bits that are read at once


class Choosers(NamedTuple):
    """For each batch entry and head of lists: where the list of each block begins, how long it is, and the lists."""

    starts: Tensor  # int64 [Bm, Hm, blocks]
    counts: Tensor  # int32 [Bm, Hm, blocks]
    queries: Tensor  # int32 [Bm, Hm, Sq * k]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def mark_kernel(
    indices, q_segments, k_segments, bits, wide_counts,
    count, block, blocks, seqlen_q, seqlen_k, band_lo, band_hi, list_heads, tiles, words, wide, most,
    indices_b, indices_h, indices_q, indices_k, q_segments_b, k_segments_b,
    QUERIES: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Set the bits of the blocks that a tile of queries chose, `bits [Bm, Hm, blocks, words]`.

    Only of queries whose tile of `wide` chose more than `most` blocks together.
    """
    index = tl.program_id(0)
    tile = index % tiles
    matrix = index // tiles
    batch, head = (matrix // list_heads).to(tl.int64), (matrix % list_heads).to(tl.int64)
    row = tile * QUERIES + tl.arange(0, QUERIES)
    lists = indices + batch * indices_b + head * indices_h + row.to(tl.int64)[:, None] * indices_q
    own = bits + matrix.to(tl.int64) * blocks * words
    is_listed = row < seqlen_q
    wide_tile = matrix.to(tl.int64) * tl.cdiv(seqlen_q, wide) + row // wide
    is_listed = is_listed & (tl.load(wide_counts + wide_tile * 2, is_listed, other=0) > most)
    for at in tl.range(0, count, ENTRIES):
        entry = at + tl.arange(0, ENTRIES)[None, :]
        number = tl.load(lists + entry * indices_k, is_listed[:, None] & (entry < count), other=-1)
        rows = row[:, None] + entry * 0
        seen, number = is_seen(
            number, rows, batch, block, blocks, seqlen_k, band_lo, band_hi,
            q_segments, k_segments, q_segments_b, k_segments_b,
        )  # fmt: skip
        tl.atomic_or(own + number.to(tl.int64) * words + rows // 32, 1 << (rows % 32), mask=seen, sem="relaxed")


@triton.jit(do_not_specialize=UNSPECIALIZED)
def count_kernel(bits, counts, words, READ: tl.constexpr):
    """Count the queries that chose a block."""
    own = bits + tl.program_id(0).to(tl.int64) * words
    found = tl.full((), 0, tl.int32)
    for start in tl.range(0, words, READ):
        at = start + tl.arange(0, READ)
        word = tl.load(own + at, at < words, other=0).to(tl.uint32, bitcast=True)
        word = word - ((word >> 1) & 0x55555555)
        word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
        word = (word + (word >> 4)) & 0x0F0F0F0F
        word = (word + (word >> 8) + (word >> 16) + (word >> 24)) & 0x3F
        found += tl.sum(word.to(tl.int32), 0)
    tl.store(counts + tl.program_id(0), found)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def collect_kernel(bits, counts, starts, queries, blocks, words, capacity, READ: tl.constexpr, SUMMED: tl.constexpr):
    """Write the list of a block, behind those of the blocks before it: the lists of a head may hold 2^31 queries and more."""
    index = tl.program_id(0)
    matrix, number = index // blocks, index % blocks
    found = tl.full((), 0, tl.int64)
    for start in tl.range(0, number, SUMMED):
        before = start + tl.arange(0, SUMMED)
        found += tl.sum(tl.load(counts + matrix * blocks + before, before < number, other=0).to(tl.int64), 0)
    tl.store(starts + index, found)
    own = bits + index.to(tl.int64) * words
    lists = queries + matrix.to(tl.int64) * capacity
    for start in tl.range(0, words, READ):
        query = start * 32 + tl.arange(0, READ * 32)
        word = tl.load(own + query // 32, query // 32 < words, other=0)
        is_listed = (word >> (query % 32)) & 1
        if tl.max(word != 0, 0):
            tl.store(lists + found + tl.cumsum(is_listed, 0) - 1, query, is_listed != 0)
            found += tl.sum(is_listed, 0)


def choosers_of(indices: Tensor, shared: dict[str, Any], blocks: int, apart: Apart) -> Choosers:
    """List the queries that chose each block, of those `apart`. `shared`: block, lengths, band and segments."""
    batch, (heads, seqlen_q, count) = list_batch(indices, shared), indices.shape[1:]
    words, rows = triton.cdiv(seqlen_q, 32), batch * heads * blocks
    bits = workspace(indices, batch, heads, blocks, words, dtype=torch.int32)
    computed(Tensor.zero_, bits)
    counts, starts = (workspace(indices, batch, heads, blocks, dtype=dtype) for dtype in (torch.int32, torch.int64))
    queries = workspace(indices, batch, heads, seqlen_q * count, dtype=torch.int32)
    tiles = triton.cdiv(seqlen_q, 32)
    launch(
        mark_kernel,
        (batch * heads * tiles,),
        **shared,
        **index_arguments(indices),
        bits=bits,
        wide_counts=apart.unions.counts,
        wide=apart.queries,
        most=apart.most,
        blocks=blocks,
        tiles=tiles,
        words=words,
        QUERIES=32,
        ENTRIES=min(triton.next_power_of_2(max(count, 1)), 32),
        num_warps=4,
    )
    launch(count_kernel, (rows,), bits=bits, counts=counts, words=words, READ=512, num_warps=4)
    launch(
        collect_kernel, (rows,), bits=bits, counts=counts, starts=starts, queries=queries,
        blocks=blocks, words=words, capacity=seqlen_q * count, READ=_WORDS, SUMMED=1024, num_warps=4,
    )  # fmt: skip
    return Choosers(starts, counts, queries)
