"""The warps of the SM 9.0 backward that move tiles by TMA: one loads them, two add to dq and write dk and dv."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.backward.finish import hand_out, ignore
from dmattn_ops.kernels.hopper.backward.order import await_turn, count, turn_of
from dmattn_ops.kernels.hopper.backward.steps import place_of_dk
from dmattn_ops.kernels.hopper.backward.walk import (
    INTERVAL_LISTS,
    NO_LISTS,
    RAGGED,
    TILE,
    block_at,
    head_steps,
    rounds_of,
    span_of,
    step_tile,
)
from dmattn_ops.kernels.hopper.backward.work import announce, place_of, receive, record_of, split_place
from dmattn_ops.kernels.hopper.columns import buffer_at, load_rows, send_parts
from dmattn_ops.kernels.hopper.gluon_compat import mbarrier, reinterpret, tma, tma_load, tma_reduce_add
from dmattn_ops.kernels.hopper.ragged import count_tiles

PIECE_ROWS = gl.constexpr(16)  # a 64 x 64 float32 piece of dq is 16 rows of 256 in the workspace


@gluon.jit
def await_stage(i, read):
    """Wait until both consumers are done with stage `i & 1`; return it."""
    b = i & 1
    free = ((i >> 1) & 1) ^ 1
    mbarrier.wait(read.index(b), free)
    mbarrier.wait(read.index(b + 2), free)
    return b


@gluon.jit
def load_step(i, m, maps, stages, place, head, row, BM: gl.constexpr, BYTES: gl.constexpr,
              D: gl.constexpr, DV: gl.constexpr):  # fmt: skip
    """Fill stage `i & 1` with query tile `m` of one head: query, grad_out, and the rows' lse and delta."""
    q_desc, do_desc, stat_desc = maps
    q_s, do_s, stat_s, q_full, read = stages
    b = await_stage(i, read)
    full = q_full.index(b)
    mbarrier.expect(full, BYTES)
    load_rows(q_desc, place, m * BM, head, full, q_s, b, D)
    tma_load(stat_desc, [0, row + m * BM], full, stat_s.index(b))
    load_rows(do_desc, place, m * BM, head, full, do_s, b, DV)


@gluon.jit
def load_values(turn, place, maps, buffers, BN: gl.constexpr, DV: gl.constexpr, DV2: gl.constexpr):
    """Load V of a block, while the one before may still be at work: its second step waited until this buffer was sent."""
    _, v_desc = maps
    _, v_s, _, _, v_full, _ = buffers
    tile, keys, kv_head = place
    b = turn & 1
    full = v_full.index(b)
    mbarrier.expect(full, BN * (DV + DV2) * 2)
    load_rows(v_desc, keys, tile * BN, kv_head, full, v_s, b * 2, DV)
    load_rows(v_desc, keys, tile * BN + 64, kv_head, full, v_s, b * 2 + 1, DV)


