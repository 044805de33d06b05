"""`export_kernels` on a GPU: the library alone, in a process without the package, returns what Python does."""

import pytest
import torch

import dmattn_ops
from dmattn_ops.kernels import native
from tests.support.recorded_calls import Recorded, repeated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not native.available(), reason=f"THE LIBRARY IS NOT TESTED: {native.reason()}"),
]


def qkv(seqlen, heads, kv_heads, dim, dtype=torch.bfloat16, batch=2):
    shapes = [(batch, seqlen, number, dim) for number in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes]


def mask(*shape):
    return torch.rand(*shape, device="cuda") < 0.3


def scores(*shape):
    return torch.randn(*shape, device="cuda")


CALLS = {
    "dense": lambda: ((600, 4, 2, 128), {}),
    "causal": lambda: ((1000, 4, 4, 64), {"is_causal": True, "softcap": 20.0}),
    "float32": lambda: ((300, 4, 4, 64, torch.float32), {"is_causal": True}),
    "wide": lambda: ((500, 4, 2, 256), {"is_causal": True}),
    "words": lambda: ((1000, 4, 2, 128), {"mask": mask(2, 1, 1000, 1000)}),
    "intervals": lambda: ((1000, 4, 2, 128), {"mask": dmattn_ops.dynamic_mask(scores(2, 2, 1000), 100)}),
    "packed keys": lambda: ((4096, 4, 4, 64), {"mask": dmattn_ops.dynamic_mask(scores(2, 4, 4096), 64, keep_last=16)}),
    "bias of keys": lambda: ((1000, 4, 2, 128), {"bias": scores(1, 2, 1, 1000).requires_grad_(), "is_causal": True}),
    "sinks": lambda: ((1000, 4, 2, 128), {"sink": scores(4).requires_grad_(), "is_causal": True}),
    "tickets": lambda: ((4096, 8, 2, 128), {"is_causal": True}),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_library_alone_returns_the_same(name, tmp_path):
    def trained():
        torch.manual_seed(0)
        shape, more = CALLS[name]()
        dmattn_ops.flash_dmattn_func(*qkv(*shape), **more, deterministic=True).sin().sum().backward()

    with Recorded() as recorded:
        trained()
    names = [name for name, *_ in recorded.calls]
    assert names[-2:] == ["forward", "backward"]
    dmattn_ops.export_kernels(trained, tmp_path / "some.dmattn")
    said = repeated(recorded.calls, tmp_path, DMATTN_KERNELS=str(tmp_path / "some.dmattn"))
    assert said == [f"{len(names)} calls"]


LENGTHS = (64, 100, 127, 128, 129, 144, 256, 300, 512, 600, 1000, 1024, 2048, 4096, 4097)


def test_a_file_of_many_lengths_returns_the_same_at_each(tmp_path):
    def trained(seqlen):
        torch.manual_seed(seqlen)
        mask = dmattn_ops.dynamic_mask(scores(2, 2, seqlen), 50, keep_last=8)
        for more in ({"is_causal": True}, {"mask": mask}, {"is_causal": True, "window_size": (30, 0)}):
            parts = qkv(seqlen, 4, 2, 128)
            dmattn_ops.flash_dmattn_func(*parts, **more, deterministic=True).sin().sum().backward()

    with Recorded() as recorded:
        for seqlen in LENGTHS:
            trained(seqlen)
    dmattn_ops.export_kernels(trained, tmp_path / "some.dmattn", inputs=((seqlen,) for seqlen in LENGTHS))
    plans = (tmp_path / "some.dmattn").read_bytes().count(b"\nplan ")
    assert plans < len(recorded.calls) / 2
    said = repeated(recorded.calls, tmp_path, DMATTN_KERNELS=str(tmp_path / "some.dmattn"))
    assert said == [f"{len(recorded.calls)} calls"]


def test_packed_sequences_return_the_same(tmp_path):
    ends = torch.tensor([0, 300, 800, 1000], dtype=torch.int32, device="cuda")

    def trained():
        torch.manual_seed(0)
        packed = [part.detach()[0].requires_grad_() for part in qkv(1000, 4, 2, 128, batch=1)]
        out = dmattn_ops.flash_dmattn_varlen_func(*packed, ends, ends, 500, 500, is_causal=True, deterministic=True)
        out.sin().sum().backward()

    with Recorded() as recorded:
        trained()
    dmattn_ops.export_kernels(trained, tmp_path / "some.dmattn")
    said = repeated(recorded.calls, tmp_path, DMATTN_KERNELS=str(tmp_path / "some.dmattn"))
    assert said == ["2 calls"]
