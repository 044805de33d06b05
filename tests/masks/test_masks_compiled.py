"""`prepare_mask` and `TileMask` in compiled and exported programs."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from dmattn_ops import flash_dmattn_func, flash_dmattn_varlen_func
from dmattn_ops.bands import band_of
from dmattn_ops.masks import prepare
from dmattn_ops.masks.prepare import dynamic_mask, prepare_mask
from dmattn_ops.masks.tile_mask import TileMask


def random_keep(*shape: int) -> Tensor:
    return torch.rand(shape) < 0.6


def prepared_by(kind: str, mask: Tensor, documents: Tensor, seqlen: int) -> TileMask:
    if kind == "bits":
        return prepare_mask(mask, is_causal=True, window_size=(20, None))
    if kind == "padding":
        return prepare_mask(mask[:, 0, 0], seqlen_q=seqlen, is_causal=True)
    if kind == "documents":
        return prepare_mask(documents=documents)
    if kind == "documents and padding":
        return prepare_mask(mask[:, 0, 0], documents=documents, is_causal=True)
    return prepare_mask(mask, documents=documents)


KINDS = ("bits", "padding", "documents", "documents and padding", "documents and mask")


@pytest.mark.parametrize("kind", KINDS)
def test_prepare_mask_compiles_without_breaks_and_without_recompiling_over_sizes(kind: str):
    torch._dynamo.reset()
    torch.manual_seed(0)
    counter = CompileCounterWithBackend("aot_eager")

    def function(mask: Tensor, documents: Tensor) -> tuple[TileMask, Tensor]:
        seqlen = documents.shape[1]
        prepared = prepared_by(kind, mask, documents, seqlen)
        band = band_of(True, "bottom_right", (None, None))
        resolved, *_ = prepare.resolve(prepared, band, seqlen, seqlen)
        return prepared, resolved.row_tiles[..., 1:3].sum()

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for batch, heads, seqlen in ((2, 3, 600), (5, 4, 333), (4, 2, 256), (3, 5, 1000)):
        mask, documents = random_keep(batch, heads, seqlen, seqlen), torch.randint(-3, 3, (batch, seqlen)) * (1 << 40)
        (prepared, listed), (expected, expected_listed) = compiled(mask, documents), function(mask, documents)
        assert isinstance(prepared, TileMask)
        assert torch.equal(prepared.to_dense(), expected.to_dense())
        assert listed == expected_listed
    assert counter.frame_count == 1


@pytest.mark.parametrize("rows", ["all", "one"])
def test_a_prepared_mask_is_an_argument_of_compiled_functions(rows: str):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def function(mask: TileMask, query: Tensor) -> tuple[Tensor, Tensor]:
        seqlen = query.shape[1]
        band = band_of(True, "bottom_right", (None, None))
        resolved, *_ = prepare.resolve(mask, band, seqlen, seqlen)
        return resolved.row_tiles[..., 1:3].sum(), mask.density()

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for batch, heads, seqlen in ((2, 3, 600), (5, 4, 333), (4, 2, 256), (3, 5, 1000)):
        keep = random_keep(batch, heads, seqlen if rows == "all" else 1, seqlen)
        prepared, query = prepare_mask(keep, seqlen_q=seqlen, is_causal=True), torch.zeros(batch, seqlen)
        assert compiled(prepared, query) == function(prepared, query)
    assert counter.frame_count == 1


def test_offsets_become_documents_in_a_compiled_function():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def function(query: Tensor, cu_seqlens: Tensor) -> Tensor:
        documents = torch.bucketize(torch.arange(query.shape[1]), cu_seqlens[1:], right=True)[None]
        return flash_dmattn_func(query, query, query, prepare_mask(documents=documents, is_causal=True))

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for lengths in ([50, 0, 78, 130], [300, 7], [64, 64, 64, 3, 400]):
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        query = torch.randn(sum(lengths), 2, 16)
        expected = flash_dmattn_varlen_func(
            query, query, query, cu_seqlens, cu_seqlens, max(lengths), max(lengths), is_causal=True
        )
        torch.testing.assert_close(compiled(query[None], cu_seqlens)[0], expected)
        frames.append(counter.frame_count)
    assert frames == frames[:1] * 3, "recompiled"


def test_parts_of_a_mask_are_taken_in_one_graph_for_all_lengths():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def function(scores: Tensor, chunk: Tensor) -> list[Tensor]:
        first, stop = chunk.shape[0], 2 * chunk.shape[0]
        rows = dynamic_mask(scores, 5, queries=(first, stop))
        start = torch.zeros(scores.shape, dtype=torch.int32)
        made = prepare_mask(intervals=(start + 3, start + 40), seqlen_q=scores.shape[2])
        part = made.queries(first, stop).keys(first, stop).batch(0, 1).heads(0, 1).clone()
        return [rows.to_dense(), part.to_dense()]

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for seqlen, first in ((40, 10), (64, 7), (90, 30)):
        given = torch.randn(2, 3, seqlen), torch.zeros(first)
        for one, other in zip(compiled(*given), function(*given), strict=True):
            assert torch.equal(one, other)
    assert counter.frame_count == 1


class Prepares(torch.nn.Module):
    def forward(self, mask: Tensor, query: Tensor) -> Tensor:
        return prepare_mask(mask, is_causal=True).to_dense() & (query[:, None, :, None] > 0)


class Takes(torch.nn.Module):
    def forward(self, mask: TileMask) -> tuple[Tensor, TileMask]:
        return mask.to_dense(), mask


@pytest.mark.parametrize("strict", [True, False])
def test_prepare_mask_exports_with_dynamic_sizes(strict: bool):
    auto = torch.export.Dim.AUTO
    shapes = {"mask": (auto, None, auto, auto), "query": (auto, auto)}
    arguments = random_keep(2, 1, 200, 200), torch.randn(2, 200)
    program = torch.export.export(Prepares(), arguments, strict=strict, dynamic_shapes=shapes)
    assert [node.target for node in program.graph.nodes if "dmattn" in str(node.target)] == [
        torch.ops.dmattn.pack_mask.default,
        *[torch.ops.dmattn.spread_lists.default] * 2,  # of to_dense
    ]
    for size in ((3, 333), (2, 256)):
        arguments = random_keep(size[0], 1, size[1], size[1]), torch.randn(size)
        assert torch.equal(program.module()(*arguments), Prepares()(*arguments))


@pytest.mark.parametrize("strict", [True, False])
def test_a_prepared_mask_is_an_argument_and_a_result_of_exported_programs(strict: bool):
    prepared, other = (prepare_mask(random_keep(2, 1, 200, 200)) for _ in range(2))
    program = torch.export.export(Takes(), (prepared,), strict=strict)
    dense, result = program.module()(other)
    assert torch.equal(dense, other.to_dense())
    assert isinstance(result, TileMask)
    assert torch.equal(result.to_dense(), other.to_dense())


@pytest.mark.parametrize("beside", ["mask", "documents", "returning documents"])
def test_a_broken_promise_beside_a_mask_or_documents_is_an_error_in_compiled_calls_too(beside: str):
    torch._dynamo.reset()
    seqlen = 150
    query = torch.randn(1, seqlen, 2, 16)
    start = torch.zeros(1, 1, seqlen, dtype=torch.int32)
    shown = {"mask": {"mask": torch.ones(1, 1, seqlen, seqlen, dtype=torch.bool)}}.get(beside)
    ids = (torch.arange(seqlen) // 75 if beside == "documents" else torch.arange(seqlen) % 2)[None]
    shown = shown or {"documents": ids}
    most = 150 if beside == "mask" else 75

    def call(query: Tensor, start: Tensor, shown: dict[str, Tensor], at_most: int) -> Tensor:
        made = prepare_mask(intervals=(start, start + seqlen), at_most=at_most, seqlen_q=seqlen, **shown)
        return flash_dmattn_func(query, query, query, made)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected = call(query, start, shown, most)
    torch.testing.assert_close(compiled(query, start, shown, most), expected)
    for function in (call, compiled):
        with pytest.raises(ValueError, match=f"at_most must be at least the most keys that a query sees, {most}, got"):
            function(query, start, shown, most - 1)


EVERY = torch.full((1, 1, 9), 9, dtype=torch.int32)
OF_NUMBERS = {  # a mask of a number, one that is refused, and what then is said; others are numbers beyond every length
    "keep": (
        lambda scores, n: dynamic_mask(scores, n, keep_first=n, keep_last=n),
        -1,
        "keep must not be negative, got -1",
    ),
    "keep of all": (
        lambda scores, n: dynamic_mask(scores, n, is_causal=False),
        -2,
        "keep must not be negative, got -2",
    ),
    "rows": (
        lambda scores, n: dynamic_mask(scores, 2).queries(0, n),
        10,
        "queries must be a range inside 0 to 9, got 0 to 10",
    ),
    "chosen rows": (
        lambda scores, n: dynamic_mask(scores, 2, queries=(n, 9)),
        -1,
        "queries must be a range inside 0 to 9, got -1 to 9",
    ),
    "promise": (
        lambda scores, n: prepare_mask(intervals=(None, EVERY), seqlen_q=9, at_most=n + 6),
        -7,
        "at_most must not be negative, got -1",
    ),
    "queries": (
        lambda scores, n: prepare_mask(scores[:, 0] > 0, seqlen_q=n),
        -1,
        "seqlen_q must not be negative, got -1",
    ),
    "diagonal": (
        lambda scores, n: prepare_mask(scores[:, 0] > 0, seqlen_q=9, is_causal=True, causal_from=-n),
        1 << 30,
        f"causal_from must be between {1 - (1 << 30)} and {(1 << 30) - 1}, got {-(1 << 30)}",
    ),
    "window": (
        lambda scores, n: prepare_mask(scores[:, 0] > 0, seqlen_q=9, window_size=(n, n)),
        -1,
        "window_size left must not be negative (None is unlimited), got -1",
    ),
}


@pytest.mark.parametrize("kind", OF_NUMBERS)
def test_a_traced_number_is_refused_in_the_same_words_and_may_be_beyond_every_length(kind: str):
    torch._dynamo.reset()
    torch.manual_seed(0)
    scores, (mask_of, wrong, words) = torch.randn(1, 1, 9), OF_NUMBERS[kind]
    beyond = () if kind in ("rows", "chosen rows", "queries", "diagonal") else ((1 << 30) + 5, 1 << 62, sys.maxsize)

    def attend(scores: Tensor, n: int) -> Tensor:
        mask = mask_of(scores, n)
        query = scores[:, 0, : mask.seqlen_q, None, None]
        return flash_dmattn_func(query, scores[:, 0, :, None, None], scores[:, 0, :, None, None], mask)

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    for n in (4, 5, 7, *beyond):
        torch.testing.assert_close(compiled(scores, n), attend(scores, n))
    for function, error in ((attend, ValueError), (compiled, Exception)):
        with pytest.raises(error, match=re.escape(words)):
            function(scores, wrong)
