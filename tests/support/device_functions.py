"""Device functions of Gluon as functions on Python integers, for tests of what they compute on numbers alone."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

_INTEGERS = SimpleNamespace(maximum=max, minimum=min, where=lambda condition, a, b: a if condition else b)


def on_integers(function: Any, **called: Callable[..., Any]) -> Callable[..., Any]:
    """Return a device function as one on Python integers; `called` are such functions that it calls, by their names there."""
    source = function.fn
    names = {**source.__globals__, "gl": _INTEGERS, **called}
    return FunctionType(source.__code__, names, source.__name__, source.__defaults__)
