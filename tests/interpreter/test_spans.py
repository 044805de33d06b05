"""Spans of packed sequences, in the interpreter: against masks of their definition, and for offsets that describe nothing."""

from __future__ import annotations

import pytest
import torch
from dmattn_ops.kernels.spans import Spans, spans_of
from torch import Tensor

from dmattn_ops.call import Call
from dmattn_ops.kernels import spans
from tests.span_cases import Packed, draw_packed, offsets_of

pytestmark = pytest.mark.usefixtures("strict_memory")
LAST = 0x7FFFFFFF


def work_of(columns: Tensor) -> int:
    """Return the blocks of 64 from the first to the last of some columns, `bool [other]`."""
    seen = columns.nonzero().flatten().tolist()
    return seen[-1] // 64 - seen[0] // 64 + 1 if seen else 0


def check_tiles(made: Spans, keep: Tensor, rows: int, of_keys: bool, exact: bool = False, chunk: int = 0) -> None:
    """Compare spans and records with `keep`, which says what each row sees, `[rows of this side, of the other]`.

    Where programs rank their own tiles, they know what the first and the last rows of others see. Chunks of `chunk` tiles come
    one after the other, the one with the longest tile first.
    """
    total = keep.shape[0]
    columns = torch.arange(keep.shape[1])
    shown = (columns >= made.starts[:total, None]) & (columns < made.ends[:total, None])
    assert torch.equal(shown, keep)
    assert not made.starts[:total][~keep.any(1)].any(), "an empty span is 0, 0"
    assert not made.ends[:total][~keep.any(1)].any()
    ranked_by = []
    for tile, record in enumerate(made.tiles.tolist()):
        of_tile = keep[tile * rows : (tile + 1) * rows]
        seen = of_tile.any(0).nonzero().flatten().tolist() or [0, -1]
        _, begin, end, full_begin, full_end, _, _, _ = record
        assert (begin, end) == (seen[0] if seen[1:] or seen[0] else 0, seen[-1] + 1)
        past = of_keys and of_tile.shape[0] < rows
        full = [] if past else of_tile.all(0).nonzero().flatten().tolist()
        if full:
            assert (full_begin, full_end) == (full[0], full[-1] + 1)
        else:
            assert full_end <= full_begin or not of_tile.any()
        assert record[5] == work_of(of_tile.any(0))
        ranked_by.append(record[5] if exact else work_of(of_tile[[0, -1]].any(0)))
    chunk = chunk or len(ranked_by)
    most = [max(ranked_by[tile // chunk * chunk :][:chunk]) for tile in range(len(ranked_by))]
    expected = sorted(range(len(ranked_by)), key=lambda tile: (-most[tile], tile // chunk, -ranked_by[tile], tile))
    assert made.tiles[:, 0].tolist() == expected


def both_sides(call: Call, rows: int) -> list[tuple[Spans, bool]]:
    return [(spans_of(call, rows, of_keys=of_keys), of_keys) for of_keys in (False, True)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(60))
def test_spans_are_those_of_the_definition(seed: int) -> None:
    problem = draw_packed(seed)
    if not sum(problem.lengths_q) or not sum(problem.lengths_k):
        problem = Packed((3, *problem.lengths_q), (2, *problem.lengths_k))
    for made, of_keys in both_sides(problem.call(), (64, 128, 192)[seed % 3]):
        check_tiles(made, problem.keep().mT if of_keys else problem.keep(), (64, 128, 192)[seed % 3], of_keys)


@pytest.mark.parametrize("seed", range(6))
def test_many_tiles_are_ranked_by_a_kernel_of_their_own(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(spans, "_RANKED", 2)
    problem = Packed((700, *draw_packed(seed).lengths_q, 300), (500, *draw_packed(seed).lengths_k, 700), is_causal=True)
    for made, of_keys in both_sides(problem.call(), 64):
        check_tiles(made, problem.keep().mT if of_keys else problem.keep(), 64, of_keys, exact=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranked", [1024, 2], ids=["each tile", "a kernel"])
@pytest.mark.parametrize("chunk", [2, 8, 16, 64])
@pytest.mark.parametrize("seed", range(2))
def test_chunks_of_tiles_come_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, seed: int, chunk: int, ranked: int
) -> None:
    monkeypatch.setattr(spans, "_RANKED", ranked)
    monkeypatch.setattr(spans, "_OWN", 4)
    monkeypatch.setattr(spans, "_OTHERS", 8)
    lengths = (150, *draw_packed(seed).lengths_q, 700, 64, 300, 64)
    problem = Packed(lengths, lengths, is_causal=True)
    for of_keys in (False, True):
        made = spans_of(problem.call(), 64, of_keys=of_keys, chunk=chunk)
        exact = len(made.tiles) > ranked
        of_chunk = min(chunk, 8) if exact else chunk
        keep = problem.keep().mT if of_keys else problem.keep()
        check_tiles(made, keep, 64, of_keys, exact, 0 if chunk >= len(made.tiles) else of_chunk)


def test_the_longest_of_very_uneven_sequences_comes_first() -> None:
    lengths = (*(50,) * 30, 3000, *(50,) * 30)
    made = spans_of(Packed(lengths, lengths, is_causal=True).call(), 128, of_keys=False)
    first = made.tiles[:, 0].tolist()[:20]
    assert first[1:] == sorted(first[1:], reverse=True) and all(11 < tile < 36 for tile in first)


def test_a_row_behind_the_last_sequence_sees_nothing() -> None:
    problem = Packed((100, 100), (150, 50))
    call = problem.call()
    assert call.varlen is not None
    shorter = call.varlen._replace(cu_seqlens_q=offsets_of((100, 60)), cu_seqlens_k=offsets_of((150, 20)))
    queries, keys = both_sides(call._replace(varlen=shorter), 64)
    expected = Packed((100, 60, 40), (150, 20, 30)).keep()
    expected[160:] = False
    check_tiles(queries[0], expected, 64, False)
    check_tiles(keys[0], expected.mT, 64, True)


@pytest.mark.parametrize("seed", range(20))
def test_no_span_reaches_out_of_the_tensors_whatever_the_offsets_are(seed: int) -> None:
    problem = Packed((130, 70), (90, 210), is_causal=seed % 2 == 0, window=(None if seed % 3 else 20, None))
    call = problem.call()
    assert call.varlen is not None
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.randint(-400, 700, (2, 6), generator=generator, dtype=torch.int32)
    wrong[0, seed % 6], wrong[1, seed % 5] = (LAST, -LAST) if seed % 2 else (-LAST, LAST)
    broken = call.varlen._replace(cu_seqlens_q=wrong[0], cu_seqlens_k=wrong[1])
    for (made, _), own, other in zip(
        both_sides(call._replace(varlen=broken), 128), (200, 300), (300, 200), strict=True
    ):
        starts, ends = made.starts[:own], made.ends[:own]
        assert bool(((starts >= 0) & (starts <= ends) & (ends <= other)).all())
        assert bool(((made.tiles[:, 1] >= 0) & (made.tiles[:, 2] <= other)).all())
        assert sorted(made.tiles[:, 0].tolist()) == list(range(made.tiles.shape[0]))


def test_upper_bounds_of_the_lengths_cut_sequences_as_the_portable_kernels_do() -> None:
    call = Packed((100, 100), (100, 100)).call()
    assert call.varlen is not None
    made = spans_of(call._replace(varlen=call.varlen._replace(max_seqlen_k=30)), 64, of_keys=False)
    assert made.starts[:200].tolist() == [0] * 100 + [100] * 100
    assert made.ends[:200].tolist() == [30] * 100 + [130] * 100


def test_no_sequences_show_nothing() -> None:
    call = Packed((64,), (64,)).call()
    assert call.varlen is not None
    none = torch.zeros(1, dtype=torch.int32)
    for made, _ in both_sides(call._replace(varlen=call.varlen._replace(cu_seqlens_q=none, cu_seqlens_k=none)), 64):
        assert not made.ends[:64].any() and made.tiles[0, :3].tolist() == [0, 0, 0]
