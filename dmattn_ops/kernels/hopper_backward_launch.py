"""Launch kernels that were launched before without the JIT's look-up, which takes the host longer than the launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_compiled: dict[tuple, Any] = {}


def _kind(argument: Any) -> Any:
    """Return what a compiled kernel depends on: at least as fine as triton's own specialization."""
    if type(argument) is int:
        return (argument == 1) | (argument & 15 == 0) << 1 | (not -(1 << 31) <= argument < 1 << 31) << 2
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() & 15 == 0
    if argument is None or type(argument) is float:
        return type(argument)
    return argument.kind  # of a tensor map


def launch(
    kernel: Any, programs: int, arguments: tuple, constants: dict[str, Any], device: torch.device, num_warps: int
) -> None:
    """Launch `programs` blocks of `kernel`; `constants` are its compile-time arguments and come after the others."""
    key = (kernel, device, *constants.values(), *map(_kind, arguments))
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[(programs,)](*arguments, **constants, num_warps=num_warps, enable_fp_fusion=True)
    else:
        compiled[programs, 1, 1](*arguments, *(constants[name] for name in kernel.arg_names[len(arguments) :]))
