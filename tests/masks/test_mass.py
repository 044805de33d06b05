"""`selection_mass` and `key_mass`: attention summed over blocks and over queries, against the definition in float64."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from chosen_cases import Case, draw, draw_inputs, masses, per_head, probabilities, visible
from torch import Tensor
from torch.library import opcheck

import dmattn_ops
from dmattn_ops import dynamic_mask, flash_dmattn_func, key_mass, prepare_mask, selection_mask, selection_mass
from tests.ops.test_opcheck import UTILITIES

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-6, torch.bfloat16: 2e-6}  # of float32 scores


def arguments(case: Case) -> dict[str, Any]:
    """Return the keywords of `selection_mass`, which knows no padding."""
    return {"block": case.block, **case.keywords, "documents": case.documents}


def check_selection(seed: int, dtype: torch.dtype) -> None:
    case = replace(draw(seed), padding=None)
    query, key, keywords = draw_inputs(case, seed, dtype)
    expected = masses(case, query, key, **keywords)
    found = selection_mass(query, key, case.indices, **arguments(case), **keywords)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCES[dtype] * case.heads, rtol=0.0, msg=repr(case))


@pytest.mark.parametrize("first", range(0, 320, 80))
def test_any_selection_has_the_mass_of_the_definition(first: int):
    for seed in range(first, first + 80):
        check_selection(seed, (torch.float64, torch.float32, torch.bfloat16, torch.float16)[seed % 4])


def test_chunks_of_queries_add_up(monkeypatch):
    monkeypatch.setattr("dmattn_ops.kernels.mass.reference._CHUNK", 100)
    for seed in range(25):
        check_selection(seed, torch.float64)
        check_keys(seed, torch.float64)


def test_the_mass_of_a_row_is_one_for_each_head():
    case = replace(draw(4, longest=200), padding=None)
    query, key, _ = draw_inputs(case, 4)
    found = selection_mass(query, key, case.indices, **arguments(case)).sum(-1)
    seen = visible(case).any(-1).expand(case.batch, -1, -1)
    heads = 1 if case.indices.shape[1] == case.heads else case.heads // case.heads_kv
    torch.testing.assert_close(found, (heads * seen).expand_as(found).float())


def test_lse_of_the_same_call_is_used_and_that_of_more_keys_gives_shares():
    for seed in range(40):
        case = replace(draw(seed), padding=None)
        query, key, keywords = draw_inputs(case, seed)
        _, lse = flash_dmattn_func(
            query, key, key, selection_mask(case.indices, **case.mask_arguments), return_lse=True, **keywords
        )
        found = selection_mass(query, key, case.indices, lse=lse, **arguments(case), **keywords)
        torch.testing.assert_close(found.double(), masses(case, query, key, **keywords), atol=2e-5, rtol=0.0)
        _, lse = flash_dmattn_func(query, key, key, return_lse=True, **keywords)
        found = selection_mass(query, key, case.indices, lse=lse, **arguments(case), **keywords)
        expected = masses(case, query, key, lse=lse, **keywords)
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=0.0)


def test_large_scores():
    indices = torch.randint(0, 40, (1, 1, 40, 6))
    query, key = 300 * torch.randn(1, 40, 2, 16), 300 * torch.randn(1, 40, 1, 16)
    found = selection_mass(query, key, indices, is_causal=False)
    assert found.isfinite().all()
    torch.testing.assert_close(found.sum(-1), torch.full((1, 1, 40), 2.0))


def test_what_is_hidden_never_reaches_a_mass():
    indices = torch.tensor([0, 2]).expand(1, 1, 12, 2).clone()
    indices[:, :, 5] = -1
    query, key = torch.randn(1, 12, 2, 8), torch.randn(1, 12, 1, 8)
    bias = torch.randn(1, 2, 12, 12)
    hidden_query, hidden_key, hidden_bias = query.clone(), key.clone(), bias.clone()
    hidden_key[:, 4:8] = torch.nan
    hidden_query[:, 5] = torch.inf
    hidden_bias[..., 4:8] = torch.nan
    for function in (
        lambda query, key, bias: selection_mass(query, key, indices, block=4, bias=bias),
        lambda query, key, bias: key_mass(query, key, selection_mask(indices, block=4), bias=bias),
    ):
        found, expected = function(hidden_query, hidden_key, hidden_bias), function(query, key, bias)
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0)])
def test_nothing_to_sum(shape: tuple[int, ...]):
    batch, seqlen_q, named = shape
    query, key = torch.randn(batch, seqlen_q, 4, 8), torch.randn(batch, 7, 2, 8)
    indices = torch.zeros(1, 1, seqlen_q, named, dtype=torch.int32)
    assert selection_mass(query, key, indices).shape == (batch, 2, seqlen_q, named)
    found = key_mass(query, key)
    assert found.shape == (batch, 2, 7) and (seqlen_q > 0 or not found.any())
    assert torch.equal(selection_mass(query, key[:, :0], indices - 1), torch.zeros(batch, 2, seqlen_q, named))
    assert key_mass(query, key[:, :0]).shape == (batch, 2, 0)


def draw_mask(case: Case, seed: int) -> tuple[Any, Tensor]:
    """Return a mask of any kind, and what it shows, bool `[Bm, Hm, Sq, Sk]`."""
    pick = random.Random(seed)
    seqlen_q, seqlen_k = case.indices.shape[2], case.seqlen_k
    kind = pick.choice(("none", "tensor", "chosen", "keys", "documents", "intervals", "dynamic"))
    if kind == "none":
        return None, torch.ones(1, 1, seqlen_q, seqlen_k, dtype=torch.bool)
    if kind == "tensor":
        keep = torch.rand(pick.choice((1, case.batch)), pick.choice((1, case.heads)), seqlen_q, seqlen_k) < 0.5
        return keep, keep
    if kind == "keys":
        keep = torch.rand(pick.choice((1, case.batch)), pick.choice((1, case.heads_kv)), 1, seqlen_k) < 0.5
        return keep, keep.expand(-1, -1, seqlen_q, -1)
    if kind == "documents":
        ids = [torch.randint(0, 3, (case.batch, length)) for length in (seqlen_q, seqlen_k)]
        return prepare_mask(documents=(ids[0], ids[1])), (ids[0].unsqueeze(-1) == ids[1].unsqueeze(1)).unsqueeze(1)
    if kind == "intervals" or (kind == "dynamic" and seqlen_q != seqlen_k):
        ends = [torch.randint(0, seqlen_q + 1, (1, case.heads, seqlen_k), dtype=torch.int32) for _ in range(2)]
        place = torch.arange(seqlen_q).unsqueeze(-1)
        shown = (ends[0].unsqueeze(-2) <= place) & (place < ends[1].unsqueeze(-2))
        return prepare_mask(intervals=(ends[0], ends[1]), seqlen_q=seqlen_q), shown
    if kind == "dynamic":
        mask = dynamic_mask(torch.randn(case.batch, case.heads_kv, seqlen_k), 5)
        return mask, mask.to_dense()
    return selection_mask(case.indices, **case.mask_arguments), visible(case)


def check_keys(seed: int, dtype: torch.dtype) -> None:
    case = draw(seed)
    torch.manual_seed(seed)
    query, key, keywords = draw_inputs(case, seed, dtype)
    mask, shown = draw_mask(case, seed)
    banded = torch.ones(shown.shape[-2:], dtype=torch.bool)
    if seed % 3 == 0:
        keywords |= {"is_causal": True, "window_size": (9, None)}
        distance = torch.arange(case.seqlen_k) - torch.arange(query.shape[1]).unsqueeze(-1)
        off = case.seqlen_k - query.shape[1]
        banded = (distance <= off) & (distance >= off - 9)
    found = key_mass(query, key, mask, **keywords)
    numbers = {name: value for name, value in keywords.items() if name in ("bias", "softmax_scale", "softcap")}
    weights = probabilities(query, key, shown & banded, **numbers)
    expected = weights.unflatten(1, (case.heads_kv, -1)).sum((2, 3))
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.double(), expected, atol=10 * TOLERANCES[dtype] * case.heads, rtol=1e-6)


@pytest.mark.parametrize("first", range(0, 320, 80))
def test_any_key_has_the_mass_of_the_definition(first: int):
    for seed in range(first, first + 80):
        check_keys(seed, (torch.float64, torch.float32, torch.bfloat16, torch.float16)[seed % 4])


def test_key_mass_of_a_mask_with_full_tiles():
    query, key = torch.randn(1, 300, 2, 16), torch.randn(1, 400, 1, 16)
    keep = torch.rand(1, 1, 300, 400) < 0.5
    keep[..., :128, :256] = True
    for start in (0, 1):  # a slice of bits too
        mask = prepare_mask(keep).queries(start, 300)
        found = key_mass(query[:, start:], key, mask)
        expected = probabilities(query[:, start:], key, keep[:, :, start:]).sum((1, 2))[:, None]
        torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)


def test_key_mass_takes_lse():
    query, key = torch.randn(2, 30, 4, 16), torch.randn(2, 50, 2, 16)
    _, lse = flash_dmattn_func(query, key, key, is_causal=True, return_lse=True)
    torch.testing.assert_close(key_mass(query, key, is_causal=True, lse=lse), key_mass(query, key, is_causal=True))
    assert torch.equal(key_mass(query, key, lse=torch.full_like(lse, -torch.inf)), torch.zeros(2, 2, 50))


def test_a_broken_promise_raises():
    query, key = torch.randn(1, 6, 1, 8), torch.randn(1, 6, 1, 8)
    ends = torch.full((1, 1, 6), 6, dtype=torch.int32)
    mask = prepare_mask(intervals=(torch.zeros_like(ends), ends), seqlen_q=6, at_most=3)
    with pytest.raises(ValueError, match="at_most must be at least the most keys that a query sees, 6, got 3"):
        key_mass(query, key, mask)


def test_they_have_no_gradient():
    query, key = (torch.randn(1, 6, 2, 8, requires_grad=True) for _ in range(2))
    indices = torch.zeros(1, 1, 6, 1, dtype=torch.int32)
    _, lse = flash_dmattn_func(query, key, key, return_lse=True)
    assert not selection_mass(query, key, indices, lse=lse).requires_grad
    assert not key_mass(query, key, lse=lse, bias=torch.zeros(1, 1, 1, 6, requires_grad=True)).requires_grad


QUERY, KEY = torch.randn(2, 6, 4, 8), torch.randn(2, 6, 2, 8)
INDICES = torch.zeros(2, 1, 6, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"indices": INDICES[:, :, :5]}, ValueError, r"indices must have shape \(2 or 1, 4 or 2 or 1, 6, 3\), got \(2, 1, 5, 3\)"),
        ({"indices": INDICES.expand(2, 3, 6, 3)}, ValueError, "indices must have shape"),
        ({"indices": INDICES + 7}, ValueError, r"indices must be -1 \(none\) or between 0 and 5, the last block, got 7"),
        ({"indices": INDICES.float()}, TypeError, "indices must have dtype"),
        ({"block": 200}, ValueError, "block must be between 1 and 128, got 200"),
        ({"lse": torch.zeros(2, 6, 4)}, ValueError, r"lse must have shape \(2, 4, 6\), got \(2, 6, 4\)"),
        ({"lse": torch.zeros(2, 4, 6).double()}, TypeError, "lse must have dtype torch.float32, got torch.float64"),
        ({"lse": 1.0}, TypeError, "lse must be a tensor, got float"),
        ({"lse": torch.zeros(2, 4, 6).to_sparse()}, TypeError, "lse must be a dense tensor"),
        ({"softcap": -1.0}, ValueError, "softcap must be finite and not negative"),
        ({"key": KEY[..., :4]}, ValueError, "key must have shape"),
        ({"documents": torch.zeros(2, 5).long()}, ValueError, "documents must have shape"),
        ({"scale": 1.0}, TypeError, "unexpected keyword argument 'scale': here it is called softmax_scale"),
    ],
)  # fmt: skip
def test_wrong_arguments_of_selection_mass(changes: dict, error: type, message: str):
    with pytest.raises(error, match=message):
        selection_mass(**{"query": QUERY, "key": KEY, "indices": INDICES, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"mask": torch.ones(2, 1, 5, 6).bool()}, ValueError, "mask must have shape"),
        ({"mask": torch.ones(2, 1, 6, 6)}, TypeError, "mask must have dtype bool"),
        ({"lse": torch.zeros(2, 6, 4)}, ValueError, r"lse must have shape \(2, 4, 6\), got \(2, 6, 4\)"),
        ({"is_causal": 1}, TypeError, "is_causal must be a bool, got int"),
        ({"query": QUERY[0]}, ValueError, "query must have 4 dimensions"),
    ],
)
def test_wrong_arguments_of_key_mass(changes: dict, error: type, message: str):
    with pytest.raises(error, match=message):
        key_mass(**{"query": QUERY, "key": KEY, **changes})


def both(query: Tensor, key: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    mask = selection_mask(indices, block=2)
    return selection_mass(query, key, indices, block=2), key_mass(query, key, mask)


def test_compiled_and_exported():
    torch._dynamo.reset()
    compiled = torch.compile(both, fullgraph=True, dynamic=True)
    for seqlen in (10, 33, 150):
        given = (
            torch.randn(2, seqlen, 4, 8),
            torch.randn(2, seqlen, 2, 8),
            torch.randint(-1, seqlen // 2, (2, 1, seqlen, 4)),
        )
        torch.testing.assert_close(compiled(*given), both(*given))

    class Layer(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
            return both(query, key, indices)

    length = torch.export.Dim("length", min=2, max=5000)
    program = torch.export.export(Layer(), given, dynamic_shapes=({1: length}, {1: length}, {2: length})).module()
    shorter = (given[0][:, :40], given[1][:, :40], torch.randint(-1, 20, (2, 1, 40, 4)))
    torch.testing.assert_close(program(*shorter), both(*shorter))
    torch._dynamo.reset()


def test_the_operators_pass_torchs_checks():
    query, key = torch.randn(2, 5, 4, 8), torch.randn(2, 9, 2, 8)
    indices = torch.randint(-1, 5, (1, 2, 5, 3))
    lse = torch.zeros(2, 4, 5)
    dmattn = torch.ops.dmattn
    opcheck(dmattn.selection_mass.default, (query, key, indices, None, None, None, lse, 2, -3, 4), test_utils=UTILITIES)
    opcheck(dmattn.key_mass.default, (query, key), {"lse": lse, "band_hi": 4}, test_utils=UTILITIES)
    mask = selection_mask(indices, block=2, seqlen_k=9).mask
    opcheck(dmattn.key_mass.default, (query, key, None, *mask[:-1]), test_utils=UTILITIES)


def test_autocast_computes_in_its_dtype():
    query, key = torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found = key_mass(query, key)
    assert torch.equal(found, key_mass(query.bfloat16(), key.bfloat16()))


def test_they_are_named_in_the_package():
    assert {"key_mass", "selection_mass", "selection_mask"} <= set(dmattn_ops.__all__)
    assert per_head(torch.zeros(1, 2, 3), 4).shape == (1, 4, 3)
