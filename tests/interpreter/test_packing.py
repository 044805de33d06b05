"""Slots and tile lists of packed keys in the interpreter: every visible pair lies in one listed slot."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dmattn_ops.call import TILE, UNBOUNDED
from dmattn_ops.choice.epochs import Epochs
from dmattn_ops.kernels.epochs import launch
from dmattn_ops.kernels.epochs.launch import Slots
from tests.support.packing_cases import (
    CASES,
    Case,
    check_slots,
    covered_by_rows,
    lifetimes,
    plan,
    visible_pairs,
)

FAR = 0x5A5A5A5A  # a query or a key that lies outside of everything

pytestmark = pytest.mark.usefixtures("strict_memory")


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_each_visible_pair_lies_in_one_listed_slot(case: Case):
    start, end = lifetimes(case)
    slots, cut = plan(start, end, case.at_most, case.length, case.seqlen)
    visible = visible_pairs(start, end, case.seqlen, (-UNBOUNDED, 0))
    if not case.last:
        kept = torch.arange(1, case.seqlen + 1).clamp(max=case.keep)
        assert (visible.sum(-1) == kept).all()
    check_slots(slots, cut, visible)


def test_old_keys_come_in_blocks_that_live_equally_long():
    case = CASES[2]
    slots, cut = plan(*lifetimes(case), case.at_most, case.length, case.seqlen)
    for first in range(0, cut.slots, cut.slots_per_epoch):
        old = slots.end[0, 0, first : first + cut.old_slots]
        lived = old[old > 0] // TILE  # whole tiles
        assert (lived.diff() <= 0).all()


@pytest.mark.parametrize(("first", "stop"), [(0, 300), (200, 777), (650, 651)])
def test_rows_of_a_mask_are_packed_as_the_mask_of_those_rows(first: int, stop: int):
    case = CASES[1]
    start, end = lifetimes(case)
    start, end = start - first, end - first
    band = (-UNBOUNDED, first)
    for beginning in (start, start.clamp(min=0)):
        slots, cut = plan(beginning, end, case.at_most, case.length, stop - first, band)
        check_slots(slots, cut, visible_pairs(start, end, stop - first, band))


def test_keys_of_a_mask_are_packed_as_the_mask_of_those_keys():
    start, end = (part[..., 150:500] for part in lifetimes(CASES[1]))
    slots, cut = plan(start, end, 130, 256, 777, (-UNBOUNDED, -150))
    check_slots(slots, cut, visible_pairs(start, end, 777, (-UNBOUNDED, -150)))


def test_a_band_is_folded_in():
    case = CASES[3]
    start, end = lifetimes(case)
    for band in ((-200, 0), (-100, -40)):
        slots, cut = plan(torch.zeros_like(start), end, case.at_most, case.length, case.seqlen, band)
        check_slots(slots, cut, visible_pairs(start, end, case.seqlen, band))


def test_a_mask_that_is_the_same_for_all_queries_takes_one_epoch():
    end = torch.where(torch.rand(2, 1, 500) < 0.3, 400, 0).int()
    start = torch.zeros(1, 1, 500, dtype=torch.int32)
    kept = int((end > 0).sum(-1).max())
    slots, cut = plan(start, end, kept, 512, 400, (-UNBOUNDED, UNBOUNDED))
    assert cut.born_slots == 0 and cut.number == 1
    check_slots(slots, cut, visible_pairs(start, end, 400, (-UNBOUNDED, UNBOUNDED)))


def test_old_keys_that_leave_one_by_one_fill_more_than_one_block_of_those_sorted_at_once():
    seqlen, half = 4100, 2050
    end = torch.full((1, 1, seqlen), seqlen, dtype=torch.int32)
    gone = torch.randperm(half, generator=torch.Generator().manual_seed(0))
    end[..., gone] = half + torch.arange(half, dtype=torch.int32)
    start = torch.arange(seqlen, dtype=torch.int32)[None, None]
    visible = visible_pairs(start, end, seqlen, (-UNBOUNDED, 0))
    assert visible.sum(-1).max() == half
    slots, cut = plan(start, end, half, 2048, seqlen)
    check_slots(slots, cut, visible)
    listed = (slots.row_tiles[..., 1] + slots.row_tiles[..., 2]).sum() * TILE * TILE
    assert listed < 1.15 * visible.sum(), "a quarter of what is causal is saved"


def test_a_range_of_heads_is_planned_alone():
    case = CASES[1]
    start, end = lifetimes(case)
    slots, cut = plan(start, end, case.at_most, case.length, case.seqlen, heads=(1, 2))
    check_slots(slots, cut, visible_pairs(start, end, case.seqlen, (-UNBOUNDED, 0))[:, 1:3])


def test_start_and_end_may_have_heads_of_their_own():
    case = Case(400, 60, 128, 2, 4)
    start, end = lifetimes(case)
    start = start + torch.tensor([0, 5], dtype=torch.int32)[None, :, None]
    slots, cut = plan(start, end, case.at_most, case.length, case.seqlen)
    visible = visible_pairs(start.repeat_interleave(2, 1), end, case.seqlen, (-UNBOUNDED, 0))
    check_slots(slots, cut, visible)


@pytest.mark.parametrize("shape", [(0, 2, 300), (2, 0, 300), (1, 2, 0)])
def test_nothing_is_packed_of_empty_masks(shape: tuple[int, int, int]):
    start = end = torch.zeros(shape, dtype=torch.int32)
    slots, _ = plan(start, end, 64, 128, 200)
    assert slots.row_tiles.shape[:3] == (*shape[:2], 2)
    assert (slots.row_tiles[..., 1:4] == 0).all()
    slots, cut = plan(start, end, 64, 128, 0)
    assert slots.keys.numel() == 0 and cut.slots == 0


def test_no_queries_are_listed_where_no_key_is_kept():
    start = end = torch.zeros(1, 1, 300, dtype=torch.int32)
    slots, cut = plan(start, end, 0, 128, 300)
    check_slots(slots, cut, torch.zeros(1, 1, 300, 300, dtype=torch.bool))


def broken_plan(at_most: int) -> tuple[Tensor, Tensor, Slots, Epochs]:
    """Pack a mask that keeps more keys than `at_most` in its second head from query 300 on."""
    case = Case(700, 60, 128, 1, 2)
    start, end = lifetimes(case)
    end = end.clone()
    end[0, 1, :300] = 600
    return start, end, *plan(start, end, at_most, case.length, case.seqlen)


def test_a_broken_promise_flags_its_epochs_and_harms_no_other():
    start, end, slots, cut = broken_plan(60)
    assert slots.broken[0].tolist() == [[0] * 6, [0, 0, 1, 1, 1, 0]]
    visible = visible_pairs(start, end, 700, (-UNBOUNDED, 0))
    for head in range(2):
        count = covered_by_rows(slots, (0, head), 700, 700)
        sound = torch.arange(700) // cut.length
        sound = slots.broken[0, head, sound] == 0
        assert torch.equal(count[sound], visible[0, head, sound].int())
        assert (count <= visible[0, head].int()).all()


def test_sums_of_a_broken_promise_leave_out_what_has_no_slot():
    _, _, slots, cut = broken_plan(60)
    packed = torch.randn(1, cut.slots, 2, 8)
    sums = torch.full((1, 700, 2, 8), torch.nan)
    launch.sum_rows((packed,), slots, (sums,), 0, 1)
    for head in range(2):
        live = slots.keys[0, head] >= 0
        expected = torch.zeros(700, 8).index_add_(0, slots.keys[0, head, live].long(), packed[0, live, head])
        torch.testing.assert_close(sums[0, :, head], expected)
        assert (slots.offsets[0, head, -1] > live.sum()) == (head == 1)  # some have none


@pytest.mark.parametrize("fill", [(0, 700), (-FAR, FAR), (FAR, -FAR), (0, 2**31 - 1), (-(2**31), 5)])
def test_any_numbers_stay_inside_of_memory(fill: tuple[int, int]):
    start, end = (torch.full((1, 1, 700), number, dtype=torch.int32) for number in fill)
    slots, _ = plan(start, end, 10, 128, 700)
    (rows,) = launch.gather_rows((torch.randn(1, 700, 1, 8),), slots, 1, 0, 1)
    launch.sum_rows((rows,), slots, (torch.empty(1, 700, 1, 8),), 0, 1)
    live = slots.keys[slots.keys >= 0]
    assert (live < 700).all() and (slots.keys >= -1).all()


def test_rows_of_broken_epochs_become_nan():
    _, _, slots, cut = broken_plan(60)
    out, lse = torch.randn(1, 700, 4, 5).transpose(1, 2).contiguous().transpose(1, 2), torch.randn(1, 4, 700)
    before = out.clone(), lse.clone()
    launch.poison_rows(out, lse, slots)
    flagged = slots.broken[0].repeat_interleave(2, 0)[:, torch.arange(700) // cut.length] != 0
    assert flagged.any() and not flagged.all()
    assert out[0].transpose(0, 1)[flagged].isnan().all() and lse[0][flagged].isnan().all()
    assert torch.equal(out[0].transpose(0, 1)[~flagged], before[0][0].transpose(0, 1)[~flagged])
    assert torch.equal(lse[0][~flagged], before[1][0][~flagged])
