"""The modules that launch kernels of each configuration, in an interpreter or on a GPU."""

from __future__ import annotations

import os
from contextlib import nullcontext
from importlib import import_module
from types import ModuleType

from dmattn_ops.choice.config import PortableBackward, PortableForward
from dmattn_ops.choice.configurations import AmpereBackward, AmpereForward
from dmattn_ops.kernels.portable import backward as portable_backward
from dmattn_ops.kernels.portable import forward as portable_forward

Forward = PortableForward | AmpereForward
Backward = PortableBackward | AmpereBackward


def launcher_of(config: Forward | Backward) -> ModuleType:
    """Return the module that launches a configuration. Where the interpreter runs, Gluon is a stand-in (`gluon_on_cpu.py`)."""
    if isinstance(config, PortableForward):
        return portable_forward
    if isinstance(config, PortableBackward):
        return portable_backward
    from tests.interpreter.gluon_on_cpu import gluon_on_cpu

    direction = "forward" if isinstance(config, AmpereForward) else "backward"
    with gluon_on_cpu() if os.environ.get("TRITON_INTERPRET") == "1" else nullcontext():
        return import_module(f"dmattn_ops.kernels.ampere.{direction}.launch")
