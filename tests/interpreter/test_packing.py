"""Packed keys in the interpreter: every visible pair lies in one listed slot, copies and sums are exact."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dmattn_ops.kernels.packing import launch
from dmattn_ops.kernels.packing.launch import Slots
from dmattn_ops.packing import Epochs, epochs
from dmattn_ops.problem import HEADER, TILE, UNBOUNDED

POISON = 0x5A5A5A5A


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch, strict_memory: Any) -> None:
    """Fill what arrives uninitialised with NaN, and with integers that lie outside of everything."""
    plain = launch.workspace

    def poisoned_workspace(like: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
        return plain(like, *shape, dtype=dtype).fill_(float("nan") if dtype.is_floating_point else POISON)

    monkeypatch.setattr(launch, "workspace", poisoned_workspace)


@dataclass(frozen=True)
class Case:
    """A dynamic mask that keeps `keep` keys of each query, `[batch, heads, S]`, cut into epochs of `length`."""

    seqlen: int
    keep: int
    length: int
    batch: int = 1
    heads: int = 1
    scores: str = "random"  # random, rising (all births are seen), falling (the first keys stay)
    last: int = 0  # the latest keys are visible beside what is kept

    @property
    def at_most(self) -> int:
        return self.keep + self.last


CASES = (
    Case(640, 100, 128),
    Case(777, 130, 256, 2, 3),
    Case(1100, 256, 256, 1, 2, "rising"),
    Case(1100, 70, 512, 1, 2, "falling"),
    Case(700, 50, 256, last=40),
    Case(300, 128, 512),  # one epoch, shorter than its length
    Case(129, 1, 128),
    Case(513, 1000, 128),  # more than there are
    Case(9000, 40, 4608),  # several blocks of keys to look through
    Case(1, 1, 128),
    Case(256, 0, 128),
)


@functools.cache
def lifetimes(case: Case) -> tuple[Tensor, Tensor]:
    """Return when each key becomes visible and when it stops: when `keep` keys of the prefix are better."""
    rng = np.random.default_rng(case.seqlen + case.keep)
    slope = {"random": 0.0, "rising": 1.0, "falling": -1.0}[case.scores]
    position = np.arange(case.seqlen)
    scores = rng.standard_normal((case.batch * case.heads, case.seqlen)) + slope * position / 40
    end = np.full(scores.shape, case.seqlen)
    for head, own in enumerate(scores):
        best: list[tuple[float, int]] = []
        for key in position:
            best = sorted([*best, (-own[key], key)])
            for _, lost in best[case.keep :]:
                end[head, lost] = min(max(key, lost + case.last), case.seqlen)
            best = best[: case.keep]
    start = torch.arange(case.seqlen, dtype=torch.int32).expand(1, 1, -1)
    return start, torch.from_numpy(end.astype(np.int32)).view(case.batch, case.heads, case.seqlen)


def visible_pairs(start: Tensor, end: Tensor, seqlen_q: int, band: tuple[int, int]) -> Tensor:
    """Return the mask `[Bm, Hm, Sq, Sk]` by definition."""
    query, key = torch.arange(seqlen_q)[:, None], torch.arange(start.shape[2])[None, :]
    inside = (key >= query + band[0]) & (key <= query + band[1])
    return (start[:, :, None] <= query) & (query < end[:, :, None]) & inside


def plan(start: Tensor, end: Tensor, at_most: int, length: int, seqlen_q: int, band=(-UNBOUNDED, 0), heads=None):
    cut = epochs(seqlen_q, start.shape[2], at_most, band[1], length)
    first, count = heads or (0, max(start.shape[1], end.shape[1]))
    return launch.plan_slots(start, end, cut, seqlen_q, *band, first, count, inverse=True), cut


def lists(record: Tensor) -> tuple[list[int], list[int]]:
    partial, full = record[1].item(), record[2].item()
    entries = record[HEADER : HEADER + partial + full].tolist()
    assert record[3] == 0
    assert entries[:partial] == sorted(entries[:partial]) and entries[partial:] == sorted(entries[partial:])
    return entries[:partial], entries[partial:]


def check_order(tiles: Tensor) -> None:
    """Assert that word 0 of the records `[tiles, width]` names each once, longest lists first."""
    work, order = tiles[:, 1] + tiles[:, 2], tiles[:, 0].long()
    assert order.sort().values.tolist() == list(range(len(tiles)))
    assert (work[order].diff() <= 0).all()


def covered_by_rows(slots: Slots, matrix: tuple[int, int], seqlen_q: int, seqlen_k: int) -> Tensor:
    """Count in how many slots each query meets each key, walking the lists of query tiles as a kernel does."""
    count = torch.zeros(seqlen_q, seqlen_k, dtype=torch.int32)
    keys, start, end = (part[matrix] for part in (slots.keys, slots.start, slots.end))
    for tile, record in enumerate(slots.row_tiles[matrix]):
        query = torch.arange(tile * TILE, min((tile + 1) * TILE, seqlen_q))
        partial, full = lists(record)
        for block in partial + full:
            own = slice(block * TILE, (block + 1) * TILE)
            seen = (start[own] <= query[:, None]) & (query[:, None] < end[own])
            if block in full:
                assert len(query) == TILE and seen.all()
            rows, columns = seen.nonzero(as_tuple=True)
            count.index_put_(
                (query[rows], keys[own][columns].long()), torch.ones((), dtype=torch.int32), accumulate=True
            )
    return count


def check_transposed(row_tiles: Tensor, col_tiles: Tensor) -> None:
    """Assert that both directions list the same pairs of the same kinds."""

    def pairs(tiles: Tensor) -> set[tuple[int, int, int]]:
        found = ((own, map(lists, [record])) for own, record in enumerate(tiles))
        return {(own, other, kind) for own, (parts,) in found for kind in (0, 1) for other in parts[kind]}

    assert pairs(row_tiles) == {(row, column, kind) for column, row, kind in pairs(col_tiles)}


def check_slots(slots: Slots, cut: Epochs, visible: Tensor) -> None:
    """Assert that slots, lists and inverse of all heads stand for the mask `[Bm, Hm, Sq, Sk]`."""
    batch, heads, seqlen_q, seqlen_k = visible.shape
    assert slots.keys.shape == (batch, heads, cut.slots)
    assert (slots.broken == 0).all()
    for matrix in np.ndindex(batch, heads):
        assert torch.equal(covered_by_rows(slots, matrix, seqlen_q, seqlen_k), visible[matrix].int())
        check_transposed(slots.row_tiles[matrix], slots.col_tiles[matrix])
        check_order(slots.row_tiles[matrix])
        check_order(slots.col_tiles[matrix])
        keys, start, end = (part[matrix] for part in (slots.keys, slots.start, slots.end))
        live = keys >= 0
        assert torch.equal(live, start < end)
        assert (keys[~live] == -1).all() and (start[~live] == 0).all() and (end[~live] == 0).all()
        epoch = torch.arange(cut.slots) // max(1, cut.slots_per_epoch)
        assert torch.equal(start[live] // cut.length, epoch[live]) and torch.equal(
            (end[live] - 1) // cut.length, epoch[live]
        )
        offsets, places = slots.offsets[matrix], slots.places[matrix]
        assert offsets[0] == 0 and offsets[-1] == live.sum()
        assert torch.equal(offsets.diff().long(), keys[live].bincount(minlength=seqlen_k))
        in_order = live.nonzero().flatten()[keys[live].argsort(stable=True)]  # slots lie in the order of the epochs
        assert torch.equal(places[: len(in_order)].long(), in_order)


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
    assert cut.born_slots == 0 and cut.count == 1
    check_slots(slots, cut, visible_pairs(start, end, 400, (-UNBOUNDED, UNBOUNDED)))


def test_a_range_of_heads_is_planned_alone():
    case = CASES[1]
    start, end = lifetimes(case)
    slots, cut = plan(start, end, case.at_most, case.length, case.seqlen, heads=(1, 2))
    check_slots(slots, cut, visible_pairs(start, end, case.seqlen, (-UNBOUNDED, 0))[:, 1:3])


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


# ---- rows ----


def random_rows(*shape: int, dtype: torch.dtype = torch.float32, layout: str = "contiguous") -> Tensor:
    """Draw rows `[B, S, heads, D]`."""
    batch, seqlen, heads, width = shape
    if layout == "transposed":
        return torch.randn(batch, heads, seqlen, width).to(dtype).transpose(1, 2)
    if layout == "offset":
        return torch.randn(batch, seqlen, heads, width + 3).to(dtype)[..., 1 : width + 1]
    return torch.randn(shape).to(dtype)


ROWS = (
    # mask heads, heads, key heads, width, dtype, layout
    (1, 4, 2, 16, torch.float16, "contiguous"),
    (2, 4, 2, 40, torch.bfloat16, "transposed"),
    (4, 4, 2, 5, torch.float32, "offset"),
    (2, 2, 2, 256, torch.float32, "contiguous"),
    (2, 6, 2, 1, torch.bfloat16, "transposed"),
)


def sparse_mask(mask_heads: int, batch: int = 2) -> tuple[Tensor, Tensor, Slots, Epochs]:
    case = Case(600, 60, 256, batch, mask_heads)
    start, end = lifetimes(case)
    return start, end, *plan(start, end, case.at_most, case.length, case.seqlen)


def named_blocks(slots: Slots) -> Tensor:
    """Return which slots `[Bm, Hm, slots]` lie in a block that a list names."""
    return ((slots.col_tiles[..., 1] + slots.col_tiles[..., 2]) > 0).repeat_interleave(TILE, -1)


@pytest.mark.parametrize(("mask_heads", "heads", "kv_heads", "width", "dtype", "layout"), ROWS)
@pytest.mark.parametrize("mask_batch", [1, 2])
def test_rows_are_gathered_as_index_select_does(mask_batch, mask_heads, heads, kv_heads, width, dtype, layout):
    _, _, slots, cut = sparse_mask(mask_heads, mask_batch)
    packed_heads = heads if mask_heads == heads else kv_heads
    group = packed_heads // kv_heads
    rows = random_rows(2, 600, kv_heads, width, dtype=dtype, layout=layout)
    packed = launch.gather_rows(rows, slots, packed_heads, 0, group)
    assert packed.shape == (2, cut.slots, packed_heads, width) and packed.dtype == dtype
    for b, h in np.ndindex(2, packed_heads):
        matrix = (b % mask_batch, h % mask_heads)
        keys, named = slots.keys[matrix], named_blocks(slots)[matrix]
        expected = rows[b, :, h // group].index_select(0, keys.clamp(min=0).long()) * (keys >= 0)[:, None]
        assert torch.equal(packed[b, named, h], expected[named])
        assert packed[b, ~named, h].isnan().all() and not named.all()


@pytest.mark.parametrize(("mask_heads", "heads", "kv_heads", "width", "dtype", "layout"), ROWS)
@pytest.mark.parametrize("mask_batch", [1, 2])
def test_slots_are_summed_in_float32_and_rounded_once(mask_batch, mask_heads, heads, kv_heads, width, dtype, layout):
    _, end, slots, cut = sparse_mask(mask_heads, mask_batch)
    packed_heads = heads if mask_heads == heads else kv_heads
    group = packed_heads // kv_heads
    packed = random_rows(2, cut.slots, packed_heads, width)
    named = named_blocks(slots).expand(2, packed_heads, -1).transpose(1, 2)
    packed[~named] = float("nan")
    sums = random_rows(2, 600, kv_heads, width, dtype=dtype, layout=layout).fill_(float("nan"))
    launch.sum_rows(packed, slots, sums, 0, group)
    expected = torch.zeros(2, 600, kv_heads, width, dtype=torch.float64)
    in_order = torch.zeros(2, 600, kv_heads, width)
    for b, h in np.ndindex(2, packed_heads):
        keys = slots.keys[b % mask_batch, h % mask_heads].long()
        live = keys >= 0
        expected[b, :, h // group].index_add_(0, keys[live], packed[b, live, h].double())
        for slot in live.nonzero().flatten().tolist():
            in_order[b, keys[slot], h // group] += packed[b, slot, h]
    if dtype == torch.bfloat16:  # the interpreter cuts off where a GPU rounds
        torch.testing.assert_close(sums, in_order.to(dtype), rtol=2**-7, atol=0)
    else:
        assert torch.equal(sums, in_order.to(dtype))
    torch.testing.assert_close(in_order.double(), expected, rtol=1e-5, atol=1e-5)
    unseen = (end <= torch.arange(600)).expand(2, packed_heads, -1).unflatten(1, (kv_heads, group)).all(2)
    assert unseen.any() and (sums.transpose(1, 2)[unseen] == 0).all()


def test_ranges_of_heads_give_what_all_heads_give():
    start, end, slots, _ = sparse_mask(4)
    cut = epochs(600, 600, 60, 0, 256)
    rows, sums, parts = (
        random_rows(2, 600, 2, 16),
        torch.full((2, 600, 2, 16), torch.nan),
        torch.full((2, 600, 2, 16), torch.nan),
    )
    whole = launch.gather_rows(rows, slots, 4, 0, 2)
    launch.sum_rows(whole, slots, sums, 0, 2)
    for first in (0, 2):
        part = launch.plan_slots(start, end, cut, 600, -UNBOUNDED, 0, first, 2, inverse=True)
        packed = launch.gather_rows(rows, part, 2, first, 2)
        assert torch.equal(packed.nan_to_num(9), whole[:, :, first : first + 2].nan_to_num(9))
        launch.sum_rows(packed, part, parts, first, 2)
    assert torch.equal(sums, parts)


# mask heads, bias heads, heads, key heads
BIASES = [
    (1, 1, 4, 2),
    (1, 2, 4, 2),
    (1, 4, 4, 2),
    (2, 1, 4, 2),
    (2, 2, 4, 2),
    (2, 4, 4, 2),
    (4, 1, 4, 2),
    (4, 2, 4, 2),
]
BIASES += [(4, 4, 4, 2), (2, 2, 2, 2)]


@pytest.mark.parametrize(("mask_heads", "bias_heads", "heads", "kv_heads"), BIASES)
@pytest.mark.parametrize(("mask_batch", "bias_batch"), [(1, 1), (2, 1), (1, 2)])
def test_a_bias_per_key_is_gathered_and_its_gradient_summed(
    mask_batch, bias_batch, mask_heads, bias_heads, heads, kv_heads
):
    start, end, _, cut = sparse_mask(mask_heads, mask_batch)
    bias = torch.randn(bias_batch, bias_heads, 1, 600)
    packed_heads = heads if mask_heads == heads else kv_heads
    step = heads // packed_heads * (2 if packed_heads == heads else 1)  # query heads of one key head
    gradient = torch.full(bias.shape, torch.nan)
    gradient_parts = torch.zeros(bias.shape)
    expected = torch.zeros(bias.shape, dtype=torch.float64)
    for first in range(0, heads, step):
        packed_first = first * packed_heads // heads
        mask_range = (packed_first, step * packed_heads // heads) if mask_heads > 1 else (0, 1)
        part = launch.plan_slots(start, end, cut, 600, -UNBOUNDED, 0, *mask_range, inverse=True)
        packed = launch.gather_bias(bias, part, heads, first, step)
        batch, own_heads = packed.shape[:2]
        per = step // own_heads
        gradients = torch.randn(packed.shape)
        named = named_blocks(part)
        for b, h in np.ndindex(batch, own_heads):
            query_head = first + h * per
            matrix = (b % mask_batch, h * part.keys.shape[1] // own_heads)
            into = (b % bias_batch, query_head * bias_heads // heads, 0)
            live = part.keys[matrix] >= 0
            keys = part.keys[matrix][live].long()
            assert torch.equal(packed[b, h, 0, live], bias[into][keys])
            assert (packed[b, h, 0, named[matrix] & ~live] == 0).all()
            expected[into].index_add_(0, keys, gradients[b, h, 0, live].double())
        shared = bias_heads == 1 and first > 0
        launch.sum_bias(gradients, part, gradient, heads, first, step, add=shared)
        launch.sum_bias(gradients, part, gradient_parts, heads, first, step, add=True)
        if mask_heads == 1 and bias_heads == 1:
            break  # heads share it as they do in the mask: a single one stands for all
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(gradient, gradient_parts)


# ---- attention on packed keys ----


def walk(
    slots: Slots, matrix: tuple[int, int], tiles: Tensor, index: int, seqlen_q: int
) -> list[tuple[slice, slice, Tensor]]:
    """Return `(queries, slots, visible)` of the pairs that one list names; full ones are not asked for their intervals."""
    found = []
    partial, full = lists(tiles[matrix][index])
    for other in partial + full:
        tile, block = (index, other) if tiles is slots.row_tiles else (other, index)
        rows = slice(tile * TILE, min((tile + 1) * TILE, seqlen_q))
        columns = slice(block * TILE, (block + 1) * TILE)
        query = torch.arange(rows.start, rows.stop)[:, None]
        visible = (slots.start[matrix][columns] <= query) & (query < slots.end[matrix][columns])
        found.append((rows, columns, torch.ones_like(visible) if other in full else visible))
    return found


def packed_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slots: Slots, matrix: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return out and lse of one head, float64: query tiles walk their lists."""
    out, lse = (
        torch.zeros(len(q), v.shape[1], dtype=torch.float64),
        torch.full((len(q),), -torch.inf, dtype=torch.float64),
    )
    for tile in range(slots.row_tiles.shape[2]):
        parts = walk(slots, matrix, slots.row_tiles, tile, len(q))
        if parts:
            rows = parts[0][0]
            scores = [
                torch.where(visible, q[rows] @ k[columns].T + bias[columns], -torch.inf)
                for _, columns, visible in parts
            ]
            lse[rows] = torch.cat(scores, 1).logsumexp(1)
            weights = (torch.cat(scores, 1) - lse[rows, None]).exp().nan_to_num(0.0)
            out[rows] = weights @ torch.cat([v[columns] for _, columns, _ in parts])
    return out, lse


