"""A fixed order for the additions to dq, so that the SM 9.0 backward repeats bit for bit.

A counter per 64 x 64 piece of dq says how many key tiles have added to it; key tile `n` adds when all visible tiles
before it have. A block thus waits only for blocks of lower program ids, which started before it: it cannot deadlock
whatever else runs on the GPU. All blocks of a head walk the query tiles downwards. Then tile `n` follows `n - 1` through
the same query tiles (no band), or meets each one when `n - 1` has left it (causal, window), and waits for it at most once,
while it starts: about 2 us after `n - 1`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def ordered_span(span, HAS_LO: gl.constexpr):
    """Return the query tiles of `band_tiles` such that all of them downwards are the full tiles, then those to be tested.

    A lower limit of the band makes the last query tiles of a key tile partial: all are tested then.
    """
    first, full_first, full_end, end = span
    if HAS_LO:
        full_first = end
    else:
        full_first = gl.where(full_end > full_first, full_first, end)
    return first, full_first, end, end


@gluon.jit
def turn_of(tile, m, band_lo, BM: gl.constexpr, BN: gl.constexpr, HAS_LO: gl.constexpr):
    """Return how many key tiles before `tile` see query tile `m`, given that `tile` does."""
    turn = tile
    if HAS_LO:
        turn = tile - gl.maximum(m * BM + band_lo, 0) // BN
    return turn


@gluon.jit
def await_turn(counter, turn):
    """Wait until `turn` additions to a piece are in memory, and order this warp's TMA operations after them."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred early;
        .reg .b32 added;
        poll:
        ld.acquire.gpu.global.b32 added, [$1];
        setp.ne.s32 early, added, $2;
        @early bra poll;
        fence.proxy.async.global;
        mov.b32 $0, added;
        }""",
        "=r,l,r",
        [counter, turn],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def pass_turn(counter):
    """Wait until this warp's additions are in memory, not only read (`tma.store_wait`), then count one for the piece."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 lane;
        cp.async.bulk.wait_group 0;
        fence.proxy.async.global;
        bar.warp.sync 0xffffffff;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        @first red.release.gpu.global.add.s32 [$1], 1;
        mov.b32 $0, 0;
        }""",
        "=r,l",
        [counter],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
