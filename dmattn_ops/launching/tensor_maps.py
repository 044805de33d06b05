"""Tensor maps (TMA descriptors) among the arguments of a kernel. Without one, Triton's experimental Gluon is not needed."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


# A ragged map bounds accesses by the end of a sequence without being made for it (as Triton's `tools/ragged_tma.py` does). Row
# `x` counts from 2^30 rows before the sequence's end, where its dimension ends; another dimension `y` of the same stride puts
# that end where it lies, and 2^30 steps of the first one, each 2^34 elements less a row, take the 2^30 rows back: addresses are
# counted modulo 2^64 bytes.
RAGGED_ROWS = 1 << 30
_WRAP = 1 << 34
_MOST = 0x7FFF0000  # a size that bounds nothing


class Map(NamedTuple):
    """A tensor map of `base`, or of memory `offset` bytes behind its start; strides in elements."""

    base: Any  # a Tensor, or None in a plan, which keeps no tensor
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]

    def descriptor(self) -> TensorDescriptor:
        """Return the map as Triton takes it."""
        return self.at(self.base.data_ptr() + self.offset)

    def at(self, address: int) -> TensorDescriptor:
        """Return the map of other memory as Triton takes it."""
        return _descriptor(address, *self[2:])


class _Address(NamedTuple):
    """The properties of a tensor that its tensor map depends on: kept in its place, so that a cached map keeps no memory alive."""

    pointer: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.pointer


def rows_map(tensor: Tensor, rows: int, width: int) -> Map:
    """Map `[B, S, heads, D]`, or packed `[S, heads, D]`, in boxes of `rows` x `width` of a head.

    Past S (past the end of a sequence of packed ones) or D it reads 0 and writes nothing.
    """
    if tensor.dim() == 3:
        return _ragged_map(tensor, (0, 1), (1, 1, rows, 1, width))
    return _map(tensor, (0, 1, 2, 3), (1, rows, 1, width))


def head_rows_map(tensor: Tensor, rows: int, width: int) -> Map:
    """Map what `rows_map` does with heads before rows."""
    if tensor.dim() == 3:
        return _ragged_map(tensor, (1, 0), (1, 1, 1, rows, width))
    return _map(tensor, (0, 2, 1, 3), (1, 1, rows, width))


def pairs_map(tensor: Tensor, rows: int, columns: int) -> Map:
    """Map what has a number for pairs of queries and keys, or a word for several keys, in boxes of `rows` x `columns` of a head.

    It is `[B|1, heads, rows, columns]`: mask words or a bias.
    """
    return _map(tensor, (0, 1, 2, 3), (1, 1, rows, columns))


def plain_map(base: Tensor, shape: tuple[int, int], block: tuple[int, int], offset: int = 0) -> Map:
    """Map a contiguous float32 matrix, `offset` bytes behind the start of `base`, in blocks that keep its order."""
    return Map(base, offset, torch.float32, shape, (shape[1], 1), block)


def _map(tensor: Tensor, order: tuple[int, ...], block: tuple[int, ...]) -> Map:
    sizes, strides = tensor.shape, tensor.stride()
    # the stride of a dimension of size 1 may be anything: take one that a tensor map accepts
    steps = tuple(strides[dim] if sizes[dim] > 1 else 1024 for dim in order[:-1])
    return Map(tensor, 0, tensor.dtype, tuple(sizes[dim] for dim in order), (*steps, 1), block)


def _ragged_map(tensor: Tensor, order: tuple[int, int], block: tuple[int, ...]) -> Map:
    """Map packed `[total, heads, D]`, rows and heads in this order behind the two dimensions that name a sequence."""
    total, heads, dim = tensor.shape
    sizes = (RAGGED_ROWS, heads)
    steps = (tensor.stride(0) if total > 1 else 1024, tensor.stride(1) if heads > 1 else 1024)
    shape = (_MOST, _MOST, *(sizes[dim] for dim in order), dim)
    strides = (_WRAP - steps[0], steps[0], *(steps[dim] for dim in order), 1)
    return Map(tensor, 0, tensor.dtype, shape, strides, block)


@lru_cache(maxsize=4096)
def _descriptor(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]
) -> TensorDescriptor:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if dtype == torch.float32:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=len(block))
    else:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, str(dtype).removeprefix("torch.")))
    return TensorDescriptor(_Address(address, dtype), list(shape), list(strides), list(block), layout)
