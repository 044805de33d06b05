"""`selection_mask`: masks of blocks of keys that queries choose, against the definition; and everything that a mask can do."""

from __future__ import annotations

import copy
import io
import pickle
import re
from dataclasses import replace

import pytest
import torch
from chosen_cases import Case, draw, visible
from torch import Tensor
from torch.library import opcheck

import dmattn_ops
from dmattn_ops import flash_dmattn_func, prepare_mask, selection_mask
from tests.masks.test_mask_operators import ALLOWED, of_masks
from tests.ops.test_opcheck import OF_MASKS


def made(case: Case) -> dmattn_ops.TileMask:
    return selection_mask(case.indices, **case.mask_arguments)


def check(case: Case) -> None:
    before = case.indices.clone()
    mask = made(case)
    assert mask.kind == "bits"
    assert torch.equal(mask.to_dense(), visible(case)), repr(case)
    assert torch.equal(case.indices, before)


@pytest.mark.parametrize("first", range(0, 1200, 300))
def test_any_short_case_is_what_the_definition_says(first: int):
    for seed in range(first, first + 300):
        check(draw(seed))


@pytest.mark.parametrize("first", range(0, 30, 10))
def test_any_longer_case_is_what_the_definition_says(first: int):
    for seed in range(first, first + 10):
        check(draw(seed, longest=500))


def test_masks_that_are_made_in_chunks_are_the_same(monkeypatch):
    monkeypatch.setattr("dmattn_ops.masks.chunks._CHUNK", 1)
    for seed in range(20):
        check(draw(seed, longest=700))


@pytest.mark.parametrize("shape", [(0, 1, 5, 3), (2, 1, 0, 3), (2, 2, 5, 0), (1, 1, 200, 0)])
def test_nothing_to_choose(shape: tuple[int, ...]):
    mask = selection_mask(torch.zeros(shape, dtype=torch.int32), seqlen_k=300)
    assert mask.shape == (*shape[:3], 300)
    assert torch.equal(mask.to_dense(), torch.zeros(*shape[:3], 300, dtype=torch.bool).logical_or(mask.to_dense()))
    if shape[3] == 0:
        assert not mask.to_dense().any()


def test_no_keys():
    mask = selection_mask(torch.full((1, 1, 4, 2), -1), seqlen_k=0)
    assert mask.shape == (1, 1, 4, 0)
    query, key = torch.randn(1, 4, 2, 8), torch.randn(1, 0, 2, 8)
    assert torch.equal(flash_dmattn_func(query, key, key, mask), torch.zeros(1, 4, 2, 8))


@pytest.mark.parametrize("seed", range(40))
def test_attention_and_its_gradients_are_those_of_the_dense_mask(seed: int):
    case = draw(seed)
    seqlen_q = case.indices.shape[2]
    query = torch.randn(case.batch, seqlen_q, case.heads, 8, dtype=torch.float64, requires_grad=True)
    key, value = (
        torch.randn(case.batch, case.seqlen_k, case.heads_kv, 8, dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    )
    found, expected = (
        flash_dmattn_func(query, key, value, mask, return_lse=True) for mask in (made(case), visible(case))
    )
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(out.sin().sum(), (query, key, value)) for out, _ in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_slices_are_those_of_the_dense_mask():
    for seed in range(100):
        case = draw(seed, longest=200)
        mask, dense = made(case), visible(case)
        _, heads, seqlen_q, seqlen_k = mask.shape
        low, high = seqlen_q // 3, seqlen_q - seqlen_q // 4
        assert torch.equal(mask.queries(low, high).to_dense(), dense[:, :, low:high])
        low, high = seqlen_k // 3, seqlen_k - seqlen_k // 4  # at any start, also inside of a block
        assert torch.equal(mask.keys(low, high).to_dense(), dense[..., low:high])
        assert torch.equal(mask.batch(0, 1).to_dense(), dense[:1])
        assert torch.equal(mask.heads(heads - 1, heads).to_dense(), dense[:, -1:])


def test_copies_and_files_hold_the_mask():
    case = draw(3, longest=200)
    mask, file = made(case), io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    for other in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask), mask.to("cpu"), torch.load(file)):
        assert torch.equal(other.to_dense(), visible(case))
        assert other.band == mask.band


def test_the_mask_does_not_change_with_the_indices():
    indices = torch.zeros(1, 1, 5, 1, dtype=torch.int64)
    mask = selection_mask(indices)
    before = mask.to_dense().clone()
    indices.fill_(4)
    assert torch.equal(mask.to_dense(), before)


