"""Rotary position embeddings (Su et al., arXiv 2104.09864) of the layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dmattn_ops.checks import validation


def base_of(rotary_base: float | None, dim: int) -> float | None:
    """Return the base of the embeddings of heads of `dim`, a positive number, or None; refuse others."""
    if rotary_base is None:
        return None
    rotary_base = validation.number("rotary_base", rotary_base)
    if dim % 2:
        raise ValueError(f"head_dim must be even for rotary embeddings, got {dim}")
    if not 0 < rotary_base < math.inf:
        raise ValueError(f"rotary_base must be a positive number, or None, got {rotary_base}")
    return rotary_base


def turns_of(hidden: Tensor, positions: Tensor | None, dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary angles, float32 `[B|1, S, 1, D / 2]`."""
    if positions is None:
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
    frequency = base ** -(torch.arange(0, dim, 2, device=hidden.device, dtype=torch.float32) / dim)
    angle = positions[..., None, None].float() * frequency
    return angle.cos(), angle.sin()


def turned(tensor: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn the pairs of `[B, S, heads, D]`, a half beside the other."""
    cosine, sine = cosine.to(tensor.dtype), sine.to(tensor.dtype)
    left, right = tensor.chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, left * sine + right * cosine), dim=-1)
