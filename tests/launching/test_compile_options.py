"""Kernels are compiled the same whatever environment variables say, and without warnings of Triton's."""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl

from dmattn_ops.api.stand_in import compiled_launches
from dmattn_ops.launching import launch


def new_kernel() -> triton.JITFunction:
    """Return a kernel that was never compiled in this process."""

    @triton.jit
    def multiply_and_add(x, y):
        tl.store(y, tl.load(x) * 3.25 + tl.load(y))

    return multiply_and_add


@pytest.mark.parametrize("said", [None, "0", "1"])
def test_products_and_sums_are_one_instruction(monkeypatch: pytest.MonkeyPatch, said: str | None) -> None:
    """Triton 3.9 warns where this is not said, and 3.10 makes two of them by default."""
    monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION", raising=False)
    if said is not None:
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", said)
    monkeypatch.setattr(launch, "_compiled", {})
    with compiled_launches(90) as launches, warnings.catch_warnings():
        warnings.simplefilter("error")
        launch.launch(new_kernel(), (1,), torch.zeros(4), torch.zeros(4))
    (one,) = launches
    assert one.compiled.metadata.enable_fp_fusion
    assert "fma.rn" in one.compiled.asm["ptx"]
