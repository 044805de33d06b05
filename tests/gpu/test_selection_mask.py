"""Masks of chosen blocks and masses of attention on a GPU: the operators against the definition in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from chosen_cases import Case, draw, draw_inputs, masses, probabilities, visible
from torch import Tensor

from dmattn_ops import flash_dmattn_func, key_mass, prepare_mask, selection_mask, selection_mass
from tests.masks.test_mass import draw_mask

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def on_gpu(given: Any) -> Any:
    if isinstance(given, Tensor):
        return given.cuda()
    if isinstance(given, tuple):
        return tuple(map(on_gpu, given))
    return {name: on_gpu(value) for name, value in given.items()} if isinstance(given, dict) else given


def check_mask(case: Case) -> None:
    arguments = on_gpu(case.mask_arguments)
    for _ in range(3):  # in full, then by a plan
        mask = selection_mask(case.indices.cuda(), **arguments)
        assert torch.equal(mask.to_dense().cpu(), visible(case)), repr(case)


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_any_short_case_is_what_the_definition_says(first: int):
    for seed in range(first, first + 100):
        check_mask(draw(seed))


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_any_longer_case_is_what_the_definition_says(first: int):
    for seed in range(first, first + 10):
        check_mask(draw(seed, longest=3000))


def test_bits_are_the_same_each_time():
    indices = torch.randint(-1, 4096, (2, 2, 4096, 512), device="cuda")
    first = selection_mask(indices).to_dense()
    assert all(torch.equal(selection_mask(indices).to_dense(), first) for _ in range(5))
    chosen = torch.zeros(2, 2, 4096, 4097, dtype=torch.bool, device="cuda").scatter_(-1, indices + 1, True)[..., 1:]
    assert torch.equal(first, chosen.tril())


@pytest.mark.parametrize("wrong", [-2, 5000, -(1 << 40), 1 << 40])
def test_numbers_of_no_block_are_none_and_raise_where_that_is_asked(wrong: int, monkeypatch: pytest.MonkeyPatch):
    indices = torch.randint(0, 300, (1, 1, 300, 8), device="cuda")
    broken = torch.cat((indices, torch.full_like(indices, wrong)), dim=-1)
    assert torch.equal(selection_mask(broken).to_dense(), selection_mask(indices).to_dense())
    query = torch.randn(1, 300, 2, 64, device="cuda", dtype=torch.bfloat16)
    mass = selection_mass(query, query, broken)
    torch.testing.assert_close(mass[..., :8], selection_mass(query, query, indices))
    assert not mass[..., 8:].any()
    monkeypatch.setenv("DMATTN_CHECK", "1")
    with pytest.raises(ValueError, match="indices must be -1"):
        selection_mask(broken)
    with pytest.raises(ValueError, match="indices must be -1"):
        selection_mass(query, query, broken)


def check_selection(seed: int, longest: int, dtype: torch.dtype) -> None:
    case = replace(draw(seed, longest), padding=None)
    query, key, keywords = draw_inputs(case, seed, dtype)
    arguments = on_gpu({"block": case.block, **case.keywords, "documents": case.documents, **keywords})
    expected = masses(case, query, key, **keywords)
    query, key, indices = query.cuda(), key.cuda(), case.indices.cuda()
    found = selection_mass(query, key, indices, **arguments).cpu()
    torch.testing.assert_close(found.double(), expected, atol=2e-5 * case.heads, rtol=0.0, msg=repr(case))
    mask = selection_mask(indices, **on_gpu(case.mask_arguments))
    _, lse = flash_dmattn_func(query, key, key, mask, return_lse=True, **on_gpu(keywords))
    found = selection_mass(query, key, indices, lse=lse, **arguments).cpu()
    torch.testing.assert_close(found.double(), expected, atol=1e-4 * case.heads, rtol=0.0, msg=repr(case))


@pytest.mark.parametrize("first", range(0, 300, 10))
def test_any_selection_has_the_mass_of_the_definition(first: int):
    for seed in range(first, first + 10):
        check_selection(seed, 60, DTYPES[seed % 3])


@pytest.mark.parametrize("seed", range(12))
def test_longer_selections_have_the_mass_of_the_definition(seed: int):
    check_selection(seed, 400, DTYPES[seed % 3])


def check_keys(seed: int, longest: int, dtype: torch.dtype) -> None:
    case = draw(seed, longest)
    torch.manual_seed(seed)
    query, key, keywords = draw_inputs(case, seed, dtype)
    mask, shown = draw_mask(case, seed)
    expected = probabilities(query, key, shown, **keywords).unflatten(1, (case.heads_kv, -1)).sum((2, 3))
    mask = mask if mask is None else mask.to("cuda")
    found = key_mass(query.cuda(), key.cuda(), mask, **on_gpu(keywords)).cpu()
    torch.testing.assert_close(found.double(), expected, atol=1e-4 * case.heads, rtol=2e-4, msg=repr(case))


@pytest.mark.parametrize("first", range(0, 300, 10))
def test_any_key_has_the_mass_of_the_definition(first: int):
    for seed in range(first, first + 10):
        check_keys(seed, 60, DTYPES[seed // 2 % 3])


@pytest.mark.parametrize("seed", range(20))
def test_keys_of_several_tiles_have_the_mass_of_the_definition(seed: int):
    check_keys(seed, 900, DTYPES[seed % 3])


@pytest.mark.parametrize(("heads", "heads_kv", "dim"), [(128, 1, 192), (16, 2, 256), (8, 8, 128), (5, 1, 576)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_known_models(heads: int, heads_kv: int, dim: int, dtype: torch.dtype):
    query = torch.randn(1, 70, heads, dim, dtype=dtype)
    key = torch.randn(1, 70, heads_kv, dim, dtype=dtype)
    indices = torch.randint(-1, 70, (1, 1, 70, 33))
    case = Case(
        indices,
        1,
        70,
        1,
        heads,
        heads_kv,
        {"is_causal": True, "causal_from": 0, "window_size": (None, None)},
        None,
        None,
    )
    found = selection_mass(query.cuda(), key.cuda(), indices.cuda()).cpu()
    torch.testing.assert_close(found.double(), masses(case, query, key), atol=2e-5 * heads, rtol=0.0)
    found = key_mass(query.cuda(), key.cuda(), selection_mask(indices.cuda())).cpu()
    expected = probabilities(query, key, visible(case)).unflatten(1, (heads_kv, -1)).sum((2, 3))
    torch.testing.assert_close(found.double(), expected, atol=1e-4 * heads, rtol=2e-4)


def test_compiled_on_a_gpu():
    def step(query: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        mask = selection_mask(indices, block=4)
        out, lse = flash_dmattn_func(query, query, query, mask, return_lse=True)
        return out, selection_mass(query, query, indices, block=4, lse=lse)

    query = torch.randn(2, 500, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    indices = torch.randint(-1, 125, (2, 1, 500, 20), device="cuda")
    torch.testing.assert_close(torch.compile(step, fullgraph=True)(query, indices), step(query, indices))


def test_a_cuda_graph_replays_the_mask():
    indices = torch.randint(-1, 300, (1, 1, 300, 16), device="cuda")
    other = torch.randint(-1, 300, (1, 1, 300, 16), device="cuda")
    for _ in range(3):
        selection_mask(indices)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask = selection_mask(indices)
    indices.copy_(other)
    graph.replay()
    assert torch.equal(mask.to_dense(), selection_mask(other).to_dense())
    keep = torch.zeros(1, 1, 300, 301, dtype=torch.bool, device="cuda").scatter_(-1, other + 1, True)[..., 1:].tril()
    assert torch.equal(mask.to_dense(), prepare_mask(keep).to_dense())
