"""What kernels are compiled for reaches Triton whole, whatever its version, and its hooks as JSON."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from dmattn_ops.api.stand_in import compiled_launches
from dmattn_ops.kernels.constants import Constants
from dmattn_ops.kernels.portable.arguments import RowBlock, Shape
from tests.kernels.test_addresses import cases, units_of
from tests.tools.configurations import BITS, launch

SHAPE = Shape(64, 32, 40, 48, 64, 64, aligned=True)


def test_records_with_the_same_fields_are_the_same() -> None:
    same = Shape(**{field.name: getattr(SHAPE, field.name) for field in fields(Shape)})
    assert same == SHAPE and hash(same) == hash(SHAPE) and replace(SHAPE, block_m=64) == SHAPE
    assert replace(SHAPE, block_m=128) != SHAPE and SHAPE.key_rows == RowBlock(32, 40, 64, True)


def test_records_are_text_that_names_their_fields() -> None:
    assert repr(SHAPE.key_rows) == str(SHAPE.key_rows) == "RowBlock(length=32, width=40, padded=64, aligned=True)"
    assert json.loads(json.dumps(SHAPE)) == str(SHAPE)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))])
def test_copies_are_the_same(again: Any) -> None:
    assert again(SHAPE) == SHAPE and again(SHAPE).value_rows == SHAPE.value_rows


@pytest.mark.parametrize(("sm", "run"), list(cases()))
def test_no_kernel_is_given_a_tuple(sm: int, run: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.9 takes tuples apart."""
    given: list[Any] = []

    def noted(self: Any, *arguments: Any, **named: Any) -> None:
        given.extend([*arguments, *(value for name, value in named.items() if name != "grid")])

    monkeypatch.setattr(JITFunction, "run", noted)
    with compiled_launches(sm):
        run()
    assert given and not [each for each in given if isinstance(each, tuple)]


def test_the_kernels_of_attention_are_given_records(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *arguments, **named: given.extend(named.values()))
    for kernel, sm in (("portable", 80), ("ampere", 80), ("hopper", 90), ("hopper256", 90)):
        for unit in units_of(kernel, sm, (BITS,)):
            given.clear()
            with compiled_launches(sm):
                launch(unit)
            assert any(isinstance(each, Constants) for each in given), unit.entry
