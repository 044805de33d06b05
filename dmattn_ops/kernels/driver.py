"""The few CUDA driver functions that launch a compiled kernel again, called through ctypes: no headers, no compiler.

A call costs 0.3 us of Python besides what the driver takes; parsing the 100 arguments of a kernel with tensor maps in
Triton's own launcher takes 10 times that. Whoever has no such driver gets None and launches through Triton.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from functools import cache
from typing import Any, NamedTuple

import torch

MAP_BYTES = 128  # of a CUtensorMap
_MAP_ALIGNMENT = 64
_MAP_TYPES = {torch.int32: 3, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # CUtensorMapDataType
_L2_PROMOTION_128B = 2  # CUtensorMapL2promotion, as Triton chooses it
_MAX_PARAMETERS = 1024
_MAX_ENCODED = 128  # tensor maps that one parameter keeps
_FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip


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


def parameter_sizes(function: int) -> list[int]:
    """Return the size in bytes of each parameter of a loaded kernel, as the driver knows it."""
    functions = driver()
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while functions is not None and len(sizes) < _MAX_PARAMETERS:
        index = ctypes.c_size_t(len(sizes))
        if functions.parameter(ctypes.c_void_p(function), index, ctypes.byref(offset), ctypes.byref(size)) != 0:
            break
        sizes.append(size.value)
    return sizes


class EncodedMap(NamedTuple):
    """A CUtensorMap, and the memory that it lies in."""

    address: int
    memory: Any


def encode_map(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
) -> EncodedMap | None:
    """Encode the tensor map of a tensor at `address`, strides in elements; None where the driver refuses."""
    functions = driver()
    if functions is None:
        return None
    rank = len(shape)
    memory = ctypes.create_string_buffer(MAP_BYTES + _MAP_ALIGNMENT)
    start = ctypes.addressof(memory)
    start += -start % _MAP_ALIGNMENT
    # the driver wants the innermost dimension first, and no stride for it
    sizes = (ctypes.c_uint64 * rank)(*reversed(shape))
    steps = (ctypes.c_uint64 * rank)(*(dtype.itemsize * stride for stride in reversed(strides[:-1])), 0)
    boxes, ones = (ctypes.c_uint32 * rank)(*reversed(box)), (ctypes.c_uint32 * rank)(*(1,) * rank)
    status = functions.encode(
        ctypes.c_void_p(start), _MAP_TYPES[dtype], rank, ctypes.c_void_p(address), sizes, steps, boxes, ones,
        0, swizzle, _L2_PROMOTION_128B, 0,
    )  # fmt: skip
    return EncodedMap(start, memory) if status == 0 else None


class _MapParameter:
    """A tensor map among a kernel's parameters, encoded once for each address."""

    def __init__(self, index: int, tensor: int, offset: int, described: Any, swizzle: int) -> None:
        self.index, self.tensor, self.offset = index, tensor, offset
        self.described, self.swizzle = described, swizzle
        self.encoded: dict[int, EncodedMap] = {}

    def encode(self, address: int) -> EncodedMap | None:
        """Return the map of a tensor at `address`, and keep it."""
        of = self.described
        found = encode_map(address, of.dtype, of.shape, of.strides, of.block, self.swizzle)
        if found is not None:
            if len(self.encoded) >= _MAX_ENCODED:
                self.encoded.clear()
            self.encoded[address] = found
        return found


class Packed:
    """A kernel's parameters in memory as `cuLaunchKernelEx` takes them; only addresses and the stream change."""

    def __init__(
        self, functions: Driver, function: int, grid: tuple[int, ...], threads: int, shared: int, count: int
    ) -> None:
        self.launch = functions.launch
        self.lock = threading.Lock()  # whoever launches fills the memory in
        # CUlaunchConfig: grid, block, bytes of shared memory (7 x 4 bytes, 4 of padding), stream, attributes, their number
        self.config = (ctypes.c_uint64 * 7)()
        struct.pack_into("=7I4xQQI", self.config, 0, *grid, threads, 1, 1, shared, 0, 0, 0)
        self.values = (ctypes.c_uint64 * count)()  # each scalar and address in 8 bytes
        self.parameters = (ctypes.c_void_p * count)()
        start = ctypes.addressof(self.values)
        for index in range(count):
            self.parameters[index] = start + 8 * index
        self.addresses: list[tuple[int, int, int]] = []  # index, tensor, offset
        self.maps: list[_MapParameter] = []
        self.call = (ctypes.byref(self.config), ctypes.c_void_p(function), ctypes.byref(self.parameters), None)

    def run(self, addresses: list[int], stream: int) -> bool:
        """Launch; False, with nothing launched, where a map cannot be encoded or the driver reports an error."""
        with self.lock:
            values, parameters = self.values, self.parameters
            for index, tensor, offset in self.addresses:
                values[index] = addresses[tensor] + offset
            for part in self.maps:
                address = addresses[part.tensor] + part.offset
                found = part.encoded.get(address) or part.encode(address)
                if found is None:
                    return False
                parameters[part.index] = found.address
            self.config[4] = stream
            return self.launch(*self.call) == 0


def pack(
    function: int,
    grid: tuple[int, ...],
    threads: int,
    shared: int,
    parameters: list[tuple[str, Any]],
    sizes: list[int],
) -> Packed | None:
    """Pack a launch of the parameters (type, value); None where `sizes`, those of the kernel, are others.

    A value is a number, None (a null pointer), an address as (tensor, offset), or for type "map" the map of memory at
    such an address: (tensor, offset, `Map`, swizzle).
    """
    functions = driver()
    expected = [_size(kind) for kind, _ in parameters]
    if functions is None or 0 in expected or sizes != expected:
        return None
    packed = Packed(functions, function, grid, threads, shared, len(parameters))
    for index, (kind, value) in enumerate(parameters):
        if kind == "map":
            packed.maps.append(_MapParameter(index, *value))
        elif isinstance(value, tuple):
            packed.addresses.append((index, *value))
        elif value is not None:
            struct.pack_into(f"={_FORMATS[kind]}", packed.values, 8 * index, value)
    return packed


def _size(kind: str) -> int:
    """Return the bytes of a parameter, 0 where its type is not known here."""
    if kind == "map":
        return MAP_BYTES
    if kind.startswith("*"):
        return 8
    return struct.calcsize(f"={_FORMATS[kind]}") if kind in _FORMATS else 0
