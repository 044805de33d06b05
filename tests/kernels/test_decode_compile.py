"""What the kernels of decoding compile to: usual calls spill no register, and a block fits into shared memory."""

from __future__ import annotations

import re

import pytest
import torch

from dmattn_ops.api.stand_in import Launch, compiled_launches
from dmattn_ops.call import NO_MASK, Call, Mask, Result, plain_options
from dmattn_ops.choice import arch, config
from dmattn_ops.kernels.decode import launch as decode
from dmattn_ops.kernels.kept import launch as kept
from dmattn_ops.masks.kept import Rule, Stored, Token

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
    assert spilled(made) == 0 or kind == "everything"  # a bias for each head beside hidden intervals and a soft cap
    assert made.compiled.metadata.shared <= arch.KNOWN[row.sm].shared_memory
    assert "mma.sync" in made.compiled.asm["ptx"]


@pytest.mark.parametrize("sm", [80, 90, 120])
@pytest.mark.parametrize("slots", [16, 2064, 20000])
def test_a_step_spills_nothing(slots: int, sm: int):
    of_batch = [torch.empty(1, dtype=torch.int64) for _ in range(4)]
    rows = [torch.empty(1, 2, slots, 128, dtype=torch.bfloat16) for _ in range(2)]
    stored = Stored(
        *rows, torch.empty(1, 2, slots), torch.empty(1, 2, 4, slots, dtype=torch.int64), *of_batch[:3],
        torch.empty(1, dtype=torch.int32), torch.empty(1, 4, slots), of_batch[3], torch.empty(1, 3, 2, dtype=torch.int64),
    )  # fmt: skip
    new = [torch.empty(1, 1, 2, 128, dtype=torch.bfloat16) for _ in range(2)]
    flags = torch.empty(1, 1, dtype=torch.bool), torch.empty(1, 1, dtype=torch.int64)
    token = Token(*new, torch.empty(1, 2, 1), torch.empty(1, 4, 1, 1), *flags)
    with compiled_launches(sm) as launches:
        kept.keep_step(stored, token, Rule(9, 1, 1, 2, False), torch.empty(1, 2, slots, dtype=torch.int32))
    [made] = launches
    assert made.kernel == "keep_step_kernel" and spilled(made) == 0
