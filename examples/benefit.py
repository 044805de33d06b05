"""What the masks of a trained model save: how many tiles the kernels skip, and how long attention takes with and without."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch
from torch import Tensor

from dmattn_ops import TileMask, dynamic_mask, explain, flash_dmattn_func
from model import ModelConfig

TILE = 128
ROUNDS = 5


class Benefit(NamedTuple):
    """Seconds that attention of all layers takes forward and backward, with the masks and without."""

    masked: float
    causal: float


def tiles_skipped(masks: list[TileMask]) -> float:
    """Return which share of the tiles that causal attention visits the masks `[B, Hkv, S, S]` of the layers leave empty."""
    visited = causal = 0.0
    for mask in masks:
        batch, heads, seqlen, _ = mask.shape
        rows = -(-seqlen // TILE)
        visited += mask.density().item() * batch * heads * rows * rows
        causal += batch * heads * rows * (rows + 1) / 2
    return 1 - visited / causal


def measure(config: ModelConfig, scores: list[Tensor], dtype: torch.dtype) -> Benefit:
    """Time attention with the masks that the scores `[B, Hkv, S]` of all layers make, and with the causal condition alone.

    To find the best keys is part of it; the bias is the same in both.
    """
    batch, _, seqlen = scores[0].shape
    device = scores[0].device

    def drawn(heads: int) -> Tensor:
        shape = (batch, seqlen, heads, config.head_dim)
        return torch.randn(shape, dtype=dtype, device=device, requires_grad=True)

    query, key, value = drawn(config.heads), drawn(config.kv_heads), drawn(config.kv_heads)
    bias = torch.randn(batch, config.kv_heads, 1, seqlen, device=device, requires_grad=True)
    grad_out = torch.randn_like(query)

    def attend(score: Tensor | None) -> None:
        mask = None if score is None else dynamic_mask(score, config.keep)
        out = flash_dmattn_func(query, key, value, mask, bias, is_causal=True)
        torch.autograd.grad(out, (query, key, value, bias), grad_out)

    def seconds(of: list[Tensor] | list[None]) -> float:
        began = time.perf_counter()
        for score in of:
            attend(score)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    runs = (scores, [None] * len(scores))
    rounds = [[seconds(of) for of in runs] for _ in range(1 + ROUNDS)][1:]  # the first warms up
    return Benefit(*(statistics.median(times) for times in zip(*rounds, strict=True)))


def how_keys_are_read(config: ModelConfig, score: Tensor, dtype: torch.dtype) -> str:
    """Say in words whether the kernels of a layer pack the keys that its mask keeps, from `explain`."""
    batch, _, seqlen = score.shape

    def empty(heads: int) -> Tensor:
        return torch.empty(batch, seqlen, heads, config.head_dim, dtype=dtype, device=score.device)

    bias = torch.empty(batch, config.kv_heads, 1, seqlen, device=score.device)
    mask = dynamic_mask(score, config.keep)
    return str(explain(empty(config.heads), empty(config.kv_heads), empty(config.kv_heads), mask, bias).forward.packing)
