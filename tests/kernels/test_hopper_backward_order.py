"""The order of dq's additions, on the CPU: turns count who came before, and those have lower numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton.experimental.gluon")

from dmattn_ops.call import UNBOUNDED
from dmattn_ops.kernels.hopper.backward import finish as hopper_backward_finish
from dmattn_ops.kernels.hopper.backward import order as hopper_backward_order
from dmattn_ops.kernels.hopper.backward import walk as hopper_backward_walk
from dmattn_ops.kernels.hopper.backward import work as hopper_backward_work
from dmattn_ops.kernels.hopper.backward.types import Traits, downwards
from dmattn_ops.kernels.hopper.kinds import BAND
from tests.support.device_functions import on_integers

TRAITS = Traits(
    BM=64, BN=128, D=64, D2=0, DV=64, DV2=0, MASK=BAND.value, BIAS=0, SOFTCAP=False, HAS_LO=False, HAS_Q_SEG=False, HIDDEN=False,
    NATURAL=False, GROUPED=False, TWO_PHASE=True, ORDERED=True, INTERLEAVED=False, DROPOUT=False, EDGES=False,
    WATCH=False, ALONE=False,
)  # fmt: skip

BANDS = [
    (-UNBOUNDED, UNBOUNDED),
    (-UNBOUNDED, 0),
    (-UNBOUNDED, 333),
    (-UNBOUNDED, -450),
    (-300, 200),
    (-200, UNBOUNDED),
]
BANDS += [(150, 900), (-1, 1), (-900, -150), (0, 0)]
LENGTHS = [(1536, 1536), (2000, 1200), (1200, 2000), (1, 777), (777, 1), (129, 129)]

band_tiles = on_integers(hopper_backward_walk.band_tiles)
downward_span = on_integers(hopper_backward_order.downward_span)
head_steps = on_integers(hopper_backward_walk.head_steps)
full_tile = on_integers(hopper_backward_walk.full_tile, downwards=downwards.fn)
partial_tile = on_integers(hopper_backward_walk.partial_tile, downwards=downwards.fn)
turn_of = on_integers(hopper_backward_order.turn_of)
block_of = on_integers(hopper_backward_work.block_of)
tiles_drawn = on_integers(hopper_backward_finish.tiles_drawn)


@pytest.mark.parametrize(("first_ranks", "ranks_in_row"), [(0, 1), (0, 3), (0, 13), (3, 4), (6, 1), (33, 5)])
@pytest.mark.parametrize("heads_per_group", [1, 4, 16])
@pytest.mark.parametrize(("tiles", "heads"), [(1, 1), (5, 7), (13, 4), (8, 18)])
def test_every_key_tile_has_one_number_and_a_head_s_longest_the_lowest(
    tiles, heads, heads_per_group, first_ranks, ranks_in_row
):
    places = [block_of(n, tiles, heads, heads_per_group, first_ranks, ranks_in_row) for n in range(tiles * heads)]
    assert sorted(places) == [(rank, head) for rank in range(tiles) for head in range(heads)]
    for head in range(heads):
        ranks = [rank for rank, of in places if of == head]
        assert ranks == sorted(ranks)


@pytest.mark.parametrize(("tiles", "heads", "group"), [(1, 1, 1), (3, 4, 2), (4, 2, 1), (9, 12, 4)])
@pytest.mark.parametrize("at_once", [1, 3, 4])
def test_every_tile_of_dq_is_drawn_once_and_heads_in_their_order(tiles, heads, group, at_once):
    found, order = [], []
    drawn = 0
    while (draw := tiles_drawn(drawn, tiles, at_once, group)).kv_head < heads // group:
        assert draw.kv_head == draw.head // group
        found += [(draw.head, tile) for tile in range(draw.tile, draw.end)]
        order.append(draw.kv_head)
        drawn += 1
    assert found == [(head, tile) for head in range(heads) for tile in range(tiles)]
    assert order == sorted(order)


def traits_of(band: tuple[int, int], block_m: int) -> Traits:
    """Return the traits of a deterministic call without a mask."""
    return replace(TRAITS, BM=block_m, HAS_LO=band[0] > -UNBOUNDED)


def walk(tile: int, lengths: tuple[int, int], band: tuple[int, int], block_m: int) -> tuple[list[int], set[int]]:
    """Return the query tiles of a key tile in order, and those that are taken without a test."""
    traits = traits_of(band, block_m)
    span = downward_span(band_tiles(tile, *lengths, *band, block_m, 128), traits.HAS_LO)
    n_full, n_partial = head_steps(None, span, traits)
    full = [full_tile(t, None, n_partial, span, traits) for t in range(n_full)]
    return full + [partial_tile(t, None, n_partial, span, traits) for t in range(n_partial)], set(full)


@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_each_pair_of_tiles_has_its_turn(band: tuple[int, int], lengths: tuple[int, int], block_m: int) -> None:
    seqlen_q, seqlen_k = lengths
    seen = [0] * -(-seqlen_q // block_m)  # how many key tiles have added to a query tile
    for tile in range(-(-seqlen_k // 128)):
        steps, full = walk(tile, lengths, band, block_m)
        assert steps == sorted(steps, reverse=True)
        visible = {
            m: [i + band[0] <= j <= i + band[1] and j < seqlen_k
                for i in range(m * block_m, min((m + 1) * block_m, seqlen_q)) for j in (tile * 128, tile * 128 + 127)]
            for m in range(len(seen))
        }  # fmt: skip
        assert all(all(visible[m]) for m in full)
        for m in steps:
            assert turn_of(tile, m, band[0], traits_of(band, block_m)) == seen[m]
            seen[m] += 1
