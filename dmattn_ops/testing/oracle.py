"""Attention by its definition, and the error budget against it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dmattn_ops.testing.inputs import per_query_head
from dmattn_ops.testing.problem import DTYPES, Problem

EPS = {torch.float64: 1e-10, torch.float32: 3e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SAMPLES = 4  # of the errors that rounding makes
SLACK = 2  # times their root mean square: a few elements may make up the norm
STATISTICS = ("out", "lse", "row_max")


def masked_scores(query: Tensor, key: Tensor, keep: Tensor, bias: Tensor | None, problem: Problem) -> Tensor:
    """Return scores `[B, H, Sq, Sk]` in the inputs' dtype, -inf where hidden."""
    group = problem.heads // problem.heads_k
    q, k = query.transpose(1, 2), key.transpose(1, 2).repeat_interleave(group, 1)
    scale = 1 / math.sqrt(problem.dim) if problem.softmax_scale is None else problem.softmax_scale
    score = q @ k.transpose(-1, -2) * scale
    if problem.softcap:
        score = problem.softcap * torch.tanh(score / problem.softcap)
    if bias is not None:
        shape = torch.broadcast_shapes(per_query_head(bias, problem.heads).shape, keep.shape)
        bias = per_query_head(bias, problem.heads).expand(shape).to(score.dtype)
        score = score + torch.where(keep, bias, 0)
    return torch.where(keep, score, float("-inf"))


