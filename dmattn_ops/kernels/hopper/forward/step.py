"""One step of a walk of the SM 9.0 forward: the scores of a tile, what is visible of it, and P of the next.

`advance` is the step; the others are also for the first tile of a walk (`kernel.consume`).
"""

from __future__ import annotations

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
from dmattn_ops.kernels.hopper.dropout import drop
from dmattn_ops.kernels.hopper.forward.softmax import largest, rescale, softmax_next
from dmattn_ops.kernels.hopper.forward.walk import band_tile, list_tile
from dmattn_ops.kernels.hopper.gluon_compat import mbarrier, warpgroup_mma_wait
from dmattn_ops.kernels.hopper.scores import tanh
from dmattn_ops.kernels.hopper.unseen import clear_unseen


@gluon.jit
def soften(s, cap_inner, SOFTCAP: gl.constexpr):
    """Return scores before `scale`: tanh of the products times `cap_inner` under a soft cap, else the products."""
    if SOFTCAP:
        s = tanh(s * cap_inner)
    return s


@gluon.jit
def stored_bias(
    step, biases, C: gl.constexpr, NC: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, BIAS: gl.constexpr
):
    """Return the bias of a step's keys, `[BN]` or in tiles `[64, BN]`, in its own dtype; 0 where shared memory holds none.

    A dtype of 16 bits takes half the registers. Call it before the product of the same step is issued, like `hidden_words`.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    if BIAS == "key":
        return biases.index(step % STAGES).load(gl.SliceLayout(0, SCORES))
    elif BIAS == "tiles":
        return biases.index((step % STAGES) * NC + C).reshape([64, BN]).load(SCORES)
    else:
        return 0


@gluon.jit
def first_key(i, lists, visible, BN: gl.constexpr, MASK: gl.constexpr):
    """Return the first key of the `i`-th tile of the walk."""
    TILE: gl.constexpr = 128
    _, _, _, begin, end, full_begin, full_end, record, _, n, _, _ = visible
    if MASK == "band" or MASK == "ragged":
        first = band_tile(i, begin, end, full_begin, full_end) * BN
    else:
        first = list_tile(lists, record, i, n, TILE // BN) * BN
    return first


@gluon.jit
def load_full_bias(
    i, lists, visible, bias_rows, BN: gl.constexpr, MASK: gl.constexpr, MASKED: gl.constexpr, BIAS: gl.constexpr
):
    """Return the bias `[64, BN]` of the `i`-th tile from memory, or 0 where there is none per pair, or shared memory has it."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    if BIAS == "full":
        seqlen_k = visible[10]
        column = first_key(i, lists, visible, BN, MASK) + gl.arange(0, BN, layout=gl.SliceLayout(0, SCORES))
        at = bias_rows[:, None] + column[None, :]
        if MASKED:  # full tiles end before the keys do
            added = gl.load(at, mask=(column < seqlen_k)[None, :], other=0.0)
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
def add_bias(s, added, stored, scale, BIAS: gl.constexpr, NATURAL: gl.constexpr):
    """Return scores with a full bias or one per key; they stay products where they are neither biased nor NATURAL.

    One rounding, as in the backward: where biases are large, two would not give the same scores there.
    """
    if BIAS == "key":
        s = gl.fma(s, scale, widened(stored)[None, :])
    elif BIAS == "tiles":
        s = gl.fma(s, scale, widened(stored))
    elif BIAS == "full":
        s = gl.fma(s, scale, added.to(gl.float32))
    elif NATURAL:
        s = gl.fma(s, scale, 0.0)
    return s


