"""SM 9.0 forward in Gluon: persistent blocks, each consumer warp group owns 64 queries and walks their keys.

Partitions: two or three consumers (4 warps each) and one warp that takes work and loads it by TMA. A block draws its
next piece of work (a tile of queries of one head) from a counter when the last steps of this one are computed, so that
loading, storing and the ends of a walk overlap across pieces.

One step of a walk (`advance`) starts with P of a tile in registers and ends with P of the next:

    two consumers    S(i+1) = q k(i+1);   acc += P(i) v(i)  ||  P(i+1) = softmax(S(i+1))
    three consumers  S(i+1) = q k(i+1);   acc += P(i) v(i);   P(i+1) = softmax(S(i+1)), in halves: for 160 registers
    two, two blocks  S(i+1) = q k(i+1);   acc += P(i) v(i);   P(i+1) = softmax(S(i+1)): for 104 registers

Narrow heads have two blocks on a multiprocessor. One block then multiplies while the other one computes a softmax, begins or ends a
piece of work.

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
from dmattn_ops.kernels.hopper.constants import ROWS, TILE, accumulator
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
    hide,
    hide_keys,
    load_full_bias,
    soften,
    stored_bias,
    stored_mask,
    tested_keys,
)
from dmattn_ops.kernels.hopper.forward.types import (
    Band,
    Barriers,
    Bias,
    KeyNumbers,
    Lists,
    Maps,
    Mask,
    Operands,
    Place,
    Scales,
    Shared,
    Sizes,
    Statistics,
    Sums,
    Visible,
    Walk,
)
from dmattn_ops.kernels.hopper.forward.walk import band_tiles, bias_of_head, numbers_of_head, produce, words_of_piece
from dmattn_ops.kernels.hopper.gluon_compat import (
    fence_async_shared,
    follow_kernel_before,
    let_kernel_behind_begin,
    mbarrier,
    reinterpret,
    tma,
    tma_store,
    warpgroup_mma_wait,
)
from dmattn_ops.kernels.hopper.kinds import BITS, INTERVALS, RAGGED, SEGMENTS, has_lists
from dmattn_ops.kernels.hopper.lists import last_tile
from dmattn_ops.kernels.hopper.ragged import Rows, head_corner_of
from dmattn_ops.kernels.hopper.scores import FULL_BIAS, KEY_BIAS, TILED_BIAS
from dmattn_ops.kernels.hopper.unseen import clear_unseen, ends_inside, note_nan_in_parts, seen_columns


@gluon.jit
def store_part(acc, inverse, q, buffers, map, place, FIRST: gl.constexpr, WIDTH: gl.constexpr, WIDTH_Q: gl.constexpr):
    """Write columns `FIRST ...` of out, through a buffer of queries, viewed as the matrix `q`, that is at least as wide."""
    buffer = buffers.index(place.buffer)
    dtype: gl.constexpr = map.dtype
    acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, accumulator(WIDTH)))[:, None]
    if WIDTH != WIDTH_Q:
        buffer = reinterpret(buffer, dtype, map.block_type.shape, map.layout)
        q = buffer.reshape([ROWS, WIDTH])
    q.store(acc.to(dtype))
    fence_async_shared()
    tma_store(map, head_corner_of(map, place.rows, place.first, place.h, FIRST), buffer)


@gluon.jit
def pass_over(count, step, bars, T: gl.constexpr):
    """Give back the buffers of the next `count` tiles unread; return the step behind them."""
    for _ in range(count):
        b = step % T.STAGES
        mbarrier.wait(bars.k_full.index(b), (step // T.STAGES) & 1)
        mbarrier.wait(bars.v_full.index(b), (step // T.STAGES) & 1)
        mbarrier.arrive(bars.k_empty.index(b), count=1)
        step += 1
    return step


@gluon.jit
def release_queries(turn, q_empty, Q_STAGES: gl.constexpr):
    """Give back the buffer of a turn's queries, once the output that was staged there has been read."""
    if turn >= 0:
        tma.store_wait(pendings=0)
        mbarrier.arrive(q_empty.index(turn % Q_STAGES), count=1)


@gluon.jit
def word_of_piece(parts, slots, i):
    """Return the `i`-th of the words that say what a piece of work is; `slots` are their numbers."""
    return gl.sum(gl.where(slots == i, parts, 0), 0)


