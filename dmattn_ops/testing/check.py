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
from dmattn_ops.api import arguments
from dmattn_ops.kernels import reference
from dmattn_ops.testing.inputs import (  # fmt: skip
    Inputs,
    Part,
    folds_band,
    hidden_bias,
    is_prepared,
    laid_out,
    make_inputs,
    make_varlen_inputs,
    poisoned,
    unseen_keys,
)
from dmattn_ops.testing.oracle import (
    SAMPLES,
    STATISTICS,
    attend,
    compare,
    masked_scores,
    rounded,
    rounding_loss,
    score_rounding,
)
from dmattn_ops.testing.problem import DTYPES, Problem

_KEPT = ("seed", "seqlen_q", "seqlen_k", "heads", "heads_k", "dtype", "instructions")  # while a problem is made simpler
Results = dict[str, Tensor]  # out, lse, row_max where it is asked for, and gradients: dq, dk, dv, dbias, dsink


def check(
    problem: Problem,
    device: str = "cpu",
    repeats: int = 1,
    run: Callable[[Callable[[], Results]], Results] | None = None,
    margins: dict[str, float] | None = None,
) -> bool:
    """Run one problem `repeats` times, with the instructions that this process uses.

    AssertionError where a result is over the error budget, or not exactly 0 where it must be.

    Return whether a gradient was over the budget, but by no more than the rounding errors of a sum whose terms cancel.

    `run` is given the function that computes the outputs and the gradients, and returns what it computed: a test that wants
    the call to happen inside a captured graph passes its own; without one, the problem says in which thread and stream. What that
    function itself does, such as preparing the mask, must not wait for the GPU. `margins` is given the largest error of each
    result over its budget, where it has no larger one already.
    """
    varlen = problem.variant == "varlen"
    make = make_varlen_inputs if varlen else make_inputs
    inputs = make(problem, device)
    given = poisoned(problem, make(problem, device)) if problem.poison else inputs
    dropout_keep = _dropout_keep(problem, inputs)
    expected = _definition(problem, inputs, torch.float64, dropout_keep)
    eager = _eager(problem, inputs, dropout_keep, expected)
    rounding = cache(partial(_rounding, problem, inputs, dropout_keep))
    others = cache(partial(_others, problem, inputs, dropout_keep))
    first: Results | None = None
    cancelled = False
    for _ in range(repeats):
        torch.manual_seed(problem.seed)
        call = partial(_varlen_results if varlen else _dense_results, problem, given)
        found = _placed(problem, device, call) if run is None else [run(call)]
        for actual in found:
            cancelled |= compare(problem, actual, expected, eager, rounding, others, margins)
            _check_exact_zeros(problem, inputs, actual)
            if problem.deterministic and first is not None:
                for name, one in first.items():
                    assert torch.equal(one, actual[name]), f"{name} changed between runs although deterministic=True"
            first = first or actual
    return cancelled


def _placed(problem: Problem, device: str, call: Callable[[], Results]) -> list[Results]:
    """Run a call in the threads and on the stream that the problem names; return the results of each."""
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
    """Return the elements that dropout keeps in the calls that follow `torch.manual_seed(problem.seed)`."""
    if not problem.dropout_p:
        return None
    torch.manual_seed(problem.seed)
    seed = arguments.dropout_seed(inputs.query, problem.batch if problem.variant == "varlen" else None)
    return reference.philox_keep(seed, problem.seqlen_q, problem.seqlen_k, problem.dropout_p)