@gluon.jit
def hidden_words(
    i, step, words, n_partial, C: gl.constexpr, NC: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    MASK: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Return `[64, BN / 32]` inverted mask bits of the `i`-th tile (0 for full tiles), or 0 without bits.

    Call it before the product of the same step is issued: loads from shared memory queue behind matrix instructions,
    and one still queued when the tile is released would read the next tile's bits.
    """
    ROWS: gl.constexpr = 64
    TILE: gl.constexpr = 128
    if MASK == "bits" and MASKED:
        SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
        cube = gl.zeros([ROWS, BN], gl.int32, layout=SCORES).reshape([ROWS, BN // 32, 32])
        WORDS: gl.constexpr = gl.SliceLayout(2, cube.type.layout)
        bits = words.index((step % STAGES) * NC + C).reshape([ROWS, TILE // 32])
        seen = bits.slice(0, BN // 32, dim=1).load(WORDS)
        if BN != TILE:
            second = bits.slice(BN // 32, BN // 32, dim=1).load(WORDS)
            seen = gl.where(i % (TILE // BN) == 0, seen, second)
        return gl.where(i < n_partial, ~seen, 0)
    else:
        return 0


@gluon.jit
def seen_ranges(step, ranges, hidden, BN: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr, MASKED: gl.constexpr):
    """Return which of the block's queries see the keys of a step, as `load_keys` stored it; `hidden` for other masks.

    Call it before the product of the same step is issued, like `hidden_words`.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    if MASK == "intervals" and MASKED:
        return ranges.index(step % STAGES).load(gl.SliceLayout(0, SCORES))
    else:
        return hidden


@gluon.jit
def show_between(s, low, column, high):
    """Return scores with -inf where not `low <= column <= high`.

    Both tests and the selection are one operation: the compiler would select twice, or make all tests first and run out of
    predicates. So they are in `show_ranges` and `hide_between`.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred seen; setp.le.s32 seen, $1, $2; setp.le.and.s32 seen, $2, $3, seen; selp.b32 $0, $4, 0xff800000, seen; }",
        "=r,r,r,r,r",
        [low, column, high, s.to(gl.int32, bitcast=True)], gl.int32, is_pure=True, pack=1,
    ).to(gl.float32, bitcast=True)  # fmt: skip


@gluon.jit
def show_ranges(s, query, ranges):
    """Return scores `[64, BN]` with -inf where a key's range, as `load_keys` stored it, does not hold the query of the block.

    Halves of a word: how far the query is behind the first that sees the key, and the last that does behind the query. One
    sign is set where it does not, whatever the lower half takes from the upper one.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred seen; .reg .b32 both; add.s32 both, $1, $2; and.b32 both, both, 0x80008000; setp.eq.s32 seen, both, 0;"
        " selp.b32 $0, $3, 0xff800000, seen; }",
        "=r,r,r,r",
        [(query * 65535)[:, None], ranges[None, :], s.to(gl.int32, bitcast=True)], gl.int32, is_pure=True, pack=1,
    ).to(gl.float32, bitcast=True)  # fmt: skip


