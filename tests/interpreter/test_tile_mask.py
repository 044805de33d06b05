"""The Triton kernels of masks against the definition, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from dmattn_ops.kernels.masks.launch import list_tiles, pack_mask
from tests.support.mask_cases import EVERYTHING, NAMED, Case, check_list_tiles, check_pack_mask, draw, segments

BANDS = (EVERYTHING, (-130, 10), (5, 3), (-1000, -400))
CASES = [case for case in NAMED if case.dtype in (torch.bool, torch.uint8, torch.int8, torch.bfloat16)]

pytestmark = pytest.mark.usefixtures("strict_memory")


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_pack_mask_writes_lists_and_bits_of_nasty_masks(case: Case):
    check_pack_mask(pack_mask, case)


@pytest.mark.parametrize("seed", range(12))
def test_pack_mask_writes_lists_and_bits_of_any_mask(seed: int):
    check_pack_mask(pack_mask, draw(seed))


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(300, 500), (1, 700), (0, 4), (4, 0)])
def test_list_tiles_lists_what_segments_and_a_band_show(seqlen_q: int, seqlen_k: int, band: tuple[int, int]):
    torch.manual_seed(seqlen_q + seqlen_k)
    keys = segments(2, 3, seqlen_k, "cpu")
    check_list_tiles(list_tiles, segments(1, 1, seqlen_q, "cpu").squeeze(1), keys, seqlen_q, band)
    check_list_tiles(list_tiles, None, torch.randint(-1, 1, (1, 2, seqlen_k), dtype=torch.int32), seqlen_q, band)


@pytest.mark.parametrize("tiles", [(100, 90), (140, 131)])
def test_list_tiles_of_long_sequences_is_exact_for_sorted_documents(tiles: tuple[int, int]):
    seqlen_q, seqlen_k = (128 * count for count in tiles)
    queries, keys = torch.arange(seqlen_q) // 700, torch.arange(seqlen_k) // 650
    classes = check_list_tiles(list_tiles, queries[None].int(), keys[None, None].int(), seqlen_q, (-9000, 3000))
    own, other = queries.view(-1, 128), keys.view(-1, 128)
    shared = (own[:, None, 0] <= other[None, :, -1]) & (own[:, None, -1] >= other[None, :, 0])
    distance = torch.arange(tiles[1]) - torch.arange(tiles[0])[:, None]
    near = (128 * distance + 127 >= -9000) & (128 * distance - 127 <= 3000)
    assert torch.equal(classes[0, 0] > 0, shared & near)
