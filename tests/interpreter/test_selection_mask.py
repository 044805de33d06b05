"""The Triton kernel of chosen blocks against the definition, in the interpreter."""

from __future__ import annotations

import pytest
import torch
from chosen_cases import Case, draw, visible
from torch import Tensor

from dmattn_ops import meta
from dmattn_ops.bands import band_of
from dmattn_ops.call import TILE
from dmattn_ops.kernels.masks import chosen
from dmattn_ops.masks.chosen import segments_beside
from tests.support.mask_cases import POISON, check_lists, unpack
from tests.support.tile_builder import tile_states

pytestmark = pytest.mark.usefixtures("strict_memory")


def check(case: Case, device: str = "cpu") -> None:
    """Run the launcher into poisoned buffers and compare lists and bits with the definition."""
    keep = visible(case)
    batch, heads, seqlen_q, seqlen_k = keep.shape
    band = band_of(**case.keywords).limits(seqlen_q, seqlen_k)
    segments = segments_beside(case.indices, case.documents, case.padding, batch, seqlen_q, seqlen_k)
    indices, *segments = (part if part is None else part.to(device) for part in (case.indices, *segments))
    outputs = meta.bits_outputs(indices, batch, heads, seqlen_q, seqlen_k, *band)
    for output in outputs:
        output.fill_(POISON)
    chosen.pack_selection(indices, *segments, case.block, seqlen_k, *band, *outputs)
    row_tiles, col_tiles, row_bits, col_bits = (output.cpu() for output in outputs)
    states = tile_states(keep)
    check_lists(row_tiles, states)
    check_lists(col_tiles, states.mT)
    partial = states.eq(1).repeat_interleave(TILE, -2).repeat_interleave(TILE, -1)
    padded = torch.nn.functional.pad(keep, (0, -seqlen_k % TILE, 0, -seqlen_q % TILE))
    assert torch.equal(unpack(row_bits) & partial, padded & partial), repr(case)
    assert torch.equal(unpack(col_bits) & partial.mT, padded.mT & partial.mT), repr(case)


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_any_case_is_what_the_definition_says(first: int):
    for seed in range(first, first + 20):
        check(draw(seed, longest=250))


@pytest.mark.parametrize("block", [1, 5, 128])
def test_tiles_that_several_programs_write(block: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chosen, "_TILES", 2)
    for seed in range(block, block + 3):
        check(with_block(draw(seed, longest=900), block))


@pytest.mark.parametrize("far", [-2, -(1 << 40), 900, 1 << 31, 1 << 40])
def test_numbers_of_no_block_are_none(far: int):
    case = draw(7, longest=300)
    wrong = torch.rand(case.indices.shape) < 0.3
    indices = case.indices.long().masked_fill(wrong, far)
    check(replaced(case, indices))


def with_block(case: Case, block: int) -> Case:
    count = -(-case.seqlen_k // block)
    return Case(case.indices.clamp(max=count - 1), block, *list(vars(case).values())[2:])


def replaced(case: Case, indices: Tensor) -> Case:
    return Case(indices, *list(vars(case).values())[1:])
