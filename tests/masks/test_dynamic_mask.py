"""`dynamic_mask` against its definition, read word by word with sorted lists, and in attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import dmattn_ops
from dmattn_ops import dynamic_mask, flash_dmattn_func, prepare_mask
from dmattn_ops.bands import band_of
from dmattn_ops.call import Call, plain_options
from dmattn_ops.choice import epochs
from dmattn_ops.masks import prepare
from tests.support import call_inputs


def by_definition(
    scores: Tensor,
    keep: int,
    keep_first: int = 0,
    keep_last: int = 0,
    documents: Tensor | None = None,
    is_causal: bool = True,
) -> Tensor:
    """Return which keys each query sees, bool `[B, H, S, S]`, one query after the other."""
    batch = max(scores.shape[0], 1 if documents is None else documents.shape[0])
    _, heads, seqlen = scores.shape
    seen = torch.zeros(batch, heads, seqlen, seqlen, dtype=torch.bool)
    for b in range(batch):
        ids = [0] * seqlen if documents is None else documents[min(b, len(documents) - 1)].tolist()
        for h in range(heads):
            row = scores[min(b, len(scores) - 1), h].double().tolist()
            for i in range(seqlen):
                mine = [j for j in range(seqlen) if ids[j] == ids[i] and (j <= i or not is_causal)]
                best = sorted(mine, key=lambda j: (math.isnan(row[j]), 0.0 if math.isnan(row[j]) else -row[j], j))[
                    :keep
                ]
                last = [j for j in mine if i - j < keep_last] if is_causal else []
                seen[b, h, i, best + mine[:keep_first] + last] = True
    return seen


def ties(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape).float() * torch.randint(0, 2, shape)  # with zeros of both signs


def special(*shape: int) -> Tensor:
    values = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-41, -1e-41, 3.0])
    return values[torch.randint(0, len(values), shape)]


SCORES = {"random": torch.randn, "ties": ties, "special": special, "constant": torch.zeros}
RULES = {
    "best": {"keep": 5},
    "one": {"keep": 1},
    "none": {"keep": 0},
    "more than there are": {"keep": 1 << 62},
    "first": {"keep": 4, "keep_first": 3},
    "last": {"keep": 4, "keep_last": 6},
    "only others": {"keep": 0, "keep_first": 2, "keep_last": 2},
    "all": {"keep": 3, "keep_first": 2, "keep_last": 4},
    "not causal": {"keep": 7, "keep_first": 2, "is_causal": False},
}


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", SCORES)
def test_the_mask_is_its_definition(kind: str, rule: str, documents: bool):
    scores = SCORES[kind](2, 2, 37)
    ids = torch.tensor([[7] * 20 + [-3] * 1 + [900] * 16, [1] * 5 + [2] * 30 + [0] * 2]) if documents else None
    made = dynamic_mask(scores, documents=ids, **RULES[rule])
    assert made.kind == "intervals" and made.shape == (2, 2, 37, 37)
    assert torch.equal(made.to_dense(), by_definition(scores, documents=ids, **RULES[rule]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_scores_of_every_floating_dtype(dtype: torch.dtype):
    scores = torch.randn(1, 2, 40, dtype=torch.float64)
    if dtype == torch.float64:
        scores = 1 + scores * 1e-12  # equal in float32
    scores = scores.to(dtype)
    assert torch.equal(dynamic_mask(scores, 6).to_dense(), by_definition(scores, 6))


def test_shapes_of_scores_and_documents_broadcast():
    ids = torch.tensor([[0] * 10 + [1] * 20, [0] * 29 + [1]])
    for scores, of in ((torch.randn(1, 3, 30), ids), (torch.randn(2, 1, 30), ids[:1]), (torch.randn(1, 1, 30), None)):
        made = dynamic_mask(scores, 4, documents=of)
        assert torch.equal(made.to_dense(), by_definition(scores, 4, documents=of))
    for empty in (torch.randn(0, 2, 30), torch.randn(2, 2, 0)):
        assert dynamic_mask(empty, 4).to_dense().shape == (*empty.shape, empty.shape[-1])


@pytest.mark.parametrize("is_causal", [True, False])
def test_rows_of_the_mask_are_its_rows(is_causal: bool):
    scores = torch.randn(2, 2, 200)
    whole = dynamic_mask(scores, 20, keep_first=2, is_causal=is_causal)
    for start, stop in ((0, 200), (199, 200), (50, 51), (64, 192), (7, 7)):
        rows = dynamic_mask(scores, 20, keep_first=2, is_causal=is_causal, queries=(start, stop))
        assert torch.equal(rows.to_dense(), whole.to_dense()[:, :, start:stop])
        assert torch.equal(rows.to_dense(), whole.queries(start, stop).to_dense())


@pytest.mark.parametrize("of_call", [False, True])
def test_keys_that_are_the_same_for_all_queries_may_be_packed(of_call: bool):
    """The call may add a causal condition: keys are then born on its diagonal."""
    made = dynamic_mask(torch.randn(1, 2, 300), 20, is_causal=False)
    mask, low, high = prepare.resolve(made, band_of(of_call, "bottom_right", (None, None)), 300, 300)
    query = torch.randn(1, 300, 2, 8)
    call = Call(query, query, query, None, mask, None, None, None, plain_options(1.0, low, high))
    assert epochs.reasons_against(call) == []
    kept = made.to_dense()
    assert (kept.sum(-1) == 20).all() and torch.equal(kept, kept[:, :, :1].expand_as(kept))
    ids = torch.arange(300)[None] // 100
    apart = dynamic_mask(torch.randn(1, 2, 300), 20, is_causal=False, documents=ids)
    assert (apart.to_dense().sum(-1) == 20).all() and apart.start is not None


def test_attention_under_the_mask_is_that_of_the_dense_one_with_its_gradients():
    query, key, value = call_inputs.qkv(2, 150, 4, 16, heads_kv=2, dtype=torch.float64)
    scores = torch.randn(2, 2, 150, dtype=torch.float64, requires_grad=True)
    made = dynamic_mask(scores, 30, keep_last=3)
    assert not any(part.requires_grad for part in made.mask[:-1] if part is not None)
    bias = scores[:, :, None]  # which trains the scores
    dense = by_definition(scores.detach(), 30, keep_last=3)
    results = []
    for mask in (made, dense):
        out, lse = flash_dmattn_func(query, key, value, mask, bias, is_causal=True, return_lse=True)
        results.append((out, lse, *torch.autograd.grad(out.sin().sum() + lse.sum(), (query, key, value, scores))))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_decoding_sees_what_the_whole_sequence_sees():
    query, key, value = call_inputs.qkv(1, 90, 2, 16, requires_grad=False, dtype=torch.float64)
    scores = torch.randn(1, 2, 90)
    whole = flash_dmattn_func(query, key, value, dynamic_mask(scores, 11, keep_first=1, keep_last=2))
    for i in (0, 1, 50, 89):
        prefix = slice(0, i + 1)
        rows = dynamic_mask(scores[..., prefix], 11, keep_first=1, keep_last=2, queries=(i, i + 1))
        out = flash_dmattn_func(query[:, i : i + 1], key[:, prefix], value[:, prefix], rows)
        torch.testing.assert_close(out, whole[:, i : i + 1])


def test_the_mask_takes_linear_memory_and_its_promise_holds():
    made = dynamic_mask(torch.randn(1, 2, 3000), 100, keep_first=4, keep_last=10)
    assert made.at_most == 114 and made.nbytes <= 2 * 4 * 2 * 3000
    assert made.to_dense().sum(-1).max() <= 114
    unmasked = dynamic_mask(torch.randn(1, 1, 50), 1 << 62, keep_first=1 << 62)
    assert torch.equal(unmasked.to_dense()[0, 0], torch.ones(50, 50, dtype=torch.bool).tril())
    query = torch.randn(1, 50, 2, 8)
    expected = flash_dmattn_func(query, query, query, is_causal=True)
    torch.testing.assert_close(flash_dmattn_func(query, query, query, unmasked), expected)


def test_a_band_of_the_call_is_another_condition():
    scores, query = torch.randn(1, 2, 100), torch.randn(1, 100, 2, 8)
    made = dynamic_mask(scores, 20)
    window = {"is_causal": True, "window_size": (30, None)}
    dense = made.to_dense() & prepare_mask(torch.ones(1, 1, 100, 100, dtype=torch.bool), **window).to_dense()
    out = flash_dmattn_func(query, query, query, made, **window)
    torch.testing.assert_close(out, flash_dmattn_func(query, query, query, dense))


def test_a_model_with_dynamic_masks_is_one_graph():
    torch._dynamo.reset()
    counters.clear()

    def function(query: Tensor, scores: Tensor, keep: int) -> Tensor:
        made = dmattn_ops.dynamic_mask(scores, keep, keep_last=2)
        return flash_dmattn_func(query, query, query, made, scores[:, :, None])

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, seqlen, keep in ((2, 64, 10), (3, 65, 11), (5, 300, 17)):
        query = torch.randn(batch, seqlen, 4, 8, requires_grad=True)
        scores = torch.randn(batch, 4, seqlen, requires_grad=True)
        results = []
        for call in (compiled, function):
            out = call(query, scores, keep)
            results.append((out, *torch.autograd.grad(out.sin().sum(), (query, scores))))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected)
    assert counters["stats"]["unique_graphs"] == 1
