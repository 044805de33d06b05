"""What compiled kernels take of an SM: the frozen tables of `tests/tools/sweep.py`, one for each swept Triton version.

A row of `config.py` becomes several kernels, and each of them as many programs as there are specializations: kinds of mask,
bias, dtype and so on. `Specialization` names one; the sweep compiles calls that have it, `explain` looks calls up by it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dmattn_ops.call import UNBOUNDED, Call, Mask, bias_kind, float32_precision, owns_bias, rows_are_aligned
from dmattn_ops.choice.config import Config, Row

TABLES = Path(__file__).parents[1] / "resource_tables"
SOURCE = "source"  # in a row beside its specializations: a digest of its kernels
DECODE = 16  # queries up to which portable forwards have blocks of their own
_AT_RUN_TIME = (
    "per_sm",
    "heads_per_group",
    "ordered_heads",
    "ordered_causal_heads",
    "step",
    "step_of_128",
    "ends",
    "shares",
    "bias_sums",
)  # fields that no entry depends on: kernels take them at run time (of `shares` they know whether there are several). Entries are
# of kernels that don't add to a bias.
_WIDTHS = {"hopper256": (64, 128, 256)}  # kernels that compile for several head dimensions in one row


class Usage(NamedTuple):
    """The resources that one compiled kernel takes; the columns of a table."""

    registers: int  # of a thread at launch: a warp-specialized kernel moves them afterwards
    spill_bytes: int  # of a thread
    shared_memory: int  # bytes of a block
    threads: int  # of a block
    occupancy: float  # theoretical share of an SM's warps that can be resident
    products: str  # how matrices are multiplied: "wgmma", "mma", "tcgen05", "fma", or "" where none are
    faults: str  # warnings of ptxas, "trap", "stale bound": what must not be there


@dataclass(frozen=True, slots=True)
class Specialization:
    """The features that a kernel is compiled for, besides its row; `str()` lists those that are on, as "causal bits dropout"."""

    band: str = ""  # "", "causal" (a limit on the right alone), "window"
    mask: str = ""  # "", "bits", "segments", "key segments" (of keys alone), "intervals", "hidden intervals"
    bias: str = (
        ""  # "", "key bias", "bias" (a value for each query and key), "broadcast bias" (that, for several heads)
    )
    wide_bias: bool = False  # float32 beside narrower elements
    softcap: bool = False
    dropout: bool = False
    grouped: bool = False  # several query heads read a key head
    varlen: bool = False
    decode: bool = False  # at most DECODE queries
    unaligned: bool = False  # rows that are not whole pieces of 16 bytes
    deterministic: bool = False
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        words = [self.band, self.mask, f"float32 {self.bias}" if self.wide_bias else self.bias]
        words += [flag for flag in _FLAGS if getattr(self, flag)]
        return " ".join(filter(None, words)) or "full"


_FLAGS = ("softcap", "dropout", "grouped", "varlen", "decode", "unaligned", "deterministic")
_IGNORED: dict[tuple[str, str], tuple[str, ...]] = {  # by kernel and direction: what changes no compiled kernel
    ("ampere", "forward"): ("decode", "deterministic"),
    ("ampere", "backward"): ("decode", "deterministic"),
    ("hopper", "forward"): ("grouped", "decode", "deterministic"),
    ("hopper", "backward"): ("decode",),
    ("hopper256", "backward"): ("grouped", "decode", "deterministic"),
    ("portable", "forward"): ("deterministic",),
    ("portable", "backward"): ("decode", "deterministic"),
}


def specialization(call: Call) -> Specialization:
    """Return the specialization of a call."""
    query, key, bias, options = call.query, call.key, call.bias, call.options
    band = "window" if options.band_lo > -UNBOUNDED else "causal" if options.band_hi < UNBOUNDED else ""
    if call.mask.kind == "bits":
        band = ""
    dtype = str(query.dtype).removeprefix("torch.")
    if query.dtype == torch.float32 and float32_precision() == "tf32":
        dtype = "tf32"
    return Specialization(
        band,
        _mask_kind(call.mask),
        _bias_kind(call),
        bias is not None and bias.dtype != query.dtype,
        options.softcap != 0,
        options.dropout_p > 0,
        query.shape[-2] != key.shape[-2],
        call.varlen is not None,
        call.demand.seqlen_q <= DECODE,
        not rows_are_aligned(query, key, call.value),
        options.deterministic,
        dtype,
    )


def _mask_kind(mask: Mask) -> str:
    if mask.kind == "segments":
        return "key segments" if mask.q_segments is None else "segments"
    if mask.kind == "intervals":
        return "intervals" if mask.hidden_from is None else "hidden intervals"
    return "" if mask.kind == "none" else mask.kind


def _bias_kind(call: Call) -> str:
    full = "bias" if owns_bias(call) else "broadcast bias"
    return {"none": "", "key": "key bias", "full": full}[bias_kind(call.bias)]


def canonical(kernel: str, direction: str, wanted: Specialization) -> Specialization:
    """Return the specialization that a kernel compiles for: without what it is told at run time."""
    unset: dict[str, Any] = dict.fromkeys(_IGNORED[kernel, direction], False)
    wanted = replace(wanted, **unset)
    if kernel in ("ampere", "portable") and wanted.band == "window":
        return replace(wanted, band="causal")  # both limits are tested alike
    if kernel.startswith("hopper") and wanted.varlen:  # swept without a band; a mask of keys becomes part of the bias
        masked = wanted.mask != "" and not wanted.bias
        by_key = "key bias" if masked else wanted.bias
        return replace(wanted, band="", mask="", bias=by_key, wide_bias=masked or wanted.wide_bias)
    if kernel == "hopper256" and wanted.mask == "key segments":
        return replace(wanted, mask="segments")
    return wanted


def widths(row: Row) -> tuple[int, ...]:
    """Return the head dimensions that a row's kernels are swept with: the widest, and those with programs of their own."""
    return _WIDTHS.get(row.kernel, (row.dim,))


