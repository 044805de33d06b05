"""Flash Dynamic Mask Attention: exact attention for PyTorch that skips what the mask hides, on CUDA and CPU."""

from importlib import import_module
from typing import Any

from dmattn_ops.api.backend import BackendInfo, backend_info
from dmattn_ops.api.explain import Explanation, explain
from dmattn_ops.api.export import export_kernels
from dmattn_ops.api.functions import flash_dmattn_func, flash_dmattn_qkvpacked_func, flash_dmattn_varlen_func
from dmattn_ops.api.mass import key_mass, selection_mass
from dmattn_ops.dispatch import chosen, kept, operators, traced  # noqa: F401 - registered with torch when imported
from dmattn_ops.generation import KeptKeys
from dmattn_ops.masks.chosen import selection_mask
from dmattn_ops.masks.prepare import dynamic_mask, prepare_mask
from dmattn_ops.masks.tile_mask import TileMask
from dmattn_ops.ops import flops, vmap  # noqa: F401 - registered with torch when imported
from dmattn_ops.version import __version__

__all__ = [
    "BackendInfo",
    "Explanation",
    "KeptKeys",
    "TileMask",
    "__version__",
    "backend_info",
    "dynamic_mask",
    "explain",
    "export_kernels",
    "flash_dmattn_func",
    "flash_dmattn_qkvpacked_func",
    "flash_dmattn_varlen_func",
    "key_mass",
    "prepare_mask",
    "selection_mask",
    "selection_mass",
]

# Reached as attributes, and imported when they are.
_MODULES = ("biases", "compat", "distributed", "flex", "integrations", "nn", "sdpa", "testing", "trees")
_PLACES = {"activate": "sdpa", "activated": "sdpa", "deactivate": "sdpa"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"dmattn_ops.{name}")
    if name in _PLACES:
        return getattr(import_module(f"dmattn_ops.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'dmattn_ops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, *_PLACES})
