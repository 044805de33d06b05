"""A stand-in for Gluon on top of Triton's interpreter, which knows Triton alone: it runs the kernels of SM 8.0 as they are.

Layouts mean nothing here. Shared memory is an array, full of NaN at first, and a copy to it happens as late as it may: where it
is waited for. Until then its buffer holds NaN, so that whoever reads it before, or what a copy would overwrite, gives wrong
results. One program runs at a time and has no threads: missing barriers are not seen (Triton puts them).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime.interpreter import TensorHandle, _get_np_dtype


def tensor_of(array: np.ndarray, dtype: Any) -> Any:
    """Return a tensor of the interpreter with these elements."""
    return tl.core.tensor(TensorHandle(array.copy(), dtype), tl.block_type(dtype, list(array.shape)))


class Shared:
    """A buffer in shared memory, or a view of one."""

    def __init__(self, array: np.ndarray, dtype: Any) -> None:
        self.array, self.dtype = array, dtype

    def spoil(self) -> None:
        """Fill the buffer with NaN."""
        if self.array.dtype == np.uint16:  # as which the interpreter holds bfloat16
            self.array[...] = 0x7FC0
        else:
            self.array[...] = np.nan

    def index(self, place: Any) -> Shared:
        return Shared(self.array[int(place)], self.dtype)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        places = [slice(None)] * self.array.ndim
        places[dim] = slice(start, start + length)
        return Shared(self.array[tuple(places)], self.dtype)

    def permute(self, order: list[int]) -> Shared:
        return Shared(self.array.transpose(order), self.dtype)

    def load(self, layout: Any) -> Any:
        return tensor_of(self.array, self.dtype)

    def store(self, value: Any) -> None:
        assert value.dtype == self.dtype, (value.dtype, self.dtype)
        self.array[...] = value.handle.data


class AsyncCopies:
    """`cp.async`: groups of copies that are under way."""

    def __init__(self) -> None:
        self.groups: list[list[Callable[[], None]]] = []
        self.open: list[Callable[[], None]] = []

    def async_copy_global_to_shared(self, shared: Shared, pointers: Any, mask: Any = None) -> None:
        def arrive() -> None:
            loaded = tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0.0)
            shared.store(loaded)

        shared.spoil()
        self.open.append(arrive)

    def commit_group(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, num_outstanding: int) -> None:
        while len(self.groups) > num_outstanding:
            for arrive in self.groups.pop(0):
                arrive()

    def assert_none_is_under_way(self) -> None:
        """Assert that a program waited for all of its copies."""
        assert not self.groups and not self.open, "a copy is still under way"

    def forget(self) -> None:
        """Let go of all copies, as after a program that failed."""
        self.groups, self.open = [], []


COPIES = AsyncCopies()


class Language(ModuleType):
    """`triton.experimental.gluon.language`: Triton's functions of the same names, which are given no layouts."""

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return lambda *arguments, **named: None
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(tl, name)

    static_range = staticmethod(range)

    @staticmethod
    def num_warps() -> int:
        return 4

    @staticmethod
    def arange(start: int, end: int, layout: Any = None) -> Any:
        return tl.arange(start, end)

    @staticmethod
    def zeros(shape: Any, dtype: Any, layout: Any = None) -> Any:
        return tl.zeros(shape, dtype)

    @staticmethod
    def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Any:
        return tl.full(shape, value, dtype)

    @staticmethod
    def convert_layout(value: Any, layout: Any, assert_trivial: bool = False) -> Any:
        return value

    @staticmethod
    def inline_asm_elementwise(code: str, constraints: str, operands: Any, **options: Any) -> Any:
        """Return what the assembly codes of `visible.py` do, the only ones that run here."""
        value, other, words, *byte = operands
        if byte:
            assert "prmt.b32 seen, $3, 0, $4; lop3.b32 $0, seen, $1, $2, 0xca;" in code
            seen = (words >> (8 * (byte[0] & 7) + 7)) & 1
            return tl.where(seen != 0, value, other)
        if "lop3.b32 $0, $3, $1, $2, 0xca;" in code:
            bits = (value.to(tl.int32, bitcast=True) & words) | (other.to(tl.int32, bitcast=True) & ~words)
            return bits.to(tl.float32, bitcast=True)
        assert "and.b32 outside, $3, 0x40004000;" in code and "selp.f32 $0, $1, $2, seen;" in code
        return tl.where((words & 0x40004000) == 0, value, other)

    @staticmethod
    def multiple_of(value: Any, values: Any) -> Any:
        return value

    max_contiguous = multiple_of

    @staticmethod
    def allocate_shared_memory(dtype: Any, shape: Any, layout: Any) -> Shared:
        buffer = Shared(np.empty([int(size) for size in shape], _get_np_dtype(dtype)), dtype)
        buffer.spoil()
        return buffer


def jit(function: Any = None, **options: Any) -> Any:
    """Return a function that the interpreter runs; constants are those of Triton."""
    if function is None:
        return lambda later: jit(later, **options)
    constants = {name: "constexpr" for name, kind in function.__annotations__.items() if "constexpr" in str(kind)}
    function.__globals__["tl"] = tl  # the interpreter asks for it
    made = triton.jit(function, **options)
    rewrite = made.rewriter.rewrite_ast

    def rewrite_with_constants() -> Any:
        rewritten = rewrite()
        rewritten.__annotations__.update(constants)
        return rewritten

    made.rewriter.rewrite_ast = rewrite_with_constants
    return made


def mma_v2(a: Any, b: Any, acc: Any) -> Any:
    """Return acc + a b."""
    return tl.dot(a, b, acc)


@contextmanager
def gluon_on_cpu() -> Iterator[None]:
    """Let modules that are imported meanwhile find the stand-in where they import Gluon from."""
    gluon, language = ModuleType("triton.experimental.gluon"), Language("triton.experimental.gluon.language")
    nvidia, ampere = ModuleType(f"{language.__name__}.nvidia"), ModuleType(f"{language.__name__}.nvidia.ampere")
    gluon.jit, gluon.constexpr_function, gluon.language = jit, lambda function: function, language  # type: ignore[attr-defined]
    ampere.async_copy, ampere.mma_v2, nvidia.ampere = COPIES, mma_v2, ampere  # type: ignore[attr-defined]
    language.nvidia = nvidia
    import triton.experimental

    modules = {module.__name__: module for module in (gluon, language, nvidia, ampere)}
    had = {name: sys.modules.get(name) for name in modules}
    had_gluon = getattr(triton.experimental, "gluon", None)
    sys.modules.update(modules)
    triton.experimental.gluon = gluon  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name, module in had.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
        if had_gluon is None:
            del triton.experimental.gluon
        else:
            triton.experimental.gluon = had_gluon


tl.block_type.layout = None  # what kernels ask of the type of a tensor
