"""Attention from a dense mask in any dtype, written apart from the project's own reference: float64 is the truth."""

from __future__ import annotations

import torch
from torch import Tensor

_M = 0xFFFFFFFF


def philox(counters: list[Tensor]) -> list[Tensor]:
    """Philox4x32-7 of the key 0 on int64 tensors that hold 32-bit words (Salmon et al., 2011)."""
    c0, c1, c2, c3 = counters
    k0, k1 = 0, 0
    for _ in range(7):
        low0, high0 = _multiply(0xD2511F53, c0)
        low1, high1 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _M, (k1 + 0xBB67AE85) & _M
    return [c0, c1, c2, c3]


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the low and high 32 bits of a product of 32-bit words, without overflowing int64."""
    low = (a & 0xFFFF) * b
    high = (a >> 16) * b
    middle = high + (low >> 16)
    return ((middle & 0xFFFF) << 16) | (low & 0xFFFF), middle >> 16


def dropout_keep(seed: Tensor, dropout_p: float, rows: range, columns: range) -> Tensor:
    """Return which elements dropout keeps of queries and keys at these positions, for seeds `[B|1, H|1]`: `[B|1, H|1, Sq, Sk]`."""
    shape = (*seed.shape, len(rows), len(columns))
    i = torch.tensor(rows).view(1, 1, -1, 1).expand(shape)
    j = torch.tensor(columns).view(1, 1, 1, -1).expand(shape)
    low, high = (part[..., None, None].expand(shape) for part in (seed & _M, seed >> 32 & _M))
    words = torch.stack(philox([i & ~8, j & ~8, low, high]), -1)
    word = words.gather(-1, (2 * (i >> 3 & 1) + (j >> 3 & 1)).unsqueeze(-1)).squeeze(-1)
    return word >= round(dropout_p * 2**32)


def spread_heads(tensor: Tensor, heads: int, dim: int) -> Tensor:
    """Repeat each of 1, Hkv or H heads for the query heads that read it."""
    return tensor.repeat_interleave(heads // tensor.shape[dim], dim)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    keep: Tensor,
    scale: float,
    softcap: float = 0.0,
    dropped: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out `[B, Sq, H, Dv]`, lse and the largest scores `[B, H, Sq]`, the first two differentiable.

    `keep` and `bias` are 4-D with 1, Hkv or H heads.
    """
    heads = query.shape[2]
    q = query.transpose(1, 2)
    k = spread_heads(key, heads, 2).transpose(1, 2)
    v = spread_heads(value, heads, 2).transpose(1, 2)
    scores = (q @ k.transpose(-1, -2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + spread_heads(bias, heads, 1).to(torch.promote_types(scores.dtype, bias.dtype))
    scores = torch.where(spread_heads(keep, heads, 1), scores, float("-inf"))
    if scores.shape[-1] == 0:
        lse = scores.new_full(scores.shape[:-1], float("-inf"))
        return (scores @ v).transpose(1, 2), lse, lse.clone()
    empty = (scores == float("-inf")).all(-1)
    safe = torch.where(empty.unsqueeze(-1), 0.0, scores)
    lse = torch.where(empty, float("-inf"), torch.logsumexp(safe, -1))
    p = torch.where(empty.unsqueeze(-1), 0.0, torch.softmax(safe, -1)).to(v.dtype)
    if dropped is not None:
        p = p * dropped.to(p.dtype) * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0)
    return (p @ v).transpose(1, 2), lse, scores.detach().amax(-1)


def error(ours: Tensor, truth: Tensor, terms: int = 0) -> float:
    """Return the relative L2 error, or that of the difference where the truth is 0, after NaN and Inf positions were compared.

    `terms`: a truth of 0 is a sum of so many differences of rounded numbers, such as dq of queries that see one key alone; then it
    is the root mean square of the difference, for each of them.
    """
    ours, truth = ours.double().cpu(), truth.double().cpu()
    assert torch.equal(ours.isnan(), truth.isnan()), "NaN positions differ"
    assert torch.equal(ours.isinf(), truth.isinf()), "Inf positions differ"
    finite = truth.isfinite()
    ours, truth = ours[finite], truth[finite]
    difference, size = (ours - truth).norm(), truth.norm()
    return float(difference / (size or max(1, ours.numel() * terms) ** 0.5))


EPSILON = {torch.float64: 1e-10, torch.float32: 3e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
