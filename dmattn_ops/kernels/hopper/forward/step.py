"""One step of a walk of the SM 9.0 forward: the scores of a tile, what is visible of it, and P of the next.

`advance` is the step; the others are also for the first tile of a walk (`kernel.consume`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.columns import (
    add_products,
    as_operand,
    await_products,
    multiply,
    pair,
    rows_of,
    transposed,
)
from dmattn_ops.kernels.hopper.constants import ROWS, TILE, accumulator
from dmattn_ops.kernels.hopper.dropout import drop
from dmattn_ops.kernels.hopper.forward.softmax import largest, rescale, softmax_next
from dmattn_ops.kernels.hopper.forward.types import Sums
from dmattn_ops.kernels.hopper.forward.walk import key_tile
from dmattn_ops.kernels.hopper.gluon_compat import mbarrier, reinterpret, warpgroup_mma_wait
from dmattn_ops.kernels.hopper.kinds import BITS, INTERVALS, SEGMENTS, has_lists
from dmattn_ops.kernels.hopper.scores import FULL_BIAS, KEY_BIAS, TILED_BIAS, tanh
from dmattn_ops.kernels.hopper.unseen import clear_unseen


class Keys(NamedTuple):
    """The keys of a tile that `hide_keys` tests."""

    first: Any  # the number of the first one
    segments: Any  # of all, -2 past the end; of whole keys words in which hidden ones have a bit; without segments 0


@gluon.jit
def soften(s, scales, T: gl.constexpr):
    """Return scores before `scale`: tanh of the products times `cap_inner` under a soft cap, else the products."""
    if T.SOFTCAP:
        s = tanh(s * scales.cap_inner)
    return s


@gluon.jit
def stored_bias(step, biases, C: gl.constexpr, T: gl.constexpr):
    """Return the bias of a step's keys, `[BN]` or in tiles `[64, BN]`, in its own dtype; 0 where shared memory holds none.

    A dtype of 16 bits takes half the registers. Call it before the product of the same step is issued, like `hidden_words`.
    """
    BN: gl.constexpr = T.BN
    SCORES: gl.constexpr = accumulator(T.BN)
    if T.BIAS == KEY_BIAS:
        return biases.index(step % T.STAGES).load(gl.SliceLayout(0, SCORES))
    elif T.BIAS == TILED_BIAS:
        return biases.index((step % T.STAGES) * (T.BM // ROWS) + C).reshape([ROWS, BN]).load(SCORES)
    else:
        return 0


@gluon.jit
def first_key(i, visible, T: gl.constexpr):
    """Return the first key of the `i`-th tile of the walk."""
    return key_tile(i, visible.walk, T) * T.BN


@gluon.jit
def load_full_bias(i, visible, MASKED: gl.constexpr, T: gl.constexpr):
    """Return the bias `[64, BN]` of the `i`-th tile from memory, or 0 where there is none per pair, or shared memory has it."""
    if T.BIAS == FULL_BIAS:
        first = first_key(i, visible, T)
        if has_lists(T.MASK) and not MASKED:  # whatever a list says
            first = gl.minimum(first, visible.seqlen_k - T.BN)
        column = first + gl.arange(0, T.BN, layout=gl.SliceLayout(0, accumulator(T.BN)))
        at = visible.bias[:, None] + column[None, :]
        if MASKED:  # full tiles end before the keys do
            added = gl.load(at, mask=(column < visible.seqlen_k)[None, :], other=0.0)
        else:
            added = gl.load(at)
        return added
    else:
        return 0


@gluon.jit
def widened(x):
    """Return pairs of 16-bit floats as float32, an instruction each: the compiler takes three for two of bfloat16."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], gl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(gl.float32)


@gluon.jit
def add_bias(s, added, stored, scale, T: gl.constexpr):
    """Return scores with a full bias or one per key; they stay products where they are neither biased nor NATURAL.

    One rounding, as in the backward: where biases are large, two would not give the same scores there.
    """
    if T.BIAS == KEY_BIAS:
        s = gl.fma(s, scale, widened(stored)[None, :])
    elif T.BIAS == TILED_BIAS:
        s = gl.fma(s, scale, widened(stored))
    elif T.BIAS == FULL_BIAS:
        s = gl.fma(s, scale, added.to(gl.float32))
    elif T.NATURAL:
        s = gl.fma(s, scale, 0.0)
    return s


