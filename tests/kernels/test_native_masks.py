"""Lists and bits that the C++ kernels write, against a brute-force reading of the same mask."""

from __future__ import annotations

import random

import pytest
import torch
from native_calls import FREE, LENGTHS, band_keep, blocky, listed, packed
from torch import Tensor

from dmattn_ops.call import UNBOUNDED
from dmattn_ops.kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason=f"THE C++ KERNELS ARE NOT TESTED: {native.reason()}")

MASK_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)


def brute_force(keep: Tensor) -> tuple[list[list[int]], list[list[int]]]:
    """Return partial and full tiles of each query tile of a dense `keep` `[Sq, Sk]`, in Python."""
    partial: list[list[int]] = []
    full: list[list[int]] = []
    for i in range(0, keep.shape[0], 128):
        kinds = {}
        for j in range(0, keep.shape[1], 128):
            tile = keep[i : i + 128, j : j + 128]
            kinds[j // 128] = 0 if not tile.any() else 2 if tile.shape == (128, 128) and tile.all() else 1
        partial.append([j for j, kind in kinds.items() if kind == 1])
        full.append([j for j, kind in kinds.items() if kind == 2])
    return partial, full


def check_lists(lists: Tensor, keep: Tensor) -> None:
    """Compare the lists `[rows, 4 + capacity]` of one head with a dense `keep` `[own, other]`."""
    partial, full = brute_force(keep)
    if len(partial) == 1:  # at least two records, the second one empty
        partial.append([])
        full.append([])
    work = [len(p) + len(f) for p, f in zip(partial, full, strict=True)]
    assert lists.shape[0] == len(work)
    ranked = sorted(range(len(work)), key=lambda tile: -work[tile])
    assert lists[:, 0].tolist() == ranked
    for record, p, f in zip(lists.tolist(), partial, full, strict=True):
        assert record[1:4] == [len(p), len(f), 0]
        assert record[4 : 4 + len(p) + len(f)] == p + f


def check_bits(bits: Tensor, lists: Tensor, keep: Tensor) -> None:
    """Compare the bits `[128 tiles, words]` of the partial tiles of one head with `keep` `[own, other]`."""
    padded = torch.zeros(bits.shape[0], bits.shape[1] * 32, dtype=torch.bool)
    padded[: keep.shape[0], : keep.shape[1]] = keep
    unpacked = ((bits.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)) & 1).bool().flatten(1)
    for tile, record in enumerate(lists.tolist()):
        for other in record[4 : 4 + record[1]]:
            where = (slice(tile * 128, tile * 128 + 128), slice(other * 128, other * 128 + 128))
            assert torch.equal(unpacked[where], padded[where])


@pytest.mark.parametrize("seed", range(60))
def test_pack_mask_matches_a_brute_force_reading(seed):
    pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, heads, seqlen_q, seqlen_k = pick.choice((1, 2)), pick.choice((1, 2)), *pick.choices((*LENGTHS, 400), k=2)
    keep = blocky((batch, pick.choice((1, heads)), pick.choice((1, seqlen_q)), seqlen_k), generator)
    dtype = pick.choice(MASK_DTYPES)
    mask = torch.where(keep, torch.randint(1, 100, keep.shape, generator=generator), 0).to(dtype)
    if pick.random() < 0.3:
        mask = mask.transpose(2, 3).contiguous().transpose(2, 3)
    lo = pick.randrange(-300, 300)
    band = pick.choice((FREE, (-UNBOUNDED, pick.randrange(-200, 200)), (lo, lo + pick.randrange(0, 200))))
    keep = keep & band_keep(seqlen_q, seqlen_k, band)
    q_segments = k_segments = None
    if pick.random() < 0.5:
        k_segments = torch.randint(0, 2, (1, heads, seqlen_k), generator=generator, dtype=torch.int64).sort(-1).values
        q_segments = torch.randint(0, 2, (batch, seqlen_q), generator=generator, dtype=torch.int64)
        keep = keep & (q_segments[:, None, :, None] == k_segments.unsqueeze(2))
    tiles = packed(mask, seqlen_q, band, q_segments, k_segments, batch=batch, heads=heads)
    keep = keep.expand(batch, heads, seqlen_q, seqlen_k)
    for b in range(batch):
        for h in range(heads):
            check_lists(tiles.row_tiles[b, h], keep[b, h])
            check_lists(tiles.col_tiles[b, h], keep[b, h].T)
            check_bits(tiles.row_bits[b, h], tiles.row_tiles[b, h], keep[b, h])
            check_bits(tiles.col_bits[b, h], tiles.col_tiles[b, h], keep[b, h].T)


def test_a_mask_that_may_be_additive_is_refused():
    with pytest.raises(TypeError, match="mask must have dtype bool"):
        packed(torch.zeros(1, 1, 8, 8), 8, batch=1, heads=1)


@pytest.mark.parametrize("seed", range(60))
def test_list_tiles_matches_a_brute_force_reading(seed):
    pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, heads, seqlen_q, seqlen_k = pick.choice((1, 2)), pick.choice((1, 2)), *pick.choices((*LENGTHS, 500), k=2)
    documents, dtype = pick.choice((1, 2, 5)), pick.choice((torch.int32, torch.int64))
    k_segments = torch.randint(0, documents, (batch, heads, seqlen_k), generator=generator, dtype=dtype)
    k_segments = k_segments.sort(-1).values if pick.random() < 0.7 else k_segments
    q_segments = None
    if pick.random() < 0.6:
        q_segments = torch.randint(0, documents, (1, seqlen_q), generator=generator, dtype=dtype).sort(-1).values
    lo = pick.randrange(-300, 300)
    band = pick.choice((FREE, (-UNBOUNDED, pick.randrange(-200, 200)), (lo, lo + pick.randrange(0, 200))))
    rows = torch.zeros(1, 1, 1, 1) if q_segments is None else q_segments[:, None, :, None]
    keep = (rows == k_segments.unsqueeze(2)) & band_keep(seqlen_q, seqlen_k, band)
    tiles = listed(k_segments, seqlen_q, band, q_segments)
    keep = keep.expand(batch, heads, seqlen_q, seqlen_k)
    for b in range(batch):
        for h in range(heads):
            check_lists(tiles.row_tiles[b, h], keep[b, h])
            check_lists(tiles.col_tiles[b, h], keep[b, h].T)