def attend(
    score: Tensor, value: Tensor, keep: Tensor, problem: Problem, dropout_keep: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out `[B, Sq, H, Dv]`, lse `[B, H, Sq]` without the sink, and the probabilities before dropout, differentiable."""
    v = value.transpose(1, 2).repeat_interleave(problem.heads // problem.heads_k, 1)
    empty = ~keep.any(-1, keepdim=True)
    score = torch.where(empty, 0, score)
    lse = _log_sum(score)
    probability = torch.where(keep, torch.softmax(score, -1), 0)
    if sink is not None:
        seen = torch.where(empty[..., 0], 0, lse)
        share = torch.nn.functional.logsigmoid(
            seen - sink[:, None].to(lse.dtype)
        ).exp()  # of a precise derivative near 1
        probability = probability * share[..., None]
    kept = probability
    if dropout_keep is not None:
        kept_of_all = 1 - round(problem.dropout_p * 2**32) / 2**32  # probabilities are whole multiples of 2^-32
        kept = torch.where(dropout_keep, probability * (1 / kept_of_all if kept_of_all else 0.0), 0)
    out = (kept.to(v.dtype) @ v).transpose(1, 2)
    return out, torch.where(empty[..., 0], float("-inf"), lse), probability


def _log_sum(score: Tensor) -> Tensor:
    """Return logsumexp of the last dimension, whose gradient adds up to 1 beside scores of any size; torch's does not."""
    if score.shape[-1] == 0:
        return torch.logsumexp(score, -1)
    largest = score.detach().amax(-1, keepdim=True)
    return largest[..., 0] + (score - largest).exp().sum(-1).log()


def rounding_loss(
    score: Tensor,
    value: Tensor,
    grad_out: Tensor,
    keep: Tensor,
    problem: Problem,
    dropout_keep: Tensor | None,
    sink: Tensor | None,
    generator: torch.Generator,
) -> Tensor:
    """Return a loss whose gradients are what one sample of unavoidable rounding errors of dS does to the gradients.

    dS is `P (dP - delta)`. A kernel that does not store P computes delta from grad_out and out, so that delta contains the
    rounding error of out. dP contains the rounding errors of a sum in float32. Where few keys have all the weight, dS is the
    small difference of these two numbers, and their rounding errors dominate it. The gradient of a sink is a sum of products of
    grad_out and out too, of which either sign may occur.
    """
    dtype = torch.finfo(DTYPES[problem.dtype])
    with torch.no_grad():
        out, lse, probability = attend(score, value, keep, problem, dropout_keep, sink)
        product = (grad_out * out).transpose(1, 2)  # [B, H, Sq, Dv]
        of_delta = product.square().sum(-1).sqrt() + product.sum(-1).abs()
        of_delta *= dtype.eps / 2
        of_delta += dtype.tiny * grad_out.abs().sum(-1).transpose(1, 2)  # what is less than that is 0 in out
        lengths = value.norm(dim=-1).transpose(1, 2).repeat_interleave(problem.heads // problem.heads_k, 1)
        of_product = grad_out.norm(dim=-1).transpose(1, 2)[..., None] * lengths[..., None, :]
        of_product *= min(dtype.eps, torch.finfo(torch.float32).eps) / 2
        if dtype.bits == 64:  # the truth is rounded like what is compared with it
            of_delta, of_product = 4 * of_delta, 4 * of_product
        alike = of_product
        if (
            problem.rows == "one"
        ):  # sums of equal numbers: each step rounds like the one before, and nothing averages it
            alike, of_product = of_product[..., :1], 3 * of_product
            of_delta = (1 + keep.sum(-1) / 8) * of_delta
        noise = of_delta[..., None] * _signs(of_delta[..., None], generator) + of_product * _signs(alike, generator)
        of_lse = product.sum(-1).abs() * torch.where(lse.isfinite(), lse, 0).abs()
        of_lse *= min(dtype.eps, torch.finfo(torch.float32).eps)  # of which the share of a sink is computed
        by_row = (of_delta + of_lse) * _signs(of_delta, generator)
    loss = (probability * noise * torch.where(keep, score, 0)).sum()
    if sink is not None:
        logit = torch.where(sink > float("-inf"), sink, 0)[:, None]
        loss = loss + (by_row * torch.sigmoid(sink[:, None] - lse).detach() * logit).sum()
    return loss


def score_rounding(query: Tensor, key: Tensor, keep: Tensor, bias: Tensor | None, problem: Problem) -> Tensor:
    """Return `[B, H, Sq, Sk]` what rounding may do to scores: their sums may cancel, and are added in any order."""
    sizes = query.detach().abs(), key.detach().abs()
    score = masked_scores(*sizes, keep, None if bias is None else bias.detach().abs(), replace(problem, softcap=0.0))
    eps = min(torch.finfo(DTYPES[problem.dtype]).eps, torch.finfo(torch.float32).eps)
    return score.abs().masked_fill(~keep, 0.0) * (eps / 2)


def rounded(score: Tensor, errors: Tensor, problem: Problem, generator: torch.Generator) -> Tensor:
    """Return scores in float32 that are off by random parts of the `errors` that rounding makes.

    All scores of a row are off by the same part where all keys are one.
    """
    keys = 1 if problem.rows == "one" else score.shape[-1]
    part = 2 * torch.rand((*score.shape[:-1], keys), generator=generator, device=score.device, dtype=score.dtype) - 1
    return (score + part * errors).to(torch.float32)


def _signs(like: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.randint(2, like.shape, generator=generator, device=like.device)
    return (2 * drawn - 1).to(like.dtype)


def difference(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the L2 norms of the difference and of `expected` (float64); inf where NaN or Inf positions differ."""
    actual = actual.to(torch.float64)
    finite = torch.isfinite(expected)
    norm = expected[finite].norm().item()
    if not torch.equal(torch.isfinite(actual), finite) or not torch.equal(actual[~finite], expected[~finite]):
        return math.inf, norm
    return (actual - expected)[finite].norm().item(), norm


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative L2 error against `expected` (float64); inf where NaN or Inf positions differ."""
    distance, norm = difference(actual, expected)
    return distance / norm if norm else (0.0 if distance == 0 else math.inf)


def within_range(actual: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Return all tensors with 0 where `actual` could not hold the first of the others, the truth, and is rightly near its range.

    Such elements are infinite or almost the largest number of the dtype of `actual`, with the sign of the truth.
    """
    largest = torch.finfo(actual.dtype).max
    truth = others[0]
    beyond = truth.isfinite() & (truth.abs() > 0.99 * largest)
    beyond &= (actual.abs() > 0.9 * largest) & (actual.sign() == truth.sign())
    return tuple(tensor.masked_fill(beyond, 0) for tensor in (actual, *others)) if beyond.any() else (actual, *others)


def rounding_to_zero(actual: Tensor) -> float:
    """Return the L2 norm of what a tensor cannot hold, and of what kernels take for 0.

    That is half of the smallest number of its dtype in each element, and the smallest normal number of float32, in which kernels
    compute (float64 for float64): powers below it are 0 in them.
    """
    of, computed = torch.finfo(actual.dtype), torch.promote_types(actual.dtype, torch.float32)
    return math.sqrt(actual.numel()) * (of.smallest_normal * of.eps / 2 + torch.finfo(computed).smallest_normal)


def compare(
    problem: Problem,
    actual: dict[str, Tensor],
    expected: dict[str, Tensor],
    eager: dict[str, Tensor],
    rounding: Callable[[], dict[str, float]],
    others: Callable[[], list[dict[str, Tensor]]],
    margins: dict[str, float] | None = None,
) -> bool:
    """Assert the budget `err(actual) <= 2 err(eager) + eps` for each result.

    A result over the budget is compared with the `others` too: further ways to compute it that are as good as eager. Their
    errors count `SLACK` times in the budget, since one row may make up all of an error. It is accepted as well if its error is
    within unavoidable rounding errors, of a sum whose terms cancel: `rounding` returns the norms of these, by name. Return
    whether a result needed the last.

    `margins` is given the largest error of each result so far, over what it may be.
    """
    margins = {} if margins is None else margins
    assert actual.keys() == expected.keys()
    allowed: dict[str, float] = {}
    for name in actual:
        assert actual[name].shape == expected[name].shape, (
            f"{name} has shape {tuple(actual[name].shape)}, expected {tuple(expected[name].shape)}"
        )
        ours, oracle, plain = within_range(actual[name], expected[name], eager[name])
        distance, norm = difference(ours, oracle)
        base = difference(plain, oracle)[0]
        unavoidable = EPS[DTYPES[problem.dtype]] * norm + rounding_to_zero(ours)
        budget = (2 * base if math.isfinite(base) else 0) + unavoidable
        if distance > budget:
            errors = [base]
            for results in others():
                _, truth, other = within_range(actual[name], expected[name], results[name])
                errors.append(SLACK * difference(other, truth)[0])
            base = max((error for error in errors if math.isfinite(error)), default=math.inf)
            budget = (2 * base if math.isfinite(base) else 0) + unavoidable
        if distance <= budget:
            margins[name] = max(margins.get(name, 0.0), distance / budget if budget else 0.0)
            continue
        allowed = allowed or rounding()
        slack = SLACK * (1 + 2 / math.sqrt(max(1, ours.numel())))
        room = max(budget, slack * allowed.get(name, 0.0))
        relative = 1 / norm if norm else math.inf
        assert math.isfinite(distance) and distance <= room, (
            f"{name}: error {distance * relative:.3g} over the budget {budget * relative:.3g} (eager {base * relative:.3g}, "
            f"with the rounding of out {room * relative:.3g})"
        )
        margins[name] = max(margins.get(name, 0.0), distance / room)
    return bool(allowed)
