"""Lengths that only the data tell, `x[:, keep]`, in one graph: every kind of mask, and everything that a call takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from dmattn_ops import (
    TileMask,
    dynamic_mask,
    flash_dmattn_func,
    flash_dmattn_qkvpacked_func,
    flash_dmattn_varlen_func,
    prepare_mask,
)
from tests.api.test_lengths import AXES, CAUSAL, HEADS, KINDS, WINDOW, Model, drawn

LENGTHS = (64, 65, 200, 2, 1, 0)
WHOLE = 200
WITHOUT_ONE = ("prepared dense", "dense with a window", "dense with a wide window")  # one row is a row for every query


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield
    torch._dynamo.reset()


def kept(tensor: Tensor, axes: tuple[int, ...], keep: Tensor) -> Tensor:
    """Return what `keep` keeps of a tensor along some of its axes."""
    for axis in axes:
        tensor = tensor[(slice(None),) * axis + (keep,)]
    return tensor


def compare(
    function: Callable[..., tuple[Tensor, ...]], query: Tensor, *rest: object, lengths: tuple[int, ...] = LENGTHS
) -> None:
    """Compare a function of (query, keep, ...) with itself compiled, at every length, results and gradients."""
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for number, length in enumerate(lengths):
        keep = torch.randperm(WHOLE) < length
        results = []
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            for call in (compiled, function):
                torch.manual_seed(number)
                outs = call(query, keep, *rest)
                results.append((*outs, *torch.autograd.grad(outs[0].sin().sum(), query)))
        torch.testing.assert_close(*results)
    assert counters["stats"]["unique_graphs"] == 1


def rows() -> Tensor:
    return torch.randn(2, WHOLE, HEADS, 8, requires_grad=True)


@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_made_of_what_the_data_keeps(kind: str):
    model = Model(kind, WINDOW if "documents" in kind else CAUSAL)

    def call(query: Tensor, keep: Tensor, parts: dict[str, Tensor]) -> tuple[Tensor, ...]:
        parts = {name: kept(part, tuple(axis for axis in AXES[name] if axis), keep) for name, part in parts.items()}
        return (model(query[:, keep], parts),)

    lengths = tuple(length for length in LENGTHS if length != 1 or kind not in WITHOUT_ONE)
    compare(call, rows(), drawn(2, WHOLE, *KINDS[kind][0]), lengths=lengths)


@pytest.mark.parametrize("kind", ["dense", "documents and padding", "intervals and documents", "dynamic, in documents"])
def test_batches_are_what_the_data_keeps(kind: str):
    model = Model(kind, CAUSAL)

    def call(query: Tensor, keep: Tensor, parts: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return (model(query[keep], {name: part[keep] for name, part in parts.items()}),)

    query = torch.randn(WHOLE, 5, HEADS, 8, requires_grad=True)
    compare(call, query, drawn(WHOLE, 5, *KINDS[kind][0]), lengths=(9, 3, 2, 1))


def everything(query: Tensor, keep: Tensor, bias: Tensor, sink: Tensor) -> tuple[Tensor, ...]:
    query, bias = query[:, keep], kept(bias, (2, 3), keep)
    by_key = torch.ones(WHOLE)[keep][None, None, None]
    first = flash_dmattn_func(
        query, query, query, bias=bias, sink=sink, window_size=(9, 3), return_lse=True, return_max=True
    )
    return (*first, flash_dmattn_func(query, query, query, bias=by_key, softcap=2.0, dropout_p=0.5, is_causal=True))


def packed(query: Tensor, keep: Tensor, bias: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    tokens, bias, mask = query[0, keep], bias[:, keep], mask[:, keep]
    offsets = torch.stack([torch.zeros_like(keep.sum()), keep.sum() // 2, keep.sum()]).to(torch.int32)
    return flash_dmattn_varlen_func(
        tokens,
        tokens,
        tokens,
        offsets,
        offsets,
        WHOLE,
        WHOLE,
        mask,
        bias,
        dropout_p=0.1,
        is_causal=True,
        return_lse=True,
    )


def in_one(query: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
    three = query.unsqueeze(2).expand(-1, -1, 3, -1, -1)[:, keep]
    return (flash_dmattn_qkvpacked_func(three, keep[keep][None, None, None], is_causal=True),)


def across(query: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
    """Attention of queries and keys of two unknown lengths, with padding and a pair of documents."""
    queries, keys = query[:, keep], query[:, ~keep]
    places = torch.arange(WHOLE)
    ids = (places // 50).expand(2, -1)
    mask = prepare_mask((places % 3 > 0)[~keep][None], documents=(ids[:, keep], ids[:, ~keep]), is_causal=True)
    return (flash_dmattn_func(queries, keys, keys, mask, is_causal=True),)


def parts(query: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
    """Attention under parts of masks: the first half of the queries, and all but the first key."""
    length = query[:, keep].shape[1]
    scores = query.detach()[..., 0].transpose(1, 2)[..., keep]
    half = length // 2
    made = dynamic_mask(scores, 5, keep_last=2)
    ids = prepare_mask(documents=(torch.arange(WHOLE) // 50)[None, keep], window_size=(30, 30))
    chosen, queries, keys = made.queries(half, length), query[:, keep][:, half:], query[:, keep]
    later = ids.keys(half, length).also(made.band)
    return (
        flash_dmattn_func(queries, keys, keys, chosen),
        flash_dmattn_func(keys, queries, queries, later),
        made.density(),
    )


CALLS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], tuple[Tensor, ...]]] = {
    "bias, sink, dropout": (everything, (torch.randn(1, HEADS, WHOLE, WHOLE), torch.randn(HEADS))),
    "packed sequences": (packed, (torch.randn(1, WHOLE), torch.rand(HEADS, WHOLE) < 0.7)),
    "qkv in one tensor": (in_one, ()),
    "two lengths": (across, ()),
    "parts of masks": (parts, ()),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_take_what_the_data_keeps(name: str):
    function, given = CALLS[name]
    compare(function, rows(), *given)


class Keeps(torch.nn.Module):
    """Attention to what the data keeps."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = Model(kind, CAUSAL)

    def forward(self, query: Tensor, keep: Tensor, parts: dict[str, Tensor]) -> Tensor:
        parts = {name: kept(part, tuple(axis for axis in AXES[name] if axis), keep) for name, part in parts.items()}
        return self.model(query[:, keep], parts)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("kind", KINDS)
def test_models_that_keep_by_data_are_exported(kind: str, strict: bool):
    model = Keeps(kind)
    inputs = rows().detach(), torch.rand(WHOLE) < 0.5, drawn(2, WHOLE, *KINDS[kind][0])
    program = torch.export.export(model, inputs, strict=strict).module()
    for length in (100, 3):
        given = inputs[0], torch.randperm(WHOLE) < length, inputs[2]
        torch.testing.assert_close(program(*given), model(*given))


def test_a_mask_of_another_length_is_refused_when_the_graph_runs():
    def call(query: Tensor, keep: Tensor, other: Tensor) -> Tensor:
        return flash_dmattn_func(
            query[:, keep], query[:, keep], query[:, keep], prepare_mask(other[:, keep], seqlen_q=3)
        )

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    query, padding = rows().detach(), torch.ones(2, WHOLE, dtype=torch.bool)
    keep = torch.arange(WHOLE) < 3
    torch.testing.assert_close(compiled(query, keep, padding), call(query, keep, padding))
    with pytest.raises(RuntimeError):
        compiled(query, torch.arange(WHOLE) < 4, padding)
    assert isinstance(prepare_mask(padding, seqlen_q=3), TileMask)
