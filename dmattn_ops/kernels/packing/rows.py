"""Rows of packed keys: copied into their slots, summed over their slots, and rows of queries whose promise was broken."""

from __future__ import annotations

import triton
import triton.language as tl

from dmattn_ops import problem

TILE = tl.constexpr(problem.TILE)
UNSPECIALIZED = (
    *(f"{name}_{dim}" for name in ("source", "second_source", "target", "second_target", "slot", "offsets", "places", "broken")
      for dim in "bsh"),
    "source_group", "slot_group", "first_head", "heads", "blocks", "slots", "group_b", "group_h", "epochs", "epoch",
    "seqlen_q", "seqlen_k",
)  # fmt: skip


@triton.jit
def _row_pointers(pointer, row, stride, PADDED: tl.constexpr, ALIGNED: tl.constexpr):
    """Return pointers `[rows, PADDED]`. `ALIGNED`: every row starts at a multiple of 16 bytes."""
    pointers = pointer + (row.to(tl.int64) * stride)[:, None] + tl.arange(0, PADDED)[None, :]
    if ALIGNED:
        pointers = tl.multiple_of(pointers, [1, 16])
    return pointers


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gather_kernel(
    source, slot_keys, target,
    source_b, source_s, source_h, source_group, slot_b, slot_h, slot_group, target_b, target_s, target_h,
    first_head, heads, blocks,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Copy the rows of the keys of 128 slots; zeros for unused slots; nothing at all where no slot is used."""
    block = tl.program_id(0) % blocks
    h = tl.program_id(0) // blocks % heads
    b = (tl.program_id(0) // blocks // heads).to(tl.int64)
    slot_keys += b * slot_b + (h // slot_group).to(tl.int64) * slot_h + block.to(tl.int64) * TILE
    if tl.max(tl.load(slot_keys + tl.arange(0, TILE)), axis=0) >= 0:
        source += b * source_b + ((first_head + h) // source_group).to(tl.int64) * source_h
        target += b * target_b + h.to(tl.int64) * target_h + block.to(tl.int64) * TILE * target_s
        for at in tl.static_range(0, TILE, ROWS):
            row = at + tl.arange(0, ROWS)
            key = tl.load(slot_keys + row)
            inside = tl.broadcast_to((key >= 0)[:, None], [ROWS, PADDED])
            if WIDTH != PADDED:
                inside = inside & (tl.arange(0, PADDED) < WIDTH)[None, :]
            copied = tl.load(_row_pointers(source, key, source_s, PADDED, ALIGNED), inside, other=0.0)
            pointers = _row_pointers(target, row, target_s, PADDED, ALIGNED)
            if WIDTH != PADDED:
                tl.store(pointers, copied, (tl.arange(0, PADDED) < WIDTH)[None, :])
            else:
                tl.store(pointers, copied)


@triton.jit
def _place(places, begin, index, count, capacity):
    """Return the slots of keys in the `index`-th of their epochs; -1 where they have fewer."""
    place = begin + index
    return tl.load(places + place, (index < count) & (place >= 0) & (place < capacity), other=-1)


@triton.jit
def _sum_pointers(target, b, h, key, inside, strides, WIDTH: tl.constexpr, PADDED: tl.constexpr, ALIGNED: tl.constexpr):
    """Return where the rows of keys of a head lie, and which of their elements there are."""
    written = tl.broadcast_to(inside[:, None], [inside.shape[0], PADDED])
    if WIDTH != PADDED:
        written = written & (tl.arange(0, PADDED) < WIDTH)[None, :]
    target += b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[2]
    return _row_pointers(target, key, strides[1], PADDED, ALIGNED), written


@triton.jit
def _slot_rows(source, b, h, slot, used, strides, WIDTH: tl.constexpr, PADDED: tl.constexpr, ALIGNED: tl.constexpr):
    """Return rows of a head of slots in float32, zeros where none is used."""
    added = tl.broadcast_to(used[:, None], [used.shape[0], PADDED])
    if WIDTH != PADDED:
        added = added & (tl.arange(0, PADDED) < WIDTH)[None, :]
    rows = source + b * strides[0] + h.to(tl.int64) * strides[2]
    return tl.load(_row_pointers(rows, slot, strides[1], PADDED, ALIGNED), added, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def sum_kernel(
    source, second_source, offsets, places, target, second_target,
    source_b, source_s, source_h, second_source_b, second_source_s, second_source_h,
    offsets_b, offsets_h, places_b, places_h, slot_group,
    target_b, target_s, target_h, second_target_b, second_target_s, second_target_h,
    first_head, heads, group_b, group_h, seqlen_k, slots, blocks,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, SECOND_WIDTH: tl.constexpr,
    SECOND_PADDED: tl.constexpr, ALIGNED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Write, for `KEYS` keys, the sums of the rows of their slots: over batch and heads of a group, then over epochs.

    Sums are float32, in this order, and rounded once. `ADD`: they begin with what the target holds. A second tensor of
    the same slots, where there is one (not None), is summed beside the first, so that twice as many loads are on their way.
    """
    block = tl.program_id(0) % blocks
    h = tl.program_id(0) // blocks % heads
    b = tl.program_id(0) // blocks // heads
    key = block * KEYS + tl.arange(0, KEYS)
    inside = key < seqlen_k
    source_strides = (source_b, source_s, source_h)
    outputs, written = _sum_pointers(
        target, b, first_head + h, key, inside, (target_b, target_s, target_h), WIDTH, PADDED, ALIGNED
    )
    if ADD:
        total = tl.load(outputs, written, other=0.0).to(tl.float32)
    else:
        total = tl.zeros([KEYS, PADDED], tl.float32)
    if second_source is not None:
        second_strides = (second_source_b, second_source_s, second_source_h)
        second_outputs, second_written = _sum_pointers(
            second_target, b, first_head + h, key, inside, (second_target_b, second_target_s, second_target_h),
            SECOND_WIDTH, SECOND_PADDED, ALIGNED,
        )  # fmt: skip
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
            added = _slot_rows(source, source_batch, source_head, slot, used, source_strides, WIDTH, PADDED, ALIGNED)
            if second_source is not None:
                second_total += _slot_rows(
                    second_source, source_batch, source_head, slot, used, second_strides,
                    SECOND_WIDTH, SECOND_PADDED, ALIGNED,
                )  # fmt: skip
            total += added
            slot = following
    tl.store(outputs, total.to(target.dtype.element_ty), written)
    if second_source is not None:
        tl.store(second_outputs, second_total.to(second_target.dtype.element_ty), second_written)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def spoil_kernel(
    broken, target, broken_b, broken_h, slot_group, target_b, target_s, target_h, heads, epochs, epoch, seqlen_q,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Write NaN into the rows of the queries of an epoch in which the promise was broken. A program is one epoch."""
    e = tl.program_id(0) % epochs
    h = tl.program_id(0) // epochs % heads
    b = (tl.program_id(0) // epochs // heads).to(tl.int64)
    if tl.load(broken + b * broken_b + (h // slot_group).to(tl.int64) * broken_h + e) != 0:
        target += b * target_b + h.to(tl.int64) * target_h
        nan = tl.full([ROWS, PADDED], float("nan"), tl.float32).to(target.dtype.element_ty)
        behind = tl.minimum((e + 1) * epoch, seqlen_q)
        for at in range(e * epoch, behind, ROWS):
            row = at + tl.arange(0, ROWS)
            inside = (row < behind)[:, None] & (tl.arange(0, PADDED) < WIDTH)[None, :]
            tl.store(_row_pointers(target, row, target_s, PADDED, False), nan, inside)
