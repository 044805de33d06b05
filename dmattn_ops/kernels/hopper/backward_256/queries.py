"""dq of heads up to 256 wide on SM 9.0: a block owns 128 queries of one head and walks over the keys that they see.

Each of two consumers of 4 warps owns 64 queries and does a whole step alone: S = Q K^T, dP = dO V^T,
dS = P (dP - delta), dq += dS K. They share what is loaded, and drift apart until one does its elementwise work while
the other feeds the tensor cores, which reach the rate of a large matrix product. Three buffers of 64 keys fit beside
the queries: two for K, which is needed until the end of a step, one for V. Waiting for V before S is issued costs 6 to
10%, keeping dq in flight into the next step 20% (H200, 2026-11).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.backward_256.types import test_of_queries
from dmattn_ops.kernels.hopper.columns import (
    add_products,
    allocate_rows,
    as_operand,
    await_products,
    buffer_at,
    load_rows,
    multiply,
    no_sums,
    pair,
    send_rows,
    stage_rows,
    transposed,
)
from dmattn_ops.kernels.hopper.constants import accumulator
from dmattn_ops.kernels.hopper.gluon_compat import follow_kernel_before, mbarrier, tma, warpgroup_mma_wait
from dmattn_ops.kernels.hopper.kinds import BAND, RAGGED, SEGMENTS
from dmattn_ops.kernels.hopper.scores import (
    FULL_BIAS,
    KEY_BIAS,
    NO_BIAS,
    Bias,
    Exact,
    Scales,
    any_flag,
    exact_exponents,
    finite_or_lowest,
    first_scores,
    full_bias,
    head_of,
    rounded_exponents,
    softened,
    step_bias,
)
from dmattn_ops.kernels.hopper.unseen import clear_unseen, ends_inside, note_nan_in_parts, seen_columns
from dmattn_ops.kernels.hopper.views import (
    STEP,
    Maps,
    MaskTensors,
    band_view,
    block_of,
    count_steps,
    full_step,
    head_view,
    load_row_numbers,
    load_select,
    mask_of,
    no_test,
    partial_step,
    ranked_tile,
    sight_of,
    visible,
)

INTEGERS = (
    "list_b list_h list_width bits_b bits_h bits_row q_segments_b k_segments_b k_segments_h mask_group segment_group "
    "bias_b bias_h bias_q bias_group heads group seqlen_q seqlen_k stat_rows band_lo band_hi heads_per_group n_heads n_tiles"
).split()


class Shared(NamedTuple):
    """Shared memory: the block's queries, two buffers of K, one of V, and the barriers."""

    q: Any  # [2, 64, D], in parts (`columns.py`) as all of them
    o: Any  # grad_out, [2, 64, DV]
    k: Any  # [2, 64, D]
    v: Any  # [1, 64, DV]
    bias: Any  # of the keys in the buffers of K, [2, 64]
    qo_full: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class Block(NamedTuple):
    """The queries of a block."""

    queries: Any  # the place of rows (`hopper/ragged.py`)
    keys: Any
    head: Any
    kv_head: Any
    tile: Any  # in units of 128 queries
    seqlen_q: Any
    lse: Any  # statistics of query 0 of the head; rows past the end have such that P = 0 and delta = 0
    delta: Any
    bias: Any


@gluon.jit
def load_step(i, at, maps, smem, block, T: gl.constexpr):
    """Load the keys of step `at`."""
    b = i & 1
    if T.BIAS == KEY_BIAS:  # on its way while the buffer becomes free
        key = at * STEP + gl.arange(0, STEP, layout=gl.BlockedLayout([1], [32], [1], [0]))
        added = gl.load(head_of(block.bias, block.head) + key, mask=key < block.bias.seqlen_k, other=0.0)
    k_full = smem.k_full.index(b)
    mbarrier.wait(smem.k_empty.index(b), ((i >> 1) & 1) ^ 1)
    mbarrier.expect(k_full, STEP * (T.D + T.D2) * 2)
    load_rows(maps.k, block.keys, at * STEP, block.kv_head, k_full, smem.k, b, T.D)
    if T.BIAS == KEY_BIAS:
        smem.bias.index(b).store(finite_or_lowest(added.to(gl.float32)))
        mbarrier.arrive(k_full, count=1)
    mbarrier.wait(smem.v_empty, (i & 1) ^ 1)
    mbarrier.expect(smem.v_full, STEP * (T.DV + T.DV2) * 2)
    load_rows(maps.v, block.keys, at * STEP, block.kv_head, smem.v_full, smem.v, 0, T.DV)


