"""The Triton kernels of masks against the definition, on a GPU."""

from __future__ import annotations

import pytest
import torch

from dmattn_ops import meta
from dmattn_ops.call import UNBOUNDED, Mask
from dmattn_ops.masks import layout
from tests.support.mask_cases import (
    EVERYTHING,
    NAMED,
    Case,
    check_list_tiles,
    check_pack_mask,
    definition,
    draw,
    segments,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BANDS = (EVERYTHING, (-UNBOUNDED, 0), (-130, 10), (5, 3), (-1000, -400))


def launchers():
    from dmattn_ops.kernels.masks import launch as tile_mask

    return tile_mask


@pytest.mark.parametrize("case", NAMED, ids=repr)
def test_pack_mask_writes_lists_and_bits_of_nasty_masks(case: Case):
    check_pack_mask(launchers().pack_mask, case, "cuda")


@pytest.mark.parametrize("seed", range(80))
def test_pack_mask_writes_lists_and_bits_of_any_mask(seed: int):
    check_pack_mask(launchers().pack_mask, draw(seed, longest=700), "cuda")


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "band"),
    [
        *((q, k, band) for q, k in ((300, 500), (1, 700), (0, 4), (4, 0)) for band in BANDS),
        (17000, 4000, (-UNBOUNDED, -9000)),
        (4000, 20000, EVERYTHING),
    ],
)
def test_list_tiles_lists_what_segments_and_a_band_show(seqlen_q: int, seqlen_k: int, band: tuple[int, int]):
    torch.manual_seed(seqlen_q + seqlen_k)
    list_tiles = launchers().list_tiles
    keys = segments(2, 1, seqlen_k, "cuda")
    check_list_tiles(list_tiles, segments(1, 1, seqlen_q, "cuda").squeeze(1), keys, seqlen_q, band)
    check_list_tiles(
        list_tiles, None, -torch.randint(2, (1, 2, seqlen_k), dtype=torch.int32, device="cuda"), seqlen_q, band
    )


def test_pack_mask_of_more_than_two_to_the_31_elements():
    seqlen = 33024
    mask = torch.zeros((2, 1, seqlen, seqlen), dtype=torch.bool, device="cuda")
    mask[1, 0, -200:, -300:] = torch.rand((200, 300), device="cuda") < 0.5
    outputs = meta.pack_mask_outputs(mask, 2, 1, seqlen, *EVERYTHING)
    launchers().pack_mask(mask, None, None, seqlen, *EVERYTHING, *outputs)
    assert outputs[0][0, 0, :, 1:3].sum() == 0
    last = Mask(*(part[1:] for part in outputs))
    assert torch.equal(layout.dense(last, *EVERYTHING, seqlen, seqlen)[0, 0, -500:, -500:], mask[1, 0, -500:, -500:])


def test_mask_launchers_replay_in_a_cuda_graph_with_fresh_values():
    mask = torch.rand((2, 2, 500, 512), device="cuda") < 0.5
    keys = segments(2, 1, 500, "cuda")
    tile_mask = launchers()

    def run() -> tuple:
        packed = meta.pack_mask_outputs(mask, 2, 2, 500, -100, 50)
        tile_mask.pack_mask(mask, None, None, 500, -100, 50, *packed)
        listed = meta.list_tiles_outputs(keys, 2, 1, 500, 500, -100, 50)
        tile_mask.list_tiles(None, keys, 500, -100, 50, *listed)
        return packed, listed

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed, listed = run()
    for density in (0.2, 1.0, 0.0):
        mask.copy_(torch.rand(mask.shape, device="cuda") < density)
        keys.copy_(segments(2, 1, 500, "cuda"))
        graph.replay()
        keep = definition(mask, None, None, 500, -100, 50)
        assert torch.equal(layout.dense(Mask(*packed), -100, 50, 500, 512), keep)
        keep = definition(None, None, keys, 500, -100, 50)
        tiles = Mask(*listed, k_segments=keys)
        assert torch.equal(layout.dense(tiles, -100, 50, 500, 500), keep)
