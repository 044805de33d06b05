"""Prepare Triton's interpreter. The variable has to be set before anything imports Triton, so it takes a process of its own."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

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


def prepare_languages_once() -> None:
    """Let a device function that calls another one find Triton's functions replaced already, which took a third of the time."""
    from triton import language as tl
    from triton.runtime import interpreter

    modules: dict[Any, list[Any]] = {}
    call = interpreter.InterpretedFunction.__call__

    def call_prepared(self: Any, *arguments: Any, **named: Any) -> Any:
        if self.fn not in modules:
            known = [id(each) for each in self.fn.__globals__.values()]
            modules[self.fn] = [module for module in (tl, tl.core) if id(module) in known]
        if any(tl.core.is_builtin(module.load) for module in modules[self.fn]):
            return call(self, *arguments, **named)
        try:
            return self.rewrite()(*arguments, **named)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call_prepared


def multiply_exactly() -> None:
    """Let the interpreter add the products of matrices in float64, and round once.

    Then a score is the same number whatever the shapes of blocks and their orientation are, as on GPUs. Triton 3.6
    multiplies the bit patterns of bfloat16, as integers.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def widen(matrix: Any) -> Any:
        data = matrix.data
        if matrix.dtype.scalar == tl.bfloat16:
            data = (data.astype("uint32") << 16).view("float32")
        return data.astype(np.float64)

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        product = np.matmul(widen(a), widen(b)) + d.data
        return TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot


def fuse_multiplication_and_addition() -> None:
    """Let the interpreter round `fma` once, as GPUs do: Triton 3.6 rounds the product as well."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data
        return TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    InterpreterBuilder.create_fma = create_fma


def take_masks_of_integers() -> None:
    """Let the interpreter load and store where a mask is not 0: in Triton 3.9 a mask of two comparisons may be of integers."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def as_bool(mask: Any) -> Any:
        return TensorHandle(mask.data.astype(bool), mask.dtype)

    def create_masked_load(self: Any, pointers: Any, mask: Any, *more: Any) -> Any:
        return load(self, pointers, as_bool(mask), *more)

    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        return store(self, pointers, value, as_bool(mask), *more)

    InterpreterBuilder.create_masked_load = create_masked_load
    InterpreterBuilder.create_masked_store = create_masked_store


def take_constants_of_tensors() -> None:
    """Let the interpreter take what a constant and a tensor give, which in Triton 3.8 is a constant that holds a tensor."""
    from triton import language as tl
    from triton.language.semantic import TritonSemantic

    to_tensor = TritonSemantic.to_tensor

    def unwrapped(self: Any, value: Any, *more: Any, **named: Any) -> Any:
        if isinstance(value, tl.constexpr) and isinstance(value.value, tl.tensor):
            value = value.value
        return to_tensor(self, value, *more, **named)

    TritonSemantic.to_tensor = unwrapped


# What memory holds that nobody has written yet, by the size of an element: NaN as a floating-point number, and outside of
# everything as an integer. A single byte has no value that says so.
UNWRITTEN = {2: 0x7FFA, 4: 0x7FFA_5A5A, 8: 0x7FFA_5A5A_5A5A_5A5A}


def mark_unwritten(tensor: torch.Tensor) -> torch.Tensor:
    """Fill new memory such that `StrictMemory` knows that nobody wrote it; return it."""
    size = tensor.element_size()
    if size in UNWRITTEN:
        tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size]).fill_(UNWRITTEN[size])
    return tensor


class StrictMemory:
    """The interpreter's accesses, each checked to lie inside a tensor of the launch, and loads to be of written memory."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.ranges: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)

    def enter(self, kernel: str, arguments: list[Any]) -> None:
        """Note the storages that a launch may touch."""
        storages = [argument.untyped_storage() for argument in arguments if isinstance(argument, torch.Tensor)]
        self.ranges = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
        self.kernel = kernel

    def check(self, pointers: Any, mask: Any, itemsize: int) -> None:
        """Assert that every element that is not masked lies inside one of them."""
        touched = np.asarray(pointers)[np.asarray(mask).astype(bool)].astype(np.int64)
        inside = np.zeros(touched.shape, bool)
        for begin, end in self.ranges:
            inside |= (touched >= begin) & (touched + itemsize <= end)
        assert inside.all(), f"{self.kernel} touches memory outside of its tensors"

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        size = np.dtype(dtype).itemsize
        self.check(pointers, mask, size)
        loaded = self.memory.load(pointers, mask, other, dtype)
        if size in UNWRITTEN:
            unwritten = np.asarray(loaded).view(f"u{size}") == UNWRITTEN[size]
            assert not (unwritten & np.asarray(mask).astype(bool)).any(), f"{self.kernel} reads what nobody wrote"
        return loaded

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self.check(pointers, mask, np.asarray(value).dtype.itemsize)
        return self.memory.store(pointers, value, mask)

    def atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
        self.check(pointers, mask, np.asarray(value).dtype.itemsize)
        return self.memory.atomic_rmw(operation, pointers, value, mask, order)

    def atomic_cas(self, pointers: Any, expected: Any, value: Any, order: Any) -> Any:
        self.check(pointers, np.ones(np.asarray(pointers).shape, bool), np.asarray(value).dtype.itemsize)
        return self.memory.atomic_cas(pointers, expected, value, order)


@pytest.fixture
def strict_memory(monkeypatch: pytest.MonkeyPatch) -> StrictMemory:
    """Fail a test whose kernels touch memory outside of the tensors that they were given, or read what nobody wrote."""
    from triton.runtime import interpreter

    strict = StrictMemory(interpreter._interpreter)
    launch = interpreter.GridExecutor.__call__

    def launch_strictly(self: Any, *arguments: Any, **keywords: Any) -> Any:
        strict.enter(self.fn.__name__, [*arguments, *keywords.values()])
        return launch(self, *arguments, **keywords)

    monkeypatch.setattr(interpreter, "_interpreter", strict)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_strictly)
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda *arguments, **named: mark_unwritten(new_empty(*arguments, **named))
    )
    return strict


def pytest_pycollect_makemodule(module_path: Any, parent: Any) -> None:
    """Skip the modules of this directory where the interpreter is off; called before they are imported."""
    if not INTERPRETED:
        pytest.skip("run in a process of its own: TRITON_INTERPRET=1 pytest tests/interpreter", allow_module_level=True)


if INTERPRETED:
    count_loops_by_scalars()
    prepare_languages_once()
    multiply_exactly()
    fuse_multiplication_and_addition()
    take_masks_of_integers()
    take_constants_of_tensors()