def test_it_is_a_condition_beside_those_of_a_call():
    case = replace(draw(11), documents=None, padding=None)
    seqlen_q = case.indices.shape[2]
    query = torch.randn(case.batch, seqlen_q, case.heads, 8)
    key = torch.randn(case.batch, case.seqlen_k, case.heads_kv, 8)
    found = flash_dmattn_func(query, key, key, made(case), is_causal=True, window_size=(7, None))
    expected = flash_dmattn_func(query, key, key, visible(case), is_causal=True, window_size=(7, None))
    torch.testing.assert_close(found, expected)


def test_what_no_query_chose_is_never_read():
    indices = torch.tensor([0, 2]).expand(1, 1, 12, 2)
    query, key = torch.randn(1, 12, 2, 8), torch.randn(1, 12, 2, 8)
    key[:, 4:8] = torch.nan  # block 1
    key[:, 10:] = torch.inf
    hidden = torch.arange(12) < 10
    mask = selection_mask(indices, block=4, padding=hidden[None])
    clean = key.masked_fill(~key.isfinite(), 0.0)
    parts = [part.requires_grad_() for part in (query, key.clone(), key.clone())]
    out = flash_dmattn_func(*parts, mask)
    torch.testing.assert_close(out, flash_dmattn_func(query, clean, clean, mask))
    out.sum().backward()
    assert all(part.grad.isfinite().all() for part in parts)
    assert not parts[1].grad[:, 4:8].any()


def test_numbers_of_no_block_are_refused():
    for wrong in (-2, 3, 1 << 40):
        indices = torch.zeros(1, 1, 6, 2, dtype=torch.int64)
        indices[0, 0, 4, 1] = wrong
        with pytest.raises(
            ValueError, match=re.escape(f"indices must be -1 (none) or between 0 and 2, the last block, got {wrong}")
        ):
            selection_mask(indices, block=2)


