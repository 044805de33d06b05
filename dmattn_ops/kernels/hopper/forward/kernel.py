"""SM 9.0 forward in Gluon: persistent blocks, each consumer warp group owns 64 queries and walks their keys.

Partitions: two or three consumers (4 warps each) and one warp that takes work and loads it by TMA. A block draws its
next piece of work (a tile of queries of one head) from a counter when the last steps of this one are computed, so that
loading, storing and the ends of a walk overlap across pieces.

One step of a walk (`advance`) starts with P of a tile in registers and ends with P of the next:

    two consumers    S(i+1) = q k(i+1);   acc += P(i) v(i)  ||  P(i+1) = softmax(S(i+1))
    three consumers  S(i+1) = q k(i+1);   acc += P(i) v(i);   P(i+1) = softmax(S(i+1)), in halves: for 160 registers

Partly visible tiles come first, so that the second of two loops holds no test. Traps of triton 3.6's compiler: an `if`
that only picks a value becomes a branch with two equal targets and loses one of the values (use `gl.where`), a loop's
variable is undefined after the loop, and a product in flight across the end of an iteration is serialized (C7514).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.columns import (
    add_products,
    as_operand,
    await_products,
    multiply,
    no_sums,
    pair,
    rows_of,
    staged,
    transposed,
)
from dmattn_ops.kernels.hopper.dropout import Dropout, drop, dropout_of_batch, dropout_of_head
from dmattn_ops.kernels.hopper.forward.softmax import (
    largest,
    largest_of_rows,
    row_of,
    share_of_keys,
    softmax_first,
    state_of,
    statistics,
)
from dmattn_ops.kernels.hopper.forward.step import (
    add_bias,
    advance,
    first_key,
    hidden_words,
    hide,
    load_full_bias,
    seen_ranges,
    soften,
    stored_bias,
)
from dmattn_ops.kernels.hopper.forward.walk import band_tiles, bias_of_head, produce
from dmattn_ops.kernels.hopper.gluon_compat import (
    fence_async_shared,
    mbarrier,
    reinterpret,
    tma,
    tma_store,
    warpgroup_mma_wait,
)
from dmattn_ops.kernels.hopper.ragged import Rows, head_corner_of
from dmattn_ops.kernels.hopper.unseen import clear_unseen, ends_inside, seen_columns


@gluon.jit
def store_part(
    acc, inverse, q, buffer, o_desc, place, h, q_first,
    FIRST: gl.constexpr, WIDTH: gl.constexpr, WIDTH_Q: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Write columns `FIRST ...` of out, through a buffer of queries, viewed as the matrix `q`, that is at least as wide."""
    ROWS: gl.constexpr = 64
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, OUT))[:, None]
    if WIDTH != WIDTH_Q:
        buffer = reinterpret(buffer, dtype, o_desc.block_type.shape, o_desc.layout)
        q = buffer.reshape([ROWS, WIDTH])
    q.store(acc.to(dtype))
    fence_async_shared()
    tma_store(o_desc, head_corner_of(o_desc, place, q_first, h, FIRST), buffer)


