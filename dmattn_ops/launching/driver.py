"""The few CUDA driver functions that launch a compiled kernel again, called through ctypes: no headers, no compiler.

A call costs 0.3 us of Python besides what the driver takes; parsing the 100 arguments of a kernel with tensor maps in
Triton's own launcher takes 10 times that. If the driver is too old, `driver()` returns None and Triton launches.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch

MAP_BYTES = 128  # of a CUtensorMap
_MAP_ALIGNMENT = 64
_MAP_TYPES = {torch.int32: 3, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # CUtensorMapDataType
_PROGRAMMATIC_SERIALIZATION = 6  # CUlaunchAttributeID
_L2_PROMOTION_128B = 2  # CUtensorMapL2promotion, as Triton chooses it
_MAX_PARAMETERS = 1024
_MAX_ENCODED = 128  # tensor maps that one parameter keeps
_MAX_STREAMS = 128  # that a kernel's configuration is kept for
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
    kind, *dimensions = encoding(dtype, shape, strides, box)
    rank = len(shape)
    memory = ctypes.create_string_buffer(MAP_BYTES + _MAP_ALIGNMENT)
    start = ctypes.addressof(memory)
    start += -start % _MAP_ALIGNMENT
    sizes, steps = ((ctypes.c_uint64 * rank)(*numbers) for numbers in dimensions[:2])
    boxes, ones = (ctypes.c_uint32 * rank)(*dimensions[2]), (ctypes.c_uint32 * rank)(*(1,) * rank)
    status = functions.encode(
        ctypes.c_void_p(start), kind, rank, ctypes.c_void_p(address), sizes, steps, boxes, ones,
        0, swizzle, _L2_PROMOTION_128B, 0,
    )  # fmt: skip
    return EncodedMap(start, memory) if status == 0 else None


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


class Launch(NamedTuple):
    """A kernel, its parameters and a stream. It never changes, so that several threads may launch it at the same time."""

    run: Callable[[], int]  # returns 0 or a CUresult
    memory: list[Any]  # that parameters lie in


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
    """A kernel's parameters in memory as `cuLaunchKernelEx` takes them, but for addresses and the stream."""

    def __init__(self, functions: Driver, function: int, shape: LaunchShape, count: int) -> None:
        self.launch, self.function = functions.launch, ctypes.c_void_p(function)
        # CUlaunchAttribute: what it is (4 bytes, 4 of padding), and its value, here an int, in 64 bytes
        self.attributes = ctypes.create_string_buffer(struct.pack("=I4xI60x", _PROGRAMMATIC_SERIALIZATION, 1))
        attributes = (ctypes.addressof(self.attributes), 1) if shape.overlaps else (0, 0)
        # CUlaunchConfig: grid, block, bytes of shared memory (7 x 4 bytes, 4 of padding), stream, attributes, their number
        self.config = struct.pack("=7I4xQQI4x", *shape.grid, shape.threads, 1, 1, shape.shared, 0, *attributes)
        self.configs: dict[int, Any] = {}  # by stream
        self.values = (ctypes.c_uint64 * count)()  # each scalar in 8 bytes
        self.parameters = (ctypes.c_void_p * count)()
        self.type_of_parameters = type(self.parameters)
        start = ctypes.addressof(self.values)
        for index in range(count):
            self.parameters[index] = start + 8 * index
        self.addresses: list[tuple[int, int, int]] = []  # index, tensor, offset
        self.maps: list[_MapParameter] = []

    def at(self, addresses: list[int], stream: int) -> Launch | None:
        """Return the launch with tensors at `addresses`; None where a map cannot be encoded.

        Addresses and the list of all parameters get memory of their own; scalars stay where they are.
        """
        parameters = self.type_of_parameters.from_buffer_copy(self.parameters)
        values = (ctypes.c_uint64 * len(self.addresses))()
        place, start = 0, ctypes.addressof(values)
        for index, tensor, offset in self.addresses:
            values[place] = addresses[tensor] + offset
            parameters[index] = start + 8 * place
            place += 1
        memory = [self.values, self.attributes, values]
        for part in self.maps:
            address = addresses[part.tensor] + part.offset
            found = part.encoded.get(address) or part.encode(address)
            if found is None:
                return None
            memory.append(found.memory)
            parameters[part.index] = found.address
        config = self.configs.get(stream) or self._config(stream)
        run = partial(self.launch, ctypes.byref(config), self.function, ctypes.byref(parameters), None)
        return Launch(run, memory)

    def _config(self, stream: int) -> Any:
        """Return the launch's configuration on a stream, and keep it."""
        made = (ctypes.c_uint64 * 7).from_buffer_copy(self.config)
        made[4] = stream
        if len(self.configs) >= _MAX_STREAMS:
            self.configs.clear()
        self.configs[stream] = made
        return made


def pack(
    function: int,
    shape: LaunchShape,
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
    packed = Packed(functions, function, shape, len(parameters))
    for index, (kind, value) in enumerate(parameters):
        if kind == "map":
            packed.maps.append(_MapParameter(index, *value))
        elif isinstance(value, tuple):
            packed.addresses.append((index, *value))
        else:
            packed.values[index] = word(kind, value)
    return packed


def _size(kind: str) -> int:
    """Return the bytes of a parameter, 0 where its type is not known here."""
    if kind == "map":
        return MAP_BYTES
    if kind.startswith("*"):
        return 8
    return struct.calcsize(f"={_FORMATS[kind]}") if kind in _FORMATS else 0
