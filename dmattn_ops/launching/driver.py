"""Launching compiled kernels again through the driver, by `libdmattn.so` (`csrc/cuda/driver.cpp`): no headers, no Python between.

All launches that come one behind the other are one call, which takes addresses and a stream. Without the library, or with a
driver that is too old, there are no such calls, and Triton's launcher runs instead: parsing the 100 arguments of a kernel with
tensor maps takes it ten times as long.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from weakref import finalize

import torch

MAP_BYTES = 128  # of a CUtensorMap
_MAP_TYPES = {torch.int32: 3, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # CUtensorMapDataType
_LIBRARY = Path(__file__).parents[1] / "libdmattn.so"
_MAX_PARAMETERS = 1024
PARAMETERS = ("number", "address", "map")  # kinds of parameters, as in `csrc/cuda/plans.h`
_FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip


class LaunchShape(NamedTuple):
    """How a kernel is launched."""

    grid: tuple[int, ...]
    threads: int  # of a block
    shared: int  # bytes of shared memory
    overlaps: bool = False  # it may begin before the kernel in front of it ends (programmatic dependent launch)


class Driver(NamedTuple):
    """Functions of libcuda.so.1; each returns 0 or a CUresult."""

    launch: Any  # (CUlaunchConfig *, CUfunction, void **parameters, void **extra)
    parameter: Any  # (CUfunction, size_t index, size_t *offset, size_t *size)
    encode: Any  # cuTensorMapEncodeTiled


@cache
def driver() -> Driver | None:
    """Return the functions, or None where this driver is too old (cuFuncGetParamInfo came with CUDA 12.4)."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        return Driver(library.cuLaunchKernelEx, library.cuFuncGetParamInfo, library.cuTensorMapEncodeTiled)
    except (OSError, AttributeError):
        return None


class _Library(NamedTuple):
    """Functions of `libdmattn.so`."""

    new: Any
    delete: Any
    launch: Any


@cache
def _library() -> _Library | None:
    """Return the functions, or None where the library was not built, or by an older version."""
    try:
        library = ctypes.CDLL(str(_LIBRARY))
        found = _Library(library.dmattn_new_launches, library.dmattn_delete_launches, library.dmattn_launch)
    except (OSError, AttributeError):
        return None
    pointer = ctypes.c_void_p
    found.new.restype, found.new.argtypes = pointer, [ctypes.c_char_p, pointer, pointer]
    found.delete.argtypes = [pointer]
    found.launch.argtypes = [pointer, ctypes.c_char_p, pointer]
    return found


def parameter_sizes(function: int, declared: int | None = None) -> list[int]:
    """Return the size in bytes of each parameter of a loaded kernel, as the driver knows it.

    `declared` is their number. Where it is None, the driver is asked until it answers that there are no more: an error, which
    harms nothing, but which compute-sanitizer reports.
    """
    functions = driver()
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    most = _MAX_PARAMETERS if declared is None else declared
    while functions is not None and len(sizes) < most:
        index = ctypes.c_size_t(len(sizes))
        if functions.parameter(ctypes.c_void_p(function), index, ctypes.byref(offset), ctypes.byref(size)) != 0:
            break
        sizes.append(size.value)
    return sizes


def encoding(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> tuple[int, list[int], list[int], list[int]]:
    """Return the type, sizes, strides in bytes and box of a tensor map as the driver takes them: innermost dimension first."""
    steps = [dtype.itemsize * stride for stride in reversed(strides[:-1])]
    return _MAP_TYPES[dtype], list(reversed(shape)), [*steps, 0], list(reversed(box))


def word(kind: str, value: Any) -> int:
    """Return the 8 bytes, as an integer, in which a number of a kernel's parameters lies; None is a null pointer."""
    packed = b"" if value is None else struct.pack(f"={_FORMATS[kind]}", value)
    return int.from_bytes(packed.ljust(8, b"\0"), "little")


def words(kind: str, value: Any) -> tuple[str, list[int]]:
    """Return which of `PARAMETERS` a parameter of this type is, and the numbers of 64 bits in which the library reads it.

    A value is a number, None (a null pointer), an address as (tensor, offset), or for type "map" the map of memory at
    such an address: (tensor, offset, `Map`, swizzle).
    """
    if kind == "map":
        tensor, offset, of, swizzle = value
        encoded, *dimensions = encoding(of.dtype, of.shape, of.strides, of.block)
        numbers = [number % (1 << 64) for part in dimensions for number in part]
        return "map", [tensor, offset, encoded, len(of.shape), *numbers, swizzle]
    if isinstance(value, tuple):
        return "address", list(value)
    return "number", [word(kind, value)]


def pack(
    function: int, shape: LaunchShape, parameters: list[tuple[str, Any]], sizes: list[int]
) -> tuple[int, ...] | None:
    """Return a launch as the library reads it, but for addresses and the stream; `parameters` are what `words` takes.

    None where `sizes`, those of the kernel's parameters, are others.
    """
    expected = [_size(kind) for kind, _ in parameters]
    if 0 in expected or sizes != expected:
        return None
    packed = [function, *shape.grid, shape.threads, shape.shared, int(shape.overlaps), len(parameters)]
    for parameter in parameters:
        kind, numbers = words(*parameter)
        packed += (PARAMETERS.index(kind), *numbers)
    return tuple(packed)


class Launches:
    """Launches one behind the other, by the driver; several threads may use them at the same time.

    `launch(made, pack(*addresses), stream)` launches with tensors there, and returns how many the driver did before one that it
    refused: -1, with nothing launched, where an address is no multiple of 16.
    """

    def __init__(self, library: _Library, functions: Driver, packed: Sequence[tuple[int, ...]], tensors: int) -> None:
        numbers = [tensors, len(packed), *[number for one in packed for number in one]]
        pointers = [ctypes.cast(function, ctypes.c_void_p) for function in (functions.launch, functions.encode)]
        self.launch, self.pack = library.launch, struct.Struct(f"={tensors}Q").pack
        self.made = library.new(struct.pack(f"={len(numbers)}Q", *numbers), *pointers)
        finalize(self, library.delete, self.made).atexit = False


def launches(packed: Sequence[tuple[int, ...] | None], tensors: int) -> Launches | None:
    """Return launches with the addresses of so many tensors; None where the driver cannot do them all."""
    known = [one for one in packed if one is not None]
    functions, library = driver(), _library()
    if functions is None or library is None or len(known) < len(packed):
        return None
    return Launches(library, functions, known, tensors)


def _size(kind: str) -> int:
    """Return the bytes of a parameter, 0 where its type is not known here."""
    if kind == "map":
        return MAP_BYTES
    if kind.startswith("*"):
        return 8
    return struct.calcsize(f"={_FORMATS[kind]}") if kind in _FORMATS else 0
