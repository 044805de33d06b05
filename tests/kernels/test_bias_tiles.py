"""Which biases with queries the SM 9.0 forward takes in tiles, and what room it finds for them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dmattn_ops.call import NO_MASK, Call, Mask, Result, plain_options
from dmattn_ops.choice import arch, config, resolve

LIMIT = arch.KNOWN[90].shared_memory


@pytest.fixture(autouse=True)
def on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arch, "physical", lambda device: arch.KNOWN[90])


def resolved(dim: int, bias: Tensor | None, mask: Mask = NO_MASK) -> config.HopperForward:
    offered = next(row.config for row in config.FORWARD if row.kernel == "hopper" and row.dim >= dim)
    query = torch.empty(1, dtype=torch.bfloat16).expand(2, 512, 4, dim)
    call = Call(query, query, query, bias, mask, None, None, None, plain_options(0.1))
    return resolve.forward_config(offered, call, Result(query, None, None, None))


def bias_of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 128])
@pytest.mark.parametrize("shape", [(2, 4, 512, 512), (1, 4, 512, 512), (2, 1, 512, 512), (1, 1, 512, 512)])
def test_aligned_biases_of_16_bits_come_in_tiles(dim: int, shape: tuple[int, ...]) -> None:
    made = resolved(dim, bias_of(*shape))
    assert made.bias_tiles and made.block_m == 128
    assert made.query_stages == (1 if dim == 128 else 2)  # what shared memory has room for


def test_other_biases_are_read_from_memory() -> None:
    whole = bias_of(1, 4, 512, 520)
    for bias in (
        None,
        bias_of(1, 4, 1, 512),  # one value for each key
        bias_of(1, 4, 512, 512, dtype=torch.float32),
        bias_of(1, 4, 512, 508),  # rows of 1016 bytes
        whole[..., 1:513],  # begins at no multiple of 16 bytes
        bias_of(1, 1, 512, 512).expand(1, 4, 512, 512),  # a stride of 0
    ):
        assert not resolved(128, bias).bias_tiles
    assert resolved(128, whole[..., 8:]).bias_tiles
    assert not resolved(192, bias_of(1, 4, 512, 512)).bias_tiles  # no registers are left for it
    assert not resolved(256, bias_of(1, 4, 512, 512)).bias_tiles


def test_mask_words_of_wide_heads_leave_no_room_for_tiles_of_a_bias() -> None:
    bits = Mask(row_tiles=torch.empty(1, 1, 4, 8), row_bits=torch.empty(1, 1, 512, 16))
    for dim in (16, 32, 64):
        assert resolved(dim, bias_of(1, 4, 512, 512), bits).bias_tiles
    assert not resolved(128, bias_of(1, 4, 512, 512), bits).bias_tiles
    assert resolved(128, bias_of(1, 4, 512, 512), bits).query_stages == 2


def test_intervals_of_wide_heads_leave_no_registers_for_tiles_of_a_bias() -> None:
    ends = torch.empty(1, 1, 512, dtype=torch.int32)
    for dim in (32, 64, 96, 128):
        assert resolved(dim, bias_of(1, 4, 512, 512), Mask(start=ends, end=ends)).bias_tiles == (dim <= 64)


@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128])
def test_what_the_rows_say_of_shared_memory_is_enough(dim: int) -> None:
    row = next(row for row in config.FORWARD if row.kernel == "hopper" and row.dim >= dim)
    made = resolved(dim, bias_of(1, 4, 512, 512))
    keys = made.block_n
    tiles = 2 * (made.query_stages * 128 * dim + made.stages * keys * (2 * dim + 128))
    assert tiles <= row.shared_memory <= LIMIT // made.per_sm
