"""Launchers of the C++ CPU kernels (`csrc/cpu`): the functions that every device has, and whether they exist here.

The extension is optional and loaded at the first question, never built here. Results do not depend on timing: equal
inputs give bitwise equal outputs for a given number of threads, and for all numbers up to 8.
"""

from __future__ import annotations

import functools
import importlib.machinery
import pathlib
from typing import Any

import torch
from torch import Tensor

from dmattn_ops.call import Call, Gradients, Result, Saved
from dmattn_ops.problem import dropout_scale, dropout_threshold


def available() -> bool:
    """Return whether the extension is built and fits the running torch."""
    return not reason()


@functools.cache
def reason() -> str:
    """Return why the extension cannot be used, or an empty string where it can."""
    folder = pathlib.Path(__file__).parent
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    paths = [path for suffix in suffixes if (path := folder / f"_native{suffix}").exists()]
    if not paths:
        return (
            "the extension dmattn_ops._native is not built: installing does it where torch and a C++ compiler are found"
        )
    try:
        torch.ops.load_library(str(paths[0]))
        built_for = torch.ops.dmattn_native.built_for()
    except (OSError, RuntimeError, AttributeError) as error:
        return f"the extension {paths[0].name} does not load: {error}"
    if built_for.split("+")[0] != torch.__version__.split("+")[0]:
        return f"the extension {paths[0].name} was built for torch {built_for}, not {torch.__version__}"
    return ""


def _require() -> None:
    if message := reason():
        raise NotImplementedError(message)


def _shared(call: Call) -> tuple[object, ...]:
    """Return what forward and backward pass on alike, in the order of the schema in `csrc/cpu/library.cpp`."""
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
    torch.ops.dmattn_native.backward(*_shared(call), *saved, *grads)


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
    """Write the queries `[start, end)` that see each key `[B, Hm, S]` (definition: `dmattn_ops.selection`)."""
    _require()
    torch.ops.dmattn_native.lifetimes(scores, documents, keep, keep_first, keep_last, is_causal, start, end)
