"""SM 9.0 backward in Gluon: a block is 128 keys of a key head, which walk the query tiles that see them, head by head or in turns.

Five partitions: two consumers of 64 keys each (4 warps, 240 registers) that keep dk and dv in registers over all query
heads of the group, one warp that loads by TMA, and two that add each consumer's share of dq to the workspace and write its
dk and dv, by TMA. They count the steps of all blocks of a program in one sequence, in which a block's last step hands out
dk, dv and the last dq, and has no query tile: stages, phases and buffers follow from the count. A program that finds no
more blocks turns to `finish.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.backward.finish import finish
from dmattn_ops.kernels.hopper.backward.movers import PIECE_ROWS, producer, reducer
from dmattn_ops.kernels.hopper.backward.steps import ALWAYS, ASK, BAND, NEVER, last_step, step
from dmattn_ops.kernels.hopper.backward.walk import (
    BIT_LISTS,
    INTERVAL_LISTS,
    RAGGED,
    SEGMENT_LISTS,
    block_at,
    full_tile,
    head_steps,
    partial_tile,
    rounds_of,
    span_of,
)
from dmattn_ops.kernels.hopper.backward.work import RECEIVERS, receive, record_of, split_place
from dmattn_ops.kernels.hopper.columns import allocate_rows, buffer_at, no_sums, pair, slice_rows
from dmattn_ops.kernels.hopper.dropout import Dropout, dropout_of_batch, dropout_of_head
from dmattn_ops.kernels.hopper.gluon_compat import fence_async_shared, follow_kernel_before, mbarrier, reinterpret
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
from dmattn_ops.kernels.hopper.unseen import clear_unseen, ends_inside, seen_columns


@gluon.jit
def load_words(bits, keys, bits_row, m, BM: gl.constexpr):
    """Return the 64-bit words of the keys' visible queries of query tile `m`: the first of 64, the second of 64."""
    at = bits + m * (BM // 64) + keys * bits_row
    low = gl.load(at)
    high = low
    if BM == 128:
        high = gl.load(at + 1)
    return low, high


class KeyNumbers(NamedTuple):
    """Pointers to the numbers that a mask gives to the queries and keys of one head."""

    bits: Any
    bits_row: Any
    q_segments: Any
    k_segments: Any
    start: Any
    end: Any
    hidden_from: Any
    hidden_to: Any


@gluon.jit
def query_range(begin, end, keys_at, inside, first, last):
    """Return the first and the last query `[64]` of an interval of each key, inside `first` and `last`; any int32 may be an end."""
    low = gl.maximum(gl.load(begin + keys_at, mask=inside, other=1), first)
    high = gl.minimum(gl.maximum(gl.load(end + keys_at, mask=inside, other=0), 0) - 1, last)
    return low, high


@gluon.jit
def head_loop(
    i, dk, dv, tiles, barriers, scales, bias, dropouts, exact, row, numbers, record, span, tile, head, width, limits, rows,
    C: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, DV: gl.constexpr, DV2: gl.constexpr,
    dtype: gl.constexpr,
    LISTS: gl.constexpr, BIAS: gl.constexpr, SOFTCAP: gl.constexpr, HAS_LO: gl.constexpr,
    HAS_Q_SEG: gl.constexpr,
    HIDDEN: gl.constexpr, NATURAL: gl.constexpr, TWO_PHASE: gl.constexpr, DOWNWARDS: gl.constexpr, EXACT: gl.constexpr,
    DROPOUT: gl.constexpr, EDGES: gl.constexpr,
):  # fmt: skip
    """Take all steps of `width` query heads from `head` on: first the tiles that need no test, then the others.

    `row` is where the queries of `head` begin among all rows, of which each head has `rows`.
    """
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    by_key: gl.constexpr = gl.SliceLayout(1, SL)
    by_query: gl.constexpr = gl.SliceLayout(0, SL)
    TEST: gl.constexpr = BAND if LISTS == RAGGED else 1 + LISTS
    seqlen_q, seqlen_k, band_lo, band_hi, _ = limits
    keys = C * 64 + gl.arange(0, 64, layout=by_key)
    queries = gl.arange(0, BM, layout=by_query)
    own_keys = tile * BN + keys
    key_bias = load_key_bias(bias, head, own_keys, BIAS)[:, None]
    sums = no_key_sums()
    dropout = dropouts
    if DROPOUT:
        dropout = dropout_of_head(dropouts, head)
    n_full, n_partial = head_steps(record, span, LISTS, BM)
    for t in range(n_full * width):
        m = full_tile(t // width, record, n_partial, span, LISTS, BM, DOWNWARDS)
        queries_at = (m * BM + queries)[None, :]
        added = step_bias(bias, head, key_bias, own_keys[:, None], queries_at, exact, BIAS)
        dk, dv, sums = step(i, dk, dv, sums, tiles, barriers, scales, (added, head, own_keys[:, None], queries_at, bias),
                            exact, row + (t % width) * rows + m * BM, (keys, keys), (keys, keys), queries, keys,
                            dropout, (m * BM, tile * BN + C * 64), False,
                            C, BM, D, D2, DV, DV2, dtype, 0, BIAS, SOFTCAP, HAS_LO, HIDDEN, NATURAL, TWO_PHASE, EXACT,
                            DROPOUT, EDGES)  # fmt: skip
        i += 1
    k_seg = keys
    if LISTS == SEGMENT_LISTS:
        k_seg = gl.load(numbers.k_segments + own_keys, mask=own_keys < seqlen_k, other=-1)
    seen_lo = keys
    seen_hi = keys
    hidden_lo = keys
    hidden_hi = keys
    if LISTS == INTERVAL_LISTS:  # the queries that see a key: its interval inside the band
        inside = own_keys < seqlen_k
        seen_lo, seen_hi = query_range(
            numbers.start, numbers.end, own_keys, inside, own_keys - band_hi, own_keys - band_lo
        )
        if HIDDEN:
            hidden_lo, hidden_hi = query_range(
                numbers.hidden_from, numbers.hidden_to, own_keys, inside, 0, seqlen_q
            )  # fmt: skip
    # tiles and words are loaded a step ahead: ptxas tests the words before the first product, which would wait for them
    ahead = partial_tile(0, record, n_partial, span, LISTS, BM, DOWNWARDS)
    ahead_lo = keys
    ahead_hi = keys
    if LISTS == BIT_LISTS:
        ahead_lo, ahead_hi = load_words(numbers.bits, keys, numbers.bits_row, ahead, BM)
    after = partial_tile(1 // width, record, n_partial, span, LISTS, BM, DOWNWARDS)
    for t in range(n_partial * width):
        m = ahead
        ahead = after
        d_lo = ahead_lo
        d_hi = ahead_hi
        words = (d_lo, d_hi)
        if LISTS == BIT_LISTS:
            ahead_lo, ahead_hi = load_words(numbers.bits, keys, numbers.bits_row, ahead, BM)
        after = partial_tile((t + 2) // width, record, n_partial, span, LISTS, BM, DOWNWARDS)
        q_seg = queries
        if LISTS == INTERVAL_LISTS:
            d_lo = seen_lo - m * BM
            d_hi = seen_hi - m * BM
            words = (hidden_lo - m * BM, hidden_hi - m * BM)
        elif LISTS != BIT_LISTS:
            shift = tile * BN - m * BM
            d_lo = gl.where(own_keys < seqlen_k, keys + (shift - band_hi), BM)
            if HAS_LO:
                d_hi = keys + (shift - band_lo)
            if LISTS == SEGMENT_LISTS:
                q_seg = queries * 0
                if HAS_Q_SEG:
                    q_seg = gl.load(numbers.q_segments + m * BM + queries, mask=m * BM + queries < seqlen_q, other=-2)
        queries_at = (m * BM + queries)[None, :]
        added = step_bias(bias, head, key_bias, own_keys[:, None], queries_at, exact, BIAS)
        at_edge = False
        if EDGES:
            at_edge = ends_inside(seen_columns(seqlen_k, seqlen_q, 0 - band_hi, 0 - band_lo), m * BM, BM, seqlen_q)
        dk, dv, sums = step(i, dk, dv, sums, tiles, barriers, scales, (added, head, own_keys[:, None], queries_at, bias),
                            exact, row + (t % width) * rows + m * BM, (d_lo, d_hi), words, q_seg,
                            k_seg, dropout, (m * BM, tile * BN + C * 64), at_edge, C, BM, D, D2, DV, DV2, dtype, TEST, BIAS,
                            SOFTCAP, HAS_LO, HIDDEN, NATURAL, TWO_PHASE, EXACT, DROPOUT, EDGES)  # fmt: skip
        i += 1
    sums = gl.max(sums, 1)
    if DROPOUT:
        sums = sums * dropouts.rescale
    store_key_sums(bias, head, own_keys, sums, BIAS)
    return i, dk, dv


@gluon.jit
def heads_loops(
    i, dk, dv, tiles, barriers, scales, bias, dropouts, exact, row, numbers, record, span, tile, head, width, limits, rows,
    C: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, DV: gl.constexpr, DV2: gl.constexpr,
    dtype: gl.constexpr,
    LISTS: gl.constexpr, BIAS: gl.constexpr, SOFTCAP: gl.constexpr, HAS_LO: gl.constexpr,
    HAS_Q_SEG: gl.constexpr, HIDDEN: gl.constexpr, NATURAL: gl.constexpr, TWO_PHASE: gl.constexpr, DOWNWARDS: gl.constexpr,
    DROPOUT: gl.constexpr, EDGES: gl.constexpr,
):  # fmt: skip
    """Do `head_loop`: one pair of loops that ask whether they need exact statistics, or two where registers are short."""
    if BIAS == FULL_BIAS or SOFTCAP:
        if exact.needed != 0:
            i, dk, dv = head_loop(
                i, dk, dv, tiles, barriers, scales, bias, dropouts, exact, row, numbers, record, span, tile, head, width, limits,
                rows, C, BM, BN, D, D2, DV, DV2, dtype, LISTS, BIAS, SOFTCAP, HAS_LO, HAS_Q_SEG, HIDDEN, NATURAL, TWO_PHASE,
                DOWNWARDS, ALWAYS, DROPOUT, EDGES)  # fmt: skip
        else:
            i, dk, dv = head_loop(
                i, dk, dv, tiles, barriers, scales, bias, dropouts, exact, row, numbers, record, span, tile, head, width, limits,
                rows, C, BM, BN, D, D2, DV, DV2, dtype, LISTS, BIAS, SOFTCAP, HAS_LO, HAS_Q_SEG, HIDDEN, NATURAL, TWO_PHASE,
                DOWNWARDS, NEVER, DROPOUT, EDGES)  # fmt: skip
    else:
        i, dk, dv = head_loop(
            i, dk, dv, tiles, barriers, scales, bias, dropouts, exact, row, numbers, record, span, tile, head, width, limits,
            rows, C, BM, BN, D, D2, DV, DV2, dtype, LISTS, BIAS, SOFTCAP, HAS_LO, HAS_Q_SEG, HIDDEN, NATURAL, TWO_PHASE, DOWNWARDS,
            ASK, DROPOUT, EDGES)  # fmt: skip
    return i, dk, dv


@gluon.jit
def consume_block(
    i, turn, place, consumed,
    C: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, DV: gl.constexpr, DV2: gl.constexpr,
    K_BUFFERS: gl.constexpr,
    dtype: gl.constexpr, LISTS: gl.constexpr, BIAS: gl.constexpr, SOFTCAP: gl.constexpr,
    HAS_LO: gl.constexpr, HAS_Q_SEG: gl.constexpr,
    HIDDEN: gl.constexpr, NATURAL: gl.constexpr, GROUPED: gl.constexpr, TWO_PHASE: gl.constexpr,
    DOWNWARDS: gl.constexpr, INTERLEAVED: gl.constexpr, DROPOUT: gl.constexpr, EDGES: gl.constexpr,
):  # fmt: skip
    """Make dk and dv of 64 keys of a block, summed over the query heads of the group, and make half of each dq tile."""
    shared, signals, kv_signals, masks, strides, steps, scales, limits, all_bias, by_batch, exact, rows = consumed
    bias_b, dropouts = by_batch
    q_s, do_s, k_s, v_s, stat_s, ds_s, dq_s, ones = shared
    q_full, made, read, dq_empties = signals
    k_full, k_empty, v_full = kv_signals
    seqlen_q, seqlen_k, band_lo, band_hi, shares = limits
    lists, bits, q_segments, k_segments, start, end, hidden_from, hidden_to = masks
    of_lists, bits_b, bits_kv, bits_row, q_segments_b, k_segments_b, k_segments_kv = strides
    list_step, bits_step, k_segments_step, kv_heads, group = steps
    place, share = split_place(place, shares)
    tile, batch, kv_head = place
    record = record_of(place, lists, of_lists)
    block = block_at(tile, batch, record, limits, LISTS, BN)
    limits = (block.seqlen_q, block.seqlen_k, block.band_lo, block.band_hi, shares)
    span = span_of(block, share, shares, LISTS, HAS_LO, DOWNWARDS, BM, BN)
    if LISTS == BIT_LISTS:
        bits += batch.to(gl.int64) * bits_b + kv_head.to(gl.int64) * bits_kv + tile.to(gl.int64) * BN * bits_row
    elif LISTS == SEGMENT_LISTS:
        q_segments += batch.to(gl.int64) * q_segments_b
        k_segments += batch.to(gl.int64) * k_segments_b + kv_head.to(gl.int64) * k_segments_kv
    elif LISTS == INTERVAL_LISTS:
        of_head = batch.to(gl.int64) * k_segments_b + kv_head.to(gl.int64) * k_segments_kv
        start += of_head
        end += of_head
        if HIDDEN:
            hidden_from += of_head
            hidden_to += of_head
    bias_start = all_bias.start
    key_sums = all_bias.sums
    if BIAS != NO_BIAS:
        bias_start += batch.to(gl.int64) * bias_b
    if BIAS == KEY_BIAS:
        key_sums += batch.to(gl.int64) * (kv_heads * group) * seqlen_k
    if LISTS == RAGGED and BIAS == KEY_BIAS:
        bias_start += block.first_key
        key_sums += block.first_key
    bias = Bias(
        bias_start, all_bias.head, all_bias.group, all_bias.query, all_bias.factor, key_sums, seqlen_k, block.seqlen_q,
        block.seqlen_k,
    )  # fmt: skip
    if DROPOUT:
        dropouts = dropout_of_batch(dropouts, batch)
    k_buffer = turn % K_BUFFERS
    tiles = (q_s, do_s, stat_s, ds_s, dq_s.index(C), k_s, v_s, ones, k_buffer, (turn & 1) * 2 + C)
    barriers = (q_full, made, read, dq_empties.index(C))
    dk = no_sums(D, D2)
    dv = no_sums(DV, DV2)
    mbarrier.wait(k_full.index(k_buffer), (turn // K_BUFFERS) & 1)
    mbarrier.wait(v_full.index(turn & 1), (turn >> 1) & 1)
    if EDGES:
        first = block.tile * BN + C * 64
        seen = seen_columns(block.seqlen_q, block.seqlen_k, block.band_lo, block.band_hi)
        if ends_inside(seen, first, 64, block.seqlen_k):
            # the other consumer reads these rows of K as well, behind this one's first dS
            clear_unseen(slice_rows(buffer_at(k_s, k_buffer), C * 64, 64), first, seen, 64)
            clear_unseen(buffer_at(v_s, (turn & 1) * 2 + C), first, seen, 64)
    rounds, width = rounds_of(group, INTERLEAVED)
    row = (batch * kv_heads + kv_head) * group * rows + block.padded
    if GROUPED:
        for g in range(rounds):
            numbers = KeyNumbers(bits, bits_row, q_segments, k_segments, start, end, hidden_from, hidden_to)
            i, dk, dv = heads_loops(
                i, dk, dv, tiles, barriers, scales, bias, dropouts, exact, row, numbers, record, span, block.tile,
                kv_head * group + g, width, limits, rows,
                C, BM, BN, D, D2, DV, DV2, dtype, LISTS, BIAS, SOFTCAP, HAS_LO, HAS_Q_SEG,
                HIDDEN, NATURAL, TWO_PHASE, DOWNWARDS, DROPOUT, EDGES)  # fmt: skip
            record += list_step
            row += rows
            bits += bits_step
            k_segments += k_segments_step
            start += k_segments_step
            end += k_segments_step
            hidden_from += k_segments_step
            hidden_to += k_segments_step
    else:
        numbers = KeyNumbers(bits, bits_row, q_segments, k_segments, start, end, hidden_from, hidden_to)
        i, dk, dv = heads_loops(
            i, dk, dv, tiles, barriers, scales, bias, dropouts, exact, row, numbers, record, span, block.tile, kv_head, width,
            limits, rows, C, BM, BN, D, D2, DV, DV2, dtype, LISTS, BIAS, SOFTCAP, HAS_LO, HAS_Q_SEG, HIDDEN, NATURAL, TWO_PHASE,
            DOWNWARDS, DROPOUT, EDGES)  # fmt: skip
    dk_scale, dv_scale = scales.softmax, None
    if DROPOUT:
        dk_scale, dv_scale = dk_scale * dropouts.rescale, dropouts.rescale
    last_step(
        i, dk, dv, dk_scale, dv_scale, tiles, barriers, k_empty.index(k_buffer), C, BM, D, D2, DV, DV2, dtype, TWO_PHASE
    )
    return i + 1


@gluon.jit
def consumer(
    consumed, flags, n_flags, dq_out, filled, work,
    C: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, DV: gl.constexpr, DV2: gl.constexpr,
    K_BUFFERS: gl.constexpr,
    dtype: gl.constexpr, LISTS: gl.constexpr, BIAS: gl.constexpr, SOFTCAP: gl.constexpr,
    HAS_LO: gl.constexpr, HAS_Q_SEG: gl.constexpr,
    HIDDEN: gl.constexpr, NATURAL: gl.constexpr, GROUPED: gl.constexpr, TWO_PHASE: gl.constexpr,
    DOWNWARDS: gl.constexpr, INTERLEAVED: gl.constexpr, DROPOUT: gl.constexpr, EDGES: gl.constexpr,
):  # fmt: skip
    """Work through the program's blocks as consumer `C`, then write dq."""
    shared, signals, kv_signals, masks, strides, steps, scales, limits, bias, by_batch, exact, rows = consumed
    ones = shared[-1]
    needed = any_flag(flags, n_flags)
    exact = Exact(needed, exact.first, exact.second)
    scales = Scales(scales.factor, scales.cap, gl.where(needed != 0, 0.0, scales.unscale), scales.softmax)
    consumed = (shared, signals, kv_signals, masks, strides, steps, scales, limits, bias, by_batch, exact, rows)
    if BIAS == KEY_BIAS:
        ones.index(0).store(gl.full([8, BM], 1.0, dtype, layout=gl.BlockedLayout([1, 8], [4, 8], [1, 4], [1, 0])))
        fence_async_shared()
        mbarrier.arrive(filled, count=1)
        mbarrier.wait(filled, 0)  # both consumers store the same ones
    i = 0
    turn = 0
    tile, batch, kv_head = receive(turn, work)
    while tile >= 0:
        i = consume_block(
            i, turn, (tile, batch, kv_head), consumed, C, BM, BN, D, D2, DV, DV2, K_BUFFERS, dtype, LISTS, BIAS, SOFTCAP,
            HAS_LO, HAS_Q_SEG, HIDDEN, NATURAL, GROUPED, TWO_PHASE, DOWNWARDS, INTERLEAVED, DROPOUT, EDGES)  # fmt: skip
        turn += 1
        tile, batch, kv_head = receive(turn, work)
    _, _, _, dq_empties = signals
    mbarrier.wait(dq_empties.index(C), (i - 1) & 1)  # the last piece has left
    finish(turn + 1, dq_out, work, C, D, D2)


# One kernel serves all lengths, bands and lists: without what a multiple of 16 would tell, a step with a test takes 0 to 3
# instructions more.
_NUMBERS = ("bias_b", "bias_h", "bias_group", "kv_heads", "group", "n_heads")
_NUMBERS += ("seqlen_q", "seqlen_k", "band_lo", "band_hi")
_NUMBERS += ("list_b", "list_kv", "list_step", "list_width", "bits_b", "bits_kv", "bits_step", "bits_row")
_NUMBERS += ("seed_b", "seed_h", "last_dropped", "q_origin", "k_origin")
_NUMBERS += ("heads_per_group", "first_ranks", "ranks_in_row", "tiles_at_once", "n_flags", "key_tiles")


@gluon.jit(do_not_specialize=_NUMBERS)
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
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, DV: gl.constexpr, DV2: gl.constexpr, LISTS: gl.constexpr,
    BIAS: gl.constexpr, SOFTCAP: gl.constexpr, HAS_LO: gl.constexpr, HAS_Q_SEG: gl.constexpr,
    HIDDEN: gl.constexpr, NATURAL: gl.constexpr,
    GROUPED: gl.constexpr, TWO_PHASE: gl.constexpr, ORDERED: gl.constexpr, INTERLEAVED: gl.constexpr,
    DROPOUT: gl.constexpr, EDGES: gl.constexpr,
):  # fmt: skip
    """Write dk and dv `[B, Sk, Hkv, D]`, add to the dq workspace, and write dq `[B, Sq, H, D]` from it.

    Grid: one program per SM, at most as many as blocks (key tiles of a key head) and tiles of dq together. All counts start
    as int32 0: `tickets` are two, of blocks and of draws of dq; `blocks_done` has one for each key head of each batch.

    `statistics` are the four of all `total` rows as `hopper.backward.rows` writes them, and `flags` its `n_flags` flags.
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
    DOWNWARDS: gl.constexpr = ORDERED or INTERLEAVED
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    # what shared memory has room for
    NARROW: gl.constexpr = D == 64 if D2 == 0 else D + D2 + DV + DV2 <= 208
    K_BUFFERS: gl.constexpr = 2 if NARROW and BIAS != KEY_BIAS else 1
    q_descs, k_descs = pair(q_desc, q2_desc, D2), pair(k_desc, k2_desc, D2)
    v_descs, do_descs = pair(v_desc, v2_desc, DV2), pair(do_desc, do2_desc, DV2)
    q4, q_s = allocate_rows(q_descs, 2, BM, D, D2, dtype)
    o4, do_s = allocate_rows(do_descs, 2, BM, DV, DV2, dtype)
    k4, k_s = allocate_rows(k_descs, K_BUFFERS, BN, D, D2, dtype)
    v4, v_s = allocate_rows(v_descs, 4, 64, DV, DV2, dtype)  # two buffers, each in halves
    stat3 = gl.allocate_shared_memory(gl.float32, [2, 2, BM], stat_desc.layout)
    ds_s = gl.allocate_shared_memory(dtype, [2, BN, BM], gl.NVMMASharedLayout.get_default_for([BN, BM], dtype))
    dq_s = gl.allocate_shared_memory(gl.float32, [2, PIECE_ROWS, 256], pieces_desc.layout)
    stat_s = reinterpret(stat3, gl.float32, [4, 1, BM], stat_desc.layout)
    places = gl.allocate_shared_memory(gl.int32, [2, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    announced = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    received = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    sent = gl.allocate_shared_memory(gl.int64, [1], BAR)  # dk and dv of a block
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    # [consumer, stage]: dS, and dq of the step before; in a block's last step dk and dv
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
    read = made  # [consumer, stage]: query and grad_out
    if not TWO_PHASE:
        read = gl.allocate_shared_memory(gl.int64, [4, 1], BAR)
        for b in gl.static_range(4):
            mbarrier.init(read.index(b), count=1)
    ones = 0
    filled = 0
    if BIAS == KEY_BIAS:
        filled = gl.allocate_shared_memory(gl.int64, [1], BAR)
        mbarrier.init(filled, count=2)
        ones = gl.allocate_shared_memory(dtype, [1, 8, BM], gl.NVMMASharedLayout.get_default_for([8, BM], dtype))

    fence_async_shared()  # the barriers are there for TMA as well
    follow_kernel_before()

    n_blocks = key_tiles
    if shares is not None:
        n_blocks *= shares
    order = (n_blocks, n_heads, heads_per_group, first_ranks, ranks_in_row, tiles_at_once)
    of_lists = (list_b, list_kv, list_width)
    work = (places, announced, received)
    limits = (seqlen_q, seqlen_k, band_lo, band_hi, shares)
    shared = (q_s, do_s, k_s, v_s, stat_s, ds_s, dq_s, ones)
    signals = (q_full, made, read, dq_empty)
    kv_signals = (k_full, k_empty, v_full)
    masks = (lists, bits, q_segments, k_segments, start, end, hidden_from, hidden_to)
    strides = (of_lists, bits_b, bits_kv, bits_row, q_segments_b, k_segments_b, k_segments_kv)
    steps = (list_step, bits_step, k_segments_step, kv_heads, group)
    scales = Scales(scale_log2, cap, 1.0 / scale_log2, scale)
    exact = Exact(0, statistics + 2 * total.to(gl.int64), statistics + 3 * total.to(gl.int64))
    bias = Bias(bias, bias_h, bias_group, bias_q, 1.0 / scale, key_sums, seqlen_k, seqlen_q, seqlen_k)
    by_batch = (bias_b, Dropout(seed, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin))
    consumed = (shared, signals, kv_signals, masks, strides, steps, scales, limits, bias, by_batch, exact, rows)
    dq_scale = scale
    if DROPOUT:
        dq_scale = scale * rescale
    walked = (lists, of_lists, list_step, limits, kv_heads, group, rows)
    maps = (q_descs, do_descs, stat_desc)
    stages = (q4, o4, stat3, q_full, read)
    produced = ((k_descs, v_descs), (k4, v4, k_full, k_empty, v_full, sent), maps, stages, walked)
    dq_out = (accumulator, dq_s, pair(dq_desc, dq2_desc, D2), dq_scale, kv_heads * group, rows, query_tiles)
    sending = (q_s, ds_s, v_s, sent, pair(dk_desc, dk2_desc, D2), pair(dv_desc, dv2_desc, DV2))
    reduced = (pieces_desc, dq_s, made, dq_empty, counters, walked, sending)
    reduced_2 = (pair(pieces_desc, pieces2_desc, D2)[-1], dq_s, made, dq_empty, counters, walked, sending)
    gl.warp_specialize([
        (consumer, (consumed, flags, n_flags, dq_out, filled, work, 0, BM, BN, D, D2, DV, DV2, K_BUFFERS, dtype, LISTS, BIAS,
                    SOFTCAP, HAS_LO, HAS_Q_SEG, HIDDEN, NATURAL, GROUPED, TWO_PHASE, DOWNWARDS, INTERLEAVED, DROPOUT,
                    EDGES)),
        (consumer, (consumed, flags, n_flags, dq_out, filled, work, 1, BM, BN, D, D2, DV, DV2, K_BUFFERS, dtype, LISTS, BIAS,
                    SOFTCAP, HAS_LO, HAS_Q_SEG, HIDDEN, NATURAL, GROUPED, TWO_PHASE, DOWNWARDS, INTERLEAVED, DROPOUT,
                    EDGES)),
        (producer, (produced, tickets, blocks_done, order, work, query_tiles, BM, BN, D, D2, DV, DV2, K_BUFFERS, LISTS, HAS_LO,
                    DOWNWARDS, INTERLEAVED)),
        (reducer, (reduced, blocks_done, work, 0, BM, BN, D, D2, DV, DV2, dtype, LISTS, HAS_LO, ORDERED, DOWNWARDS, INTERLEAVED)),
        (reducer, (reduced_2, blocks_done, work, 1, BM, BN, D, D2, DV, DV2, dtype, LISTS, HAS_LO, ORDERED, DOWNWARDS, INTERLEAVED)),
    ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip
