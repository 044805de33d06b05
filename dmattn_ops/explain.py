"""What a call would run and why: `explain`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from dmattn_ops import arch as architectures
from dmattn_ops import arguments, dispatch, masks, meta, resources, validation
from dmattn_ops.bands import CausalFrom, Window
from dmattn_ops.call import Call, Gradients, Result, Saved
from dmattn_ops.choose import Choice
from dmattn_ops.problem import UNBOUNDED, Mask, plain_options
from dmattn_ops.resources import Usage
from dmattn_ops.tile_mask import TileMask


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

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.configuration.items())
        lines = [f"{self.choice}: {self.kernel} kernels{', ' if settings else ''}{settings}"]
        if self.resources is not None:
            lines += [f"    {name}: {_usage_text(usage)}" for name, usage in self.resources.items()]
            lines.append(f"    (compiled for {self.swept})")
        if self.evidence:
            lines.append(f"    because: {self.evidence}")
        lines += [f"    not {', '.join(rows)}: {reason}" for reason, rows in self.passed_over.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """What forward and backward would run; `str()` is readable."""

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
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    return_max: bool = False,
    arch: str | None = None,
) -> Explanation:
    """Tell which kernels and configurations `flash_dmattn_func` would use for these arguments, and why. Runs no attention.

    Args:
        query, key, value, mask, bias: as in `flash_dmattn_func`.
        is_causal, causal_from, window_size, softmax_scale, softcap, dropout_p: as in `flash_dmattn_func`.
        deterministic, sink, return_lse, return_max: as in `flash_dmattn_func`.
        arch: a compute capability such as "8.6": explain as that GPU would run it; None is `DMATTN_ARCH` where that is
            set, else where `query` lies.

    Returns:
        an `Explanation`: its fields hold the launch of each direction, `str()` of it is for people.

    Raises:
        ValueError, TypeError: as `flash_dmattn_func`, and for an `arch` that is none.
        NotImplementedError: with every reason where no kernel takes the call.
    """
    (query, key, value), bias, sink = arguments.prepared_inputs(4, bias, sink, query=query, key=key, value=value)
    validation.dense_tensors(query, key, value, bias, sink)
    (batch, seqlen_q, heads, dim), (_, seqlen_k, heads_kv, _) = query.shape, key.shape
    given = (is_causal, causal_from, window_size, softmax_scale, softcap, dropout_p)
    band, (scale, softcap, dropout_p) = arguments.read_numbers(*given)
    arguments.check_mask(mask, query, (1, batch), (1, heads_kv, heads), (1, seqlen_q), (seqlen_k,))
    parts, lo, hi = masks.resolve(mask, band, seqlen_q, seqlen_k)
    same_bits = arguments.switches(deterministic, return_lse, return_max)
    options = plain_options(
        dim**-0.5 if scale is None else scale, lo, hi, softcap=softcap, dropout_p=dropout_p, deterministic=same_bits
    )
    call = Call(query, key, value, bias, parts, sink, None, None, options)
    on = architectures.parse(arch, "arch") if arch is not None else architectures.forced()
    result, saved, grads = _tensors(call, return_max)
    return Explanation(
        _launch("forward", dispatch.forward_choice(call, result, on), call),
        _launch("backward", dispatch.backward_choice(call, saved, grads, on), call),
        _mask_text(parts),
        _band_text(lo, hi),
    )


def _tensors(call: Call, needs_max: bool) -> tuple[Result, Saved, Gradients]:
    """Return what a launch would be given besides the call, without memory, laid out as the operators allocate it."""
    query, key, value, bias = (
        None if tensor is None else tensor.to("meta") for tensor in (call.query, call.key, call.value, call.bias)
    )
    assert query is not None and key is not None and value is not None
    out, lse, lse_tail, row_max = meta.forward_outputs(query, value, needs_max)
    dq, dk, dv, dbias, _ = meta.backward_outputs(query, key, value, bias, None)
    grads = Gradients(torch.empty_like(out), None, dq, dk, dv, None if bias is None else dbias)
    return Result(out, lse, lse_tail, row_max if needs_max else None), Saved(out, lse, lse_tail), grads


def _launch(direction: str, choice: Choice, call: Call) -> Launch:
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
    )


def _resources(direction: str, choice: Choice, call: Call) -> tuple[dict[str, Usage] | None, str]:
    """Return what the kernels of a launch take, as the table nearest to the installed Triton has it, and what that is."""
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


def _mask_text(mask: Mask) -> str:
    return {
        "bits": "listed 128 x 128 tiles; full ones without a test, partial ones by bits",
        "segments": "listed 128 x 128 tiles; full ones without a test, partial ones by segment ids and band",
        "intervals": "an interval of queries for each key; tiles outside of the intervals of their keys are passed over",
        "none": "none: the tiles inside the band, without lists",
    }[mask.kind]


def _band_text(lo: int, hi: int) -> str:
    left = "" if lo <= -UNBOUNDED else f"i {lo:+d} <= "
    right = "" if hi >= UNBOUNDED else f" <= i {hi:+d}"
    return f"{left}j{right}" if left or right else "every key"
