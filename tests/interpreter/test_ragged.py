"""Tiles of packed sequences, in the interpreter: against masks of their definition, and for offsets that describe nothing."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from dmattn_ops.call import TILE, Call
from dmattn_ops.kernels import ragged
from dmattn_ops.kernels.ragged import capacity, tiles_of
from tests.support.packed_cases import Packed, draw_packed

pytestmark = pytest.mark.usefixtures("strict_memory")
LAST = 0x7FFFFFFF
HEIGHTS = (64, 128, 192)
Sequence = tuple[int, int, int, int]  # of one side and of the other: where it begins, and where it ends


def call_of(problem: Packed, offsets: tuple[Tensor, Tensor] | None = None) -> Call:
    """Return a call of a problem, or of its tensors with other offsets."""
    call = problem.call()
    assert call.varlen is not None
    own, other = offsets or (call.varlen.cu_seqlens_q, call.varlen.cu_seqlens_k)
    return call._replace(varlen=call.varlen._replace(cu_seqlens_q=own, cu_seqlens_k=other))


def sequences_of(call: Call, of_keys: bool) -> list[Sequence]:
    """Return the sequences of a side and what lies before and behind them."""
    assert call.varlen is not None
    sides = [(call.varlen.cu_seqlens_q, call.query.shape[0]), (call.varlen.cu_seqlens_k, call.key.shape[0])]
    own, other = (pairwise([0, *offsets.tolist(), total]) for offsets, total in (sides[::-1] if of_keys else sides))
    return [(*rows, *columns) for rows, columns in zip(own, other, strict=True)]


def check_tiles(call: Call, keep: Tensor, rows: int, of_keys: bool, chunk: int = 0) -> Tensor:
    """Compare the records of one side with `keep`, which says what queries see, `[rows of queries, of keys]`; return them."""
    keep = keep.mT if of_keys else keep
    low, high = call.options[:2]
    if of_keys:
        low, high = -high, -low
    records = tiles_of(call, rows, of_keys=of_keys, chunk=chunk)
    chunk = min(chunk, ragged._OWN) if 1 < chunk < len(records) else 0
    columns, padded, works = torch.arange(keep.shape[1]), 0, []
    for begin, end, other_begin, other_end in sequences_of(call, of_keys):
        for first in range(0, end - begin, rows):
            record = records[len(works)].tolist()
            assert record[1:4] == [first, begin, end - begin]
            assert record[4] == other_begin and record[7] == padded
            row = torch.arange(first, min(first + rows, end - begin))[:, None] + record[6]
            seen = (columns >= other_begin + (row + low).clamp(0)) & (columns <= other_begin + row + high)
            seen &= columns < other_begin + record[5]
            assert torch.equal(seen, keep[begin + first : begin + first + len(row)])
            works.append(record[ragged._WORK.value])
            blocks = ((columns - other_begin) // 64)[seen.any(0)].tolist()
            assert works[-1] == blocks[-1] - blocks[0] + 1 if blocks else works[-1] in (0, 1)
        padded += -(-(other_end - other_begin) // TILE) * TILE
    assert (records[:, ragged.TILES] == len(works)).all()
    assert not records[len(works) :, [3, 5]].any(), "records without a tile have lengths of 0"
    check_order(records[:, 0].tolist(), works, chunk)
    return records


def check_order(found: list[int], works: list[int], chunk: int) -> None:
    """Chunks of tiles come one after the other, the one with the longest tile first, and behind all what has no tile."""
    chunk = chunk or len(found)
    most = [max(works[tile // chunk * chunk :][:chunk]) for tile in range(len(works))]
    expected = sorted(range(len(works)), key=lambda tile: (-most[tile], tile // chunk, -works[tile], tile))
    assert found[: len(works)] == expected
    assert sorted(found) == list(range(len(found)))


def filled(problem: Packed) -> Packed:
    """Return a problem that has queries and keys."""
    if sum(problem.lengths_q) and sum(problem.lengths_k):
        return problem
    return Packed((3, *problem.lengths_q), (2, *problem.lengths_k))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(40))
def test_tiles_are_those_of_the_definition(seed: int) -> None:
    problem = filled(draw_packed(seed))
    for of_keys in (False, True):
        check_tiles(problem.call(), problem.keep(), HEIGHTS[seed % 3], of_keys)


@pytest.mark.parametrize("at_once", [(2, 4), (8, 4)], ids=["many", "few"])
def test_more_sequences_than_are_read_at_a_time(monkeypatch: pytest.MonkeyPatch, at_once: tuple[int, int]) -> None:
    monkeypatch.setattr(ragged, "_FEW", at_once[0])
    monkeypatch.setattr(ragged, "_MANY", at_once[1])
    problem = Packed((30, 0, 70, 129, 1, 64), (0, 200, 64, 3, 0, 130), is_causal=True)
    for of_keys in (False, True):
        check_tiles(problem.call(), problem.keep(), 64, of_keys)


@pytest.mark.parametrize("chunk", [1, 2, 8, 64])
@pytest.mark.parametrize("lengths", [(150, 64, 300, 64, 0, 30, 330), (330, 1, 64, 0, 200, 20)], ids=["last", "first"])
def test_chunks_of_tiles_come_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], chunk: int
) -> None:
    """Whether the longest sequence is the last one, beside records without a tile, or the first."""
    monkeypatch.setattr(ragged, "_OWN", 4)
    monkeypatch.setattr(ragged, "_OTHERS", 8)
    problem = Packed(lengths, lengths, is_causal=True)
    for of_keys in (False, True):
        check_tiles(problem.call(), problem.keep(), 64, of_keys, chunk)


def test_the_longest_of_very_uneven_sequences_comes_first() -> None:
    lengths = (*(50,) * 10, 1000, *(50,) * 10)
    made = tiles_of(Packed(lengths, lengths, is_causal=True).call(), 128, of_keys=False)
    assert made[:8, 0].tolist() == list(range(17, 9, -1))


@pytest.mark.parametrize("rows", HEIGHTS)
def test_rows_around_the_sequences_see_nothing(rows: int) -> None:
    problem = Packed((70, 100, 60, 200), (140, 150, 20, 30))
    keep = problem.keep()
    keep[:70] = keep[230:] = False
    offsets = torch.tensor([70, 170, 230]).int(), torch.tensor([140, 290, 310]).int()
    for of_keys in (False, True):
        check_tiles(call_of(problem, offsets), keep, rows, of_keys)


def test_no_sequences_show_nothing() -> None:
    call = call_of(Packed((64,), (100,)), (torch.zeros(1).int(), torch.zeros(1).int()))
    for of_keys in (False, True):
        check_tiles(call, torch.zeros(64, 100, dtype=torch.bool), 64, of_keys)


def test_padded_rows_begin_with_the_first_tile_of_queries_of_a_sequence() -> None:
    """Tiles of keys find the statistics of their queries by `padded`; those are written by tiles of queries."""
    call = call_of(Packed((100, 0, 300, 129, 40), (64, 30, 200, 0, 70)))
    queries, keys = (tiles_of(call, TILE, of_keys=of_keys, ranked=False) for of_keys in (False, True))
    for record in keys[: keys[0, ragged.TILES]].tolist():
        if record[5]:
            assert queries[record[7] // TILE, 1:4].tolist() == [0, record[4], record[5]]


@pytest.mark.parametrize("rows", HEIGHTS)
def test_there_is_room_for_all_tiles_and_hardly_more(rows: int) -> None:
    for lengths in ((), (1,), (rows, rows), (1,) * 40, (rows + 1,) * 7, (0, 0, 5), (1000, 1, 2 * rows)):
        tiles = sum(-(-length // rows) for length in lengths)
        assert tiles <= capacity(sum(lengths), len(lengths), rows) <= tiles + len(lengths) + 2


WRONG = {
    "falling": ((0, 130, 0, 130, 0, 130, 0, 200), (0, 300, 0, 300, 0, 300, 0, 300)),
    "falling queries": ((0, 200) * 4, (0, 40, 60, 80, 120, 240, 260, 300)),
    "falling keys": ((0, 20, 40, 60, 80, 90, 180, 200), (0, 300) * 4),
    "backwards": ((200, 150, 100, 0), (300, 20, 10, 0)),
}


def drawn_offsets(seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets that describe nothing, some of them as large as numbers get."""
    own, other = torch.randint(-400, 700, (2, 6), generator=torch.Generator().manual_seed(seed)).tolist()
    own[seed % 6], other[seed % 5] = (LAST, -LAST) if seed % 2 else (-LAST, LAST)
    return tuple(own), tuple(other)


@pytest.mark.parametrize("name", [*WRONG, *range(6)])
def test_no_tile_reaches_out_of_the_tensors_whatever_the_offsets_are(name: str | int) -> None:
    offsets = WRONG[name] if isinstance(name, str) else drawn_offsets(name)
    problem = Packed((130, 70), (90, 210), is_causal=True, window=(20, None))
    call = call_of(problem, (torch.tensor(offsets[0]).int(), torch.tensor(offsets[1]).int()))
    room = {total: capacity(total, len(offsets[0]) - 1, TILE) * TILE for total in (200, 300)}
    for of_keys, own, other in ((False, 200, 300), (True, 300, 200)):
        records = tiles_of(call, TILE, of_keys=of_keys)
        assert sorted(records[:, 0].tolist()) == list(range(len(records)))
        assert int(records[0, ragged.TILES]) <= len(records)
        for _, first, begin, length, other_begin, other_length, _, padded, *_ in records.tolist():
            assert 0 <= begin <= begin + length <= own and 0 <= first <= length
            assert 0 <= other_begin <= other_begin + other_length <= other
            if other_length:
                assert padded + -(-other_length // TILE) * TILE <= room[other], "statistics lie in the workspaces"