@gluon.jit
def own_part(tiles, own):
    """Return (the first tile of a band that 64 queries of a block see, the number behind the last one that they test).

    The block's first tiles may lie wholly behind the band of these queries, which has its own full tiles.
    """
    masked = tiles.end - tiles.full_end + tiles.full_begin - tiles.begin
    own_masked = gl.minimum(tiles.end - gl.maximum(own.full_end, tiles.full_end), masked)
    masked = gl.where(tiles.full_begin == tiles.begin, own_masked, masked)
    first = gl.minimum(gl.maximum(tiles.end - own.end, 0), tiles.end - tiles.full_end)
    return first, masked


@gluon.jit
def query_numbers(mask, batch, q_first, row, seqlen_q, C: gl.constexpr, T: gl.constexpr):
    """Return the segments of queries, or under intervals their numbers inside the block; for other masks anything."""
    if T.MASK == SEGMENTS and not T.WHOLE_KEYS:
        own = mask.q_segments + batch.to(gl.int64) * mask.q_segments_batch + q_first
        return gl.load(own + row, mask=q_first + row < seqlen_q, other=-3)
    else:
        return C * ROWS + row


@gluon.jit
def finish(operands, smem, sums, q, place, row, T: gl.constexpr):
    """Write out and the statistics of 64 queries, whose buffer stages the output; `row` are their numbers."""
    ROW: gl.constexpr = gl.SliceLayout(1, accumulator(T.BN))
    maps = operands.maps
    results = operands.statistics
    scale = operands.scales.scale
    if T.WATCH:
        counts = operands.counter
        if operands.counts_b is not None:
            counts += place.batch.to(gl.int64) * operands.counts_b
        note_nan_in_parts(counts, sums.acc)
    row_total = row_of(sums.total, ROW, True)
    inverse = gl.where(row_total == 0.0, 0.0, 1.0 / gl.abs(row_total))
    if T.DROPOUT:
        inverse = inverse * operands.dropout.rescale
    if operands.sink is not None:
        row_lse, row_tail = statistics(row_of(sums.top, ROW, False), row_total, scale, T.NATURAL)
        inverse = inverse * share_of_keys(row_lse, gl.load(operands.sink + place.h).to(gl.float32))
    # TMA leaves out the rows and columns past the ends
    store_part(sums.acc[0], inverse, q[0], smem.q[0], maps.out[0], place, 0, T.DV, T.D)
    if T.DV2 > 0:
        store_part(sums.acc[1], inverse, q[1], smem.q[1], maps.out[1], place, T.DV, T.DV2, T.D2)
    row_lse, row_tail = statistics(row_of(sums.top, ROW, False), row_total, scale, T.NATURAL)
    at = place.batch.to(gl.int64) * results.batch + place.h.to(gl.int64) * results.head + place.first + row
    if T.MASK == RAGGED:
        at += place.rows.begin
    inside = place.first + row < place.seqlen_q
    gl.store(results.lse + at, row_lse, mask=inside)
    gl.store(results.lse_tail + at, row_tail, mask=inside)
    if T.ROW_MAX:
        own_max = largest_of_rows(row_of(sums.peak, ROW, False), row_total, scale, T.NATURAL)
        gl.store(results.row_max + at, own_max, mask=inside)


