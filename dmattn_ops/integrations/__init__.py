"""Adapters for libraries that call attention: `dmattn_ops.integrations.transformers`."""

from importlib import import_module
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name == "transformers":
        return import_module(f"{__name__}.transformers")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
