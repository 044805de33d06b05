"""Rows of packed keys: copied into their slots, summed over their slots, and rows of queries whose promise was broken."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dmattn_ops.call import TILE as _TILE
from dmattn_ops.kernels.masks.ranks import rank_block
from dmattn_ops.launching.overlap import follow_kernel_before

TILE = tl.constexpr(_TILE)
UNSPECIALIZED = (
    *(f"{name}_{dim}" for name in ("source", "second_source", "target", "second_target", "slot", "offsets", "places", "broken")
      for dim in "bsh"),
    "source_group", "slot_group", "first_head", "heads", "blocks", "slots", "group_b", "group_h", "epochs", "epoch",
    "seqlen_q", "seqlen_k", "ranking", "row_records", "col_records", "row_width", "col_width",
)  # fmt: skip


class Strides(NamedTuple):
    """The strides of `[B, S, heads, D]`."""

    batch: Any
    row: Any
    head: Any


@triton.jit
def _row_pointers(pointer, row, stride, PADDED: tl.constexpr, ALIGNED: tl.constexpr):
    """Return pointers `[rows, PADDED]`. `ALIGNED`: every row starts at a multiple of 16 bytes."""
    pointers = pointer + (row.to(tl.int64) * stride)[:, None] + tl.arange(0, PADDED)[None, :]
    if ALIGNED:
        pointers = tl.multiple_of(pointers, [1, 16])
    return pointers


@triton.jit
def _copy_rows(source, target, key, row, source_s, target_s, block: tl.constexpr):
    """Return the rows of keys, zeros where there is none, where they go, and which of their elements there are."""
    PADDED: tl.constexpr = block.padded
    WIDTH: tl.constexpr = block.width
    ALIGNED: tl.constexpr = block.aligned
    inside = tl.broadcast_to((key >= 0)[:, None], [key.shape[0], PADDED])
    written = tl.full([key.shape[0], PADDED], True, tl.int1)
    if WIDTH != PADDED:
        written = tl.broadcast_to((tl.arange(0, PADDED) < WIDTH)[None, :], [key.shape[0], PADDED])
        inside = inside & written
    copied = tl.load(_row_pointers(source, key, source_s, PADDED, ALIGNED), inside, other=0.0)
    return copied, _row_pointers(target, row, target_s, PADDED, ALIGNED), written


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gather_kernel(
    source, second_source, slot_keys, target, second_target, row_tiles, col_tiles,
    source_b, source_s, source_h, second_source_b, second_source_s, second_source_h, source_group,
    slot_b, slot_h, slot_group,
    target_b, target_s, target_h, second_target_b, second_target_s, second_target_h, first_head, heads, blocks,
    ranking, row_records, col_records, row_width, col_width,
    rows: tl.constexpr, second_rows: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """Copy the rows of the keys of 128 slots; zeros for unused slots; nothing at all where no slot is used.

    A second tensor of the same keys, where there is one (not None), is copied beside the first. The first `ranking`
    programs rank `RANKED` tiles each instead, which attention needs next as well and takes no launch this way.
    """
    follow_kernel_before()
    if tl.program_id(0) < ranking:
        if RANKED > 0:
            rank_block(
                tl.program_id(0), row_tiles, col_tiles, row_records, col_records, row_width, col_width, RANKED, RANKED
            )
    else:
        index = tl.program_id(0) - ranking
        block = index % blocks
        h = index // blocks % heads
        b = (index // blocks // heads).to(tl.int64)
        slot_keys += b * slot_b + (h // slot_group).to(tl.int64) * slot_h + block.to(tl.int64) * TILE
        if tl.max(tl.load(slot_keys + tl.arange(0, TILE)), axis=0) >= 0:
            source_head, first_row = ((first_head + h) // source_group).to(tl.int64), block.to(tl.int64) * TILE
            source += b * source_b + source_head * source_h
            target += b * target_b + h.to(tl.int64) * target_h + first_row * target_s
            if second_source is not None:
                second_source += b * second_source_b + source_head * second_source_h
                second_target += b * second_target_b + h.to(tl.int64) * second_target_h + first_row * second_target_s
            ROWS: tl.constexpr = rows.length
            for at in tl.static_range(0, TILE, ROWS):
                row = at + tl.arange(0, ROWS)
                key = tl.load(slot_keys + row)
                copied, pointers, written = _copy_rows(source, target, key, row, source_s, target_s, rows)
                if second_source is not None:  # both are on their way before one is written
                    second_copied, second_pointers, second_written = _copy_rows(
                        second_source, second_target, key, row, second_source_s, second_target_s, second_rows
                    )
                    tl.store(second_pointers, second_copied, second_written)
                tl.store(pointers, copied, written)


@triton.jit
def _place(places, begin, index, count, capacity):
    """Return the slots of keys in the `index`-th of their epochs; -1 where they have fewer."""
    place = begin + index
    return tl.load(places + place, (index < count) & (place >= 0) & (place < capacity), other=-1)


@triton.jit
def _elements(inside, block: tl.constexpr):
    """Return which elements `[rows, PADDED]` of a block of rows there are: the columns of rows that are `inside`."""
    elements = tl.broadcast_to(inside[:, None], [inside.shape[0], block.padded])
    if block.width != block.padded:
        elements = elements & (tl.arange(0, block.padded) < block.width)[None, :]
    return elements


@triton.jit
def _sum_pointers(target, b, h, key, inside, strides, block: tl.constexpr):
    """Return where the rows of keys of a head lie, and which of their elements there are."""
    PADDED: tl.constexpr = block.padded
    written = _elements(inside, block)
    target += b.to(tl.int64) * strides.batch + h.to(tl.int64) * strides.head
    return _row_pointers(target, key, strides.row, PADDED, block.aligned), written


@triton.jit
def _slot_rows(source, b, h, slot, used, strides, block: tl.constexpr):
    """Return rows of a head of slots in float32, zeros where none is used."""
    PADDED: tl.constexpr = block.padded
    added = _elements(used, block)
    rows = source + b * strides.batch + h.to(tl.int64) * strides.head
    return tl.load(_row_pointers(rows, slot, strides.row, PADDED, block.aligned), added, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def sum_kernel(
    source, second_source, offsets, places, target, second_target,
    source_b, source_s, source_h, second_source_b, second_source_s, second_source_h,
    offsets_b, offsets_h, places_b, places_h, slot_group,
    target_b, target_s, target_h, second_target_b, second_target_s, second_target_h,
    first_head, heads, group_b, group_h, seqlen_k, slots, blocks,
    rows: tl.constexpr, second_rows: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Write, for `rows.length` keys, the sums of the rows of their slots: over batch and heads of a group, then over epochs.

    Sums are float32, in this order, and rounded once. `ADD`: they begin with what the target holds. A second tensor of
    the same slots, where there is one (not None), is summed beside the first, so that twice as many loads are on their way.
    """
    KEYS: tl.constexpr = rows.length
    PADDED: tl.constexpr = rows.padded
    SECOND_PADDED: tl.constexpr = second_rows.padded
    block = tl.program_id(0) % blocks
    h = tl.program_id(0) // blocks % heads
    b = tl.program_id(0) // blocks // heads
    key = block * KEYS + tl.arange(0, KEYS)
    inside = key < seqlen_k
    source_strides = Strides(source_b, source_s, source_h)
    strides = Strides(target_b, target_s, target_h)
    outputs, written = _sum_pointers(target, b, first_head + h, key, inside, strides, rows)
    if ADD:
        total = tl.load(outputs, written, other=0.0).to(tl.float32)
    else:
        total = tl.zeros([KEYS, PADDED], tl.float32)
    if second_source is not None:
        second_strides = Strides(second_source_b, second_source_s, second_source_h)
        strides = Strides(second_target_b, second_target_s, second_target_h)
        second_outputs, second_written = _sum_pointers(
            second_target, b, first_head + h, key, inside, strides, second_rows
        )
        second_total = tl.zeros([KEYS, SECOND_PADDED], tl.float32)
    for member in range(group_b * group_h):
        source_batch = (b * group_b + member // group_h).to(tl.int64)
        source_head = h * group_h + member % group_h
        slot_head = (source_head // slot_group).to(tl.int64)
        own_offsets = offsets + source_batch * offsets_b + slot_head * offsets_h + key
        own_places = places + source_batch * places_b + slot_head * places_h
        begin = tl.load(own_offsets, inside, other=0)
        count = tl.load(own_offsets + 1, inside, other=0) - begin
        slot = _place(own_places, begin, 0, count, slots)
        for index in range(tl.max(count, axis=0)):
            following = _place(own_places, begin, index + 1, count, slots)  # on its way while the rows are added
            used = (slot >= 0) & (slot < slots)
            added = _slot_rows(source, source_batch, source_head, slot, used, source_strides, rows)
            if second_source is not None:
                second_total += _slot_rows(
                    second_source, source_batch, source_head, slot, used, second_strides, second_rows
                )
            total += added
            slot = following
    tl.store(outputs, total.to(target.dtype.element_ty), written)
    if second_source is not None:
        tl.store(second_outputs, second_total.to(second_target.dtype.element_ty), second_written)


@triton.jit
def _poison_rows(target, first, behind, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Write NaN into rows `first` to `behind - 1`."""
    nan = tl.full([ROWS, PADDED], float("nan"), tl.float32).to(target.dtype.element_ty)
    for at in range(first, behind, ROWS):
        row = at + tl.arange(0, ROWS)
        inside = (row < behind)[:, None] & (tl.arange(0, PADDED) < WIDTH)[None, :]
        tl.store(_row_pointers(target, row, stride, PADDED, False), nan, inside)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def poison_kernel(
    broken, target, second_target, broken_b, broken_h, slot_group,
    target_b, target_s, target_h, second_target_b, second_target_s, second_target_h, heads, epochs, epoch, seqlen_q,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Write NaN into the rows of the queries of an epoch in which the promise was broken. A program is one epoch.

    The rows of the second tensor are single numbers.
    """
    follow_kernel_before()
    e = tl.program_id(0) % epochs
    h = tl.program_id(0) // epochs % heads
    b = (tl.program_id(0) // epochs // heads).to(tl.int64)
    if tl.load(broken + b * broken_b + (h // slot_group).to(tl.int64) * broken_h + e) != 0:
        behind = tl.minimum((e + 1) * epoch, seqlen_q)
        target += b * target_b + h.to(tl.int64) * target_h
        _poison_rows(target, e * epoch, behind, target_s, ROWS, WIDTH, PADDED)
        second_target += b * second_target_b + h.to(tl.int64) * second_target_h
        _poison_rows(second_target, e * epoch, behind, second_target_s, ROWS * PADDED, 1, 1)
