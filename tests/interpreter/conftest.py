"""Prepare Triton's interpreter. The variable has to be set before anything imports Triton, so it takes a process of its own."""

from __future__ import annotations

import os
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def count_loops_by_scalars() -> None:
    """Let scalars of the interpreter bound loops under NumPy 2.4, which no longer converts arrays of one element.

    https://github.com/triton-lang/triton/issues/9171, in Triton 3.6.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: type, *scope: Any) -> None:
        patch(tensor, *scope)

        def index(self: Any) -> int:
            return int(self.handle.data.item())

        if scope:
            scope[0].set_attr(tensor, "__index__", index)
        else:
            tensor.__index__ = index  # type: ignore[attr-defined]

    interpreter._patch_lang_tensor = patch_and_mend


def multiply_bfloat16() -> None:
    """Let the interpreter multiply bfloat16 matrices: Triton 3.6 multiplies their bit patterns, as integers."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply = InterpreterBuilder.create_dot

    def widen(matrix: Any) -> Any:
        if matrix.dtype.scalar != tl.bfloat16:
            return matrix
        return TensorHandle((matrix.data.astype("uint32") << 16).view("float32"), tl.float32)

    def multiply_widened(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, widen(a), widen(b), *rest)

    InterpreterBuilder.create_dot = multiply_widened


def pytest_pycollect_makemodule(module_path: Any, parent: Any) -> None:
    """Skip the modules of this directory where the interpreter is off; called before they are imported."""
    if not INTERPRETED:
        pytest.skip("run in a process of its own: TRITON_INTERPRET=1 pytest tests/interpreter", allow_module_level=True)


if INTERPRETED:
    count_loops_by_scalars()
    multiply_bfloat16()
