"""Packed attention as a whole, in the interpreter: the portable kernels on packed keys against the definition, in passes."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dmattn_ops import environment
from dmattn_ops.call import UNBOUNDED, Call, Gradients, Mask, Result, Saved, Takes, plain_options
from dmattn_ops.choice.epochs import Packing, epochs
from dmattn_ops.dispatch import run as dispatch
from dmattn_ops.kernels.epochs import attention
from dmattn_ops.kernels.epochs import launch as launch_packing
from dmattn_ops.kernels.portable import backward as portable_backward
from dmattn_ops.kernels.portable import forward as portable_forward
from dmattn_ops.launching import launch
from dmattn_ops.launching.recording import workspace
from tests.interpreter import oracle
from tests.interpreter.problems import BACKWARD, FORWARD
from tests.support.packing_cases import Case, lifetimes, visible_pairs

DIM = 16


@pytest.fixture
def strict_workspaces(strict_memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows of slots hold NaN: the portable backward loads those of blocks without keys, and uses nothing of them."""

    monkeypatch.setattr(launch_packing, "workspace", workspace_of_nan)


def workspace_of_nan(*arguments: Any, **named: Any) -> Tensor:
    """Return a workspace that holds NaN."""
    new = workspace(*arguments, **named)
    return new.fill_(math.nan) if new.is_floating_point() else new


def run_forward(call: Call, result: Result) -> None:
    portable_forward.forward(call, result, FORWARD)


def run_backward(call: Call, saved: Saved, grads: Gradients) -> None:
    portable_backward.backward(call, saved, grads, BACKWARD)


def packed(cut: Any, heads: int, key_heads: int, passes: int) -> Packing:
    return Packing(cut, heads, heads // key_heads, heads // passes)


def call_of(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, end: Tensor, band_hi: int = 0) -> Call:
    options = plain_options(DIM**-0.5, band_hi=band_hi)
    return Call(query, key, value, bias, Mask(end=end), None, None, None, options)


def nan_like(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, torch.nan)


def compute(call: Call, packing: Packing, grad_out: Tensor) -> dict[str, Tensor]:
    """Run both directions into outputs that hold NaN."""
    batch, seqlen, heads, _ = call.query.shape
    out, lse, lse_tail = nan_like(grad_out), *(torch.full((batch, heads, seqlen), torch.nan) for _ in range(2))
    attention.forward(call, Result(out, lse, lse_tail, None), packing, run_forward)
    dq, dk, dv = (nan_like(each) for each in (call.query, call.key, call.value))
    dbias = None if call.bias is None else nan_like(call.bias)
    saved, grads = Saved(out, lse, lse_tail), Gradients(grad_out, None, dq, dk, dv, dbias)
    attention.backward(call, saved, grads, packing, run_backward)
    found = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    return found if dbias is None else found | {"dbias": dbias}


def expected(call: Call, keep: Tensor, grad_out: Tensor) -> dict[str, Tensor]:
    """Return out, lse and the gradients by definition, float64."""
    given = {"dq": call.query, "dk": call.key, "dv": call.value}
    given |= {} if call.bias is None else {"dbias": call.bias}
    leaves = {name: tensor.detach().double().requires_grad_() for name, tensor in given.items()}
    out, lse, _ = oracle.attention(
        leaves["dq"], leaves["dk"], leaves["dv"], leaves.get("dbias"), keep, scale=DIM**-0.5, softcap=0.0, dropout_p=0.0
    )
    gradients = torch.autograd.grad(out, list(leaves.values()), grad_out.double())
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, gradients, strict=True))}


def draw(case: Case, heads: int, key_heads: int, batch: int, bias_heads: int) -> tuple[Call, Tensor, Tensor]:
    """Return a call under the mask of a case, what it keeps `[Bm, Hm, S, S]`, and a gradient of out."""
    torch.manual_seed(case.seqlen)
    start, end = lifetimes(case)
    query, key, value, grad_out = (
        torch.randn(batch, case.seqlen, own, DIM) for own in (heads, key_heads, key_heads, heads)
    )
    bias = torch.randn(1, bias_heads, 1, case.seqlen) if bias_heads else None
    return call_of(query, key, value, bias, end), visible_pairs(start, end, case.seqlen, (-UNBOUNDED, 0)), grad_out


def hide_unseen(call: Call, keep: Tensor, grad_out: Tensor) -> tuple[Call, Tensor]:
    """Put NaN and infinities into keys that nobody sees, and into queries that see none, with their grad_out."""
    batch, seqlen_q, heads, _ = call.query.shape
    seen = oracle.spread_heads(keep, heads, 1).expand(batch, heads, seqlen_q, -1)
    no_key = ~seen.any(3).transpose(1, 2)[..., None]
    no_query = ~seen.unflatten(1, (call.key.shape[2], -1)).any(3).any(2).transpose(1, 2)[..., None]
    bias = call.bias
    if bias is not None:
        of_bias = seen.unflatten(1, (bias.shape[1], -1)).any(2).any(2, keepdim=True).any(0, keepdim=True)
        bias = bias.masked_fill(~of_bias, math.nan)
    query, grad_out = call.query.masked_fill(no_key, math.inf), grad_out.masked_fill(no_key, math.nan)
    key, value = call.key.masked_fill(no_query, math.nan), call.value.masked_fill(no_query, -math.inf)
    return call._replace(query=query, key=key, value=value, bias=bias), grad_out


