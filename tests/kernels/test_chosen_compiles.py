"""The kernels that gather chosen blocks compile for each architecture, and fit into what it has."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from dmattn_ops.api.stand_in import Launch, compiled_launches
from dmattn_ops.call import NO_MASK, UNBOUNDED, Call, Chosen, Gradients, Result, Saved, plain_options
from dmattn_ops.choice import arch
from dmattn_ops.choice.chosen import largest_group
from dmattn_ops.kernels.chosen import launch

ATTENTION = ("forward_kernel", "queries_kernel", "keys_kernel")
SPILLED = 3072  # bytes at most: dq of 256 columns alone takes half of the registers


def call_of(block: int, dims: tuple[int, int], group: int, seqlen: int = 512) -> tuple[Call, Result, Gradients]:
    def rows(heads: int, dim: int) -> Tensor:
        return torch.empty(1, seqlen, heads, dim, dtype=torch.bfloat16)

    query, key, value, out = rows(2 * group, dims[0]), rows(2, dims[0]), rows(2, dims[1]), rows(2 * group, dims[1])
    chosen = Chosen(torch.zeros(1, 2, seqlen, 8, dtype=torch.int32), block)
    call = Call(query, key, value, None, NO_MASK, None, None, None, plain_options(0.1, -UNBOUNDED, 0), chosen=chosen)
    lse, tail = (torch.empty(1, 2 * group, seqlen) for _ in range(2))
    grads = Gradients(out, None, *(torch.empty_like(part) for part in (query, key, value)), None)
    return call, Result(out, lse, tail, None), grads


def compiled(sm: int, block: int, dims: tuple[int, int], group: int) -> list[Launch]:
    call, result, grads = call_of(block, dims, group)
    with compiled_launches(sm) as launches:
        launch.forward(call, result)
        launch.backward(call, Saved(*result[:3]), grads)
    return launches


@pytest.mark.sampled(7)
@pytest.mark.parametrize("sm", [86, 90, 100])
@pytest.mark.parametrize(
    ("block", "dims", "group"),
    [(64, (128, 128), 16), (4, (256, 256), 16), (1, (192, 128), 64), (24, (64, 64), 5), (128, (256, 256), 32)],
)
def test_the_kernels_fit_into_an_architecture(block: int, dims: tuple[int, int], group: int, sm: int):
    on = arch.KNOWN[sm]
    launches = compiled(sm, block, dims, min(group, largest_group(on)))
    names = {made.kernel for made in launches}
    assert names >= {"unions_kernel", "forward_kernel", "queries_kernel"}
    assert ("keys_kernel" in names) == (block >= 16)
    for made in launches:
        assert made.compiled.metadata.shared <= on.shared_memory, made.kernel
        if made.kernel in ATTENTION:
            spilled = re.findall(r"(\d+) bytes spill stores", made.log)
            assert all(int(count) <= SPILLED for count in spilled), made.kernel


def test_what_no_kernel_takes_is_said_in_words():
    call, _, _ = call_of(64, (128, 128), 16)
    assert launch.refusals(call, "forward") == launch.refusals(call, "backward") == []
    bias = torch.zeros(1, 1, 1, 512)
    options = call.options._replace(dropout_p=0.1, deterministic=True)
    query = torch.empty(1, 512, 4, 257)
    wrong = call._replace(query=query, bias=bias, options=options)
    said = "; ".join(launch.refusals(wrong, "backward"))
    for words in ("bias", "drop", "16-bit", "up to 256", "share a key head and a list", "not deterministic"):
        assert words in said
    assert "deterministic" not in "; ".join(launch.refusals(wrong, "forward"))
