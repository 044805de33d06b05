"""Calls that a compiler traces: their kernels are compiled while the compiler still works on the graph around them.

Shapes, strides and numbers of a call decide which kernels it launches, and a traced call has them, forward and backward.
`launching/ahead.py` has another process compile these kernels. Nothing is compiled ahead for sizes that the tracer does not know,
on a CPU, in processes that may not start others, and where `DMATTN_COMPILE_AHEAD=1` does not ask for it.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import threading
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmattn_ops import environment
from dmattn_ops.choice import arch, config, tuning
from dmattn_ops.dispatch import operators
from dmattn_ops.launching import ahead
from dmattn_ops.meta import fakes
from dmattn_ops.ops import schemas

# Whose sources decide what a call launches, and how it is compiled
_ROOMS = ("kernels", "launching", "choice", "dispatch")
_MAX_SEEN = 4096
_seen: set[Any] = set()
_looking = threading.Lock()


def note(name: str, arguments: tuple[Any, ...]) -> None:
    """Have the kernels of a call compiled that a compiler has just traced; whatever goes wrong costs a warning and no call."""
    try:
        call = described_call(name, arguments)
        if call is not None and not Path(call.cache, call.mark).exists():
            ahead.submit(call)
    except Exception as error:
        environment.warn_once(f"dmattn_ops compiles no kernels ahead: {type(error).__name__}: {error}")


def described_call(name: str, arguments: tuple[Any, ...]) -> ahead.Described | None:
    """Return the description of a traced call; None where nothing is to be compiled for it, or it was described before."""
    if name not in operators.functions or not environment.compiles_ahead() or environment.checks():
        return None
    signature = schemas.SIGNATURES[name]
    tensors, numbers = signature.split(signature.fill(arguments))
    on = next(each for each in tensors if each is not None).device
    if on.type != "cuda" or not _are_of_a_compiler(tensors) or not _may_start():
        return None
    described = tuple([None if each is None else describe(each) for each in tensors])
    if not _is_known((described, numbers)) or not _is_new((name, described, numbers, on)):
        return None
    here = arch.physical(on)
    if here.sm < config.OLDEST_TRITON:
        return None
    call = ahead.Described(name, described, numbers, here, arch.name(on), _triton_cache(on.index or 0), "")
    return call._replace(mark="dmattn-" + hashlib.sha256(repr((call, _surroundings())).encode()).hexdigest())


def _are_of_a_compiler(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether fake tensors are a compiler's: their sizes may be symbols, unlike those of others, such as DTensor's."""
    modes = (getattr(tensor, "fake_mode", None) for tensor in tensors if tensor is not None)
    return any(getattr(mode, "shape_env", None) is not None for mode in modes)


def _triton_cache(device: int) -> str:
    """Return the folder of Triton's cache, which stays the one that it is.

    Inductor sets the variable when it loads a graph, and Triton would then look for kernels in another folder than before.
    """
    from triton import knobs

    if "TRITON_CACHE_DIR" not in os.environ:
        # set by a user, or by Inductor once it has looked into its own cache
        inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        folder = Path(inductor).absolute() / "triton" / str(device) if inductor else Path(knobs.cache.dir)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["TRITON_CACHE_DIR"] = str(folder)
    return os.environ["TRITON_CACHE_DIR"]


def _is_new(found: Any) -> bool:
    """Return whether a call was not described before."""
    with _looking:
        if found in _seen:
            return False
        if len(_seen) >= _MAX_SEEN:
            _seen.clear()
        _seen.add(found)
        return True


def describe(tensor: Tensor) -> tuple[Any, ...]:
    """Return all of a tensor that decides about kernels: shape, strides, offset and dtype."""
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype


def _is_known(part: Any) -> bool:
    """Return whether all sizes and numbers are known: none is a symbol of the tracer."""
    if type(part) is tuple:
        return all(map(_is_known, part))
    return part is None or type(part) in (int, float, bool, torch.dtype)


def _may_start() -> bool:
    """Return whether this process may start another one, and a Triton is there to compile for it."""
    return (
        not multiprocessing.current_process().daemon
        and os.environ.get("TRITON_INTERPRET", "0") in ("", "0")
        and find_spec("triton") is not None
        and arch.has_gpu()
    )


def _surroundings() -> tuple[Any, ...]:
    """Return what else decides which kernels a call launches and under what names Triton keeps them."""
    variables = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(("TRITON_", "DMATTN_", "LLVM_", "MLIR_", "DISABLE_", "NVPTX_"))
        and name != "TRITON_CACHE_DIR"
    )
    return variables, _sources(), tuning.entries()


@cache
def _sources() -> str:
    """Return a digest of the sources of kernels and launchers, and of Triton's version."""
    from triton import __version__

    package, digest = Path(__file__).parents[1], hashlib.sha256(__version__.encode())
    for room in _ROOMS:
        for path in sorted(package.joinpath(room).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


fakes.when_traced.append(note)
