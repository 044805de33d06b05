"""Gradients of dropout in graphs whose backward computes a part of the forward again: the seeds are drawn once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._functorch import config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dmattn_ops import flash_dmattn_func, flash_dmattn_qkvpacked_func, flash_dmattn_varlen_func
from dmattn_ops.ops import torch_privates

PARTITIONED = "aot_eager_decomp_partition"


def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return flash_dmattn_func(query.sin(), key.cos(), value, dropout_p=0.5)


def twice(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    again = flash_dmattn_func(query.sin(), key.cos(), value, dropout_p=0.5, is_causal=True)
    return dense(query, key, value) + again


def packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    offsets = torch.tensor([0, 40, 64], dtype=torch.int32)
    rows = (query.sin()[0], key.cos()[0], value[0])
    return flash_dmattn_varlen_func(*rows, offsets, offsets, 64, 64, dropout_p=0.5)


def in_one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return flash_dmattn_qkvpacked_func(torch.stack((query.sin(), key.cos(), value), dim=2), dropout_p=0.5)


def save(
    names: tuple[str, ...], context: object, operator: object, *arguments: object, **keywords: object
) -> CheckpointPolicy:
    saved = any(name in str(operator) for name in names)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(**keywords: object) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda query, key, value: checkpoint(dense, query, key, value, use_reentrant=False, **keywords)


def selective(*names: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return checkpointed(context_fn=partial(create_selective_checkpoint_contexts, partial(save, names)))


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "dense": dense,
    "twice": twice,
    "packed": packed,
    "in one": in_one,
    "checkpointed": checkpointed(),
    "checkpointed without the state": checkpointed(preserve_rng_state=False),
    "nothing saved": selective(),
    "seeds saved": selective("rand"),
}
# Beside a budget, torch 2.13 cannot save operators with several outputs by a policy.
OUTSIDE_OF_BUDGETS = {"attention saved": selective("dmattn.forward")}
SETTINGS: dict[str, dict[str, object]] = {
    "": {},
    "a tenth": {"activation_memory_budget": 0.1},
    "half": {"activation_memory_budget": 0.5},
    "aggressive": {"aggressive_recomputation": True},
}


def inputs() -> tuple[Tensor, ...]:
    return tuple(torch.randn(1, 64, 2, 16, requires_grad=True) for _ in range(3))


def check(function: Callable[..., Tensor], *given: Tensor) -> None:
    """Check that a function which is linear in its last argument has the gradient that this means."""
    out = function(*given)
    grad_out = torch.randn_like(out)
    *_, grad = torch.autograd.grad(out, given, grad_out)
    torch.testing.assert_close((grad * given[-1]).sum(), (grad_out * out).sum(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_the_weights_that_the_forward_kept(name: str, setting: str):
    torch._dynamo.reset()
    with config.patch(**SETTINGS[setting]):
        check(torch.compile(FUNCTIONS[name], fullgraph=True, backend=PARTITIONED), *inputs())


@pytest.mark.parametrize("name", OUTSIDE_OF_BUDGETS)
def test_gradients_under_a_policy_are_those_of_the_weights_that_the_forward_kept(name: str):
    torch._dynamo.reset()
    for function in (
        OUTSIDE_OF_BUDGETS[name],
        torch.compile(OUTSIDE_OF_BUDGETS[name], fullgraph=True, backend=PARTITIONED),
    ):
        check(function, *inputs())


@pytest.mark.parametrize("setting", ["a tenth", "aggressive"])
def test_gradients_of_inductor_are_those_of_the_weights_that_the_forward_kept(setting: str):
    torch._dynamo.reset()
    with config.patch(**SETTINGS[setting]):
        check(torch.compile(twice, fullgraph=True), *inputs())


def test_a_budget_that_saves_nothing_is_refused():
    torch._dynamo.reset()
    with config.patch(activation_memory_budget=0.0):
        compiled = torch.compile(dense, fullgraph=True, backend=PARTITIONED)
        with torch.no_grad():
            compiled(*inputs())
        with pytest.raises(Exception, match=r"seeds of dropout a second time in the backward.* a value above 0"):
            compiled(*inputs())


def test_a_torch_that_cannot_mark_nodes_refuses_every_budget(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(torch_privates, "_cannot_save", True)
    check(torch.compile(dense, fullgraph=True, backend=PARTITIONED), *inputs())
    for setting in ("half", "aggressive"):
        torch._dynamo.reset()
        with config.patch(**SETTINGS[setting]), pytest.raises(Exception, match="seeds of dropout a second time"):
            torch.compile(dense, fullgraph=True, backend=PARTITIONED)(*inputs())


def test_two_calls_with_one_query_draw_two_seeds():
    def difference(query: Tensor) -> Tensor:
        return flash_dmattn_func(query, query, query, dropout_p=0.5) - flash_dmattn_func(
            query, query, query, dropout_p=0.5
        )

    torch._dynamo.reset()
    query = inputs()[0].detach()
    for function in (difference, torch.compile(difference, fullgraph=True, backend=PARTITIONED)):
        assert function(query).abs().max() > 0
    for randomness, same in (("same", True), ("different", False)):
        torch._dynamo.reset()
        mapped = torch.vmap(lambda query: flash_dmattn_func(query, query, query, dropout_p=0.5), randomness=randomness)
        batch = query.expand(2, *query.shape)
        for function in (mapped, torch.compile(mapped, fullgraph=True, backend=PARTITIONED)):
            one, other = function(batch)
            assert torch.equal(one, other) is same
