"""Blocks of rows, statistics and scores of the portable kernels, loaded and stored."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dmattn_ops.kernels.portable.places import head_rows


class Rows(NamedTuple):
    """One head of `[B, S, heads, D]`, from the first row of its sequence on."""

    pointer: Any
    stride: Any


class Array(NamedTuple):
    """A tensor `[B, S, heads, D]`, or `[B, heads, S]` of numbers, with strides."""

    start: Any
    batch: Any  # strides
    row: Any
    head: Any


class KeyRows(NamedTuple):
    """The keys and values of one key head."""

    key: Any  # Rows
    value: Any  # Rows


class Statistics(NamedTuple):
    """Statistics of rows of queries for the gradient of scores (`statistics.RowStatistics`): pointers, or a loaded block."""

    log_sum: Any
    log_rest: Any
    delta: Any


@triton.jit
def rows_of(pointer, stride_b, stride_s, stride_h, batch, head, begin):
    """Return the rows of one head of `[B, S, heads, D]`, from row `begin` on."""
    return Rows(head_rows(pointer, batch, head, begin, stride_b, stride_s, stride_h), stride_s)


@triton.jit
def rows_in(array, batch, head, begin):
    """Return the rows of one head of an `Array`, from row `begin` on."""
    return rows_of(array.start, array.batch, array.row, array.head, batch, head, begin)


@triton.jit
def statistics_of(log_sum, log_rest, delta, first):
    """Return the statistics from element `first` on."""
    return Statistics(log_sum + first, log_rest + first, delta + first)


@triton.jit
def load_rows(
    rows, start, end, block: tl.constexpr, CHECKED: tl.constexpr, begin=0, BEGUN: tl.constexpr = False, seen=None
):
    """Load rows `start ...` as a `block` (`arguments.RowBlock`): 0 past its width, and past row `end` where `CHECKED`.

    Checked rows are 0 also before row `begin` where `BEGUN`, and where `seen` `[count]` is not set, unless that is None.

    `aligned` rows start at multiples of 16 bytes. Triton sees that by itself only of strides that are multiples of 16
    elements; 8 (head dimensions 40, 72 ...) are enough for 16-byte loads.
    """
    row = tl.arange(0, block.length)
    columns = tl.arange(0, block.padded)
    offsets = row.to(tl.int64)[:, None] * rows.stride + columns[None, :]
    pointers = rows.pointer + start.to(tl.int64) * rows.stride + offsets
    if block.aligned:
        pointers = tl.multiple_of(pointers, [1, 16])
    if CHECKED:
        inside = (start + row < end)[:, None]
        if BEGUN:
            inside = inside & (start + row >= begin)[:, None]
        if seen is not None:
            inside = inside & seen[:, None]
        if block.width != block.padded:
            inside = inside & (columns < block.width)[None, :]
        values = tl.load(pointers, mask=inside, other=0.0)
    elif block.width != block.padded:
        values = tl.load(pointers, mask=(columns < block.width)[None, :], other=0.0)
    else:
        values = tl.load(pointers)
    return values


@triton.jit
def store_rows(rows, start, end, values, block: tl.constexpr):
    """Store `values` as a `block` of rows `start ...`, up to row `end` and the block's width."""
    row = tl.arange(0, block.length)
    columns = tl.arange(0, block.padded)
    offsets = row.to(tl.int64)[:, None] * rows.stride + columns[None, :]
    inside = (start + row < end)[:, None]
    if block.width != block.padded:
        inside = inside & (columns < block.width)[None, :]
    pointers = rows.pointer + start.to(tl.int64) * rows.stride + offsets
    if block.aligned:
        pointers = tl.multiple_of(pointers, [1, 16])
    tl.store(pointers, values.to(rows.pointer.dtype.element_ty), mask=inside)


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
def store_scores(scores, block, queries, keys, place):
    """Store a block `[queries, keys]` of one head's `scores` `[Sq, Sk]`, laid out like a bias, up to the ends of a `place`."""
    query_offsets, key_offsets = queries.to(tl.int64) * scores.query_stride, keys.to(tl.int64)
    pointers = scores.start + query_offsets[:, None] + key_offsets[None, :]
    inside = (queries < place.length_q)[:, None] & (keys < place.length_k)[None, :]
    tl.store(pointers, block.to(scores.start.dtype.element_ty), mask=inside)
