"""The Triton kernels of lifetimes against the definition of a dynamic mask, in the interpreter."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest
import torch

from dmattn_ops.kernels.selection import reference
from dmattn_ops.kernels.selection.launch import lifetimes
from tests.interpreter.conftest import StrictMemory
from tests.support.selection_cases import (
    SHAPES_OF_SCORES,
    Case,
    answer,
    check,
    draw,
    draw_documents,
    draw_scores,
)


def in_small_chunks(*arguments: object) -> None:
    """Cut rows shorter than on a GPU, so that few keys cross many borders."""
    lifetimes(*arguments, chunk=64, fine=32, span=32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(40))
def test_lifetimes_say_what_the_definition_shows(strict_memory: StrictMemory, seed: int):
    check(in_small_chunks, draw(seed, 200, batches=(1, 2)))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("keep", [3, 70, 140])  # within a span, more than a chunk, more than two
@pytest.mark.parametrize("kind", SHAPES_OF_SCORES)
def test_every_kind_of_scores_crosses_chunks_exactly(strict_memory: StrictMemory, kind: str, keep: int):
    scores = draw_scores((1, 1, 260), kind, torch.Generator().manual_seed(1)).float()
    check(in_small_chunks, Case(scores, None, keep))


@pytest.mark.parametrize("seqlen", [31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 193])
def test_rows_that_end_at_borders_are_exact(strict_memory: StrictMemory, seqlen: int):
    scores = torch.randn(1, 1, seqlen, generator=torch.Generator().manual_seed(seqlen)).bfloat16()
    check(in_small_chunks, Case(scores, None, 20, keep_first=2, keep_last=3))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("border", [32, 64, 96, 128])
@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_documents_that_change_at_borders_are_exact(strict_memory: StrictMemory, border: int, shift: int):
    documents = (torch.arange(180) >= border + shift).int()[None]
    scores = torch.randn(1, 1, 180, generator=torch.Generator().manual_seed(border)).half()
    check(in_small_chunks, Case(scores, documents, 12, keep_first=1))


def test_an_id_that_returns_is_a_new_document():
    check(in_small_chunks, Case(torch.randn(1, 1, 150), torch.arange(150)[None] // 25 % 2, 6))


def test_nan_zero_and_denormal_scores_are_in_order():
    values = [-math.nan, -math.inf, math.nan, 0.0, -0.0, 1e-41, -1e-41, math.inf, 5e-8, -5e-8]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for keep in (1, 3, 6, 9):
            check(in_small_chunks, Case(torch.tensor([[values * 4]], dtype=dtype), None, keep))


def test_scores_and_documents_of_any_strides_are_read(strict_memory: StrictMemory):
    scores = torch.randn(70, 2, 2).permute(2, 1, 0)
    check(in_small_chunks, Case(scores, None, 9))
    check(in_small_chunks, Case(scores[:1].expand(2, -1, -1), None, 9))
    documents = (torch.arange(70) // 30)[:, None].repeat(1, 2).T
    check(in_small_chunks, Case(scores[:1], documents, 9))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("seqlen", "keep"), [(1, 1), (1025, 1000), (1000, 100), (2500, 300), (2500, 1300)])
def test_rows_cut_as_on_a_gpu_equal_plain_torch(strict_memory: StrictMemory, seqlen: int, keep: int):
    pick = random.Random(seqlen + keep)
    scores = draw_scores((1, 1, seqlen), pick.choice(SHAPES_OF_SCORES), torch.Generator().manual_seed(keep)).float()
    for documents in (None, draw_documents(1, seqlen, pick)):
        case = Case(scores, documents, keep, keep_first=1, keep_last=5)
        for got, want in zip(answer(lifetimes, case), answer(reference.lifetimes, case), strict=True):
            assert torch.equal(got, want)


def test_more_spans_of_documents_than_are_read_at_once_are_exact():
    documents = torch.zeros(1, 9000, dtype=torch.int64)
    documents[:, 8500:] = 1
    case = Case(torch.randn(1, 1, 9000), documents, 9000)
    cut = partial(lifetimes, chunk=16384, fine=128, span=32)  # 282 spans, in blocks of 256
    for got, want in zip(answer(cut, case), answer(reference.lifetimes, case), strict=True):
        assert torch.equal(got, want)


def test_rows_too_long_for_positions_in_keys_are_refused():
    start = torch.empty(1, dtype=torch.int32).expand(1, 1, (1 << 24) + 1)
    with pytest.raises(NotImplementedError, match="at most 16777216 keys, got 16777217"):
        lifetimes(torch.zeros(1).expand(1, 1, start.shape[2]), None, 1, 0, 0, True, start, start)
