"""Run one problem through the library and compare it with the oracle; shrink what fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import cache, partial

import torch
from torch import Tensor

import dmattn_ops
from dmattn_ops import api, reference
from dmattn_ops.testing.inputs import Inputs, Part, laid_out, make_inputs, make_varlen_inputs
from dmattn_ops.testing.oracle import NAMES, SAMPLES, attend, compare, masked_scores, rounding_loss
from dmattn_ops.testing.problem import DTYPES, Problem


def check(
    problem: Problem,
    device: str = "cpu",
    repeats: int = 1,
    run: Callable[[Callable[[], list[Tensor]]], list[Tensor]] | None = None,
) -> bool:
    """Run one problem `repeats` times; AssertionError where a result is over the error budget, or not exactly 0 where it must be.

    Return whether a gradient was over the budget, but by no more than the rounding errors of a sum whose terms cancel.

    `run` is given the function that computes out, lse and the gradients, and returns what it computed: a test that wants
    the call to happen inside a captured graph passes its own; without one, the problem says in which thread and stream.
    """
    varlen = problem.variant == "varlen"
    inputs = make_varlen_inputs(problem, device) if varlen else make_inputs(problem, device)
    dropout_keep = _dropout_keep(problem, inputs)
    expected = _definition(problem, inputs, torch.float64, dropout_keep)
    eager = _definition(problem, inputs, DTYPES[problem.dtype], dropout_keep)
    rounding = cache(partial(_rounding, problem, inputs, dropout_keep))
    first: list[Tensor] | None = None
    cancelled = False
    for _ in range(repeats):
        torch.manual_seed(problem.seed)
        call = partial(_varlen_results if varlen else _dense_results, problem, inputs)
        for actual in _placed(problem, device, call) if run is None else [run(call)]:
            cancelled |= compare(problem, actual, expected, eager, rounding)
            _check_exact_zeros(problem, inputs, actual)
            if problem.deterministic and first is not None:
                for name, one, other in zip(NAMES, first, actual, strict=False):
                    assert torch.equal(one, other), f"{name} changed between runs although deterministic=True"
            first = first or actual
    return cancelled


def _placed(problem: Problem, device: str, call: Callable[[], list[Tensor]]) -> list[list[Tensor]]:
    """Run a call in the threads and on the stream that the problem names; return the results of each, lists of tensors."""
    if problem.place == "stream" and device != "cpu":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results = call()
        torch.cuda.current_stream().wait_stream(stream)
        return [results]
    if problem.place == "threads":
        # Both threads would draw from the same generator, so with dropout they run one after the other.
        threads = 1 if problem.dropout_p else 2
        with ThreadPoolExecutor(threads) as pool:
            return [future.result() for future in [pool.submit(call) for _ in range(threads)]]
    return [call()]


def _dropout_keep(problem: Problem, inputs: Inputs) -> Tensor | None:
    """Return which elements dropout keeps in the calls that follow `torch.manual_seed(problem.seed)`."""
    if not problem.dropout_p:
        return None
    torch.manual_seed(problem.seed)
    seed = api.dropout_seed(inputs.query.device)
    sizes = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    return reference.philox_keep(seed, *sizes, problem.dropout_p, inputs.query.device)


def _leaves(inputs: Inputs, dtype: torch.dtype | None) -> list[Tensor]:
    tensors = [inputs.query, inputs.key, inputs.value] + ([inputs.bias] if inputs.bias is not None else [])
    return [(t if dtype is None else t.to(dtype)).detach().requires_grad_() for t in tensors]


def _parts(
    problem: Problem, inputs: Inputs, leaves: list[Tensor], dropout_keep: Tensor | None
) -> Iterator[tuple[Part, Tensor, Tensor, Tensor | None]]:
    """Yield each sequence of a problem with its scores, its values and what dropout keeps of it."""
    for part in inputs.parts:
        q, k, v = (leaf[where] for leaf, where in zip(leaves, (part.queries, part.keys, part.keys), strict=False))
        bias = leaves[3][part.bias] if inputs.bias is not None else None
        dropped = None if dropout_keep is None else dropout_keep[part.batch, :, : q.shape[1], : k.shape[1]]
        yield part, masked_scores(q, k, part.keep, bias, problem), v, dropped


def _definition(problem: Problem, inputs: Inputs, dtype: torch.dtype, dropout_keep: Tensor | None) -> list[Tensor]:
    """Return [out, lse, dq, dk, dv, dbias] of the definition evaluated in `dtype`, sequence by sequence."""
    leaves = _leaves(inputs, dtype)
    outs, lses = [], []
    for part, score, value, dropped in _parts(problem, inputs, leaves, dropout_keep):
        out, lse, _ = attend(score, value, part.keep, problem, dropped)
        outs.append(out)
        lses.append(lse)
    out, lse = torch.cat(outs, inputs.joined[0]), torch.cat(lses, inputs.joined[1])
    loss = (out * inputs.grad_out.view_as(out).to(dtype)).sum()
    if problem.lse_grad:
        seen = lse.detach() > float("-inf")
        loss = loss + torch.where(seen, torch.where(seen, lse, 0) * inputs.grad_lse.view_as(lse).to(lse.dtype), 0).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return [out.detach().view_as(inputs.grad_out), lse.detach().view_as(inputs.grad_lse), *grads]


def _rounding(problem: Problem, inputs: Inputs, dropout_keep: Tensor | None) -> list[float]:
    """Return the norms of what unavoidable rounding errors do to dq, dk, dv and dbias."""
    leaves = _leaves(inputs, torch.float64)
    generator = torch.Generator(inputs.query.device).manual_seed(problem.seed)
    squares = [0.0] * len(leaves)
    for _ in range(SAMPLES):
        losses = [
            rounding_loss(
                score,
                value,
                inputs.grad_out[part.queries].to(torch.float64),
                part.keep,
                problem,
                dropped,
                generator,
            )
            for part, score, value, dropped in _parts(problem, inputs, leaves, dropout_keep)
        ]
        gradients = torch.autograd.grad(sum(losses), leaves, allow_unused=True, materialize_grads=True)  # type: ignore[arg-type]
        squares = [square + gradient.square().sum().item() for square, gradient in zip(squares, gradients, strict=True)]
    return [math.sqrt(square / SAMPLES) for square in squares]


def _keywords(problem: Problem) -> dict:
    return {
        "is_causal": problem.is_causal,
        "causal_from": problem.causal_from,
        "window_size": (problem.left, problem.right),
        "softmax_scale": problem.softmax_scale,
        "softcap": problem.softcap,
        "dropout_p": problem.dropout_p,
        "deterministic": problem.deterministic,
        "return_lse": True,
    }


def _with_gradients(problem: Problem, inputs: Inputs, leaves: list[Tensor], out: Tensor, lse: Tensor) -> list[Tensor]:
    outputs, grads = [out], [inputs.grad_out]
    if problem.lse_grad:
        outputs, grads = [out, lse], [inputs.grad_out, inputs.grad_lse]
    if problem.place == "backward thread":
        with ThreadPoolExecutor(1) as pool:
            gradients = pool.submit(torch.autograd.grad, outputs, leaves, grads).result()
    else:
        gradients = torch.autograd.grad(outputs, leaves, grads)
    return [out.detach(), lse.detach(), *gradients]


def _compiled(problem: Problem, function: Callable) -> Callable:
    return torch.compile(function, fullgraph=True, dynamic=True) if problem.compiled else function


def _dense_results(problem: Problem, inputs: Inputs) -> list[Tensor]:
    """Return [out, lse, dq, dk, dv, dbias] of `flash_dmattn_func` or `flash_dmattn_qkvpacked_func`."""
    leaves = _leaves(inputs, None)
    keywords = _keywords(problem)
    mask: Tensor | dmattn_ops.TileMask | None = inputs.mask
    if (problem.prepared and mask is not None) or problem.documents:
        band = (
            {name: keywords[name] for name in ("is_causal", "causal_from", "window_size")} if problem.seed % 2 else {}
        )
        seqlen_q = None if problem.documents else problem.seqlen_q
        mask = dmattn_ops.prepare_mask(inputs.mask, documents=inputs.documents, seqlen_q=seqlen_q, **band)
    function: Callable = dmattn_ops.flash_dmattn_func
    tensors = tuple(leaves[:3])
    if problem.variant == "qkvpacked":
        function = dmattn_ops.flash_dmattn_qkvpacked_func
        parts = torch.cat([leaf.detach() for leaf in leaves[:3]], 2)
        layout = problem.layout if problem.layout != "expanded" else "bshd"  # the parts are expanded already
        qkv = laid_out(parts, layout).unflatten(2, (3, problem.heads)).requires_grad_()
        tensors, leaves = (qkv,), [qkv, *leaves[3:]]
    bias = leaves[-1] if inputs.bias is not None else None
    results = _with_gradients(problem, inputs, leaves, *_compiled(problem, function)(*tensors, mask, bias, **keywords))
    if problem.variant == "qkvpacked":
        results = [*results[:2], *results[2].unbind(2), *results[3:]]
    return results


def _varlen_results(problem: Problem, inputs: Inputs) -> list[Tensor]:
    """Return [out, lse, dq, dk, dv, dbias] of `flash_dmattn_varlen_func`."""
    leaves = _leaves(inputs, None)
    bias = leaves[3] if inputs.bias is not None else None
    function = _compiled(problem, dmattn_ops.flash_dmattn_varlen_func)
    assert inputs.offsets is not None
    out, lse = function(
        *leaves[:3], *inputs.offsets, problem.seqlen_q, problem.seqlen_k, inputs.mask, bias, **_keywords(problem)
    )
    return _with_gradients(problem, inputs, leaves, out, lse)


def _check_exact_zeros(problem: Problem, inputs: Inputs, actual: list[Tensor]) -> None:
    """Assert that rows without a key, and keys without a query, are exactly 0 and not merely small."""
    out, _, dq, dk, dv = (tensor if tensor.ndim > 3 else tensor[None] for tensor in actual[:5])
    for part in inputs.parts:
        empty = ~part.keep.any(-1).transpose(1, 2)  # [B, Sq, H]
        assert not out[part.queries_4d][empty].any(), "out of a row with no visible key is not 0"
        assert not dq[part.queries_4d][empty].any(), "dq of a row with no visible key is not 0"
        unseen = ~part.keep.any(2).unflatten(1, (problem.heads_k, -1)).any(2).transpose(1, 2)  # [B, Sk, Hkv]
        assert not dk[part.keys_4d][unseen].any(), "dk of a key no query sees is not 0"
        assert not dv[part.keys_4d][unseen].any(), "dv of a key no query sees is not 0"


def shrink(problem: Problem, fails: Callable[[Problem], bool], attempts: int = 200) -> Problem:
    """Return a simpler problem that still fails: fields are set to their defaults and sizes halved while it does."""
    changed = True
    while changed:
        changed = False
        for candidate in _simpler(problem):
            attempts -= 1
            if attempts < 0:
                return problem
            if fails(candidate):
                problem, changed = candidate, True
                break
    return problem


def _simpler(problem: Problem) -> Iterator[Problem]:
    defaults = Problem()
    for field in fields(Problem):
        value, default = getattr(problem, field.name), getattr(defaults, field.name)
        if value != default and field.name not in ("seed", "seqlen_q", "seqlen_k", "heads", "heads_k", "dtype"):
            yield replace(problem, **{field.name: default})
    if problem.heads_k > 1:
        yield replace(problem, heads_k=1, heads=problem.heads // problem.heads_k)
    if problem.heads > problem.heads_k:
        yield replace(problem, heads=problem.heads_k)
    same = problem.variant == "qkvpacked" or problem.documents
    for size in ("seqlen_q", "seqlen_k"):
        half = getattr(problem, size) // 2
        if half >= 4:
            yield replace(problem, seqlen_q=half, seqlen_k=half) if same else replace(problem, **{size: half})


def refused(error: Exception) -> bool:
    """Return whether the library refused a call; a shrunk problem may be one that it rightly refuses."""
    return isinstance(error, (ValueError, TypeError, NotImplementedError))
