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
from dmattn_ops.kernels.hopper.constants import accumulator
from dmattn_ops.kernels.hopper.dropout import kept, mark_dropped, score_gradient
from dmattn_ops.kernels.hopper.gluon_compat import (
    fence_async_shared,
    mbarrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from dmattn_ops.kernels.hopper.kinds import BITS, INTERVALS, NONE, SEGMENTS
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
from dmattn_ops.kernels.hopper.unseen import CLEARED, NO_KEY, clear_parts, finish_clearing
from dmattn_ops.kernels.hopper.words import word_of, words_between, words_without

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
def halves_of(low, high, COLUMNS: gl.constexpr):
    """Return words of 32 bits from words of 64, of which those of more than 64 columns have two."""
    if COLUMNS == 64:
        return (low.to(gl.int32), (low >> 32).to(gl.int32))
    else:
        return (low.to(gl.int32), (low >> 32).to(gl.int32), high.to(gl.int32), (high >> 32).to(gl.int32))


@gluon.jit
def interval_bits(low, high, select, COLUMNS: gl.constexpr, HIDDEN: gl.constexpr):
    """Return words of 32 bits, set from `low` to `high` but, where HIDDEN, not from `select.drop_low` to `select.drop_high`.

    A bit for each column is half as many instructions as comparisons, which are with registers for both limits.
    """
    words = words_between(low, high, COLUMNS)
    if HIDDEN:
        words = words_without(words, words_between(select.drop_low, select.drop_high, COLUMNS))
    return words


@gluon.jit
def keep_visible(p, select, MASK: gl.constexpr, T: gl.constexpr, layout: gl.constexpr):
    """Return `p` with 0 where the mask hides the pair; dS follows since it is a multiple of `p`."""
    if MASK == BITS:
        p = keep_bits(p, halves_of(select.words, select.more_words, T.BM), layout)
    elif MASK == INTERVALS:
        p = keep_bits(p, interval_bits(select.low, select.high, select, T.BM, T.HIDDEN), layout)
    elif MASK != NONE:
        # without a lower end of the band, a key is seen by all queries from its first on
        last = select.high if T.HAS_LO else T.BM - 1
        p = keep_bits(p, interval_bits(select.low, last, select, T.BM, False), layout)
        if MASK == SEGMENTS:
            p = gl.where(select.q_segments[None, :] == select.k_segments[:, None], p, 0.0)
    return p


@gluon.jit
def dq_operands(ds_s, keys, b, C: gl.constexpr, T: gl.constexpr):
    """Return (dS of the step before, K) as consumer `C` multiplies them: 64 queries by half of D or one part, or its 64 by all."""
    ds = ds_s.index(b ^ 1)
    if len(keys) > 1:
        return ds.permute((1, 0)), keys[C]
    elif T.BM == 128:
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
    done = warpgroup_mma_wait(0, deps=dv + dk + (dq,))
    return done[0 : len(dv)], done[len(dv) : -1], done[-1]


@gluon.jit
def await_some(pending: gl.constexpr, parts, dq):
    """Wait until `pending` groups of products are in flight, and return these."""
    done = warpgroup_mma_wait(pending, deps=parts + (dq,))  # noqa: RUF005 (Triton knows no other way)
    return done[0:-1], done[-1]


@gluon.jit
def exact_step(s, walk, at, SOFTCAP: gl.constexpr, T: gl.constexpr, layout: gl.constexpr):
    """Return the exact exponents of a query tile (see `exact_exponents`); a full bias is loaded now, since no registers keep it."""
    added = at.bias
    if T.BIAS == FULL_BIAS:
        added = full_bias(walk.bias, at.head, at.keys, at.queries)
    # in one index, or the compiler keeps a pointer of each lane in registers
    rows = at.row + gl.arange(0, T.BM, layout=layout)
    first = gl.load(walk.exact.first + rows)
    second = gl.load(walk.exact.second + rows)
    return exact_exponents(s, first[None, :], second[None, :], added, walk.scales, T.BIAS, SOFTCAP, T.NATURAL)


@gluon.jit
def exponents(
    s, minus_lse, walk, at, SOFTCAP: gl.constexpr, STARTED: gl.constexpr, EXACT: gl.constexpr, T: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Return log2 of P and the derivative of the soft cap of a query tile, from its products `s`."""
    s, slope = softened(s, walk.scales, SOFTCAP)
    if EXACT == ASK:
        if walk.exact.needed != 0:
            x = exact_step(s, walk, at, SOFTCAP, T, layout)
        else:
            x = rounded_exponents(s, minus_lse[None, :], at.bias, walk.scales, T.BIAS, SOFTCAP, STARTED)
    elif EXACT == ALWAYS:
        x = exact_step(s, walk, at, SOFTCAP, T, layout)
    else:
        x = rounded_exponents(s, minus_lse[None, :], at.bias, walk.scales, T.BIAS, SOFTCAP, STARTED)
    return x, slope


@gluon.jit
def step(i, dk, dv, sums, own, walk, at, C: gl.constexpr, MASK: gl.constexpr, EXACT: gl.constexpr, T: gl.constexpr):
    """Add query tile `i` to dk `[64, D]`, dv `[64, DV]` and the sums of dS; hand out dq of the step before.

    MASK: the test that it takes, NONE where all of it is visible.

    dq is computed one step late, so that the consumers never wait for each other's dS of the same step. A consumer's arrive at
    the end of step `i - 1` also signals that it has read dS of step `i - 2`, so two buffers are enough.

    TWO_PHASE: dP and S, then exponentials and dS, then dv, dk, dq back to back; -delta is dP's initial accumulator.
    Fewest registers, no shared-memory read behind a matrix instruction, and one arrive: in triton 3.6 each costs a
    barrier of the warp group before it and another before the next access to shared memory. Best at D 128.
    Otherwise the exponentials overlap dP, and dq's way out overlaps dk: best at D 64, where exponentials weigh double.
    There lse is S's initial accumulator (over the scale): read from shared memory after S, it would wait for dP.

    DROPOUT: dv takes P of what is kept, dS is that times dP less P delta, and all is rescaled at the end: delta comes divided
    by that factor.
    """
    BM: gl.constexpr = T.BM
    SL: gl.constexpr = accumulator(BM)
    QW: gl.constexpr = T.D2 if T.D2 > 0 and C == 1 else 64  # columns of this consumer's dq
    QL: gl.constexpr = accumulator(QW)
    by_query: gl.constexpr = gl.SliceLayout(0, SL)
    smem = own.smem
    signals = own.signals
    dtype: gl.constexpr = smem.ds.dtype
    zero_s = gl.zeros([64, BM], gl.float32, layout=SL)
    zero_q = gl.zeros([64, QW], gl.float32, layout=QL)
    b = i & 1
    q = buffer_at(smem.q, b)
    do = buffer_at(smem.do, b)
    # Always 0, but the compiler cannot know that: it would keep descriptors of all of K and V in registers.
    unknown = i >> 30
    ones = smem.ones
    if T.BIAS == KEY_BIAS:
        ones = ones.index(unknown)
    keys = buffer_at(smem.k, unknown + own.k_buffer)
    k_c = slice_rows(keys, C * 64, 64)
    v_c = buffer_at(smem.v, unknown + own.v_half)
    other_made = signals.made.index((1 - C) * 2 + (b ^ 1))
    made_before = ((i - 1) >> 1) & 1
    mbarrier.wait(signals.q_full.index(b), (i >> 1) & 1)
    if T.EDGES and MASK != NONE:
        if at.at_edge:  # queries that see no key
            sighted = smem.stats.index(b * 2).reshape([BM]).load(CLEARED) != NO_KEY
            clear_parts(q, sighted)
            clear_parts(do, sighted)
            finish_clearing()
    minus_lse = (
        smem.stats.index(b * 2).reshape([BM]).load(by_query)
    )  # loads wait behind matrix instructions already issued
    if T.TWO_PHASE:
        delta = smem.stats.index(b * 2 + 1).reshape([BM]).load(by_query)[None, :]
        # registers hold delta or lse through the products: with dropout it is delta
        STARTED: gl.constexpr = T.DROPOUT and not T.SOFTCAP
        start = zero_s
        if not T.DROPOUT:
            start = zero_s - delta
        dp = multiply(v_c, transposed(do), start, not T.DROPOUT)
        s = first_scores(at.bias, T.BM, T.BIAS)
        if STARTED:
            s = s + (minus_lse * walk.scales.unscale)[None, :]  # unscale is 0 where pairs are needed
        s = multiply(k_c, transposed(q), s, STARTED or T.BIAS == FULL_BIAS)
        dp, s = warpgroup_mma_wait(0, deps=(dp, s))
        x, slope = exponents(s, minus_lse, walk, at, T.SOFTCAP, STARTED, EXACT, T, by_query)
        p = gl.exp2(x)
        p = keep_visible(p, at.select, MASK, T, SL)
        if T.DROPOUT:
            p = mark_dropped(p, at.dropout, at.query, at.key, T.BM, False)
            pa = as_operand(kept(p, dtype), T.DV)
            ds = score_gradient(p, dp, delta)
            raw = ds.to(dtype)
            ds = (ds * slope).to(dtype) if T.SOFTCAP else raw
            mbarrier.wait(other_made, made_before)
            dv = add_products(pa, do, dv, T.DV2)
        else:
            pa = as_operand(p.to(dtype), T.DV)
            if T.SOFTCAP:  # now, so that the slope takes no registers during the product
                raw = (p * dp).to(dtype)
                dp = dp * slope
            mbarrier.wait(other_made, made_before)
            dv = add_products(pa, do, dv, T.DV2)
            ds = (p * dp).to(dtype)
            if not T.SOFTCAP:
                raw = ds
        dk = add_products(as_operand(ds, T.D), q, dk, T.D2)
        ds_before, k_dq = dq_operands(smem.ds, keys, b, C, T)
        dq = warpgroup_mma(ds_before, k_dq, zero_q, use_acc=False, is_async=True)
        sums = add_key_sums(sums, raw, ones, T.BIAS)
        dv, dk, dq = await_all(dv, dk, dq)
        sums = finish_key_sums(sums, T.BIAS)
        smem.ds.index(b).slice(C * 64, 64, dim=0).store(ds)
        mbarrier.wait(own.dq_empty, b ^ 1)
        store_piece(dq, own.dq, QW)
        fence_async_shared()
        mbarrier.arrive(signals.made.index(C * 2 + b), count=1)
    else:
        start = zero_s + (minus_lse * walk.scales.unscale)[None, :]  # unscale is 0 where pairs are needed
        if T.BIAS == FULL_BIAS:
            start = start + at.bias
        s = multiply(k_c, transposed(q), start, True)
        dp = multiply(v_c, transposed(do), zero_s, False)
        s = warpgroup_mma_wait(2 if T.DV2 > 0 else 1, deps=(s,))
        x, _ = exponents(s, minus_lse, walk, at, False, True, EXACT, T, by_query)
        p = gl.exp2(x)
        p = keep_visible(p, at.select, MASK, T, SL)
        if T.DROPOUT:
            p = mark_dropped(p, at.dropout, at.query, at.key, T.BM, False)
            pa = as_operand(kept(p, dtype), T.DV)
        else:
            pa = as_operand(p.to(dtype), T.DV)
        # the block boundary of this wait keeps ptxas from hoisting the wait for dP above the exponentials
        mbarrier.wait(other_made, made_before)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        delta = smem.stats.index(b * 2 + 1).reshape([BM]).load(by_query)
        if T.DROPOUT:
            ds = score_gradient(p, dp, delta[None, :]).to(dtype)
        else:
            ds = (p * (dp - delta[None, :])).to(dtype)
        dsa = as_operand(ds, T.D)
        smem.ds.index(b).slice(C * 64, 64, dim=0).store(ds)
        dv = add_products(pa, do, dv, T.DV2)
        ds_before, k_dq = dq_operands(smem.ds, keys, b, C, T)
        dq = warpgroup_mma(ds_before, k_dq, zero_q, use_acc=False, is_async=True)
        dk = add_products(dsa, q, dk, T.D2)
        sums = add_key_sums(sums, ds, ones, T.BIAS)
        dv, dq = await_some((2 if T.D2 > 0 else 1) + (1 if T.BIAS == KEY_BIAS else 0), dv, dq)
        mbarrier.wait(own.dq_empty, b ^ 1)
        store_piece(dq, own.dq, QW)
        fence_async_shared()
        mbarrier.arrive(signals.made.index(C * 2 + b), count=1)
        dk = await_products(dk, T.D2)
        sums = finish_key_sums(sums, T.BIAS)
        mbarrier.arrive(signals.read.index(C * 2 + b), count=1)
    return dk, dv, sums


@gluon.jit
def place_of_dk(i, q_s, ds_s, C: gl.constexpr, T: gl.constexpr):
    """Return where a block's step `i`, its last, leaves consumer `C`'s dk: the step has no query tile and makes no dS."""
    b = i & 1
    if C == 0:
        return buffer_at(q_s, b)
    elif T.D2 > 0:
        return (ds_s.index(b), ds_s.index(b).slice(64, 64, dim=0))
    else:
        return (ds_s.index(b),)


@gluon.jit
def last_step(i, dk, dv, dk_scale, dv_scale, own, k_empty, C: gl.constexpr, T: gl.constexpr):
    """As step `i`, hand out a block's dk and dv, and dq of step `i - 1`, the last one with a query tile.

    dv lies in this consumer's half of V, of which it alone read. The next block's first step makes a dq of what lies in place
    of a dS here; it belongs to no step, and the reducer drops it.
    """
    QW: gl.constexpr = T.D2 if T.D2 > 0 and C == 1 else 64
    QL: gl.constexpr = accumulator(QW)
    smem = own.smem
    signals = own.signals
    dtype: gl.constexpr = smem.ds.dtype
    b = i & 1
    # no data: what lay in this step's stage and in the buffer of its dS has been read or sent, and arrivals stay in order
    mbarrier.wait(signals.q_full.index(b), (i >> 1) & 1)
    mbarrier.wait(signals.made.index((1 - C) * 2 + (b ^ 1)), ((i - 1) >> 1) & 1)
    zero_q = gl.zeros([64, QW], gl.float32, layout=QL)
    ds_before, k_dq = dq_operands(smem.ds, buffer_at(smem.k, (i >> 30) + own.k_buffer), b, C, T)
    dq = warpgroup_mma(ds_before, k_dq, zero_q, use_acc=False, is_async=True)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    mbarrier.arrive(k_empty, count=1)
    stage_parts(dv, dv_scale, buffer_at(smem.v, own.v_half), T.DV, T.DV2, dtype)
    stage_parts(dk, dk_scale, place_of_dk(i, smem.q, smem.ds, C, T), T.D, T.D2, dtype)
    mbarrier.wait(own.dq_empty, b ^ 1)
    store_piece(dq, own.dq, QW)
    fence_async_shared()
    mbarrier.arrive(signals.made.index(C * 2 + b), count=1)
    if not T.TWO_PHASE:
        mbarrier.arrive(signals.read.index(C * 2 + b), count=1)
