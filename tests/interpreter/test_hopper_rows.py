"""The row work of the SM 9.0 backward, in the interpreter: statistics of rows of any size, zeroed sums and counts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dmattn_ops.call import TILE
from dmattn_ops.kernels.hopper.backward.rows import RowTraits, prepare_kernel

LOWEST = torch.finfo(torch.float32).min
LSES = (0.0, 3.5, -17.0, 4000.0, 5000.0, -1e6, 1e9, -1e29, LOWEST, -LOWEST, -math.inf)
TICKETS = 4
LOG2E = 1.4426950408889634


def prepared(
    lse: Tensor, tail: Tensor, natural: bool, dim: int = 64, second: int = 0, sink: Tensor | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Run the kernel for rows `[B, H, Sq]` with outputs full of NaN; return statistics `[4, B, H, rows]`, flags and sums.

    With a sink, what the programs add to its gradient is held against the formula.
    """
    batch, heads, seqlen = lse.shape
    rows, block = -(-seqlen // TILE) * TILE, TILE if dim + second == 64 else TILE // 2
    total = batch * heads * rows
    out, grad_out = (torch.randn(batch, seqlen, heads, dim) for _ in range(2))
    grad_out.transpose(1, 2)[lse == -math.inf] = math.nan  # of empty rows, to which nothing may flow
    stats = torch.full((4, total), math.nan)
    sums = {
        "accumulator": torch.full((total * (dim + second),), math.nan),
        "tickets": torch.full((TICKETS,), -1, dtype=torch.int32),
        "blocks_done": torch.full((total // block,), -1, dtype=torch.int32),
        "counters": torch.full((2 * total // block,), -1, dtype=torch.int32),
    }
    flags = torch.full((total // block,), -1, dtype=torch.int8)
    parts = None if sink is None else torch.full((total // block,), math.nan)
    prepare_kernel[(total // block,)](
        out, grad_out, lse, tail, None, sink, parts, stats, *sums.values(), flags, *out.stride()[:3], *grad_out.stride()[:3],
        *lse.stride(), *tail.stride(), 0, 0, 0, None, seqlen, heads, rows, total, dim, 0.75,
        T=RowTraits(block, dim, dim, second, TICKETS, natural),
    )  # fmt: skip
    delta = 0.75 * (out * grad_out).sum(-1).transpose(1, 2).masked_fill(lse == -math.inf, 0.0)
    if sink is not None:
        assert parts is not None
        taken = torch.sigmoid(sink[:, None] - lse).masked_fill(lse == -math.inf, 0.0)
        expected = -(taken * delta / 0.75).sum((0, 2))
        torch.testing.assert_close(parts.view(batch, heads, -1).sum((0, 2)), expected, rtol=1e-5, atol=1e-5)
    stats = stats.view(4, batch, heads, rows)
    torch.testing.assert_close(stats[1, :, :, :seqlen], delta, rtol=1e-5, atol=1e-5)
    assert not stats[1, :, :, seqlen:].any()
    return stats, flags, sums


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # the point: NumPy says where it happens
@pytest.mark.parametrize(
    ("lse", "natural"),
    [*((lse, True) for lse in LSES), *((lse, False) for lse in LSES if abs(lse) < 2e38 or lse == -math.inf)],
)
def test_a_row_of_any_size_has_statistics_that_no_product_with_zero_turns_into_nan(lse: float, natural: bool) -> None:
    stats, flags, _ = prepared(torch.full((1, 1, 5), lse), torch.zeros(1, 1, 5), natural)
    assert stats.isfinite().all()
    assert flags.tolist() == [int(abs(lse) > 4096 and lse != -math.inf)]
    minus_lse, _, first, second = stats[:, 0, 0]
    nothing = slice(5, None) if lse != -math.inf else slice(None)  # rows past the end, and empty ones
    scores = torch.tensor([0.0, -3e5, 3e5, lse if math.isfinite(lse) else 0.0])[:, None]
    assert not torch.exp2(scores.clamp(-1e6, 1e6) + minus_lse[nothing]).any()
    assert not torch.exp2((scores.clamp(-1e6, 1e6) - first[nothing]) - second[nothing]).any()


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("score", [0.0, 3.5, -17.0, 4000.0, 5000.0, 1e6, -1e9, 1e9, -1e29, LOWEST, -LOWEST])
def test_with_a_bias_the_keys_of_a_constant_row_share_its_weight_equally_whatever_the_score(score: float) -> None:
    """Where float32 rounds log(300) away beside the score, lse alone would give each key a weight of 1."""
    keys = 300
    row = torch.tensor([score])
    lse = (row.double() + math.log(keys)).float()
    tail = ((row.double() - lse.double()) + math.log(keys)).float()
    sink = torch.tensor([0.0, 2.5, 1e9])  # takes a share: lse_tail grows by it
    stats, flags, _ = prepared(lse.expand(1, 1, 3), (tail + sink)[None, None], True)
    minus_lse, _, first, second = stats[:, 0, 0, :3]
    assert flags.item() == 1  # of the third
    found = torch.exp2((((row - first) - second) * LOG2E).clamp(max=0.0))
    torch.testing.assert_close(found.double() * keys, torch.exp(-sink.double()), rtol=1e-4, atol=0.0)
    if abs(score) < 4000:
        rounded = torch.exp2(row * LOG2E + minus_lse)[:2]
        torch.testing.assert_close(rounded, found[:2], rtol=3e-4, atol=0.0)


def test_nan_stays_nan_and_reaches_its_row_only() -> None:
    lse = torch.zeros(1, 2, 130)
    lse[0, 1, 100] = math.nan
    stats, _, _ = prepared(lse, torch.zeros_like(lse), False)
    for part in (0, 2):
        assert stats[part].isnan().nonzero().tolist() == [[0, 1, 100]]


@pytest.mark.parametrize(("dim", "second"), [(64, 0), (128, 0), (64, 16), (64, 32)])
def test_flags_name_the_blocks_with_large_rows_and_sums_and_counts_begin_at_zero(dim: int, second: int) -> None:
    torch.manual_seed(0)
    lse, tail = torch.randn(2, 3, 300), torch.zeros(2, 3, 300)
    lse[0, 1, 299], tail[1, 2, 0] = 1e5, -5000.0
    lse[1, 0, 200] = -math.inf
    stats, flags, sums = prepared(lse, tail, True, dim, second)
    block = 128 if dim + second == 64 else 64
    large = torch.nn.functional.pad((lse.abs() > 4096) & (lse != -math.inf) | (tail.abs() > 4096), (0, 84))
    assert torch.equal(flags.bool(), large.view(-1, block).any(-1))
    assert torch.equal(stats[2, :, :, :300][lse != -math.inf], lse[lse != -math.inf])
    for name, part in sums.items():
        assert not part.any(), name


@pytest.mark.parametrize("sink", [-math.inf, -40.0, 0.0, 3.0, 200.0])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_sink_is_a_part_of_the_sum(dim: int, sink: float) -> None:
    lse = torch.randn(2, 3, 70) * 3
    lse[:, :, 7] = -math.inf
    logits = torch.tensor([sink, 0.5, sink])
    stats, _, _ = prepared(lse, torch.zeros_like(lse), False, dim, sink=logits)
    whole = torch.logaddexp(lse.double(), logits.double()[:, None].expand_as(lse))
    whole = whole.masked_fill(lse == -math.inf, 3e38 / LOG2E)
    torch.testing.assert_close(stats[0, :, :, :70], (-LOG2E * whole).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("sink", [0.0, -1e9, 1e9, -LOWEST, math.inf])
@pytest.mark.parametrize(
    ("lse", "natural"),
    [*((lse, False) for lse in (0.0, 1e9, -1e9, -1e29)), *((lse, True) for lse in (0.0, 1e9, -1e9, LOWEST, -LOWEST))],
)
def test_a_sink_far_above_a_row_leaves_it_nothing_and_no_statistic_becomes_infinite(
    lse: float, natural: bool, sink: float
) -> None:
    """Kernels multiply the rounded statistic by 0 where they take the pair, and infinity times 0 is NaN."""
    stats, _, _ = prepared(torch.full((1, 1, 3), lse), torch.zeros(1, 1, 3), natural, sink=torch.tensor([sink]))
    minus_lse, _, first, second = stats[:, 0, 0, :3].double()
    assert minus_lse.isfinite().all()
    assert first.isfinite().all()
    unit = 1.0 if natural else torch.tensor(LOG2E).item()  # as float32 holds it
    difference = (torch.tensor(lse).double() * unit - first) - second
    found = torch.exp2(difference * (LOG2E if natural else 1.0))
    share = torch.sigmoid(torch.tensor(lse, dtype=torch.float64) - sink)
    torch.testing.assert_close(found, share.expand(3), rtol=1e-4, atol=0.0)
