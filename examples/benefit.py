"""What the masks of a trained model save: how many tiles the kernels skip, and how long attention takes with and without."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dmattn_ops import flash_dmattn_func, prepare_mask
from model import ModelConfig

TILE = 128
ROUNDS = 5


class Benefit(NamedTuple):
    """Seconds that attention of all layers takes forward and backward, with the masks and without."""

    masked: float
    causal: float


def tiles_skipped(masks: list[Tensor]) -> float:
    """Return which share of the tiles that causal attention visits the masks `[B, Hkv, S, S]` of the layers skip."""
    visited = causal = 0.0
    for mask in masks:
        batch, heads, seqlen, _ = mask.shape
        rows = -(-seqlen // TILE)
        visited += prepare_mask(mask, is_causal=True).density().item() * batch * heads * rows * rows
        causal += batch * heads * rows * (rows + 1) / 2
    return 1 - visited / causal


def measure(config: ModelConfig, masks: list[Tensor], dtype: torch.dtype) -> Benefit:
    """Time attention with the masks `[B, Hkv, S, S]` of all layers, and with the causal condition alone.

    Work on the mask is part of it, from the dense mask on; the bias is the same in both.
    """
    batch, _, seqlen, _ = masks[0].shape
    device = masks[0].device

    def drawn(heads: int) -> Tensor:
        shape = (batch, seqlen, heads, config.head_dim)
        return torch.randn(shape, dtype=dtype, device=device, requires_grad=True)

    query, key, value = drawn(config.heads), drawn(config.kv_heads), drawn(config.kv_heads)
    bias = torch.randn(batch, config.kv_heads, 1, seqlen, device=device, requires_grad=True)
    grad_out = torch.randn_like(query)

    def attend(masks: list[Tensor] | list[None]) -> None:
        for mask in masks:
            out = flash_dmattn_func(query, key, value, mask, bias, is_causal=True)
            torch.autograd.grad(out, (query, key, value, bias), grad_out)  # type: ignore[arg-type]

    def seconds(run: Callable[[], None]) -> float:
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    runs = (lambda: attend(masks), lambda: attend([None] * len(masks)))
    rounds = [[seconds(run) for run in runs] for _ in range(1 + ROUNDS)][1:]  # the first warms up
    return Benefit(*(statistics.median(times) for times in zip(*rounds, strict=True)))
