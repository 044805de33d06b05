"""A fixed order for the additions to dq, so that the SM 9.0 backward repeats bit for bit.

A counter per 64 x 64 piece of dq says how many key tiles have added to it; key tile `n` adds when all visible tiles
before it have. So a block waits only for lower-numbered blocks. These belong to running programs, whose reducers finish a
block before they take the next: of all unfinished blocks, the one with the lowest number is being computed, and waits for
none. So nothing can deadlock, whatever else runs on the GPU. The blocks of a head walk the query tiles downwards. Then tile
`n` follows `n - 1` through the same query tiles (full, causal), or comes to each one after `n - 1` has left it (window): blocks
that start together wait once, for a fraction of a step each, and not again.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.backward.types import Span


@gluon.jit
def downward_span(span, HAS_LO: gl.constexpr):
    """Return the query tiles of `band_tiles` such that all of them downwards are the full tiles, then those to be tested.

    A lower limit of the band makes the last query tiles of a key tile partial: all are tested then.
    """
    if HAS_LO:
        full_first = span.end
    else:
        full_first = gl.where(span.full_end > span.full_first, span.full_first, span.end)
    return Span(span.first, full_first, span.end, span.end)


@gluon.jit
def turn_of(tile, m, band_lo, T: gl.constexpr):
    """Return how many key tiles before `tile` see query tile `m`, given that `tile` does."""
    turn = tile
    if T.HAS_LO:
        turn = tile - gl.maximum(m * T.BM + band_lo, 0) // T.BN
    return turn


@gluon.jit
def await_turn(counter, turn, seen):
    """Wait until `turn` additions to a piece are in memory, and order this warp's TMA operations after them.

    `seen` is what `count` has seen of the counter, -1 where it did not look.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred at_turn;
        .reg .b32 added;
        mov.b32 added, $3;
        poll:
        setp.eq.s32 at_turn, added, $2;
        @at_turn bra done;
        ld.acquire.gpu.global.b32 added, [$1];
        bra poll;
        done:
        fence.proxy.async.global;
        mov.b32 $0, added;
        }""",
        "=r,l,r,r",
        [counter, turn, seen],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def count(counter, following=None):
    """Add 1 to a counter once all that this warp has added to dq is in memory (`tma.store_wait` waits until it has been read).

    Return what `following`, the counter of this warp's next piece, holds, or anything where that is None. The look costs nothing
    beside the fence, which makes it an acquire; at the next step it would delay the addition by a trip to L2.
    """
    LOOK: gl.constexpr = "mov.b32 $0, lane;" if following is None else "ld.relaxed.gpu.global.b32 $0, [$2];"
    looked_at = counter if following is None else following
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 lane;
        cp.async.bulk.wait_group 0;
        fence.proxy.async.global;
        bar.warp.sync 0xffffffff;
        mov.u32 lane, %laneid;
        """
        + LOOK
        + """
        fence.acq_rel.gpu;
        setp.eq.u32 first, lane, 0;
        @first red.relaxed.gpu.global.add.s32 [$1], 1;
        }""",
        "=&r,l,l",
        [counter, looked_at],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
