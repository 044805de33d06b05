"""How the SM 9.0 backward ends: programs that find no more blocks turn the sums in the workspace into dq.

A separate kernel would start only after the last block, while SMs without blocks are idle. Here a counter for each key head
says how many reducers have added all that their block contributes (two for each block), and a tile of dq waits for the blocks
of its own head only. Tiles are drawn after all blocks have been drawn, by programs that are running, so nothing can deadlock.

Additions are TMA's: a reducer waits until they are complete, fences the async proxy, and counts with a release; a producer's
acquire of the count, its arrival at the barrier of `announce` and `receive` order the consumers' loads behind them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.backward.types import Draw, Place
from dmattn_ops.kernels.hopper.backward.work import announce, receive
from dmattn_ops.kernels.hopper.columns import send_rows, stage_rows
from dmattn_ops.kernels.hopper.constants import TILE, accumulator
from dmattn_ops.kernels.hopper.gluon_compat import tma
from dmattn_ops.kernels.hopper.ragged import load_tile
from dmattn_ops.kernels.hopper.unseen import note_nan_in_parts
from dmattn_ops.kernels.ragged import WORDS as _WORDS

WORDS = gl.constexpr(_WORDS)

# The workspace as it lies in memory: a thread loads 16 bytes at a time, and gets what it would hold of an accumulator of
# 64 queries x D columns (`steps.FRAGMENT`)
_REGISTERS = [[1], [2], [512], [1024], [2048]]
_LANES = [[4], [8], [16], [32], [64]]
_WARPS = [[128], [256]]
FLAT_16 = gl.constexpr(gl.DistributedLinearLayout(_REGISTERS[:3], _LANES, _WARPS, [], [1024]))
FLAT_32 = gl.constexpr(gl.DistributedLinearLayout(_REGISTERS[:4], _LANES, _WARPS, [], [2048]))
FLAT_64 = gl.constexpr(gl.DistributedLinearLayout(_REGISTERS, _LANES, _WARPS, [], [4096]))
FLAT_128 = gl.constexpr(gl.DistributedLinearLayout([*_REGISTERS, [4096]], _LANES, _WARPS, [], [8192]))


@gluon.jit
def await_blocks(counter, blocks):
    """Wait until `blocks` have been counted: their additions to dq are in memory."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred counted;
        .reg .b32 seen;
        poll:
        ld.acquire.gpu.global.b32 seen, [$1];
        setp.ge.s32 counted, seen, $2;
        @counted bra done;
        nanosleep.u32 500;
        bra poll;
        done:
        mov.b32 $0, seen;
        }""",
        "=r,l,r",
        [counter, blocks],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def tiles_drawn(drawn, tiles, tiles_at_once, group):
    """Return the tiles of dq of a draw."""
    draws = (tiles + tiles_at_once - 1) // tiles_at_once
    head = drawn // draws
    first = (drawn - head * draws) * tiles_at_once
    return Draw(head // group, head, first, gl.minimum(first + tiles_at_once, tiles))


@gluon.jit
def hand_out(turn, tickets, blocks_done, work, order, problem, tiles):
    """As the producer, announce tiles of dq as (tile, batch, query head) once their sums are complete, until all are drawn."""
    heads = problem.kv_heads * problem.group
    drawn = gl.atomic_add(tickets, 1, sem="relaxed")
    draw = tiles_drawn(drawn, tiles, order.tiles_at_once, problem.group)
    while draw.kv_head < order.n_heads:
        await_blocks(blocks_done + draw.kv_head, 2 * order.n_blocks)
        tile = draw.tile
        while tile < draw.end:
            announce(turn, Place(tile, draw.head // heads, draw.head % heads), work)
            turn += 1
            tile += 1
        drawn = gl.atomic_add(tickets, 1, sem="relaxed")
        draw = tiles_drawn(drawn, tiles, order.tiles_at_once, problem.group)
    announce(turn, Place(-1, -1, -1), work)


@gluon.jit
def load_sums(out, place, C: gl.constexpr, T: gl.constexpr):
    """Return consumer `C`'s 64 queries of a tile's sums, as accumulators `[64, D]` and `[64, D2]` hold them; of tile 0 for -1.

    They come from L2: what was loaded for -1 may not have been complete.
    """
    D: gl.constexpr = T.D
    D2: gl.constexpr = T.D2
    FLAT: gl.constexpr = FLAT_64 if D == 64 else FLAT_128
    head = (gl.maximum(place.batch, 0) * out.heads + gl.maximum(place.head, 0)).to(gl.int64)
    row = head * out.rows + gl.maximum(place.tile, 0) * TILE + C * 64
    x = gl.load(out.accumulator + row * (D + D2) + gl.arange(0, 64 * D, layout=FLAT), cache_modifier=".cg")
    # bits of the offset, highest first: columns 6, 3-5, rows 4-5, 0-2, columns 1-2, row 3, column 0
    x = x.reshape([D // 64, 8, 4, 8, 4, 2, 2]).permute([2, 5, 3, 0, 1, 4, 6]).reshape([64, D])
    first = gl.convert_layout(x, accumulator(D), assert_trivial=True)
    if D2 > 0:
        FLAT_2: gl.constexpr = FLAT_32 if D2 == 32 else FLAT_16
        at = row * (D + D2) + 64 * D + gl.arange(0, 64 * D2, layout=FLAT_2)
        y = gl.load(out.accumulator + at, cache_modifier=".cg")
        y = y.reshape([D2 // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([64, D2])
        second = gl.convert_layout(y, accumulator(D2), assert_trivial=True)
        return (first, second)
    else:
        return (first,)


@gluon.jit
def finish(turn, out, work, C: gl.constexpr, T: gl.constexpr):
    """As consumer `C`, write its half of each tile of dq that the producer announces, through its piece of shared memory."""
    dq_c = out.dq.index(C)
    dtype: gl.constexpr = out.dq_map[0].dtype
    place = receive(turn, work)
    sums = load_sums(out, place, C, T)
    while place.tile >= 0:
        tile = place.tile
        queries = place.batch
        head = place.head
        turn += 1
        place = receive(turn, work)
        ahead = load_sums(out, place, C, T)
        tma.store_wait(pendings=0)
        if T.WATCH:
            note_nan_in_parts(out.counts, sums)
        stage_rows(sums[0], out.scale, dq_c, T.D, 0, dtype)
        query = tile * TILE + C * 64
        if out.query_tiles is not None:
            own = load_tile(out.query_tiles + tile.to(gl.int64) * WORDS)
            query = own.first + C * 64
            queries = own.own
        send_rows(dq_c, out.dq_map[0], queries, query, head, 0, dtype)
        if T.D2 > 0:  # in the half that the first part leaves
            half = dq_c.slice(8, 8, dim=0)
            stage_rows(sums[1], out.scale, half, T.D2, 0, dtype)
            send_rows(half, out.dq_map[1], queries, query, head, T.D, dtype)
        sums = ahead
    tma.store_wait(pendings=0)


@gluon.jit
def ignore(turn, work):
    """Take part, as a reducer, in the announcements of tiles of dq, which are for the consumers."""
    tile, _, _ = receive(turn, work)
    while tile >= 0:
        turn += 1
        tile, _, _ = receive(turn, work)
