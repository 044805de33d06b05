"""dk and dv of heads up to 256 wide on SM 9.0: a block owns 64 keys and walks over the queries that see them.

dk and dv of 64 keys take 128 registers of each of 256 threads, so each consumer of 4 warps owns one of the two:

    dv consumer    S^T = K Q^T   P = exp2(S - lse)  --P-->                            dv += P^T dO
    dk consumer    dP^T = V dO^T                    --P-->   dS = P (dP - delta)      dk += dS^T Q

P is the only thing that goes between them, and they drift half a step apart, so that the tensor cores are busy (78% of
the cycles) while either does its elementwise work. Handing dP to the owner of P instead is 7 to 13% slower, and keeping
a product in flight into the next step 5 to 10%; without any loads it would be 2 to 5% faster (H200, 2026-11).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.backward_256.types import Scores, test_of_keys
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
from dmattn_ops.kernels.hopper.gluon_compat import follow_kernel_before, mbarrier, tma, tma_load, warpgroup_mma_wait
from dmattn_ops.kernels.hopper.kinds import BAND, RAGGED
from dmattn_ops.kernels.hopper.scores import (
    FULL_BIAS,
    KEY_BIAS,
    NO_BIAS,
    Bias,
    Exact,
    Scales,
    any_flag_of_heads,
    exact_exponents,
    first_scores,
    full_bias,
    load_key_bias,
    rounded_exponents,
    softened,
    step_bias,
    store_key_sums,
)
from dmattn_ops.kernels.hopper.unseen import (
    CLEARED,
    NO_KEY,
    clear_parts,
    clear_unseen,
    ends_inside,
    finish_clearing,
    note_nan_in_parts,
    seen_columns,
)
from dmattn_ops.kernels.hopper.views import (
    STEP,
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
    "bias_b bias_h bias_q bias_group kv_heads group seqlen_q seqlen_k stat_rows band_lo band_hi heads_per_group n_heads n_blocks"
).split()


class Shared(NamedTuple):
    """Shared memory: two stages of queries, the block's keys, P on its way, and the barriers."""

    q: Any  # [2, 64, D], in parts (`columns.py`) as all of them
    o: Any  # grad_out, [2, 64, DV]
    k: Any  # [1, 64, D]
    v: Any
    spare: Any  # where the two differ in width: room for the wider one's gradient, which leaves through the other
    p: Any  # [2, 64, 64], rows are keys
    lse: Any  # [2, 1, 64]
    delta: Any
    kv_full: Any
    q_full: Any
    q_empty: Any
    o_full: Any
    o_empty: Any
    p_full: Any


class Block(NamedTuple):
    """The keys of a block, and the query heads that read them."""

    queries: Any  # the place of rows (`hopper/ragged.py`)
    keys: Any
    kv_head: Any
    group: Any
    tile: Any  # in units of 64 keys
    seqlen_k: Any
    stat_row: Any  # row of the statistics where the queries of the first head begin
    stat_rows: Any


class Maps(NamedTuple):
    """Tensor maps of what is loaded; those of rows are in parts (`columns.py`)."""

    q: Any
    o: Any
    stats: Any
    k: Any
    v: Any


@gluon.jit
def load_step(i, at, head, maps, smem, block, T: gl.constexpr):
    """Fill stage `i & 1` with the queries of step `at`: query and lse, grad_out and delta."""
    b = i & 1
    phase = ((i >> 1) & 1) ^ 1
    row = block.stat_row + head * block.stat_rows + at * STEP
    q_full = smem.q_full.index(b)
    o_full = smem.o_full.index(b)
    mbarrier.wait(smem.q_empty.index(b), phase)
    mbarrier.expect(q_full, STEP * (T.D + T.D2) * 2 + STEP * 4)
    load_rows(maps.q, block.queries, at * STEP, head, q_full, smem.q, b, T.D)
    tma_load(maps.stats, [0, row], q_full, smem.lse.index(b))
    mbarrier.wait(smem.o_empty.index(b), phase)
    mbarrier.expect(o_full, STEP * (T.DV + T.DV2) * 2 + STEP * 4)
    load_rows(maps.o, block.queries, at * STEP, head, o_full, smem.o, b, T.DV)
    tma_load(maps.stats, [1, row], o_full, smem.delta.index(b))


