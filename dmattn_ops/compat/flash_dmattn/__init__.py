"""The names of flash_dmattn 1.2.2: `from dmattn_ops.compat.flash_dmattn import flash_dmattn_func`, and so its submodules.

All three functions run the same kernels, chosen for the machine; a "backend" decides nothing but the order of arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dmattn_ops.compat.flash_dmattn.flash_dmattn_flex import flex_dmattn_func
from dmattn_ops.compat.flash_dmattn.flash_dmattn_interface import flash_dmattn_func, flash_dmattn_varlen_func
from dmattn_ops.compat.flash_dmattn.flash_dmattn_triton import triton_dmattn_func

__version__ = "1.2.2"  # of the surface

CUDA_AVAILABLE = True
TRITON_AVAILABLE = True
FLEX_AVAILABLE = True

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "cuda": flash_dmattn_func,
    "triton": triton_dmattn_func,
    "flex": flex_dmattn_func,
}

__all__ = [
    "CUDA_AVAILABLE",
    "FLEX_AVAILABLE",
    "TRITON_AVAILABLE",
    "flash_dmattn_func",
    "flash_dmattn_func_auto",
    "flash_dmattn_varlen_func",
    "flex_dmattn_func",
    "get_available_backends",
    "triton_dmattn_func",
]


def get_available_backends() -> list[str]:
    """Return the names that `flash_dmattn_func_auto` takes."""
    return list(_FUNCTIONS)


def flash_dmattn_func_auto(backend: str | None = None, **unused: Any) -> Callable[..., Any]:
    """Return the function of a backend, "cuda", "triton" or "flex"; None is the first."""
    name = "cuda" if backend is None else backend
    if name not in _FUNCTIONS:
        raise ValueError(f"Unknown backend: {backend}. Available backends: {get_available_backends()}")
    return _FUNCTIONS[name]
