"""The cost model: which way its predictions move, and the rank correlation that they are judged by."""

import math
from dataclasses import replace

import pytest

from dmattn_ops.choice import arch, config, tunable
from dmattn_ops.tune import cost
from dmattn_ops.tune.command import parse_shape

SHAPE = parse_shape("B4 H16 S4096 D64")
ROWS = [row for row in (*config.FORWARD, *config.BACKWARD) if tunable.parts(row) and row.itemsize == 2]


def cycles(part, row, shape, on=None):
    return cost.predict(part, part.of(row.config), row, on or arch.KNOWN[row.sm], shape)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.sm} {row.name}")
def test_more_work_takes_more_cycles(row):
    for part in tunable.parts(row):
        shape = replace(SHAPE, dim=row.dim, dim_v=row.dim)
        plain = cycles(part, row, shape)
        assert cycles(part, row, replace(shape, seqlen_k=8192)) > plain
        assert cycles(part, row, replace(shape, seqlen_q=8192)) > plain
        assert cycles(part, row, replace(shape, batch=8)) > plain
        assert cycles(part, row, replace(shape, band_hi=0)) < plain
        assert cycles(part, row, replace(shape, band_hi=0, band_lo=-256)) < cycles(part, row, replace(shape, band_hi=0))


def test_more_multiprocessors_take_fewer_cycles():
    row = next(row for row in ROWS if row.sm == 86 and row.dim == 64)
    (part,) = tunable.parts(row)
    assert cycles(part, row, SHAPE, replace(arch.KNOWN[86], num_sms=42)) > cycles(part, row, SHAPE)


@pytest.mark.parametrize("sm", [86, 90])
def test_few_tiles_are_better_cut_small(sm):
    row = next(row for row in ROWS if (row.sm, row.dim, row.kernel) == (sm, 64, "portable"))
    (part,) = tunable.parts(row)

    def predicted(block_m, shape):
        return cost.predict(part, (block_m, 64, 4, 3), row, arch.KNOWN[sm], parse_shape(shape))

    few, many = "B1 H4 S1024 D64", "B8 H32 S8192 D64"
    assert predicted(64, few) < 0.75 * predicted(128, few)
    assert predicted(64, many) > 0.75 * predicted(128, many)


def test_blocks_that_no_register_file_holds_cost_more():
    row = next(row for row in ROWS if (row.sm, row.dim, row.kernel) == (90, 64, "portable"))
    (part,) = tunable.parts(row)
    many = parse_shape("B8 H32 S8192 D64")
    assert cost.predict(part, (128, 128, 4, 3), row, arch.KNOWN[90], many) > cost.predict(
        part, (128, 128, 8, 3), row, arch.KNOWN[90], many
    )


def test_the_share_of_visible_scores_is_that_of_the_band():
    assert cost.visible_share(SHAPE) == 1.0
    assert cost.visible_share(parse_shape("S4096 causal")) == pytest.approx(0.5, abs=0.01)
    assert cost.visible_share(replace(SHAPE, band_lo=-99, band_hi=0)) == pytest.approx(100 / 4096, rel=0.02)
    assert cost.visible_share(replace(SHAPE, band_lo=5000)) == 0.0


def test_rank_correlation_is_spearmans():
    assert cost.rank_correlation([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1.0)
    assert cost.rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    # ranks 1 2.5 2.5 4 against 1 3 2 4: 4.5 / sqrt(4.5 * 5)
    assert cost.rank_correlation([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(4.5 / math.sqrt(22.5))
    assert math.isnan(cost.rank_correlation([1.0], [2.0]))
    assert math.isnan(cost.rank_correlation([1, 1], [1, 2]))
