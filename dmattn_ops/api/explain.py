"""What a call would run and why: `explain`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, NoReturn

import torch
from torch import Tensor

from dmattn_ops import meta
from dmattn_ops.api import arguments
from dmattn_ops.bands import CausalFrom, Window
from dmattn_ops.call import (
    HEADER,
    NO_MASK,
    TILE,
    UNBOUNDED,
    Call,
    Chosen,
    Gradients,
    Mask,
    Options,
    Result,
    Saved,
    Varlen,
    plain_options,
)
from dmattn_ops.checks import require, validation, values
from dmattn_ops.choice import arch as architectures
from dmattn_ops.choice import chosen, resources
from dmattn_ops.choice.arch import Arch
from dmattn_ops.choice.choose import Choice
from dmattn_ops.choice.epochs import Packing
from dmattn_ops.choice.resources import Usage
from dmattn_ops.dispatch import run, used
from dmattn_ops.masks import prepare
from dmattn_ops.masks.tile_mask import TileMask


@dataclass(frozen=True)
class KeyPacking:
    """Whether the keys that a mask of intervals keeps are packed: copied side by side for each epoch of queries."""

    packing: Packing | None  # what the launcher obeys
    reasons: tuple[str, ...]  # why keys are not packed

    def __str__(self) -> str:
        if self.packing is None:
            return f"keys are not packed beforehand: {'; '.join(self.reasons)}"
        cut, heads, at_a_time = self.packing.epochs, self.packing.heads, self.packing.heads_per_pass
        order = "all at a time" if at_a_time >= heads else f"{at_a_time} at a time"
        text = (
            f"keys are packed in {cut.number} epochs of {cut.length} queries, {cut.slots_per_epoch} slots each,"
            f" for {heads} heads, {order}: what the queries of an epoch see is copied side by side into its slots"
        )
        return f"{text}; {self.packing.evidence}" if self.packing.evidence else text


@dataclass(frozen=True)
class Launch:
    """One direction: the choice and its blocks, what the kernels take, and the rows that were considered."""

    choice: str
    kernel: str
    tier: str
    arch: str
    configuration: dict[str, Any]  # blocks in queries and keys, warps, stages
    resources: dict[str, Usage] | None  # of each kernel of the launch, from the frozen table; None where not swept
    swept: str  # what the table compiled: specialization and Triton's version
    evidence: str
    passed_over: dict[str, tuple[str, ...]]  # from a reason to the rows that it ruled out
    packing: KeyPacking | None  # None where the mask has no intervals
    notes: tuple[str, ...] = ()  # which kernel computes the gradient of a bias, where there is a choice

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.configuration.items())
        lines = [f"{self.choice}: {self.kernel} kernels{', ' if settings else ''}{settings}"]
        if self.resources is not None:
            lines += [f"    {name}: {_usage_text(usage)}" for name, usage in self.resources.items()]
            lines.append(f"    (compiled for {self.swept})")
        if self.packing is not None:
            lines.append(f"    {self.packing}")
        lines += [f"    {note}" for note in self.notes]
        if self.evidence:
            lines.append(f"    because: {self.evidence}")
        lines += [f"    not {', '.join(rows)}: {reason}" for reason, rows in self.passed_over.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """The kernels that forward and backward would run, with reasons; `str()` is readable."""

    forward: Launch
    backward: Launch
    mask: str
    visible: str

    def __str__(self) -> str:
        return f"forward   {self.forward}\nbackward  {self.backward}\nmask      {self.mask}\nvisible   {self.visible}"


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | TileMask | None = None,
    bias: Tensor | None = None,
    *,
    is_causal: bool = False,
    causal_from: CausalFrom = "bottom_right",
    window_size: Window = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0,
    dropout_p: float = 0,
    deterministic: bool | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    return_max: bool = False,
    batch_invariant: bool = False,
    seqlen_k_used: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    arch: str | None = None,
    **unknown: NoReturn,
) -> Explanation:
    """Tell which kernels and configurations a call would use, and why. Runs no attention.

    The call is one of `flash_dmattn_func`, or of `flash_dmattn_varlen_func` where `cu_seqlens_q` is given. For
    `flash_dmattn_qkvpacked_func`, give the three parts, `qkv.unbind(2)`.

    Args:
        query, key, value, mask, bias: as in the function that is called.
        is_causal, causal_from, window_size, softmax_scale, softcap, dropout_p: as in `flash_dmattn_func`.
        deterministic, sink, return_lse, return_max, batch_invariant, seqlen_k_used: as in `flash_dmattn_func`.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: all of them or none, as in `flash_dmattn_varlen_func`.
        arch: a compute capability such as "8.6": explain as that GPU would run it; None is `DMATTN_ARCH` where that is
            set, else where `query` lies.

    Returns:
        an `Explanation`: its fields hold the launch of each direction, and `str()` of it is a text to read.

    Raises:
        ValueError, TypeError: as `flash_dmattn_func`, and for an `arch` that is none.
        NotImplementedError: with every reason where no kernel takes the call.
    """
    if unknown:
        arguments.unknown_names("explain", unknown)
    given = (is_causal, causal_from, window_size, softmax_scale, softcap, dropout_p)
    same_bits = arguments.switches(deterministic, return_lse, return_max, batch_invariant)
    packed = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }
    absent = [name for name, each in packed.items() if each is None]
    if len(absent) == len(packed):
        call = _dense_call(query, key, value, mask, bias, sink, seqlen_k_used, given, (same_bits, batch_invariant))
    elif absent:
        raise ValueError(f"{absent[0]} must be given as well: packed sequences need {', '.join(packed)}, got None")
    else:
        if seqlen_k_used is not None:
            raise ValueError(
                "seqlen_k_used must be None for packed sequences: cu_seqlens_k says how many keys there are"
            )
        varlen = Varlen(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal_from != "bottom_right")  # type: ignore[arg-type]
        call = _varlen_call(query, key, value, mask, bias, sink, varlen, given, (same_bits, batch_invariant))
    on = architectures.parse(arch, "arch") if arch is not None else architectures.forced()
    all_used = call if call.chosen is not None else used.in_mask(call)
    return Explanation(
        _launch("forward", all_used, on, return_max),
        _launch("backward", all_used, on, False),
        _mask_text(all_used),
        _band_text(call),
    )


def _dense_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | TileMask | None,
    bias: Tensor | None,
    sink: Tensor | None,
    seqlen_k_used: Tensor | None,
    given: tuple[Any, ...],
    same_bits: tuple[bool, bool],
) -> Call:
    """Return the `Call` that `flash_dmattn_func` would dispatch; `given` are the numbers that `arguments.read_numbers` takes."""
    (query, key, value), bias, sink = arguments.prepared_inputs(4, bias, sink, query=query, key=key, value=value)
    validation.dense_tensors(query, key, value, bias, sink)
    (batch, seqlen_q, heads, _), (_, seqlen_k, heads_kv, _) = query.shape, key.shape
    band, scalars = arguments.read_numbers(*given)
    arguments.check_mask(mask, query, (1, batch), (1, heads_kv, heads), (1, seqlen_q), (seqlen_k,))
    band, part = arguments.used_keys(seqlen_k_used, query, seqlen_k, band)
    if isinstance(mask, TileMask) and mask.chosen is not None and mask.block_keys is not None and part is None:
        named = Chosen(mask.chosen, mask.block_keys.shape[0])
        mask = mask.also(band)
        options = _options(query, mask.band.limits(seqlen_q, seqlen_k), scalars, same_bits)
        beside = NO_MASK._replace(q_segments=mask.q_segments, k_segments=mask.k_segments)
        return Call(query, key, value, bias, beside, sink, None, None, options, chosen=named)
    parts, *limits = prepare.resolve(mask, band, seqlen_q, seqlen_k)
    options = _options(query, limits, scalars, same_bits)
    return Call(query, key, value, bias, parts, sink, None, None, options, part)


def _varlen_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | TileMask | None,
    bias: Tensor | None,
    sink: Tensor | None,
    varlen: Varlen,
    given: tuple[Any, ...],
    same_bits: tuple[bool, bool],
) -> Call:
    """Return the `Call` that `flash_dmattn_varlen_func` would dispatch."""
    (query, key, value), bias, sink = arguments.prepared_inputs(3, bias, sink, query=query, key=key, value=value)
    validation.tensors(cu_seqlens_q=varlen.cu_seqlens_q, cu_seqlens_k=varlen.cu_seqlens_k)
    lengths = validation.integers(max_seqlen_q=varlen.max_seqlen_q, max_seqlen_k=varlen.max_seqlen_k)
    varlen = varlen._replace(max_seqlen_q=lengths[0], max_seqlen_k=lengths[1])
    parts = NO_MASK
    if mask is not None:
        validation.tensors(mask=mask)
        assert isinstance(mask, Tensor)
        validation.keep_mask(mask)
        parts = Mask(k_segments=torch.empty(1, *mask.shape, dtype=torch.int32, device="meta"))
    validation.varlen_tensors(query, key, value, bias, mask, sink, varlen)
    if values.on_the_host(varlen.cu_seqlens_q):
        values.offsets(query, key, varlen)
    band, scalars = arguments.read_numbers(*given)
    options = _options(query, (band.lo, band.hi), scalars, same_bits)
    return Call(query, key, value, bias, parts, sink, None, varlen, options)


def _options(
    query: Tensor, limits: Sequence[int], scalars: tuple[float | None, float, float], same_bits: tuple[bool, bool]
) -> Options:
    scale, softcap, dropout_p = scalars
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    options = plain_options(scale, *limits, softcap=softcap, dropout_p=dropout_p)
    return options._replace(deterministic=same_bits[0], batch_invariant=same_bits[1])


def _tensors(call: Call, needs_max: bool) -> tuple[Result, Saved, Gradients]:
    """Return the outputs and gradients of a launch as meta tensors, laid out as the operators allocate them."""
    query, key, value, bias = (
        None if tensor is None else tensor.to("meta") for tensor in (call.query, call.key, call.value, call.bias)
    )
    assert query is not None and key is not None and value is not None
    out, lse, lse_tail, row_max = meta.forward_outputs(query, value, needs_max)
    dq, dk, dv, dbias, _ = meta.backward_outputs(query, key, value, bias, None)
    grads = Gradients(torch.empty_like(out), None, dq, dk, dv, None if bias is None else dbias)
    return Result(out, lse, lse_tail, row_max if needs_max else None), Saved(out, lse, lse_tail), grads


def _launch(direction: str, call: Call, on: Arch | None, needs_max: bool) -> Launch:
    device = architectures.current(call.query.device) if call.query.is_cuda else None
    if call.chosen is not None:
        physical = on or device
        if physical is not None and not run.reasons_against_lists(direction, call, on):
            return _gathered(direction, call, physical)
        call = run.with_bits(call)
    packed, reasons = run.packing_of(direction, call, on or device, needs_max)
    is_kept_by_key = packed is not None or bool(reasons)
    call = run.with_start(call) if packed is None else _as_packed(call, packed)
    result, saved, grads = _tensors(call, needs_max)
    if direction == "forward":
        choice = run.forward_choice(call, result, on)
    else:
        choice = run.backward_choice(call, saved, grads, on)
    row = choice.row
    found, swept = _resources(direction, choice, call)
    passed_over: dict[str, tuple[str, ...]] = {}
    for other, reason in choice.passed_over:
        passed_over[reason] = (*passed_over.get(reason, ()), other.name)
    return Launch(
        choice.label,
        row.kernel,
        row.tier,
        str(choice.arch or "CPU"),
        dict(resources.settings(row.config)),
        found,
        swept,
        row.evidence,
        passed_over,
        KeyPacking(packed, tuple(reasons)) if is_kept_by_key else None,
        (*run.notes(direction, row.kernel, call), *_notes(call, choice)),
    )


def _gathered(direction: str, call: Call, on: Arch) -> Launch:
    """Return the launch of the kernels that gather the blocks that queries name."""
    assert call.chosen is not None
    tiles = chosen.forward_tiles if direction == "forward" else chosen.backward_tiles
    configuration = asdict(tiles(call.demand, call.chosen.block, on))
    evidence = chosen.EVIDENCE if on.sm == chosen.MEASURED else ""
    return Launch("Gathered", "chosen", "Gathered", str(on), configuration, None, "", evidence, {}, None)


def _notes(call: Call, choice: Choice) -> list[str]:
    """Return a line that says how a batch-invariant call is computed; no lines for other calls."""
    if not call.options.batch_invariant:
        return []
    if choice.arch is None:
        return ["batch_invariant: one batch entry after another"]
    return ["batch_invariant: chosen as for one batch entry alone, without tuned configurations"]


def _as_packed(call: Call, packed: Packing) -> Call:
    """Return the call that kernels get for the heads of one pass, without memory: on the slots of packed keys."""
    cut, count = packed.epochs, packed.heads_per_pass
    batch, seqlen_q, heads, _ = call.query.shape
    end, bias = call.mask.end, call.bias
    assert end is not None
    mask_shape = (end.shape[0], 1 if end.shape[1] == 1 else count)
    readers = count * heads // packed.heads

    def copy(of: Tensor) -> Tensor:
        return torch.empty(batch, cut.slots, count, of.shape[3], dtype=of.dtype, device="meta")

    def integers(*shape: int) -> Tensor:
        return torch.empty(*mask_shape, *shape, dtype=torch.int32, device="meta")

    row_tiles = integers(-(-seqlen_q // TILE), HEADER + cut.slots_per_epoch // TILE)
    col_tiles = integers(cut.slots // TILE, HEADER + cut.length // TILE)
    mask = Mask(row_tiles, col_tiles, start=integers(cut.slots), end=integers(cut.slots))
    if bias is not None:
        told_apart = readers // min(
            heads // bias.shape[1], readers // mask_shape[1]
        )  # heads of the bias, or of the slots
        bias_shape = (max(bias.shape[0], end.shape[0]), mask_shape[1] if bias.shape[1] == 1 else told_apart)
        bias = torch.empty(*bias_shape, 1, cut.slots, dtype=bias.dtype, device="meta")
    return call._replace(
        query=call.query[:, :, :readers],
        key=copy(call.key),
        value=copy(call.value),
        bias=bias,
        mask=mask,
        options=call.options._replace(band_lo=-UNBOUNDED, band_hi=UNBOUNDED),
        used=None,
    )


def _resources(direction: str, choice: Choice, call: Call) -> tuple[dict[str, Usage] | None, str]:
    """Return registers, spills and shared memory of a launch's kernels (None if never swept), and the name of the table line."""
    version = resources.nearest_version(_triton_version())
    if choice.arch is None or version is None:
        return None, ""
    wanted = resources.specialization(call)
    found = resources.usage(choice.row, direction, call.demand.width, wanted, version)
    return found, f"{resources.swept_as(choice.row, direction, call.demand.width, wanted)}, triton {version}"


