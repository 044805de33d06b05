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


def definition(rows: Rows, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return out, lse and gradients of the definition in `dtype`, and the probabilities."""
    leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in rows.leaves]
    query, key, value, *bias = leaves
    scores = torch.einsum("bihd,bjhd->bhij", query, key) * rows.scale
    if rows.softcap:
        scores = rows.softcap * torch.tanh(scores / rows.softcap)
    if bias:
        scores = scores + bias[0]
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


def check(rows: Rows, found: list[Tensor]) -> None:
    """Assert `err <= 2 err(eager in the same dtype) + eps` of every result, and that all are finite.

    Where that dtype cannot hold the bias (float16 ends at 65504), it is eager attention in float32, whose rounding of such
    scores is that of the kernels. A gradient says nothing where the dtype cannot even hold what rounding does to it.
    """
    dtype = rows.grad_out.dtype
    exact, weights = definition(rows, torch.float64)
    held = all(leaf.detach().to(dtype).isfinite().all() for leaf in rows.leaves)
    eager, _ = definition(rows, dtype if held else torch.float32)
    room = rounding(rows, exact[0], weights)
    for name, mine, right, plain in zip(NAMES, found, exact, eager, strict=False):
        if room.get(name, 0.0) > BOUND * mine.numel() ** 0.5 * torch.finfo(dtype).max:
            continue
        assert mine.isfinite().all(), f"{name} is not finite"
        distance, base = ((each.double() - right).norm().item() for each in (mine, plain))
        limit = (2 * base if math.isfinite(base) else 0.0) + EPS[dtype] * right.norm().item() + room.get(name, 0.0)
        assert distance <= limit, (
            f"{name}: error {distance:.3g} over the budget {limit:.3g}, norm {right.norm().item():.3g}"
        )
