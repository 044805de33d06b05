"""Attention by its definition, and the error budget against it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dmattn_ops.testing.inputs import Inputs, per_query_head
from dmattn_ops.testing.problem import DTYPES, Problem

EPS = {torch.float64: 1e-10, torch.float32: 3e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
VANISHED = 1e-6  # beside what it is the sum of: 0 but for rounding
NAMES = ("out", "lse", "dq", "dk", "dv", "dbias")


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor,
    bias: Tensor | None,
    problem: Problem,
    dropout_keep: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute attention by its definition in the inputs' dtype: out `[B, Sq, H, Dv]` and lse `[B, H, Sq]`, differentiable."""
    group = problem.heads // problem.heads_k
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = 1 / math.sqrt(problem.dim) if problem.softmax_scale is None else problem.softmax_scale
    score = q @ k.transpose(-1, -2) * scale
    if problem.softcap:
        score = problem.softcap * torch.tanh(score / problem.softcap)
    if bias is not None:
        shape = torch.broadcast_shapes(per_query_head(bias, problem.heads).shape, keep.shape)
        bias = per_query_head(bias, problem.heads).expand(shape).to(score.dtype)
        score = score + torch.where(keep, bias, 0)
    score = torch.where(keep, score, float("-inf"))
    empty = ~keep.any(-1, keepdim=True)
    lse = torch.logsumexp(torch.where(empty, 0, score), -1)
    probability = torch.where(keep, torch.exp(score - lse[..., None]), 0)
    if dropout_keep is not None:
        rescale = 0.0 if problem.dropout_p == 1 else 1 / (1 - problem.dropout_p)
        probability = torch.where(dropout_keep, probability * rescale, 0)
    out = (probability.to(v.dtype) @ v).transpose(1, 2)
    return out, torch.where(empty[..., 0], float("-inf"), lse)


def relative_error(actual: Tensor, expected: Tensor, scale: float = 0.0) -> float:
    """Return the relative L2 error against `expected` (float64); inf where NaN or Inf positions differ.

    `scale` is the norm that the result would have if nothing cancelled. A result that cancels to nothing beside it (the
    gradient through a softmax over one key is 0 but for rounding) is measured against the scale.
    """
    actual = actual.to(torch.float64)
    finite = torch.isfinite(expected)
    if not torch.equal(torch.isfinite(actual), finite) or not torch.equal(actual[~finite], expected[~finite]):
        return math.inf
    difference, norm = (actual - expected)[finite].norm().item(), expected[finite].norm().item()
    if norm < VANISHED * scale:
        norm = scale
    return difference / norm if norm else (0.0 if difference == 0 else math.inf)


def compare(
    problem: Problem, inputs: Inputs, actual: list[Tensor], expected: list[Tensor], eager: list[Tensor]
) -> None:
    """Assert the budget `err(actual) <= 2 err(eager) + eps` for each result."""
    scores = _norm(inputs.grad_out) * _norm(inputs.value)
    softmax_scale = 1 / math.sqrt(problem.dim) if problem.softmax_scale is None else problem.softmax_scale
    scales = {
        "dq": scores * _norm(inputs.key) * softmax_scale,
        "dk": scores * _norm(inputs.query) * softmax_scale,
        "dbias": scores,
    }
    for name, ours, oracle, plain in zip(NAMES, actual, expected, eager, strict=False):
        assert ours.shape == oracle.shape, f"{name} has shape {tuple(ours.shape)}, expected {tuple(oracle.shape)}"
        scale = scales.get(name, 0.0)
        error, base = relative_error(ours, oracle, scale), relative_error(plain, oracle, scale)
        budget = (2 * base if math.isfinite(base) else 0) + EPS[DTYPES[problem.dtype]]
        assert error <= budget, f"{name}: error {error:.3g} over the budget {budget:.3g} (eager {base:.3g})"


def _norm(tensor: Tensor) -> float:
    return tensor.detach().to(torch.float64).norm().item()