def packed_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    saved: tuple[Tensor, Tensor, Tensor],
    slots: Slots,
    matrix: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, and dk, dv and dbias of the slots of one head: blocks of slots walk their lists."""
    out, lse, grad_out = saved
    dq, dk, dv, dbias = (torch.zeros_like(part) for part in (q, k, v, bias))
    delta = (grad_out * out).sum(1, keepdim=True)
    for block in range(slots.col_tiles.shape[2]):
        for rows, columns, visible in walk(slots, matrix, slots.col_tiles, block, len(q)):
            weights = torch.where(visible, (q[rows] @ k[columns].T + bias[columns] - lse[rows, None]).exp(), 0.0)
            ds = weights * (grad_out[rows] @ v[columns].T - delta[rows])
            dq[rows] += ds @ k[columns]
            dk[columns] += ds.T @ q[rows]
            dv[columns] += weights.T @ grad_out[rows]
            dbias[columns] += ds.sum(0)
    return dq, dk, dv, dbias


@pytest.mark.parametrize(("mask_heads", "heads", "kv_heads"), [(1, 4, 2), (2, 4, 2), (4, 4, 2), (2, 2, 2)])
@pytest.mark.parametrize(("seqlen", "keep", "length"), [(600, 60, 256), (333, 140, 128)])
def test_attention_on_packed_keys_equals_dense_attention(seqlen, keep, length, mask_heads, heads, kv_heads):
    case = Case(seqlen, keep, length, 2, mask_heads)
    start, end = lifetimes(case)
    slots, _ = plan(start, end, case.at_most, case.length, case.seqlen)
    q, k, v, grad_out = (
        torch.randn(2, seqlen, own, 16, dtype=torch.float64, requires_grad=True)
        for own in (heads, kv_heads, kv_heads, heads)
    )
    bias = torch.randn(1, kv_heads, 1, seqlen, dtype=torch.float64, requires_grad=True)
    shared = heads // kv_heads
    visible = visible_pairs(start, end, seqlen, (-UNBOUNDED, 0)).repeat_interleave(heads // mask_heads, 1)
    every = [part.transpose(1, 2).repeat_interleave(heads // part.shape[2], 1) for part in (q, k, v)]
    scores = every[0] @ every[1].mT + bias.repeat_interleave(shared, 1)
    expected = (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ every[2]).transpose(1, 2)
    expected.backward(grad_out)

    packed_heads = heads if mask_heads == heads else kv_heads
    group = packed_heads // kv_heads
    with torch.no_grad():
        packed_k, packed_v = (launch.gather_rows(part, slots, packed_heads, 0, group) for part in (k, v))
        packed_bias = launch.gather_bias(bias, slots, heads, 0, heads)
        dk_slots, dv_slots = (torch.zeros_like(part) for part in (packed_k, packed_v))
        dbias_slots = torch.zeros(2, *packed_bias.shape[1:], dtype=torch.float64)  # bias and mask share none of it
        for b, h in np.ndindex(2, heads):
            head, matrix = h * packed_heads // heads, (b, h * mask_heads // heads)
            own_bias = packed_bias[b, h * packed_bias.shape[1] // heads, 0]
            inputs = (q[b, :, h], packed_k[b, :, head], packed_v[b, :, head], own_bias)
            out, lse = packed_forward(*inputs, slots, matrix)
            torch.testing.assert_close(out, expected[b, :, h], rtol=1e-12, atol=1e-12)
            dq, *of_slots = packed_backward(*inputs, (out, lse, grad_out[b, :, h]), slots, matrix)
            torch.testing.assert_close(dq, q.grad[b, :, h], rtol=1e-10, atol=1e-10)
            dk_slots[b, :, head] += of_slots[0]
            dv_slots[b, :, head] += of_slots[1]
            dbias_slots[b, h * packed_bias.shape[1] // heads, 0] += of_slots[2]
        dk, dv, dbias = (torch.full_like(part, torch.nan, dtype=torch.float32) for part in (k, v, bias))
        launch.sum_rows(dk_slots, slots, dk, 0, group)
        launch.sum_rows(dv_slots, slots, dv, 0, group)
        launch.sum_bias(dbias_slots, slots, dbias, heads, 0, heads)
    for got, exact in ((dk, k.grad), (dv, v.grad), (dbias, bias.grad)):
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)


# ---- promises that do not hold ----


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
    launch.sum_rows(packed, slots, sums, 0, 1)
    expected = torch.zeros(700, 8)
    for head in range(2):
        live = slots.keys[0, head] >= 0
        expected = torch.zeros(700, 8).index_add_(0, slots.keys[0, head, live].long(), packed[0, live, head])
        if head == 0:
            torch.testing.assert_close(sums[0, :, 0], expected)
    offsets, places = slots.offsets[0, 1], slots.places[0, 1]
    assert offsets[-1] > slots.keys.shape[2] or (places[: offsets[-1]] != POISON).all()
    assert sums.isfinite().all()


@pytest.mark.parametrize("fill", [(0, 700), (-POISON, POISON), (POISON, -POISON), (0, 2**31 - 1), (-(2**31), 5)])
def test_any_numbers_stay_inside_of_memory(fill: tuple[int, int]):
    start, end = (torch.full((1, 1, 700), number, dtype=torch.int32) for number in fill)
    slots, cut = plan(start, end, 10, 128, 700)
    rows = launch.gather_rows(torch.randn(1, 700, 1, 8), slots, 1, 0, 1)
    launch.sum_rows(rows, slots, torch.empty(1, 700, 1, 8), 0, 1)
    live = slots.keys[slots.keys >= 0]
    assert (live < 700).all() and (slots.keys >= -1).all()


def test_rows_of_broken_epochs_become_nan():
    _, _, slots, cut = broken_plan(60)
    out, lse = torch.randn(1, 700, 4, 5).transpose(1, 2).contiguous().transpose(1, 2), torch.randn(1, 4, 700)
    before = out.clone(), lse.clone()
    launch.spoil_rows(out, slots)
    launch.spoil_rows(lse, slots)
    flagged = slots.broken[0].repeat_interleave(2, 0)[:, torch.arange(700) // cut.length] != 0
    assert flagged.any() and not flagged.all()
    assert out[0].transpose(0, 1)[flagged].isnan().all() and lse[0][flagged].isnan().all()
    assert torch.equal(out[0].transpose(0, 1)[~flagged], before[0][0].transpose(0, 1)[~flagged])
    assert torch.equal(lse[0][~flagged], before[1][0][~flagged])
