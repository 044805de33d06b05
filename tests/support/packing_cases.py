"""Masks that dynamic selection makes, packed, and what their slots and lists must be by definition."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dmattn_ops.call import HEADER, TILE, UNBOUNDED
from dmattn_ops.choice.epochs import Epochs, epochs
from dmattn_ops.kernels.epochs import launch
from dmattn_ops.kernels.epochs.launch import Slots


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
    slots = launch.plan_slots(start, end, cut, seqlen_q, *band, first, count, inverse=True)
    batch, planned = slots.keys.shape[:2]
    launch.gather_rows(
        (torch.zeros(batch, start.shape[2], planned, 1),), slots, planned, 0, 1
    )  # writes the lists' order
    return slots, cut


def lists(record: Tensor) -> tuple[list[int], list[int]]:
    partial, full = record[1].item(), record[2].item()
    entries = record[HEADER : HEADER + partial + full].tolist()
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
        assert (slots.row_tiles[matrix][:, 3] == 0).all()
        without_keys = (slots.keys[matrix].view(-1, TILE) < 0).all(1)
        assert torch.equal(slots.col_tiles[matrix][:, 3] != 0, without_keys)
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


def sparse_mask(mask_heads: int, batch: int = 2) -> tuple[Tensor, Tensor, Slots, Epochs]:
    case = Case(600, 60, 256, batch, mask_heads)
    start, end = lifetimes(case)
    return start, end, *plan(start, end, case.at_most, case.length, case.seqlen)


def named_blocks(slots: Slots) -> Tensor:
    """Return which slots `[Bm, Hm, slots]` lie in a block that a list names."""
    return ((slots.col_tiles[..., 1] + slots.col_tiles[..., 2]) > 0).repeat_interleave(TILE, -1)
