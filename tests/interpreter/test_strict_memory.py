"""What the other tests here rely on: a kernel that touches what it must not fails its test."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from dmattn_ops.launching.recording import workspace

pytestmark = pytest.mark.usefixtures("strict_memory")


@triton.jit
def copy_kernel(source, target, count, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(target + at, tl.load(source + at, mask=at < count, other=0), mask=at < count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64])
def test_a_load_of_what_nobody_wrote_is_noticed(dtype: torch.dtype):
    like = torch.zeros(8, dtype=dtype)
    room, target = (workspace(like, 8, dtype=dtype) for _ in range(2))
    copy_kernel[(1,)](like, room, 5, SIZE=8)
    copy_kernel[(1,)](room, target, 5, SIZE=8)
    assert torch.equal(target[:5], like[:5])
    with pytest.raises(InterpreterError, match="copy_kernel reads what nobody wrote"):
        copy_kernel[(1,)](room, target, 6, SIZE=8)


@pytest.mark.parametrize("short", ["source", "target"])
def test_an_access_outside_of_a_tensor_is_noticed(short: str):
    sizes: dict[str, Any] = {"source": 8, "target": 8} | {short: 7}
    tensors = [torch.zeros(size) for size in sizes.values()]
    with pytest.raises(InterpreterError, match="copy_kernel touches memory outside of its tensors"):
        copy_kernel[(1,)](*tensors, 8, SIZE=8)
