"""Packed query, key and value: no copies, and one gradient buffer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import dmattn_ops
from dmattn_ops.kernels import native


def allocated(call: Callable[[], Any]) -> tuple[list[int], Any]:
    """Return the sizes in bytes of what a call allocates on the CPU, and its result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    events = profiler.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0], result


@pytest.mark.skipif(not native.available(), reason="counts the allocations of the C++ kernels: " + native.reason())
def test_packed_inputs_are_not_copied_and_have_one_gradient():
    packed = torch.randn(2, 1024, 3, 4, 64, requires_grad=True)
    part, statistics = packed.numel() // 3 * 4, 2 * 4 * 1024 * 4
    forward, out = allocated(lambda: dmattn_ops.flash_dmattn_qkvpacked_func(packed, is_causal=True))
    assert forward == [part, statistics, statistics]  # out, lse and lse_tail
    grad = torch.randn_like(out)
    backward, (gradient,) = allocated(lambda: torch.autograd.grad(out, packed, grad))
    assert backward == [3 * part]
    assert gradient.is_contiguous() and gradient.shape == packed.shape


def test_the_packed_gradient_is_that_of_its_parts():
    packed = torch.randn(2, 130, 3, 4, 24, requires_grad=True)
    parts = [part.detach().clone().requires_grad_() for part in packed.unbind(2)]
    mask, bias = torch.rand(2, 1, 130, 130) < 0.7, torch.randn(1, 4, 130, 130)
    keywords = {"is_causal": True, "softcap": 8.0}
    together = dmattn_ops.flash_dmattn_qkvpacked_func(packed, mask, bias, **keywords)
    apart = dmattn_ops.flash_dmattn_func(*parts, mask, bias, **keywords)
    assert torch.equal(together, apart)
    (gradient,) = torch.autograd.grad(together.square().sum(), packed)
    torch.testing.assert_close(gradient.unbind(2), torch.autograd.grad(apart.square().sum(), parts))


def launched_for(kernel: str, direction: str, sm: int, lengths: list[int], bound: int, monkeypatch: pytest.MonkeyPatch):
    """Return the grids of a packed call with `bound` as both bounds of lengths, and the sizes of what it allocates."""
    from triton.runtime.jit import JITFunction

    from dmattn_ops.api.stand_in import target_of
    from dmattn_ops.choice import arch, config
    from dmattn_ops.launching import launch
    from tests.tools import configurations

    rows = {"forward": config.FORWARD, "backward": config.BACKWARD}[direction]
    row = next(row for row in configurations.reachable(rows, sm) if row.kernel == kernel and row.itemsize == 2)
    unit = configurations.Unit(direction, row, row.dim, replace(configurations.VARLEN, bias="key bias"))
    offsets, total = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int(), sum(lengths)
    made, grids, sizes = configurations.make_call, [], []

    def packed(*arguments):
        call = made(*arguments)
        query, key, value = (
            tensor[:1].expand(total, -1, -1).contiguous() for tensor in (call.query, call.key, call.value)
        )
        bias = call.bias[:, :1].expand(-1, total).contiguous()
        varlen = call.varlen._replace(
            cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=bound, max_seqlen_k=bound
        )
        return call._replace(query=query, key=key, value=value, bias=bias, varlen=varlen)

    class Compiled:
        def __getitem__(self, grid):
            return lambda *arguments, **named: grids.append(("again", grid))

    def run(self, *arguments, grid, warmup, **named):
        grids.append((self.__name__, grid))
        return Compiled()

    new_empty = torch.Tensor.new_empty

    def allocate(like, *size, **named):
        tensor = new_empty(like, *size, **named)
        sizes.append(tensor.numel())
        return tensor

    with monkeypatch.context() as patched, target_of(sm):
        patched.setattr(configurations, "make_call", packed)
        patched.setattr(JITFunction, "run", run)
        patched.setattr(launch, "_compiled", {})
        patched.setattr(arch, "physical", lambda device: arch.KNOWN[sm])
        patched.setattr(torch.Tensor, "new_empty", allocate)
        if kernel == "hopper" and direction == "forward":
            patched.setattr(unit.launcher, "raw_stream", lambda device: 0)
            patched.setattr(unit.launcher, "_counters", {})
            patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        configurations.launch(unit)
    return grids, sizes


@pytest.mark.parametrize(
    ("kernel", "sm", "direction"),
    [
        ("portable", 80, "forward"),
        ("portable", 80, "backward"),
        ("hopper", 90, "forward"),
        ("hopper", 90, "backward"),
        ("hopper256", 90, "backward"),
    ],
)
def test_what_packed_sequences_take_does_not_grow_with_the_bounds_of_their_lengths(kernel, sm, direction, monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    lengths = [2] * 500 + [130]
    first = launched_for(kernel, direction, sm, lengths, 130, monkeypatch)
    assert first[0]
    for bound in (4096, 1 << 20, 1 << 40):
        assert launched_for(kernel, direction, sm, lengths, bound, monkeypatch) == first
    heads = 24
    blocks = (
        sum(lengths) // 16 + len(lengths) + 2
    )  # of the shortest blocks that there are; rows may lie around sequences
    if kernel == "hopper256":  # statistics are made by 64 of the rows of whole tiles of 128
        blocks *= 2
    assert all(grid[0] <= blocks * heads for _, grid in first[0])
