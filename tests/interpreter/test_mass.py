"""The Triton kernels of masses against the definition in float64, in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from chosen_cases import Case, draw, draw_inputs, masses, visible
from torch import Tensor

from dmattn_ops import flash_dmattn_func
from dmattn_ops.bands import band_of
from dmattn_ops.call import Call, plain_options
from dmattn_ops.dispatch.run import with_start
from dmattn_ops.kernels.mass import launch, reference
from dmattn_ops.masks import prepare
from dmattn_ops.masks.chosen import Selection, Statistics, segments_beside
from tests.masks.test_mass import draw_mask

pytestmark = pytest.mark.usefixtures("strict_memory")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def options_of(query: Tensor, limits: tuple[int, int], keywords: dict[str, Any]) -> Any:
    scale = keywords.get("softmax_scale", query.shape[-1] ** -0.5)
    return plain_options(scale, *limits, softcap=keywords.get("softcap", 0.0))


def check_selection(seed: int, longest: int = 60, **changes: Any) -> None:
    case = replace(draw(seed, longest), padding=None, **changes)
    dtype = DTYPES[seed % 3]
    query, key, keywords = draw_inputs(case, seed, dtype)
    batch, seqlen_q = query.shape[:2]
    segments = segments_beside(case.indices, case.documents, None, batch, seqlen_q, case.seqlen_k)
    limits = band_of(**case.keywords).limits(seqlen_q, case.seqlen_k)
    options = options_of(query, limits, keywords)
    lse = None
    expected = masses(case, query, key, **keywords)
    if seed % 4 == 0:
        weights = {name: value for name, value in keywords.items() if name != "lse"}
        lse = flash_dmattn_func(
            query.float(), key.float(), key.float(), visible(case), return_lse=True, **as_float(weights)
        )[1]
    mass = torch.full(expected.shape, torch.nan)
    choice = Selection(query, key, case.indices, *segments, keywords.get("bias"), lse, case.block, options)
    launch.selection_mass(choice, mass)
    torch.testing.assert_close(mass.double(), expected, atol=2e-5 * case.heads, rtol=0.0, msg=repr(case))


def as_float(keywords: dict[str, Any]) -> dict[str, Any]:
    return {name: value.float() if isinstance(value, Tensor) else value for name, value in keywords.items()}


@pytest.mark.parametrize("first", range(0, 30, 10))
def test_any_selection_has_the_mass_of_the_definition(first: int):
    for seed in range(first, first + 10):
        check_selection(seed, longest=12)


def test_more_heads_than_one_product_takes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "_MOST_HEADS", 16)
    check_selection(1, longest=9, heads_kv=1, heads=37, indices=torch.randint(-1, 3, (1, 1, 4, 5)), seqlen_k=9, block=3)


def test_lists_of_more_numbers_than_are_compared_at_once():
    check_selection(2, longest=9, indices=torch.randint(-1, 40, (1, 1, 2, 150)), seqlen_k=40, block=1, documents=None)


def check_keys(seed: int, longest: int, dtype: torch.dtype, **changes: int) -> None:
    case = replace(draw(seed, longest), **changes)
    if changes:
        case = replace(case, indices=case.indices[:1, :1], documents=None, padding=None)
    torch.manual_seed(seed)
    query, key, keywords = draw_inputs(case, seed, dtype)
    mask, _ = draw_mask(case, seed)
    band = {"is_causal": True, "causal_from": "bottom_right", "window_size": (longest // 6, None)}
    band = band_of(**band) if seed % 3 == 0 else band_of(False, "bottom_right", (None, None))
    parts, *limits = prepare.resolve(mask, band, query.shape[1], case.seqlen_k)
    call = Call(
        query, key, key, keywords.get("bias"), parts, None, None, None, options_of(query, tuple(limits), keywords)
    )
    expected = torch.empty(case.batch, case.heads_kv, case.seqlen_k, dtype=torch.float64)
    wide = call._replace(query=query.double(), key=key.double(), value=key.double())
    reference.key_mass(wide, None, expected)  # held to the definition by test_mass.py
    shown = reference._visible(call, 0, query.shape[1])
    _, lse = flash_dmattn_func(query.float(), key.float(), key.float(), shown, return_lse=True, **as_float(keywords))
    mass = torch.full(expected.shape, torch.nan)
    launch.key_mass(with_start(call), Statistics(lse, torch.zeros_like(lse) if seed % 2 else None), mass)
    torch.testing.assert_close(mass.double(), expected, atol=1e-4 * case.heads, rtol=1e-4, msg=repr(case))


@pytest.mark.parametrize("first", range(0, 30, 10))
def test_any_key_has_the_mass_of_the_definition(first: int):
    for seed in range(first, first + 10):
        check_keys(seed, 60, DTYPES[seed // 2 % 3])


@pytest.mark.parametrize("seed", range(6))
def test_keys_of_several_tiles(seed: int):
    check_keys(seed, 300, DTYPES[seed % 3], batch=1, heads=2, heads_kv=1)


def test_cases_are_drawn_for_every_mask():
    assert isinstance(draw(0), Case)
    kinds = {type(draw_mask(draw(seed), seed)[0]).__name__ for seed in range(20)}
    assert kinds == {"NoneType", "Tensor", "TileMask"}
