"""What the benchmark of dynamic masks times as packing, with the kernels themselves."""

from __future__ import annotations

import pytest
import torch

import bench_dynamic
import dmattn_ops
from dmattn_ops.choice import arch, epochs
from dmattn_ops.dispatch import run
from interval_peers import Attention


def test_packing_alone_runs_both_directions_and_no_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "architecture_of", lambda call: arch.KNOWN[86])
    query, key, value, grad_out = (torch.randn(1, 300, heads, 16) for heads in (2, 1, 1, 2))
    call = Attention(query, key, value, grad_out)
    mask = dmattn_ops.dynamic_mask(torch.randn(1, 1, 300), 40)
    assert bench_dynamic.packing_alone(call, mask) == {}  # too short to pay
    monkeypatch.setattr(epochs, "pays", lambda sizes: True)
    monkeypatch.setattr(run, "_run_forward", None)  # would be attention
    monkeypatch.setattr(run, "_run_backward", None)
    functions = bench_dynamic.packing_alone(call, mask)
    assert set(functions) == {"pack_forward", "pack_backward"}
    for function in functions.values():
        function()
