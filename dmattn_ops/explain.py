"""What a call would run and why: `explain`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from dmattn_ops import arch as architectures
from dmattn_ops import dispatch, masks, validation
from dmattn_ops.choose import Choice
from dmattn_ops.masks import CausalFrom, TileMask, Window
from dmattn_ops.problem import UNBOUNDED, Options, Tiles


@dataclass(frozen=True)
class Launch:
    """One direction: the choice, its configuration, the evidence for it, and the rows that were passed over."""

    choice: str
    kernel: str
    tier: str
    arch: str
    configuration: dict[str, Any]
    evidence: str
    passed_over: tuple[str, ...]

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.configuration.items())
        lines = [f"{self.choice}: {self.kernel} kernels, {settings}"]
        if self.evidence:
            lines.append(f"    because: {self.evidence}")
        lines += [f"    not {reason}" for reason in self.passed_over]
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
    return_lse: bool = False,
    arch: str | None = None,
) -> Explanation:
    """Tell which kernels and configurations `flash_dmattn_func` would use for these arguments, and why. Runs no attention.

    Args:
        query, key, value, mask, bias and the keywords: as in `flash_dmattn_func`.
        arch: a compute capability such as "8.6": explain as that GPU would run it; None is where `query` lies.

    Returns:
        an `Explanation`: its fields hold the launch of each direction, `str()` of it is for people.

    Raises:
        ValueError, TypeError: as `flash_dmattn_func`, and for an `arch` that is none.
        NotImplementedError: with every reason where no kernel takes the call.
    """
    validation.tensors(query=query, key=key, value=value)
    validation.query_key_value(query, key, value, 4)
    validation.visibility(is_causal, causal_from, window_size)
    seqlen_q, seqlen_k = query.shape[1], key.shape[1]
    band = masks.band(is_causal, causal_from, window_size, seqlen_q, seqlen_k)
    tiles, lo, hi = masks.resolve(mask, *band, seqlen_q, seqlen_k)
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    options = Options(lo, hi, scale, softcap, dropout_p, bool(deterministic))
    call = dispatch.Call(query, key, value, bias, tiles, None, None, options)
    on = architectures.parse(arch) if arch is not None else None
    return Explanation(
        _launch("forward", dispatch.forward_choice(call, on)),
        _launch("backward", dispatch.backward_choice(call, on)),
        _mask_text(tiles),
        _band_text(lo, hi),
    )


def _launch(direction: str, choice: Choice) -> Launch:
    row = choice.row
    return Launch(
        choice.label,
        row.kernel,
        row.tier,
        str(choice.arch or "CPU"),
        {field.name: getattr(row.config, field.name) for field in fields(row.config)},
        row.evidence,
        choice.passed_over,
    )


def _mask_text(tiles: Tiles) -> str:
    if tiles.row_bits is not None:
        return "listed 128 x 128 tiles; full ones without a test, partial ones by bits"
    if tiles.k_segments is not None:
        return "listed 128 x 128 tiles; full ones without a test, partial ones by segment ids and band"
    return "none: the tiles inside the band, without lists"


def _band_text(lo: int, hi: int) -> str:
    left = "" if lo <= -UNBOUNDED else f"i {lo:+d} <= "
    right = "" if hi >= UNBOUNDED else f" <= i {hi:+d}"
    return f"{left}j{right}" if left or right else "every key"
