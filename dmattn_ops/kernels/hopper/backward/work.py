"""Which blocks of the SM 9.0 backward a program works on: those that its producer draws.

Blocks are numbered longest first within a group of heads. A program draws the next number when it has issued
a block's last loads, so that those of the next block run while this one is still multiplied and stored: earlier, it would
reserve a long block while it is busy with another one. Numbers are drawn and not derived from the program's, so that every
block with a lower one has been begun.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.backward.types import Place
from dmattn_ops.kernels.hopper.gluon_compat import mbarrier
from dmattn_ops.kernels.hopper.kinds import BAND, RAGGED
from dmattn_ops.kernels.hopper.lists import named_tile

RECEIVERS = gl.constexpr(4)  # two consumers and their reducers


@gluon.jit
def block_of(block, n_blocks, n_heads, heads_per_group, first_ranks, ranks_in_row):
    """Return (rank of the key tile, key head): rank 0, the longest tiles, first, so that no long block starts last.

    Groups of heads share L2. Inside a group, the first `first_ranks` tiles of a head come one after the other, then as many
    of the next head; after those of the last head, rows of `ranks_in_row` tiles of each head.
    """
    per_group = n_blocks * heads_per_group
    group = block // per_group
    inside = block - group * per_group
    width = gl.minimum(heads_per_group, n_heads - group * heads_per_group)
    first = gl.minimum(first_ranks, n_blocks)
    start = 0
    in_row = ranks_in_row
    if inside < first * width:
        in_row = first
    else:
        inside -= first * width
        start = first
    row = inside // (in_row * width)
    inside -= row * (in_row * width)
    start += row * in_row
    length = gl.minimum(in_row, n_blocks - start)
    head = inside // length
    return start + inside - head * length, group * heads_per_group + head


@gluon.jit
def place_of(block, order, problem, T: gl.constexpr):
    """Return the place of a block; lists and records say which tile has which rank."""
    tile, kv_index = block_of(
        block, order.n_blocks, order.n_heads, order.heads_per_group, order.first_ranks, order.ranks_in_row
    )
    batch = kv_index // problem.kv_heads
    kv_head = kv_index - batch * problem.kv_heads
    if problem.shares is not None:
        rank = tile
        tile = rank // problem.shares
        batch = batch * problem.shares + rank - tile * problem.shares
    if T.MASK != BAND:
        tile = gl.load(record_of(Place(tile, batch, kv_head), problem.mask))
        if T.MASK != RAGGED:
            tile = named_tile(tile, order.n_blocks - 1)
    return Place(tile, batch, kv_head)


@gluon.jit
def split_place(place, shares):
    """Return (place, share) from what `place_of` returns."""
    share = 0
    if shares is not None:
        share = place.batch % shares
        place = Place(place.tile, place.batch // shares, place.head)
    return place, share


@gluon.jit
def record_of(place, mask):
    """Return where the list of a place's key tile begins, for the first query head of its key head."""
    at = mask.lists + place.batch.to(gl.int64) * mask.list_b + place.head.to(gl.int64) * mask.list_kv
    return at + place.tile.to(gl.int64) * mask.list_width


@gluon.jit
def announce(turn, place, work):
    """Tell the receivers a program's `turn`-th block: `place` is that of `place_of`, a tile of -1 ends the blocks.

    Tiles of dq follow in the same way (`finish.py`), until another -1.
    """
    PARTS: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    slot = turn & 1
    at = gl.arange(0, 4, layout=PARTS)
    mbarrier.wait(work.empty.index(slot), ((turn >> 1) & 1) ^ 1)
    work.places.index(slot).store(gl.where(at == 0, place.tile, gl.where(at == 1, place.batch, place.head)))
    mbarrier.arrive(work.full.index(slot), count=1)


@gluon.jit
def receive(turn, work):
    """Return the place of a program's `turn`-th block or tile of dq."""
    PARTS: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    slot = turn & 1
    mbarrier.wait(work.full.index(slot), (turn >> 1) & 1)
    parts = work.places.index(slot).load(PARTS)
    at = gl.arange(0, 4, layout=PARTS)
    tile = gl.sum(gl.where(at == 0, parts, 0), 0)
    batch = gl.sum(gl.where(at == 1, parts, 0), 0)
    head = gl.sum(gl.where(at == 2, parts, 0), 0)
    mbarrier.arrive(work.empty.index(slot), count=1)
    return Place(tile, batch, head)