@gluon.jit
def pass_over(count, step, k_full, k_empty, v_full, STAGES: gl.constexpr):
    """Give back the buffers of the next `count` tiles unread; return the step behind them."""
    for _ in range(count):
        b = step % STAGES
        mbarrier.wait(k_full.index(b), (step // STAGES) & 1)
        mbarrier.wait(v_full.index(b), (step // STAGES) & 1)
        mbarrier.arrive(k_empty.index(b), count=1)
        step += 1
    return step


@gluon.jit
def release_queries(turn, q_empty, Q_STAGES: gl.constexpr):
    """Give back the buffer of a turn's queries, once the output that was staged there has been read."""
    if turn >= 0:
        tma.store_wait(pendings=0)
        mbarrier.arrive(q_empty.index(turn % Q_STAGES), count=1)


@gluon.jit
def consume(
    lse, lse_tail, row_max, sink, lists, q_segments, key_numbers, bias, o_descs, work, rows, scales, bias_places, dropouts,
    C: gl.constexpr, NC: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, DV: gl.constexpr,
    DV2: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr, MASK: gl.constexpr, BIAS: gl.constexpr, HAS_LO: gl.constexpr, HAS_HI: gl.constexpr,
    SOFTCAP: gl.constexpr, HIDDEN: gl.constexpr, NATURAL: gl.constexpr, DROPOUT: gl.constexpr, dtype: gl.constexpr,
    EDGES: gl.constexpr,
):  # fmt: skip
    """Compute 64 queries of each piece of work: those from `C * 64` of its tile."""
    ROWS: gl.constexpr = 64
    TILE: gl.constexpr = 128
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    STATE_COLUMNS: gl.constexpr = BN if NC == 2 else BN // 2
    STATE_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STATE_COLUMNS, 16])
    WORDS: gl.constexpr = 8 if MASK == "ragged" else 4
    PIECE: gl.constexpr = gl.BlockedLayout([WORDS], [32], [4], [0])
    PER_TILE: gl.constexpr = TILE // BN
    ROW_MAX: gl.constexpr = row_max is not None
    smem, bars, sizes, band, masks = work
    queries, keys, values, words, biases, ranges, piece = smem
    q_full, q_empty, k_full, k_empty, v_full = bars
    seqlen_q, seqlen_k, H, kv_group, heads, tiles, group, items = sizes
    lo, hi = band
    lse_b, lse_h, segments_b, segments_kb, segments_kh, segment_group = rows
    scale, cap_inner = scales
    slots = gl.arange(0, WORDS, layout=PIECE)
    row = gl.arange(0, ROWS, layout=ROW)
    empty = gl.zeros([ROWS, BN], gl.float32, layout=SCORES)
    turn = 0
    step = 0
    mbarrier.wait(q_full.index(0), 0)
    parts = piece.index(0).load(PIECE)
    head = gl.sum(gl.where(slots == 0, parts, 0), 0)
    while head >= 0:
        slot = turn % Q_STAGES
        tile = gl.sum(gl.where(slots == 1, parts, 0), 0)
        n_partial = gl.sum(gl.where(slots == 2, parts, 0), 0) * PER_TILE
        batch = head // H
        h = head - batch * H
        block_first = tile * BM
        query_rows = batch
        if MASK == "ragged":
            block_first = tile
            seqlen_q = gl.sum(gl.where(slots == 3, parts, 0), 0)
            seqlen_k = gl.sum(gl.where(slots == 5, parts, 0), 0)
            diagonal = gl.sum(gl.where(slots == 6, parts, 0), 0)
            lo = band[0] + diagonal
            hi = band[1] + diagonal
            query_rows = Rows(gl.sum(gl.where(slots == 2, parts, 0), 0), seqlen_q)
        q_first = block_first + C * ROWS
        q = rows_of(queries, slot * NC + C, ROWS, D, D2)
        begin, end, full_begin, full_end = band_tiles(
            block_first, seqlen_q, seqlen_k, lo, hi, BM, BN, HAS_LO, HAS_HI
        )  # fmt: skip
        first = 0
        record = head.to(gl.int64)
        q_segment = row
        if MASK == "band" or MASK == "ragged":
            # the block's first tiles may lie wholly behind the band of these 64 queries, which has its own full tiles
            _, own_end, _, own_full_end = band_tiles(q_first, seqlen_q, seqlen_k, lo, hi, 64, BN, HAS_LO, HAS_HI)
            n = end - begin
            masked = end - full_end + full_begin - begin
            own_masked = gl.minimum(end - gl.maximum(own_full_end, full_end), masked)
            masked = gl.where(full_begin == begin, own_masked, masked)
            first = gl.minimum(gl.maximum(end - own_end, 0), end - full_end)
            first = gl.where(q_first >= seqlen_q, n, first)
            step = pass_over(first, step, k_full, k_empty, v_full, STAGES)
        else:
            n = n_partial + gl.sum(gl.where(slots == 3, parts, 0), 0) * PER_TILE
            masked = n_partial
            if MASK != "bits" or BIAS == "full" or DROPOUT:
                lists_b, lists_h, width, mask_group = masks
                list_first = batch.to(gl.int64) * lists_b + (h // mask_group).to(gl.int64) * lists_h
                record = list_first + tile.to(gl.int64) * width
            if MASK == "segments":
                if q_segments is None:
                    q_segment = gl.zeros([ROWS], gl.int32, layout=ROW)
                else:
                    own = q_segments + batch.to(gl.int64) * segments_b + q_first
                    q_segment = gl.load(own + row, mask=q_first + row < seqlen_q, other=-3)
            if MASK == "intervals":
                q_segment = C * ROWS + row
            if MASK == "segments" or MASK == "intervals":
                k_head = batch.to(gl.int64) * segments_kb + (h // segment_group).to(gl.int64) * segments_kh
        q_hi = gl.zeros([ROWS], gl.int32, layout=ROW) + (seqlen_k - 1)
        if HAS_HI:
            q_hi = gl.minimum(q_first + row + hi, seqlen_k - 1)
        q_lo = q_first + row + lo
        k_segments, _, _, hidden_from, hidden_to = key_numbers
        if MASK == "segments":
            k_segments += k_head
        if HIDDEN:
            hidden_from += k_head
            hidden_to += k_head
        own_numbers = (k_segments, hidden_from, hidden_to)
        bias_rows = bias
        if BIAS == "full":  # rows past the end read the last one and are never written
            own_bias = bias_of_head(bias, bias_places, batch, h)
            bias_rows = own_bias + gl.minimum(q_first + row, seqlen_q - 1).to(gl.int64) * bias_places[2]
        visible = (q_lo, q_hi, q_segment, begin, end, full_begin, full_end, record, n_partial, n, seqlen_k, block_first)
        dropout = dropouts
        if DROPOUT:
            dropout = dropout_of_head(dropout_of_batch(dropouts, batch), h)
        edge = (False, False)
        if EDGES:
            no_limit: gl.constexpr = 1 << 30
            seen = seen_columns(seqlen_q, seqlen_k, lo if HAS_LO else 0, hi if HAS_HI else no_limit)
            edge = (ends_inside(seen, begin * BN, (end - begin) * BN, seqlen_k), seen)
        acc = no_sums(DV, DV2)
        total = state_of(gl.zeros([ROWS, STATE_COLUMNS], gl.float32, layout=STATE_LAYOUT), STATE_COLUMNS)
        top = total
        peak = total
        if first < n:
            b = step % STAGES
            mbarrier.wait(k_full.index(b), (step // STAGES) & 1)
            k_first = transposed(rows_of(keys, b, BN, D, D2))
            hidden = hidden_words(first, step, words, n_partial, C, NC, BN, STAGES, MASK, True)
            hidden = seen_ranges(step, ranges, hidden, BN, STAGES, MASK, True)
            stored = stored_bias(step, biases, C, NC, BN, STAGES, BIAS)
            s = multiply(q, k_first, empty, False)
            if Q_STAGES > 1:
                release_queries(turn - 1, q_empty, Q_STAGES)
            s = soften(warpgroup_mma_wait(0, deps=(s,)), cap_inner, SOFTCAP)
            added = load_full_bias(first, lists, visible, bias_rows, BN, MASK, True, BIAS)
            s = add_bias(s, added, stored, scale, BIAS, NATURAL)
            s = hide(s, first, hidden, lists, own_numbers, visible, BN, MASK, HAS_LO, HAS_HI, HIDDEN)
            mbarrier.arrive(k_empty.index(b), count=1)
            if ROW_MAX:
                peak = largest(s, total, BN)
            p, top, total = softmax_first(s, total, scale, dtype, NATURAL, BN)
            if DROPOUT:
                p = drop(p, dropout, q_first, first_key(first, lists, visible, BN, MASK), BN)
            p = as_operand(p, DV)
            tested = gl.minimum(gl.maximum(masked, first + 1), n) - 1
            for i in range(first, tested):
                acc, p, top, total, peak = advance(
                    i, step, acc, p, top, total, peak, q, smem, bars, scale, cap_inner, lists, own_numbers, visible,
                    bias_rows, dropout, q_first,
                    C, NC, BN, D, D2, DV, DV2, STAGES, MASK, True, BIAS, HAS_LO, HAS_HI, SOFTCAP, HIDDEN, NATURAL, DROPOUT,
                    ROW_MAX, dtype, edge, EDGES,
                )  # fmt: skip
                step += 1
            if EDGES:
                if edge[0] & (tested < masked):  # values of the last tile that is tested
                    mbarrier.wait(v_full.index(step % STAGES), (step // STAGES) & 1)
                    last = first_key(tested, lists, visible, BN, MASK)
                    clear_unseen(rows_of(values, step % STAGES, BN, DV, DV2), last, edge[1], BN)
            for i in range(tested, n - 1):
                acc, p, top, total, peak = advance(
                    i, step, acc, p, top, total, peak, q, smem, bars, scale, cap_inner, lists, own_numbers, visible,
                    bias_rows, dropout, q_first,
                    C, NC, BN, D, D2, DV, DV2, STAGES, MASK, False, BIAS, HAS_LO, HAS_HI, SOFTCAP, HIDDEN, NATURAL, DROPOUT,
                    ROW_MAX, dtype, edge, EDGES,
                )  # fmt: skip
                step += 1
            b = step % STAGES
            mbarrier.wait(v_full.index(b), (step // STAGES) & 1)
            acc = add_products(p, rows_of(values, b, BN, DV, DV2), acc, DV2)
            acc = await_products(acc, DV2)
            step += 1
        elif Q_STAGES > 1:
            release_queries(turn - 1, q_empty, Q_STAGES)
        row_total = row_of(total, ROW, True)
        inverse = gl.where(row_total == 0.0, 0.0, 1.0 / gl.abs(row_total))
        if DROPOUT:
            inverse = inverse * dropouts.rescale
        if sink is not None:
            row_lse, row_tail = statistics(row_of(top, ROW, False), row_total, scale, NATURAL)
            inverse = inverse * share_of_keys(row_lse, gl.load(sink + h).to(gl.float32))
        # q is not needed any more: its place stages the output. TMA leaves out the rows and columns past the ends
        at = slot * NC + C
        store_part(acc[0], inverse, q[0], queries[0].index(at), o_descs[0], query_rows, h, q_first, 0, DV, D, dtype)
        if DV2 > 0:
            store_part(
                acc[1], inverse, q[1], queries[1].index(at), o_descs[1], query_rows, h, q_first, DV, DV2, D2, dtype
            )
        row_lse, row_tail = statistics(row_of(top, ROW, False), row_total, scale, NATURAL)
        at = batch.to(gl.int64) * lse_b + h.to(gl.int64) * lse_h + q_first + row
        if MASK == "ragged":
            at += query_rows.begin
        gl.store(lse + at, row_lse, mask=q_first + row < seqlen_q)
        gl.store(lse_tail + at, row_tail, mask=q_first + row < seqlen_q)
        if ROW_MAX:
            own_max = largest_of_rows(row_of(peak, ROW, False), row_total, scale, NATURAL)
            gl.store(row_max + at, own_max, mask=q_first + row < seqlen_q)
        if Q_STAGES == 1:  # else when the next piece is under way
            release_queries(turn, q_empty, Q_STAGES)
        turn += 1
        slot = turn % Q_STAGES
        mbarrier.wait(q_full.index(slot), (turn // Q_STAGES) & 1)
        parts = piece.index(slot).load(PIECE)
        head = gl.sum(gl.where(slots == 0, parts, 0), 0)
    tma.store_wait(pendings=0)


@gluon.jit
def buffers(maps, n, SECOND: gl.constexpr, dtype: gl.constexpr):
    """Return shared memory for `n` tiles of each part."""
    first = gl.allocate_shared_memory(dtype, staged(n, maps[0]), maps[0].layout)
    if SECOND > 0:
        return (first, gl.allocate_shared_memory(dtype, staged(n, maps[1]), maps[1].layout))
    else:
        return (first,)


SCALARS = (
    "seqlen_q", "seqlen_k", "H", "kv_group", "heads", "tiles", "group", "items", "lo", "hi", "lse_b", "lse_h",
    "lists_b", "lists_h", "width", "mask_group", "bits_b", "bits_h",
    "segments_b", "segments_kb", "segments_kh", "segment_group", "bias_group",
    "seed_b", "seed_h", "last_dropped", "q_origin", "k_origin",
)  # fmt: skip


@gluon.jit(do_not_specialize=SCALARS)
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, q2_desc, k2_desc, v2_desc, o2_desc, bits_desc, bias_desc, lse, lse_tail, row_max, sink, lists,
    q_segments, k_segments, start, end, hidden_from, hidden_to, bias, seed, counter, scale, cap_inner,
    seqlen_q, seqlen_k, H, kv_group, heads, tiles, group, items, lo, hi, lse_b, lse_h,
    lists_b, lists_h, width, mask_group, bits_b, bits_h, segments_b, segments_kb, segments_kh, segment_group,
    bias_b, bias_h, bias_q, bias_group, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, DV: gl.constexpr, DV2: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    MASK: gl.constexpr, BIAS: gl.constexpr, HAS_LO: gl.constexpr, HAS_HI: gl.constexpr, SOFTCAP: gl.constexpr,
    HIDDEN: gl.constexpr, NATURAL: gl.constexpr, DROPOUT: gl.constexpr, EDGES: gl.constexpr,
):  # fmt: skip
    """Write out, lse and lse_tail for `items` pieces of work: `tiles` of `BM` queries of each of `heads` (batch * H).

    `row_max`, where it is given, is written too, and `sink` `[H]`, where it is given, takes its share of every softmax.

    `scale` turns products into scores in log2 units, or NATURAL ones. With SOFTCAP it is the cap, and what it multiplies is
    the tanh of products times `cap_inner`.

    `k_segments`, or `start`, `end` and (where HIDDEN) `hidden_from` and `hidden_to`, share the strides `segments_kb` and
    `segments_kh`. Of ragged calls `lists` are the records of tiles of `BM` queries, and positions count inside a sequence.
    EDGES: the band may hide keys from every query (`hopper/unseen.py`).
    """
    ROWS: gl.constexpr = 64
    TILE: gl.constexpr = 128
    dtype: gl.constexpr = q_desc.dtype
    NC: gl.constexpr = BM // ROWS
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    queries = buffers((q_desc, q2_desc), Q_STAGES * NC, D2, dtype)
    keys = buffers((k_desc, k2_desc), STAGES, D2, dtype)
    values = buffers((v_desc, v2_desc), STAGES, DV2, dtype)
    words = 0
    if MASK == "bits":
        words = gl.allocate_shared_memory(gl.int32, [STAGES * NC, 1, 1, ROWS, TILE // 32], bits_desc.layout)
    biases = 0
    if BIAS == "key":
        biases = gl.allocate_shared_memory(bias.dtype.element_ty, [STAGES, BN], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if BIAS == "tiles":
        biases = gl.allocate_shared_memory(bias_desc.dtype, [STAGES * NC, 1, 1, ROWS, BN], bias_desc.layout)
    ranges = 0
    if MASK == "intervals":
        ranges = gl.allocate_shared_memory(gl.int32, [STAGES, BN], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    WORDS: gl.constexpr = 8 if MASK == "ragged" else 4
    piece = gl.allocate_shared_memory(gl.int32, [Q_STAGES, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=NC)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=2 if BIAS == "key" or MASK == "intervals" else 1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=NC)
    fence_async_shared()
    smem = (queries, keys, values, words, biases, ranges, piece)
    bars = (q_full, q_empty, k_full, k_empty, v_full)
    sizes = (seqlen_q, seqlen_k, H, kv_group, heads, tiles, group, items)
    band = (lo, hi)
    masks = (lists_b, lists_h, width, mask_group)
    broadcast = (bits_b, bits_h, mask_group)
    scales = (scale, cap_inner)
    work = (smem, bars, sizes, band, masks)
    bias_places = (bias_b, bias_h, bias_q, bias_group)
    q_descs, k_descs = pair(q_desc, q2_desc, D2), pair(k_desc, k2_desc, D2)
    v_descs, o_descs = pair(v_desc, v2_desc, DV2), pair(o_desc, o2_desc, DV2)
    pair_descs = (bits_desc, bias_desc)
    key_numbers = (k_segments, start, end, hidden_from, hidden_to)
    number_places = (segments_kb, segments_kh, segment_group)
    rows = (lse_b, lse_h, segments_b, segments_kb, segments_kh, segment_group)
    dropouts = Dropout(seed, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin)
    if NC == 2:
        gl.warp_specialize([
            (consume, (lse, lse_tail, row_max, sink, lists, q_segments, key_numbers, bias, o_descs, work, rows, scales, bias_places,
                       dropouts, 0, NC, BM, BN, D, D2, DV, DV2, STAGES, Q_STAGES, MASK, BIAS, HAS_LO, HAS_HI, SOFTCAP, HIDDEN,
                       NATURAL, DROPOUT, dtype, EDGES)),
            (consume, (lse, lse_tail, row_max, sink, lists, q_segments, key_numbers, bias, o_descs, work, rows, scales, bias_places,
                       dropouts, 1, NC, BM, BN, D, D2, DV, DV2, STAGES, Q_STAGES, MASK, BIAS, HAS_LO, HAS_HI, SOFTCAP, HIDDEN,
                       NATURAL, DROPOUT, dtype, EDGES)),
            (produce, (q_descs, k_descs, v_descs, pair_descs, lists, start, end, counter, bias, work, broadcast, number_places,
                       bias_places, BM, BN, D, D2, DV, DV2,
                       STAGES, Q_STAGES, NC, MASK, BIAS, HAS_LO, HAS_HI)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (lse, lse_tail, row_max, sink, lists, q_segments, key_numbers, bias, o_descs, work, rows, scales, bias_places,
                       dropouts, 0, NC, BM, BN, D, D2, DV, DV2, STAGES, Q_STAGES, MASK, BIAS, HAS_LO, HAS_HI, SOFTCAP, HIDDEN,
                       NATURAL, DROPOUT, dtype, EDGES)),
            (consume, (lse, lse_tail, row_max, sink, lists, q_segments, key_numbers, bias, o_descs, work, rows, scales, bias_places,
                       dropouts, 1, NC, BM, BN, D, D2, DV, DV2, STAGES, Q_STAGES, MASK, BIAS, HAS_LO, HAS_HI, SOFTCAP, HIDDEN,
                       NATURAL, DROPOUT, dtype, EDGES)),
            (consume, (lse, lse_tail, row_max, sink, lists, q_segments, key_numbers, bias, o_descs, work, rows, scales, bias_places,
                       dropouts, 2, NC, BM, BN, D, D2, DV, DV2, STAGES, Q_STAGES, MASK, BIAS, HAS_LO, HAS_HI, SOFTCAP, HIDDEN,
                       NATURAL, DROPOUT, dtype, EDGES)),
            (produce, (q_descs, k_descs, v_descs, pair_descs, lists, start, end, counter, bias, work, broadcast, number_places,
                       bias_places, BM, BN, D, D2, DV, DV2,
                       STAGES, Q_STAGES, NC, MASK, BIAS, HAS_LO, HAS_HI)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip
