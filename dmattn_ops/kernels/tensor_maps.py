"""Tensor maps (TMA descriptors) of attention tensors, made once for each address, shape and strides."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_ELEMENT = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


class _Address(NamedTuple):
    """What a tensor map needs of a tensor, so that a cached map does not keep its memory."""

    pointer: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.pointer


def mappable(tensor: Tensor) -> bool:
    """Return whether TMA can address `tensor`: start and strides in whole 16 bytes, the last dimension contiguous."""
    step = 16 // tensor.element_size()
    outer = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    aligned = all(size == 1 or (stride > 0 and stride % step == 0) for size, stride in outer)
    return aligned and tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0


def rows_map(tensor: Tensor, rows: int, width: int) -> TensorDescriptor:
    """Map `[B, S, heads, D]` in boxes of `rows` x `width` of a head; past S or D it reads 0 and writes nothing."""
    shape = tuple(tensor.shape)
    # the stride of a dimension of size 1 may be anything: take one that a tensor map accepts
    strides = tuple(stride if size > 1 else width for size, stride in zip(shape, tensor.stride(), strict=True))
    return _tensor_map(tensor.data_ptr(), tensor.dtype, shape, (*strides[:-1], 1), (1, rows, 1, width))


def plain_map(matrix: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """Map a contiguous float32 matrix in blocks that keep its order in shared memory."""
    return _tensor_map(matrix.data_ptr(), matrix.dtype, tuple(matrix.shape), matrix.stride(), block)


@lru_cache(maxsize=4096)
def _tensor_map(
    pointer: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]
) -> TensorDescriptor:
    if dtype == torch.float32:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=len(block))
    else:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), _ELEMENT[dtype])
    return TensorDescriptor(_Address(pointer, dtype), list(shape), list(strides), list(block), layout)
