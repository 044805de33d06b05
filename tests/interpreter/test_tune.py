"""Tuning with the kernels themselves: every candidate that is tried has to compute what the row's own does."""

from __future__ import annotations

import pytest
import torch

from dmattn_ops.choice import arch, config
from dmattn_ops.tune import command
from tests.interpreter.launchers import launcher_of


@pytest.mark.parametrize(("sm", "kernel"), [(86, "ampere"), (100, "portable")])
@pytest.mark.parametrize("direction", command.DIRECTIONS)
@pytest.mark.parametrize(
    "shape", ["H2 Hkv1 S80 D32 float16 causal", "S70 D16 float16 masked", "B2 S40 D16 float16 varlen"]
)
def test_candidates_agree_and_the_fastest_is_taken(direction: str, shape: str, sm: int, kernel: str) -> None:
    for row in (config.AMPERE_FORWARD[0], config.AMPERE_BACKWARD[0]):
        launcher_of(row.config)  # type: ignore[arg-type]
    task = command.prepare(direction, command.parse_shape(shape), torch.device("cpu"), arch.KNOWN[sm])
    assert task is not None and task.row.kernel == kernel
    result = command.tune(task, 2, measure=lambda functions: {key: 10.0 - i for i, key in enumerate(functions)})
    assert [trial.refused for trial in result.trials] == [""] * len(result.trials)
    assert result.config != task.row.config and result.ms < result.own_ms
