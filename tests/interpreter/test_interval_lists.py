"""Lists of tiles for masks of intervals, in the interpreter: what is visible is listed, and full tiles are full."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dmattn_ops.call import UNBOUNDED, Mask
from dmattn_ops.kernels.interval_lists import SIDES, interval_lists, laid_out_alike
from dmattn_ops.masks import layout
from dmattn_ops.meta import list_tiles_outputs
from tests.interpreter.problems import Problem, draw_intervals, intervals_keep
from tests.support.mask_cases import check_lists, read_lists
from tests.support.tile_builder import tile_states

pytestmark = pytest.mark.usefixtures("strict_memory")
BANDS = ((-UNBOUNDED, UNBOUNDED), (-UNBOUNDED, 0), (-130, 40), (5, 3), (-1000, -700))


def check(mask: Mask, seqlen_q: int, seqlen_k: int, band: tuple[int, int]) -> Tensor:
    """Compare the lists of a mask with its definition; return the classes that they give to tiles, `[Bm, Hm, nQ, nK]`."""
    keep = intervals_keep(mask, seqlen_q) & layout.band_mask(*band, seqlen_q, seqlen_k, None)
    states = tile_states(keep)
    row_tiles, col_tiles = interval_lists(mask, *band, seqlen_q, seqlen_k)
    allocated = list_tiles_outputs(keep, *keep.shape[:2], seqlen_q, seqlen_k, *band)
    assert [lists.shape for lists in (row_tiles, col_tiles)] == [lists.shape for lists in allocated]
    listed = read_lists(row_tiles, states.shape[-1])[..., : states.shape[-2], :]
    check_lists(row_tiles, listed)
    check_lists(col_tiles, listed.mT)
    for number, side in enumerate(SIDES):
        lists = interval_lists(mask, *band, seqlen_q, seqlen_k, (side,))
        assert lists[1 - number] is None
        check_lists(lists[number], listed.mT if number else listed)
    assert bool((listed[states > 0] > 0).all()), "a tile that shows something is not listed"
    assert bool((states[listed == 2] == 2).all()), "a tile that hides something is listed as full"
    if band[0] <= band[1]:
        visited = layout.interval_tiles(mask, *band, seqlen_q, seqlen_k)
        assert torch.equal(listed > 0, visited[..., : listed.shape[-2], : listed.shape[-1]])
        assert visited.sum() == (listed > 0).sum(), "a tile behind the end of a sequence is visited"
    return listed


@pytest.mark.sampled(4)
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("mask", ["lifetimes", "intervals", "hidden"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(300, 500), (1, 700), (400, 100)])
def test_lists_hold_what_intervals_and_a_band_show(
    mask: str, band: tuple[int, int], seqlen_q: int, seqlen_k: int
) -> None:
    problem = Problem(seqlen_q=seqlen_q, seqlen_k=seqlen_k, mask=mask, mask_batch=2, mask_heads=3)
    check(draw_intervals(problem, torch.Generator().manual_seed(seqlen_q)), seqlen_q, seqlen_k, band)


def test_tiles_below_the_diagonal_whose_keys_all_live_on_are_full() -> None:
    seqlen = 512
    start = torch.arange(seqlen, dtype=torch.int32)[None, None]
    listed = check(Mask(start=start, end=torch.full_like(start, seqlen)), seqlen, seqlen, (-UNBOUNDED, UNBOUNDED))
    assert torch.equal(listed[0, 0], torch.tensor([[1, 0, 0, 0], [2, 1, 0, 0], [2, 2, 1, 0], [2, 2, 2, 1]]))


def test_a_hidden_interval_makes_the_tiles_that_it_meets_partial() -> None:
    seqlen = 512
    zero = torch.zeros(1, 1, seqlen, dtype=torch.int32)
    hidden_from, hidden_to = zero.clone(), zero.clone()
    hidden_from[0, 0, 200], hidden_to[0, 0, 200] = 256, 257
    mask = Mask(start=zero, end=zero + seqlen, hidden_from=hidden_from, hidden_to=hidden_to)
    listed = check(mask, seqlen, seqlen, (-UNBOUNDED, UNBOUNDED))
    expected = torch.full((4, 4), 2)
    expected[2, 1] = 1
    assert torch.equal(listed[0, 0], expected)


def test_tiles_that_all_keys_are_hidden_from_are_not_listed() -> None:
    """A window on both sides, and 16 keys and queries that see everything; one key of a tile is seen by nobody."""
    seqlen, window = 1300, 200
    key = torch.arange(seqlen, dtype=torch.int32)[None, None]
    first = key < 16
    end = torch.where(first, seqlen, (key + window).clamp(max=seqlen)).int()
    end[..., 700] = 0
    hidden_to = torch.where(first, 0, (key - window + 1).clamp(min=16)).int()
    hidden_from = torch.where(first, 0, 16).int()
    mask = Mask(start=torch.zeros_like(end), end=end, hidden_from=hidden_from, hidden_to=hidden_to)
    listed = check(mask, seqlen, seqlen, (-UNBOUNDED, UNBOUNDED))
    shows = tile_states(intervals_keep(mask, seqlen)) > 0
    assert torch.equal(listed > 0, shows), "lists are as short as they can be"
    assert shows.float().mean() < 0.6


def test_a_tile_with_a_key_that_is_never_hidden_stays() -> None:
    zero = torch.zeros(1, 1, 384, dtype=torch.int32)
    hidden_to = torch.full_like(zero, 384)
    hidden_to[..., 130] = 0
    listed = check(Mask(start=zero, end=zero + 384, hidden_from=zero, hidden_to=hidden_to), 384, 384, BANDS[0])
    assert torch.equal(listed[0, 0], torch.tensor([[0, 1, 0]] * 3))


def test_documents_as_intervals_list_the_tiles_of_their_own() -> None:
    start = torch.tensor([0, 256]).repeat_interleave(256).int()[None, None]
    listed = check(Mask(start=start, end=start + 256), 512, 512, (-UNBOUNDED, 0))
    assert torch.equal(listed[0, 0], torch.tensor([[1, 0, 0, 0], [2, 1, 0, 0], [0, 0, 1, 0], [0, 0, 2, 1]]))


def test_keys_that_nobody_sees_are_in_no_list() -> None:
    zero = torch.zeros(1, 2, 300, dtype=torch.int32)
    assert not check(Mask(start=zero + 5, end=zero + 5), 200, 300, (-UNBOUNDED, UNBOUNDED)).any()


def test_many_tiles_are_ranked_by_a_kernel_of_their_own() -> None:
    seqlen_q, seqlen_k = 128 * 70, 256
    start = torch.arange(0, seqlen_q, seqlen_q // seqlen_k, dtype=torch.int32)[None, None, :seqlen_k]
    check(Mask(start=start.contiguous(), end=start + 2000), seqlen_q, seqlen_k, (-UNBOUNDED, UNBOUNDED))


def test_tensors_of_other_shapes_and_strides_are_laid_out_alike() -> None:
    torch.manual_seed(0)
    start = torch.randint(0, 50, (1, 1, 600), dtype=torch.int32)[..., ::2]
    end = torch.randint(0, 300, (2, 1, 300), dtype=torch.int32)
    hidden_from = torch.randint(0, 300, (2, 4, 300), dtype=torch.int32)
    hidden_to = hidden_from[:, ::2] + 10
    mask = laid_out_alike(Mask(start=start, end=end, hidden_from=hidden_from, hidden_to=hidden_to))
    for name, part, group in (
        ("start", start, 4),
        ("end", end, 4),
        ("hidden_from", hidden_from, 1),
        ("hidden_to", hidden_to, 2),
    ):
        made = getattr(mask, name)
        assert made.shape == (2, 4, 300) and made.is_contiguous()
        assert torch.equal(made, part.repeat_interleave(group, 1).expand(2, 4, 300))
    assert laid_out_alike(mask) is mask
