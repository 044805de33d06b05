"""The Gluon names that SM 9.0 kernels use, the same for triton 3.6 and later.

Triton 3.9 renamed the TMA copies and gave the reduction a name; 3.6 has its lowering but no Python function. Triton 3.8 alone
refuses views of shared memory that are smaller than what they view, and views of a slice.
"""

from __future__ import annotations

import math

import triton
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = [
    "VIEWS_ARE_WHOLE",
    "fence_async_shared",
    "follow_kernel_before",
    "let_kernel_behind_begin",
    "mbarrier",
    "reinterpret",
    "thread_barrier",
    "tma",
    "tma_load",
    "tma_reduce_add",
    "tma_store",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

VIEWS_ARE_WHOLE = triton.__version__.startswith("3.8.")


@builtin
def reinterpret(descriptor, dtype, shape, layout, _semantic=None):
    """View shared memory as another dtype, shape and layout that take no more room."""
    view = descriptor.reinterpret if hasattr(descriptor, "reinterpret") else descriptor._reinterpret
    times = _times(descriptor, _plain(dtype), [_plain(size) for size in _plain(shape)]) if VIEWS_ARE_WHOLE else 1
    if times == 1:
        return view(dtype, shape, layout, _semantic=_semantic)
    return view(dtype, [times, *_plain(shape)], layout, _semantic=_semantic).index(0, _semantic=_semantic)


@gluon.jit
def let_kernel_behind_begin():
    """Let the kernel behind this one begin (`launching.overlap`), in a kernel that was launched as usual and so follows none."""
    gdc_launch_dependents()


@gluon.jit
def follow_kernel_before():
    """Let the kernel behind this one begin, and wait until the one in front has ended (`launching.overlap`)."""
    let_kernel_behind_begin()
    gdc_wait()


def _plain(value):
    return value.value if isinstance(value, gl.constexpr) else value


def _times(descriptor, dtype, shape):
    """Return how often a view fits into shared memory."""
    own = math.prod(descriptor.shape) * descriptor.dtype.primitive_bitwidth
    return own // (math.prod(shape) * dtype.primitive_bitwidth)


@builtin
def _reduce_add(tensor_desc, coord, src, _semantic=None):
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
"""`thread_barrier()`: wait for all threads of the partition, before one of them tells others what all have stored."""

tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""`tma_load(tensor_desc, coord, barrier, result, pred=True)`: fill shared memory, completing on `barrier`."""

tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
"""`tma_store(tensor_desc, coord, src)`: global memory written from shared; `tma.store_wait` before `src` is reused."""

tma_reduce_add = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _reduce_add
"""`tma_reduce_add(tensor_desc, coord, src)`: like `tma_store`, adding to what is there."""
