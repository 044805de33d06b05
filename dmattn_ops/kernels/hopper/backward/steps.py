"""One query tile of the SM 9.0 backward as a consumer of 64 keys sees it, in two orders; the masks of partial tiles."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.columns import (
    add_products,
    as_operand,
    await_products,
    buffer_at,
    multiply,
    slice_rows,
    stage_parts,
    transposed,
)
from dmattn_ops.kernels.hopper.dropout import kept, mark_dropped, score_gradient
from dmattn_ops.kernels.hopper.gluon_compat import (
    fence_async_shared,
    mbarrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from dmattn_ops.kernels.hopper.scores import (
    FULL_BIAS,
    KEY_BIAS,
    add_key_sums,
    exact_exponents,
    finish_key_sums,
    first_scores,
    full_bias,
    rounded_exponents,
    softened,
)
from dmattn_ops.kernels.hopper.unseen import NO_KEY, ROWS, clear_parts, finish_clearing
from dmattn_ops.kernels.hopper.words import word_of, words_between

# Kinds of masks that a step can meet
UNMASKED = gl.constexpr(0)
BAND = gl.constexpr(1)
BITS = gl.constexpr(2)
SEGMENTS = gl.constexpr(3)
INTERVALS = gl.constexpr(4)

# Whether a step takes the pairs of the row statistics: where the flag says so, or what loops of their own were compiled for
NEVER = gl.constexpr(0)
ALWAYS = gl.constexpr(1)
ASK = gl.constexpr(2)

# The workspace holds a 64 x 64 piece of dq in the order of the accumulator's registers, so that a thread stores 16
# bytes at a time without bank conflicts (the 128-byte swizzle costs twice the wavefronts). What each bit of an offset
# stands for, lowest first: [row, column].
_FRAGMENT = [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 8], [0, 16], [0, 32]]
FRAGMENT = gl.constexpr(gl.SharedLinearLayout(_FRAGMENT, [], 128))
FRAGMENT_32 = gl.constexpr(gl.SharedLinearLayout(_FRAGMENT[:11], [], 128))
FRAGMENT_16 = gl.constexpr(gl.SharedLinearLayout(_FRAGMENT[:10], [], 128))


@gluon.jit
def keep_bits(p, words, layout: gl.constexpr):
    """Keep `p[key, query]` where bit `query` of the key's words of 32 bits is set, else 0."""
    col = gl.arange(0, p.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    return gl.where(((word_of(words, col) >> (col & 6)) & (1 << (col & 25))) != 0, p, 0.0)


@gluon.jit
def halves_of(words, COLUMNS: gl.constexpr):
    """Return words of 32 bits from words of 64, of which those of more than 64 columns have two."""
    low, high = words
    if COLUMNS == 64:
        return (low.to(gl.int32), (low >> 32).to(gl.int32))
    else:
        return (low.to(gl.int32), (low >> 32).to(gl.int32), high.to(gl.int32), (high >> 32).to(gl.int32))


@gluon.jit
def interval_bits(band, hidden, COLUMNS: gl.constexpr, HIDDEN: gl.constexpr):
    """Return words of 32 bits, set from `band[0]` to `band[1]` but, where HIDDEN, not from `hidden[0]` to `hidden[1]`.

    A bit for each column is half as many instructions as comparisons, which are with registers for both limits.
    """
    words = words_between(band[0], band[1], COLUMNS)
    if HIDDEN:
        less = words_between(hidden[0], hidden[1], COLUMNS)
        if COLUMNS == 64:
            words = (words[0] & ~less[0], words[1] & ~less[1])
        else:
            words = (words[0] & ~less[0], words[1] & ~less[1], words[2] & ~less[2], words[3] & ~less[3])
    return words


@gluon.jit
def keep_visible(
    p, band, words, q_seg, k_seg, MASK: gl.constexpr, HAS_LO: gl.constexpr, HIDDEN: gl.constexpr, layout: gl.constexpr
):
    """Return `p` with 0 where the mask hides the pair; dS follows since it is a multiple of `p`.

    `words` are a key's 64-bit words, or the queries from and to which it is hidden.
    """
    if MASK == BITS:
        p = keep_bits(p, halves_of(words, p.shape[1]), layout)
    elif MASK == INTERVALS:
        p = keep_bits(p, interval_bits(band, words, p.shape[1], HIDDEN), layout)
    elif MASK != UNMASKED:
        # without a lower end of the band, a key is seen by all queries from its first on
        last = band[1] if HAS_LO else p.shape[1] - 1
        p = keep_bits(p, interval_bits((band[0], last), words, p.shape[1], False), layout)
        if MASK == SEGMENTS:
            p = gl.where(q_seg[None, :] == k_seg[:, None], p, 0.0)
    return p


@gluon.jit
def dq_operands(ds_s, keys, b, C: gl.constexpr, BM: gl.constexpr):
    """Return (dS of the step before, K) as consumer `C` multiplies them: 64 queries by half of D or one part, or its 64 by all."""
    ds = ds_s.index(b ^ 1)
    if len(keys) > 1:
        return ds.permute((1, 0)), keys[C]
    elif BM == 128:
        return ds.slice(C * 64, 64, dim=1).permute((1, 0)), keys[0]
    else:
        return ds.permute((1, 0)), keys[0].slice(C * 64, 64, dim=1)


@gluon.jit
def store_piece(dq, dq_c, WIDTH: gl.constexpr):
    """Store a piece of dq `[64, WIDTH]` in the order of the workspace."""
    ORDER: gl.constexpr = FRAGMENT if WIDTH == 64 else FRAGMENT_32 if WIDTH == 32 else FRAGMENT_16
    reinterpret(dq_c, gl.float32, [64, WIDTH], ORDER).store(dq)


@gluon.jit
def await_all(dv, dk, dq):
    """Wait for all products, and return these."""
    if len(dv) > 1 and len(dk) > 1:
        v1, v2, k1, k2, dq = warpgroup_mma_wait(0, deps=(dv[0], dv[1], dk[0], dk[1], dq))
        return (v1, v2), (k1, k2), dq
    elif len(dv) > 1:
        v1, v2, k1, dq = warpgroup_mma_wait(0, deps=(dv[0], dv[1], dk[0], dq))
        return (v1, v2), (k1,), dq
    elif len(dk) > 1:
        v1, k1, k2, dq = warpgroup_mma_wait(0, deps=(dv[0], dk[0], dk[1], dq))
        return (v1,), (k1, k2), dq
    else:
        v1, k1, dq = warpgroup_mma_wait(0, deps=(dv[0], dk[0], dq))
        return (v1,), (k1,), dq


@gluon.jit
def await_some(pending: gl.constexpr, parts, dq):
    """Wait until `pending` groups of products are in flight, and return these."""
    if len(parts) > 1:
        first, second, dq = warpgroup_mma_wait(pending, deps=(parts[0], parts[1], dq))
        return (first, second), dq
    else:
        first, dq = warpgroup_mma_wait(pending, deps=(parts[0], dq))
        return (first,), dq


@gluon.jit
def pair_of(exact, row, BM: gl.constexpr, layout: gl.constexpr):
    """Return the pairs `[BM]` of the statistics of rows from `row` on."""
    at = row + gl.arange(
        0, BM, layout=layout
    )  # in one index, or the compiler keeps a pointer of each lane in registers
    return gl.load(exact.first + at), gl.load(exact.second + at)


@gluon.jit
def exact_step(
    s, bias, exact, row, scales, BM: gl.constexpr, BIAS: gl.constexpr, SOFTCAP: gl.constexpr, NATURAL: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Return the exact exponents of a query tile (see `exact_exponents`); a full bias is loaded now, since no registers keep it."""
    added, head, keys, queries, all_bias = bias
    if BIAS == FULL_BIAS:
        added = full_bias(all_bias, head, keys, queries)
    first, second = pair_of(exact, row, BM, layout)
    return exact_exponents(s, first[None, :], second[None, :], added, scales, BIAS, SOFTCAP, NATURAL)


@gluon.jit
def exponents(
    s, minus_lse, bias, exact, row, scales, BM: gl.constexpr, BIAS: gl.constexpr, SOFTCAP: gl.constexpr,
    NATURAL: gl.constexpr, STARTED: gl.constexpr, EXACT: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Return log2 of P and the derivative of the soft cap of a query tile, from its products `s`."""
    s, slope = softened(s, scales, SOFTCAP)
    if EXACT == ASK:
        if exact.needed != 0:
            x = exact_step(s, bias, exact, row, scales, BM, BIAS, SOFTCAP, NATURAL, layout)
        else:
            x = rounded_exponents(s, minus_lse[None, :], bias[0], scales, BIAS, SOFTCAP, STARTED)
    elif EXACT == ALWAYS:
        x = exact_step(s, bias, exact, row, scales, BM, BIAS, SOFTCAP, NATURAL, layout)
    else:
        x = rounded_exponents(s, minus_lse[None, :], bias[0], scales, BIAS, SOFTCAP, STARTED)
    return x, slope


@gluon.jit
def step(
    i, dk, dv, sums, tiles, barriers, scales, bias, exact, row, band, words, q_seg, k_seg, dropout, corner, at_edge,
    C: gl.constexpr, BM: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, DV: gl.constexpr, DV2: gl.constexpr,
    dtype: gl.constexpr, MASK: gl.constexpr, BIAS: gl.constexpr, SOFTCAP: gl.constexpr, HAS_LO: gl.constexpr, HIDDEN: gl.constexpr,
    NATURAL: gl.constexpr, TWO_PHASE: gl.constexpr, EXACT: gl.constexpr, DROPOUT: gl.constexpr, EDGES: gl.constexpr,
):  # fmt: skip
    """Add query tile `i` to dk `[64, D]`, dv `[64, DV]` and the sums of dS; hand out dq of the step before.

    dq is computed one step late, so that the consumers never wait for each other's dS of the same step. A consumer's arrive at
    the end of step `i - 1` also signals that it has read dS of step `i - 2`, so two buffers are enough.

    TWO_PHASE: dP and S, then exponentials and dS, then dv, dk, dq back to back; -delta is dP's initial accumulator.
    Fewest registers, no shared-memory read behind a matrix instruction, and one arrive: in triton 3.6 each costs a
    barrier of the warp group before it and another before the next access to shared memory. Best at D 128.
    Otherwise the exponentials overlap dP, and dq's way out overlaps dk: best at D 64, where exponentials weigh double.
    There lse is S's initial accumulator (over the scale): read from shared memory after S, it would wait for dP.

    `row` is where the tile's queries lie among all rows, and `bias` what `step_bias` returned and what it took.

    DROPOUT: dv takes P of what is kept, dS is that times dP less P delta, and all is rescaled at the end: delta comes divided
    by that factor. `corner` is the consumer's first query and key.
    """
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    QW: gl.constexpr = D2 if D2 > 0 and C == 1 else 64  # columns of this consumer's dq
    QL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QW, 16])
    by_query: gl.constexpr = gl.SliceLayout(0, SL)
    q_s, do_s, stat_s, ds_s, dq_c, k_s, v_s, ones, k_buffer, v_half = tiles
    q_full, made, read, dq_empty = barriers
    zero_s = gl.zeros([64, BM], gl.float32, layout=SL)
    zero_q = gl.zeros([64, QW], gl.float32, layout=QL)
    b = i & 1
    q = buffer_at(q_s, b)
    do = buffer_at(do_s, b)
    # Always 0, but the compiler cannot know that: it would keep descriptors of all of K and V in registers.
    unknown = i >> 30
    if BIAS == KEY_BIAS:
        ones = ones.index(unknown)
    keys = buffer_at(k_s, unknown + k_buffer)
    k_c = slice_rows(keys, C * 64, 64)
    v_c = buffer_at(v_s, unknown + v_half)
    other_made = made.index((1 - C) * 2 + (b ^ 1))
    made_before = ((i - 1) >> 1) & 1
    mbarrier.wait(q_full.index(b), (i >> 1) & 1)
    if EDGES and MASK != UNMASKED:
        if at_edge:  # queries that see no key
            sighted = stat_s.index(b * 2).reshape([BM]).load(ROWS) != NO_KEY
            clear_parts(q, sighted)
            clear_parts(do, sighted)
            finish_clearing()
    minus_lse = stat_s.index(b * 2).reshape([BM]).load(by_query)  # loads wait behind matrix instructions already issued
    if TWO_PHASE:
        delta = stat_s.index(b * 2 + 1).reshape([BM]).load(by_query)[None, :]
        # registers hold delta or lse through the products: with dropout it is delta
        STARTED: gl.constexpr = DROPOUT and not SOFTCAP
        start = zero_s
        if not DROPOUT:
            start = zero_s - delta
        dp = multiply(v_c, transposed(do), start, not DROPOUT)
        s = first_scores(bias[0], BM, BIAS)
        if STARTED:
            s = s + (minus_lse * scales.unscale)[None, :]  # unscale is 0 where pairs are needed
        s = multiply(k_c, transposed(q), s, STARTED or BIAS == FULL_BIAS)
        dp, s = warpgroup_mma_wait(0, deps=(dp, s))
        x, slope = exponents(
            s, minus_lse, bias, exact, row, scales, BM, BIAS, SOFTCAP, NATURAL, STARTED, EXACT, by_query
        )
        p = gl.exp2(x)
        p = keep_visible(p, band, words, q_seg, k_seg, MASK, HAS_LO, HIDDEN, SL)
        if DROPOUT:
            p = mark_dropped(p, dropout, corner[0], corner[1], BM, False)
            pa = as_operand(kept(p, dtype), DV)
            ds = score_gradient(p, dp, delta)
            raw = ds.to(dtype)
            ds = (ds * slope).to(dtype) if SOFTCAP else raw
            mbarrier.wait(other_made, made_before)
            dv = add_products(pa, do, dv, DV2)
        else:
            pa = as_operand(p.to(dtype), DV)
            if SOFTCAP:  # now, so that the slope takes no registers during the product
                raw = (p * dp).to(dtype)
                dp = dp * slope
            mbarrier.wait(other_made, made_before)
            dv = add_products(pa, do, dv, DV2)
            ds = (p * dp).to(dtype)
            if not SOFTCAP:
                raw = ds
        dk = add_products(as_operand(ds, D), q, dk, D2)
        ds_before, k_dq = dq_operands(ds_s, keys, b, C, BM)
        dq = warpgroup_mma(ds_before, k_dq, zero_q, use_acc=False, is_async=True)
        sums = add_key_sums(sums, raw, ones, BIAS)
        dv, dk, dq = await_all(dv, dk, dq)
        sums = finish_key_sums(sums, BIAS)
        ds_s.index(b).slice(C * 64, 64, dim=0).store(ds)
        mbarrier.wait(dq_empty, b ^ 1)
        store_piece(dq, dq_c, QW)
        fence_async_shared()
        mbarrier.arrive(made.index(C * 2 + b), count=1)
    else:
        start = zero_s + (minus_lse * scales.unscale)[None, :]  # unscale is 0 where pairs are needed
        if BIAS == FULL_BIAS:
            start = start + bias[0]
        s = multiply(k_c, transposed(q), start, True)
        dp = multiply(v_c, transposed(do), zero_s, False)
        s = warpgroup_mma_wait(2 if DV2 > 0 else 1, deps=(s,))
        x, _ = exponents(s, minus_lse, bias, exact, row, scales, BM, BIAS, False, NATURAL, True, EXACT, by_query)
        p = gl.exp2(x)
        p = keep_visible(p, band, words, q_seg, k_seg, MASK, HAS_LO, HIDDEN, SL)
        if DROPOUT:
            p = mark_dropped(p, dropout, corner[0], corner[1], BM, False)
            pa = as_operand(kept(p, dtype), DV)
        else:
            pa = as_operand(p.to(dtype), DV)
        # the block boundary of this wait keeps ptxas from hoisting the wait for dP above the exponentials
        mbarrier.wait(other_made, made_before)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        delta = stat_s.index(b * 2 + 1).reshape([BM]).load(by_query)
        if DROPOUT:
            ds = score_gradient(p, dp, delta[None, :]).to(dtype)
        else:
            ds = (p * (dp - delta[None, :])).to(dtype)
        dsa = as_operand(ds, D)
        ds_s.index(b).slice(C * 64, 64, dim=0).store(ds)
        dv = add_products(pa, do, dv, DV2)
        ds_before, k_dq = dq_operands(ds_s, keys, b, C, BM)
        dq = warpgroup_mma(ds_before, k_dq, zero_q, use_acc=False, is_async=True)
        dk = add_products(dsa, q, dk, D2)
        sums = add_key_sums(sums, ds, ones, BIAS)
        dv, dq = await_some((2 if D2 > 0 else 1) + (1 if BIAS == KEY_BIAS else 0), dv, dq)
        mbarrier.wait(dq_empty, b ^ 1)
        store_piece(dq, dq_c, QW)
        fence_async_shared()
        mbarrier.arrive(made.index(C * 2 + b), count=1)
        dk = await_products(dk, D2)
        sums = finish_key_sums(sums, BIAS)
        mbarrier.arrive(read.index(C * 2 + b), count=1)
    return dk, dv, sums


