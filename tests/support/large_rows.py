"""Rows of large finite scores: random calls, and the budget of their results and gradients against float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

import dmattn_ops
from dmattn_ops.testing.oracle import EPS

LOWEST = torch.finfo(torch.float32).min
BOUND = 100  # times what rounding does is what `rounding` allows at most
OUTLIER = 4  # of a standard deviation: one in some ten thousand is larger
NAMES = ("out", "lse", "dq", "dk", "dv", "dbias")


class Rows(NamedTuple):
    """One call `[1, S, 2, D]`, and what its scores are made of."""

    leaves: list[Tensor]  # query, key, value, and a bias where there is one
    grad_out: Tensor
    scale: float
    softcap: float


def draw(
    device: str, dtype: torch.dtype, dim: int, *, bias: str = "", value: float = 0.0, scale: float | None = None,
    softcap: float = 0.0, seqlen: int = 300, times: float = 1.0,
) -> Rows:  # fmt: skip
    """Draw a call. `bias`: "rows" (20 whole rows are `value`), "keys" (all but one key are) or "all" (one per key, all are).

    Every fifth query is `times` as large as the others.
    """
    query, key, value_rows, grad_out = (torch.randn(1, seqlen, 2, dim, device=device).to(dtype) for _ in range(4))
    query[:, ::5] *= times
    leaves = [query, key, value_rows]
    if bias:
        added = torch.zeros(1, 1, seqlen if bias == "rows" else 1, seqlen, device=device)
        if bias == "rows":
            added[:, :, :20] = value
        else:
            added[..., bias == "keys" :] = value
        leaves.append(added)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    return Rows(leaves, grad_out, dim**-0.5 if scale is None else scale, softcap)


def results(rows: Rows, **options: object) -> list[Tensor]:
    """Return out, lse and the gradients that the library gives."""
    query, key, value, *bias = rows.leaves
    out, lse = dmattn_ops.flash_dmattn_func(
        query, key, value, None, *bias, softmax_scale=rows.scale, softcap=rows.softcap, return_lse=True, **options
    )
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, rows.leaves, rows.grad_out)]


def definition(rows: Rows, dtype: torch.dtype, is_causal: bool = False) -> tuple[list[Tensor], Tensor]:
    """Return out, lse and gradients of the definition in `dtype`, and the probabilities."""
    leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in rows.leaves]
    query, key, value, *bias = leaves
    scores = torch.einsum("bihd,bjhd->bhij", query, key) * rows.scale
    if rows.softcap:
        scores = rows.softcap * torch.tanh(scores / rows.softcap)
    if bias:
        scores = scores + bias[0]
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    weights = scores.softmax(-1)
    out = torch.einsum("bhij,bjhd->bihd", weights, value)
    gradients = torch.autograd.grad(out, leaves, rows.grad_out.to(dtype))
    return [out.detach(), scores.detach().logsumexp(-1), *gradients], weights.detach()


def rounding(rows: Rows, out: Tensor, weights: Tensor) -> dict[str, float]:
    """Return norms of what rounding out, of which delta is computed, can do to gradients: all there is where dS cancels to 0."""
    query, key, _, *bias = (leaf.detach().double() for leaf in rows.leaves)
    of_delta = (rows.grad_out.double() * out).abs().sum(-1).transpose(1, 2)[..., None]  # [B, H, Sq, 1]
    noise = weights * of_delta * torch.finfo(rows.grad_out.dtype).eps
    found = {
        "dq": torch.einsum("bhij,bjhd->bihd", noise, key.abs()).norm().item() * abs(rows.scale),
        "dk": torch.einsum("bhij,bihd->bjhd", noise, query.abs()).norm().item() * abs(rows.scale),
    }
    if bias:
        summed = noise.sum(1, keepdim=True) if bias[0].shape[2] > 1 else noise.sum((1, 2))
        found["dbias"] = summed.norm().item()
    return found


def unheld(rows: Rows, exact_weights: bool = True) -> dict[str, Tensor]:
    """Return where the dtype may not hold dq or dk of a causal call, by their size or by rounding alone.

    dS is `P * (dP - delta)`, of two sums over D in float32, times the scale, and delta is computed of an out that was rounded to
    the dtype. Where one key has all of a query's weight and kernels know it (`exact_weights`), out is a value as it is, and what
    rounding makes of a gradient of 0 is the scale times some 1e-6. Others find exponents of large scores that are not exactly 0.
    """
    exact, weights = definition(rows, torch.float64, is_causal=True)
    query, key, value = (leaf.detach().double().abs() for leaf in rows.leaves[:3])
    grad_out, dtype = rows.grad_out.double().abs(), rows.grad_out.dtype
    of_products = torch.einsum("bihd,bjhd->bhij", grad_out, value)
    of_delta = (grad_out * exact[0].abs()).sum(-1).transpose(1, 2)[..., None]  # [B, H, Sq, 1]
    of_sums = torch.finfo(torch.float32).eps * (of_products + of_delta)
    rounded = (weights.amax(-1, keepdim=True) < 1) | (not exact_weights)
    noise = weights * (of_sums + rounded * torch.finfo(dtype).eps * of_delta) * abs(rows.scale)
    most = torch.finfo(dtype).max
    return {
        "dq": exact[2].abs() + torch.einsum("bhij,bjhd->bihd", noise, key) > most,
        "dk": exact[3].abs() + torch.einsum("bhij,bihd->bjhd", noise, query) > most,
    }


def check(rows: Rows, found: list[Tensor]) -> None:
    """Assert `err <= 2 err(eager in the same dtype) + eps` of every result, and that all are finite.

    Where that dtype cannot hold the bias (float16 ends at 65504), it is eager attention in float32, whose rounding of such
    scores is that of the kernels. A gradient says nothing where the dtype cannot even hold what rounding does to it, and some
    elements of it may be infinite where the dtype cannot hold the `OUTLIER`-fold of that.
    """
    dtype = rows.grad_out.dtype
    exact, weights = definition(rows, torch.float64)
    held = all(leaf.detach().to(dtype).isfinite().all() for leaf in rows.leaves)
    eager, _ = definition(rows, dtype if held else torch.float32)
    room = rounding(rows, exact[0], weights)
    for name, mine, right, plain in zip(NAMES, found, exact, eager, strict=False):
        if room.get(name, 0.0) > BOUND * mine.numel() ** 0.5 * torch.finfo(dtype).max:
            continue
        most = torch.finfo(dtype).max
        if OUTLIER * room.get(name, 0.0) > mine.numel() ** 0.5 * most:
            mine = mine.clamp(-most, most)  # NaN stays
        assert mine.isfinite().all(), f"{name} is not finite"
        distance, base = ((each.double() - right).norm().item() for each in (mine, plain))
        limit = (2 * base if math.isfinite(base) else 0.0) + EPS[dtype] * right.norm().item() + room.get(name, 0.0)
        assert distance <= limit, (
            f"{name}: error {distance:.3g} over the budget {limit:.3g}, norm {right.norm().item():.3g}"
        )


def check_finite(rows: Rows, found: list[Tensor], exact_weights: bool = True) -> None:
    """Assert that results of a causal call are finite, but for gradients that the dtype may not hold; those are infinite."""
    left_out = unheld(rows, exact_weights)
    for name, mine in zip(NAMES, found, strict=False):
        assert not mine.isnan().any(), f"{name} is NaN"
        infinite = mine.isinf() & ~left_out[name] if name in left_out else mine.isinf()
        assert not infinite.any(), f"{name} is infinite"
