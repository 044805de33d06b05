"""Calls as a compiler traces them on a GPU, with fake tensors, and the same calls as they are launched there.

No GPU is needed: kernels are compiled and not run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dmattn_ops.choice import arch
from dmattn_ops.dispatch import operators, run
from dmattn_ops.launching import ahead


class Sizes(NamedTuple):
    """What a training step of attention with a dynamic mask depends on."""

    batch: int
    seqlen: int
    heads: int
    kv_heads: int
    dim: int
    keep: int


def attention_step(sizes: Sizes, device: str) -> None:
    """Make a dynamic mask, attend, and compute the gradients, with the operators that a graph holds."""
    batch, seqlen, heads, kv_heads, dim, keep = sizes

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    query, key = empty(batch, seqlen, heads, dim), empty(batch, seqlen, kv_heads, dim)
    # a slice of a projection, and scores whose heads lie apart, as in `examples/model.py`
    value = torch.empty_strided(
        key.shape, (seqlen * 3 * kv_heads * dim, 3 * kv_heads * dim, dim, 1), dtype=key.dtype, device=device
    )
    scores = torch.empty_strided(
        (batch, kv_heads, seqlen), (kv_heads * seqlen, 1, kv_heads), dtype=torch.float32, device=device
    )
    bias = torch.empty_strided(
        (batch, kv_heads, 1, seqlen), (kv_heads * seqlen, 1, 1, kv_heads), dtype=torch.float32, device=device
    )
    _, end = torch.ops.dmattn.key_lifetimes(scores, None, keep)
    mask = {"end": end, "band_hi": 0, "at_most": keep}
    out, lse, lse_tail, _ = torch.ops.dmattn.forward(query, key, value, bias, **mask)
    torch.ops.dmattn.backward(
        empty(batch, seqlen, heads, dim), None, query, key, value, out, lse, lse_tail, bias, needs_dbias=True, **mask
    )


@contextmanager
def on_gpu(sm: int) -> Iterator[pytest.MonkeyPatch]:
    """Let the process believe that it has a GPU of an architecture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arch, "has_gpu", lambda: True)
        patch.setattr(arch, "physical", lambda device: arch.KNOWN[sm])
        patch.setattr(arch, "name", lambda device: f"a GPU of SM {sm}")
        yield patch


def trace(make: Callable[[str], Any], sm: int) -> None:
    """Make calls of operators, with tensors on a device that is given, as a compiler does that traces a graph for a GPU."""
    with on_gpu(sm), FakeTensorMode(shape_env=ShapeEnv()):
        make("cuda")


def launch(make: Callable[[str], Any], sm: int) -> list[str]:
    """Launch the same calls as on a GPU, with tensors on the CPU; return the names of the kernels, which do not run."""
    from dmattn_ops.api.stand_in import compiled_launches

    with as_if_on_gpu(sm), compiled_launches(sm) as launches:
        make("cpu")
        return [made.kernel for made in launches]


@contextmanager
def as_if_on_gpu(sm: int) -> Iterator[None]:
    """Let calls with tensors on the CPU go to the kernels of a GPU."""
    here, offered = arch.KNOWN[sm], run.offered
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "reads_values", lambda tensor: False)
        patch.setattr(run, "architecture_of", lambda call: here)
        patch.setattr(run, "offered", lambda direction, call, on=None, *rest: offered(direction, call, here, *rest))
        for name, module in (("lifetimes", "selection"), ("masks", "masks")):
            kernels = f"dmattn_ops.kernels.{module}.launch"
            patch.setattr(run, f"kernels_of_{name}", lambda device, kernels=kernels: run._launcher(kernels))
        yield


def wait_until_compiled(patience: float = 300.0) -> None:
    """Wait until the helper has done all that it was given."""
    helper, until = ahead._helper, time.monotonic() + patience
    assert helper is not None
    with helper.news:
        while helper.alive and (helper.calls or +helper.kernels):
            assert helper.news.wait(until - time.monotonic()), "the helper is stuck"
        assert helper.alive
