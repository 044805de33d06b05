"""Pack keys, and sum what their slots got. What is decided from sizes stands in `dmattn_ops.choice.epochs`.

1. `plan_slots` finds the keys of each epoch and lists tiles (with `inverse=True` where sums are to follow);
2. `gather_rows` copies key and value into their slots, `gather_bias` a bias per key;
3. attention runs on the copies, with `Slots.row_tiles`, `Slots.col_tiles`, `Slots.start` and `Slots.end` as its mask;
4. `poison_rows` writes NaN into the rows of out and lse for which the promise `at_most` did not hold;
5. `sum_rows` and `sum_bias` turn the gradients of slots into those of keys.

`Hp` packed heads are the key heads where the mask has one head or one for each key head, else the query heads. All of this
works on a range of them, so that one workspace after the other serves a few heads. Nothing is read on the host.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
from torch import Tensor

from dmattn_ops.call import HEADER, TILE, rows_are_aligned
from dmattn_ops.choice.epochs import Epochs
from dmattn_ops.kernels.epochs.rows import gather_kernel, poison_kernel, sum_kernel
from dmattn_ops.kernels.epochs.slots import Planned, division_by, plan_epochs
from dmattn_ops.kernels.masks.ranks import RANKED_AT_ONCE, rank_blocks
from dmattn_ops.kernels.portable.arguments import RowBlock, broadcast_stride
from dmattn_ops.launching.launch import computed, launch, workspace

PLANNED = Planned(keys=1024, listed=1024, born=1024, blocks=16, own=16, other=32)
PLANNING_WARPS = 8  # 16 issue a third more instructions for 1024 keys; 2 programs fit a multiprocessor
_BUCKETS = 32  # at most: deaths are told apart by 128 queries, by 256 in epochs of more than 31 tiles, and so on
_COPIED = 32768  # bytes of rows that a program copies at once
# Elements of rows that a program of one warp sums. Its loop is as long as its longest-lived key: few keys, many programs.
_SUMMED = 256


class Slots(NamedTuple):
    """Where the keys of a mask lie in their packed copies; the heads are those of a range, or the mask's only one.

    Unused slots have no key (-1) and an empty interval (0, 0). Blocks of 128 slots that no list names have no defined rows.
    """

    keys: Tensor  # [Bm, Hm, slots] int32: the key of each slot
    start: Tensor  # [Bm, Hm, slots] int32: the queries of its epoch that see it
    end: Tensor  # [Bm, Hm, slots] int32
    row_tiles: Tensor  # [Bm, Hm, nQ, 4 + blocks of slots of an epoch] int32
    col_tiles: Tensor  # [Bm, Hm, slots / 128, 4 + query tiles of an epoch] int32
    broken: Tensor  # [Bm, Hm, epochs] int32: not 0 where an epoch began with more keys than it has slots for
    offsets: Tensor | None  # [Bm, Hm, Sk + 1] int32: where the slots of a key begin in `places`
    places: Tensor | None  # [Bm, Hm, slots] int32: the slots of each key, in ascending order of epochs
    epoch: int  # queries


def plan_slots(
    start: Tensor | None,
    end: Tensor,
    cut: Epochs,
    seqlen_q: int,
    band_lo: int,
    band_hi: int,
    first_head: int,
    heads: int,
    *,
    inverse: bool,
) -> Slots:
    """Find the keys `[B|1, H|Hkv|1, Sk]` with `start <= i < end`, inside the band, of each epoch; list their tiles.

    `start` is None where intervals begin with the band.
    `heads` heads from `first_head` on: packed heads, or 0 and 1 where the mask has one head. `band_hi` says where keys
    are born: the diagonal of a causal mask, also where the mask's `start` says the same. `inverse`: `sum_rows` is to follow.
    """
    batch, mask_heads = (max(end.shape[dim], 1 if start is None else start.shape[dim]) for dim in (0, 1))
    seqlen_k, matrices = end.shape[2], batch * heads
    of_slots, of_epochs, of_old, blocks = (cut.slots,), (cut.number,), (cut.number, cut.old_slots), cut.slots // TILE
    room = _integers(
        end, (batch, heads), of_slots, of_slots, of_slots, of_epochs, of_old,
        (triton.cdiv(seqlen_q, TILE), HEADER + cut.slots_per_epoch // TILE), (blocks, HEADER + cut.length // TILE),
        (blocks, 4), *(((seqlen_k + 1,), of_slots, of_old) if inverse else ()),
    )  # fmt: skip
    keys, starts, ends, broken, listed, row_tiles, col_tiles, hulls = room[:8]
    offsets, places, listed_places = room[8:] if inverse else (None, None, None)
    if matrices * cut.number:
        bucket = TILE * triton.cdiv(cut.length // TILE, _BUCKETS - 1)
        launch(
            plan_epochs, (matrices * cut.number,),
            start, end, listed, listed_places, keys, starts, ends, broken, hulls, row_tiles, col_tiles, offsets, places,
            *_head_places(start, mask_heads), *_head_places(end, mask_heads), first_head, heads,
            cut.number, cut.length, cut.old_slots, cut.born_slots, seqlen_q, seqlen_k, band_lo, band_hi,
            bucket, *division_by(cut.length), row_tiles.shape[2], row_tiles.shape[3], col_tiles.shape[3],
            INVERSE=inverse, BUCKETS=triton.next_power_of_2(triton.cdiv(cut.length, bucket) + 1), planned=PLANNED,
            num_warps=PLANNING_WARPS,
        )  # fmt: skip
    elif offsets is not None:  # no queries: no key has a slot
        computed(Tensor.zero_, offsets)
    return Slots(keys, starts, ends, row_tiles, col_tiles, broken, offsets, places, cut.length)


def _head_places(limits: Tensor | None, mask_heads: int) -> tuple[int, int, int]:
    """Return the strides of batch and heads of `[B|1, heads|1, Sk]`, and how many heads of the mask share one of it."""
    if limits is None:
        return 0, 0, 1
    return broadcast_stride(limits, 0), broadcast_stride(limits, 1), mask_heads // max(1, limits.shape[1])


def gather_rows(
    sources: tuple[Tensor, ...], slots: Slots, heads: int, first_head: int, group: int
) -> tuple[Tensor, ...]:
    """Return the rows `[B, slots, heads, D]` of the keys in each slot, of one or two `[B, Sk, Hkv, D]`; rank `slots`' lists.

    The sources have any leading strides and dimensions D of their own. `group` packed heads copy one key head. Unused slots
    in a block that a list names are 0.
    """
    packed = tuple(
        workspace(of, of.shape[0], slots.keys.shape[2], heads, of.shape[3], dtype=of.dtype) for of in sources
    )
    _gather(sources, slots, packed, first_head, group, 1, rank=True)
    return packed


def gather_bias(bias: Tensor, slots: Slots, heads: int, first_head: int, count: int) -> Tensor:
    """Return the bias `[B', H', 1, slots]` of slots, of a bias `[B|1, H|Hkv|1, 1, Sk]`.

    It is for `count` query heads of `heads`, from `first_head` on. B' and H' are 1 where neither bias nor mask has more.
    """
    bias_heads = _bias_heads(bias.shape[1], slots.keys.shape[1], heads, first_head, count)
    batch = max(bias.shape[0], slots.keys.shape[0])
    packed = workspace(bias, batch, bias_heads.packed, 1, slots.keys.shape[2], dtype=bias.dtype)
    _gather(
        (_as_rows(bias),), slots, (_as_rows(packed),), bias_heads.first_source, bias_heads.group, bias_heads.slot_group,
        rank=False,
    )  # fmt: skip
    return packed


def sum_rows(
    packed: tuple[Tensor, ...], slots: Slots, targets: tuple[Tensor, ...], first_head: int, group: int
) -> None:
    """Write the sums over slots of `[B, slots, heads, D]` into the key heads of `[B, Sk, Hkv, D]` that they copy.

    One or two such tensors and their targets, with dimensions D of their own. The packed heads from `first_head` on are whole
    groups of `group`. Sums are float32, over the heads of a group and then over epochs in ascending order, and rounded once.
    Keys without a slot get exact zeros.
    """
    heads = packed[0].shape[2] // group
    _sum(packed, slots, targets, first_head // group, heads, group, 1, add=False)


def sum_bias(
    packed: Tensor, slots: Slots, target: Tensor, heads: int, first_head: int, count: int, *, add: bool = False
) -> None:
    """Write the sums over slots of a gradient `[B', H', 1, slots]` into a bias's `[B|1, H|Hkv|1, 1, Sk]`.

    `add`: into what is there, for a bias that several ranges of heads share.
    """
    bias_heads = _bias_heads(target.shape[1], slots.keys.shape[1], heads, first_head, count)
    into = bias_heads.first_source // bias_heads.group
    _sum(
        (_as_rows(packed),), slots, (_as_rows(target),), into, bias_heads.packed // bias_heads.group,
        bias_heads.group, bias_heads.slot_group, add=add,
    )  # fmt: skip


def poison_rows(out: Tensor, lse: Tensor, slots: Slots) -> None:
    """Write NaN into those rows of out `[B, Sq, heads, D]` and of lse `[B, heads, Sq]` whose epoch broke the promise.

    The heads are query heads of the range that `slots` was planned for.
    """
    batch, seqlen_q, heads, width = out.shape
    padded, broken = triton.next_power_of_2(max(1, width)), slots.broken
    if not lse.numel():
        return
    launch(
        poison_kernel, (batch * heads * broken.shape[2],), broken, out, lse,
        broadcast_stride(broken, 0), broadcast_stride(broken, 1), max(1, heads // broken.shape[1]),
        *out.stride()[:3], lse.stride(0), lse.stride(2), lse.stride(1), heads, broken.shape[2], slots.epoch, seqlen_q,
        ROWS=max(1, 2048 // padded), WIDTH=width, PADDED=padded, num_warps=4, follows=True,
    )  # fmt: skip


def _gather(
    sources: tuple[Tensor, ...],
    slots: Slots,
    packed: tuple[Tensor, ...],
    first_head: int,
    source_group: int,
    slot_group: int,
    *,
    rank: bool,
) -> None:
    """Copy rows into slots: packed head `h` reads head `(first_head + h) // source_group`, slots of `h // slot_group`.

    `rank`: also write the order of the slots' lists.
    """
    used = [pair for pair in zip(sources, packed, strict=True) if pair[1].numel()]
    if not used:
        return
    source, target = used[0]
    second, second_target = used[1] if len(used) > 1 else (None, None)
    batch, count, heads, _ = target.shape
    blocks = count // TILE
    (matrices, row_records, row_width), (_, col_records, col_width) = (
        (of.shape[0] * of.shape[1], *of.shape[2:]) for of in (slots.row_tiles, slots.col_tiles)
    )
    ranking = matrices * rank_blocks(row_records, col_records) if rank else 0
    bytes_of_row = sum(triton.next_power_of_2(of.shape[3]) for of, _ in used) * source.element_size()
    rows = _row_blocks(used, max(8, min(TILE, _COPIED // triton.next_power_of_2(bytes_of_row))))
    launch(
        gather_kernel, (ranking + batch * heads * blocks,), source, second, slots.keys, target, second_target,
        slots.row_tiles, slots.col_tiles,
        *_source_strides(source), *_source_strides(second), source_group,
        broadcast_stride(slots.keys, 0), broadcast_stride(slots.keys, 1), slot_group,
        *target.stride()[:3], *((0, 0, 0) if second_target is None else second_target.stride()[:3]),
        first_head, heads, blocks, ranking, row_records, col_records, row_width, col_width,
        rows=rows[0], second_rows=rows[-1], RANKED=RANKED_AT_ONCE if rank else 0, num_warps=4, follows=True,
    )  # fmt: skip


def _sum(
    packed: tuple[Tensor, ...],
    slots: Slots,
    targets: tuple[Tensor, ...],
    first_head: int,
    heads: int,
    group: int,
    slot_group: int,
    *,
    add: bool,
) -> None:
    """Sum slots of `heads * group` packed heads into `heads` heads of one or two targets, from `first_head` on."""
    assert slots.offsets is not None and slots.places is not None, "planned without an inverse"
    used = [pair for pair in zip(packed, targets, strict=True) if pair[1].numel()]
    if not used:
        return
    source, target = used[0]
    second, second_target = used[1] if len(used) > 1 else (None, None)
    batch, seqlen_k = target.shape[:2]
    keys = max(1, min(256, _SUMMED // max(triton.next_power_of_2(of.shape[3]) for of, _ in used)))
    rows = _row_blocks(used, keys)
    blocks = triton.cdiv(seqlen_k, keys)
    launch(
        sum_kernel, (batch * heads * blocks,), source, second, slots.offsets, slots.places, target, second_target,
        *_source_strides(source), *_source_strides(second),
        broadcast_stride(slots.offsets, 0), broadcast_stride(slots.offsets, 1),
        broadcast_stride(slots.places, 0), broadcast_stride(slots.places, 1), slot_group,
        *target.stride()[:3], *((0, 0, 0) if second_target is None else second_target.stride()[:3]),
        first_head, heads, source.shape[0] // batch, group, seqlen_k, slots.places.shape[2], blocks,
        rows=rows[0], second_rows=rows[-1], ADD=add, num_warps=1,
    )  # fmt: skip


def _row_blocks(used: list[tuple[Tensor, Tensor]], count: int) -> list[RowBlock]:
    """Return the blocks of `count` rows of one or two tensors `[B, S, heads, D]` and of their targets."""
    aligned = all(rows_are_aligned(*pair) for pair in used)
    widths = [of.shape[3] for of, _ in used]
    return [RowBlock(count, width, triton.next_power_of_2(width), aligned) for width in widths]


def _source_strides(packed: Tensor | None) -> tuple[int, int, int]:
    """Return the strides of batch, slots and heads; 0 where a dimension is broadcast, and of nothing."""
    if packed is None:
        return 0, 0, 0
    return broadcast_stride(packed, 0), packed.stride(1), broadcast_stride(packed, 2)


class _BiasHeads(NamedTuple):
    """How the heads of a packed bias, of the bias and of the slots correspond."""

    packed: int
    first_source: int  # in units of packed heads
    group: int  # packed heads that read one head of the bias
    slot_group: int  # packed heads that lie in the slots of one head


def _bias_heads(bias_heads: int, slot_heads: int, heads: int, first_head: int, count: int) -> _BiasHeads:
    """Give a packed bias the heads that tell apart those of the bias and those of the slots."""
    if bias_heads == 1:
        return _BiasHeads(slot_heads, 0, slot_heads, 1)
    shared = heads // bias_heads  # query heads that share a head of the bias
    unit = min(shared, count // slot_heads)
    packed = count // unit
    return _BiasHeads(packed, first_head // unit, shared // unit, packed // slot_heads)


def _as_rows(bias: Tensor) -> Tensor:
    """View `[B, heads, 1, S]` as rows `[B, S, heads, 1]`."""
    return bias.permute(0, 3, 1, 2)


def _integers(like: Tensor, leading: tuple[int, ...], *shapes: tuple[int, ...]) -> list[Tensor]:
    """Return uninitialised int32 of the shapes `leading + shape`, each at a multiple of 16 bytes of one workspace."""
    sizes = [math.prod(leading + shape) for shape in shapes]
    room = workspace(like, sum(-(-size // 4) * 4 for size in sizes), dtype=like.dtype)
    parts, begin = [], 0
    for shape, size in zip(shapes, sizes, strict=True):
        parts.append(room[begin : begin + size].view(leading + shape))
        begin += -(-size // 4) * 4
    return parts
