"""Every configuration that dispatch can return, and calls that make a launcher run it."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import torch

from dmattn_ops import meta
from dmattn_ops.call import (
    NO_MASK,
    TILE,
    UNBOUNDED,
    Call,
    Demand,
    Gradients,
    Mask,
    Result,
    Saved,
    Varlen,
    plain_options,
)
from dmattn_ops.checks import validation
from dmattn_ops.choice import arch, choose, config, resolve, resources
from dmattn_ops.choice.resources import Specialization
from dmattn_ops.dispatch import run

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
KERNELS = ("portable", "ampere", "hopper", "hopper256")
DIRECTIONS = {"forward": config.FORWARD, "backward": config.BACKWARD}
COMMON_DIM = 256  # wider heads are swept for the least and the most alone
SEQLEN, HEADS, GROUP = 512, 24, 4  # enough blocks that forwards share no walk, and no more than an SM each on SM 9.0
_Portable = config.PortableForward | config.PortableBackward
_DTYPES = {"tf32": torch.float32, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

PLAIN = Specialization()
CAUSAL = Specialization(band="causal")
BITS = Specialization(mask="bits")
SEGMENTS = Specialization(band="causal", mask="segments")
KEYS = Specialization(mask="key segments")
# What a call can ask of the portable kernels at once: the most shared memory and registers.
EVERYTHING = Specialization(mask="bits", bias="bias", wide_bias=True, softcap=True, dropout=True)
PORTABLE = (
    PLAIN,
    CAUSAL,
    BITS,
    replace(PLAIN, bias="key bias"),
    replace(CAUSAL, dropout=True),
    EVERYTHING,
    replace(EVERYTHING, band="causal", mask="segments"),
    replace(CAUSAL, mask="intervals"),
    replace(EVERYTHING, band="causal", mask="hidden intervals"),
)
PORTABLE_FORWARD = (replace(EVERYTHING, decode=True),)
PORTABLE_BACKWARD = (replace(EVERYTHING, bias="broadcast bias"),)
UNALIGNED = (
    replace(CAUSAL, unaligned=True),
    replace(EVERYTHING, unaligned=True),
)  # where such rows have blocks of their own
WINDOW = Specialization(band="window")
VARLEN = Specialization(varlen=True)
HOPPER = (
    PLAIN,
    CAUSAL,
    WINDOW,
    BITS,
    replace(SEGMENTS, band=""),
    SEGMENTS,
    KEYS,
    replace(BITS, dtype="float16"),
    replace(CAUSAL, softcap=True),
    replace(CAUSAL, bias="key bias"),
    replace(BITS, bias="key bias"),
    replace(CAUSAL, bias="bias"),
    replace(CAUSAL, bias="bias", wide_bias=True),
    replace(PLAIN, bias="broadcast bias"),
    replace(CAUSAL, bias="broadcast bias"),
    replace(BITS, bias="broadcast bias"),
    replace(CAUSAL, dropout=True),
    replace(CAUSAL, deterministic=True),
    replace(BITS, deterministic=True),
    replace(CAUSAL, grouped=True),
    replace(BITS, grouped=True),
    replace(SEGMENTS, grouped=True),
    VARLEN,
    replace(VARLEN, dtype="float16"),
    replace(VARLEN, softcap=True),
    replace(VARLEN, bias="key bias"),
    replace(VARLEN, bias="key bias", wide_bias=True),
    replace(VARLEN, deterministic=True),
    replace(VARLEN, grouped=True),
)


class Unit(NamedTuple):
    """One call to compile: a row, how wide the heads are, and what else its kernels depend on."""

    direction: str
    row: config.Row
    width: int
    wanted: Specialization

    @property
    def entry(self) -> str:
        """The name in a table of the blocks that the call runs with: rows share some."""
        return resources.entry(replace(self.row, config=arguments(self)[-1]), self.direction, self.width)

    @property
    def line(self) -> str:
        """The name of the specialization in a table."""
        return resources.line_name(self.wanted)

    @property
    def launcher(self) -> ModuleType:
        """The module that launches the row."""
        return run.launcher(self.direction, self.row.kernel)


def reachable(rows: tuple[config.Row, ...], sm: int) -> list[config.Row]:
    """Return the rows that `choose` can return on an architecture: of each kernel the first that suits a demand."""
    found: dict[config.Row, None] = {}
    on = arch.KNOWN[sm]
    for demand in _demands(rows, on):
        suited, _ = choose.candidates(rows, on, demand)
        first = {row.kernel: row for row in reversed(suited)}
        found |= dict.fromkeys(row for kernel, row in first.items() if kernel in KERNELS)
    return list(found)


def _demands(rows: tuple[config.Row, ...], on: arch.Arch) -> list[Demand]:
    """Return a demand for each place where a choice may change: where a row ends or begins."""
    widths = sorted({(min(row.dim, validation.MAX_HEAD_DIM), row.dim_v) for row in rows})
    lengths = sorted({max(row.min_seqlen, 1) for row in rows})
    return [
        Demand(1, heads, TILE, keys, dim, dim_v or dim, itemsize, full_bias)
        for full_bias in (False, True)
        for itemsize in (2, 4)
        for dim, dim_v in widths
        for keys in lengths
        for heads in (1, on.num_sms)  # few tiles of queries, and one for each multiprocessor
    ]


def units(sms: tuple[int, ...], kernels: tuple[str, ...]) -> dict[str, dict[str, Unit]]:
    """Return the kernels to compile in a sweep, by entry (a row) and by line (a specialization)."""
    found: dict[str, dict[str, Unit]] = {}
    for sm in sms:
        for direction in DIRECTIONS:
            for row in (row for row in reachable(DIRECTIONS[direction], sm) if row.kernel in kernels):
                for width in resources.widths(row):
                    for wanted in _specializations(direction, row, width):
                        unit = Unit(direction, row, width, wanted)
                        found.setdefault(unit.entry, {}).setdefault(unit.line, unit)
    return found


def _specializations(direction: str, row: config.Row, width: int) -> tuple[Specialization, ...]:
    """Return the specializations that a row is compiled for."""
    if row.kernel != "portable":
        refusals = run.launcher(direction, row.kernel).refusals
        every = dict.fromkeys(resources.canonical(row.kernel, direction, each) for each in HOPPER)
        return tuple(each for each in every if not refusals(make_call(each, width, row.dim_v)))
    if row.itemsize == 4:
        return tuple(replace(each, dtype="float32", wide_bias=False) for each in (CAUSAL, EVERYTHING))
    if row.dim > COMMON_DIM:
        return (CAUSAL, EVERYTHING)
    own = UNALIGNED if isinstance(row.config, _Portable) and row.config.unaligned else ()
    return (*PORTABLE, *(PORTABLE_FORWARD if direction == "forward" else PORTABLE_BACKWARD), *own)


def make_call(wanted: Specialization, width: int, width_v: int = 0) -> Call:
    """Return a call that has a specialization, its heads `width` wide, and its values `width_v` unless that is 0.

    Its tensors lie on the CPU, uninitialised.
    """
    dtype = _DTYPES[wanted.dtype]
    heads_k = HEADS // GROUP if wanted.grouped else HEADS
    seqlen_q = 8 if wanted.decode else SEQLEN

    def rows(seqlen: int, heads: int, width: int) -> torch.Tensor:
        if wanted.unaligned:  # a narrower head, so that columns have to be tested as well
            return torch.empty(1, seqlen, heads, width - 1, dtype=dtype)
        return torch.empty(1, seqlen, heads, width, dtype=dtype)

    query, key = rows(seqlen_q, HEADS, width), rows(SEQLEN, heads_k, width)
    value = rows(SEQLEN, heads_k, width_v or width)
    bias_shape = {
        "key bias": (1, HEADS, 1, SEQLEN),
        "bias": (1, HEADS, seqlen_q, SEQLEN),
        "broadcast bias": (1, 1, seqlen_q, SEQLEN),
    }.get(wanted.bias)
    bias = torch.empty(bias_shape, dtype=torch.float32 if wanted.wide_bias else dtype) if bias_shape else None
    low = -100 if wanted.band == "window" else -UNBOUNDED
    high = 0 if wanted.band else UNBOUNDED
    varlen = None
    if wanted.varlen:
        total = SEQLEN // 2  # there may be a tile more for each sequence, and before and behind them
        query, key, value = (tensor[0, :total] for tensor in (query, key, value))
        bias = bias if bias is None else bias[0, :, 0, :total]
        ends = torch.tensor([0, total], dtype=torch.int32)
        varlen = Varlen(ends, ends, total, total, False)
    options = plain_options(
        0.1,
        low,
        high,
        softcap=30.0 * wanted.softcap,
        dropout_p=0.1 * wanted.dropout,
        deterministic=wanted.deterministic,
    )
    seed = torch.zeros(1, 1, dtype=torch.int64) if wanted.dropout else None
    return Call(query, key, value, bias, _make_tiles(wanted, seqlen_q), None, seed, varlen, options)


def _make_tiles(wanted: Specialization, seqlen_q: int) -> Mask:
    """Return lists with bits or segments, or intervals, `[1, H, ...]`."""
    if not wanted.mask:
        return NO_MASK
    q_segments = torch.empty(1, seqlen_q, dtype=torch.int32) if wanted.mask == "segments" else None
    k_segments = torch.empty(1, HEADS, SEQLEN, dtype=torch.int32)
    if wanted.varlen:
        return Mask(k_segments=k_segments[..., : SEQLEN // 2])
    if wanted.mask == "bits":
        mask = torch.empty(1, HEADS, seqlen_q, SEQLEN, dtype=torch.bool)
        return Mask(*meta.pack_mask_outputs(mask, 1, HEADS, seqlen_q, -UNBOUNDED, UNBOUNDED))
    if wanted.mask.endswith("intervals"):
        shown, hidden = Mask(start=k_segments, end=k_segments.clone()), k_segments.clone()
        return shown._replace(hidden_from=hidden, hidden_to=hidden.clone()) if "hidden" in wanted.mask else shown
    lists = meta.list_tiles_outputs(k_segments, 1, HEADS, seqlen_q, SEQLEN, -UNBOUNDED, UNBOUNDED)
    return Mask(*lists, q_segments=q_segments, k_segments=k_segments)


def launch(unit: Unit) -> None:
    """Launch a unit's row for its call."""
    getattr(unit.launcher, unit.direction)(*arguments(unit))


def arguments(unit: Unit) -> tuple[Any, ...]:
    """Return the arguments of the launcher of a unit's row; the last is the configuration that runs."""
    call = make_call(unit.wanted, unit.width, unit.row.dim_v)
    out, lse, lse_tail, _ = meta.forward_outputs(call.query, call.value, False)
    if unit.direction == "forward":
        result = Result(out, lse, lse_tail, None)
        return call, result, resolve.forward_config(unit.row.config, call, result)
    dq, dk, dv, dbias, _ = meta.backward_outputs(call.query, call.key, call.value, call.bias, None)
    saved = Saved(out, lse, lse_tail)
    grads = Gradients(torch.empty_like(out), torch.empty_like(lse), dq, dk, dv, None if call.bias is None else dbias)
    return call, saved, grads, resolve.backward_config(unit.row.config, call, saved, grads)
