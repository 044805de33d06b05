"""Calls on packed keys in the interpreter: those that read keys by their numbers are the same as those on copies."""

from __future__ import annotations

import pytest
import torch

from dmattn_ops.call import HEADER, TILE, UNBOUNDED, Call, Mask, Result, plain_options
from dmattn_ops.choice import epochs
from dmattn_ops.kernels.epochs import attention
from dmattn_ops.kernels.hopper.arguments import takes_slots
from tests.support.packing_cases import CASES, check_order, lifetimes

pytestmark = pytest.mark.usefixtures("strict_memory")
CASE = CASES[1]  # 777 keys, two batch entries, three heads


def made(call: Call, packing: epochs.Packing, numbered: bool) -> list[Call]:
    """Return the calls that the kernels of a forward get."""
    batch, seqlen, heads, dim = call.query.shape
    rows = torch.zeros(batch, heads, seqlen)
    result, found = Result(torch.zeros(batch, seqlen, heads, dim), rows, rows.clone(), None), []
    attention.forward(call, result, packing, lambda packed, _: found.append(packed), lambda _: numbered)
    return found


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("biased", [True, False])
def test_numbers_lists_and_bias_are_those_of_copies(biased: bool, at_once: int):
    start, end = lifetimes(CASE)
    batch, heads, seqlen = end.shape
    query = torch.randn(batch, seqlen, 2 * heads, 8)
    key, value = torch.randn(2, batch, seqlen, heads, 8)
    bias = torch.randn(batch, heads, 1, seqlen) if biased else None
    mask = Mask(start=start.expand(batch, heads, -1), end=end, at_most=CASE.at_most)
    call = Call(query, key, value, bias, mask, None, None, None, plain_options(0.3, -UNBOUNDED, 0))
    packing = epochs.packing_for(call, CASE.length)
    assert packing is not None
    packing = packing._replace(heads_per_pass=at_once)
    numbered, copied = made(call, packing, True), made(call, packing, False)
    assert len(numbered) == len(copied) == heads // at_once
    for number, (own, other) in enumerate(zip(numbered, copied, strict=True)):
        part = slice(number * at_once, (number + 1) * at_once)
        assert own.slots is not None and other.slots is None
        assert own.sizes == other.sizes
        assert own.key.data_ptr() == key[:, :, part].data_ptr(), "nothing is copied"
        compare(own, other)


def compare(own: Call, other: Call) -> None:
    """Assert that the rows that numbers name are those of the copies, wherever a list names their block."""
    assert own.slots is not None and own.mask.row_tiles is not None and own.mask.col_tiles is not None
    assert other.mask.row_tiles is not None
    for b, h in [(b, h) for b in range(own.slots.shape[0]) for h in range(own.slots.shape[1])]:
        check_order(own.mask.row_tiles[b, h])
        check_order(own.mask.col_tiles[b, h])
        records = own.mask.row_tiles[b, h].tolist(), other.mask.row_tiles[b, h].tolist()
        for one, copy in zip(*records, strict=True):
            length = HEADER + one[1] + one[2]
            assert one[:length] == copy[:length]
            for block in one[HEADER:length]:
                slot = slice(block * TILE, (block + 1) * TILE)
                numbers = own.slots[b, h, slot].long()
                used = (numbers >= 0)[:, None]
                for rows, copies in ((own.key, other.key), (own.value, other.value)):
                    assert torch.equal(rows[b, numbers.clamp(min=0), h] * used, copies[b, slot, h])
                if own.bias is not None and other.bias is not None:
                    assert torch.equal(own.bias[b, h, 0, slot] * used[:, 0], other.bias[b, h, 0, slot] * used[:, 0])


@pytest.mark.parametrize(
    ("dims", "taken"), [((64, 64), True), ((128, 128), True), ((64, 128), False), ((96, 96), False)]
)
def test_rows_of_one_tile_are_read_by_number(dims: tuple[int, int], taken: bool):
    query, value = (torch.empty(1, 2, 1, dim) for dim in dims)
    call = Call(query, query, value, None, Mask(), None, None, None, plain_options(1.0))
    assert takes_slots(call) == taken
