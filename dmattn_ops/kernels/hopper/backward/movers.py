"""The warps of the SM 9.0 backward that move tiles by TMA: one loads them, two add to dq and write dk and dv."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.backward.finish import hand_out, ignore
from dmattn_ops.kernels.hopper.backward.order import await_turn, count, turn_of
from dmattn_ops.kernels.hopper.backward.steps import place_of_dk
from dmattn_ops.kernels.hopper.backward.types import Order, Pieces, Place, key_buffers
from dmattn_ops.kernels.hopper.backward.walk import block_at, head_steps, rounds_of, span_of, step_tile
from dmattn_ops.kernels.hopper.backward.work import announce, place_of, receive, record_of, split_place
from dmattn_ops.kernels.hopper.columns import buffer_at, load_rows, send_parts
from dmattn_ops.kernels.hopper.constants import TILE
from dmattn_ops.kernels.hopper.gluon_compat import mbarrier, reinterpret, tma, tma_load, tma_reduce_add
from dmattn_ops.kernels.hopper.kinds import INTERVALS, RAGGED
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
def load_step(i, m, loads, block, head, row, T: gl.constexpr):
    """Fill stage `i & 1` with query tile `m` of one head: query, grad_out, and the rows' lse and delta."""
    b = await_stage(i, loads.read)
    full = loads.q_full.index(b)
    mbarrier.expect(full, T.BM * (T.D + T.D2 + T.DV + T.DV2) * 2 + 2 * T.BM * 4)
    load_rows(loads.q_map, block.queries, m * T.BM, head, full, loads.q, b, T.D)
    tma_load(loads.stat_map, [0, row + m * T.BM], full, loads.stats.index(b))
    load_rows(loads.do_map, block.queries, m * T.BM, head, full, loads.do, b, T.DV)


@gluon.jit
def load_values(turn, block, kv_head, loads, T: gl.constexpr):
    """Load V of a block, while the one before may still be at work: its second step waited until this buffer was sent."""
    b = turn & 1
    full = loads.v_full.index(b)
    mbarrier.expect(full, T.BN * (T.DV + T.DV2) * 2)
    load_rows(loads.v_map, block.keys, block.tile * T.BN, kv_head, full, loads.v, b * 2, T.DV)
    load_rows(loads.v_map, block.keys, block.tile * T.BN + 64, kv_head, full, loads.v, b * 2 + 1, T.DV)


