"""Launchers of the C++ CPU kernels (`csrc/cpu`): the functions that every device has, and whether they exist here.

The library `libdmattn.so` is optional: loaded at the first use, never built here. It is written against torch's stable
interface, so that one file serves every torch from 2.11 on and every Python. Results do not depend on timing: equal
inputs give bitwise equal outputs for a given number of threads, and for all numbers up to 8.
"""

from __future__ import annotations

import functools
import pathlib
import shutil
import sys
from typing import Any

import torch

from dmattn_ops.call import Call, Gradients, Result, Saved, Takes, dropout_scale, dropout_threshold

TAKES = Takes(("none", "bits", "segments", "intervals"))
LIBRARY = "libdmattn.so"
_FOLDER = pathlib.Path(__file__).parents[1]
_ERRORS = {"ValueError": ValueError, "TypeError": TypeError}  # what the texts of the library's errors begin with


def available() -> bool:
    """Return whether the library is built and the running torch loads it."""
    return not reason()


@functools.cache
def reason() -> str:
    """Return why the library cannot be used and what to do, or an empty string where it can."""
    path = _FOLDER / LIBRARY
    if not path.exists():
        return f"the C++ kernels are not built: {_remedy()}"
    try:
        torch.ops.load_library(str(path))
        _ = torch.ops.dmattn_native.forward  # which another file of this name does not have
    except (OSError, RuntimeError, AttributeError) as error:
        return f"the C++ kernels in {path.name} do not load into torch {torch.__version__} ({error}): {_remedy()}"
    return ""


def _remedy() -> str:
    """Return advice, as the end of a message, for an installation without a fitting library."""
    if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        return "install a C++ compiler (GCC or Clang) and then this package again, or a wheel of it that holds them"
    if (_FOLDER.parent / "setup.py").exists():
        command, where = f"{sys.executable} -m pip install --no-build-isolation --no-deps -e {_FOLDER.parent}", ""
    else:
        command, where = "pip install --force-reinstall --no-deps --no-cache-dir FOLDER", " in the FOLDER of a checkout"
    return f"`{command}`{where} builds them, or says with -v what is missing"


def _run(name: str, *arguments: Any, **named: Any) -> None:
    """Call an operator of the library; its errors become those whose name their text begins with."""
    if message := reason():
        raise NotImplementedError(message)
    try:
        getattr(torch.ops.dmattn_native, name)(*arguments, **named)
    except RuntimeError as error:
        kind, _, text = str(error).partition(": ")
        if kind in _ERRORS:
            raise _ERRORS[kind](text) from None
        raise


def _shared(call: Call) -> tuple[object, ...]:
    """Return the arguments that forward and backward have in common, in the order of the schema in `csrc/cpu/library.cpp`."""
    options, varlen = call.options, call.varlen
    offsets = (None, None, False) if varlen is None else (varlen.cu_seqlens_q, varlen.cu_seqlens_k, varlen.top_left)
    return (
        *(call.query, call.key, call.value, call.bias, *call.mask, call.seed, *offsets),
        *(options.band_lo, options.band_hi, options.q_origin, options.k_origin, options.softmax_scale, options.softcap),
        *(dropout_threshold(options.dropout_p), dropout_scale(options.dropout_p)),
    )


def forward(call: Call, result: Result, config: Any) -> None:
    """Write out, lse, lse_tail and, where it is asked for, row_max."""
    _run("forward", *_shared(call), *result)


def backward(call: Call, saved: Saved, grads: Gradients, config: Any) -> None:
    """Write dq, dk, dv and, where it is given, dbias, each with its input's shape."""
    _run("backward", *_shared(call), *saved, *grads[:-1])  # all but dsink, which `sinks` writes


# What makes masks has the arguments of the functions of these names in `reference` and `selection/reference`.
pack_mask = functools.partial(_run, "pack_mask")
list_tiles = functools.partial(_run, "list_tiles")
lifetimes = functools.partial(_run, "lifetimes")