def _triton_version() -> str:
    """Return the version of the installed Triton without loading it; empty where there is none."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


def _usage_text(usage: Usage) -> str:
    products = f", {usage.products}" if usage.products else ""
    return (
        f"{usage.registers} registers, {usage.spill_bytes} bytes spilled, {usage.shared_memory} bytes of shared memory,"
        f" {usage.threads} threads, occupancy {usage.occupancy:.0%}{products}"
    )


def _mask_text(call: Call) -> str:
    if call.varlen is not None:
        kept = "" if call.mask.kind == "none" else ", each pair by segment ids"
        return f"packed sequences: every tile of the band in each sequence, without lists{kept}"
    bits = call.mask.row_bits
    taken = 0 if bits is None else 2 * bits.element_size() * bits.shape[2] * bits.shape[3]  # by rows and by columns
    return {
        "bits": "listed 128 x 128 tiles; full ones without a test, partial ones by bits, which take"
        f" {taken} bytes for each head of the mask and batch entry (Sq * Sk / 4)",
        "segments": "listed 128 x 128 tiles; full ones without a test, partial ones by segment ids and band",
        "intervals": "an interval of queries for each key; tiles outside of the intervals of their keys are passed over,"
        " unless keys are packed",
        "chosen": "blocks that queries name: those of neighbouring queries together, in float32 sums where gradients need them;"
        f" as bits they would take {call.query.shape[1] * call.key.shape[1] // 4} bytes for each head and batch entry",
        "none": "none: the tiles inside the band, without lists",
    }[call.kind]


def _diagonal(offset: int) -> str:
    return f"i {'-' if offset < 0 else '+'} {abs(offset)}" if offset else "i"


def _limits_text(place: str, lo: int, hi: int) -> str:
    """Return between which limits the place of a key lies; empty where there are none."""
    left = "" if lo <= -UNBOUNDED else f"{_diagonal(lo)} <= "
    right = "" if hi >= UNBOUNDED else f" <= {_diagonal(hi)}"
    return f"{left}{place}{right}" if left or right else ""


def _band_text(call: Call) -> str:
    lo, hi = call.options.band_lo, call.options.band_hi
    limits = _limits_text("j", lo, hi)
    shown = "" if call.kind == "none" else " that the mask shows"
    if call.mask.at_most is not None and call.mask.at_most < call.key.shape[1]:
        shown += f", at most {call.mask.at_most} for each query"
    if call.used is not None:
        shown += ", of those before seqlen_k_used"
        band = _limits_text("j - seqlen_k_used + Sq", call.used.lo, call.used.hi)
        shown += f", {band}" if band else ""
    if not limits:
        return f"every key{shown}" if call.varlen is None else f"every key{shown} of the query's own sequence"
    keys = limits if not shown else f"the keys {limits}{shown}"
    if call.varlen is None:
        return keys
    return f"{keys} in each sequence, j counted from its {'first' if call.varlen.top_left else 'last'} key"


require.without_unknown(explain)