@gluon.jit
def producer(maps, smem, block, view, mask, T: gl.constexpr):
    """Load the block's keys once and then every step of every query head."""
    TEST: gl.constexpr = test_of_keys(T)
    mbarrier.expect(smem.kv_full, STEP * (T.D + T.D2 + T.DV + T.DV2) * 2)
    load_rows(maps.k, block.keys, block.tile * STEP, block.kv_head, smem.kv_full, smem.k, 0, T.D)
    load_rows(maps.v, block.keys, block.tile * STEP, block.kv_head, smem.kv_full, smem.v, 0, T.DV)
    i = 0
    for g in range(block.group):
        head = block.kv_head * block.group + g
        here = head_view(view, mask, block.tile // 2, head, TEST)
        n_full, n_partial = count_steps(here, TEST)
        for t in range(n_full):
            load_step(i, full_step(t, here, n_partial, TEST), head, maps, smem, block, T)
            i += 1
        if T.PARTIAL:
            for t in range(n_partial):
                load_step(i, partial_step(t, here, n_partial, TEST), head, maps, smem, block, T)
                i += 1


@gluon.jit
def store_part(sums, factor, map, buffers, spare, block, PART: gl.constexpr, FIRST: gl.constexpr, WIDTH: gl.constexpr,
               ROOM: gl.constexpr):  # fmt: skip
    """Start writing columns `FIRST ...` of dk or dv of the block's keys, through a buffer `ROOM` wide or the spare one."""
    dtype: gl.constexpr = map[PART].dtype
    if WIDTH <= ROOM:
        buffer = buffers[PART].index(0)
        stage_rows(sums[PART], factor, buffer, WIDTH, ROOM, dtype)
    else:
        buffer = spare[PART].index(0)
        stage_rows(sums[PART], factor, buffer, WIDTH, WIDTH, dtype)
    send_rows(buffer, map[PART], block.keys, block.tile * STEP, block.kv_head, FIRST, dtype)


class Step(NamedTuple):
    """One step of 64 queries, and what the consumer that owns dv needs to make P of it."""

    row: Any  # of the statistics
    bias: Any  # what `step_bias` returned
    head: Any
    keys: Any
    queries: Any
    select: Any
    at_edge: Any  # whether some of its queries see no key


@gluon.jit
def step_at_edge(at, view, n_keys):
    """Return whether the band hides every key from a query of step `at`."""
    return ends_inside(seen_columns(n_keys, view.columns, view.band_lo, view.band_hi), at * STEP, STEP, view.columns)


@gluon.jit
def clear_unseen_keys(rows, block, view):
    """Set those of the block's keys or values to 0 that the band hides from every query."""
    first = block.tile * STEP
    seen = seen_columns(view.columns, block.seqlen_k, 0 - view.band_hi, 0 - view.band_lo)
    if ends_inside(seen, first, STEP, block.seqlen_k):
        clear_unseen(buffer_at(rows, 0), first, seen, STEP)


@gluon.jit
def dv_step(i, dv, smem, scores, at, TESTED: gl.constexpr, T: gl.constexpr):
    """Make P of a step, and add to dv."""
    TEST: gl.constexpr = test_of_keys(T)
    SL: gl.constexpr = accumulator(STEP)
    dtype: gl.constexpr = smem.p.dtype
    b = i & 1
    phase = (i >> 1) & 1
    k = buffer_at(smem.k, i >> 30)  # 0, but not for the compiler, which would keep descriptors of all of K in registers
    mbarrier.wait(smem.q_full.index(b), phase)
    minus_lse = smem.lse.index(b).reshape([STEP]).load(gl.SliceLayout(0, SL))  # behind a product it would wait for that
    added = at.bias
    s = first_scores(added, STEP, T.BIAS)
    s = multiply(k, transposed(buffer_at(smem.q, b)), s, T.BIAS == FULL_BIAS)
    s = warpgroup_mma_wait(0, deps=(s,))
    s, slope = softened(s, scores.scales, T.SOFTCAP)
    if scores.exact.needed != 0:
        if T.BIAS == FULL_BIAS:
            added = full_bias(scores.bias, at.head, at.keys[:, None], at.queries[None, :])
        rows = at.row + gl.arange(0, STEP, layout=gl.SliceLayout(0, SL))
        first = gl.load(scores.exact.first + rows)[None, :]
        second = gl.load(scores.exact.second + rows)[None, :]
        x = exact_exponents(s, first, second, added, scores.scales, T.BIAS, T.SOFTCAP, T.NATURAL)
    else:
        x = rounded_exponents(s, minus_lse[None, :], added, scores.scales, T.BIAS, T.SOFTCAP, False)
    p = gl.exp2(x)
    if TESTED:
        p = visible(p, at.keys, at.select, TEST, SL)
    p16 = p.to(dtype)
    smem.p.index(b).store((p * slope).to(dtype))  # dS follows with the slope since it is a multiple of P
    mbarrier.arrive(smem.p_full.index(b), count=1)
    if T.EDGES and TESTED:
        if at.at_edge:
            mbarrier.wait(smem.o_full.index(b), phase)
            clear_parts(buffer_at(smem.o, b), smem.lse.index(b).reshape([STEP]).load(CLEARED) != NO_KEY)
            finish_clearing()
    mbarrier.arrive(smem.q_empty.index(b), count=1)
    mbarrier.wait(smem.o_full.index(b), phase)
    dv = add_products(as_operand(p16, T.DV), buffer_at(smem.o, b), dv, T.DV2)
    dv = await_products(dv, T.DV2)
    mbarrier.arrive(smem.o_empty.index(b), count=1)
    return dv


@gluon.jit
def dv_loops(dv, smem, block, view, mask, scores, T: gl.constexpr):
    """Make P of every step, and add to dv over every query head of the group."""
    TEST: gl.constexpr = test_of_keys(T)
    SL: gl.constexpr = accumulator(STEP)
    keys = block.tile * STEP + gl.arange(0, STEP, layout=gl.SliceLayout(1, SL))
    queries = gl.arange(0, STEP, layout=gl.SliceLayout(0, SL))
    i = 0
    for g in range(block.group):
        head = block.kv_head * block.group + g
        here = head_view(view, mask, block.tile // 2, head, TEST)
        key_bias = load_key_bias(scores.bias, head, keys, T.BIAS)[:, None]
        n_full, n_partial = count_steps(here, TEST)
        for t in range(n_full):
            at = full_step(t, here, n_partial, TEST)
            rows = at * STEP + queries
            added = step_bias(scores.bias, head, key_bias, keys[:, None], rows[None, :], scores.exact, T.BIAS)
            row = block.stat_row + head * block.stat_rows + at * STEP
            dv = dv_step(i, dv, smem, scores, Step(row, added, head, keys, rows, no_test(keys), False), False, T)
            i += 1
        if T.PARTIAL:
            numbers = load_row_numbers(here, keys, block.seqlen_k, TEST)
            coming = partial_step(0, here, n_partial, TEST)
            for t in range(n_partial):
                at = coming
                coming = partial_step(t + 1, here, n_partial, TEST)  # loaded early: loads of the test depend on it
                select = load_select(at, here, keys, numbers, TEST, SL)
                rows = at * STEP + queries
                added = step_bias(scores.bias, head, key_bias, keys[:, None], rows[None, :], scores.exact, T.BIAS)
                row = block.stat_row + head * block.stat_rows + at * STEP
                at_edge = False
                if T.EDGES:
                    at_edge = step_at_edge(at, view, block.seqlen_k)
                dv = dv_step(i, dv, smem, scores, Step(row, added, head, keys, rows, select, at_edge), True, T)
                i += 1
    return dv


@gluon.jit
def dv_consumer(smem, dv_map, block, view, mask, scores, flags, counts, T: gl.constexpr):
    """Make P of every step, and dv: with a full bias in loops of their own for exact statistics, else in loops that ask."""
    bias, scales, exact = scores
    dv = no_sums(T.DV, T.DV2)
    # the rows of the queries that the block meets, and no others: those of a head, or of one sequence of it
    of_head = block.stat_rows // STEP
    flags += block.stat_row // STEP + block.kv_head * block.group * of_head
    needed = any_flag_of_heads(flags, (view.columns + 2 * STEP - 1) // (2 * STEP) * 2, block.group, of_head)
    mbarrier.wait(smem.kv_full, 0)
    if T.EDGES:  # queries behind the end take no test of whether they see a key
        clear_unseen_keys(smem.k, block, view)
    if T.BIAS == FULL_BIAS:
        if needed != 0:
            dv = dv_loops(dv, smem, block, view, mask, Scores(bias, scales, Exact(1, exact.first, exact.second)), T)
        else:
            dv = dv_loops(dv, smem, block, view, mask, Scores(bias, scales, Exact(0, exact.first, exact.second)), T)
    else:
        dv = dv_loops(dv, smem, block, view, mask, Scores(bias, scales, Exact(needed, exact.first, exact.second)), T)
    if T.WATCH:
        note_nan_in_parts(counts, dv)
    # only this consumer reads K, and it is done
    store_part(dv, None, dv_map, smem.k, smem.spare, block, 0, 0, T.DV, T.D)
    if T.DV2 > 0:
        store_part(dv, None, dv_map, smem.k, smem.spare, block, 1, T.DV, T.DV2, T.D2)
    tma.store_wait(pendings=0)


@gluon.jit
def dk_step(i, dk, sums, smem, at_edge, T: gl.constexpr):
    """Add a step to dk, and dS to the sums."""
    SL: gl.constexpr = accumulator(STEP)
    b = i & 1
    phase = (i >> 1) & 1
    v = buffer_at(smem.v, i >> 30)  # as for K above
    mbarrier.wait(smem.o_full.index(b), phase)
    if T.EDGES:
        if at_edge:
            mbarrier.wait(smem.q_full.index(b), phase)
            kept = smem.lse.index(b).reshape([STEP]).load(CLEARED) != NO_KEY
            clear_parts(buffer_at(smem.q, b), kept)
            clear_parts(buffer_at(smem.o, b), kept)
            finish_clearing()
    delta = smem.delta.index(b).reshape([STEP]).load(gl.SliceLayout(0, SL))
    dp = gl.zeros([STEP, STEP], gl.float32, layout=SL)
    dp = multiply(v, transposed(buffer_at(smem.o, b)), dp, False)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    mbarrier.arrive(smem.o_empty.index(b), count=1)
    mbarrier.wait(smem.p_full.index(b), phase)
    ds = smem.p.index(b).load(SL).to(gl.float32) * (dp - delta[None, :])
    if T.BIAS == KEY_BIAS:
        sums += gl.sum(ds, 1)
    ds = as_operand(ds.to(smem.p.dtype), T.D)
    mbarrier.wait(smem.q_full.index(b), phase)  # complete, since P is: makes what TMA wrote visible to this consumer
    dk = add_products(ds, buffer_at(smem.q, b), dk, T.D2)
    dk = await_products(dk, T.D2)
    mbarrier.arrive(smem.q_empty.index(b), count=1)  # frees P's buffer, too: the next P there needs the next queries
    return dk, sums


@gluon.jit
def dk_consumer(smem, dk_map, block, view, mask, bias, scale, counts, T: gl.constexpr):
    """Accumulate dk over every query head of the group, and sums of dS of each. P is 0 at hidden pairs."""
    TEST: gl.constexpr = test_of_keys(T)
    BY_KEY: gl.constexpr = gl.SliceLayout(1, accumulator(STEP))
    keys = block.tile * STEP + gl.arange(0, STEP, layout=BY_KEY)
    dk = no_sums(T.D, T.D2)
    mbarrier.wait(smem.kv_full, 0)
    if T.EDGES:
        clear_unseen_keys(smem.v, block, view)
    i = 0
    for g in range(block.group):
        head = block.kv_head * block.group + g
        here = head_view(view, mask, block.tile // 2, head, TEST)
        n_full, n_partial = count_steps(here, TEST)
        sums = gl.zeros([STEP], gl.float32, layout=BY_KEY)
        for t in range(n_full + n_partial):
            at_edge = False
            if T.EDGES:
                at = partial_step(t - n_full, here, n_partial, TEST)
                at_edge = (t >= n_full) & step_at_edge(at, view, block.seqlen_k)
            dk, sums = dk_step(i, dk, sums, smem, at_edge, T)
            i += 1
        store_key_sums(bias, head, keys, sums, T.BIAS)
    if T.WATCH:
        note_nan_in_parts(counts, dk)
    # only this consumer reads V, and it is done
    store_part(dk, scale, dk_map, smem.v, smem.spare, block, 0, 0, T.D, T.DV)
    if T.D2 > 0:
        store_part(dk, scale, dk_map, smem.v, smem.spare, block, 1, T.D, T.D2, T.DV2)
    tma.store_wait(pendings=0)


@gluon.jit
def allocate_spare(WIDTH: gl.constexpr, WIDTH_V: gl.constexpr, dtype: gl.constexpr):
    """Return a buffer for the wider of dk and dv, which has no room where the other's operand lies."""
    WIDER: gl.constexpr = WIDTH if WIDTH > WIDTH_V else WIDTH_V
    if WIDTH != WIDTH_V:
        MATRIX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEP, WIDER], dtype)
        return gl.allocate_shared_memory(dtype, [1, STEP, WIDER], MATRIX)
    else:
        return 0


@gluon.jit
def allocate(maps, T: gl.constexpr):
    """Return the buffers as TMA fills them (four dimensions) and as the tensor cores read them (two)."""
    dtype: gl.constexpr = maps.q[0].dtype
    SCORES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEP, STEP], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q, q2 = allocate_rows(maps.q, 2, STEP, T.D, T.D2, dtype)
    o, o2 = allocate_rows(maps.o, 2, STEP, T.DV, T.DV2, dtype)
    k, k2 = allocate_rows(maps.q, 1, STEP, T.D, T.D2, dtype)
    v, v2 = allocate_rows(maps.o, 1, STEP, T.DV, T.DV2, dtype)
    spare = (allocate_spare(T.D, T.DV, dtype), allocate_spare(T.D2, T.DV2, dtype))
    p = gl.allocate_shared_memory(dtype, [2, STEP, STEP], SCORES)
    lse = gl.allocate_shared_memory(gl.float32, [2, 1, STEP], maps.stats.layout)
    delta = gl.allocate_shared_memory(gl.float32, [2, 1, STEP], maps.stats.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    o_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    o_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    mbarrier.init(kv_full, count=1)
    for b in gl.static_range(2):
        mbarrier.init(q_full.index(b), count=1)
        mbarrier.init(q_empty.index(b), count=2)
        mbarrier.init(o_full.index(b), count=1)
        mbarrier.init(o_empty.index(b), count=2)
        mbarrier.init(p_full.index(b), count=1)
    filled = Shared(q, o, k, v, spare, p, lse, delta, kv_full, q_full, q_empty, o_full, o_empty, p_full)
    return filled, Shared(q2, o2, k2, v2, spare, p, lse, delta, kv_full, q_full, q_empty, o_full, o_empty, p_full)


@gluon.jit(do_not_specialize=INTEGERS)
def keys_kernel(q_map, k_map, v_map, o_map, stat_map, dk_map, dv_map, q2_map, k2_map, v2_map, o2_map, dk2_map, dv2_map, stats,
                flags, lists, bits, q_segments, k_segments,
                start, end, hidden_from, hidden_to,
                bias, key_sums, list_b, list_h, list_width, bits_b, bits_h, bits_row, q_segments_b, k_segments_b, k_segments_h,
                mask_group, segment_group, bias_b, bias_h, bias_q, bias_group, scale, scale_log2, cap, kv_heads, group, seqlen_q,
                seqlen_k, stat_rows, band_lo, band_hi, heads_per_group, n_heads, total, n_blocks,
                counts, counts_b, T: gl.constexpr):  # fmt: skip
    """Write dk and dv; a program for each 64 keys (with lists, each half of a tile) of each of `n_heads` key heads.

    Of RAGGED calls `lists` are the records of 64 keys. There are `n_blocks` programs for each key head.
    """
    TEST: gl.constexpr = test_of_keys(T)
    maps = Maps(
        pair(q_map, q2_map, T.D2), pair(o_map, o2_map, T.DV2), stat_map, pair(k_map, k2_map, T.D2), pair(v_map, v2_map, T.DV2)
    )  # fmt: skip
    filled, smem = allocate(maps, T)
    follow_kernel_before()
    tile, index = block_of(gl.program_id(0), n_blocks, n_heads, heads_per_group)
    batch = index // kv_heads
    kv_head = index - batch * kv_heads
    given = MaskTensors(lists, bits, q_segments, k_segments, start, end, hidden_from, hidden_to, list_b, list_h, list_width, bits_b,
                        bits_h, bits_row, q_segments_b, k_segments_b, k_segments_h, mask_group, segment_group)  # fmt: skip
    mask = mask_of(given, batch, TEST)
    if counts_b is not None:
        counts += batch.to(gl.int64) * counts_b
    if T.MASK == RAGGED:
        tile = ranked_tile(tile, mask, kv_head * group, 0, TEST)
    elif T.MASK != BAND:
        tile = ranked_tile(tile // 2, mask, kv_head * group, n_blocks // 2 - 1, TEST) * 2 + (tile & 1)
    # queries past the end have a statistic that makes P = 0: no test of theirs is needed
    at = sight_of(tile, batch, mask, seqlen_k, seqlen_q, -band_hi, -band_lo, STEP, TEST)
    view = band_view(mask, at.tile * STEP, STEP, at.n_rows, at.band_lo, at.band_hi, at.n_columns, False)
    stat_row = batch * kv_heads * group * stat_rows + at.padded
    block = Block(at.columns, at.rows, kv_head, group, at.tile, at.n_rows, stat_row, stat_rows)
    if T.BIAS != NO_BIAS:
        bias += batch.to(gl.int64) * bias_b
    if T.BIAS == KEY_BIAS:
        key_sums += batch.to(gl.int64) * (kv_heads * group) * seqlen_k
    if T.MASK == RAGGED and T.BIAS == KEY_BIAS:
        bias += at.begin
        key_sums += at.begin
    bias = Bias(bias, bias_h, bias_group, bias_q, 1.0 / scale, key_sums, seqlen_k, at.n_columns, at.n_rows)
    scales = Scales(scale_log2, cap, 0.0, scale)
    exact = Exact(0, stats + 2 * total.to(gl.int64), stats + 3 * total.to(gl.int64))
    dk_maps, dv_maps = pair(dk_map, dk2_map, T.D2), pair(dv_map, dv2_map, T.DV2)
    gl.warp_specialize([
        (dv_consumer, (smem, dv_maps, block, view, mask, Scores(bias, scales, exact), flags, counts, T)),
        (dk_consumer, (smem, dk_maps, block, view, mask, bias, scale, counts, T)),
        (producer, (maps, filled, block, view, mask, T)),
    ], [4, 1], [216, 40])  # fmt: skip
