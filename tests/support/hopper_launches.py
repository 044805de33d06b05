"""Calls of the public functions as an H200 would compute them, with tensors on the CPU and nothing launched."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dmattn_ops.api.stand_in import compiled_launches
from dmattn_ops.choice import arch
from dmattn_ops.dispatch import operators, run
from dmattn_ops.launching import plan, plans


@contextmanager
def pretended_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Give what calls launch: tensors on the CPU are taken for tensors of an H200, and plans are made for them."""
    forward = run.launcher("forward", "hopper")
    here, offered = arch.KNOWN[90], run.offered
    monkeypatch.setattr(plans, "may_repeat", lambda tensor: True)
    monkeypatch.setattr(plans, "enter_thread", lambda: None)
    monkeypatch.setattr(plans, "_plans", {})
    monkeypatch.setattr(plans, "_repeats", {})
    monkeypatch.setattr(plans, "_seen", {})
    monkeypatch.setattr(plan, "_current_device", lambda: -1)  # what a CPU tensor says
    monkeypatch.setattr(plan, "raw_stream", lambda device: 0)
    monkeypatch.setattr(plan, "allocate", lambda *layout: torch.empty_strided(*layout[:2], dtype=layout[2]))
    monkeypatch.setattr(forward, "raw_stream", lambda device: 0)
    monkeypatch.setattr(forward, "_counters", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(operators, "reads_values", lambda tensor: False)
    monkeypatch.setattr(run, "architecture_of", lambda call: here)
    monkeypatch.setattr(run, "offered", lambda direction, call, on=None, *rest: offered(direction, call, here, *rest))
    monkeypatch.setattr(run, "kernels_of_masks", lambda device: run._launcher("dmattn_ops.kernels.masks.launch"))
    with compiled_launches(90) as made:
        yield made
