"""SM 9.0 backward in Gluon: a block owns 128 keys of a key head and walks the query tiles that see them, head by head.

Five partitions: two consumers of 64 keys each (4 warps, 240 registers) that keep dk and dv in registers over all query
heads of the group, one warp that loads by TMA, and two that add each consumer's share of dq to the workspace by TMA.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.gluon_compat import (
    fence_async_shared,
    mbarrier,
    reinterpret,
    tma,
    tma_load,
    tma_reduce_add,
    tma_store,
)
from dmattn_ops.kernels.hopper_backward_order import await_turn, ordered_span, pass_turn, turn_of
from dmattn_ops.kernels.hopper_backward_scores import (
    KEY_BIAS,
    NO_BIAS,
    Bias,
    load_key_bias,
    no_key_sums,
    step_bias,
    store_key_sums,
)
from dmattn_ops.kernels.hopper_backward_steps import last_dq, step
from dmattn_ops.problem import HEADER as _HEADER
from dmattn_ops.problem import TILE as _TILE

HEADER = gl.constexpr(_HEADER)
TILE = gl.constexpr(_TILE)
PIECE_ROWS = gl.constexpr(16)  # a 64 x 64 float32 piece of dq is 16 rows of 256 in the workspace
NO_LISTS = gl.constexpr(0)
BIT_LISTS = gl.constexpr(1)
SEGMENT_LISTS = gl.constexpr(2)


@gluon.jit
def block_of(pid, n_blocks, n_heads, heads_per_group):
    """Return (rank of the key tile, key head): groups of heads share L2, with rank 0, the longest tiles, first."""
    per_group = n_blocks * heads_per_group
    group = pid // per_group
    inside = pid - group * per_group
    width = gl.minimum(heads_per_group, n_heads - group * heads_per_group)
    rank = inside // width
    return rank, group * heads_per_group + inside - rank * width


@gluon.jit
def band_tiles(tile, seqlen_q, seqlen_k, band_lo, band_hi, BM: gl.constexpr, BN: gl.constexpr):
    """Return (first, full_first, full_end, end): the query tiles that see key tile `tile`, and those that see it all.

    Queries past the end are harmless (their lse is +inf), keys past the end are not: the last tile of a length that is
    not a multiple of BN has no full tiles.
    """
    key = tile * BN
    key_end = gl.minimum(key + BN, seqlen_k)
    q_first = gl.maximum(key - band_hi, 0)
    q_end = gl.minimum(key_end - band_lo, seqlen_q)
    first = q_first // BM
    end = gl.where(q_end > q_first, gl.maximum((gl.maximum(q_end, 0) + BM - 1) // BM, first), first)
    full_first = gl.minimum(gl.maximum((gl.maximum(key + BN - 1 - band_hi, 0) + BM - 1) // BM, first), end)
    full_q_end = gl.maximum(key - band_lo + 1, 0)
    full_end = gl.where(full_q_end >= seqlen_q, end, full_q_end // BM)
    full_end = gl.minimum(gl.maximum(full_end, full_first), end)
    full_end = gl.where(key + BN > seqlen_k, full_first, full_end)
    return first, full_first, full_end, end


@gluon.jit
def head_steps(record, span, LISTS: gl.constexpr, BM: gl.constexpr):
    """Return (steps without a test, steps with one) of one query head."""
    first, full_first, full_end, end = span
    if LISTS == NO_LISTS:
        n_full = full_end - full_first
        n_partial = end - first - n_full
    else:
        n_full = gl.load(record + 2) * (TILE // BM)
        n_partial = gl.load(record + 1) * (TILE // BM)
    return n_full, n_partial


@gluon.jit
def full_tile(t, record, n_partial, span, LISTS: gl.constexpr, BM: gl.constexpr, ORDERED: gl.constexpr):
    """Return the query tile of the `t`-th step without a test."""
    R: gl.constexpr = TILE // BM
    if LISTS == NO_LISTS:
        m = span[1] + t
        if ORDERED:
            m = span[2] - 1 - t
    else:
        m = gl.load(record + HEADER + (n_partial + t) // R) * R + t % R
    return m


@gluon.jit
def partial_tile(t, record, n_partial, span, LISTS: gl.constexpr, BM: gl.constexpr, ORDERED: gl.constexpr):
    """Return the query tile of the `t`-th step with a test; anything where there is no such step."""
    R: gl.constexpr = TILE // BM
    if LISTS == NO_LISTS:
        first, full_first, full_end, _ = span
        before = full_first - first
        m = gl.where(t < before, first + t, full_end + t - before)
        if ORDERED:
            m = full_first - 1 - t
    else:
        m = gl.load(record + HEADER + t // R, mask=t < n_partial, other=0) * R + t % R
    return m


@gluon.jit
def load_step(
    i, m, maps, tiles, q_full, read, batch, head, row, BM: gl.constexpr, BYTES: gl.constexpr
):  # fmt: skip
    """Fill stage `i & 1` with query tile `m` of one head: query, grad_out, and the rows' lse and delta."""
    q_desc, do_desc, stat_desc = maps
    q_s, do_s, stat_s = tiles
    b = i & 1
    free = ((i >> 1) & 1) ^ 1
    mbarrier.wait(read.index(b), free)
    mbarrier.wait(read.index(b + 2), free)
    full = q_full.index(b)
    mbarrier.expect(full, BYTES)
    tma_load(q_desc, [batch, m * BM, head, 0], full, q_s.index(b))
    tma_load(stat_desc, [0, row + m * BM], full, stat_s.index(b))
    tma_load(do_desc, [batch, m * BM, head, 0], full, do_s.index(b))


