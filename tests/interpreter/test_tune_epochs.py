"""Tuning the length of epochs with the kernels themselves: every length has to compute what the rule's own does."""

from __future__ import annotations

import sys

import pytest
import torch

import dmattn_ops
from dmattn_ops.call import Call, Gradients, Result, Saved, plain_options
from dmattn_ops.choice import arch, config, epochs
from dmattn_ops.dispatch import run
from dmattn_ops.tune import command
from dmattn_ops.tune import epochs as tune_epochs
from tests.interpreter.launchers import launcher_of

as_packed = sys.modules["dmattn_ops.api.explain"]._as_packed  # the package's name for it is the function

ON = arch.KNOWN[86]


@pytest.fixture(autouse=True)
def portable_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run calls on the CPU as SM 8.6 would."""
    for row in (
        config.AMPERE_FORWARD[0],
        config.AMPERE_BACKWARD[0],
    ):  # before dispatch looks for them, with Gluon's stand-in
        launcher_of(row.config)

    def forward(call: Call, result: Result) -> None:
        row = run.forward_choice(call, result, ON, tuned=False).row
        launcher_of(row.config).forward(run.with_start(call), result, row.config)

    def backward(call: Call, saved: Saved, grads: Gradients) -> None:
        row = run.backward_choice(call, saved, grads, ON, tuned=False).row
        launcher_of(row.config).backward(call, saved, grads, row.config)

    monkeypatch.setattr(run, "_run_forward", forward)
    monkeypatch.setattr(run, "_run_backward", backward)


@pytest.mark.parametrize("direction", command.DIRECTIONS)
def test_all_lengths_of_epochs_agree_and_the_fastest_is_taken(direction: str) -> None:
    shape = command.parse_shape("H2 Hkv1 S400 D16 float16 keep40")
    task = tune_epochs.prepare(direction, shape, torch.device("cpu"), ON)
    assert task is not None and task.own == 0
    result = tune_epochs.tune(task, lambda functions: {length: 1000.0 - length for length in functions})
    assert result.refused == {} and set(result.milliseconds) == {0, 256, 384, 512} and result.length == 512


@pytest.mark.parametrize("direction", command.DIRECTIONS)
def test_configurations_are_tuned_on_packed_keys(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "pays", lambda sizes: True)
    shape = command.parse_shape("H2 Hkv1 S300 D16 float16 keep40")
    task = command.prepare(direction, shape, torch.device("cpu"), ON)
    assert task is not None and task.call.mask.row_tiles is not None and task.case.masked
    assert task.shape.seqlen_k == 384 + 128 == task.call.key.shape[1]
    result = command.tune(task, 1, measure=lambda functions: {key: 10.0 - i for i, key in enumerate(functions)})
    assert [trial.refused for trial in result.trials] == [""] * len(result.trials)


@pytest.mark.parametrize("bias_heads", [None, 1, 2, 4])
@pytest.mark.parametrize("mask_heads", [1, 2, 4])
def test_explain_chooses_kernels_for_a_call_of_the_shapes_that_they_get(
    mask_heads: int, bias_heads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key = torch.randn(2, 300, 4, 16), torch.randn(2, 300, 2, 16)
    bias = None if bias_heads is None else torch.randn(1, bias_heads, 1, 300)
    mask = dmattn_ops.dynamic_mask(torch.randn(1, mask_heads, 300), 40)
    call = Call(query, key, key, bias, mask.mask, None, None, None, plain_options(1.0, *mask.band.limits(300, 300)))
    made = epochs.packing_for(call, 256)
    assert made is not None
    for packed in (made, made._replace(heads_per_pass=made.group)):
        shown, real = as_packed(call, packed), run.first_packed(call, packed)
        tensors = [
            [
                (part.shape, part.dtype)
                for part in (of.query, of.key, of.value, of.bias, *of.mask[:-1])
                if part is not None
            ]
            for of in (shown, real)
        ]
        assert tensors[0] == tensors[1]
        assert shown.mask.kind == real.mask.kind and shown.options == real.options
