"""A fixed order for the additions to dq, so that the backward with mma.sync repeats bit for bit.

A counter for each step of queries says how many blocks of keys have added to its dq. A block of keys adds when all blocks before
it that see the step have done so. So it waits only for programs with lower numbers, which began before it: of those that are not
done the first one waits for nobody.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def turn_of(start_q, start_k, band_lo, N: gl.constexpr):
    """Return how many blocks of `N` keys see the step of query `start_q` before the block of `start_k` does, which sees it too."""
    return start_k // N - gl.maximum(start_q + band_lo, 0) // N


@gluon.jit
def await_turn(counter, turn):
    """Wait until `turn` blocks have added to a step, and order what follows after that."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred at_turn;
        poll:
        ld.acquire.gpu.global.b32 $0, [$1];
        setp.eq.s32 at_turn, $0, $2;
        @!at_turn bra poll;
        }""",
        "=&r,l,r",
        [counter, turn],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def pass_turn(counter):
    """Count one block more, once all that this block's threads have added to a step is in memory."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        mov.u32 $0, %tid.x;
        setp.eq.u32 first, $0, 0;
        bar.sync 0;
        fence.acq_rel.gpu;
        @first red.relaxed.gpu.global.add.s32 [$1], 1;
        }""",
        "=&r,l",
        [counter],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