INDICES = torch.zeros(2, 1, 6, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indices": INDICES[0]}, r"indices must have 4 dimensions, got 3, shape \(1, 6, 2\): its axes are \[B, heads, Sq, k\]"),
        ({"block": 0}, "block must be between 1 and 128, got 0"),
        ({"block": 129}, "block must be between 1 and 128, got 129"),
        ({"seqlen_k": 1 << 70}, f"seqlen_k must be less than 1073741824, got {1 << 70}"),
        ({"seqlen_k": -1}, "seqlen_k must not be negative, got -1"),
        ({"documents": torch.zeros(1, 7)[..., :5].long()}, r"documents must have shape \(2 or 1, 6\), got \(1, 5\)"),
        ({"documents": torch.zeros(3, 6).long()}, r"documents must have shape \(2 or 1, 6\), got \(3, 6\)"),
        ({"padding": torch.ones(2, 5).bool()}, r"padding must have shape \(2 or 1, 6\), got \(2, 5\)"),
        ({"causal_from": "middle"}, "causal_from must be 'bottom_right' or 'top_left'"),
        ({"window_size": (-1, None)}, "window_size left must not be negative"),
    ],
)  # fmt: skip
def test_wrong_values(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        selection_mask(**{"indices": INDICES, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indices": [[0]]}, "indices must be a tensor, got list"),
        ({"indices": INDICES.float()}, "indices must have dtype torch.int32 or torch.int64, got torch.float32"),
        ({"indices": INDICES.bool()}, "indices must have dtype torch.int32 or torch.int64, got torch.bool"),
        ({"block": 2.0}, "block must be an int, got float"),
        ({"block": True}, "block must be an int, got bool"),
        ({"seqlen_k": "6"}, "seqlen_k must be an int, got str"),
        ({"is_causal": 1}, "is_causal must be a bool, got int"),
        ({"padding": torch.ones(2, 6)}, "padding must have dtype torch.bool or torch.uint8"),
        ({"documents": torch.ones(2, 6)}, "documents must have dtype"),
        ({"block_size": 4}, r"selection_mask\(\) got an unexpected keyword argument 'block_size': here it is called block"),
        ({"indices": INDICES.to_sparse()}, "indices must be a dense tensor"),
    ],
)  # fmt: skip
def test_wrong_types(changes: dict, message: str):
    with pytest.raises(TypeError, match=message):
        selection_mask(**{"indices": INDICES, **changes})


def test_explain_says_what_bits_take():
    query = torch.randn(2, 300, 2, 16)
    text = str(dmattn_ops.explain(query, query, query, selection_mask(torch.zeros(2, 1, 300, 2).int())))
    assert "36864 bytes for each head of the mask and batch entry (Sq * Sk / 4)" in text  # 384 * 384 / 4


def attend(indices: Tensor, query: Tensor, documents: Tensor) -> tuple[Tensor, dmattn_ops.TileMask]:
    mask = selection_mask(indices, block=4, documents=documents, padding=documents >= 0)
    return flash_dmattn_func(query, query, query, mask), mask


def test_compiled_for_every_length_in_one_graph():
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for seqlen in (50, 128, 200, 301):
            indices = torch.randint(-1, -(-seqlen // 4), (2, 2, seqlen, 5))
            query = torch.randn(2, seqlen, 2, 16)
            documents = torch.arange(seqlen)[None] // 100 - 1
            out, mask = compiled(indices, query, documents)
            expected, expected_mask = attend(indices, query, documents)
            torch.testing.assert_close(out, expected)
            assert torch.equal(mask.to_dense(), expected_mask.to_dense())
    torch._dynamo.reset()


def test_it_is_an_argument_of_compiled_and_exported_functions():
    query = torch.randn(1, 150, 2, 16)
    mask = selection_mask(torch.randint(-1, 150, (1, 1, 150, 9)))
    expected = flash_dmattn_func(query, query, query, mask)

    class Layer(torch.nn.Module):
        def forward(self, query: Tensor, mask: dmattn_ops.TileMask) -> Tensor:
            return flash_dmattn_func(query, query, query, mask)

    torch.testing.assert_close(torch.compile(Layer(), fullgraph=True)(query, mask), expected)
    torch.testing.assert_close(torch.export.export(Layer(), (query, mask)).module()(query, mask), expected)


def test_a_program_that_makes_the_mask_is_exported():
    class Layer(torch.nn.Module):
        def forward(self, indices: Tensor, query: Tensor, documents: Tensor) -> Tensor:
            return attend(indices, query, documents)[0]

    def inputs(seqlen: int) -> tuple[Tensor, ...]:
        indices = torch.randint(-1, -(-seqlen // 4), (2, 1, seqlen, 5))
        return indices, torch.randn(2, seqlen, 2, 16), torch.arange(seqlen)[None] // 90

    length = torch.export.Dim("length", min=2, max=5000)
    shapes = {"indices": {2: length}, "query": {1: length}, "documents": {1: length}}
    program = torch.export.export(Layer(), inputs(60), dynamic_shapes=shapes).module()
    for seqlen in (60, 129, 333):
        given = inputs(seqlen)
        torch.testing.assert_close(program(*given), attend(*given)[0])
    with pytest.raises(ValueError, match="indices must be -1"):
        program(given[0] + 100, *given[1:])


def test_a_graph_that_makes_it_sorts_and_scatters_nothing():
    def of(indices: Tensor) -> tuple[Tensor, ...]:
        ids = indices[:, 0, :, 0].int()
        mask = selection_mask(indices, block=3, documents=ids, padding=ids >= 0)
        return tuple(part for part in mask.mask[:-1] if part is not None)

    found = of_masks(of, torch.randint(-1, 40, (2, 2, 120, 4)))
    assert found <= ALLOWED, sorted(found - ALLOWED)


def test_the_operator_passes_torchs_checks():
    indices = torch.randint(-1, 34, (2, 2, 50, 4), dtype=torch.int32)
    operator = torch.ops.dmattn.pack_selection.default
    opcheck(operator, (indices, None, None, 3, 100, -20, 0), test_utils=OF_MASKS)
    queries, keys = torch.zeros(1, 50, dtype=torch.int32), torch.randint(0, 2, (2, 1, 100), dtype=torch.int32)
    opcheck(operator, (indices[:1], queries, keys, 3, 100), test_utils=OF_MASKS)


def test_vmap():
    indices = torch.randint(-1, 20, (3, 1, 1, 20, 4))

    def rows(each: Tensor) -> Tensor:
        return torch.ops.dmattn.pack_selection(each, None, None, 1, 20)[2][:, :, :20, 0]

    expected = torch.stack([rows(each) for each in indices])
    assert torch.equal(torch.vmap(rows)(indices), expected)


def test_the_same_mask_as_from_a_tensor():
    case = draw(5, longest=300)
    mask, other = made(case), prepare_mask(visible(case))
    assert torch.equal(mask.row_tiles[..., 1:3], other.row_tiles[..., 1:3])
    assert torch.equal(mask.density(), other.density())
