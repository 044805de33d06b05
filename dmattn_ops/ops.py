"""The operators `torch.ops.dmattn.*`: the only place that holds a schema. What arguments mean: `problem.py`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmattn_ops.problem import UNBOUNDED, Options, Tiles

MASK = ", ".join(f"Tensor? {name}=None" for name in Tiles._fields)
BAND = f"SymInt band_lo={-UNBOUNDED}, SymInt band_hi={UNBOUNDED}"
SCALARS = "float? softmax_scale=None, float softcap=0.0, float dropout_p=0.0, bool deterministic=False"
CALL = f"{MASK}, Tensor? seed=None, {BAND}, {SCALARS}"
QKV = "Tensor query, Tensor key, Tensor value"
LENGTHS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
VARLEN_CALL = f"Tensor? bias=None, Tensor? mask=None, Tensor? seed=None, bool top_left=False, {BAND}, {SCALARS}"
SAVED = "Tensor out, Tensor lse"
GRADS = "Tensor grad_out, Tensor? grad_lse"

SCHEMAS = {
    "forward": f"({QKV}, Tensor? bias=None, {CALL}) -> (Tensor out, Tensor lse)",
    "backward": f"({GRADS}, {QKV}, {SAVED}, Tensor? bias=None, {CALL}, bool needs_dbias=False)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)",
    "qkvpacked_forward": f"(Tensor qkv, Tensor? bias=None, {CALL}) -> (Tensor out, Tensor lse)",
    "qkvpacked_backward": f"({GRADS}, Tensor qkv, {SAVED}, Tensor? bias=None, {CALL}, bool needs_dbias=False)"
    " -> (Tensor dqkv, Tensor dbias)",
    "varlen_forward": f"({QKV}, {LENGTHS}, {VARLEN_CALL}) -> (Tensor out, Tensor lse)",
    "varlen_backward": f"({GRADS}, {QKV}, {SAVED}, {LENGTHS}, {VARLEN_CALL}, bool needs_dbias=False)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)",
    "pack_mask": f"(Tensor mask, Tensor? q_segments, Tensor? k_segments, SymInt seqlen_q, {BAND})"
    " -> (Tensor row_tiles, Tensor col_tiles, Tensor row_bits, Tensor col_bits)",
    "list_tiles": f"(Tensor? q_segments, Tensor k_segments, SymInt seqlen_q, {BAND})"
    " -> (Tensor row_tiles, Tensor col_tiles)",
}

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
library = torch.library.Library("dmattn", "DEF")
for _name, _schema in SCHEMAS.items():
    library.define(_name + _schema, tags=_TAGS)

below_autograd: Any = getattr(torch._C, "_AutoDispatchBelowAutograd", nullcontext)
Planned = Callable[..., tuple[Any, Any]]
implementations: dict[
    str, Planned
] = {}  # outputs on CPU and CUDA, by operator, and what the backward finds its plan by


def implement(name: str, function: Planned) -> None:
    """Register what an operator does on real tensors, by a function that may also be called directly."""
    implementations[name] = function
    for device in ("CPU", "CUDA"):
        library.impl(name, lambda *arguments: function(*arguments)[0], device)


class Layout(NamedTuple):
    """How the arguments of an operator lie: tensors, numbers, tensors, numbers."""

    numbers: slice  # between the tensors
    tensors: slice  # behind those numbers

    def split(self, arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the tensors (or None) and the numbers among `arguments`."""
        between, behind = self
        return arguments[: between.start] + arguments[behind], arguments[between] + arguments[behind.stop :]

    def join(self, tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments that `split` took apart."""
        start, length = self.numbers.start, self.numbers.stop - self.numbers.start
        return tensors[:start] + numbers[:length] + tensors[start:] + numbers[length:]


LAYOUTS = {
    "forward": Layout(slice(11, 11), slice(11, 11)),
    "backward": Layout(slice(15, 15), slice(15, 15)),
    "qkvpacked_forward": Layout(slice(9, 9), slice(9, 9)),
    "qkvpacked_backward": Layout(slice(13, 13), slice(13, 13)),
    "varlen_forward": Layout(slice(5, 7), slice(7, 10)),
    "varlen_backward": Layout(slice(9, 11), slice(11, 14)),
    "pack_mask": Layout(slice(3, 3), slice(3, 3)),
    "list_tiles": Layout(slice(2, 2), slice(2, 2)),
}


class Call(NamedTuple):
    """What follows bias in the schemas (CALL, or VARLEN_CALL without bias), and `needs_dbias` behind it."""

    tiles: Tiles
    mask: Tensor | None  # of variable lengths
    seed: Tensor | None
    top_left: bool
    options: Options
    needs_dbias: bool


_NUMBERS = (-UNBOUNDED, UNBOUNDED, None, 0.0, 0.0, False, False)
_DENSE_DEFAULTS = (*Tiles(), None, *_NUMBERS)
_VARLEN_DEFAULTS = (None, None, False, *_NUMBERS)
NO_TILES = Tiles()


def read_call(arguments: tuple[Any, ...], dim: int) -> Call:
    """Name the arguments that follow bias in a dense operator. The dispatcher leaves out defaults at the end."""
    arguments += _DENSE_DEFAULTS[len(arguments) :]
    return Call(Tiles._make(arguments[:6]), None, arguments[6], False, _options(arguments, 7, dim), arguments[13])


def read_varlen_call(arguments: tuple[Any, ...], dim: int) -> Call:
    """Name the arguments that follow bias in an operator for variable lengths."""
    arguments += _VARLEN_DEFAULTS[len(arguments) :]
    mask, seed, top_left = arguments[:3]
    return Call(NO_TILES, mask, seed, top_left, _options(arguments, 3, dim), arguments[9])


def _options(arguments: tuple[Any, ...], start: int, dim: int) -> Options:
    band_lo, band_hi, softmax_scale, softcap, dropout_p, deterministic = arguments[start : start + 6]
    if softmax_scale is None:
        softmax_scale = dim**-0.5
    return Options(band_lo, band_hi, softmax_scale, softcap, dropout_p, deterministic)
