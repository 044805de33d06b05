"""Kernels keep their names in Triton's cache from one process to the next."""

from __future__ import annotations

import importlib
import pkgutil
from collections import defaultdict

import pytest

pytest.importorskip("triton.experimental.gluon")
from triton.language.core import constexpr
from triton.runtime.jit import JITCallable

import dmattn_ops.kernels


def functions():
    """Return every function of device code by its name."""
    found = {}
    for module in pkgutil.walk_packages(dmattn_ops.kernels.__path__, "dmattn_ops.kernels."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, JITCallable):
                found[f"{value.__module__}.{value.__qualname__}"] = value
    return found


def test_a_constant_that_device_code_uses_has_one_value_under_its_name():
    """Triton's key lists the constants of all modules that a kernel reaches by name, and those of one name by address.

    Where two modules give one name to two values, a kernel that reaches both gets another key in another process: it was compiled
    for nothing, and is compiled again.
    """
    wrong = defaultdict(list)
    every = functions()
    assert len(every) > 400
    for name, function in every.items():
        assert function.cache_key  # which finds the constants
        values = defaultdict(set)
        for (constant, _), (value, _) in function.used_global_vals.items():
            if isinstance(value, constexpr):
                values[constant].add(repr(value))
        for constant, different in values.items():
            if len(different) > 1:
                wrong[(constant, *sorted(different))].append(name)
    assert dict(wrong) == {}
