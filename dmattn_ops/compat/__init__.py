"""The surfaces of other attention libraries over the functions of this one: change the import line, keep the code.

`dmattn_ops.compat.flash_dmattn` is flash_dmattn 1.2.2 and `dmattn_ops.compat.flash_attn` is flash-attn 2, with the names of
their submodules. What they mean differently from `dmattn_ops` is translated, and said in their docstrings.
"""

from importlib import import_module
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name in ("flash_attn", "flash_dmattn"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
