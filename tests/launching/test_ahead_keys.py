"""What is compiled beforehand has the keys of what is launched: compared for calls of all kinds, without compiling anything."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from dmattn_ops.api import compiler
from dmattn_ops.api.stand_in import target_of
from dmattn_ops.call import UNBOUNDED
from dmattn_ops.choice import arch
from dmattn_ops.dispatch import operators, traced
from dmattn_ops.kernels.hopper.forward import launch as hopper_forward
from dmattn_ops.launching import ahead, launch
from tests.support import traced_calls
from tests.support.traced_calls import Sizes

OPS = torch.ops.dmattn
HALF = torch.bfloat16


def forward_and_backward(device, shape=(2, 384, 4, 64), kv_heads=4, bias=None, dtype=HALF, needs_dbias=False, **given):
    batch, seqlen, heads, dim = shape
    query, key, value = (
        torch.empty(batch, seqlen, own, dim, dtype=dtype, device=device) for own in (heads, kv_heads, kv_heads)
    )
    bias = None if bias is None else torch.empty(bias, dtype=dtype, device=device)
    out, lse, lse_tail, _ = OPS.forward(query, key, value, bias, **given)
    grad_out = torch.empty(out.shape, dtype=dtype, device=device)
    needs = {"needs_dbias": needs_dbias}
    OPS.backward(grad_out, None, query, key, value, out, lse, lse_tail, bias, **given, **needs)


def dense_mask(device):
    mask = torch.empty(2, 1, 384, 384, dtype=torch.bool, device=device)
    lists = OPS.pack_mask(mask, None, None, 384, -UNBOUNDED, 0)
    names = ("row_tiles", "col_tiles", "row_bits", "col_bits")
    forward_and_backward(device, band_hi=0, **dict(zip(names, lists, strict=True)))


def documents(device):
    ids = torch.empty(2, 384, dtype=torch.int32, device=device)
    keys = torch.empty(2, 1, 384, dtype=torch.int32, device=device)
    rows, columns = OPS.list_tiles(ids, keys, 384, -UNBOUNDED, 0)
    forward_and_backward(device, band_hi=0, row_tiles=rows, col_tiles=columns, q_segments=ids, k_segments=keys)


def variable_lengths(device):
    query = torch.empty(500, 4, 64, dtype=HALF, device=device)
    ends = torch.empty(3, dtype=torch.int32, device=device)
    numbers = {"max_seqlen_q": 300, "max_seqlen_k": 300, "band_hi": 0}
    nothing = (None,) * 4
    out, lse, lse_tail, _ = OPS.varlen_forward(query, query, query, ends, ends, *nothing, **numbers)
    grad_out = torch.empty(out.shape, dtype=HALF, device=device)
    OPS.varlen_backward(grad_out, None, query, query, query, out, lse, lse_tail, ends, ends, *nothing, **numbers)


def packed_qkv(device):
    qkv = torch.empty(2, 384, 3, 4, 64, dtype=HALF, device=device)
    out, lse, lse_tail, _ = OPS.qkvpacked_forward(qkv, band_hi=0)
    OPS.qkvpacked_backward(torch.empty(out.shape, dtype=HALF, device=device), None, qkv, out, lse, lse_tail, band_hi=0)


CALLS = {
    "dynamic mask, keys packed": lambda device: traced_calls.attention_step(Sizes(2, 4096, 4, 2, 64, 256), device),
    "dynamic mask, keys as they lie": lambda device: traced_calls.attention_step(Sizes(1, 256, 4, 2, 128, 64), device),
    "one batch entry, one head": lambda device: forward_and_backward(device, (1, 129, 1, 64), 1, band_hi=0),
    "causal": lambda device: forward_and_backward(device, band_hi=0),
    "window, grouped heads": lambda device: forward_and_backward(device, (1, 640, 8, 128), 2, band_lo=-100, band_hi=0),
    "odd head": lambda device: forward_and_backward(device, (2, 200, 3, 40), 3, band_hi=0),
    "wide head": lambda device: forward_and_backward(device, (1, 256, 2, 256), 2, dtype=torch.float16, band_hi=0),
    "float32": lambda device: forward_and_backward(device, (1, 256, 2, 64), 2, dtype=torch.float32),
    "bias, softcap": lambda device: forward_and_backward(
        device, (1, 256, 4, 64), 4, (1, 4, 256, 256), needs_dbias=True, band_hi=0, softcap=20.0
    ),
    "decoding": lambda device: OPS.forward(
        torch.empty(1, 1, 8, 128, dtype=HALF, device=device),
        *(torch.empty(1, 4096, 2, 128, dtype=HALF, device=device) for _ in range(2)),
    ),
    "dense mask": dense_mask,
    "documents": documents,
    "variable lengths": variable_lengths,
    "packed qkv": packed_qkv,
}


def key_of(kernel, arguments, named):
    """Return what Triton keeps a kernel under, but for its source."""
    _, _, _, _, binder = kernel.device_caches[driver.active.get_current_device()]
    _, specialization, options = binder(*arguments, **named)
    return kernel.__name__, str(specialization), str(sorted(options.items()))


@contextmanager
def private_state(monkeypatch) -> Iterator[None]:
    """Put back what the helper changes for good in its own process."""
    launch._compiled.clear()
    with monkeypatch.context() as patch:
        for place, names in (
            (arch, ("physical", "current", "name")), (operators, ("launch_on",)), (hopper_forward, ("raw_stream",)),
        ):  # fmt: skip
            for name in names:
                patch.setattr(place, name, getattr(place, name))
        yield
    launch._compiled.clear()


def keys_beforehand(calls, monkeypatch):
    """Return the keys of what the helper would compile for some calls."""
    with private_state(monkeypatch), target_of(calls[0].arch.sm):
        found = [kernel for call in calls for kernel in compiler.kernels_of(call)]
        assert found
        keys = []
        for kernel in found:
            named = {name: value for name, value in kernel.compile.keywords.items() if name not in ("grid", "warmup")}
            keys.append(key_of(kernel.compile.args[0], kernel.compile.args[1:], named))
        return keys


def keys_of_launches(make, sm, monkeypatch):
    """Return the keys of what is launched."""
    keys = []

    def keep(self, *arguments, grid, warmup, **named):
        keys.append(key_of(self, arguments, named))
        return compiler._Later()

    with private_state(monkeypatch), traced_calls.as_if_on_gpu(sm), target_of(sm):
        known = arch.KNOWN[sm]
        monkeypatch.setattr(arch, "physical", lambda device: known)
        monkeypatch.setattr(hopper_forward, "raw_stream", lambda device: 1)
        with monkeypatch.context() as patch:
            patch.setattr(JITFunction, "run", keep)
            make("cpu")
    return keys


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("sm", [80, 90, 120])
def test_a_call_has_the_same_kernels_beforehand_as_when_it_is_launched(name, sm, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("DMATTN_COMPILE_AHEAD", "1")
    monkeypatch.setattr(ahead, "submit", calls.append)
    monkeypatch.setattr(traced, "_seen", set())
    traced_calls.trace(CALLS[name], sm)
    beforehand = keys_beforehand(calls, monkeypatch)
    launched = keys_of_launches(CALLS[name], sm, monkeypatch)
    assert Counter(beforehand) == Counter(launched)


def test_tensors_without_memory_lie_as_described():
    tensor = torch.empty(4, 6, 8)[:, 1:, ::2]
    with compiler.WithoutMemory():
        made = compiler.without_memory(*traced.describe(tensor))
        assert (made.shape, made.stride(), made.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
        assert made.is_cuda and made.device == torch.device("cuda", 0) and made.get_device() == 0
        assert made.data_ptr() == 8 * 4
        for other in (made.contiguous(), made.new_empty(3), torch.zeros(2, device=made.device), made[0]):
            assert type(other) is compiler.OnGPU and other.is_meta