@gluon.jit
def producer(maps, smem, block, view, T: gl.constexpr):
    """Load the block's queries once and then every step."""
    TEST: gl.constexpr = test_of_queries(T)
    mbarrier.expect(smem.qo_full, 2 * STEP * (T.D + T.D2 + T.DV + T.DV2) * 2)
    for c in gl.static_range(2):
        row = (block.tile * 2 + c) * STEP
        load_rows(maps.q, block.queries, row, block.head, smem.qo_full, smem.q, c, T.D)
        load_rows(maps.o, block.queries, row, block.head, smem.qo_full, smem.o, c, T.DV)
    n_full, n_partial = count_steps(view, TEST)
    i = 0
    for t in range(n_full):
        load_step(i, full_step(t, view, n_partial, TEST), maps, smem, block, T)
        i += 1
    if T.PARTIAL:
        for t in range(n_partial):
            load_step(i, partial_step(t, view, n_partial, TEST), maps, smem, block, T)
            i += 1


class Edge(NamedTuple):
    """The keys of a step that no query sees, beside others."""

    first: Any  # the step's first key
    inside: Any  # whether there are some
    seen: Any  # what some query sees


class Step(NamedTuple):
    """One step of 64 keys, and what a consumer of 64 queries needs to add it to dq."""

    bias: Any  # what `step_bias` returned
    queries: Any
    keys: Any
    select: Any
    edge: Any


class Rows(NamedTuple):
    """The statistics of a consumer's queries."""

    minus_lse: Any
    delta: Any
    first: Any  # of the pair, where there is a soft cap
    second: Any


@gluon.jit
def dq_step(i, dq, smem, block, rows, scales, exact, at, C: gl.constexpr, TESTED: gl.constexpr, T: gl.constexpr):
    """Add a step to dq."""
    TEST: gl.constexpr = test_of_queries(T)
    SL: gl.constexpr = accumulator(STEP)
    b = i & 1
    zero_at = i >> 30  # 0, but not for the compiler: it would keep descriptors of shared memory in registers, and spill
    k = buffer_at(smem.k, b)
    zero = gl.zeros([STEP, STEP], gl.float32, layout=SL)
    mbarrier.wait(smem.k_full.index(b), (i >> 1) & 1)
    if T.EDGES and TESTED:
        if at.edge.inside:
            mbarrier.wait(smem.v_full, i & 1)
            clear_unseen(k, at.edge.first, at.edge.seen, STEP)
            clear_unseen(buffer_at(smem.v, zero_at), at.edge.first, at.edge.seen, STEP)
    added = at.bias
    if T.BIAS == KEY_BIAS:
        added = smem.bias.index(b).load(gl.SliceLayout(0, SL))[None, :]  # behind a product it would wait for that
    s = first_scores(added, STEP, T.BIAS)
    s = multiply(buffer_at(smem.q, C + zero_at), transposed(k), s, T.BIAS == FULL_BIAS)
    mbarrier.wait(smem.v_full, i & 1)
    v = buffer_at(smem.v, zero_at)
    dp = multiply(buffer_at(smem.o, C + zero_at), transposed(v), zero, False)
    s = warpgroup_mma_wait(2 if T.DV2 > 0 else 1, deps=(s,))
    s, slope = softened(s, scales, T.SOFTCAP)
    if T.SOFTCAP:  # across a branch, the slope would be kept beside the exponents: no registers are left for it
        x = exact_exponents(s, rows.first[:, None], rows.second[:, None], added, scales, T.BIAS, T.SOFTCAP, T.NATURAL)
    elif exact.needed != 0:
        if T.BIAS == FULL_BIAS:
            added = full_bias(block.bias, block.head, at.keys[None, :], at.queries[:, None])
        first = gl.load(exact.first + at.queries)[:, None]
        second = gl.load(exact.second + at.queries)[:, None]
        x = exact_exponents(s, first, second, added, scales, T.BIAS, T.SOFTCAP, T.NATURAL)
    else:
        x = rounded_exponents(s, rows.minus_lse[:, None], added, scales, T.BIAS, T.SOFTCAP, False)
    p = gl.exp2(x) * slope
    if TESTED:
        p = visible(p, at.queries, at.select, TEST, SL)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    mbarrier.arrive(smem.v_empty, count=1)
    ds = as_operand((p * (dp - rows.delta[:, None])).to(smem.q[0].dtype), T.D)
    dq = add_products(ds, k, dq, T.D2)
    dq = await_products(dq, T.D2)
    mbarrier.arrive(smem.k_empty.index(b), count=1)
    return dq


@gluon.jit
def consumer(smem, dq_map, block, view, scales, exact, flags, counts, C: gl.constexpr, T: gl.constexpr):
    """Accumulate dq of queries `C * 64 ...` of the block."""
    TEST: gl.constexpr = test_of_queries(T)
    SL: gl.constexpr = accumulator(STEP)
    dtype: gl.constexpr = smem.q[0].dtype
    dq = no_sums(T.D, T.D2)
    row = (block.tile * 2 + C) * STEP
    queries = row + gl.arange(0, STEP, layout=gl.SliceLayout(1, SL))
    keys = gl.arange(0, STEP, layout=gl.SliceLayout(0, SL))
    first = queries
    second = queries
    if T.SOFTCAP:
        first = gl.load(exact.first + queries)
        second = gl.load(exact.second + queries)
    rows = Rows(gl.load(block.lse + queries), gl.load(block.delta + queries), first, second)
    exact = Exact(any_flag(flags + C, 1), exact.first, exact.second)
    n_full, n_partial = count_steps(view, TEST)
    mbarrier.wait(smem.qo_full, 0)
    no_edge = Edge(0, False, False)
    if T.EDGES:  # queries that see no key: their dP need not be finite
        own = seen_columns(view.columns, block.seqlen_q, 0 - view.band_hi, 0 - view.band_lo)
        if ends_inside(own, row, STEP, block.seqlen_q):
            clear_unseen(buffer_at(smem.o, C), row, own, STEP)
        seen = seen_columns(block.seqlen_q, view.columns, view.band_lo, view.band_hi)
    i = 0
    for t in range(n_full):
        columns = full_step(t, view, n_partial, TEST) * STEP + keys
        added = step_bias(block.bias, block.head, keys, columns[None, :], queries[:, None], exact, T.BIAS)
        here = Step(added, queries, columns, no_test(queries), no_edge)
        dq = dq_step(i, dq, smem, block, rows, scales, exact, here, C, False, T)
        i += 1
    if T.PARTIAL:
        numbers = load_row_numbers(view, queries, block.seqlen_q, TEST)
        coming = partial_step(0, view, n_partial, TEST)
        for t in range(n_partial):
            at = coming
            coming = partial_step(t + 1, view, n_partial, TEST)  # loaded early: loads of the test depend on it
            select = load_select(at, view, queries, numbers, TEST, SL)
            columns = at * STEP + keys
            edge = no_edge
            if T.EDGES:
                edge = Edge(at * STEP, ends_inside(seen, at * STEP, STEP, view.columns), seen)
            added = step_bias(block.bias, block.head, keys, columns[None, :], queries[:, None], exact, T.BIAS)
            here = Step(added, queries, columns, select, edge)
            dq = dq_step(i, dq, smem, block, rows, scales, exact, here, C, True, T)
            i += 1
    if T.WATCH:
        note_nan_in_parts(counts, dq)
    # only this consumer reads this half of Q, and it is done
    q = buffer_at(smem.q, C)
    stage_rows(dq[0], scales.softmax, q[0], T.D, T.D, dtype)
    send_rows(q[0], dq_map[0], block.queries, row, block.head, 0, dtype)
    if T.D2 > 0:
        stage_rows(dq[1], scales.softmax, q[1], T.D2, T.D2, dtype)
        send_rows(q[1], dq_map[1], block.queries, row, block.head, T.D, dtype)
    tma.store_wait(pendings=0)


@gluon.jit
def allocate(maps, T: gl.constexpr):
    """Return the buffers as TMA fills them (four dimensions) and as the tensor cores read them (two)."""
    dtype: gl.constexpr = maps.q[0].dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q, q2 = allocate_rows(maps.q, 2, STEP, T.D, T.D2, dtype)
    o, o2 = allocate_rows(maps.o, 2, STEP, T.DV, T.DV2, dtype)
    k, k2 = allocate_rows(maps.q, 2, STEP, T.D, T.D2, dtype)
    v, v2 = allocate_rows(maps.o, 1, STEP, T.DV, T.DV2, dtype)
    bias = 0
    if T.BIAS == KEY_BIAS:
        bias = gl.allocate_shared_memory(gl.float32, [2, STEP], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    qo_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for b in gl.static_range(2):
        mbarrier.init(k_full.index(b), count=2 if T.BIAS == KEY_BIAS else 1)
        mbarrier.init(k_empty.index(b), count=2)
    mbarrier.init(qo_full, count=1)
    mbarrier.init(v_full, count=1)
    mbarrier.init(v_empty, count=2)
    filled = Shared(q, o, k, v, bias, qo_full, k_full, k_empty, v_full, v_empty)
    return filled, Shared(q2, o2, k2, v2, bias, qo_full, k_full, k_empty, v_full, v_empty)


@gluon.jit(do_not_specialize=INTEGERS)
def queries_kernel(q_map, k_map, v_map, o_map, dq_map, q2_map, k2_map, v2_map, o2_map, dq2_map, stats, flags, lists, bits,
                   q_segments, k_segments, start, end,
                   hidden_from, hidden_to,
                   bias, list_b, list_h, list_width, bits_b, bits_h, bits_row, q_segments_b, k_segments_b, k_segments_h,
                   mask_group, segment_group, bias_b, bias_h, bias_q, bias_group, scale, scale_log2, cap, heads, group,
                   seqlen_q, seqlen_k, stat_rows, band_lo, band_hi, heads_per_group, n_heads, total, n_tiles,
                   counts, counts_b, T: gl.constexpr):  # fmt: skip
    """Write dq; `n_tiles` programs, one for each 128 queries, of each of `n_heads` heads. Of RAGGED calls `lists` are records."""
    TEST: gl.constexpr = test_of_queries(T)
    # registers per thread: segments take 16 more of a consumer's, at the cost of one word that the producer spills
    CONSUMER: gl.constexpr = 240 if T.MASK == SEGMENTS else 232
    PRODUCER: gl.constexpr = 24 if T.MASK == SEGMENTS else 40
    maps = Maps(
        pair(q_map, q2_map, T.D2), pair(k_map, k2_map, T.D2), pair(v_map, v2_map, T.DV2), pair(o_map, o2_map, T.DV2)
    )
    dq_maps = pair(dq_map, dq2_map, T.D2)
    filled, smem = allocate(maps, T)
    follow_kernel_before()
    tile, index = block_of(gl.program_id(0), n_tiles, n_heads, heads_per_group)
    batch = index // heads
    head = index - batch * heads
    given = MaskTensors(lists, bits, q_segments, k_segments, start, end, hidden_from, hidden_to, list_b, list_h, list_width, bits_b,
                        bits_h, bits_row, q_segments_b, k_segments_b, k_segments_h, mask_group, segment_group)  # fmt: skip
    mask = mask_of(given, batch, TEST)
    if counts_b is not None:
        counts += batch.to(gl.int64) * counts_b
    if T.MASK != BAND:
        tile = ranked_tile(tile, mask, head, n_tiles - 1, TEST)
    elif T.HAS_HI:
        tile = n_tiles - 1 - tile  # the last queries see the most keys
    at = sight_of(tile, batch, mask, seqlen_q, seqlen_k, band_lo, band_hi, 2 * STEP, TEST)
    view = band_view(mask, at.tile * 2 * STEP, 2 * STEP, at.n_rows, at.band_lo, at.band_hi, at.n_columns, True)
    view = head_view(view, mask, tile, head, TEST)
    lse = stats + index.to(gl.int64) * stat_rows
    flags += index.to(gl.int64) * (stat_rows // STEP) + tile * 2  # of the block's own rows
    if T.MASK == RAGGED:  # a tile's rows begin at its number, and count inside its sequence
        lse += tile * 2 * STEP - at.tile * 2 * STEP
    if T.BIAS != NO_BIAS:
        bias += batch.to(gl.int64) * bias_b
        if T.MASK == RAGGED:
            bias += at.columns_begin
    bias = Bias(bias, bias_h, bias_group, bias_q, 1.0 / scale, bias, 0, at.n_rows, at.n_columns)
    delta = lse + n_heads.to(gl.int64) * stat_rows
    scales = Scales(scale_log2, cap, 0.0, scale)
    exact = Exact(0, lse + 2 * total.to(gl.int64), lse + 3 * total.to(gl.int64))
    block = Block(at.rows, at.columns, head, head // group, at.tile, at.n_rows, lse, delta, bias)
    gl.warp_specialize([
        (consumer, (smem, dq_maps, block, view, scales, exact, flags, counts, 0, T)),
        (consumer, (smem, dq_maps, block, view, scales, exact, flags, counts, 1, T)),
        (producer, (maps, filled, block, view, T)),
    ], [4, 1], [CONSUMER, PRODUCER])  # fmt: skip
