"""Copies and sums of packed keys in the interpreter, and attention on them, against the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dmattn_ops.call import TILE, UNBOUNDED
from dmattn_ops.choice.epochs import epochs
from dmattn_ops.kernels.epochs import launch
from dmattn_ops.kernels.epochs.launch import Slots
from tests.support.packing_cases import (
    Case,
    lifetimes,
    lists,
    named_blocks,
    plan,
    sparse_mask,
    visible_pairs,
)

pytestmark = pytest.mark.usefixtures("strict_memory")


def random_rows(*shape: int, dtype: torch.dtype = torch.float32, layout: str = "contiguous") -> Tensor:
    """Draw rows `[B, S, heads, D]`."""
    batch, seqlen, heads, width = shape
    if layout == "transposed":
        return torch.randn(batch, heads, seqlen, width).to(dtype).transpose(1, 2)
    if layout == "offset":
        return torch.randn(batch, seqlen, heads, width + 3).to(dtype)[..., 1 : width + 1]
    return torch.randn(shape).to(dtype)


ROWS = (
    # mask heads, heads, key heads, width, dtype, layout
    (1, 4, 2, 16, torch.float16, "contiguous"),
    (2, 4, 2, 40, torch.bfloat16, "transposed"),
    (4, 4, 2, 5, torch.float32, "offset"),
    (2, 2, 2, 256, torch.float32, "contiguous"),
    (2, 6, 2, 1, torch.bfloat16, "transposed"),
)


@pytest.mark.parametrize(("mask_heads", "heads", "kv_heads", "width", "dtype", "layout"), ROWS)
@pytest.mark.parametrize("mask_batch", [1, 2])
def test_rows_are_gathered_as_index_select_does(mask_batch, mask_heads, heads, kv_heads, width, dtype, layout):
    _, _, slots, cut = sparse_mask(mask_heads, mask_batch)
    packed_heads = heads if mask_heads == heads else kv_heads
    group = packed_heads // kv_heads
    rows = random_rows(2, 600, kv_heads, width, dtype=dtype, layout=layout)
    (packed,) = launch.gather_rows((rows,), slots, packed_heads, 0, group)
    assert packed.shape == (2, cut.slots, packed_heads, width) and packed.dtype == dtype
    for b, h in np.ndindex(2, packed_heads):
        matrix = (b % mask_batch, h % mask_heads)
        keys, named = slots.keys[matrix], named_blocks(slots)[matrix]
        expected = rows[b, :, h // group].index_select(0, keys.clamp(min=0).long()) * (keys >= 0)[:, None]
        assert torch.equal(packed[b, named, h], expected[named])
        assert packed[b, ~named, h].isnan().all() and not named.all()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("mask_heads", "heads", "kv_heads", "width", "dtype", "layout"), ROWS)
@pytest.mark.parametrize("mask_batch", [1, 2])
def test_slots_are_summed_in_float32_and_rounded_once(mask_batch, mask_heads, heads, kv_heads, width, dtype, layout):
    _, end, slots, cut = sparse_mask(mask_heads, mask_batch)
    packed_heads = heads if mask_heads == heads else kv_heads
    group = packed_heads // kv_heads
    packed = random_rows(2, cut.slots, packed_heads, width)
    named = named_blocks(slots).expand(2, packed_heads, -1).transpose(1, 2)
    packed[~named] = float("nan")
    sums = random_rows(2, 600, kv_heads, width, dtype=dtype, layout=layout).fill_(float("nan"))
    launch.sum_rows((packed,), slots, (sums,), 0, group)
    expected = torch.zeros(2, 600, kv_heads, width, dtype=torch.float64)
    in_order = torch.zeros(2, 600, kv_heads, width)
    for b, h in np.ndindex(2, packed_heads):
        keys = slots.keys[b % mask_batch, h % mask_heads].long()
        live = keys >= 0
        expected[b, :, h // group].index_add_(0, keys[live], packed[b, live, h].double())
        for slot in live.nonzero().flatten().tolist():
            in_order[b, keys[slot], h // group] += packed[b, slot, h]
    if dtype == torch.bfloat16:  # the interpreter cuts off where a GPU rounds
        torch.testing.assert_close(sums, in_order.to(dtype), rtol=2**-7, atol=0)
    else:
        assert torch.equal(sums, in_order.to(dtype))
    torch.testing.assert_close(in_order.double(), expected, rtol=1e-5, atol=1e-5)
    unseen = (end <= torch.arange(600)).expand(2, packed_heads, -1).unflatten(1, (kv_heads, group)).all(2)
    assert unseen.any() and (sums.transpose(1, 2)[unseen] == 0).all()


def test_ranges_of_heads_give_what_all_heads_give():
    start, end, slots, _ = sparse_mask(4)
    cut = epochs(600, 600, 60, 0, 256)
    rows, sums, parts = (
        random_rows(2, 600, 2, 16),
        torch.full((2, 600, 2, 16), torch.nan),
        torch.full((2, 600, 2, 16), torch.nan),
    )
    (whole,) = launch.gather_rows((rows,), slots, 4, 0, 2)
    launch.sum_rows((whole,), slots, (sums,), 0, 2)
    for first in (0, 2):
        part = launch.plan_slots(start, end, cut, 600, -UNBOUNDED, 0, first, 2, inverse=True)
        (packed,) = launch.gather_rows((rows,), part, 2, first, 2)
        assert torch.equal(packed.nan_to_num(9), whole[:, :, first : first + 2].nan_to_num(9))
        launch.sum_rows((packed,), part, (parts,), first, 2)
    assert torch.equal(sums, parts)


# mask heads, bias heads, heads, key heads
BIASES = [
    (1, 1, 4, 2),
    (1, 2, 4, 2),
    (1, 4, 4, 2),
    (2, 1, 4, 2),
    (2, 2, 4, 2),
    (2, 4, 4, 2),
    (4, 1, 4, 2),
    (4, 2, 4, 2),
]
BIASES += [(4, 4, 4, 2), (2, 2, 2, 2)]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("mask_heads", "bias_heads", "heads", "kv_heads"), BIASES)
@pytest.mark.parametrize(("mask_batch", "bias_batch"), [(1, 1), (2, 1), (1, 2)])
def test_a_bias_per_key_is_gathered_and_its_gradient_summed(
    mask_batch, bias_batch, mask_heads, bias_heads, heads, kv_heads
):
    start, end, _, cut = sparse_mask(mask_heads, mask_batch)
    bias = torch.randn(bias_batch, bias_heads, 1, 600)
    packed_heads = heads if mask_heads == heads else kv_heads
    step = heads // packed_heads * (2 if packed_heads == heads else 1)  # query heads of one key head
    gradient = torch.full(bias.shape, torch.nan)
    gradient_parts = torch.zeros(bias.shape)
    expected = torch.zeros(bias.shape, dtype=torch.float64)
    for first in range(0, heads, step):
        packed_first = first * packed_heads // heads
        mask_range = (packed_first, step * packed_heads // heads) if mask_heads > 1 else (0, 1)
        part = launch.plan_slots(start, end, cut, 600, -UNBOUNDED, 0, *mask_range, inverse=True)
        packed = launch.gather_bias(bias, part, heads, first, step)
        batch, own_heads = packed.shape[:2]
        per = step // own_heads
        gradients = torch.randn(packed.shape)
        named = named_blocks(part)
        for b, h in np.ndindex(batch, own_heads):
            query_head = first + h * per
            matrix = (b % mask_batch, h * part.keys.shape[1] // own_heads)
            into = (b % bias_batch, query_head * bias_heads // heads, 0)
            live = part.keys[matrix] >= 0
            keys = part.keys[matrix][live].long()
            assert torch.equal(packed[b, h, 0, live], bias[into][keys])
            assert (packed[b, h, 0, named[matrix] & ~live] == 0).all()
            expected[into].index_add_(0, keys, gradients[b, h, 0, live].double())
        shared = bias_heads == 1 and first > 0
        launch.sum_bias(gradients, part, gradient, heads, first, step, add=shared)
        launch.sum_bias(gradients, part, gradient_parts, heads, first, step, add=True)
        if mask_heads == 1 and bias_heads == 1:
            break  # heads share it as they do in the mask: a single one stands for all
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(gradient, gradient_parts)


def walk(
    slots: Slots, matrix: tuple[int, int], tiles: Tensor, index: int, seqlen_q: int
) -> list[tuple[slice, slice, Tensor]]:
    """Return `(queries, slots, visible)` of the pairs that one list names; full ones are not asked for their intervals."""
    found = []
    partial, full = lists(tiles[matrix][index])
    for other in partial + full:
        tile, block = (index, other) if tiles is slots.row_tiles else (other, index)
        rows = slice(tile * TILE, min((tile + 1) * TILE, seqlen_q))
        columns = slice(block * TILE, (block + 1) * TILE)
        query = torch.arange(rows.start, rows.stop)[:, None]
        visible = (slots.start[matrix][columns] <= query) & (query < slots.end[matrix][columns])
        found.append((rows, columns, torch.ones_like(visible) if other in full else visible))
    return found


def packed_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slots: Slots, matrix: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return out and lse of one head, float64: query tiles walk their lists."""
    out, lse = (
        torch.zeros(len(q), v.shape[1], dtype=torch.float64),
        torch.full((len(q),), -torch.inf, dtype=torch.float64),
    )
    for tile in range(slots.row_tiles.shape[2]):
        parts = walk(slots, matrix, slots.row_tiles, tile, len(q))
        if parts:
            rows = parts[0][0]
            scores = [
                torch.where(visible, q[rows] @ k[columns].T + bias[columns], -torch.inf)
                for _, columns, visible in parts
            ]
            lse[rows] = torch.cat(scores, 1).logsumexp(1)
            weights = (torch.cat(scores, 1) - lse[rows, None]).exp().nan_to_num(0.0)
            out[rows] = weights @ torch.cat([v[columns] for _, columns, _ in parts])
    return out, lse


