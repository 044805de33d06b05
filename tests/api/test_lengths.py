"""One graph for every length from 2 on: compiled and exported, with every kind of mask, and masks as inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.export import Dim, ShapesCollection

from dmattn_ops import TileMask, dynamic_mask, flash_dmattn_func, flash_dmattn_varlen_func, prepare_mask
from dmattn_ops.bands import band_of
from dmattn_ops.meta import list_capacity, tile_records
from tests.support import call_inputs

HEADS = 5
SIZES = ((3, 64), (5, 65), (6, 128), (7, 129), (2, 200), (4, 1000), (2, 2))  # of batch and length: around tiles of 128
CAUSAL = {"is_causal": True}
WINDOW = {"is_causal": True, "causal_from": "top_left", "window_size": (20, None)}


def drawn(batch: int, seqlen: int, *names: str) -> dict[str, Tensor]:
    """Draw what masks are made of."""
    ends = torch.randint(0, seqlen + 1, (2, batch, 1, seqlen), dtype=torch.int32)
    every = {
        "dense": torch.rand(batch, 1, seqlen, seqlen) < 0.5,
        "padding": torch.rand(batch, seqlen) < 0.7,
        "documents": torch.randint(0, 3, (batch, seqlen)).sort(-1).values,
        "others": torch.randint(0, 3, (batch, seqlen)),
        "start": ends.amin(0),
        "end": ends.amax(0),
        "scores": torch.randn(batch, HEADS, seqlen),
    }
    return {name: every[name] for name in names}


AXES = {"dense": (0, 2, 3), "padding": (0, 1), "documents": (0, 1), "others": (0, 1), "scores": (0, 2)}
AXES |= dict.fromkeys(("start", "end"), (0, 2))  # of batch, and of the length
Maker = Callable[..., "Tensor | TileMask"]
# what each kind of mask is made of, and how, from the length of the queries
KINDS: dict[str, tuple[tuple[str, ...], Maker]] = {
    "dense": (("dense",), lambda seqlen, dense: dense),
    "prepared dense": (("dense",), lambda seqlen, dense: prepare_mask(dense)),
    "dense with a window": (("dense",), lambda seqlen, dense: prepare_mask(dense, window_size=(30, 3))),
    "dense with a wide window": (("dense",), lambda seqlen, dense: prepare_mask(dense, window_size=(900, 3))),
    "key padding": (("padding",), lambda seqlen, padding: padding[:, None, None]),
    "prepared padding": (("padding",), lambda seqlen, padding: prepare_mask(padding, seqlen_q=seqlen)),
    "documents": (("documents",), lambda seqlen, documents: prepare_mask(documents=documents)),
    "pair of documents": (
        ("documents", "others"), lambda seqlen, documents, others: prepare_mask(documents=(documents, others)),
    ),
    "documents and padding": (
        ("documents", "padding"), lambda seqlen, documents, padding: prepare_mask(padding, documents=documents),
    ),
    "ends": (("end",), lambda seqlen, end: prepare_mask(intervals=(None, end), seqlen_q=seqlen)),
    "intervals": (("start", "end"), lambda seqlen, start, end: prepare_mask(intervals=(start, end), seqlen_q=seqlen)),
    "hidden": (
        ("start", "end"),
        lambda seqlen, start, end: prepare_mask(
            intervals=(start, end), hidden=(start + 3, end - 3), at_most=1 << 20, seqlen_q=seqlen
        ),
    ),
    "intervals and padding": (
        ("start", "end", "padding"),
        lambda seqlen, start, end, padding: prepare_mask(padding, intervals=(start, end), seqlen_q=seqlen),
    ),
    "dynamic": (("scores",), lambda seqlen, scores: dynamic_mask(scores, 10, keep_last=2)),
    "dynamic, in documents": (
        ("scores", "documents"), lambda seqlen, scores, documents: dynamic_mask(scores, 10, documents=documents, keep_first=2),
    ),
    "intervals and documents": (
        ("start", "end", "documents"),
        lambda seqlen, start, end, documents: prepare_mask(intervals=(start, end), documents=documents, seqlen_q=seqlen),
    ),
}  # fmt: skip


class Model(torch.nn.Module):
    """Attention with a mask of its own making."""

    def __init__(self, kind: str, band: dict) -> None:
        super().__init__()
        self.kind, self.band = kind, band

    def forward(self, query: Tensor, parts: dict[str, Tensor]) -> Tensor:
        mask = KINDS[self.kind][1](query.shape[1], **parts)
        return flash_dmattn_func(query, query, query, mask, **self.band)


class Takes(torch.nn.Module):
    """Attention with a prepared mask, which is an input."""

    def forward(self, query: Tensor, mask: TileMask) -> Tensor:
        return flash_dmattn_func(query, query, query, mask, is_causal=True)


def compare(function: Callable, expected: Callable, query: Tensor, *rest: object) -> None:
    """Compare outputs and gradients."""
    results = []
    for call in (function, expected):
        out = call(query, *rest)
        results.append((out, *torch.autograd.grad(out.sin().sum(), query)))
    torch.testing.assert_close(*results)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("band", [CAUSAL, WINDOW], ids=["causal", "window from the top"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_model_is_one_graph_for_every_length(kind: str, band: dict):
    model = Model(kind, band)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for number, (batch, seqlen) in enumerate(SIZES):
        query = torch.randn(batch, seqlen, HEADS, 8, requires_grad=True)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            compare(compiled, model, query, drawn(batch, seqlen, *KINDS[kind][0]))
    assert counters["stats"]["unique_graphs"] == 1


PREPARED = (
    "prepared dense", "dense with a window", "dense with a wide window", "prepared padding", "documents", "intervals", "hidden",
    "dynamic",
)  # fmt: skip


@pytest.mark.parametrize("kind", PREPARED)
def test_a_mask_is_an_input_of_one_graph_for_every_length(kind: str):
    model = Takes()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    names, maker = KINDS[kind]
    for number, (batch, seqlen) in enumerate(SIZES):
        query = torch.randn(batch, seqlen, HEADS, 8, requires_grad=True)
        mask = maker(seqlen, **drawn(batch, seqlen, *names))
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            compare(compiled, model, query, mask)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("kind", ["prepared dense", "documents"])
def test_a_graph_that_torch_finds_in_its_cache_is_one_for_every_length(kind: str):
    # Torch runs the guards of a cached graph as Python text on symbols: `max` in one would be a guard of which is larger.
    # Two tiles have 8 words of bits: a head dimension of 8 too would be the same size to torch.
    names, maker = KINDS[kind]
    with fresh_cache(), torch.no_grad():
        for _ in range(2):
            torch._dynamo.reset()
            compiled = torch.compile(flash_dmattn_func, fullgraph=True, dynamic=True)
            for number, (batch, seqlen) in enumerate(((3, 140), (5, 300), (2, 65))):
                query, mask = torch.randn(batch, seqlen, HEADS, 24), maker(seqlen, **drawn(batch, seqlen, *names))
                with torch._dynamo.config.patch(error_on_recompile=number > 0):
                    out = compiled(query, query, query, mask)
                torch.testing.assert_close(out, flash_dmattn_func(query, query, query, mask))
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1


def exported_sizes(kind: str, dim: Callable[[str], object]) -> tuple[dict, dict]:
    """Return the dynamic dimensions of a model's inputs."""
    batch, seqlen = dim("batch"), dim("seqlen")
    of_parts = {name: {axis: batch if axis == 0 else seqlen for axis in AXES[name]} for name in KINDS[kind][0]}
    return {0: batch, 1: seqlen}, of_parts