@gluon.jit
def load_keys(turn, block, kv_head, loads, T: gl.constexpr):
    """Load K of a block: where it has one buffer, when the block before is done with that. Then wait until that one is sent."""
    K_BUFFERS: gl.constexpr = key_buffers(T)
    b = turn % K_BUFFERS
    mbarrier.wait(loads.k_empty.index(b), ((turn // K_BUFFERS) & 1) ^ 1)
    full = loads.k_full.index(b)
    mbarrier.expect(full, T.BN * (T.D + T.D2) * 2)
    load_rows(loads.k_map, block.keys, block.tile * T.BN, kv_head, full, loads.k, b, T.D)
    mbarrier.wait(loads.sent, (turn & 1) ^ 1)


@gluon.jit
def produce_block(i, turn, place, loads, problem, T: gl.constexpr):
    """Load V and K of a block and a stage for each step, in the order in which consumers take them; return the next step."""
    group = problem.group
    place, share = split_place(place, problem.shares)
    kv_head = place.head
    record = record_of(place, problem.mask)
    block = block_at(place, record, problem, T)
    span = span_of(block, share, problem.shares, problem.mask.list_width, T)
    rounds, width = rounds_of(group, T.INTERLEAVED)
    n_full, n_partial = head_steps(record, span, T)  # before the waits, which hide the loads
    load_values(turn, block, kv_head, loads, T)
    first_step = i
    g = 0
    while g < rounds:  # no `for`: Gluon of triton 3.6 forgets a carried value that only bounds of inner loops read
        first_head = kv_head * group + g
        for t in range((n_full + n_partial) * width):
            m = step_tile(t // width, n_full, n_partial, record, span, T)
            head = first_head + t % width
            if i == first_step + 1:
                # the first tile of queries is on its way while the block before makes its last dq of K; the second one takes
                # the place where dk of that block lies
                load_keys(turn, block, kv_head, loads, T)
            row = (place.batch * problem.kv_heads * group + head) * problem.rows + block.padded
            load_step(i, m, loads, block, head, row, T)
            i += 1
        g += 1
        if g < rounds:
            record += problem.mask.list_step
            n_full, n_partial = head_steps(record, span, T)
    if i < first_step + 2:
        load_keys(turn, block, kv_head, loads, T)
    b = await_stage(i, loads.read)  # of `last_step`
    mbarrier.arrive(loads.q_full.index(b), count=1)
    return i + 1


@gluon.jit
def producer(loads, problem, tickets, blocks_done, order, work, query_tiles, T: gl.constexpr):
    """Draw the program's blocks, announce them to the other partitions and load what they need; then hand out dq."""
    i = 0
    turn = 0
    n_blocks = order.n_blocks
    dq_tiles = problem.rows // TILE
    if T.MASK == RAGGED:
        n_blocks = count_tiles(problem.mask.lists)
        dq_tiles = count_tiles(query_tiles)
    order = Order(
        n_blocks, order.n_heads, order.heads_per_group, order.first_ranks, order.ranks_in_row, order.tiles_at_once
    )
    block = gl.atomic_add(tickets, 1, sem="relaxed")
    while block < n_blocks * order.n_heads:
        place = place_of(block, order, problem, T)
        without_keys = 0
        if T.MASK == INTERVALS:
            without_keys = gl.load(record_of(place, problem.mask) + 3)
        if without_keys != 0:  # as both reducers would
            gl.atomic_add(blocks_done + place.batch * problem.kv_heads + place.head, 2, sem="relaxed")
        else:
            announce(turn, place, work)
            i = produce_block(i, turn, place, loads, problem, T)
            turn += 1
        block = gl.atomic_add(tickets, 1, sem="relaxed")  # while the block's last query tile is multiplied
    announce(turn, Place(-1, -1, -1), work)
    hand_out(turn + 1, tickets + 1, blocks_done, work, order, problem, dq_tiles)


@gluon.jit
def first_row(m, tile0, C: gl.constexpr, D2: gl.constexpr):
    """Return where in the workspace the piece of consumer `C` of query tile `m` begins, for the head that starts at `tile0`."""
    row = ((tile0 + m) * 2 + C) * PIECE_ROWS
    if D2 > 0:  # a piece of the first part, then one of the second
        row = (tile0 + m) * (PIECE_ROWS + D2 // 4) + C * PIECE_ROWS
    return row


@gluon.jit
def counter_of(m, tile0, pieces, C: gl.constexpr):
    """Return the counter of consumer `C`'s piece of query tile `m` of the head that starts at `tile0`."""
    return pieces.counters + (tile0 + m) * 2 + C


@gluon.jit
def reduce_step(i, m, tile0, seen, following, pieces, C: gl.constexpr, T: gl.constexpr):
    """Add what consumer `C` made in step `i` to its piece of query tile `m` of the head that starts at `tile0`.

    In a block's first step `m` is -1: what it made belongs nowhere. `seen` is what the step before saw of this piece's counter;
    return what this one sees of `following`, the next step's.
    """
    counter = counter_of(m, tile0, pieces, C)
    if T.ORDERED:
        if m >= 0:
            await_turn(counter, turn_of(pieces.tile, m, pieces.band_lo, T), seen)
    mbarrier.wait(pieces.made.index(C * 2 + (i & 1)), (i >> 1) & 1)
    if m >= 0:
        tma_reduce_add(pieces.map, [first_row(m, tile0, C, T.D2), 0], pieces.dq)
        tma.store_wait(pendings=0)
    mbarrier.arrive(pieces.dq_empty, count=1)
    if T.ORDERED:
        if m >= 0:
            seen = count(counter, following)
    return seen


@gluon.jit
def reduce_last(i, turn, m, tile0, seen, place, pieces, stores, C: gl.constexpr, T: gl.constexpr):
    """Add a block's last piece of dq as `reduce_step` does, and write dk and dv of consumer `C`'s 64 keys, handed out with it.

    Those of a share have their own batch.
    """
    dtype: gl.constexpr = stores.ds.dtype
    key = pieces.tile * T.BN + C * 64
    counter = counter_of(m, tile0, pieces, C)
    mbarrier.wait(pieces.made.index(C * 2 + (i & 1)), (i >> 1) & 1)
    dv_s = buffer_at(stores.v, (turn & 1) * 2 + C)
    send_parts(dv_s, stores.dv_map, place.batch, key, place.head, T.DV, T.DV2, dtype)
    dk_s = place_of_dk(i, stores.q, stores.ds, C, T)
    send_parts(dk_s, stores.dk_map, place.batch, key, place.head, T.D, T.D2, dtype)
    if T.ORDERED:  # the next block does not wait for this one's turn
        tma.store_wait(pendings=0)
        mbarrier.arrive(stores.sent, count=1)
        if m >= 0:
            await_turn(counter, turn_of(pieces.tile, m, pieces.band_lo, T), seen)
    if m >= 0:
        tma_reduce_add(pieces.map, [first_row(m, tile0, C, T.D2), 0], pieces.dq)
    tma.store_wait(pendings=0)
    if not T.ORDERED:
        mbarrier.arrive(stores.sent, count=1)
    mbarrier.arrive(pieces.dq_empty, count=1)
    if T.ORDERED:
        if m >= 0:
            count(counter)


@gluon.jit
def reduce_block(i, turn, place, stores, problem, C: gl.constexpr, T: gl.constexpr):
    """Add consumer `C`'s 64 x 64 pieces of dq of a block to the workspace, in the order of its steps, and write its dk and dv."""
    group = problem.group
    own, share = split_place(place, problem.shares)
    record = record_of(own, problem.mask)
    block = block_at(own, record, problem, T)
    if T.MASK == RAGGED:
        place = Place(own.tile, block.keys, own.head)
    span = span_of(block, share, problem.shares, problem.mask.list_width, T)
    dq_c = stores.dq.index(C)
    if T.D2 > 0 and C == 1:
        dq_c = reinterpret(dq_c, gl.float32, [T.D2 // 4, 256], stores.pieces_map.layout)
    dq_empty = stores.dq_empty.index(C)
    pieces = Pieces(stores.pieces_map, dq_c, stores.made, dq_empty, stores.counters, block.tile, problem.band_lo)
    rounds, width = rounds_of(group, T.INTERLEAVED)
    m = -1  # of the step before, whose dq a step hands out
    tile0 = 0
    seen = -1
    for g in range(rounds):
        head = (own.batch * problem.kv_heads + own.head) * group + g
        n_full, n_partial = head_steps(record, span, T)
        for t in range((n_full + n_partial) * width):
            next_m = step_tile(t // width, n_full, n_partial, record, span, T)
            next_tile0 = (head + t % width) * (problem.rows // T.BM) + block.padded // T.BM
            seen = reduce_step(i, m, tile0, seen, counter_of(next_m, next_tile0, pieces, C), pieces, C, T)
            m = next_m
            tile0 = next_tile0
            i += 1
        record += problem.mask.list_step
    reduce_last(i, turn, m, tile0, seen, place, pieces, stores, C, T)
    return i + 1


@gluon.jit
def reducer(stores, problem, blocks_done, work, C: gl.constexpr, T: gl.constexpr):
    """Add consumer `C`'s pieces of dq of the program's blocks, write its dk and dv, and count the blocks."""
    i = 0
    turn = 0
    place = receive(turn, work)
    while place.tile >= 0:
        i = reduce_block(i, turn, place, stores, problem, C, T)
        own, _ = split_place(place, problem.shares)
        count(blocks_done + own.batch * problem.kv_heads + own.head)
        turn += 1
        place = receive(turn, work)
    ignore(turn + 1, work)