def packed_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    saved: tuple[Tensor, Tensor, Tensor],
    slots: Slots,
    matrix: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, and dk, dv and dbias of the slots of one head: blocks of slots walk their lists."""
    out, lse, grad_out = saved
    dq, dk, dv, dbias = (torch.zeros_like(part) for part in (q, k, v, bias))
    delta = (grad_out * out).sum(1, keepdim=True)
    for block in range(slots.col_tiles.shape[2]):
        for rows, columns, visible in walk(slots, matrix, slots.col_tiles, block, len(q)):
            weights = torch.where(visible, (q[rows] @ k[columns].T + bias[columns] - lse[rows, None]).exp(), 0.0)
            ds = weights * (grad_out[rows] @ v[columns].T - delta[rows])
            dq[rows] += ds @ k[columns]
            dk[columns] += ds.T @ q[rows]
            dv[columns] += weights.T @ grad_out[rows]
            dbias[columns] += ds.sum(0)
    return dq, dk, dv, dbias


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("mask_heads", "heads", "kv_heads"), [(1, 4, 2), (2, 4, 2), (4, 4, 2), (2, 2, 2)])
@pytest.mark.parametrize(("seqlen", "keep", "length"), [(600, 60, 256), (333, 140, 128)])
def test_attention_on_packed_keys_equals_dense_attention(seqlen, keep, length, mask_heads, heads, kv_heads):
    case = Case(seqlen, keep, length, 2, mask_heads)
    start, end = lifetimes(case)
    slots, _ = plan(start, end, case.at_most, case.length, case.seqlen)
    q, k, v, grad_out = (
        torch.randn(2, seqlen, own, 16, dtype=torch.float64, requires_grad=True)
        for own in (heads, kv_heads, kv_heads, heads)
    )
    bias = torch.randn(1, kv_heads, 1, seqlen, dtype=torch.float64, requires_grad=True)
    shared = heads // kv_heads
    visible = visible_pairs(start, end, seqlen, (-UNBOUNDED, 0)).repeat_interleave(heads // mask_heads, 1)
    every = [part.transpose(1, 2).repeat_interleave(heads // part.shape[2], 1) for part in (q, k, v)]
    scores = every[0] @ every[1].mT + bias.repeat_interleave(shared, 1)
    expected = (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ every[2]).transpose(1, 2)
    expected.backward(grad_out)

    packed_heads = heads if mask_heads == heads else kv_heads
    group = packed_heads // kv_heads
    with torch.no_grad():
        packed_k, packed_v = launch.gather_rows((k, v), slots, packed_heads, 0, group)
        packed_bias = launch.gather_bias(bias, slots, heads, 0, heads)
        dk_slots, dv_slots = (torch.zeros_like(part) for part in (packed_k, packed_v))
        dbias_slots = torch.zeros(2, *packed_bias.shape[1:], dtype=torch.float64)  # bias and mask share none of it
        for b, h in np.ndindex(2, heads):
            head, matrix = h * packed_heads // heads, (b, h * mask_heads // heads)
            own_bias = packed_bias[b, h * packed_bias.shape[1] // heads, 0]
            inputs = (q[b, :, h], packed_k[b, :, head], packed_v[b, :, head], own_bias)
            out, lse = packed_forward(*inputs, slots, matrix)
            torch.testing.assert_close(out, expected[b, :, h], rtol=1e-12, atol=1e-12)
            dq, *of_slots = packed_backward(*inputs, (out, lse, grad_out[b, :, h]), slots, matrix)
            torch.testing.assert_close(dq, q.grad[b, :, h], rtol=1e-10, atol=1e-10)
            dk_slots[b, :, head] += of_slots[0]
            dv_slots[b, :, head] += of_slots[1]
            dbias_slots[b, h * packed_bias.shape[1] // heads, 0] += of_slots[2]
        dk, dv, dbias = (torch.full_like(part, torch.nan, dtype=torch.float32) for part in (k, v, bias))
        launch.sum_rows((dk_slots, dv_slots), slots, (dk, dv), 0, group)
        launch.sum_bias(dbias_slots, slots, dbias, heads, 0, heads)
    for got, exact in ((dk, k.grad), (dv, v.grad), (dbias, bias.grad)):
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
