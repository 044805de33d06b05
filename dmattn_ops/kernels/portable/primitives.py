"""Blocks of rows of the portable kernels, and what a compiled kernel is told of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Shape(NamedTuple):
    """The blocks of a kernel: all constexpr."""

    block_m: Any  # queries
    block_n: Any  # keys
    head_dim: Any
    value_dim: Any
    padded_head: Any  # powers of two
    padded_value: Any
    aligned: Any  # every row starts at a multiple of 16 bytes


class Features(NamedTuple):
    """What a call asks for: all constexpr."""

    listed: Any  # lists of tiles say where the mask shows something
    mask: Any  # "none", "bits", "segments" or "intervals"
    query_segments: Any
    hidden: Any  # intervals have a hidden one
    banded: Any
    bias: Any  # "none", "key" or "full"
    natural: Any  # scores are in natural units, not in those of log2
    softcap: Any
    dropout: Any
    whole_groups: Any  # of four weights that share an evaluation of Philox
    precision: Any  # of products of float32


class Rows(NamedTuple):
    """One head of `[B, S, heads, D]`, from the first row of its sequence on."""

    pointer: Any
    stride: Any


@triton.jit
def load_rows(
    rows,
    start,
    end,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHECKED: tl.constexpr,
    begin=0,
    BEGUN: tl.constexpr = False,
    seen=0,
    SEEN: tl.constexpr = False,
):
    """Load rows `start ...` as `[COUNT, PADDED]`: 0 past `WIDTH`, and past row `end` where `CHECKED`.

    Checked rows are 0 before row `begin` too where `BEGUN`, and where `seen` `[COUNT]` is not set where `SEEN`.

    `ALIGNED`: every row starts at a multiple of 16 bytes. Triton sees that by itself only of strides that are multiples
    of 16 elements; 8 (head dimensions 40, 72 ...) are enough for 16-byte loads.
    """
    row = tl.arange(0, COUNT)
    columns = tl.arange(0, PADDED)
    offsets = row.to(tl.int64)[:, None] * rows.stride + columns[None, :]
    pointers = rows.pointer + start.to(tl.int64) * rows.stride + offsets
    if ALIGNED:
        pointers = tl.multiple_of(pointers, [1, 16])
    if CHECKED:
        inside = (start + row < end)[:, None]
        if BEGUN:
            inside = inside & (start + row >= begin)[:, None]
        if SEEN:
            inside = inside & seen[:, None]
        if WIDTH != PADDED:
            inside = inside & (columns < WIDTH)[None, :]
        block = tl.load(pointers, mask=inside, other=0.0)
    elif WIDTH != PADDED:
        block = tl.load(pointers, mask=(columns < WIDTH)[None, :], other=0.0)
    else:
        block = tl.load(pointers)
    return block


@triton.jit
def store_rows(
    rows,
    start,
    end,
    block,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Store `[COUNT, PADDED]` at rows `start ...`, up to row `end` and column `WIDTH`."""
    row = tl.arange(0, COUNT)
    columns = tl.arange(0, PADDED)
    offsets = row.to(tl.int64)[:, None] * rows.stride + columns[None, :]
    inside = (start + row < end)[:, None]
    if WIDTH != PADDED:
        inside = inside & (columns < WIDTH)[None, :]
    pointers = rows.pointer + start.to(tl.int64) * rows.stride + offsets
    if ALIGNED:
        pointers = tl.multiple_of(pointers, [1, 16])
    tl.store(pointers, block.to(rows.pointer.dtype.element_ty), mask=inside)


@triton.jit
def load_statistics(pointer, start, end, default, COUNT: tl.constexpr, CHECKED: tl.constexpr):
    """Load a statistic `[COUNT]` of rows `start ...`; `default` past `end` where `CHECKED`."""
    row = start + tl.arange(0, COUNT)
    if CHECKED:
        statistic = tl.load(pointer + row, mask=row < end, other=default)
    else:
        statistic = tl.load(pointer + row)
    return statistic


@triton.jit
def store_scores(
    pointer,
    query_stride,
    key_stride,
    query_first,
    key_first,
    query_end,
    key_end,
    block,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Store a block `[QUERIES, KEYS]` of `[Sq, Sk]`, up to the ends."""
    queries = query_first + tl.arange(0, QUERIES)
    keys = key_first + tl.arange(0, KEYS)
    pointers = pointer + (queries.to(tl.int64) * query_stride)[:, None] + (keys.to(tl.int64) * key_stride)[None, :]
    inside = (queries < query_end)[:, None] & (keys < key_end)[None, :]
    tl.store(pointers, block.to(pointer.dtype.element_ty), mask=inside)