@gluon.jit
def producer(
    produced,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    LISTS: gl.constexpr, PARTIAL: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Load K and V once, then a stage per step in the order in which the consumers take them."""
    BYTES: gl.constexpr = BM * (D + DV) * 2 + 2 * BM * 4
    maps, k_desc, v_desc, tiles, k_s, v_s, q_full, read, kv_full, record, list_step, span, place, rows = produced
    batch, kv_head, tile, group, heads = place
    mbarrier.expect(kv_full, BN * (D + DV) * 2)
    tma_load(k_desc, [batch, tile * BN, kv_head, 0], kv_full, k_s)
    tma_load(v_desc, [batch, tile * BN, kv_head, 0], kv_full, v_s.index(0))
    tma_load(v_desc, [batch, tile * BN + 64, kv_head, 0], kv_full, v_s.index(1))
    i = 0
    for g in range(group):
        head = kv_head * group + g
        row = (batch * heads + head) * rows
        n_full, n_partial = head_steps(record, span, LISTS, BM)
        for t in range(n_full):
            m = full_tile(t, record, n_partial, span, LISTS, BM, ORDERED)
            load_step(i, m, maps, tiles, q_full, read, batch, head, row, BM, BYTES)
            i += 1
        if PARTIAL:
            for t in range(n_partial):
                m = partial_tile(t, record, n_partial, span, LISTS, BM, ORDERED)
                load_step(i, m, maps, tiles, q_full, read, batch, head, row, BM, BYTES)
                i += 1
        record += list_step


@gluon.jit
def reduce_step(
    s, m, tile0, seen, dq_desc, dq_c, made, dq_empty, order,
    C: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, HAS_LO: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Add what consumer `C` made in step `s` to its piece of query tile `m` of the head that starts at `tile0`.

    `seen` is what the step before saw of this piece's counter; return what this one sees of the next step's.
    """
    counters, tile, band_lo = order
    piece = (tile0 + m) * 2 + C
    if ORDERED:
        await_turn(counters + piece, turn_of(tile, m, band_lo, BM, BN, HAS_LO), seen)
    mbarrier.wait(made.index(C * 2 + (s & 1)), (s >> 1) & 1)
    tma_reduce_add(dq_desc, [piece * PIECE_ROWS, 0], dq_c)
    tma.store_wait(pendings=0)
    mbarrier.arrive(dq_empty, count=1)
    if ORDERED:
        seen = pass_turn(counters + piece)
    return seen


@gluon.jit
def reducer(
    reduced,
    C: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, LISTS: gl.constexpr, PARTIAL: gl.constexpr,
    HAS_LO: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Add consumer `C`'s 64 x 64 pieces of dq to the workspace, in the order of the steps."""
    dq_desc, dq_s, made, dq_empties, record, list_step, span, place, rows, counters, band_lo = reduced
    batch, kv_head, tile, group, heads = place
    order = (counters, tile, band_lo)
    dq_c = dq_s.index(C)
    dq_empty = dq_empties.index(C)
    mbarrier.wait(made.index(C * 2), 0)  # the piece of the step before the first one: zeros, belongs nowhere
    mbarrier.arrive(dq_empty, count=1)
    s = 1
    for g in range(group):
        tile0 = (batch * heads + kv_head * group + g) * (rows // BM)
        seen = -1
        n_full, n_partial = head_steps(record, span, LISTS, BM)
        for t in range(n_full):
            m = full_tile(t, record, n_partial, span, LISTS, BM, ORDERED)
            seen = reduce_step(
                s, m, tile0, seen, dq_desc, dq_c, made, dq_empty, order,
                C, BM, BN, HAS_LO, ORDERED)  # fmt: skip
            s += 1
        if PARTIAL:
            for t in range(n_partial):
                m = partial_tile(t, record, n_partial, span, LISTS, BM, ORDERED)
                seen = reduce_step(
                    s, m, tile0, seen, dq_desc, dq_c, made, dq_empty, order,
                    C, BM, BN, HAS_LO, ORDERED)  # fmt: skip
                s += 1
        record += list_step


@gluon.jit
def load_words(bits, keys, bits_row, m, BM: gl.constexpr):
    """Return the 64-bit words of the keys' visible queries of query tile `m`: the first of 64, the second of 64."""
    at = bits + m * (BM // 64) + keys * bits_row
    low = gl.load(at)
    high = low
    if BM == 128:
        high = gl.load(at + 1)
    return low, high


@gluon.jit
def head_loop(
    i, dk, dv, tiles, barriers, scales, bias, mask, record, span, tile, head, seqlen_q, seqlen_k, band_lo, band_hi,
    C: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, dtype: gl.constexpr,
    LISTS: gl.constexpr, PARTIAL: gl.constexpr, BIAS: gl.constexpr, SOFTCAP: gl.constexpr, HAS_LO: gl.constexpr,
    HAS_Q_SEG: gl.constexpr, TWO_PHASE: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Take all steps of one query head: first the tiles that need no test, then the others."""
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    by_key: gl.constexpr = gl.SliceLayout(1, SL)
    by_query: gl.constexpr = gl.SliceLayout(0, SL)
    bits, bits_row, q_segments, k_segments = mask
    keys = C * 64 + gl.arange(0, 64, layout=by_key)
    queries = gl.arange(0, BM, layout=by_query)
    own_keys = tile * BN + keys
    key_bias = load_key_bias(bias, head, own_keys, BIAS)[:, None]
    sums = no_key_sums()
    n_full, n_partial = head_steps(record, span, LISTS, BM)
    for t in range(n_full):
        rows = full_tile(t, record, n_partial, span, LISTS, BM, ORDERED) * BM + queries
        added = step_bias(bias, head, key_bias, own_keys[:, None], rows[None, :], BIAS)
        dk, dv, sums = step(i, dk, dv, sums, tiles, barriers, scales, added, (keys, keys), (keys, keys), queries, keys,
                            C, BM, D, DV, dtype, 0, BIAS, SOFTCAP, HAS_LO, TWO_PHASE)  # fmt: skip
        i += 1
    if PARTIAL:
        k_seg = keys
        if LISTS == SEGMENT_LISTS:
            k_seg = gl.load(k_segments + tile * BN + keys, mask=tile * BN + keys < seqlen_k, other=-1)
        # tiles and words are loaded a step ahead: ptxas tests the words before the first product, which would wait for them
        ahead = partial_tile(0, record, n_partial, span, LISTS, BM, ORDERED)
        ahead_lo = keys
        ahead_hi = keys
        if LISTS == BIT_LISTS:
            ahead_lo, ahead_hi = load_words(bits, keys, bits_row, ahead, BM)
        after = partial_tile(1, record, n_partial, span, LISTS, BM, ORDERED)
        for t in range(n_partial):
            m = ahead
            ahead = after
            d_lo = ahead_lo
            d_hi = ahead_hi
            if LISTS == BIT_LISTS:
                ahead_lo, ahead_hi = load_words(bits, keys, bits_row, ahead, BM)
            after = partial_tile(t + 2, record, n_partial, span, LISTS, BM, ORDERED)
            q_seg = queries
            if LISTS != BIT_LISTS:
                shift = tile * BN - m * BM
                d_lo = gl.where(tile * BN + keys < seqlen_k, keys + (shift - band_hi), BM)
                if HAS_LO:
                    d_hi = keys + (shift - band_lo)
                if LISTS == SEGMENT_LISTS:
                    q_seg = queries * 0
                    if HAS_Q_SEG:
                        q_seg = gl.load(q_segments + m * BM + queries, mask=m * BM + queries < seqlen_q, other=-2)
            added = step_bias(bias, head, key_bias, own_keys[:, None], (m * BM + queries)[None, :], BIAS)
            dk, dv, sums = step(i, dk, dv, sums, tiles, barriers, scales, added, (d_lo, d_hi), (d_lo, d_hi), q_seg,
                                k_seg, C, BM, D, DV, dtype, 1 + LISTS, BIAS, SOFTCAP, HAS_LO, TWO_PHASE)  # fmt: skip
            i += 1
    store_key_sums(bias, head, own_keys, gl.max(sums, 1), BIAS)
    return i, dk, dv


@gluon.jit
def consumer(
    consumed,
    C: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, dtype: gl.constexpr,
    LISTS: gl.constexpr, PARTIAL: gl.constexpr, BIAS: gl.constexpr, SOFTCAP: gl.constexpr, HAS_LO: gl.constexpr,
    HAS_Q_SEG: gl.constexpr, GROUPED: gl.constexpr, TWO_PHASE: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Write dk and dv of 64 keys, summed over the query heads of the group, and make half of each dq tile."""
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    KL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    VL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    shared, signals, maps, record, mask, steps, scales, span, place, limits, bias = consumed
    q_s, do_s, k_s, v_s, stat_s, ds_s, dq_s, ones = shared
    q_full, made, read, kv_full, cleared, dq_empties = signals
    dk_desc, dv_desc = maps
    scale, factors = scales
    scale_log2, cap = factors
    scales = (scale_log2, cap, -1.0 / scale_log2)
    seqlen_q, seqlen_k, band_lo, band_hi = limits
    bits, bits_row, q_segments, k_segments = mask
    list_step, bits_step, k_segments_step = steps
    batch, kv_head, tile, group, _ = place
    dk = gl.zeros([64, D], gl.float32, layout=KL)
    dv = gl.zeros([64, DV], gl.float32, layout=VL)
    dq_c = dq_s.index(C)
    v_c = v_s.index(C)
    tiles = (q_s, do_s, stat_s, ds_s, dq_c, k_s, v_s, ones)
    barriers = (q_full, made, read, dq_empties.index(C))
    if BIAS == KEY_BIAS:
        ones.index(0).store(gl.full([8, BM], 1.0, dtype, layout=gl.BlockedLayout([1, 8], [4, 8], [1, 4], [1, 0])))
    # dS of the step before the first one is zero
    ds_s.index(1).slice(C * 64, 64, dim=0).store(gl.zeros([64, BM], dtype, layout=SL))
    fence_async_shared()
    mbarrier.arrive(cleared, count=1)
    mbarrier.wait(cleared, 0)
    mbarrier.wait(kv_full, 0)
    i = 0
    if GROUPED:
        for g in range(group):
            i, dk, dv = head_loop(
                i, dk, dv, tiles, barriers, scales, bias, (bits, bits_row, q_segments, k_segments), record, span, tile,
                kv_head * group + g, seqlen_q, seqlen_k, band_lo, band_hi,
                C, BM, BN, D, DV, dtype, LISTS, PARTIAL, BIAS, SOFTCAP, HAS_LO, HAS_Q_SEG, TWO_PHASE, ORDERED)  # fmt: skip
            record += list_step
            bits += bits_step
            k_segments += k_segments_step
    else:
        i, dk, dv = head_loop(
            i, dk, dv, tiles, barriers, scales, bias, mask, record, span, tile, kv_head, seqlen_q, seqlen_k, band_lo,
            band_hi, C, BM, BN, D, DV, dtype, LISTS, PARTIAL, BIAS, SOFTCAP, HAS_LO, HAS_Q_SEG, TWO_PHASE,
            ORDERED)  # fmt: skip
    last_dq(i, tiles, barriers, C, BM)
    # dv leaves through this consumer's half of V, dk through its piece of dq (16 KB hold 64 x 128 values of 16 bits)
    v_c.store(dv.to(dtype))
    fence_async_shared()
    at = [batch, tile * BN + C * 64, kv_head, 0]
    tma_store(dv_desc, at, reinterpret(v_c, dtype, [1, 64, 1, DV], dv_desc.layout))
    mbarrier.wait(dq_empties.index(C), i & 1)
    DK: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    reinterpret(dq_c, dtype, [64, D], DK).store((dk * scale).to(dtype))
    fence_async_shared()
    tma_store(dk_desc, at, reinterpret(dq_c, dtype, [1, 64, 1, D], dk_desc.layout))
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["bias_b", "bias_h", "bias_group", "kv_heads", "group", "heads_per_group", "n_heads"])
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, stat_desc, dq_desc, dk_desc, dv_desc, counters, lists, bits, q_segments, k_segments,
    bias, key_sums,
    list_b, list_kv, list_step, list_width, bits_b, bits_kv, bits_step, bits_row,
    q_segments_b, k_segments_b, k_segments_kv, k_segments_step, bias_b, bias_h, bias_q, bias_group,
    scale, scale_log2, cap, kv_heads, group, seqlen_q, seqlen_k, rows, band_lo, band_hi, heads_per_group, n_heads,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, LISTS: gl.constexpr, PARTIAL: gl.constexpr,
    BIAS: gl.constexpr, SOFTCAP: gl.constexpr, HAS_LO: gl.constexpr, HAS_Q_SEG: gl.constexpr, GROUPED: gl.constexpr,
    TWO_PHASE: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Write dk and dv `[B, Sk, Hkv, D]` and add to the dq workspace. Grid: one block per key tile and key head.

    `_b` strides step a batch, `_kv` a key head, `_step` a query head within the group; `rows` is Sq padded to 128.
    `bits` are the 64-bit words of `col_bits`. ORDERED (not with lists): `counters`, an int32 0 for each piece of dq, give
    the additions a fixed order. With a bias per key the sums of dS over a head's queries go to `key_sums` `[B, H, Sk]`.
    `scale_log2` and `cap` are described in `probabilities`.
    """
    dtype: gl.constexpr = q_desc.dtype
    q4 = gl.allocate_shared_memory(dtype, [2, 1, BM, 1, D], q_desc.layout)
    o4 = gl.allocate_shared_memory(dtype, [2, 1, BM, 1, DV], do_desc.layout)
    k4 = gl.allocate_shared_memory(dtype, [1, BN, 1, D], k_desc.layout)
    v4 = gl.allocate_shared_memory(dtype, [2, 1, 64, 1, DV], v_desc.layout)
    stat3 = gl.allocate_shared_memory(gl.float32, [2, 2, BM], stat_desc.layout)
    ds_s = gl.allocate_shared_memory(dtype, [2, BN, BM], gl.NVMMASharedLayout.get_default_for([BN, BM], dtype))
    dq_s = gl.allocate_shared_memory(gl.float32, [2, PIECE_ROWS, 256], dq_desc.layout)
    q_s = reinterpret(q4, dtype, [2, BM, D], gl.NVMMASharedLayout.get_default_for([BM, D], dtype))
    do_s = reinterpret(o4, dtype, [2, BM, DV], gl.NVMMASharedLayout.get_default_for([BM, DV], dtype))
    k_s = reinterpret(k4, dtype, [1, BN, D], gl.NVMMASharedLayout.get_default_for([BN, D], dtype))
    v_s = reinterpret(v4, dtype, [2, 64, DV], gl.NVMMASharedLayout.get_default_for([64, DV], dtype))
    stat_s = reinterpret(stat3, gl.float32, [4, 1, BM], stat_desc.layout)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    cleared = gl.allocate_shared_memory(gl.int64, [1], BAR)
    made = gl.allocate_shared_memory(gl.int64, [4, 1], BAR)  # [consumer, stage]: dS, and dq of the step before
    dq_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    mbarrier.init(kv_full, count=1)
    mbarrier.init(cleared, count=2)
    for b in gl.static_range(2):
        mbarrier.init(q_full.index(b), count=1)
        mbarrier.init(dq_empty.index(b), count=1)
    for b in gl.static_range(4):
        mbarrier.init(made.index(b), count=1)
    read = made  # [consumer, stage]: query and grad_out
    if not TWO_PHASE:
        read = gl.allocate_shared_memory(gl.int64, [4, 1], BAR)
        for b in gl.static_range(4):
            mbarrier.init(read.index(b), count=1)

    rank, kv_index = block_of(gl.program_id(0), (seqlen_k + BN - 1) // BN, n_heads, heads_per_group)
    batch = kv_index // kv_heads
    kv_head = kv_index - batch * kv_heads
    tile = rank
    record = lists
    span = (0, 0, 0, 0)
    if LISTS == NO_LISTS:
        span = band_tiles(tile, seqlen_q, seqlen_k, band_lo, band_hi, BM, BN)
        if ORDERED:
            span = ordered_span(span, HAS_LO)
    else:
        base = lists + batch.to(gl.int64) * list_b + kv_head.to(gl.int64) * list_kv
        tile = gl.load(base + rank * list_width)
        record = base + tile * list_width
        if LISTS == BIT_LISTS:
            bits += batch.to(gl.int64) * bits_b + kv_head.to(gl.int64) * bits_kv + tile.to(gl.int64) * BN * bits_row
        else:
            q_segments += batch.to(gl.int64) * q_segments_b
            k_segments += batch.to(gl.int64) * k_segments_b + kv_head.to(gl.int64) * k_segments_kv
    if BIAS != NO_BIAS:
        bias += batch.to(gl.int64) * bias_b
    if BIAS == KEY_BIAS:
        key_sums += batch.to(gl.int64) * (kv_heads * group) * seqlen_k
    bias = Bias(bias, bias_h, bias_group, bias_q, 1.0 / scale, key_sums, seqlen_q, seqlen_k)
    place = (batch, kv_head, tile, group, kv_heads * group)
    ones = 0
    if BIAS == KEY_BIAS:
        ones = gl.allocate_shared_memory(dtype, [1, 8, BM], gl.NVMMASharedLayout.get_default_for([8, BM], dtype))
    shared = (q_s, do_s, k_s, v_s, stat_s, ds_s, dq_s, ones)
    mask = (bits, bits_row, q_segments, k_segments)
    steps = (list_step, bits_step, k_segments_step)
    signals = (q_full, made, read, kv_full, cleared, dq_empty)
    limits = (seqlen_q, seqlen_k, band_lo, band_hi)
    maps = (dk_desc, dv_desc)
    consumed = (shared, signals, maps, record, mask, steps, (scale, (scale_log2, cap)), span, place, limits, bias)
    maps = (q_desc, do_desc, stat_desc)
    stages = (q4, o4, stat3)
    produced = (maps, k_desc, v_desc, stages, k4, v4, q_full, read, kv_full, record, list_step, span, place, rows)
    reduced = (dq_desc, dq_s, made, dq_empty, record, list_step, span, place, rows, counters, band_lo)
    gl.warp_specialize([
        (consumer, (consumed, 0, BM, BN, D, DV, dtype, LISTS, PARTIAL, BIAS, SOFTCAP, HAS_LO, HAS_Q_SEG, GROUPED,
                    TWO_PHASE, ORDERED)),
        (consumer, (consumed, 1, BM, BN, D, DV, dtype, LISTS, PARTIAL, BIAS, SOFTCAP, HAS_LO, HAS_Q_SEG, GROUPED,
                    TWO_PHASE, ORDERED)),
        (producer, (produced, BM, BN, D, DV, LISTS, PARTIAL, ORDERED)),
        (reducer, (reduced, 0, BM, BN, LISTS, PARTIAL, HAS_LO, ORDERED)),
        (reducer, (reduced, 1, BM, BN, LISTS, PARTIAL, HAS_LO, ORDERED)),
    ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip
