"""What plans are tested with in place of Triton's compiled kernels and of libcuda."""

import ctypes
import struct
from types import SimpleNamespace

from dmattn_ops.launching import driver

SIGNATURE = {
    "x": "*fp32",
    "y": "*fp32",
    "size": "i32",
    "step": "i64",
    "one": "constexpr",
    "scale": "fp32",
    "W": "constexpr",
}


class Compiled:
    """Stands in for Triton's compiled kernel: keeps what it is launched with."""

    def __init__(self, signature, descriptors=()):
        self.src = SimpleNamespace(signature=signature)
        self.metadata = SimpleNamespace(
            launch_cooperative_grid=False, launch_pdl=False, global_scratch_size=0, profile_scratch_size=0,
            tensordesc_meta=list(descriptors),
        )  # fmt: skip
        self.packed_metadata, self.function = (4, 1, 4096), 0xF00
        self.launches = []

    def _init_handles(self):
        pass

    def __getitem__(self, grid):
        return lambda *arguments, stream=None: self.launches.append((grid, arguments, stream))


class Kernel:
    """Stands in for a jitted function: keeps what it is called with."""

    def __init__(self, compiled):
        self.arg_names, self.compiled, self.calls = list(compiled.src.signature), compiled, []
        self.__name__ = "kernel"
        self.params = [SimpleNamespace(name=name, is_constexpr=name.isupper()) for name in self.arg_names]

    def __getitem__(self, grid):
        def call(**named):
            self.calls.append((grid, named))
            return self.compiled

        return call


class Driver:
    """Stands in for libcuda: kernels with the parameters `sizes`; keeps what is launched and encoded."""

    def __init__(self, sizes):
        self.sizes, self.status, self.launches, self.encoded = sizes, 0, [], []
        self.refused = 0  # questions about parameters that there are not
        self.on_launch = lambda fields: None
        pointer = ctypes.c_void_p
        launched = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, pointer)(self._launch)
        parameter = ctypes.CFUNCTYPE(
            ctypes.c_int, pointer, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)
        )(self._parameter)
        numbers = [ctypes.c_int, ctypes.c_uint32, *[pointer] * 5, *[ctypes.c_int] * 4]
        encode = ctypes.CFUNCTYPE(ctypes.c_int, pointer, *numbers)(self._encode)
        self.functions = driver.Driver(launched, parameter, encode)

    def _launch(self, config, function, parameters, extra):
        fields = struct.unpack("=7I4xQQI", ctypes.string_at(config, 52))
        places = (ctypes.c_void_p * len(self.sizes)).from_address(parameters)
        values = [ctypes.string_at(place, size) for place, size in zip(places, self.sizes, strict=True)]
        self.on_launch(fields)
        if self.status == 0:
            self.launches.append((function, fields, values))
        return self.status

    def _parameter(self, function, index, offset, size):
        if index >= len(self.sizes):
            self.refused += 1
            return 1
        size[0] = self.sizes[index]
        return 0

    def _encode(self, place, dtype, rank, address, shape, strides, box, ones, interleave, swizzle, promotion, fill):
        sizes, steps = ((ctypes.c_uint64 * rank).from_address(each) for each in (shape, strides))
        boxes = (ctypes.c_uint32 * rank).from_address(box)
        self.encoded.append((address, list(sizes), list(steps)[:-1], list(boxes), swizzle))
        ctypes.memmove(place, struct.pack("=Q", address), 8)
        return 0
