"""The Triton kernels of lifetimes on a GPU, against the C++ ones, at the lengths that choose each of their chunks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from selection_cases import DTYPES, SHAPES_OF_SCORES, Case, draw, draw_documents, draw_scores
from torch import Tensor

from dmattn_ops.kernels import native
from dmattn_ops.kernels.selection import reference

pytestmark = pytest.mark.gpu


def on_gpu(case: Case) -> tuple[Tensor, Tensor]:
    """Return what the kernels write, on the GPU."""
    from dmattn_ops.kernels.selection.launch import lifetimes

    documents = None if case.documents is None else case.documents.cuda()
    batch = max(case.scores.shape[0], 1 if documents is None else documents.shape[0])
    start = torch.full((batch, *case.scores.shape[1:]), -77, dtype=torch.int32, device="cuda")
    end = torch.full_like(start, -78)
    rule = (case.keep, case.keep_first, case.keep_last, case.is_causal)
    lifetimes(case.scores.cuda(), documents, *rule, start, end)
    return start, end


def check_on_gpu(case: Case) -> None:
    exact = native.lifetimes if native.available() else reference.lifetimes
    start, end = on_gpu(case)
    want = torch.empty(start.shape, dtype=torch.int32), torch.empty(start.shape, dtype=torch.int32)
    exact(case.scores, case.documents, case.keep, case.keep_first, case.keep_last, case.is_causal, *want)
    assert torch.equal(start.cpu(), want[0]), repr(case)
    assert torch.equal(end.cpu(), want[1]), repr(case)


@pytest.mark.parametrize("first", range(0, 300, 20))
def test_any_short_case_is_exact(first: int):
    for seed in range(first, first + 20):
        check_on_gpu(draw(seed, 3000))


@pytest.mark.parametrize("kind", SHAPES_OF_SCORES)
@pytest.mark.parametrize(
    ("seqlen", "keep"), [(4096, 1024), (32768, 1024), (32769, 5000), (131072, 2048), (300_001, 9000)]
)
def test_every_kind_of_scores_is_exact_at_every_length(seqlen: int, keep: int, kind: str):
    pick = random.Random(seqlen)
    scores = draw_scores((1, 2, seqlen), kind, torch.Generator().manual_seed(seqlen)).to(pick.choice(DTYPES))
    case = Case(scores, None, keep, keep_first=4, keep_last=128)
    check_on_gpu(case)
    check_on_gpu(replace(case, documents=draw_documents(1, seqlen, pick), keep=keep // 4))


def test_a_million_keys_are_exact():
    scores = torch.randn(1, 8, 1 << 20, generator=torch.Generator().manual_seed(1)).bfloat16()
    check_on_gpu(Case(scores, None, 2048))


def test_a_captured_graph_finds_the_lifetimes_of_new_scores():
    from dmattn_ops.kernels.selection.launch import lifetimes

    scores = torch.randn(1, 4, 20_000, device="cuda")
    documents = (torch.arange(20_000, device="cuda") // 6000)[None]
    start = torch.empty(1, 4, 20_000, dtype=torch.int32, device="cuda")
    end = torch.empty_like(start)
    lifetimes(scores, documents, 512, 0, 0, True, start, end)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lifetimes(scores, documents, 512, 0, 0, True, start, end)
    scores.copy_(torch.randn_like(scores))
    graph.replay()
    want = on_gpu(Case(scores.cpu(), documents.cpu(), 512))
    assert torch.equal(start, want[0]) and torch.equal(end, want[1])
    check_on_gpu(Case(scores.cpu(), documents.cpu(), 512))


def test_nothing_waits_for_the_gpu():
    case = Case(torch.randn(1, 2, 9000), (torch.arange(9000) // 4000)[None], 300)
    on_gpu(case)
    scores, documents = case.scores.cuda(), None if case.documents is None else case.documents.cuda()
    start = torch.empty(1, 2, 9000, dtype=torch.int32, device="cuda")
    end = torch.empty_like(start)
    from dmattn_ops.kernels.selection.launch import lifetimes

    torch.cuda.set_sync_debug_mode("error")
    try:
        for values in (scores, scores.double(), scores.half()):
            lifetimes(values, documents, 300, 0, 0, True, start, end)
            reference.lifetimes(values, documents, 300, 0, 0, True, start, end)
    finally:
        torch.cuda.set_sync_debug_mode("default")
