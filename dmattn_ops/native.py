"""Launchers of the C++ CPU kernels (`csrc/cpu`): the four functions of every device, and whether they exist here.

The extension is optional and loaded at the first question, never built here. A folder may hold libraries for several
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

import torch
from torch import Tensor

from dmattn_ops.problem import Options, Tiles, Varlen, dropout_threshold

PREFIX = "_native-torch"  # of the libraries' names; then come torch's version and Python's suffix (setup.py)
_FOLDER = pathlib.Path(__file__).parent
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
    """Return what to do where no library fits."""
    if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        return "install a C++ compiler (GCC or Clang), and then this package again"
    if (_FOLDER.parent / "setup.py").exists():
        command = f"{sys.executable} -m pip install --no-build-isolation --no-deps -e {_FOLDER.parent}"
    else:
        command = "pip install --force-reinstall --no-deps --no-cache-dir DMATTN_OPS"
    return f"`{command}` builds them, or says with -v what is missing"


def _require() -> None:
    if message := reason():
        raise NotImplementedError(message)


def _shared(
    bias: Tensor | None, tiles: Tiles, seed: Tensor | None, varlen: Varlen | None, options: Options
) -> tuple[object, ...]:
    """Return what forward and backward pass on alike, in the order of the schema in `csrc/cpu/library.cpp`."""
    cu_seqlens_q, cu_seqlens_k, top_left = (None, None, False) if varlen is None else (varlen[0], varlen[1], varlen[4])
    dropout = (options.dropout_p, dropout_threshold(options.dropout_p))
    band = (options.band_lo, options.band_hi)
    scores = (options.softmax_scale, options.softcap)
    return (bias, *tiles, seed, cu_seqlens_q, cu_seqlens_k, top_left, *band, *scores, *dropout)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    tiles: Tiles,
    seed: Tensor | None,
    varlen: Varlen | None,
    options: Options,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Write out `[B, Sq, H, Dv]` and lse `[B, H, Sq]` (or `[total_q, H, Dv]` and `[H, total_q]`)."""
    _require()
    shared = _shared(bias, tiles, seed, varlen, options)
    torch.ops.dmattn_native.forward(query, key, value, *shared, out, lse)


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    tiles: Tiles,
    seed: Tensor | None,
    varlen: Varlen | None,
    options: Options,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dbias: Tensor | None,
) -> None:
    """Write dq, dk, dv and, where it is given, dbias, each with its input's shape."""
    _require()
    shared = _shared(bias, tiles, seed, varlen, options)
    torch.ops.dmattn_native.backward(grad_out, grad_lse, query, key, value, out, lse, *shared, dq, dk, dv, dbias)


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
