"""Flash Dynamic Mask Attention: exact attention for PyTorch that skips what the mask hides, on CUDA and CPU."""

from dmattn_ops import flops, implementations  # noqa: F401 - registered with torch when imported
from dmattn_ops.api import flash_dmattn_func, flash_dmattn_qkvpacked_func, flash_dmattn_varlen_func
from dmattn_ops.backend import BackendInfo, backend_info
from dmattn_ops.explain import Explanation, explain
from dmattn_ops.masks import dynamic_mask, prepare_mask
from dmattn_ops.tile_mask import TileMask
from dmattn_ops.version import __version__

__all__ = [
    "BackendInfo",
    "Explanation",
    "TileMask",
    "__version__",
    "backend_info",
    "dynamic_mask",
    "explain",
    "flash_dmattn_func",
    "flash_dmattn_qkvpacked_func",
    "flash_dmattn_varlen_func",
    "prepare_mask",
]
