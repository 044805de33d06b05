"""What the kernels of decoding compile to: usual calls spill no register, and a block fits into shared memory."""

from __future__ import annotations

import re

import pytest
import torch

from dmattn_ops.api.stand_in import Launch, compiled_launches
from dmattn_ops.call import NO_MASK, Call, Mask, Result, plain_options
from dmattn_ops.choice import arch, config
from dmattn_ops.kernels.decode import launch as decode
from dmattn_ops.kernels.kept import chunk_launch
from dmattn_ops.kernels.kept import launch as kept
from dmattn_ops.masks.kept import Appended, Rule, Stored, Token
from dmattn_ops.meta import keep_chunk_outputs
from tests.support.spills import bytes_at_most

KEYS = 1000


def spilled(compiled: Launch) -> int:
    """Return how many bytes ptxas says that it stored and loaded."""
    return sum(map(int, re.findall(r"(\d+) bytes spill", compiled.log)))


@pytest.mark.parametrize("kind", ["none", "intervals", "everything"])
@pytest.mark.parametrize("row", config.DECODE_FORWARD, ids=lambda row: row.name)
def test_one_query_fits_into_registers_and_shared_memory(row: config.Row, kind: str):
    query = torch.empty(40, 1, 32, row.dim, dtype=torch.bfloat16)
    key = torch.empty(40, KEYS, 8, row.dim, dtype=torch.bfloat16)
    mask, bias, options = NO_MASK, None, plain_options(0.1)
    if kind != "none":
        shown = [torch.empty(40, 8, KEYS, dtype=torch.int32) for _ in range(4)]
        mask = Mask(end=shown[0]) if kind == "intervals" else Mask(None, None, None, None, None, None, *shown)
    if kind == "everything":
        bias, options = torch.empty(40, 32, 1, KEYS), options._replace(softcap=30.0, band_lo=5)
    statistics = [torch.empty(40, 32, 1) for _ in range(3)]
    with compiled_launches(row.sm) as launches:
        call = Call(query, key, key, bias, mask, torch.empty(32), None, None, options)
        decode.forward(call, Result(torch.empty_like(query), *statistics), row.config)
    [made] = launches
    assert made.kernel == "decode_kernel"
    assert (
        spilled(made) <= bytes_at_most(0) or kind == "everything"
    )  # a bias for each head beside hidden intervals and a soft cap
    assert made.compiled.metadata.shared <= arch.KNOWN[row.sm].shared_memory
    assert "mma.sync" in made.compiled.asm["ptx"]


def cache_of(slots: int, dim: int = 128) -> Stored:
    """Return an uninitialised cache with a bias and documents."""
    of_batch = [torch.empty(1, dtype=torch.int64) for _ in range(4)]
    rows = [torch.empty(1, 2, slots, dim, dtype=torch.bfloat16) for _ in range(2)]
    return Stored(
        *rows, torch.empty(1, 2, slots), torch.empty(1, 2, 4, slots, dtype=torch.int64), *of_batch[:3],
        torch.empty(1, dtype=torch.int32), torch.empty(1, 4, slots), of_batch[3], torch.empty(1, 3, 2, dtype=torch.int64),
    )  # fmt: skip


@pytest.mark.parametrize("sm", [80, 90, 120])
@pytest.mark.parametrize("slots", [16, 2064, 20000])
def test_a_step_spills_nothing(slots: int, sm: int):
    new = [torch.empty(1, 1, 2, 128, dtype=torch.bfloat16) for _ in range(2)]
    flags = torch.empty(1, 1, dtype=torch.bool), torch.empty(1, 1, dtype=torch.int64)
    token = Token(*new, torch.empty(1, 2, 1), torch.empty(1, 4, 1, 1), *flags)
    with compiled_launches(sm) as launches:
        kept.keep_step(cache_of(slots), token, Rule(9, 1, 1, 2, False), torch.empty(1, 2, slots, dtype=torch.int32))
    [made] = launches
    assert made.kernel == "keep_step_kernel" and spilled(made) <= bytes_at_most(0)


@pytest.mark.parametrize("sm", [80, 90, 120])
@pytest.mark.parametrize(("dim", "bias"), [(128, False), (576, True)])
def test_a_chunk_spills_nothing_and_copies_sixteen_bytes_at_once(dim: int, bias: bool, sm: int):
    stored = cache_of(2064, dim)._replace(document=None, trail=None)
    new = [torch.empty(1, 8192, 2, dim, dtype=torch.bfloat16) for _ in range(2)]
    token = Token(*new, torch.empty(1, 2, 8192), torch.empty(1, 4, 1, 8192), None, None)
    if not bias:
        stored, token = stored._replace(bias=None), token._replace(bias=None)
    assert chunk_launch.takes(stored, token)
    *rows, biases = keep_chunk_outputs(stored.key, stored.value, stored.bias, 8192)
    with compiled_launches(sm) as launches:
        chunk_launch.keep_chunk(stored, token, Rule(9, 1, 1, 2, False), Appended(*rows, biases if bias else None))
    names = ["begin_chunk", "sort_runs", "sort_alive", "write_deaths", "end_chunk", "store_chunk"]
    assert [made.kernel for made in launches] == names
    for made in launches:
        assert spilled(made) == 0, made.kernel
        copies = made.kernel in ("begin_chunk", "store_chunk")
        assert not copies or "ld.global.v4" in made.compiled.asm["ptx"]
