"""SM 9.0 backward in Gluon: a block is 128 keys of a key head, which walk the query tiles that see them, head by head or in turns.

Five partitions: two consumers of 64 keys each (4 warps, 240 registers) that keep dk and dv in registers over all query
heads of the group, one warp that loads by TMA, and two that add each consumer's share of dq to the workspace and write its
dk and dv, by TMA. They count the steps of all blocks of a program in one sequence, in which a block's last step hands out
dk, dv and the last dq, and has no query tile: stages, phases and buffers follow from the count. A program that finds no
more blocks turns to `finish.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.backward.finish import finish
from dmattn_ops.kernels.hopper.backward.movers import PIECE_ROWS, producer, reducer
from dmattn_ops.kernels.hopper.backward.steps import ALWAYS, ASK, NEVER, last_step, step
from dmattn_ops.kernels.hopper.backward.types import (
    Flags,
    KeyNumbers,
    Loads,
    Mask,
    Order,
    Output,
    Own,
    Problem,
    Select,
    Shared,
    Signals,
    Step,
    Stores,
    Walk,
    Work,
    key_buffers,
    rows_of_flag,
)
from dmattn_ops.kernels.hopper.backward.walk import block_at, full_tile, head_steps, partial_tile, rounds_of, span_of
from dmattn_ops.kernels.hopper.backward.work import RECEIVERS, receive, record_of, split_place
from dmattn_ops.kernels.hopper.columns import allocate_rows, buffer_at, no_sums, pair, slice_rows
from dmattn_ops.kernels.hopper.constants import accumulator
from dmattn_ops.kernels.hopper.dropout import Dropout, dropout_of_batch, dropout_of_head
from dmattn_ops.kernels.hopper.gluon_compat import fence_async_shared, follow_kernel_before, mbarrier, reinterpret
from dmattn_ops.kernels.hopper.kinds import BAND, BITS, INTERVALS, NONE, RAGGED, SEGMENTS
from dmattn_ops.kernels.hopper.scores import (
    FULL_BIAS,
    KEY_BIAS,
    NO_BIAS,
    Bias,
    Exact,
    Scales,
    any_flag,
    load_key_bias,
    no_key_sums,
    step_bias,
    store_key_sums,
)
from dmattn_ops.kernels.hopper.unseen import clear_unseen, ends_inside, note_nan_in_parts, seen_columns


@gluon.jit
def load_words(numbers, keys, m, BM: gl.constexpr):
    """Return the 64-bit words of the keys' visible queries of query tile `m`: the first of 64, the second of 64."""
    at = numbers.bits + m * (BM // 64) + keys * numbers.bits_row
    low = gl.load(at)
    high = low
    if BM == 128:
        high = gl.load(at + 1)
    return low, high


@gluon.jit
def query_range(begin, end, keys_at, inside, first, last):
    """Return the first and the last query `[64]` of an interval of each key, inside `first` and `last`; any int32 may be an end."""
    low = gl.maximum(gl.load(begin + keys_at, mask=inside, other=1), first)
    high = gl.minimum(gl.maximum(gl.load(end + keys_at, mask=inside, other=0), 0) - 1, last)
    return low, high


@gluon.jit
def head_loop(i, dk, dv, own, walk, numbers, record, row, head, C: gl.constexpr, EXACT: gl.constexpr, T: gl.constexpr):
    """Take all steps of `walk.width` query heads from `head` on: first the tiles that need no test, then the others.

    `row` is where the queries of `head` begin among all rows.
    """
    SL: gl.constexpr = accumulator(T.BM)
    by_key: gl.constexpr = gl.SliceLayout(1, SL)
    by_query: gl.constexpr = gl.SliceLayout(0, SL)
    TEST: gl.constexpr = BAND if T.MASK == RAGGED else T.MASK
    block = walk.block
    keys = C * 64 + gl.arange(0, 64, layout=by_key)
    queries = gl.arange(0, T.BM, layout=by_query)
    own_keys = block.tile * T.BN + keys
    key_bias = load_key_bias(walk.bias, head, own_keys, T.BIAS)[:, None]
    sums = no_key_sums()
    dropout = walk.dropout
    if T.DROPOUT:
        dropout = dropout_of_head(walk.dropout, head)
    n_full, n_partial = head_steps(record, walk.span, T)
    for t in range(n_full * walk.width):
        m = full_tile(t // walk.width, record, n_partial, walk.span, T)
        queries_at = (m * T.BM + queries)[None, :]
        added = step_bias(walk.bias, head, key_bias, own_keys[:, None], queries_at, walk.exact, T.BIAS)
        no_test = Select(keys, keys, keys, keys, keys, keys, queries, keys)
        at = Step(row + (t % walk.width) * walk.rows + m * T.BM, head, m * T.BM, block.tile * T.BN + C * 64, queries_at,
                  own_keys[:, None], added, dropout, no_test, False)  # fmt: skip
        dk, dv, sums = step(i, dk, dv, sums, own, walk, at, C, NONE, EXACT, T)
        i += 1
    k_seg = keys
    if T.MASK == SEGMENTS:
        k_seg = gl.load(numbers.k_segments + own_keys, mask=own_keys < block.seqlen_k, other=-1)
    seen_lo = keys
    seen_hi = keys
    hidden_lo = keys
    hidden_hi = keys
    if T.MASK == INTERVALS:  # the queries that see a key: its interval inside the band
        inside = own_keys < block.seqlen_k
        seen_lo, seen_hi = query_range(
            numbers.start, numbers.end, own_keys, inside, own_keys - block.band_hi, own_keys - block.band_lo
        )
        if T.HIDDEN:
            hidden_lo, hidden_hi = query_range(
                numbers.hidden_from, numbers.hidden_to, own_keys, inside, 0, block.seqlen_q
            )
    # tiles and words are loaded a step ahead: ptxas tests the words before the first product, which would wait for them
    ahead = partial_tile(0, record, n_partial, walk.span, T)
    ahead_lo = keys
    ahead_hi = keys
    if T.MASK == BITS:
        ahead_lo, ahead_hi = load_words(numbers, keys, ahead, T.BM)
    after = partial_tile(1 // walk.width, record, n_partial, walk.span, T)
    for t in range(n_partial * walk.width):
        m = ahead
        ahead = after
        d_lo = ahead_lo
        d_hi = ahead_hi
        drop_lo = keys
        drop_hi = keys
        words = ahead_lo
        more_words = ahead_hi
        if T.MASK == BITS:
            ahead_lo, ahead_hi = load_words(numbers, keys, ahead, T.BM)
        after = partial_tile((t + 2) // walk.width, record, n_partial, walk.span, T)
        q_seg = queries
        if T.MASK == INTERVALS:
            d_lo = seen_lo - m * T.BM
            d_hi = seen_hi - m * T.BM
            drop_lo = hidden_lo - m * T.BM
            drop_hi = hidden_hi - m * T.BM
        elif T.MASK != BITS:
            shift = block.tile * T.BN - m * T.BM
            d_lo = gl.where(own_keys < block.seqlen_k, keys + (shift - block.band_hi), T.BM)
            if T.HAS_LO:
                d_hi = keys + (shift - block.band_lo)
            if T.MASK == SEGMENTS:
                q_seg = queries * 0
                if T.HAS_Q_SEG:
                    inside = m * T.BM + queries < block.seqlen_q
                    q_seg = gl.load(numbers.q_segments + m * T.BM + queries, mask=inside, other=-2)
        queries_at = (m * T.BM + queries)[None, :]
        added = step_bias(walk.bias, head, key_bias, own_keys[:, None], queries_at, walk.exact, T.BIAS)
        at_edge = False
        if T.EDGES:
            seen = seen_columns(block.seqlen_k, block.seqlen_q, 0 - block.band_hi, 0 - block.band_lo)
            at_edge = ends_inside(seen, m * T.BM, T.BM, block.seqlen_q)
        select = Select(d_lo, d_hi, words, more_words, drop_lo, drop_hi, q_seg, k_seg)
        at = Step(row + (t % walk.width) * walk.rows + m * T.BM, head, m * T.BM, block.tile * T.BN + C * 64, queries_at,
                  own_keys[:, None], added, dropout, select, at_edge)  # fmt: skip
        dk, dv, sums = step(i, dk, dv, sums, own, walk, at, C, TEST, EXACT, T)
        i += 1
    sums = gl.max(sums, 1)
    if T.DROPOUT:
        sums = sums * walk.dropout.rescale
    store_key_sums(walk.bias, head, own_keys, sums, T.BIAS)
    return i, dk, dv


@gluon.jit
def heads_loops(i, dk, dv, own, walk, numbers, record, row, head, C: gl.constexpr, T: gl.constexpr):
    """Take all steps of some query heads, as `head_loop` does, which asks in each step whether it needs exact statistics.

    With a full bias or a soft cap there are no registers for that: the loops for exact statistics are other ones.
    """
    if T.BIAS == FULL_BIAS or T.SOFTCAP:
        if walk.exact.needed != 0:
            i, dk, dv = head_loop(i, dk, dv, own, walk, numbers, record, row, head, C, ALWAYS, T)
        else:
            i, dk, dv = head_loop(i, dk, dv, own, walk, numbers, record, row, head, C, NEVER, T)
    else:
        i, dk, dv = head_loop(i, dk, dv, own, walk, numbers, record, row, head, C, ASK, T)
    return i, dk, dv


@gluon.jit
def numbers_of(place, mask, T: gl.constexpr):
    """Return the `KeyNumbers` of a mask for the first query head of a place."""
    bits = mask.bits
    q_segments = mask.q_segments
    k_segments = mask.k_segments
    start = mask.start
    end = mask.end
    hidden_from = mask.hidden_from
    hidden_to = mask.hidden_to
    batch = place.batch.to(gl.int64)
    kv_head = place.head.to(gl.int64)
    if T.MASK == BITS:
        bits += batch * mask.bits_b + kv_head * mask.bits_kv + place.tile.to(gl.int64) * T.BN * mask.bits_row
    elif T.MASK == SEGMENTS:
        q_segments += batch * mask.q_segments_b
        k_segments += batch * mask.k_segments_b + kv_head * mask.k_segments_kv
    elif T.MASK == INTERVALS:
        of_head = batch * mask.k_segments_b + kv_head * mask.k_segments_kv
        start += of_head
        end += of_head
        if T.HIDDEN:
            hidden_from += of_head
            hidden_to += of_head
    return KeyNumbers(bits, mask.bits_row, q_segments, k_segments, start, end, hidden_from, hidden_to)


@gluon.jit
def next_numbers(numbers, mask):
    """Return the `KeyNumbers` of a mask for the next query head of a group."""
    step = mask.k_segments_step
    return KeyNumbers(
        numbers.bits + mask.bits_step, numbers.bits_row, numbers.q_segments, numbers.k_segments + step, numbers.start + step,
        numbers.end + step, numbers.hidden_from + step, numbers.hidden_to + step,
    )  # fmt: skip


@gluon.jit
def exact_of(place, flags, problem, T: gl.constexpr):
    """Return the `Exact` of a place.

    ALONE: where a row of the query heads that read its key head needs a pair, so that no other batch entry has a say in its sums.
    That takes registers; without it, all places take pairs where some row of the call needs one.
    """
    needed = flags.raised
    if T.ALONE:
        if needed != 0:
            of_key_head = problem.group * problem.rows // rows_of_flag(T.D + T.D2)
            needed = any_flag(flags.start + (place.batch * problem.kv_heads + place.head) * of_key_head, of_key_head)
    return Exact(needed, problem.exact.first, problem.exact.second)


@gluon.jit
def consume_block(i, turn, place, smem, signals, problem, flags, counts, C: gl.constexpr, T: gl.constexpr):
    """Make dk and dv of 64 keys of a block, summed over the query heads of the group, and make half of each dq tile."""
    K_BUFFERS: gl.constexpr = key_buffers(T)
    place, share = split_place(place, problem.shares)
    mask = problem.mask
    first_record = record_of(place, mask)
    block = block_at(place, first_record, problem, T)
    span = span_of(block, share, problem.shares, mask.list_width, T)
    numbers = numbers_of(place, mask, T)
    record = first_record  # named behind the numbers: loops carry values in the order of their names
    bias = problem.bias
    bias_start = bias.start
    key_sums = bias.sums
    if T.BIAS != NO_BIAS:
        bias_start += place.batch.to(gl.int64) * problem.bias_b
    if T.BIAS == KEY_BIAS:
        key_sums += place.batch.to(gl.int64) * (problem.kv_heads * problem.group) * problem.seqlen_k
    if T.MASK == RAGGED and T.BIAS == KEY_BIAS:
        bias_start += block.first_key
        key_sums += block.first_key
    bias = Bias(
        bias_start,
        bias.head,
        bias.group,
        bias.query,
        bias.factor,
        key_sums,
        problem.seqlen_k,
        block.seqlen_q,
        block.seqlen_k,
    )
    dropout = problem.dropout
    if T.DROPOUT:
        dropout = dropout_of_batch(dropout, place.batch)
    exact = exact_of(place, flags, problem, T)
    factors = problem.scales
    unscale = gl.where(exact.needed != 0, 0.0, factors.unscale)
    scales = Scales(factors.factor, factors.cap, unscale, factors.softmax)
    k_buffer = turn % K_BUFFERS
    own = Own(smem, signals, smem.dq.index(C), k_buffer, (turn & 1) * 2 + C, signals.dq_empty.index(C))
    dk = no_sums(T.D, T.D2)
    dv = no_sums(T.DV, T.DV2)
    mbarrier.wait(signals.k_full.index(k_buffer), (turn // K_BUFFERS) & 1)
    mbarrier.wait(signals.v_full.index(turn & 1), (turn >> 1) & 1)
    if T.EDGES:
        first = block.tile * T.BN + C * 64
        seen = seen_columns(block.seqlen_q, block.seqlen_k, block.band_lo, block.band_hi)
        if ends_inside(seen, first, 64, block.seqlen_k):
            # the other consumer reads these rows of K as well, behind this one's first dS
            clear_unseen(slice_rows(buffer_at(smem.k, k_buffer), C * 64, 64), first, seen, 64)
            clear_unseen(buffer_at(smem.v, own.v_half), first, seen, 64)
    rounds, width = rounds_of(problem.group, T.INTERLEAVED)
    walk = Walk(block, span, width, problem.rows, scales, exact, bias, dropout)
    row = (place.batch * problem.kv_heads + place.head) * problem.group * problem.rows + block.padded
    if T.GROUPED:
        for g in range(rounds):
            head = place.head * problem.group + g
            i, dk, dv = heads_loops(i, dk, dv, own, walk, numbers, record, row, head, C, T)
            record += mask.list_step
            row += problem.rows
            numbers = next_numbers(numbers, mask)
    else:
        i, dk, dv = heads_loops(i, dk, dv, own, walk, numbers, record, row, place.head, C, T)
    dk_scale, dv_scale = scales.softmax, None
    if T.DROPOUT:
        dk_scale, dv_scale = dk_scale * problem.dropout.rescale, problem.dropout.rescale
    if T.WATCH:
        note_nan_in_parts(counts, dk)
        note_nan_in_parts(counts, dv)
    last_step(i, dk, dv, dk_scale, dv_scale, own, signals.k_empty.index(k_buffer), C, T)
    return i + 1


@gluon.jit
def consumer(smem, signals, problem, flags, n_flags, out, filled, work, C: gl.constexpr, T: gl.constexpr):
    """Work through the program's blocks as consumer `C`, then write dq."""
    flags = Flags(flags, any_flag(flags, n_flags))
    if T.BIAS == KEY_BIAS:
        BM: gl.constexpr = T.BM
        ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 4], [1, 0])
        smem.ones.index(0).store(gl.full([8, BM], 1.0, smem.ones.dtype, layout=ROWS))
        fence_async_shared()
        mbarrier.arrive(filled, count=1)
        mbarrier.wait(filled, 0)  # both consumers store the same ones
    i = 0
    turn = 0
    place = receive(turn, work)
    while place.tile >= 0:
        i = consume_block(i, turn, place, smem, signals, problem, flags, out.counts, C, T)
        turn += 1
        place = receive(turn, work)
    mbarrier.wait(signals.dq_empty.index(C), (i - 1) & 1)  # the last piece has left
    finish(turn + 1, out, work, C, T)


# One kernel serves all lengths, bands and lists: without what a multiple of 16 would tell, a step with a test takes 0 to 3
# instructions more.
INTEGERS = (
    "bias_b bias_h bias_group kv_heads group n_heads seqlen_q seqlen_k band_lo band_hi list_b list_kv list_step list_width bits_b "
    "bits_kv bits_step bits_row seed_b seed_h last_dropped q_origin k_origin heads_per_group first_ranks ranks_in_row "
    "tiles_at_once n_flags key_tiles"
).split()


@gluon.jit(do_not_specialize=INTEGERS)
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, stat_desc, pieces_desc, dq_desc, dk_desc, dv_desc,
    q2_desc, k2_desc, v2_desc, do2_desc, pieces2_desc, dq2_desc, dk2_desc, dv2_desc, accumulator,
    tickets, blocks_done, counters, flags, statistics,
    lists, bits, q_segments, k_segments, start, end, hidden_from, hidden_to, bias, key_sums, seed,
    list_b, list_kv, list_step, list_width, bits_b, bits_kv, bits_step, bits_row,
    q_segments_b, k_segments_b, k_segments_kv, k_segments_step, bias_b, bias_h, bias_q, bias_group,
    seed_b, seed_h, last_dropped, rescale, q_origin, k_origin,
    scale, scale_log2, cap, kv_heads, group, seqlen_q, seqlen_k, rows, band_lo, band_hi,
    heads_per_group, first_ranks, ranks_in_row, tiles_at_once, n_heads, n_flags, shares, total, key_tiles, query_tiles,
    T: gl.constexpr,
):  # fmt: skip
    """Write dk and dv `[B, Sk, Hkv, D]`, add to the dq workspace, and write dq `[B, Sq, H, D]` from it.

    Grid: one program per SM, at most as many as blocks (key tiles of a key head) and tiles of dq together. All counts start
    as int32 0: `tickets` are two, of blocks and of draws of dq; `blocks_done` has one for each key head of each batch.

    `statistics` are the four of all `total` rows as `hopper.statistics` writes them, and `flags` its `n_flags` flags.
    `start`, `end` and (where HIDDEN) `hidden_from` and `hidden_to` share the strides of `k_segments`. Of RAGGED calls `lists` are
    the records of the `key_tiles` tiles of keys, and `query_tiles` those of 128 queries in their own order. `_b` strides step a
    batch, `_kv` a key head, `_step` a query head within the group; `rows` is Sq padded to 128, sequence by sequence.
    EDGES: the band may hide keys from every query, or every key from a query (`hopper/unseen.py`).
    `bits` are the 64-bit words of `col_bits`. ORDERED (not with lists): `counters`, one for each piece of dq, give
    the additions a fixed order. INTERLEAVED (not with lists, nor with a bias or dropout): the query heads of a group take turns at
    each query tile, so that blocks that started together read the same ones at the same time. With a bias per key the sums
    of dS over a head's queries go to `key_sums` `[B, H, Sk]`. `shares` (not with lists, ORDERED, or a bias per key), if not None,
    are how many blocks a key tile has: they divide its query tiles, and dk and dv `[B * shares, Sk, Hkv, D]` are to be added up
    (`shares.py`). `scale_log2` and `cap` are described in `Scales`.
    """
    dtype: gl.constexpr = q_desc.dtype
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_descs, k_descs = pair(q_desc, q2_desc, T.D2), pair(k_desc, k2_desc, T.D2)
    v_descs, do_descs = pair(v_desc, v2_desc, T.DV2), pair(do_desc, do2_desc, T.DV2)
    q4, q_s = allocate_rows(q_descs, 2, T.BM, T.D, T.D2, dtype)
    o4, do_s = allocate_rows(do_descs, 2, T.BM, T.DV, T.DV2, dtype)
    k4, k_s = allocate_rows(k_descs, key_buffers(T), T.BN, T.D, T.D2, dtype)
    v4, v_s = allocate_rows(v_descs, 4, 64, T.DV, T.DV2, dtype)  # two buffers, each in halves
    stat3 = gl.allocate_shared_memory(gl.float32, [2, 2, T.BM], stat_desc.layout)
    ds_s = gl.allocate_shared_memory(dtype, [2, T.BN, T.BM], gl.NVMMASharedLayout.get_default_for([T.BN, T.BM], dtype))
    dq_s = gl.allocate_shared_memory(gl.float32, [2, PIECE_ROWS, 256], pieces_desc.layout)
    stat_s = reinterpret(stat3, gl.float32, [4, 1, T.BM], stat_desc.layout)
    places = gl.allocate_shared_memory(gl.int32, [2, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    announced = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    received = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    sent = gl.allocate_shared_memory(gl.int64, [1], BAR)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    made = gl.allocate_shared_memory(gl.int64, [4, 1], BAR)
    dq_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    mbarrier.init(sent, count=2)
    for b in gl.static_range(2):
        mbarrier.init(announced.index(b), count=1)
        mbarrier.init(received.index(b), count=RECEIVERS)
        mbarrier.init(k_full.index(b), count=1)
        mbarrier.init(k_empty.index(b), count=2)
        mbarrier.init(v_full.index(b), count=1)
        mbarrier.init(q_full.index(b), count=1)
        mbarrier.init(dq_empty.index(b), count=1)
    for b in gl.static_range(4):
        mbarrier.init(made.index(b), count=1)
    read = made
    if not T.TWO_PHASE:
        read = gl.allocate_shared_memory(gl.int64, [4, 1], BAR)
        for b in gl.static_range(4):
            mbarrier.init(read.index(b), count=1)
    ones = 0
    filled = 0
    if T.BIAS == KEY_BIAS:
        filled = gl.allocate_shared_memory(gl.int64, [1], BAR)
        mbarrier.init(filled, count=2)
        ones = gl.allocate_shared_memory(dtype, [1, 8, T.BM], gl.NVMMASharedLayout.get_default_for([8, T.BM], dtype))

    fence_async_shared()  # the barriers are there for TMA as well
    follow_kernel_before()

    n_blocks = key_tiles
    if shares is not None:
        n_blocks *= shares
    order = Order(n_blocks, n_heads, heads_per_group, first_ranks, ranks_in_row, tiles_at_once)
    work = Work(places, announced, received)
    smem = Shared(q_s, do_s, k_s, v_s, stat_s, ds_s, dq_s, ones)
    signals = Signals(q_full, made, read, dq_empty, k_full, k_empty, v_full)
    mask = Mask(lists, bits, q_segments, k_segments, start, end, hidden_from, hidden_to, list_b, list_kv, list_width, bits_b,
                bits_kv, bits_row, q_segments_b, k_segments_b, k_segments_kv, list_step, bits_step, k_segments_step)  # fmt: skip
    scales = Scales(scale_log2, cap, 1.0 / scale_log2, scale)
    exact = Exact(0, statistics + 2 * total.to(gl.int64), statistics + 3 * total.to(gl.int64))
    bias = Bias(bias, bias_h, bias_group, bias_q, 1.0 / scale, key_sums, seqlen_k, seqlen_q, seqlen_k)
    dropout = Dropout(seed, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin)
    problem = Problem(
        mask, kv_heads, group, scales, seqlen_q, seqlen_k, band_lo, band_hi, shares, bias, bias_b, dropout, exact, rows
    )
    dq_scale = scale
    if T.DROPOUT:
        dq_scale = scale * rescale
    loads = Loads(
        k_descs,
        v_descs,
        k4,
        v4,
        k_full,
        k_empty,
        v_full,
        sent,
        q_descs,
        do_descs,
        stat_desc,
        q4,
        o4,
        stat3,
        q_full,
        read,
    )
    out = Output(
        accumulator, dq_s, pair(dq_desc, dq2_desc, T.D2), dq_scale, kv_heads * group, rows, query_tiles, tickets
    )
    dk_descs, dv_descs = pair(dk_desc, dk2_desc, T.D2), pair(dv_desc, dv2_desc, T.DV2)
    stores = Stores(pieces_desc, dq_s, made, dq_empty, counters, q_s, ds_s, v_s, sent, dk_descs, dv_descs)
    pieces2 = pair(pieces_desc, pieces2_desc, T.D2)[-1]
    stores2 = Stores(pieces2, dq_s, made, dq_empty, counters, q_s, ds_s, v_s, sent, dk_descs, dv_descs)
    gl.warp_specialize([
        (consumer, (smem, signals, problem, flags, n_flags, out, filled, work, 0, T)),
        (consumer, (smem, signals, problem, flags, n_flags, out, filled, work, 1, T)),
        (producer, (loads, problem, tickets, blocks_done, order, work, query_tiles, T)),
        (reducer, (stores, problem, blocks_done, work, 0, T)),
        (reducer, (stores2, problem, blocks_done, work, 1, T)),
    ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip
