"""Launchers of the C++ CPU kernels (`csrc/cpu`): the functions that every device has, and whether they exist here.

The extension is optional: loaded at the first use, never built here. A folder may hold libraries for several
versions of torch and of Python, as a checkout does that serves several environments. Results do not depend on timing: equal
inputs give bitwise equal outputs for a given number of threads, and for all numbers up to 8.
"""

from __future__ import annotations

import functools
import importlib.machinery
import pathlib
import re
import shutil
import sys
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from dmattn_ops.call import Call, Gradients, Result, Saved, Takes, dropout_scale, dropout_threshold

TAKES = Takes(("none", "bits", "segments", "intervals"))
PREFIX = "_native-torch"  # of the libraries' names; then come torch's version and Python's suffix (setup.py)
_FOLDER = pathlib.Path(__file__).parents[1]
_RELEASE = re.compile(r"\d+\.\d+\.\d+(\+[\w.]+)?")


def available() -> bool:
    """Return whether the extension is built and fits the running torch."""
    return not reason()


@functools.cache
def reason() -> str:
    """Return why the extension cannot be used and what to do, or an empty string where it can."""
    running, suffix = str(torch.__version__), importlib.machinery.EXTENSION_SUFFIXES[0]
    files = {path.name.removeprefix(PREFIX): path for path in sorted(_FOLDER.glob(f"{PREFIX}*"))}
    built = {name.removesuffix(suffix): path for name, path in files.items() if name.endswith(suffix)}
    version = fitting(running, built)
    if version is None:
        only = f", only for {', '.join(files)}" if files else ""
        return f"the C++ kernels are not built for torch {running} and this Python{only}: {_remedy()}"
    name = built[version].name
    try:
        torch.ops.load_library(str(built[version]))
        built_for = torch.ops.dmattn_native.built_for()
    except (OSError, RuntimeError, AttributeError) as error:
        return f"the C++ kernels in {name} do not load ({error}): {_remedy()}"
    if _numbers(built_for) != _numbers(version):
        return f"the C++ kernels in {name} were built for torch {built_for}: {_remedy()}"
    return ""


def fitting(running: str, built: Collection[str]) -> str | None:
    """Return which of the versions of torch that libraries were built for fits the running one, None where none does.

    The same version comes first, then the same release for another device (2.13.0+cpu and 2.13.0+cu130 have one source),
    then the latest patch of the same minor release: what the compiler sees of 2.12.0 and 2.12.1, and of 2.14.0 and 2.14.1,
    differs in the version alone, while 1200 headers differ between 2.12 and 2.14. The loader resolves all symbols at once,
    so that one that a patch took away is an error here and not a crash later. Of nightly and development builds, whose
    interface changes from day to day, only the very same one fits.
    """
    candidates = [version for version in built if _RELEASE.fullmatch(version)] if _RELEASE.fullmatch(running) else []
    same_minor = [version for version in candidates if _numbers(version)[:2] == _numbers(running)[:2]]
    latest_first = sorted(same_minor, key=lambda version: (_numbers(version), version), reverse=True)
    same_release = [version for version in latest_first if _numbers(version) == _numbers(running)]
    exact = [version for version in built if version == running]
    return next(iter(exact + same_release + latest_first), None)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _remedy() -> str:
    """Return advice, as the end of a message, for an installation without a fitting library."""
    if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        return "install a C++ compiler (GCC or Clang) and then this package again, or a wheel of it that holds them for this torch"
    if (_FOLDER.parent / "setup.py").exists():
        command, where = f"{sys.executable} -m pip install --no-build-isolation --no-deps -e {_FOLDER.parent}", ""
    else:
        command, where = "pip install --force-reinstall --no-deps --no-cache-dir FOLDER", " in the FOLDER of a checkout"
    return f"`{command}`{where} builds them, or says with -v what is missing"


def _require() -> None:
    if message := reason():
        raise NotImplementedError(message)


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
    _require()
    torch.ops.dmattn_native.forward(*_shared(call), *result)


def backward(call: Call, saved: Saved, grads: Gradients, config: Any) -> None:
    """Write dq, dk, dv and, where it is given, dbias, each with its input's shape."""
    _require()
    torch.ops.dmattn_native.backward(*_shared(call), *saved, *grads[:-1])  # all but dsink, which `sinks` writes


def pack_mask(
    mask: Tensor,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    seqlen_q: int,
    band_lo: int,
    band_hi: int,
    row_tiles: Tensor,
    col_tiles: Tensor,
    row_bits: Tensor,
    col_bits: Tensor,
) -> None:
    """Write the lists and bits (DESIGN.md) of `mask` `[Bm or 1, Hm or 1, Sq or 1, Sk]`, the segments and the band."""
    _require()
    torch.ops.dmattn_native.pack_mask(
        mask, q_segments, k_segments, seqlen_q, band_lo, band_hi, row_tiles, col_tiles, row_bits, col_bits
    )


def list_tiles(
    q_segments: Tensor | None,
    k_segments: Tensor,
    seqlen_q: int,
    band_lo: int,
    band_hi: int,
    row_tiles: Tensor,
    col_tiles: Tensor,
) -> None:
    """Write the lists (DESIGN.md) of segment ids `[B or 1, Sq]` and `[B or 1, heads or 1, Sk]` inside the band."""
    _require()
    torch.ops.dmattn_native.list_tiles(q_segments, k_segments, seqlen_q, band_lo, band_hi, row_tiles, col_tiles)


def lifetimes(
    scores: Tensor,
    documents: Tensor | None,
    keep: int,
    keep_first: int,
    keep_last: int,
    is_causal: bool,
    start: Tensor,
    end: Tensor,
) -> None:
    """Write the queries `[start, end)` that see each key `[B, Hm, S]` (definition: `dmattn_ops.kernels.selection`)."""
    _require()
    torch.ops.dmattn_native.lifetimes(scores, documents, keep, keep_first, keep_last, is_causal, start, end)