@gluon.jit
def consume(operands, smem, bars, C: gl.constexpr, T: gl.constexpr):
    """Compute 64 queries of each piece of work: those from `C * 64` of its tile."""
    BN: gl.constexpr = T.BN
    NC: gl.constexpr = T.BM // ROWS
    ROW: gl.constexpr = gl.SliceLayout(1, accumulator(T.BN))
    STATE_COLUMNS: gl.constexpr = T.BN if NC == 2 else T.BN // 2
    WORDS: gl.constexpr = words_of_piece(T)
    PIECE: gl.constexpr = gl.BlockedLayout([WORDS], [32], [4], [0])
    PER_TILE: gl.constexpr = TILE // T.BN
    dtype: gl.constexpr = smem.v[0].dtype
    sizes = operands.sizes
    mask = operands.mask
    scales = operands.scales
    seqlen_q = sizes.seqlen_q
    seqlen_k = sizes.seqlen_k
    lo = operands.band.lo
    hi = operands.band.hi
    slots = gl.arange(0, WORDS, layout=PIECE)
    row = gl.arange(0, ROWS, layout=ROW)
    empty = gl.zeros([ROWS, BN], gl.float32, layout=accumulator(T.BN))
    turn = 0
    step = 0
    mbarrier.wait(bars.q_full.index(0), 0)
    parts = smem.pieces.index(0).load(PIECE)
    head = word_of_piece(parts, slots, 0)
    while head >= 0:
        slot = turn % T.Q_STAGES
        tile = word_of_piece(parts, slots, 1)
        n_partial = word_of_piece(parts, slots, 2) * PER_TILE
        first_tile = word_of_piece(parts, slots, 4) if T.MASK == SEGMENTS else 0
        batch = head // sizes.H
        h = head - batch * sizes.H
        block_first = tile * T.BM
        query_rows = batch
        if T.MASK == RAGGED:
            block_first = tile
            seqlen_q = word_of_piece(parts, slots, 3)
            seqlen_k = word_of_piece(parts, slots, 5)
            diagonal = word_of_piece(parts, slots, 6)
            lo = operands.band.lo + diagonal
            hi = operands.band.hi + diagonal
            query_rows = Rows(word_of_piece(parts, slots, 2), seqlen_q)
        q_first = block_first + C * ROWS
        q = rows_of(smem.q, slot * NC + C, ROWS, T.D, T.D2)
        tiles = band_tiles(block_first, seqlen_q, seqlen_k, lo, hi, T.BM, T)
        first = 0
        record = head.to(gl.int64)
        if has_lists(T.MASK):
            n = n_partial + word_of_piece(parts, slots, 3) * PER_TILE
            masked = n_partial
            lists = mask.lists
            list_first = batch.to(gl.int64) * lists.batch + (h // lists.group).to(gl.int64) * lists.head
            record = list_first + tile.to(gl.int64) * lists.width
        else:
            own_tiles = band_tiles(q_first, seqlen_q, seqlen_k, lo, hi, ROWS, T)
            n = tiles.end - tiles.begin
            first, masked = own_part(tiles, own_tiles)
            first = gl.where(q_first >= seqlen_q, n, first)
            step = pass_over(first, step, bars, T)
        q_segment = query_numbers(mask, batch, q_first, row, seqlen_q, C, T)
        numbers = numbers_of_head(mask.keys, batch, h)
        q_hi = gl.zeros([ROWS], gl.int32, layout=ROW) + (seqlen_k - 1)
        if T.HAS_HI:
            q_hi = gl.minimum(q_first + row + hi, seqlen_k - 1)
        q_lo = q_first + row + lo
        segments = mask.keys.segments
        hidden_from = mask.keys.hidden_from
        hidden_to = mask.keys.hidden_to
        if T.MASK == SEGMENTS:
            segments += numbers
        if T.HIDDEN:
            hidden_from += numbers
            hidden_to += numbers
        bias_rows = operands.bias.start
        if T.BIAS == FULL_BIAS:  # rows past the end read the last one and are never written
            own_bias = bias_of_head(operands.bias, batch, h)
            bias_rows = own_bias + gl.minimum(q_first + row, seqlen_q - 1).to(gl.int64) * operands.bias.query
        dropout = operands.dropout
        if T.DROPOUT:
            dropout = dropout_of_head(dropout_of_batch(dropout, batch), h)
        some_unseen = False
        seen = False
        if T.EDGES:
            no_limit: gl.constexpr = 1 << 30
            seen = seen_columns(seqlen_q, seqlen_k, lo if T.HAS_LO else 0, hi if T.HAS_HI else no_limit)
            some_unseen = ends_inside(seen, tiles.begin * T.BN, (tiles.end - tiles.begin) * T.BN, seqlen_k)
        place = Place(batch, h, query_rows, q_first, seqlen_q, slot * NC + C)
        visible = Visible(
            walk=Walk(tiles, mask.lists.start, record, n, last_tile(seqlen_k) if has_lists(T.MASK) else 0),
            n_partial=n_partial,
            q_first=q_first,
            q_lo=q_lo,
            q_hi=q_hi,
            q_segment=q_segment,
            block_first=block_first,
            segments=segments,
            hidden_from=hidden_from,
            hidden_to=hidden_to,
            seqlen_k=seqlen_k,
            bias=bias_rows,
            dropout=dropout,
            some_unseen=some_unseen,
            seen=seen,
        )
        no_state = gl.zeros([ROWS, STATE_COLUMNS], gl.float32, layout=accumulator(STATE_COLUMNS))
        none = state_of(no_state, STATE_COLUMNS)
        sums = Sums(no_sums(T.DV, T.DV2), none, none, none)
        if first < n:
            b = step % T.STAGES
            if T.MASK == SEGMENTS:  # on their way while the keys come and are multiplied
                keys = tested_keys(first_tile, visible, T)
            mbarrier.wait(bars.k_full.index(b), (step // T.STAGES) & 1)
            k_first = transposed(rows_of(smem.k, b, T.BN, T.D, T.D2))
            stored = stored_mask(first, step, smem, n_partial, C, True, T)
            bias = stored_bias(step, smem.biases, C, T)
            s = multiply(q, k_first, empty, False)
            if T.Q_STAGES > 1:
                release_queries(turn - 1, bars.q_empty, T.Q_STAGES)
            s = soften(warpgroup_mma_wait(0, deps=(s,)), scales, T)
            added = load_full_bias(first, visible, True, T)
            s = add_bias(s, added, bias, scales.scale, T)
            if T.MASK == SEGMENTS:
                s = hide_keys(s, keys, stored, visible, T)
            else:
                s = hide(s, first, 0, stored, visible, T)
            mbarrier.arrive(bars.k_empty.index(b), count=1)
            peak = largest(s, none, T.BN) if T.ROW_MAX else none
            p, top, total = softmax_first(s, none, scales.scale, dtype, T.NATURAL, T.BN)
            if T.DROPOUT:
                p = drop(p, dropout, q_first, first_key(first, visible, T), T.BN)
            p = as_operand(p, T.DV)
            sums = Sums(sums.acc, total, top, peak)
            tested = gl.minimum(gl.maximum(masked, first + 1), n) - 1
            for i in range(first, tested):
                sums, p = advance(i, step, sums, p, q, visible, smem, bars, scales, C, True, T)
                step += 1
            if T.EDGES:
                if some_unseen & (tested < masked):  # values of the last tile that is tested
                    mbarrier.wait(bars.v_full.index(step % T.STAGES), (step // T.STAGES) & 1)
                    last = first_key(tested, visible, T)
                    clear_unseen(rows_of(smem.v, step % T.STAGES, T.BN, T.DV, T.DV2), last, seen, T.BN)
            for i in range(tested, n - 1):
                sums, p = advance(i, step, sums, p, q, visible, smem, bars, scales, C, False, T)
                step += 1
            b = step % T.STAGES
            mbarrier.wait(bars.v_full.index(b), (step // T.STAGES) & 1)
            acc = add_products(p, rows_of(smem.v, b, T.BN, T.DV, T.DV2), sums.acc, T.DV2)
            sums = Sums(await_products(acc, T.DV2), sums.total, sums.top, sums.peak)
            step += 1
        elif T.Q_STAGES > 1:
            release_queries(turn - 1, bars.q_empty, T.Q_STAGES)
        finish(operands, smem, sums, q, place, row, T)
        if T.Q_STAGES == 1:  # else when the next piece is under way
            release_queries(turn, bars.q_empty, T.Q_STAGES)
        turn += 1
        slot = turn % T.Q_STAGES
        mbarrier.wait(bars.q_full.index(slot), (turn // T.Q_STAGES) & 1)
        parts = smem.pieces.index(slot).load(PIECE)
        head = word_of_piece(parts, slots, 0)
    tma.store_wait(pendings=0)


@gluon.jit
def buffers(maps, n, SECOND: gl.constexpr):
    """Return shared memory for `n` tiles of each part."""
    first = gl.allocate_shared_memory(maps[0].dtype, staged(n, maps[0]), maps[0].layout)
    if SECOND > 0:
        return (first, gl.allocate_shared_memory(maps[1].dtype, staged(n, maps[1]), maps[1].layout))
    else:
        return (first,)


@gluon.jit
def allocate(maps, bias, T: gl.constexpr):
    """Return all buffers of a block."""
    NC: gl.constexpr = T.BM // ROWS
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = buffers(maps.q, T.Q_STAGES * NC, T.D2)
    keys = buffers(maps.k, T.STAGES, T.D2)
    values = buffers(maps.v, T.STAGES, T.DV2)
    words = 0
    if T.MASK == BITS:
        words = gl.allocate_shared_memory(gl.int32, staged(T.STAGES * NC, maps.bits), maps.bits.layout)
    biases = 0
    if T.BIAS == KEY_BIAS:
        biases = gl.allocate_shared_memory(bias.start.dtype.element_ty, [T.STAGES, T.BN], PLAIN)
    if T.BIAS == TILED_BIAS:
        biases = gl.allocate_shared_memory(maps.bias.dtype, staged(T.STAGES * NC, maps.bias), maps.bias.layout)
    ranges = 0
    if T.MASK == INTERVALS:
        ranges = gl.allocate_shared_memory(gl.int16, [T.STAGES, T.BN], PLAIN)
    pieces = gl.allocate_shared_memory(gl.int32, [T.Q_STAGES, words_of_piece(T)], PLAIN)
    return Shared(queries, keys, values, words, biases, ranges, pieces)


@gluon.jit
def begin_barriers(T: gl.constexpr):
    """Return the barriers of a block, ready for their first turn."""
    NC: gl.constexpr = T.BM // ROWS
    STAGES: gl.constexpr = T.STAGES
    Q_STAGES: gl.constexpr = T.Q_STAGES
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [T.Q_STAGES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [T.Q_STAGES, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [T.STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [T.STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [T.STAGES, 1], BARRIER)
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=NC)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=2 if T.BIAS == KEY_BIAS or T.MASK == INTERVALS else 1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=NC)
    fence_async_shared()
    return Barriers(q_full, q_empty, k_full, k_empty, v_full)


SCALARS = (
    "seqlen_q", "seqlen_k", "H", "kv_group", "heads", "tiles", "group", "items", "band_lo", "band_hi", "lse_b", "lse_h",
    "lists_b", "lists_h", "width", "mask_group", "bits_b", "bits_h",
    "segments_b", "segments_kb", "segments_kh", "segment_group", "bias_group",
    "seed_b", "seed_h", "last_dropped", "q_origin", "k_origin",
)  # fmt: skip


@gluon.jit(do_not_specialize=SCALARS)
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, q2_desc, k2_desc, v2_desc, o2_desc, bits_desc, bias_desc, lse, lse_tail, row_max, sink, lists,
    q_segments, k_segments, start, end, hidden_from, hidden_to, bias, seed, counter, counts_b, scale, cap_inner,
    seqlen_q, seqlen_k, H, kv_group, heads, tiles, group, items, band_lo, band_hi, lse_b, lse_h,
    lists_b, lists_h, width, mask_group, bits_b, bits_h, segments_b, segments_kb, segments_kh, segment_group,
    bias_b, bias_h, bias_q, bias_group, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin, T: gl.constexpr,
):  # fmt: skip
    """Write out, lse and lse_tail for `items` pieces of work: `tiles` of `BM` queries of each of `heads` (batch * H).

    `row_max`, where it is given, is written too, and `sink` `[H]`, where it is given, takes its share of every softmax.

    `scale` turns products into scores in log2 units, or NATURAL ones. With SOFTCAP it is the cap, and what it multiplies is
    the tanh of products times `cap_inner`.

    `k_segments`, or `start`, `end` and (where HIDDEN) `hidden_from` and `hidden_to`, share the strides `segments_kb` and
    `segments_kh`. Of ragged calls `lists` are the records of tiles of `BM` queries, and positions count inside a sequence.
    `T` are `types.Traits`.
    """
    operands = Operands(
        maps=Maps(
            q=pair(q_desc, q2_desc, T.D2),
            k=pair(k_desc, k2_desc, T.D2),
            v=pair(v_desc, v2_desc, T.DV2),
            out=pair(o_desc, o2_desc, T.DV2),
            bits=bits_desc,
            bias=bias_desc,
        ),
        statistics=Statistics(lse, lse_tail, row_max, lse_b, lse_h),
        sink=sink,
        sizes=Sizes(seqlen_q, seqlen_k, H, kv_group, heads, tiles, group, items),
        band=Band(band_lo, band_hi),
        mask=Mask(
            lists=Lists(lists, lists_b, lists_h, width, mask_group),
            q_segments=q_segments,
            q_segments_batch=segments_b,
            keys=KeyNumbers(k_segments, start, end, hidden_from, hidden_to, segments_kb, segments_kh, segment_group),
            bits_batch=bits_b,
            bits_head=bits_h,
        ),
        bias=Bias(bias, bias_b, bias_h, bias_q, bias_group),
        dropout=Dropout(seed, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin),
        scales=Scales(scale, cap_inner),
        counter=counter,
        counts_b=counts_b,
    )
    smem = allocate(operands.maps, operands.bias, T)
    bars = begin_barriers(T)
    if T.MASK == INTERVALS:  # whose lists other kernels of the call have written
        follow_kernel_before()
    elif T.WATCH:  # the kernel behind, which asks what this one has noted
        let_kernel_behind_begin()
    if T.BM == 128:
        gl.warp_specialize([
            (consume, (operands, smem, bars, 0, T)),
            (consume, (operands, smem, bars, 1, T)),
            (produce, (operands, smem, bars, T)),
        ], [4, 1], [240 if T.PER_SM == 1 else 104, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (operands, smem, bars, 0, T)),
            (consume, (operands, smem, bars, 1, T)),
            (consume, (operands, smem, bars, 2, T)),
            (produce, (operands, smem, bars, T)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip
