"""What masks leave in users' graphs: operators of their own, and besides them nothing that sorts, scans or scatters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dmattn_ops import TileMask, prepare_mask
from dmattn_ops.masks import layout
from tests.support import graphs
from tests.support.made_in_graphs import KINDS, dense, documents

# Operations of single elements, copies, sizes, and sums of a few numbers: nothing by which Inductor tells kernels apart.
ALLOWED = {
    "_to_copy", "_unsafe_view", "add", "arange", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_right_shift", "cat",
    "clamp", "clone", "constant_pad_nd", "convert_element_type", "detach", "div", "empty", "eq", "expand", "floor_divide",
    "full", "full_like", "ge", "gt", "index", "iota", "le", "logical_and", "logical_not", "lt", "maximum", "minimum", "mul",
    "ne", "new_empty", "permute", "remainder", "repeat", "rsub", "select", "slice", "squeeze", "sub", "unsqueeze", "view",
    "where", "zeros_like",
}  # fmt: skip


def of_masks(function, *given: Tensor) -> set[str]:
    """Return what the graph of a function calls besides the library's operators."""
    graph = graphs.captured(function, *given)[0]
    names = (target.split(".")[1] for target in graphs.targets(graph) if target.startswith(("aten.", "prims.")))
    return set(names)


def tensors(made: Tensor | TileMask) -> tuple[Tensor, ...]:
    return (made,) if isinstance(made, Tensor) else tuple(part for part in made.mask[:-1] if part is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_masks_made_in_graphs_sort_and_scatter_nothing(kind: str):
    score = torch.randn(2, 4, 200)
    callers = {"cumsum", "abs", "flip", "_to_copy"}  # those of tests/support/made_in_graphs.py
    found = of_masks(lambda score: tensors(KINDS[kind](score)), score)
    assert found <= ALLOWED | callers, sorted(found - ALLOWED - callers)


@pytest.mark.parametrize("what", ["to_dense", "density", "queries", "keys"])
def test_what_masks_tell_sorts_and_scatters_nothing(what: str):
    def asked(score: Tensor) -> tuple[Tensor, ...]:
        ids = (score[:, 0] > 0).int()
        masks = prepare_mask(dense(score)), prepare_mask(documents=ids)
        if what in ("queries", "keys"):
            return tuple(part for mask in masks for part in tensors(getattr(mask, what)(3, 150)))
        return tuple(getattr(mask, what)() for mask in masks)

    found = of_masks(asked, torch.randn(2, 4, 200))
    assert found <= ALLOWED | {"sum"}, sorted(found - ALLOWED)


def test_operators_that_masks_are_made_by_compute_what_they_say():
    ids = torch.randint(-5, 5, (3, 77)) * (1 << 40)
    expected = torch.stack([row.unique(return_inverse=True)[1] for row in ids])
    assert torch.equal(torch.ops.dmattn.rank_ids(ids), expected.int())
    counts, indices = (
        torch.tensor([[2, 0]], dtype=torch.int32),
        torch.tensor([[[4, 1, 9], [0, 0, 0]]], dtype=torch.int32),
    )
    listed = torch.ops.dmattn.spread_lists(counts, indices, 5)
    assert listed.tolist() == [[[False, True, False, False, True], [False] * 5]]
    classes = torch.randint(0, 3, (2, 3, 4, 5))
    lists = layout.lists_from_classes(classes, 4, 5)
    assert torch.equal(layout.classes_from_lists(lists, 5).long(), classes)
    assert documents(torch.zeros(1, 1, 4)).tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.complex64])
def test_operators_refuse_masks_that_may_be_additive(dtype: torch.dtype):
    query, offsets = torch.randn(8, 2, 16), torch.tensor([0, 8], dtype=torch.int32)
    mask, of_keys, end = (torch.zeros(*shape, dtype=dtype) for shape in ((1, 1, 8, 8), (1, 8), (1, 1, 8)))
    lengths = torch.full_like(end, 8, dtype=torch.int32)
    rows = torch.ops.dmattn.varlen_forward(query, query, query, offsets, offsets, None, None, None, None, 8, 8)
    packed = (query, query, query, *rows[:3], offsets, offsets, None, of_keys, None, None, 8, 8)
    calls = [
        (torch.ops.dmattn.pack_mask, (mask, None, None, 8)),
        (torch.ops.dmattn.pack_intervals, (lengths, None, None, None, mask, None, None, 8)),
        (torch.ops.dmattn.varlen_forward, (query, query, query, offsets, offsets, None, of_keys, None, None, 8, 8)),
        (torch.ops.dmattn.varlen_backward, (query, None, *packed)),
    ]
    for function, arguments in calls:
        with pytest.raises(TypeError, match="mask must have dtype bool"):
            function(*arguments)