def entry(row: Row, direction: str, width: int) -> str:
    """Return the name in a table of a row with the configuration that runs, as `dispatch` chooses it."""
    place = f"SM{row.sm // 10}.{row.sm % 10} {direction} {row.kernel} D{width} {row.itemsize * 8}-bit"
    blocks = (f"{name}={value}" for name, value in settings(row.config).items() if name not in _AT_RUN_TIME)
    return f"{place} {' '.join(blocks)}"


def settings(config: Config) -> dict[str, int | str]:
    """Return the numbers and names of a configuration."""
    named = {field.name: getattr(config, field.name) for field in fields(config)}
    return {name: value for name, value in named.items() if isinstance(value, (int, str))}


@cache
def table(triton: str) -> dict[str, Any]:
    """Return the table of a Triton version: `rows` by `entry`, each with a digest of its kernels and a line per specialization."""
    return json.loads(path(triton).read_text())


def path(triton: str) -> Path:
    """Return the path of the table of a Triton version."""
    return TABLES / f"triton-{triton}.json"


@cache
def versions() -> tuple[str, ...]:
    """Return the swept versions of Triton, oldest first."""
    found = (path.stem.removeprefix("triton-") for path in TABLES.glob("triton-*.json"))
    return tuple(sorted(found, key=_numbers))


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def nearest_version(installed: str) -> str | None:
    """Return the newest swept version that is not newer than the installed one, or the oldest; None where none was."""
    swept = versions()
    return max((v for v in swept if _numbers(v) <= _numbers(installed)), key=_numbers, default=next(iter(swept), None))


def usage(row: Row, direction: str, width: int, wanted: Specialization, version: str) -> dict[str, Usage] | None:
    """Return registers, spills and shared memory of each kernel of a launch, by its name; None where that was not swept.

    Args:
        row: with the configuration that runs.
        direction: "forward" or "backward".
        width: the wider head dimension; those between swept ones count as the next wider one.
        wanted: the specialization of the call.
        version: the table to look in.
    """
    if (row.kernel, direction) not in _IGNORED:
        return None
    lines = table(version)["rows"].get(entry(row, direction, _swept_width(row, width)), {})
    kernels = lines.get(line_name(canonical(row.kernel, direction, wanted)))
    return None if kernels is None else {name: Usage(*columns) for name, columns in kernels.items()}


def swept_as(row: Row, direction: str, width: int, wanted: Specialization) -> str:
    """Return the name of the table line that `usage` looks up, such as "D 128, causal bfloat16"."""
    known = (row.kernel, direction) in _IGNORED
    return f"D {_swept_width(row, width)}, {line_name(canonical(row.kernel, direction, wanted) if known else wanted)}"


def _swept_width(row: Row, width: int) -> int:
    return next((size for size in widths(row) if size >= width), row.dim)


def line_name(wanted: Specialization) -> str:
    """Return the name of a specialization in a table, its dtype included."""
    return f"{wanted} {wanted.dtype}"