def named(name: str) -> Dim:
    return Dim(name, min=2, max=2**20 if name == "seqlen" else 1 << 12)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_model_takes_every_length(kind: str, strict: bool):
    for band in (CAUSAL, WINDOW):
        model = Model(kind, band)
        inputs = torch.randn(3, 64, HEADS, 8), drawn(3, 64, *KINDS[kind][0])
        sizes = exported_sizes(kind, {name: named(name) for name in ("batch", "seqlen")}.__getitem__)
        program = torch.export.export(model, inputs, dynamic_shapes=sizes, strict=strict).module()
        for batch, seqlen in ((5, 65), (6, 129), (2, 300), (2, 2)):
            query, parts = torch.randn(batch, seqlen, HEADS, 8), drawn(batch, seqlen, *KINDS[kind][0])
            torch.testing.assert_close(program(query, parts), model(query, parts))


class Density(torch.nn.Module):
    """The share of tiles that a mask of its own making visits."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, query: Tensor, parts: dict[str, Tensor]) -> Tensor:
        made = KINDS[self.kind][1](query.shape[1], **parts)
        assert isinstance(made, TileMask)
        return made.density()


@pytest.mark.parametrize("kind", ["prepared dense", "documents", "intervals", "hidden", "dynamic"])
def test_the_density_of_a_mask_is_one_graph_for_every_length(kind: str):
    model, names = Density(kind), KINDS[kind][0]
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    sizes = exported_sizes(kind, {name: named(name) for name in ("batch", "seqlen")}.__getitem__)
    inputs = torch.randn(3, 64, HEADS, 8), drawn(3, 64, *names)
    program = torch.export.export(model, inputs, dynamic_shapes=sizes).module()
    for number, (batch, seqlen) in enumerate(SIZES):
        query, parts = torch.randn(batch, seqlen, HEADS, 8), drawn(batch, seqlen, *names)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            assert compiled(query, parts) == program(query, parts) == model(query, parts)


class Across(torch.nn.Module):
    """Attention of some queries to other keys, with a part of a prepared mask that the call gives a narrower band."""

    def forward(self, query: Tensor, key: Tensor, dense: Tensor) -> Tensor:
        mask = prepare_mask(dense, window_size=(900, 3)).queries(7, 7 + query.shape[1])
        return flash_dmattn_func(query, key, key, mask, is_causal=True, window_size=(700, None))


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_an_exported_model_takes_every_pair_of_lengths(strict: bool):
    def inputs(batch: int, seqlen_q: int, seqlen_k: int) -> tuple[Tensor, ...]:
        query, key = (torch.randn(batch, seqlen, HEADS, 8) for seqlen in (seqlen_q, seqlen_k))
        return query, key, torch.rand(batch, 1, 7 + seqlen_q, seqlen_k) < 0.5

    batch, seqlen_q, seqlen_k = named("batch"), Dim("seqlen_q", min=2, max=2**20), named("seqlen")
    sizes = {0: batch, 1: seqlen_q}, {0: batch, 1: seqlen_k}, {0: batch, 2: seqlen_q + 7, 3: seqlen_k}
    program = torch.export.export(Across(), inputs(3, 40, 64), dynamic_shapes=sizes, strict=strict).module()
    for lengths in ((5, 65, 300), (2, 300, 65), (2, 2, 2), (2, 2, 513)):
        given = inputs(*lengths)
        torch.testing.assert_close(program(*given), Across()(*given))


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("kind", ["dense", "documents", "intervals", "dynamic"])
def test_an_exporter_that_finds_the_sizes_finds_no_others(kind: str, strict: bool):
    model = Model(kind, CAUSAL)
    inputs = torch.randn(3, 64, HEADS, 8), drawn(3, 64, *KINDS[kind][0])
    sizes = exported_sizes(kind, lambda name: Dim.AUTO)
    program = torch.export.export(model, inputs, dynamic_shapes=sizes, strict=strict)
    assert {(limits.lower, str(limits.upper)) for limits in program.range_constraints.values()} == {(2, "int_oo")}
    query, parts = torch.randn(2, 200, HEADS, 8), drawn(2, 200, *KINDS[kind][0])
    torch.testing.assert_close(program.module()(query, parts), model(query, parts))


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("kind", PREPARED)
def test_an_exported_model_takes_masks_of_every_length(kind: str, strict: bool):
    names, maker = KINDS[kind]

    def inputs(batch: int, seqlen: int) -> tuple[Tensor, TileMask]:
        return torch.randn(batch, seqlen, HEADS, 8), maker(seqlen, **drawn(batch, seqlen, *names))

    query, mask = inputs(3, 200)
    sizes = ShapesCollection()
    for part in (mask.lengths, *mask.mask[:-1]):
        if part is not None:
            sizes[part] = {axis: Dim.AUTO for axis, size in enumerate(part.shape) if size > 1}
    sizes[query] = {0: named("batch"), 1: named("seqlen")}
    program = torch.export.export(Takes(), (query, mask), dynamic_shapes=sizes, strict=strict).module()
    for batch, seqlen in ((5, 65), (2, 300), (2, 2)):
        query, mask = inputs(batch, seqlen)
        torch.testing.assert_close(program(query, mask), Takes()(query, mask))


# Errors in graphs of dynamic shapes name sizes.

WRONG = {
    "key": (
        lambda query, dense: flash_dmattn_func(query, query[:, 1:], query),
        "key must have shape (3, 64, 5, 8), got (3, 63, 5, 8)",
    ),
    "mask": (
        lambda query, dense: flash_dmattn_func(query, query, query, dense[..., 1:]),
        "mask must have shape (batch 3 or 1, heads 5 or 1, queries 64 or 1, keys 64), got (3, 1, 64, 63)",
    ),
    "bias": (
        lambda query, dense: flash_dmattn_func(query, query, query, bias=dense.float()[:, :, 2:]),
        "bias must have shape (batch 3 or 1, heads 5 or 1, queries 64 or 1, keys 64), got (3, 1, 62, 64)",
    ),
    "prepared": (
        lambda query, dense: flash_dmattn_func(query[:, 1:], query, query, prepare_mask(dense)),
        "mask must have shape (batch 3 or 1, heads 5 or 1, queries 63 or 1, keys 64), got (3, 1, 64, 64)",
    ),
    "documents": (
        lambda query, dense: prepare_mask(dense, documents=dense[:, 0, 0, 1:].int()),
        "documents must have shape (B|1, 64), got (3, 63)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_in_dynamic_graphs_name_sizes(name: str):
    call, words = WRONG[name]
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="eager")
    with pytest.raises(Exception) as caught:
        compiled(torch.randn(3, 64, HEADS, 8), drawn(3, 64, "dense")["dense"])
    assert words in str(caught.value), str(caught.value)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("window", [20, None])
def test_sizes_of_lists_are_computed_in_traced_code(dynamic: bool, window: int | None):
    # integrations ask for them in code that Dynamo traces, where a length is a plain number or a symbol
    def records_and_capacity(tensor: Tensor) -> Tensor:
        rows, columns = (tile_records(seqlen) for seqlen in tensor.shape)
        limits = band_of(True, "bottom_right", (window, None)).limits(*tensor.shape)
        return tensor.new_empty((rows, list_capacity(columns, *limits)))

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(records_and_capacity, fullgraph=True, dynamic=dynamic, backend="eager")
    shapes = (300, 1000), (200, 129), (2, 2)
    capacities = (8, 2, 2) if window is None else (3, 2, 2)
    for (seqlen_q, seqlen_k), capacity in zip(shapes, capacities, strict=True):
        lengths = torch.empty(seqlen_q, seqlen_k)
        assert compiled(lengths).shape == records_and_capacity(lengths).shape == (max(2, -(-seqlen_q // 128)), capacity)
    assert counters["stats"]["unique_graphs"] == (1 if dynamic else 3)


def test_packed_sequences_of_every_length_are_one_graph():
    def call(query: Tensor, offsets: Tensor, longest: int, mask: Tensor) -> Tensor:
        return flash_dmattn_varlen_func(query, query, query, offsets, offsets, longest, longest, mask, is_causal=True)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for number, lengths in enumerate(([64, 30], [65, 3, 128], [129, 1, 2, 5], [2, 3, 4, 5, 6])):
        rows, (offsets, _, longest, _) = call_inputs.packed(lengths, lengths)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            compare(compiled, call, rows[0], offsets, longest, call_inputs.random_mask(1, sum(lengths)))
    assert counters["stats"]["unique_graphs"] == 1
