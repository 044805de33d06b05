"""The kernels that gather chosen blocks against the definition in float64, in the interpreter."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from chosen_calls import by_definition, check_close, drawn_call, poisoned
from chosen_cases import Case, draw

from dmattn_ops.call import Gradients, Result, Saved
from dmattn_ops.choice.chosen import Gathering
from dmattn_ops.kernels.chosen import launch
from dmattn_ops.kernels.chosen.choosers import collect_kernel

pytestmark = pytest.mark.usefixtures("strict_memory")
SMALL = Gathering(rows=32, columns=32, num_warps=4, num_stages=2)


def check(case: Case, seed: int, dims: tuple[int, int], dtype: torch.dtype) -> None:
    call, shown = drawn_call(case, seed, *dims, dtype)
    batch, seqlen_q, heads, _ = call.query.shape
    generator = torch.Generator().manual_seed(seed + 1)
    grad_out = torch.randn(batch, seqlen_q, heads, dims[1], generator=generator).to(dtype)
    grad_lse = torch.randn(batch, heads, seqlen_q, generator=generator)
    if call.sink is not None:  # dispatch computes with sinks where lse has a gradient
        grad_lse.zero_()
    expected = by_definition(call, shown, grad_out, grad_lse)
    call, (grad_out, grad_lse) = poisoned(call, shown, (grad_out, grad_lse))
    result = Result(torch.full_like(grad_out, math.nan), *(torch.full_like(grad_lse, math.nan) for _ in range(3)))
    for limit in (0.0, 1.3, 99.0):
        launch.forward_with(call, result, replace(SMALL, apart=replace(SMALL, rows=16, columns=16), limit=limit))
        for name in ("out", "lse", "row_max"):
            check_close(name, getattr(result, name), expected[name], dtype, case)
            getattr(result, name).fill_(math.nan) if limit < 99.0 else None
    for limit in (0.0, 1.3, 99.0):  # by blocks of keys, by both, by tiles of queries
        made = [torch.full_like(part, math.nan) for part in (call.query, call.key, call.value)]
        dsink = None if call.sink is None else torch.full_like(call.sink, math.nan)
        grads = Gradients(grad_out, None if call.sink is not None else grad_lse, *made, None, dsink)
        tiles = replace(SMALL, apart=replace_columns(SMALL, case.block), limit=limit)
        launch.backward_with(call, Saved(*result[:3]), grads, tiles)
        for name in ("dq", "dk", "dv", *(() if dsink is None else ("dsink",))):
            check_close(name, getattr(grads, name), expected[name], dtype, case)


def replace_columns(tiles: Gathering, block: int) -> Gathering:
    return replace(tiles, columns=max(16, min(tiles.columns, 1 << (block - 1).bit_length())))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("first", range(0, 40, 5))
def test_any_case_is_what_the_definition_says(first: int):
    for seed in range(first, first + 5):
        pick = random.Random(seed)
        dims = pick.choice(((16, 16), (24, 16), (16, 40)))
        check(draw(seed, longest=40), seed, dims, pick.choice((torch.float16, torch.bfloat16)))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dims", [(144, 16), (16, 136), (192, 128), (256, 256)])
def test_wide_heads_are_held_in_two_blocks(dims: tuple[int, int]):
    check(draw(3, longest=50), 3, dims, torch.float16)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("group", [4, 5, 16, 32])
@pytest.mark.parametrize("block", [1, 4, 24, 64, 128])
def test_heads_of_a_group_share_a_list(group: int, block: int):
    case = draw(block + group, longest=90)
    count = -(-case.seqlen_k // block)
    indices = torch.randint(-1, count, (1, 1, case.indices.shape[2], min(3, count)))
    case = replace(case, indices=indices, block=block, batch=1, heads=group, heads_kv=1, documents=None, padding=None)
    check(case, block, (16, 16), torch.float16)


def test_lists_begin_behind_more_queries_than_32_bits_count():
    counts = torch.tensor([[1 << 30] * 5 + [1]], dtype=torch.int32)
    starts, queries = torch.zeros(1, 6, dtype=torch.int64), torch.full((40,), -1, dtype=torch.int32)
    bits = torch.zeros(1, 6, 2, dtype=torch.int32)  # of no query: nothing is listed so far behind
    collect_kernel[(6,)](bits, counts, starts, queries, 6, 2, 40, READ=32, SUMMED=4)
    assert starts.tolist() == [[n << 30 for n in range(6)]]
    assert queries.eq(-1).all()