@gluon.jit
def place_of_dk(i, q_s, ds_s, C: gl.constexpr, D2: gl.constexpr):
    """Return where a block's step `i`, its last, leaves consumer `C`'s dk: the step has no query tile and makes no dS."""
    b = i & 1
    if C == 0:
        return buffer_at(q_s, b)
    elif D2 > 0:
        return (ds_s.index(b), ds_s.index(b).slice(64, 64, dim=0))
    else:
        return (ds_s.index(b),)


@gluon.jit
def last_step(
    i, dk, dv, dk_scale, dv_scale, tiles, barriers, k_empty,
    C: gl.constexpr, BM: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, DV: gl.constexpr, DV2: gl.constexpr, dtype: gl.constexpr,
    TWO_PHASE: gl.constexpr,
):  # fmt: skip
    """As step `i`, hand out a block's dk and dv, and dq of step `i - 1`, the last one with a query tile.

    dv lies in this consumer's half of V, of which it alone read. The next block's first step makes a dq of what lies in place
    of a dS here; it belongs to no step, and the reducer drops it.
    """
    QW: gl.constexpr = D2 if D2 > 0 and C == 1 else 64
    QL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QW, 16])
    q_s, _, _, ds_s, dq_c, k_s, v_s, _, k_buffer, v_half = tiles
    q_full, made, read, dq_empty = barriers
    b = i & 1
    # no data: what lay in this step's stage and in the buffer of its dS has been read or sent, and arrivals stay in order
    mbarrier.wait(q_full.index(b), (i >> 1) & 1)
    mbarrier.wait(made.index((1 - C) * 2 + (b ^ 1)), ((i - 1) >> 1) & 1)
    zero_q = gl.zeros([64, QW], gl.float32, layout=QL)
    ds_before, k_dq = dq_operands(ds_s, buffer_at(k_s, (i >> 30) + k_buffer), b, C, BM)
    dq = warpgroup_mma(ds_before, k_dq, zero_q, use_acc=False, is_async=True)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    mbarrier.arrive(k_empty, count=1)
    stage_parts(dv, dv_scale, buffer_at(v_s, v_half), DV, DV2, dtype)
    stage_parts(dk, dk_scale, place_of_dk(i, q_s, ds_s, C, D2), D, D2, dtype)
    mbarrier.wait(dq_empty, b ^ 1)
    store_piece(dq, dq_c, QW)
    fence_async_shared()
    mbarrier.arrive(made.index(C * 2 + b), count=1)
    if not TWO_PHASE:
        mbarrier.arrive(read.index(C * 2 + b), count=1)