@gluon.jit
def load_keys(turn, place, maps, buffers, BN: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, K_BUFFERS: gl.constexpr):
    """Load K of a block: where it has one buffer, when the block before is done with that. Then wait until that one is sent."""
    k_desc, _ = maps
    k_s, _, k_full, k_empty, _, sent = buffers
    tile, keys, kv_head = place
    b = turn % K_BUFFERS
    mbarrier.wait(k_empty.index(b), ((turn // K_BUFFERS) & 1) ^ 1)
    full = k_full.index(b)
    mbarrier.expect(full, BN * (D + D2) * 2)
    load_rows(k_desc, keys, tile * BN, kv_head, full, k_s, b, D)
    mbarrier.wait(sent, (turn & 1) ^ 1)


@gluon.jit
def produce_block(
    i, turn, place, produced,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, DV: gl.constexpr, DV2: gl.constexpr,
    K_BUFFERS: gl.constexpr,
    LISTS: gl.constexpr, HAS_LO: gl.constexpr, DOWNWARDS: gl.constexpr, INTERLEAVED: gl.constexpr,
):  # fmt: skip
    """Load V and K of a block and a stage for each step, in the order in which consumers take them; return the next step."""
    BYTES: gl.constexpr = BM * (D + D2 + DV + DV2) * 2 + 2 * BM * 4
    kv_maps, kv_buffers, maps, stages, walked = produced
    lists, of_lists, list_step, limits, kv_heads, group, rows = walked
    place, share = split_place(place, limits[4])
    tile, batch, kv_head = place
    record = record_of(place, lists, of_lists)
    block = block_at(tile, batch, record, limits, LISTS, BN)
    place = (block.tile, block.keys, kv_head)
    span = span_of(block, share, limits[4], LISTS, HAS_LO, DOWNWARDS, BM, BN)
    rounds, width = rounds_of(group, INTERLEAVED)
    n_full, n_partial = head_steps(record, span, LISTS, BM)  # before the waits, which hide the loads
    load_values(turn, place, kv_maps, kv_buffers, BN, DV, DV2)
    first_step = i
    g = 0
    while g < rounds:  # no `for`: Gluon of triton 3.6 forgets a carried value that only bounds of inner loops read
        first_head = kv_head * group + g
        for t in range((n_full + n_partial) * width):
            m = step_tile(t // width, n_full, n_partial, record, span, LISTS, BM, DOWNWARDS)
            head = first_head + t % width
            if i == first_step + 1:
                # the first tile of queries is on its way while the block before makes its last dq of K; the second one takes
                # the place where dk of that block lies
                load_keys(turn, place, kv_maps, kv_buffers, BN, D, D2, K_BUFFERS)
            row = (batch * kv_heads * group + head) * rows + block.padded
            load_step(i, m, maps, stages, block.queries, head, row, BM, BYTES, D, DV)
            i += 1
        g += 1
        if g < rounds:
            record += list_step
            n_full, n_partial = head_steps(record, span, LISTS, BM)
    if i < first_step + 2:
        load_keys(turn, place, kv_maps, kv_buffers, BN, D, D2, K_BUFFERS)
    b = await_stage(i, stages[-1])  # of `last_step`
    mbarrier.arrive(stages[-2].index(b), count=1)
    return i + 1


@gluon.jit
def producer(
    produced, tickets, blocks_done, order, work, query_tiles,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, DV: gl.constexpr, DV2: gl.constexpr,
    K_BUFFERS: gl.constexpr,
    LISTS: gl.constexpr, HAS_LO: gl.constexpr, DOWNWARDS: gl.constexpr, INTERLEAVED: gl.constexpr,
):  # fmt: skip
    """Draw the program's blocks, announce them to the other partitions and load what they need; then hand out dq."""
    walked = produced[-1]
    lists, of_lists, _, limits, kv_heads, group, rows = walked
    i = 0
    turn = 0
    n_blocks, n_heads, _, _, _, tiles_at_once = order
    dq_tiles = rows // TILE
    if LISTS == RAGGED:
        n_blocks = count_tiles(lists)
        dq_tiles = count_tiles(query_tiles)
    order = (n_blocks, n_heads, order[2], order[3], order[4], tiles_at_once)
    block = gl.atomic_add(tickets, 1, sem="relaxed")
    while block < n_blocks * n_heads:
        place = place_of(block, order, kv_heads, limits[4], lists, of_lists, LISTS != NO_LISTS)
        without_keys = 0
        if LISTS == INTERVAL_LISTS:
            without_keys = gl.load(record_of(place, lists, of_lists) + 3)
        if without_keys != 0:
            tile, batch, kv_head = place
            gl.atomic_add(blocks_done + batch * kv_heads + kv_head, 2, sem="relaxed")  # as both reducers would
        else:
            announce(turn, place, work)
            i = produce_block(i, turn, place, produced, BM, BN, D, D2, DV, DV2, K_BUFFERS, LISTS, HAS_LO, DOWNWARDS,
                              INTERLEAVED)  # fmt: skip
            turn += 1
        block = gl.atomic_add(tickets, 1, sem="relaxed")  # while the block's last query tile is multiplied
    announce(turn, (-1, -1, -1), work)
    hand_out(turn + 1, tickets + 1, blocks_done, work, n_blocks, n_heads, kv_heads, group, dq_tiles, tiles_at_once)


@gluon.jit
def first_row(m, tile0, C: gl.constexpr, D2: gl.constexpr):
    """Return where in the workspace the piece of consumer `C` of query tile `m` begins, for the head that starts at `tile0`."""
    row = ((tile0 + m) * 2 + C) * PIECE_ROWS
    if D2 > 0:  # a piece of the first part, then one of the second
        row = (tile0 + m) * (PIECE_ROWS + D2 // 4) + C * PIECE_ROWS
    return row


@gluon.jit
def reduce_step(
    i, m, tile0, seen, pieces_desc, dq_c, made, dq_empty, order,
    C: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D2: gl.constexpr, HAS_LO: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Add what consumer `C` made in step `i` to its piece of query tile `m` of the head that starts at `tile0`.

    In a block's first step `m` is -1: what it made belongs nowhere. `seen` is what the step before saw of this piece's counter;
    return what this one sees of the next step's.
    """
    counters, tile, band_lo = order
    counter = counters + (tile0 + m) * 2 + C
    if ORDERED:
        if m >= 0:
            await_turn(counter, turn_of(tile, m, band_lo, BM, BN, HAS_LO), seen)
    mbarrier.wait(made.index(C * 2 + (i & 1)), (i >> 1) & 1)
    if m >= 0:
        tma_reduce_add(pieces_desc, [first_row(m, tile0, C, D2), 0], dq_c)
        tma.store_wait(pendings=0)
    mbarrier.arrive(dq_empty, count=1)
    if ORDERED:
        if m >= 0:
            seen = count(counter, True)
    return seen


@gluon.jit
def reduce_last(
    i, turn, m, tile0, seen, place, pieces_desc, dq_c, made, dq_empty, order, sending,
    C: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, DV: gl.constexpr, DV2: gl.constexpr,
    dtype: gl.constexpr, HAS_LO: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Do `reduce_step` for a block's last step, and write dk and dv of consumer `C`'s 64 keys, which it handed out as well.

    Those of a share have their own batch.
    """
    q_s, ds_s, v_s, sent, dk_desc, dv_desc = sending
    counters, tile, band_lo = order
    _, keys, kv_head = place
    key = tile * BN + C * 64
    counter = counters + (tile0 + m) * 2 + C
    mbarrier.wait(made.index(C * 2 + (i & 1)), (i >> 1) & 1)
    send_parts(buffer_at(v_s, (turn & 1) * 2 + C), dv_desc, keys, key, kv_head, DV, DV2, dtype)
    send_parts(place_of_dk(i, q_s, ds_s, C, D2), dk_desc, keys, key, kv_head, D, D2, dtype)
    if ORDERED:  # the next block does not wait for this one's turn
        tma.store_wait(pendings=0)
        mbarrier.arrive(sent, count=1)
        if m >= 0:
            await_turn(counter, turn_of(tile, m, band_lo, BM, BN, HAS_LO), seen)
    if m >= 0:
        tma_reduce_add(pieces_desc, [first_row(m, tile0, C, D2), 0], dq_c)
    tma.store_wait(pendings=0)
    if not ORDERED:
        mbarrier.arrive(sent, count=1)
    mbarrier.arrive(dq_empty, count=1)
    if ORDERED:
        if m >= 0:
            count(counter, False)


@gluon.jit
def reduce_block(
    i, turn, place, reduced,
    C: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, DV: gl.constexpr, DV2: gl.constexpr,
    dtype: gl.constexpr, LISTS: gl.constexpr,
    HAS_LO: gl.constexpr, ORDERED: gl.constexpr, DOWNWARDS: gl.constexpr, INTERLEAVED: gl.constexpr,
):  # fmt: skip
    """Add consumer `C`'s 64 x 64 pieces of dq of a block to the workspace, in the order of its steps, and write its dk and dv."""
    pieces_desc, dq_s, made, dq_empties, counters, walked, sending = reduced
    lists, of_lists, list_step, limits, kv_heads, group, rows = walked
    own, share = split_place(place, limits[4])
    tile, batch, kv_head = own
    record = record_of(own, lists, of_lists)
    block = block_at(tile, batch, record, limits, LISTS, BN)
    if LISTS == RAGGED:
        place = (tile, block.keys, kv_head)
    order = (counters, block.tile, limits[2])
    span = span_of(block, share, limits[4], LISTS, HAS_LO, DOWNWARDS, BM, BN)
    dq_c = dq_s.index(C)
    if D2 > 0 and C == 1:
        dq_c = reinterpret(dq_c, gl.float32, [D2 // 4, 256], pieces_desc.layout)
    dq_empty = dq_empties.index(C)
    rounds, width = rounds_of(group, INTERLEAVED)
    m = -1  # of the step before, whose dq a step hands out
    tile0 = 0
    seen = -1
    for g in range(rounds):
        head = (batch * kv_heads + kv_head) * group + g
        n_full, n_partial = head_steps(record, span, LISTS, BM)
        for t in range((n_full + n_partial) * width):
            seen = reduce_step(
                i, m, tile0, seen, pieces_desc, dq_c, made, dq_empty, order, C, BM, BN, D2, HAS_LO, ORDERED
            )  # fmt: skip
            seen = gl.where(t == 0, -1, seen)  # a head's first step saw a counter of the head before
            m = step_tile(t // width, n_full, n_partial, record, span, LISTS, BM, DOWNWARDS)
            tile0 = (head + t % width) * (rows // BM) + block.padded // BM
            i += 1
        record += list_step
    reduce_last(
        i, turn, m, tile0, seen, place, pieces_desc, dq_c, made, dq_empty, order, sending, C, BM, BN, D, D2, DV, DV2, dtype,
        HAS_LO, ORDERED)  # fmt: skip
    return i + 1


@gluon.jit
def reducer(
    reduced, blocks_done, work,
    C: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, DV: gl.constexpr, DV2: gl.constexpr,
    dtype: gl.constexpr, LISTS: gl.constexpr,
    HAS_LO: gl.constexpr, ORDERED: gl.constexpr, DOWNWARDS: gl.constexpr, INTERLEAVED: gl.constexpr,
):  # fmt: skip
    """Add consumer `C`'s pieces of dq of the program's blocks, write its dk and dv, and count the blocks."""
    _, _, _, _, _, walked, _ = reduced
    _, _, _, limits, kv_heads, _, _ = walked
    i = 0
    turn = 0
    tile, batch, kv_head = receive(turn, work)
    while tile >= 0:
        i = reduce_block(i, turn, (tile, batch, kv_head), reduced, C, BM, BN, D, D2, DV, DV2, dtype, LISTS, HAS_LO, ORDERED,
                         DOWNWARDS, INTERLEAVED)  # fmt: skip
        place, _ = split_place((tile, batch, kv_head), limits[4])
        count(blocks_done + place[1] * kv_heads + place[2], False)
        turn += 1
        tile, batch, kv_head = receive(turn, work)
    ignore(turn + 1, work)
