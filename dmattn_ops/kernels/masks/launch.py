"""Masks on CUDA: read a dense mask once, and write the lists and bits of its tiles (layout: DESIGN.md).

`pack_mask` launches two kernels: one packs bits and classifies tiles (a program for every four tiles), one writes the lists
from the classes. Above 128 tiles a side a third kernel sorts the lists by their length. `list_tiles` first computes the
range of the segment ids in each tile, and the same kernel writes the lists from the ranges; up to 16 tiles a side it sorts
them too. Outputs are contiguous.

A program packs 2 x 2 tiles, so that it writes whole sectors of 32 bytes in both orientations. A program for one tile would
write half sectors; it took 1.6 times as long for random masks. H200, triton 3.6, 2026-11-20, bytes of the mask over the
time of all launches in a CUDA graph, bool [2, 8, 8192, 8192]: random 3.31 TB/s, 128-blocks 4.26 (a copy reads and writes 4.22).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from dmattn_ops.call import TILE
from dmattn_ops.kernels.masks.lists import Traits, list_tiles_kernel, segment_ranges
from dmattn_ops.kernels.masks.pack import pack_tiles
from dmattn_ops.kernels.masks.ranks import rank_tiles, sizes_of
from dmattn_ops.kernels.portable.arguments import broadcast_stride
from dmattn_ops.launching.launch import computed, launch, workspace

_BYTES = (torch.bool, torch.uint8, torch.int8)
_LONGEST_ROW = 1 << 26  # bytes from row to row with which the words of a tile have 32-bit offsets
_LISTS = 16  # lists that one program writes
_RANKED_TILES = 128  # up to this many tiles a side, the program that writes the lists also sorts them by length
_RANGE_TILES = 8  # tiles of segments in a program of `segment_ranges`


def pack_mask(
    mask: Tensor,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    seqlen_q: int,
    band_lo: int,
    band_hi: int,
    row_tiles: Tensor,
    col_tiles: Tensor,
    row_bits: Tensor,
    col_bits: Tensor,
) -> None:
    """Write the lists and bits of a dense mask `[Bm, Hm, Sq or 1, Sk]` where segments and band hold too."""
    batch, heads = row_tiles.shape[:2]
    seqlen_k = mask.shape[3]
    row_count, col_count = triton.cdiv(seqlen_q, TILE), triton.cdiv(seqlen_k, TILE)
    mask = _as_bytes(mask)
    strides = [broadcast_stride(mask, dim) for dim in range(3)]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
    skew = mask.data_ptr() % 16
    aligned = not any(number % 16 for number in (skew, seqlen_k, *strides)) and strides[2] < _LONGEST_ROW
    q_segments = None if q_segments is None else _contiguous(q_segments)
    k_segments = None if k_segments is None else _contiguous(k_segments)
    classes = workspace(mask, batch * heads, row_count, col_count, dtype=torch.int8)
    programs = batch * heads * triton.cdiv(row_count, 2) * triton.cdiv(col_count, 2)
    if programs:
        launch(
            pack_tiles, (programs,),
            mask, skew % 4, mask if q_segments is None else q_segments, mask if k_segments is None else k_segments,
            classes, row_bits, col_bits, seqlen_q, seqlen_k, band_lo, band_hi, heads, row_count, col_count,
            *strides, extent, broadcast_stride(q_segments, 0), broadcast_stride(k_segments, 0), broadcast_stride(k_segments, 1),
            ALIGNED=aligned, HAS_Q_SEGMENTS=q_segments is not None, HAS_K_SEGMENTS=k_segments is not None, num_warps=8,
        )  # fmt: skip
    write_lists(classes, seqlen_q, seqlen_k, band_lo, band_hi, row_tiles, col_tiles, "classes")


def list_tiles(
    q_segments: Tensor | None,
    k_segments: Tensor,
    seqlen_q: int,
    band_lo: int,
    band_hi: int,
    row_tiles: Tensor,
    col_tiles: Tensor,
) -> None:
    """Write the lists of `[B|1, Sq]` and `[B|1, Hm, Sk]` segments inside the band."""
    seqlen_k = k_segments.shape[2]
    row_count, col_count = triton.cdiv(seqlen_q, TILE), triton.cdiv(seqlen_k, TILE)
    q_tiles = 0 if q_segments is None else q_segments.shape[0] * row_count
    k_tiles = k_segments.shape[0] * k_segments.shape[1] * col_count
    ranges = workspace(k_segments, q_tiles + k_tiles, 2, dtype=torch.int32)
    programs = triton.cdiv(q_tiles, _RANGE_TILES) + triton.cdiv(k_tiles, _RANGE_TILES)
    if programs:
        k_segments = _contiguous(k_segments)
        launch(
            segment_ranges, (programs,),
            k_segments if q_segments is None else _contiguous(q_segments), k_segments, ranges,
            seqlen_q, seqlen_k, q_tiles, k_tiles, row_count, col_count, TILES=_RANGE_TILES, num_warps=4,
        )  # fmt: skip
    strides = (
        q_tiles,
        0 if q_segments is None or q_segments.shape[0] == 1 else row_count,
        0 if k_segments.shape[0] == 1 else k_segments.shape[1] * col_count,
        0 if k_segments.shape[1] == 1 else col_count,
    )
    write_lists(ranges, seqlen_q, seqlen_k, band_lo, band_hi, row_tiles, col_tiles, "ranges", strides)


def write_lists(
    source: Tensor,
    seqlen_q: int,
    seqlen_k: int,
    band_lo: int,
    band_hi: int,
    row_tiles: Tensor | None,
    col_tiles: Tensor | None,
    made_from: str,
    range_strides: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> None:
    """Write the lists from "classes" `[Bm * Hm, nQ, nK]`, "hulls" `[Bm * Hm, nK, 8]`, or "ranges" of segments.

    Those of a side that is None are not written.
    """
    sizes = sizes_of(row_tiles, col_tiles)
    other, ranked, warps = blocks_of(made_from, max(sizes.row_records, sizes.col_records))
    blocks = triton.cdiv(sizes.row_records, _LISTS) + triton.cdiv(sizes.col_records, _LISTS)
    programs = sizes.batch * sizes.heads * blocks
    if not programs:
        return
    q_tiles, *strides = range_strides
    launch(
        list_tiles_kernel, (programs,),
        source, col_tiles if row_tiles is None else row_tiles, row_tiles if col_tiles is None else col_tiles,
        seqlen_q, seqlen_k, band_lo, band_hi, sizes.heads,
        sizes.row_records, sizes.col_records, sizes.row_width, sizes.col_width, q_tiles, *strides,
        T=Traits(made_from, q_tiles > 0, _LISTS, other, ranked), num_warps=warps, follows=made_from == "hulls",
    )  # fmt: skip
    if not ranked:
        rank_tiles(row_tiles, col_tiles)


def blocks_of(made_from: str, longest: int) -> tuple[int, int, int]:
    """Return how many tiles a program classifies at a time, how many records it ranks (0: another kernel does), and its warps."""
    if made_from == "ranges":
        return (_LISTS, _LISTS, 2) if longest <= _LISTS else (128, 0, 8)
    if longest <= 64:
        return 64, 64, 8
    return (64, _RANKED_TILES, 16) if made_from == "classes" and longest <= _RANKED_TILES else (128, 0, 8)


def _as_bytes(mask: Tensor) -> Tensor:
    """Return a mask of one-byte elements with a contiguous last dimension: itself, or a copy."""
    if mask.dtype not in _BYTES:  # one path instead of two: 1.13 times the time of reading 4 bytes directly, H200
        mask = computed(torch.ne, mask, 0)
    if mask.stride(3) != 1 and mask.shape[3] != 1:
        mask = computed(Tensor.contiguous, mask)
    return mask.view(torch.uint8)


def _contiguous(segments: Tensor) -> Tensor:
    return segments if segments.is_contiguous() else computed(Tensor.contiguous, segments)