@gluon.jit
def hide_between(s, first, query, key_numbers, seqlen_k, BN: gl.constexpr):
    """Return scores `[64, BN]` of keys from `first` on with -inf where a key is hidden from a query, a column of them."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    _, hidden_from, hidden_to = key_numbers
    key = gl.minimum(
        first + gl.arange(0, BN, layout=gl.SliceLayout(0, SCORES)), seqlen_k - 1
    )  # those behind it have no range
    begin = gl.load(hidden_from + key)[None, :]
    end = gl.load(hidden_to + key)[None, :]
    return gl.inline_asm_elementwise(
        "{ .reg .pred seen; setp.lt.s32 seen, $1, $2; setp.ge.or.s32 seen, $1, $3, seen; selp.b32 $0, $4, 0xff800000, seen; }",
        "=r,r,r,r,r",
        [query, begin, end, s.to(gl.int32, bitcast=True)], gl.int32, is_pure=True, pack=1,
    ).to(gl.float32, bitcast=True)  # fmt: skip


@gluon.jit
def hide(
    s, i, hidden, lists, key_numbers, visible, BN: gl.constexpr, MASK: gl.constexpr, HAS_LO: gl.constexpr,
    HAS_HI: gl.constexpr, HIDDEN: gl.constexpr,
):  # fmt: skip
    """Return scores `[64, BN]` of the `i`-th tile of the walk with what is invisible at -inf."""
    ROWS: gl.constexpr = 64
    q_lo, q_hi, q_segment, _, _, _, _, _, _, _, seqlen_k, tile_first = visible
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    if MASK == "bits":
        # a thread's columns are 8 k + 2 (lane & 3) + {0, 1}: shifts per word, then constants
        cube = s.reshape([ROWS, BN // 32, 32])
        CUBE: gl.constexpr = cube.type.layout
        column = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(0, CUBE)))
        column = gl.expand_dims(gl.expand_dims(column, 0), 0)
        # prmt spreads the sign of a byte over a word, lop3 puts -inf there: two instructions per score. Written with
        # operators, LLVM makes three of them; selects would spill predicates
        word = (hidden[:, :, None] >> (column & 6)) << (7 - (column & 1))
        byte = 0x8888 + 0x1111 * (column >> 3)
        scores = gl.inline_asm_elementwise(
            "{ .reg .b32 drop; prmt.b32 drop, $1, 0, $2; lop3.b32 $0, $3, drop, 0xff800000, 0xb8; }", "=r,r,r,r",
            [word, byte, cube.to(gl.int32, bitcast=True)], gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        scores = scores.to(gl.float32, bitcast=True).reshape([ROWS, BN])
        return gl.convert_layout(scores, SCORES, assert_trivial=True)
    else:
        column = gl.arange(0, BN, layout=gl.SliceLayout(0, SCORES))
        first = first_key(i, lists, visible, BN, MASK)
        # (column & 6) is the lane's share of the column, the rest a constant of the register
        lane, constant = (column & 6)[None, :], (column & ~6)[None, :]
        if MASK == "intervals":
            s = show_ranges(s, q_segment, hidden)
            if HIDDEN:
                s = hide_between(s, first, q_segment[:, None] + tile_first, key_numbers, seqlen_k, BN)
        if HAS_LO and (HAS_HI or MASK != "intervals"):
            s = show_between(s, (q_lo - first)[:, None] - lane, constant, (q_hi - first)[:, None] - lane)
        elif HAS_LO:
            s = gl.where((q_lo - first)[:, None] - lane <= constant, s, float("-inf"))
        elif HAS_HI or MASK != "intervals":
            s = gl.where((q_hi - first)[:, None] - lane >= constant, s, float("-inf"))
        if MASK == "segments":
            segment = gl.load(key_numbers[0] + first + column, mask=first + column < seqlen_k, other=-2)
            s = gl.where(q_segment[:, None] == segment[None, :], s, float("-inf"))
        return s


@gluon.jit
def rescale_second(acc, factor, DV2: gl.constexpr):
    """Return the second part of acc times the factors of its rows, if there is one."""
    if DV2 > 0:
        return rescale(acc[1], factor, DV2)
    else:
        return 0


@gluon.jit
def advance(
    i, step, acc, p, top, total, peak, q, smem, bars, scale, cap_inner, lists, key_numbers, visible, bias_rows, dropout, q_first,
    C: gl.constexpr, NC: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, DV: gl.constexpr,
    DV2: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr,
    MASKED: gl.constexpr, BIAS: gl.constexpr, HAS_LO: gl.constexpr, HAS_HI: gl.constexpr, SOFTCAP: gl.constexpr,
    HIDDEN: gl.constexpr, NATURAL: gl.constexpr, DROPOUT: gl.constexpr, ROW_MAX: gl.constexpr, dtype: gl.constexpr,
    edge, EDGES: gl.constexpr,
):  # fmt: skip
    """Add tile `i`, whose P are given, to acc, and compute the P of tile `i + 1`.

    EDGES: `edge` holds whether values are cleared of keys that no query sees, and which some query sees (`unseen.py`).
    `peak` are the largest scores that each lane has seen of its rows, kept where ROW_MAX asks for them.
    """
    ROWS: gl.constexpr = 64
    OVERLAP: gl.constexpr = NC == 2  # three have no registers for the P of two tiles
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    queries, keys, values, words, biases, ranges, piece = smem
    q_full, q_empty, k_full, k_empty, v_full = bars
    b = step % STAGES
    b_next = (step + 1) % STAGES
    k_next = transposed(rows_of(keys, b_next, BN, D, D2))
    mbarrier.wait(k_full.index(b_next), ((step + 1) // STAGES) & 1)
    mbarrier.wait(v_full.index(b), (step // STAGES) & 1)
    if EDGES and MASKED:
        if edge[0]:
            clear_unseen(rows_of(values, b, BN, DV, DV2), first_key(i, lists, visible, BN, MASK), edge[1], BN)
    hidden = hidden_words(i + 1, step + 1, words, visible[8], C, NC, BN, STAGES, MASK, MASKED)
    hidden = seen_ranges(step + 1, ranges, hidden, BN, STAGES, MASK, MASKED)
    stored = stored_bias(step + 1, biases, C, NC, BN, STAGES, BIAS)
    empty = gl.zeros([ROWS, BN], gl.float32, layout=SCORES)
    s = multiply(q, k_next, empty, False)
    acc = add_products(p, rows_of(values, b, BN, DV, DV2), acc, DV2)
    if OVERLAP:
        s = warpgroup_mma_wait(2 if DV2 > 0 else 1, deps=(s,))
    elif DV2 > 0:
        s, first, second = warpgroup_mma_wait(0, deps=(s, acc[0], acc[1]))
        acc = (first, second)
    else:
        s, first = warpgroup_mma_wait(0, deps=(s, acc[0]))
        acc = (first,)
    s = soften(s, cap_inner, SOFTCAP)
    added = load_full_bias(i + 1, lists, visible, bias_rows, BN, MASK, MASKED, BIAS)
    s = add_bias(s, added, stored, scale, BIAS, NATURAL)
    if MASKED:
        s = hide(s, i + 1, hidden, lists, key_numbers, visible, BN, MASK, HAS_LO, HAS_HI, HIDDEN)
    if ROW_MAX:
        peak = gl.maximum(peak, largest(s, peak, BN))
    p, top, total, factor = softmax_next(s, top, total, scale, dtype, NATURAL, not OVERLAP, BN)
    if DROPOUT:
        p = drop(p, dropout, q_first, first_key(i + 1, lists, visible, BN, MASK), BN)
    p = as_operand(p, DV)
    if OVERLAP:
        acc = await_products(acc, DV2)
    acc = pair(rescale(acc[0], factor, DV), rescale_second(acc, factor, DV2), DV2)
    mbarrier.arrive(k_empty.index(b_next), count=1)
    return acc, p, top, total, peak