def _leaves(inputs: Inputs, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return the inputs that have gradients, by the name of the gradient."""
    tensors = {"dq": inputs.query, "dk": inputs.key, "dv": inputs.value, "dbias": inputs.bias, "dsink": inputs.sink}
    return {
        name: (tensor if dtype is None else tensor.to(dtype)).detach().requires_grad_()
        for name, tensor in tensors.items()
        if tensor is not None
    }


def _parts(
    problem: Problem,
    inputs: Inputs,
    leaves: dict[str, Tensor],
    dropout_keep: Tensor | None,
    rounding: torch.Generator | None = None,
) -> Iterator[tuple[Part, Tensor, Tensor, Tensor | None]]:
    """Yield each sequence of a problem with its scores, its values and what dropout keeps of it.

    With `rounding`, scores are `rounded` to float32 after they are computed, and values are float32 too.
    """
    for part, bias in _biases(inputs, leaves):
        q, k, v = leaves["dq"][part.queries], leaves["dk"][part.keys], leaves["dv"][part.keys]
        dropped = None if dropout_keep is None else dropout_keep[part.batch, :, : q.shape[1], : k.shape[1]]
        score = masked_scores(q, k, part.keep, bias, problem)
        if rounding is not None:
            errors = score_rounding(q, k, part.keep, bias, problem)
            score, v = rounded(score, errors, problem, rounding), v.to(torch.float32)
        yield part, score, v, dropped


def _definition(
    problem: Problem,
    inputs: Inputs,
    dtype: torch.dtype,
    dropout_keep: Tensor | None,
    rounding: torch.Generator | None = None,
) -> Results:
    """Return the outputs and gradients of the definition evaluated in `dtype`, sequence by sequence.

    With `rounding`, scores are `rounded` to float32, and everything behind them is computed in float32.
    """
    leaves = _leaves(inputs, dtype)
    outs, lses, peaks = [], [], []
    dtype = dtype if rounding is None else torch.float32
    for part, score, value, dropped in _parts(problem, inputs, leaves, dropout_keep, rounding):
        out, lse, _ = attend(score, value, part.keep, problem, dropped, leaves.get("dsink"))
        outs.append(out)
        lses.append(lse)
        peaks.append(score.detach().amax(-1) if score.shape[-1] else lse.detach())
    out, lse = torch.cat(outs, inputs.joined[0]), torch.cat(lses, inputs.joined[1])
    loss = (out * inputs.grad_out.view_as(out).to(dtype)).sum()
    if problem.lse_grad:
        seen = lse.detach() > float("-inf")
        loss = loss + torch.where(seen, torch.where(seen, lse, 0) * inputs.grad_lse.view_as(lse).to(lse.dtype), 0).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    results = {"out": out.detach().view_as(inputs.grad_out), "lse": lse.detach().view_as(inputs.grad_lse)}
    if problem.maximum:
        results["row_max"] = torch.cat(peaks, inputs.joined[1]).view_as(inputs.grad_lse)
    return results | dict(zip(leaves, grads, strict=True))


def _eager(problem: Problem, inputs: Inputs, dropout_keep: Tensor | None, expected: Results) -> Results:
    """Compute with eager torch in the problem's dtype, or in float32 where scores are beyond the range of that dtype.

    Such scores make lse infinite or NaN where it is finite by definition, and then out as well, unless dropout drops every
    weight of those rows: out is 0 there, and only lse tells. The gradients of a row of scores near 1e9 are no better than
    these scores are in float32, to whole multiples of 64, whoever computes them: without an eager to compare with they would
    have to be as good as their rounding to the dtype of the output.
    """
    eager = _definition(problem, inputs, DTYPES[problem.dtype], dropout_keep)
    in_range = torch.equal(eager["lse"].isfinite(), expected["lse"].isfinite()) and eager["out"].isfinite().all()
    return eager if in_range else _definition(problem, inputs, torch.float32, dropout_keep)


def _others(problem: Problem, inputs: Inputs, dropout_keep: Tensor | None) -> list[Results]:
    """Return results that are as good as eager's: the definition in float32, and with scores whose sums are rounded in other ways.

    A probability is off by as much as its score, of which eager is one sample. Float32 holds scores of 1e9 as multiples of 64:
    which keys of such a row share its weight is decided by where a computation rounds. Nobody can do better, and eager in a
    narrower dtype, whose scores are all equal, may be nearer to the truth by chance.
    """
    if DTYPES[problem.dtype] == torch.float64:
        return []
    generator = torch.Generator(inputs.query.device).manual_seed(problem.seed)
    once = [_definition(problem, inputs, torch.float64, dropout_keep, generator) for _ in range(SAMPLES)]
    return [_definition(problem, inputs, torch.float32, dropout_keep), *once]


def _rounding(problem: Problem, inputs: Inputs, dropout_keep: Tensor | None) -> dict[str, float]:
    """Return the norms of what unavoidable rounding errors do to the gradients, to lse and to the row maximum."""
    leaves = _leaves(inputs, torch.float64)
    generator = torch.Generator(inputs.query.device).manual_seed(problem.seed)
    squares = dict.fromkeys(leaves, 0.0)
    for _ in range(SAMPLES):
        losses = [
            rounding_loss(
                score,
                value,
                inputs.grad_out[part.queries].to(torch.float64),
                part.keep,
                problem,
                dropped,
                leaves.get("dsink"),
                generator,
            )
            for part, score, value, dropped in _parts(problem, inputs, leaves, dropout_keep)
        ]
        gradients = torch.autograd.grad(sum(losses), list(leaves.values()), allow_unused=True, materialize_grads=True)  # type: ignore[arg-type]
        for name, gradient in zip(leaves, gradients, strict=True):
            squares[name] += gradient.square().sum().item()
    found = {name: math.sqrt(square / SAMPLES) for name, square in squares.items()}
    with torch.no_grad():
        of_rows = [
            score_rounding(leaves["dq"][part.queries], leaves["dk"][part.keys], part.keep, bias, problem)
            for part, bias in _biases(inputs, leaves)
        ]
    largest = (errors.amax(-1).norm().item() for errors in of_rows if errors.numel())
    return found | dict.fromkeys(STATISTICS[1:], math.hypot(*largest))


def _biases(inputs: Inputs, leaves: dict[str, Tensor]) -> Iterator[tuple[Part, Tensor | None]]:
    """Yield each sequence of a problem with its bias."""
    for part in inputs.parts:
        yield part, leaves["dbias"][part.bias] if "dbias" in leaves else None


def _keywords(problem: Problem) -> dict:
    return {
        "is_causal": problem.is_causal,
        "causal_from": problem.causal_from,
        "window_size": (problem.left, problem.right),
        "softmax_scale": problem.softmax_scale,
        "softcap": problem.softcap,
        "dropout_p": problem.dropout_p,
        "deterministic": problem.deterministic,
        "batch_invariant": problem.batch_invariant,
        "return_lse": True,
        "return_max": problem.maximum,
    }


def _with_gradients(
    problem: Problem, inputs: Inputs, leaves: dict[str, Tensor], outputs: tuple[Tensor, ...]
) -> Results:
    """Return outputs and gradients by name."""
    count = 2 if problem.lse_grad else 1
    given = (outputs[:count], list(leaves.values()), [inputs.grad_out, inputs.grad_lse][:count])
    if problem.place == "backward thread":
        with ThreadPoolExecutor(1) as pool:
            gradients = pool.submit(lambda: torch.autograd.grad(*given)).result()
    else:
        gradients = torch.autograd.grad(*given)
    results = {name: output.detach() for name, output in zip(STATISTICS, outputs, strict=False)}
    return results | dict(zip(leaves, gradients, strict=True))


def _compiled(problem: Problem, function: Callable) -> Callable:
    return torch.compile(function, fullgraph=True, dynamic=True) if problem.compiled else function


def _prepared(problem: Problem, inputs: Inputs, keywords: dict) -> Tensor | dmattn_ops.TileMask | None:
    """Return the mask that a call of a problem is given."""
    if not is_prepared(problem):
        return inputs.mask
    of_band = ("is_causal", "causal_from", "window_size")
    band = {name: keywords[name] for name in of_band} if folds_band(problem) else {}
    seqlen_q = None if problem.documents else problem.seqlen_q
    intervals: tuple[Tensor | None, ...] | None = tuple(inputs.intervals[:2]) or None
    if problem.intervals == "ends":
        intervals = (None, inputs.intervals[1])
    hidden = tuple(inputs.intervals[2:]) or None
    return dmattn_ops.prepare_mask(
        inputs.mask,
        documents=inputs.documents,
        intervals=intervals,  # type: ignore[arg-type]
        hidden=hidden,  # type: ignore[arg-type]
        at_most=inputs.at_most,
        seqlen_q=seqlen_q,
        **band,
    )


def _dense_results(problem: Problem, inputs: Inputs) -> Results:
    """Return results and gradients of `flash_dmattn_func` or `flash_dmattn_qkvpacked_func`."""
    leaves = _leaves(inputs, None)
    keywords = _keywords(problem)
    mask = _prepared(problem, inputs, keywords)
    function: Callable = dmattn_ops.flash_dmattn_func
    tensors = tuple(leaves[name] for name in ("dq", "dk", "dv"))
    if problem.variant == "qkvpacked":
        function = dmattn_ops.flash_dmattn_qkvpacked_func
        parts = torch.cat([tensor.detach() for tensor in tensors], 2)
        layout = problem.layout if problem.layout != "expanded" else "bshd"  # the parts are expanded already
        qkv = laid_out(parts, layout).unflatten(2, (3, problem.heads)).requires_grad_()
        tensors = (qkv,)
        leaves = {"dqkv": qkv} | {name: leaf for name, leaf in leaves.items() if name in ("dbias", "dsink")}
    keywords |= {"sink": leaves.get("dsink"), "seqlen_k_used": inputs.used}
    outputs = _compiled(problem, function)(*tensors, mask, leaves.get("dbias"), **keywords)
    results = _with_gradients(problem, inputs, leaves, outputs)
    if "dqkv" in results:
        results |= dict(zip(("dq", "dk", "dv"), results.pop("dqkv").unbind(2), strict=True))
    return results


def _varlen_results(problem: Problem, inputs: Inputs) -> Results:
    """Return results and gradients of `flash_dmattn_varlen_func`."""
    leaves = _leaves(inputs, None)
    function = _compiled(problem, dmattn_ops.flash_dmattn_varlen_func)
    assert inputs.offsets is not None
    lengths = (*inputs.offsets, problem.seqlen_q, problem.seqlen_k)
    tensors = [leaves[name] for name in ("dq", "dk", "dv")]
    keywords = {**_keywords(problem), "sink": leaves.get("dsink")}
    return _with_gradients(
        problem, inputs, leaves, function(*tensors, *lengths, inputs.mask, leaves.get("dbias"), **keywords)
    )


def _check_exact_zeros(problem: Problem, inputs: Inputs, actual: Results) -> None:
    """Assert that rows without a key, and keys without a query, are exactly 0 and not merely small."""
    found = (actual[name] for name in ("out", "dq", "dk", "dv"))
    out, dq, dk, dv = (tensor if tensor.ndim > 3 else tensor[None] for tensor in found)
    for part in inputs.parts:
        empty = ~part.keep.any(-1).transpose(1, 2)  # [B, Sq, H]
        assert not out[part.queries_4d][empty].any(), "out of a row with no visible key is not 0"
        assert not dq[part.queries_4d][empty].any(), "dq of a row with no visible key is not 0"
        unseen = unseen_keys(problem, part).transpose(1, 2)  # [B, Sk, Hkv]
        assert not dk[part.keys_4d][unseen].any(), "dk of a key no query sees is not 0"
        assert not dv[part.keys_4d][unseen].any(), "dv of a key no query sees is not 0"
    if inputs.bias is not None:
        assert not actual["dbias"][hidden_bias(problem, inputs, inputs.bias)].any(), (
            "dbias of what no query sees is not 0"
        )


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
        if value == default or field.name in _KEPT:
            continue
        if field.name == "bias_float32" and abs(problem.bias_value) > torch.finfo(DTYPES[problem.dtype]).max:
            continue  # the bias would be infinite: another problem, and no call is right
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