@gluon.jit
def hidden_words(i, step, words, n_partial, C: gl.constexpr, T: gl.constexpr):
    """Return `[64, BN / 32]` inverted mask bits of the `i`-th tile, 0 for full tiles.

    Call it before the product of the same step is issued: loads from shared memory queue behind matrix instructions,
    and one still queued when the tile is released would read the next tile's bits.
    """
    BN: gl.constexpr = T.BN
    cube = gl.zeros([ROWS, BN], gl.int32, layout=accumulator(T.BN)).reshape([ROWS, BN // 32, 32])
    WORDS: gl.constexpr = gl.SliceLayout(2, cube.type.layout)
    bits = words.index((step % T.STAGES) * (T.BM // ROWS) + C).reshape([ROWS, TILE // 32])
    seen = bits.slice(0, T.BN // 32, dim=1).load(WORDS)
    if T.BN != TILE:
        second = bits.slice(T.BN // 32, T.BN // 32, dim=1).load(WORDS)
        seen = gl.where(i % (TILE // T.BN) == 0, seen, second)
    return gl.where(i < n_partial, ~seen, 0)


@gluon.jit
def stored_mask(i, step, smem, n_partial, C: gl.constexpr, MASKED: gl.constexpr, T: gl.constexpr):
    """Return the part of the mask of the `i`-th tile that shared memory holds: `hidden_words`, or which of the block's queries see
    each key of the step, as `load_keys` stored it. 0 for other masks.

    Call it before the product of the same step is issued, like `hidden_words`.
    """
    BN: gl.constexpr = T.BN
    if T.MASK == BITS and MASKED:
        return hidden_words(i, step, smem.words, n_partial, C, T)
    elif T.MASK == INTERVALS and MASKED:
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        pairs = gl.zeros([ROWS, BN], gl.float32, layout=accumulator(T.BN)).reshape([ROWS, BN // 2, 2])
        KEYS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, pairs.type.layout))
        return reinterpret(smem.ranges.index(step % T.STAGES), gl.int32, [BN // 2], PLAIN).load(KEYS)
    else:
        return 0


@gluon.jit
def show_between(s, low, column, high):
    """Return scores with -inf where not `low <= column <= high`.

    Both tests and the selection are one operation: the compiler would select twice, or make all tests first and run out of
    predicates. So they are in `show_ranges` and `hide_between`.
    """
    CODE: gl.constexpr = (
        "{ .reg .pred seen; setp.le.s32 seen, $1, $2; setp.le.and.s32 seen, $2, $3, seen;"
        " selp.b32 $0, $4, 0xff800000, seen; }"
    )
    given = [low, column, high, s.to(gl.int32, bitcast=True)]
    shown = gl.inline_asm_elementwise(CODE, "=r,r,r,r,r", given, gl.int32, is_pure=True, pack=1)
    return shown.to(gl.float32, bitcast=True)


@gluon.jit
def show_ranges(s, query, ranges, BN: gl.constexpr):
    """Return scores `[64, BN]` with -inf where a key's range, as `load_keys` stored it, does not hold the query of the block.

    A word has the four bytes of two neighbouring keys. With the query taken from the first and added to the second byte of each,
    one of a key has its highest bit where that query does not see it, and none overflows: all numbers are below 256.
    """
    PAIRS: gl.constexpr = gl.SliceLayout(2, s.reshape([ROWS, BN // 2, 2]).type.layout)
    pairs = s.reshape([ROWS, BN // 2, 2])
    moved = gl.convert_layout(query * 0x00FF00FF, gl.SliceLayout(1, PAIRS))[:, None] + ranges[None, :]
    second = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(0, pairs.type.layout)))
    hiding = 0x8080 << (16 * gl.expand_dims(gl.expand_dims(second, 0), 0))
    CODE: gl.constexpr = (
        "{ .reg .pred seen; .reg .b32 both; and.b32 both, $1, $2; setp.eq.s32 seen, both, 0;"
        " selp.b32 $0, $3, 0xff800000, seen; }"
    )
    given = [moved[:, :, None], hiding, pairs.to(gl.int32, bitcast=True)]
    shown = gl.inline_asm_elementwise(CODE, "=r,r,r,r", given, gl.int32, is_pure=True, pack=1)
    shown = shown.to(gl.float32, bitcast=True).reshape([ROWS, BN])
    return gl.convert_layout(shown, accumulator(BN), assert_trivial=True)


@gluon.jit
def hide_between(s, first, visible, T: gl.constexpr):
    """Return scores `[64, BN]` of keys from `first` on with -inf where an interval hides a key from a query."""
    query = visible.q_segment[:, None] + visible.block_first
    key = first + gl.arange(0, T.BN, layout=gl.SliceLayout(0, accumulator(T.BN)))
    key = gl.minimum(key, visible.seqlen_k - 1)  # those behind it have no range
    begin = gl.load(visible.hidden_from + key)[None, :]
    end = gl.load(visible.hidden_to + key)[None, :]
    CODE: gl.constexpr = (
        "{ .reg .pred seen; setp.lt.s32 seen, $1, $2; setp.ge.or.s32 seen, $1, $3, seen;"
        " selp.b32 $0, $4, 0xff800000, seen; }"
    )
    given = [query, begin, end, s.to(gl.int32, bitcast=True)]
    shown = gl.inline_asm_elementwise(CODE, "=r,r,r,r,r", given, gl.int32, is_pure=True, pack=1)
    return shown.to(gl.float32, bitcast=True)


@gluon.constexpr_function
def lanes_of_keys(count):
    """Return the layout of keys `[count, 32]` in which each of four warps has all of them, and a lane one of each 32."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1 << k, 0] for k in range(count.bit_length() - 1)],
        lane_bases=[[0, 1 << k] for k in range(5)],
        warp_bases=[[0, 0], [0, 0]],
        block_bases=[],
        shape=[count, 32],
    )


@gluon.jit
def tested_keys(tile, visible, T: gl.constexpr):
    """Return the keys of a tile as `hide` tests them."""
    first = tile * T.BN
    if T.WHOLE_KEYS:
        KEYS: gl.constexpr = lanes_of_keys(T.BN // 32)
        word = gl.arange(0, T.BN // 32, layout=gl.SliceLayout(1, KEYS))[:, None]
        place = gl.arange(0, 32, layout=gl.SliceLayout(0, KEYS))[None, :]
        key = first + word * 32 + place
        segments = gl.load(visible.segments + key, mask=key < visible.seqlen_k, other=-2)
        return Keys(first, gl.sum(gl.where(segments == 0, 0, 1 << place), 1))
    elif T.MASK == SEGMENTS:
        key = first + gl.arange(0, T.BN, layout=gl.SliceLayout(0, accumulator(T.BN)))
        return Keys(first, gl.load(visible.segments + key, mask=key < visible.seqlen_k, other=-2))
    else:
        return Keys(first, 0)


@gluon.jit
def asked_keys(i, visible, MASKED: gl.constexpr, T: gl.constexpr):
    """Return the `tested_keys` of the `i`-th tile where they take few registers, else 0.

    Call it before the product of the same step is issued, so that they are on their way meanwhile.
    """
    if MASKED and T.WHOLE_KEYS:
        return tested_keys(key_tile(i, visible.walk, T), visible, T)
    else:
        return 0


@gluon.jit
def hide(s, i, asked, stored, visible, T: gl.constexpr):
    """Return scores `[64, BN]` of the `i`-th tile of the walk with what is invisible at -inf; `asked` are its `asked_keys`."""
    if T.MASK == BITS or T.WHOLE_KEYS:
        return hide_keys(s, asked, stored, visible, T)
    else:
        return hide_keys(s, tested_keys(key_tile(i, visible.walk, T), visible, T), stored, visible, T)


@gluon.jit
def hide_words(s, hidden, BN: gl.constexpr):
    """Return scores `[64, BN]` with -inf where words `[64 or 1, BN / 32]` have the bit of a key."""
    # a thread's columns are 8 k + 2 (lane & 3) + {0, 1}: shifts per word, then constants
    cube = s.reshape([ROWS, BN // 32, 32])
    CUBE: gl.constexpr = cube.type.layout
    column = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(0, CUBE)))
    column = gl.expand_dims(gl.expand_dims(column, 0), 0)
    # prmt spreads the sign of a byte over a word, lop3 puts -inf there: two instructions per score. Written with
    # operators, LLVM makes three of them; selects would spill predicates
    word = (hidden[:, :, None] >> (column & 6)) << (7 - (column & 1))
    byte = 0x8888 + 0x1111 * (column >> 3)
    CODE: gl.constexpr = "{ .reg .b32 drop; prmt.b32 drop, $1, 0, $2; lop3.b32 $0, $3, drop, 0xff800000, 0xb8; }"
    given = [word, byte, cube.to(gl.int32, bitcast=True)]
    scores = gl.inline_asm_elementwise(CODE, "=r,r,r,r", given, gl.int32, is_pure=True, pack=1)
    scores = scores.to(gl.float32, bitcast=True).reshape([ROWS, BN])
    return gl.convert_layout(scores, accumulator(BN), assert_trivial=True)


@gluon.jit
def hide_whole_keys(s, words, BN: gl.constexpr):
    """Return scores `[64, BN]` with -inf for keys that `tested_keys` found hidden from all queries."""
    WORDS: gl.constexpr = gl.SliceLayout(2, s.reshape([ROWS, BN // 32, 32]).type.layout)
    return hide_words(s, gl.convert_layout(words, gl.SliceLayout(0, WORDS), assert_trivial=True)[None, :], BN)


@gluon.jit
def hide_keys(s, keys, stored, visible, T: gl.constexpr):
    """Return scores `[64, BN]` with what is invisible at -inf; `keys` are their `tested_keys`, of which bits need none."""
    BN: gl.constexpr = T.BN
    SCORES: gl.constexpr = accumulator(T.BN)
    if T.MASK == BITS:
        return hide_words(s, stored, BN)
    else:
        column = gl.arange(0, T.BN, layout=gl.SliceLayout(0, SCORES))
        first = keys.first
        # (column & 6) is the lane's share of the column, the rest a constant of the register
        lane, constant = (column & 6)[None, :], (column & ~6)[None, :]
        if T.MASK == INTERVALS:  # inside the band
            s = show_ranges(s, visible.q_segment, stored, T.BN)
            if T.HIDDEN:
                s = hide_between(s, first, visible, T)
        elif T.HAS_LO:
            low, high = (visible.q_lo - first)[:, None] - lane, (visible.q_hi - first)[:, None] - lane
            s = show_between(s, low, constant, high)
        elif T.HAS_HI or not T.WHOLE_KEYS:  # whole keys are hidden behind the last one
            s = gl.where((visible.q_hi - first)[:, None] - lane >= constant, s, float("-inf"))
        if T.WHOLE_KEYS:
            s = hide_whole_keys(s, keys.segments, T.BN)
        elif T.MASK == SEGMENTS:
            s = gl.where(visible.q_segment[:, None] == keys.segments[None, :], s, float("-inf"))
        return s


@gluon.jit
def rescale_second(acc, factor, DV2: gl.constexpr):
    """Return the second part of acc times the factors of its rows, if there is one."""
    if DV2 > 0:
        return rescale(acc[1], factor, DV2)
    else:
        return 0


@gluon.jit
def advance(i, step, sums, p, q, visible, smem, bars, scales, C: gl.constexpr, MASKED: gl.constexpr, T: gl.constexpr):
    """Add tile `i`, whose P are given, to acc; return the sums, and P of tile `i + 1`."""
    BN: gl.constexpr = T.BN
    THREE: gl.constexpr = T.BM == 3 * ROWS
    OVERLAP: gl.constexpr = T.PER_SM == 1 and not THREE  # others have no registers for the P of two tiles
    dtype: gl.constexpr = smem.v[0].dtype
    acc = sums.acc
    peak = sums.peak
    b = step % T.STAGES
    b_next = (step + 1) % T.STAGES
    k_next = transposed(rows_of(smem.k, b_next, T.BN, T.D, T.D2))
    asked = asked_keys(i + 1, visible, MASKED, T)
    mbarrier.wait(bars.k_full.index(b_next), ((step + 1) // T.STAGES) & 1)
    mbarrier.wait(bars.v_full.index(b), (step // T.STAGES) & 1)
    if T.EDGES and MASKED:
        if visible.some_unseen:
            values = rows_of(smem.v, b, T.BN, T.DV, T.DV2)
            clear_unseen(values, first_key(i, visible, T), visible.seen, T.BN)
    stored = stored_mask(i + 1, step + 1, smem, visible.n_partial, C, MASKED, T)
    bias = stored_bias(step + 1, smem.biases, C, T)
    empty = gl.zeros([ROWS, BN], gl.float32, layout=accumulator(T.BN))
    s = multiply(q, k_next, empty, False)
    acc = add_products(p, rows_of(smem.v, b, T.BN, T.DV, T.DV2), acc, T.DV2)
    if OVERLAP:
        s = warpgroup_mma_wait(2 if T.DV2 > 0 else 1, deps=(s,))
    elif T.DV2 > 0:
        s, first, second = warpgroup_mma_wait(0, deps=(s, acc[0], acc[1]))
        acc = (first, second)
    else:
        s, first = warpgroup_mma_wait(0, deps=(s, acc[0]))
        acc = (first,)
    s = soften(s, scales, T)
    added = load_full_bias(i + 1, visible, MASKED, T)
    s = add_bias(s, added, bias, scales.scale, T)
    if MASKED:
        s = hide(s, i + 1, asked, stored, visible, T)
    if T.ROW_MAX:
        peak = gl.maximum(peak, largest(s, peak, T.BN))
    tile = softmax_next(s, sums.top, sums.total, scales.scale, dtype, T.NATURAL, THREE, T.BN)
    p = tile.p
    if T.DROPOUT:
        p = drop(p, visible.dropout, visible.q_first, first_key(i + 1, visible, T), T.BN)
    p = as_operand(p, T.DV)
    if OVERLAP:
        acc = await_products(acc, T.DV2)
    acc = pair(rescale(acc[0], tile.factor, T.DV), rescale_second(acc, tile.factor, T.DV2), T.DV2)
    mbarrier.arrive(bars.k_empty.index(b_next), count=1)
    return Sums(acc, tile.total, tile.top, peak), p
