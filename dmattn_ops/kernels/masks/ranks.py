"""The order of lists: word 0 of the records names the tiles of a side, those with the longest lists first."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dmattn_ops.launching.launch import launch
from dmattn_ops.launching.overlap import follow_kernel_before

RANKED_AT_ONCE = 64  # records that a program ranks


@triton.jit
def work_before(work, tile, other_work, other, count):
    """Count the `other` tiles that come before each `tile`: those with more work, or as much and a lower index."""
    more = other_work[None, :] > work[:, None]
    tie = (other_work[None, :] == work[:, None]) & (other[None, :] < tile[:, None])
    return tl.sum(((more | tie) & (other < count)[None, :]).to(tl.int32), axis=1)


@triton.jit(do_not_specialize=["row_records", "col_records", "row_width", "col_width"])
def rank_kernel(
    row_tiles, col_tiles, row_records, col_records, row_width, col_width, OWN: tl.constexpr, OTHER: tl.constexpr
):
    """Write word 0 of the records: the tiles of a side, those with the most work first."""
    follow_kernel_before()
    rank_block(tl.program_id(0), row_tiles, col_tiles, row_records, col_records, row_width, col_width, OWN, OTHER)


@triton.jit
def rank_block(
    index, row_tiles, col_tiles, row_records, col_records, row_width, col_width, OWN: tl.constexpr, OTHER: tl.constexpr
):
    """Write word 0 of the records of the `index`-th block of `OWN` tiles: first those of rows, then of columns."""
    row_blocks = tl.cdiv(row_records, OWN)
    blocks = row_blocks + tl.cdiv(col_records, OWN)
    matrix = index // blocks
    block = index % blocks
    is_row = block < row_blocks
    block = tl.where(is_row, block, block - row_blocks)
    records = tl.where(is_row, row_records, col_records)
    width = tl.where(is_row, row_width, col_width)
    lists = row_tiles
    if not is_row:
        lists = col_tiles
    lists += matrix.to(tl.int64) * records * width
    own = block * OWN + tl.arange(0, OWN)
    record = lists + own.to(tl.int64) * width
    work = tl.load(record + 1, own < records, other=0) + tl.load(record + 2, own < records, other=0)
    place = tl.zeros([OWN], tl.int32)
    for at in range(0, records, OTHER):
        other = at + tl.arange(0, OTHER)
        others = lists + other.to(tl.int64) * width
        other_work = tl.load(others + 1, other < records, other=0) + tl.load(others + 2, other < records, other=0)
        place += work_before(work, own, other_work, other, records)
    tl.store(lists + place.to(tl.int64) * width, own, own < records)


class ListSizes(NamedTuple):
    """The sizes of lists `[Bm, Hm, records, width]` of both sides; 0 of one that is None."""

    batch: int
    heads: int
    row_records: int
    row_width: int
    col_records: int
    col_width: int


def sizes_of(row_tiles: Tensor | None, col_tiles: Tensor | None) -> ListSizes:
    """Return the sizes of lists, of which one side may be None."""
    given = col_tiles if row_tiles is None else row_tiles
    assert given is not None
    rows, cols = ((0, 0) if side is None else side.shape[2:] for side in (row_tiles, col_tiles))
    return ListSizes(*given.shape[:2], *rows, *cols)


def rank_tiles(row_tiles: Tensor | None, col_tiles: Tensor | None) -> None:
    """Write word 0 of all records, `[Bm, Hm, tiles, width]`, whose lists are written: longest lists first."""
    sizes = sizes_of(row_tiles, col_tiles)
    launch(
        rank_kernel, (sizes.batch * sizes.heads * rank_blocks(sizes.row_records, sizes.col_records),),
        col_tiles if row_tiles is None else row_tiles, row_tiles if col_tiles is None else col_tiles,
        sizes.row_records, sizes.col_records, sizes.row_width, sizes.col_width,
        OWN=RANKED_AT_ONCE, OTHER=128, num_warps=4, follows=True,
    )  # fmt: skip


def rank_blocks(row_records: int, col_records: int) -> int:
    """Return the number of blocks of one matrix that `rank_block` has to rank."""
    return triton.cdiv(row_records, RANKED_AT_ONCE) + triton.cdiv(col_records, RANKED_AT_ONCE)
