"""Lists of the blocks that neighbouring queries chose together: for each tile of queries, in ascending order, with their bits.

A program has a map of all blocks for itself, a word for each, in which atomic ors leave a bit for each query of a tile that
chose the block; then it reads the map from its first word to its last, clears it, and writes what it found. Repeats and the
order of the choices change nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmattn_ops.kernels.chosen.work import UNSPECIALIZED, index_arguments, list_batch
from dmattn_ops.launching.launch import computed, launch, workspace

_READ = 1024  # words of a map that are read at once
_PROGRAMS = 4  # for each multiprocessor


class Unions(NamedTuple):
    """For each batch entry and head of lists, and tile of queries: how many blocks (in all, and visible whole), and which."""

    counts: Tensor  # int32 [Bm, Hm, tiles, 2]
    entries: Tensor  # int32 [Bm, Hm, tiles, capacity]: numbers of blocks, those visible whole first
    words: Tensor  # the same: bit q of a word says that query q of the tile chose the block


@triton.jit
def is_seen(
    number, row, batch, block, blocks, seqlen_k, band_lo, band_hi, q_segments, k_segments, q_segments_b, k_segments_b
):
    """Return whether queries see some key of the blocks that they name, and the number where they do, else 0."""
    is_block = (number >= 0) & (number < blocks)
    number = tl.where(is_block, number, 0).to(tl.int32)
    first = tl.maximum(number * block, row + band_lo)
    last = tl.minimum(tl.minimum(number * block + block, seqlen_k) - 1, row + band_hi)
    seen = is_block & (first <= last) & (band_lo <= band_hi)
    if k_segments is not None:
        own = 0
        if q_segments is not None:
            own = tl.load(q_segments + batch * q_segments_b + row, seen, other=0)
        some = number < 0
        for place in tl.range(block):
            key = number * block + place
            shown = seen & (key >= first) & (key <= last)
            some = some | (shown & (tl.load(k_segments + batch * k_segments_b + key, shown, other=0) == own))
        seen = some
    return seen, number


@triton.jit(do_not_specialize=UNSPECIALIZED)
def unions_kernel(
    indices, q_segments, k_segments, maps, counts, entries, words, wide_counts,
    count, block, blocks, seqlen_q, seqlen_k, band_lo, band_hi, list_heads, tiles, total, capacity, wide, most,
    indices_b, indices_h, indices_q, indices_k, q_segments_b, k_segments_b,
    QUERIES: tl.constexpr, ENTRIES: tl.constexpr, READ: tl.constexpr, TESTED: tl.constexpr,
):  # fmt: skip
    """Write the lists of some tiles: one program walks through every `num_programs`-th."""
    own = maps + tl.program_id(0).to(tl.int64) * (tl.cdiv(blocks, READ) * READ)
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        tile = index % tiles
        wanted = True
        if wide_counts is not None:
            wanted = is_apart(wide_counts, index // tiles, tile, tiles, wide, most)
        if wanted:
            batch, head = (index // tiles // list_heads).to(tl.int64), (index // tiles % list_heads).to(tl.int64)
            first_q = tile * QUERIES
            row = first_q + tl.arange(0, QUERIES)
            lists = indices + batch * indices_b + head * indices_h + row.to(tl.int64)[:, None] * indices_q
            for at in tl.range(0, count, ENTRIES):
                entry = at + tl.arange(0, ENTRIES)[None, :]
                number = tl.load(lists + entry * indices_k, (row < seqlen_q)[:, None] & (entry < count), other=-1)
                rows = row[:, None] + entry * 0
                seen, number = is_seen(
                    number, rows, batch, block, blocks, seqlen_k, band_lo, band_hi,
                    q_segments, k_segments, q_segments_b, k_segments_b,
                )  # fmt: skip
                tl.atomic_or(own + number, 1 << (rows - first_q), mask=seen, sem="relaxed")
            tl.debug_barrier()
            found = tl.full((), 0, tl.int32)
            whole = tl.full((), 0, tl.int32)
            last_q = tl.minimum(first_q + QUERIES, seqlen_q) - 1
            end = tl.minimum(blocks, tl.maximum(tl.minimum(last_q + band_hi, seqlen_k - 1), -1) // block + 1)
            of_tile = capacity.to(tl.int64) * index
            for start in tl.range(0, end, READ):
                number = start + tl.arange(0, READ)
                word = tl.load(own + number, cache_modifier=".cg")  # not from L1, which does not see what atomics write
                tl.store(own + number, tl.zeros([READ], tl.int32))
                is_listed = (word != 0).to(tl.int32)
                place = of_tile + found + tl.cumsum(is_listed, 0) - 1
                tl.store(entries + place, number, is_listed != 0)
                tl.store(words + place, word, is_listed != 0)
                found += tl.sum(is_listed, 0)
                if not TESTED:
                    behind = number * block + block
                    is_whole = (behind <= seqlen_k) & (behind - 1 <= first_q + band_hi)
                    whole += tl.sum(is_listed * is_whole.to(tl.int32), 0)
            own_counts = counts + tl.cast(index, tl.int64) * 2
            tl.store(own_counts, found)
            tl.store(own_counts + 1, whole)
            tl.debug_barrier()


@triton.jit
def is_apart(wide_counts, matrix, tile, tiles, wide, most):
    """Return whether the queries of the tile of `wide` tiles that a tile is in chose more than `most` blocks together."""
    return tl.load(wide_counts + (matrix.to(tl.int64) * tl.cdiv(tiles, wide) + tile // wide) * 2) > most


class Apart(NamedTuple):
    """Which tiles are listed one query at a time: those of `queries` neighbours that chose more than `most` blocks together."""

    unions: Unions
    queries: int
    most: int


def unions_of(
    indices: Tensor,
    shared: dict[str, Any],
    blocks: int,
    queries: int,
    tested: bool,
    num_sms: int,
    apart: Apart | None = None,
) -> Unions:
    """List the blocks that each tile of so many queries chose. `shared`: block, lengths, band and segments.

    With `apart`, only tiles in whose wider tile neighbours chose too many.
    """
    batch, (heads, seqlen_q, count) = list_batch(indices, shared), indices.shape[1:]
    tiles = triton.cdiv(seqlen_q, queries)
    total, capacity = batch * heads * tiles, min(queries * count, blocks)
    counts = workspace(indices, batch, heads, tiles, 2, dtype=torch.int32)
    entries, words = (workspace(indices, batch, heads, tiles, capacity, dtype=torch.int32) for _ in range(2))
    programs = min(total, _PROGRAMS * num_sms)
    maps = workspace(indices, programs, triton.cdiv(blocks, _READ) * _READ, dtype=torch.int32)
    computed(Tensor.zero_, maps)
    launch(
        unions_kernel,
        (programs,),
        **shared,
        **index_arguments(indices),
        maps=maps,
        counts=counts,
        entries=entries,
        words=words,
        wide_counts=None if apart is None else apart.unions.counts,
        wide=1 if apart is None else apart.queries // queries,
        most=0 if apart is None else apart.most,
        blocks=blocks,
        tiles=tiles,
        total=total,
        capacity=capacity,
        QUERIES=queries,
        ENTRIES=min(triton.next_power_of_2(max(count, 1)), 1024 // queries),
        READ=_READ,
        TESTED=tested,
        num_warps=4,
    )
    return Unions(counts, entries, words)