# heads, key heads, heads of the mask, batch of the mask, heads of the bias, passes
SHAPES = [(4, 2, 2, 2, 0, 1), (4, 2, 2, 1, 1, 2), (4, 2, 4, 2, 2, 2), (4, 2, 1, 1, 4, 2), (2, 2, 1, 2, 1, 1)]


@pytest.mark.parametrize(("heads", "key_heads", "mask_heads", "mask_batch", "bias_heads", "passes"), SHAPES)
def test_packed_calls_equal_the_definition(
    strict_workspaces, heads, key_heads, mask_heads, mask_batch, bias_heads, passes
):
    case = Case(200, 40, 128, mask_batch, mask_heads)
    call, keep, grad_out = draw(case, heads, key_heads, 2, bias_heads)
    cut = epochs(case.seqlen, case.seqlen, case.at_most, 0, case.length)
    packed_heads = key_heads if mask_heads in (1, key_heads) else heads
    hidden, grad_hidden = hide_unseen(call, keep, grad_out)
    found = compute(hidden, packed(cut, packed_heads, key_heads, passes), grad_hidden)
    for name, exact in expected(call, keep, grad_out).items():
        assert oracle.error(found[name], exact) < 3e-5, name


@pytest.mark.parametrize("seqlen", [1, 127, 128, 129])
@pytest.mark.parametrize("keep", [0, 1, 128, 500])
def test_packed_calls_of_few_queries_equal_the_definition(strict_workspaces, seqlen: int, keep: int):
    case = Case(seqlen, keep, 128)
    call, visible, grad_out = draw(case, 2, 2, 1, 0)
    cut = epochs(seqlen, seqlen, case.at_most, 0, case.length)
    hidden, grad_hidden = hide_unseen(call, visible, grad_out)
    found = compute(hidden, packed(cut, 2, 2, 1), grad_hidden)
    for name, exact in expected(call, visible, grad_out).items():
        torch.testing.assert_close(found[name].double(), exact, rtol=1e-4, atol=1e-5)


def test_keys_that_are_the_same_for_all_queries_are_packed_into_one_epoch(strict_workspaces):
    """A dynamic mask that is not causal: what it keeps takes the place of all keys."""
    torch.manual_seed(0)
    end = torch.where(torch.rand(1, 2, 260) < 0.2, 300, 0).to(torch.int32)
    query, key, value, grad_out = (
        torch.randn(1, length, own, DIM) for length, own in ((300, 4), (260, 2), (260, 2), (300, 4))
    )
    call, kept = call_of(query, key, value, None, end, band_hi=UNBOUNDED), int((end > 0).sum(-1).max())
    cut = epochs(300, 260, kept, 260, 384)
    assert cut.slots == 128
    visible = (end > 0)[:, :, None].expand(1, 2, 300, 260)
    hidden, grad_hidden = hide_unseen(call, visible, grad_out)
    found = compute(hidden, packed(cut, 2, 2, 1), grad_hidden)
    for name, exact in expected(call, visible, grad_out).items():
        assert oracle.error(found[name], exact) < 3e-5, name


def test_a_mask_that_shows_nothing_is_packed_into_a_block_that_no_list_names(strict_workspaces):
    """Queries 600 to 859 and keys 0 to 299 of a mask that keeps none: nothing is old, and nothing is born."""
    end = torch.zeros(1, 1, 300, dtype=torch.int32)
    query, key, value, grad_out = (torch.randn(1, length, 2, DIM) for length in (260, 300, 300, 260))
    call = call_of(query, key, value, None, end, band_hi=600)
    cut = epochs(260, 300, 0, 300, 384)
    assert cut.slots == 128
    seen = []

    def noted(part: Call, result: Result) -> None:
        seen.append(part.key.shape[1])
        run_forward(part, result)

    statistics = [torch.full((1, 2, 260), torch.nan) for _ in range(2)]
    attention.forward(call, Result(nan_like(query), *statistics, None), packed(cut, 2, 2, 1), noted)
    assert seen == [128]
    found = compute(call, packed(cut, 2, 2, 1), grad_out)
    assert found.pop("lse").isneginf().all()
    assert not any(tensor.any() for tensor in found.values())


