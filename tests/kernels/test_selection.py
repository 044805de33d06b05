"""Lifetimes of keys from scores: plain torch and C++ against the definition of a dynamic mask."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace

import pytest
import torch
from selection_cases import (
    DTYPES,
    SHAPES_OF_SCORES,
    Case,
    Launcher,
    answer,
    check,
    draw,
    draw_documents,
    draw_scores,
    expected,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dmattn_ops.checks import values
from dmattn_ops.kernels import native
from dmattn_ops.kernels.selection import reference
from dmattn_ops.kernels.selection.order import places, ranks

needs_native = pytest.mark.skipif(not native.available(), reason=f"THE C++ KERNELS ARE NOT TESTED: {native.reason()}")
LAUNCHERS = [
    pytest.param(reference.lifetimes, id="reference"),
    pytest.param(native.lifetimes, id="native", marks=needs_native),
]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("hundred", range(40))
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_lifetimes_say_what_the_definition_shows(launcher: Launcher, hundred: int):
    for seed in range(100 * hundred, 100 * hundred + 100):
        check(launcher, draw(seed, 40))


@pytest.mark.parametrize("seed", range(10_000, 10_030))
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_lifetimes_of_longer_rows_say_what_the_definition_shows(launcher: Launcher, seed: int):
    check(launcher, draw(seed, 300))


@pytest.mark.parametrize("keep", [0, 1, 2, 5, 31, 32, 33, 64, 70, 1 << 40])
@pytest.mark.parametrize("kind", SHAPES_OF_SCORES)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_kind_of_scores_is_exact_in_every_dtype(launcher: Launcher, kind: str, keep: int):
    for dtype in DTYPES:
        scores = draw_scores((1, 2, 64), kind, seeded(keep)).to(dtype)
        check(launcher, Case(scores, None, keep))
        check(launcher, Case(scores, None, keep, keep_first=3, keep_last=7))
        check(launcher, Case(scores, None, keep, keep_first=3, is_causal=False))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_of_equal_scores_the_earlier_key_stays(launcher: Launcher):
    start, end = answer(launcher, Case(torch.tensor([[[0.0, -0.0, 0.0, 1.0, 0.0]]]), None, 2))
    assert start.tolist() == [[[0, 1, 2, 3, 4]]]
    assert end.tolist() == [[[5, 3, 2, 5, 4]]]  # keys 2 and 4 are never among the best; key 3 replaces key 1


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_nan_is_worse_than_minus_infinity_whatever_its_bits(launcher: Launcher):
    for dtype in DTYPES:
        nan = torch.tensor([math.nan], dtype=dtype)
        scores = torch.cat([nan, -nan, torch.tensor([-math.inf, -math.inf], dtype=dtype)]).view(1, 1, 4)
        start, end = answer(launcher, Case(scores, None, 2))
        assert start.tolist() == [[[0, 1, 2, 3]]]
        assert end.tolist() == [[[3, 2, 4, 4]]]  # of equal NaNs the later one leaves first


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_id_that_returns_is_a_new_document(launcher: Launcher):
    case = Case(torch.tensor([[[1.0, 2.0, 3.0, 1.0, 2.0]]]), torch.tensor([[7, 7, 8, 7, 7]]), 1)
    check(launcher, case)
    assert answer(launcher, case)[1].tolist() == [[[1, 2, 3, 4, 5]]]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_scores_of_any_strides_are_read(launcher: Launcher):
    scores = torch.randn(50, 3, 2, generator=seeded()).permute(2, 1, 0)
    check(launcher, Case(scores, None, 9))
    check(launcher, Case(scores[..., ::2], None, 9))
    check(launcher, Case(scores[:1].expand(4, -1, -1), None, 9))
    documents = (torch.arange(50) // 7)[:, None].repeat(1, 2).T
    check(launcher, Case(scores, documents, 3))
    check(launcher, Case(scores[..., :25], documents[:1, ::2], 3))


def test_an_empty_row_has_no_lifetimes():
    for launcher in [reference.lifetimes] + [native.lifetimes] * native.available():
        start, end = answer(launcher, Case(torch.zeros(2, 1, 0), None, 3))
        assert start.numel() == end.numel() == 0


@needs_native
@pytest.mark.parametrize("kind", SHAPES_OF_SCORES)
@pytest.mark.parametrize("seqlen", [4095, 9000])
def test_plain_torch_and_cpp_agree_on_long_rows(seqlen: int, kind: str):
    scores = draw_scores((1, 2, seqlen), kind, seeded(seqlen)).float()
    for keep in (1, 100, 1024, 4000):
        for documents in (None, draw_documents(2, seqlen, random.Random(keep))):
            case = Case(scores, documents, keep, keep_first=2, keep_last=50)
            for got, want in zip(answer(reference.lifetimes, case), answer(native.lifetimes, case), strict=True):
                assert torch.equal(got, want), repr(case)


def test_plain_torch_reads_nothing_on_the_host():
    for documents in (None, torch.zeros(2, 100, dtype=torch.int64, device="meta")):
        start = torch.empty(2, 3, 100, dtype=torch.int32, device="meta")
        scores = torch.empty(1, 3, 100, device="meta")
        reference.lifetimes(scores, documents, 5, 1, 2, True, start, torch.empty_like(start))


class Largest(TorchDispatchMode):
    """Notes the most elements that a tensor has."""

    elements = 0

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        result = operator(*arguments, **(keywords or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_plain_torch_needs_memory_in_proportion_to_the_keys():
    start = torch.empty(1, 2, 4096, dtype=torch.int32)
    with Largest() as largest:
        reference.lifetimes(torch.randn(1, 2, 4096), None, 100, 0, 0, True, start, torch.empty_like(start))
    assert start.numel() <= largest.elements <= 2 * start.numel()


@needs_native
def test_threads_change_nothing():
    case = Case(torch.randn(2, 4, 3000, generator=seeded()), None, 100)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = answer(native.lifetimes, case)
        torch.set_num_threads(4)
        together = answer(native.lifetimes, case)
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, alone, together))


WRONG: list[tuple[dict[str, object], type[Exception], str]] = [
    ({"scores": torch.zeros(4, 8)}, ValueError, "scores must have 3 dimensions, got 2"),
    ({"scores": torch.zeros(3, 4, 8)}, ValueError, "scores must have batch 1 or 2"),
    ({"scores": torch.zeros(2, 4, 9)}, ValueError, "start and end must have shape [B, 4, 9]"),
    ({"scores": torch.zeros(2, 5, 8)}, ValueError, "start and end must have shape [B, 5, 8]"),
    (
        {"scores": torch.zeros(2, 4, 8, dtype=torch.int32)},
        TypeError,
        "scores must be float64, float32, float16 or bfloat16, got Int",
    ),
    ({"documents": torch.zeros(2, 7, dtype=torch.int64)}, ValueError, "documents must have shape [2 or 1, 8]"),
    ({"documents": torch.zeros(3, 8, dtype=torch.int64)}, ValueError, "documents must have shape [2 or 1, 8]"),
    ({"documents": torch.zeros(8, dtype=torch.int64)}, ValueError, "documents must have shape [2 or 1, 8]"),
    ({"documents": torch.zeros(2, 8)}, TypeError, "documents must be integers"),
    ({"start": torch.zeros(2, 4, 8)}, TypeError, "start and end must be int32"),
    ({"end": torch.zeros(2, 4, 8, dtype=torch.int64)}, TypeError, "start and end must be int32"),
    ({"end": torch.zeros(1, 4, 8, dtype=torch.int32)}, ValueError, "start and end must have shape"),
    ({"end": torch.zeros(2, 8, 4, dtype=torch.int32).mT}, ValueError, "start and end must be contiguous"),
    ({"keep": -1}, ValueError, "must not be negative"),
    ({"keep_first": -1}, ValueError, "must not be negative"),
    ({"keep_last": -1}, ValueError, "must not be negative"),
    ({"keep_last": 1, "is_causal": False}, ValueError, "keep_last must be 0"),
]


@needs_native
@pytest.mark.parametrize(("change", "error", "message"), WRONG)
def test_cpp_refuses_what_it_would_read_or_write_out_of_bounds(
    change: dict[str, object], error: type[Exception], message: str
):
    outputs = {name: torch.zeros(2, 4, 8, dtype=torch.int32) for name in ("start", "end")}
    right = {"scores": torch.zeros(2, 4, 8), "documents": None, "keep": 3, "keep_first": 0, "keep_last": 0}
    right |= {"is_causal": True} | outputs
    native.lifetimes(**right)
    with pytest.raises(error, match=re.escape(message)):
        native.lifetimes(**{**right, **change})


def test_places_are_in_the_order_of_scores():
    for dtype in DTYPES:
        best_first = [math.inf, 3.0, 1.0, 6e-8, 0.0, -6e-8, -1.0, -math.inf]
        found = places(torch.tensor([[*best_first, math.nan]], dtype=dtype))[0].tolist()
        assert found == sorted(set(found))
    assert len(set(places(torch.tensor([0.0, -0.0])).tolist())) == 1
    assert len(set(places(torch.tensor([1e-44, 2e-44, 0.0])).tolist())) == 3  # denormal numbers are not zero


def test_ranks_count_the_different_better_scores():
    scores = torch.tensor([[[2.0, math.nan, 2.0, -0.0, 5.0, 0.0]]], dtype=torch.float64)
    assert ranks(scores).tolist() == [[[1, 3, 1, 2, 0, 2]]]
    assert ranks(scores).dtype == torch.int32


def test_documents_in_one_piece_pass():
    for seed in range(50):
        values.contiguous_runs("documents", draw_documents(3, 30, random.Random(seed)))
    values.contiguous_runs("documents", torch.zeros(2, 0, dtype=torch.int64))


def test_documents_that_return_are_named():
    documents = torch.tensor([[1, 1, 2, 2, 3, 1], [5, 6, 5, 6, 7, 7]])
    with pytest.raises(
        ValueError,
        match="documents must be contiguous runs of equal ids, got id 5, which returns at position 2 of row 1",
    ):
        values.contiguous_runs("documents", documents)
    with pytest.raises(ValueError, match="got id 1, which returns at position 5 of row 0"):
        values.contiguous_runs("documents", documents[:1].to(torch.int16))


@pytest.mark.parametrize("change", ["keep", "scores", "documents"])
def test_the_check_of_these_tests_tells_a_wrong_answer(change: str):
    case = Case(torch.randn(1, 1, 40, generator=seeded()), torch.arange(40)[None] // 20, 5)
    changes = {"keep": 6, "scores": -case.scores, "documents": torch.arange(40)[None] // 19}
    other = replace(case, **{change: changes[change]})
    assert not all(map(torch.equal, expected(case), answer(reference.lifetimes, other)))
    with pytest.raises(AssertionError):
        check(lambda *arguments: reference.lifetimes(*_arguments(other), *arguments[-2:]), case)


def _arguments(case: Case) -> tuple[object, ...]:
    return (case.scores, case.documents, case.keep, case.keep_first, case.keep_last, case.is_causal)