def test_rows_of_a_broken_promise_are_nan_and_others_right(strict_workspaces):
    case = Case(500, 200, 128, 1, 2)
    call, keep, grad_out = draw(case, 2, 2, 1, 0)
    cut = epochs(500, 500, 60, 0, 128)
    found, exact = compute(call, packed(cut, 2, 2, 1), grad_out), expected(call, keep, grad_out)
    broken = (torch.arange(500) // 128 >= 2)[None].expand(2, -1)  # more than 128 keys are alive from query 256 on
    for part, dim in (("out", 2), ("dq", 2)):
        rows, right = (tensor[part][0].transpose(0, 1) for tensor in (found, exact))
        assert rows[broken].isnan().all() and oracle.error(rows[~broken], right[~broken]) < 3e-5, (part, dim)
    assert found["lse"][0][broken].isnan().all()


def workspaces_alive(monkeypatch: pytest.MonkeyPatch, run: Callable[[], None]) -> tuple[int, int]:
    """Return the most bytes of workspaces that lived at a time, and those of all together."""
    alive: dict[int, tuple[weakref.ref[Tensor], int]] = {}
    counts = {"most": 0, "all": 0}

    def noted(made: Tensor) -> Tensor:
        counts["all"] += made.nbytes
        alive[counts["all"]] = weakref.ref(made), made.nbytes
        living = sum(size for reference, size in alive.values() if reference() is not None)
        counts["most"] = max(counts["most"], living)
        return made

    for module in (attention, attention.gather_rows.__globals__):
        names = module if isinstance(module, dict) else vars(module)
        plain = names["workspace"]
        monkeypatch.setitem(names, "workspace", lambda *given, plain=plain, **named: noted(plain(*given, **named)))
    gc.disable()  # what goes has to go without it
    try:
        run()
    finally:
        gc.enable()
    return counts["most"], counts["all"]


@pytest.mark.parametrize("recorded", [False, True])
def test_passes_do_not_keep_the_workspaces_of_those_before(monkeypatch: pytest.MonkeyPatch, recorded: bool):
    """Also while a plan would be recorded, which happens at the second call of a signature."""
    case = Case(300, 40, 128, 1, 4)
    call, _, grad_out = draw(case, 4, 4, 1, 4)
    packing = packed(epochs(300, 300, case.at_most, 0, 128), 4, 4, 4)
    saved = Saved(grad_out, *(torch.randn(1, 4, 300) for _ in range(2)))
    result = Result(*(nan_like(each) for each in saved), None)
    assert call.bias is not None
    grads = Gradients(grad_out, None, *(nan_like(each) for each in (call.query, call.key, call.value, call.bias)))
    inputs = [call.query, call.key, call.value, call.bias, call.mask.end]

    def forward() -> None:
        attention.forward(call, result, packing, lambda part, result: None)

    def backward() -> None:
        attention.backward(call, saved, grads, packing, lambda part, saved, grads: None)

    for run in (forward, backward):
        if recorded:
            with launch.recording(inputs) as made:
                most, together = workspaces_alive(monkeypatch, run)
            assert made.plan((), 0) is None
        else:
            most, together = workspaces_alive(monkeypatch, run)
        assert together / 8 < most < 1.25 * together / 4
        monkeypatch.undo()


def test_whole_calls_go_to_the_kernels_as_they_are():
    """A plan finds addresses by tensors: of views of one projection it could not tell which one a further view is of."""
    case = Case(300, 40, 128, 1, 2)
    call, _, grad_out = draw(case, 4, 2, 1, 0)
    packing = packed(epochs(300, 300, case.at_most, 0, 128), 2, 2, 1)
    result = Result(nan_like(grad_out), *(torch.full((1, 4, 300), torch.nan) for _ in range(2)), None)
    saved, seen = Saved(*result[:3]), []
    grads = Gradients(grad_out, result.lse, *(nan_like(each) for each in (call.query, call.key, call.value)), None)
    attention.forward(call, result, packing, lambda part, result: seen.extend([part.query, *result[:3]]))
    attention.backward(
        call, saved, grads, packing, lambda part, saved, grads: seen.extend([part.query, *saved, *grads[:3]])
    )
    whole = [call.query, *result[:3], call.query, *saved, *grads[:3]]
    assert len(seen) == len(whole) and all(one is other for one, other in zip(seen, whole, strict=True))


def test_a_packed_backward_tells_one_line_with_the_lengths_of_the_call(monkeypatch: pytest.MonkeyPatch):
    case = Case(300, 40, 128, 1, 2)
    call, _, grad_out = draw(case, 2, 2, 1, 0)
    packing = packed(epochs(300, 300, case.at_most, 0, 128), 2, 2, 2)
    saved = Saved(grad_out, *(torch.randn(1, 2, 300) for _ in range(2)))
    grads = Gradients(grad_out, None, *(nan_like(each) for each in (call.query, call.key, call.value)), None)
    lines: list[str] = []
    monkeypatch.setenv(environment.PROFILE, "1")
    monkeypatch.setattr(environment, "tell", lines.append)
    monkeypatch.setattr(dispatch, "packing_of", lambda *given: (packing, []))
    launcher, silent = (
        dispatch._launcher,
        SimpleNamespace(backward=lambda *given: None, TAKES=Takes(("none", "intervals"))),
    )
    monkeypatch.setattr(dispatch, "_launcher", lambda module: launcher(module) if "epochs" in module else silent)
    dispatch.backward(call, saved, grads)
    (line,) = lines
    assert "SeqQ=300, SeqK=300, Batch=1, Choice=CPU_" in line
