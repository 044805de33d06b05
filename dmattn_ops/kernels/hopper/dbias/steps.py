"""The gradient of a bias with queries that batches or heads share, on SM 9.0: sums of dS, without atomics or other memory.

A block is 128 queries, which walk over keys. The members of a bias are the batches and query heads that read it: each block
of 64 keys is multiplied for every member, dS = P (dP - delta) is added up in float32 registers, and the sum of all members
is written once, so that dbias does not depend on the order of programs. Each of two consumers of 4 warps owns 64 queries and
does a whole step alone: S = Q K^T from the bias on, dP = dO V^T, dS. They share the keys that a warp of its own loads by TMA,
and drift apart until one does its elementwise work while the other feeds the tensor cores.

Where the queries and grad_out of all members fit in shared memory (two members at D 128, four at D 64), they stay there, and a
program walks over all keys: what is left to load is K and V, half of what tiles of 128 x 128 load. With more members,
`CHUNKS` blocks of 64 keys have sums of their own, and the queries of one member after the other come in two buffers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.backward_256.walk import (
    BITS,
    NO_LISTS,
    STEP,
    Mask,
    View,
    at_batch,
    head_view,
    load_row_numbers,
    load_select,
    visible,
)
from dmattn_ops.kernels.hopper.columns import allocate_rows, buffer_at, load_rows, multiply, transposed
from dmattn_ops.kernels.hopper.dropout import dropout_of_batch, dropout_of_head, mark_dropped, score_gradient
from dmattn_ops.kernels.hopper.gluon_compat import mbarrier, warpgroup_mma_wait
from dmattn_ops.kernels.hopper.scores import (
    FULL_BIAS,
    Exact,
    any_flag,
    exact_exponents,
    finite_or_lowest,
    full_bias,
    rounded_exponents,
)

# The 64 x 64 scores of a consumer as they are read from the bias and written to dbias: a thread has pieces of 8 keys, and
# four of them have 32 keys of a row. What a thread holds of the accumulator comes from these four: no shared memory is needed.
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
PIECES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [0, 32], [8, 0]],
        [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)


class Shared(NamedTuple):
    """Shared memory: buffers of queries and of keys, and their barriers."""

    q: Any  # [2 * QUERY_BUFFERS, 64, D], in parts (`columns.py`) as all of them
    o: Any  # grad_out, [2 * QUERY_BUFFERS, 64, DV]
    k: Any  # [STAGES, 64, D]
    v: Any  # [STAGES, 64, DV]
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class Members(NamedTuple):
    """The batches and query heads whose dS is added up."""

    batch: Any  # the first
    head: Any
    group: Any  # query heads
    count: Any


class Walk(NamedTuple):
    """Where the queries of a program are, and which blocks of `CHUNKS * 64` keys it writes."""

    row: Any
    first: Any
    end: Any
    seqlen_q: Any
    seqlen_k: Any
    view: Any  # what the band shows the program's 128 queries


class States(NamedTuple):
    """What lists say of each tile of 128 x 128 scores: 0 where it is empty, 1 where it needs a test, 2 where it is seen whole."""

    start: Any
    batch: Any  # strides
    head: Any
    query: Any
    group: Any  # query heads that share one


@gluon.jit
def allocate(maps, D: gl.constexpr, D2: gl.constexpr, DV: gl.constexpr, DV2: gl.constexpr, STAGES: gl.constexpr,
             QUERY_BUFFERS: gl.constexpr):  # fmt: skip
    """Return the buffers as TMA fills them (four dimensions) and as the tensor cores read them (two)."""
    dtype: gl.constexpr = maps[0][0].dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q, q2 = allocate_rows(maps[0], 2 * QUERY_BUFFERS, STEP, D, D2, dtype)
    o, o2 = allocate_rows(maps[3], 2 * QUERY_BUFFERS, STEP, DV, DV2, dtype)
    k, k2 = allocate_rows(maps[1], STAGES, STEP, D, D2, dtype)
    v, v2 = allocate_rows(maps[2], STAGES, STEP, DV, DV2, dtype)
    q_full = gl.allocate_shared_memory(gl.int64, [QUERY_BUFFERS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [QUERY_BUFFERS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for b in gl.static_range(QUERY_BUFFERS):
        mbarrier.init(q_full.index(b), count=1)
        mbarrier.init(q_empty.index(b), count=2)
    for b in gl.static_range(STAGES):
        mbarrier.init(k_full.index(b), count=1)
        mbarrier.init(k_empty.index(b), count=2)
        mbarrier.init(v_full.index(b), count=1)
        mbarrier.init(v_empty.index(b), count=2)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    return Shared(q, o, k, v, *barriers), Shared(q2, o2, k2, v2, *barriers)


@gluon.jit
def member_after(batch, head, members):
    """Return the (batch, query head) of the member after another one."""
    last = head == members.head + members.group - 1
    return batch + last.to(gl.int32), gl.where(last, members.head, head + 1)


@gluon.jit
def state_of(at, batch, head, walk, states, CHUNKS: gl.constexpr, LISTS: gl.constexpr, BANDED: gl.constexpr):
    """Return the state of the program's queries and the 64 keys of step `at`, as in `States`."""
    if LISTS != NO_LISTS:
        tile = states.start + batch.to(gl.int64) * states.batch + (head // states.group).to(gl.int64) * states.head
        tile += (walk.row // (2 * STEP)).to(gl.int64) * states.query + at // 2
        return gl.load(tile, mask=at * STEP < walk.seqlen_k, other=0).to(gl.int32)
    elif BANDED:
        inside = (at * STEP < walk.seqlen_k) & (at >= walk.view.first) & (at < walk.view.end)
        whole = (at >= walk.view.full_first) & (at < walk.view.full_end)
        return gl.where(inside, gl.where(whole, 2, 1), 0)
    elif CHUNKS == 1:
        return 2
    else:  # the last chunks may be past the end
        return gl.where(at * STEP < walk.seqlen_k, 2, 0)


@gluon.jit
def load_keys(i, at, batch, kv_head, maps, smem, BYTES: gl.constexpr, BYTES_V: gl.constexpr, D: gl.constexpr,
              DV: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Load the keys of step `at` as the program's `i`-th."""
    _, k_map, v_map, _ = maps
    b = i % STAGES
    free = ((i // STAGES) & 1) ^ 1
    full = smem.k_full.index(b)
    mbarrier.wait(smem.k_empty.index(b), free)
    mbarrier.expect(full, STEP * BYTES)
    load_rows(k_map, batch, at * STEP, kv_head, full, smem.k, b, D)
    full = smem.v_full.index(b)
    mbarrier.wait(smem.v_empty.index(b), free)
    mbarrier.expect(full, STEP * BYTES_V)
    load_rows(v_map, batch, at * STEP, kv_head, full, smem.v, b, DV)


@gluon.jit
def producer(
    maps, smem, walk, members, states, kv_group,
    D: gl.constexpr, D2: gl.constexpr, DV: gl.constexpr, DV2: gl.constexpr, STAGES: gl.constexpr, CHUNKS: gl.constexpr,
    RESIDENT: gl.constexpr, LISTS: gl.constexpr, BANDED: gl.constexpr,
):  # fmt: skip
    """Load the queries of each member, once where they stay, and the keys of every step that shows something."""
    q_map, _, _, o_map = maps
    BYTES: gl.constexpr = (D + D2) * 2
    BYTES_V: gl.constexpr = (DV + DV2) * 2
    i = 0
    turn = 0
    loaded = 0  # a bit for each member whose queries stay
    for block in range(walk.first, walk.end):
        batch = members.batch
        head = members.head
        for m in range(members.count):
            shown = 0
            for c in gl.static_range(CHUNKS):
                shown = shown | state_of(block * CHUNKS + c, batch, head, walk, states, CHUNKS, LISTS, BANDED)
            if shown != 0:
                slot = turn & 1
                wanted = True
                if RESIDENT:
                    slot = m
                    wanted = ((loaded >> m) & 1) == 0
                    loaded = loaded | (1 << m)
                else:
                    mbarrier.wait(smem.q_empty.index(slot), ((turn >> 1) & 1) ^ 1)
                if wanted:
                    full = smem.q_full.index(slot)
                    mbarrier.expect(full, 2 * STEP * (BYTES + BYTES_V))
                    for c in gl.static_range(2):
                        load_rows(q_map, batch, walk.row + c * STEP, head, full, smem.q, slot * 2 + c, D)
                        load_rows(o_map, batch, walk.row + c * STEP, head, full, smem.o, slot * 2 + c, DV)
                turn += 1
                for c in gl.static_range(CHUNKS):
                    at = block * CHUNKS + c
                    if state_of(at, batch, head, walk, states, CHUNKS, LISTS, BANDED) != 0:
                        load_keys(i, at, batch, head // kv_group, maps, smem, BYTES, BYTES_V, D, DV, STAGES)
                        i += 1
            batch, head = member_after(batch, head, members)


class Rows(NamedTuple):
    """Pointers to the statistics of a member's queries, as `hopper.backward.rows` writes them."""

    minus_lse: Any
    delta: Any
    first: Any  # of the pair
    second: Any


@gluon.jit
def in_view(at, walk, BANDED: gl.constexpr):
    """Return whether the band shows something of the keys of step `at`."""
    if BANDED:
        return (at >= walk.view.first) & (at < walk.view.end)
    else:
        return True


@gluon.jit
def load_bias(bias, row, at, wanted):
    """Return the bias of a consumer's queries and the keys of step `at` as it lies in memory; zeros where it is not wanted."""
    queries = row + gl.arange(0, STEP, layout=gl.SliceLayout(1, PIECES))
    keys = at * STEP + gl.arange(0, STEP, layout=gl.SliceLayout(0, PIECES))
    inside = ((queries < bias.seqlen_q) & wanted)[:, None] & (keys < bias.seqlen_k)[None, :]
    place = bias.start + queries.to(gl.int64)[:, None] * bias.query + keys[None, :]
    return gl.load(place, mask=inside, other=0.0)


@gluon.jit
def starting_scores(added, bias, needed):
    """Return the accumulator that scores start from: the bias over the scale, or 0 where exact scores are needed."""
    added = finite_or_lowest(gl.convert_layout(added, SCORES).to(gl.float32)) * bias.factor
    return gl.where(needed != 0, 0.0, added)


@gluon.jit
def step(
    i, at, total, added, smem, slot, queries_full, rows, queries, scales, exact, bias, state, view, dropout, seqlen_q, row,
    C: gl.constexpr, DV2: gl.constexpr, STAGES: gl.constexpr, LISTS: gl.constexpr, BANDED: gl.constexpr,
    HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, HIDDEN: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """Add dS of one member's queries and the keys of step `at` to the sums."""
    b = i % STAGES
    full = (i // STAGES) & 1
    minus_lse = gl.load(rows.minus_lse + queries)
    delta = gl.load(rows.delta + queries)
    TESTED: gl.constexpr = BANDED or LISTS != NO_LISTS
    if LISTS == BITS:
        numbers = load_row_numbers(view, queries, seqlen_q, LISTS, HIDDEN, False)
        select = load_select(at, view, queries, numbers, LISTS, HAS_HIGH, HIDDEN, False, SCORES)
    mbarrier.wait(smem.q_full.index(slot), queries_full)
    mbarrier.wait(smem.k_full.index(b), full)
    s = multiply(buffer_at(smem.q, slot * 2 + C), transposed(buffer_at(smem.k, b)), added, True)
    mbarrier.wait(smem.v_full.index(b), full)
    zero = gl.zeros([STEP, STEP], gl.float32, layout=SCORES)
    dp = multiply(buffer_at(smem.o, slot * 2 + C), transposed(buffer_at(smem.v, b)), zero, False)
    s = warpgroup_mma_wait(2 if DV2 > 0 else 1, deps=(s,))
    mbarrier.arrive(smem.k_empty.index(b), count=1)
    if exact.needed != 0:
        keys = at * STEP + gl.arange(0, STEP, layout=gl.SliceLayout(0, SCORES))
        natural = full_bias(bias, 0, keys[None, :], queries[:, None])
        first = gl.load(rows.first + queries)[:, None]
        second = gl.load(rows.second + queries)[:, None]
        p = gl.exp2(exact_exponents(s, first, second, natural, scales, FULL_BIAS, False, True))
    else:
        p = gl.exp2(rounded_exponents(s, minus_lse[:, None], added, scales, FULL_BIAS, False, False))
    if TESTED:
        if state == 1:
            if LISTS != BITS:
                numbers = load_row_numbers(view, queries, seqlen_q, LISTS, HIDDEN, False)
                select = load_select(at, view, queries, numbers, LISTS, HAS_HIGH, HIDDEN, False, SCORES)
            p = visible(p, queries, select, LISTS, HAS_LOW, HAS_HIGH, HIDDEN, False, SCORES)
    if DROPOUT:
        p = mark_dropped(p, dropout, row, at * STEP, STEP, True)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    mbarrier.arrive(smem.v_empty.index(b), count=1)
    if DROPOUT:
        total = total + score_gradient(p, dp, delta[:, None])
    else:
        total = gl.fma(p, dp - delta[:, None], total)
    return total


@gluon.jit
def no_sums(CHUNKS: gl.constexpr):
    """Return sums of dS `[64, 64]` of 0 for each block of keys."""
    zero = gl.zeros([STEP, STEP], gl.float32, layout=SCORES)
    if CHUNKS == 1:
        return (zero,)
    elif CHUNKS == 2:
        return (zero, zero)
    else:
        return (zero, zero, zero, zero)


@gluon.jit
def with_sum(sums, c: gl.constexpr, one, CHUNKS: gl.constexpr):
    """Return the sums with `one` as the `c`-th."""
    if CHUNKS == 1:
        return (one,)
    elif CHUNKS == 2:
        return (one if c == 0 else sums[0], one if c == 1 else sums[1])
    else:
        return (
            one if c == 0 else sums[0],
            one if c == 1 else sums[1],
            one if c == 2 else sums[2],
            one if c == 3 else sums[3],
        )


@gluon.jit
def store_sums(dbias, dbias_q, sums, rescale, row, at, seqlen_q, seqlen_k, DROPOUT: gl.constexpr):
    """Write the sums of a consumer's queries and the keys of step `at`."""
    if DROPOUT:
        sums = sums * rescale
    sums = gl.convert_layout(sums.to(dbias.dtype.element_ty), PIECES)
    queries = row + gl.arange(0, STEP, layout=gl.SliceLayout(1, PIECES))
    keys = at * STEP + gl.arange(0, STEP, layout=gl.SliceLayout(0, PIECES))
    inside = (queries < seqlen_q)[:, None] & (keys < seqlen_k)[None, :]
    gl.store(dbias + queries.to(gl.int64)[:, None] * dbias_q + keys[None, :], sums, mask=inside)


@gluon.jit
def member_view(
    walk, batch, head, lists, bits, q_segments, k_segments, intervals, strides, LISTS: gl.constexpr, HIDDEN: gl.constexpr
):  # fmt: skip
    """Return the view (lists, bits, segments, intervals) that the program's queries have of the keys of a member."""
    (
        list_b,
        list_h,
        list_width,
        bits_b,
        bits_h,
        bits_row,
        q_segments_b,
        k_segments_b,
        k_segments_h,
        group,
        segment_group,
    ) = strides
    start, end, hidden_from, hidden_to = intervals
    at = batch.to(gl.int64)
    mask = Mask(
        lists + at * list_b, bits + at * bits_b, q_segments + at * q_segments_b, k_segments + at * k_segments_b,
        list_h, list_width, bits_h, bits_row, 0, k_segments_h, group, segment_group,
        at_batch(start, end, hidden_from, hidden_to, batch, k_segments_b, LISTS, HIDDEN),
    )  # fmt: skip
    view = View(
        mask.lists, mask.bits, mask.row_segments, mask.column_segments, mask.intervals, bits_row, walk.view.low,
        walk.view.high, walk.view.columns, walk.view.first, walk.view.full_first, walk.view.full_end, walk.view.end,
    )  # fmt: skip
    return head_view(view, mask, 0, head, LISTS, HIDDEN)


@gluon.jit
def consumer(
    smem, walk, members, states, mask, all_rows, scales, exact, flags, n_flags, bias, dropouts, dbias, dbias_q,
    C: gl.constexpr, DV2: gl.constexpr, STAGES: gl.constexpr, CHUNKS: gl.constexpr, RESIDENT: gl.constexpr,
    LISTS: gl.constexpr, BANDED: gl.constexpr, HAS_LOW: gl.constexpr, HAS_HIGH: gl.constexpr, HIDDEN: gl.constexpr,
    DROPOUT: gl.constexpr,
):  # fmt: skip
    """Write dbias of queries `C * 64 ...` of the program."""
    row = walk.row + C * STEP
    queries = row + gl.arange(0, STEP, layout=gl.SliceLayout(1, SCORES))
    needed = any_flag(flags, n_flags)
    exact = Exact(needed, exact.first, exact.second)
    stats, heads, stat_rows, total_rows = all_rows
    lists, bits, q_segments, k_segments, intervals, strides = mask
    i = 0
    turn = 0
    # The bias of a step is loaded a step ahead, or with sums of all members before the next keys; where lists leave most steps
    # out and members take turns, only when a step is taken.
    AHEAD: gl.constexpr = CHUNKS == 1 or LISTS == NO_LISTS
    ahead = load_bias(bias, row, walk.first * CHUNKS, AHEAD and in_view(walk.first * CHUNKS, walk, BANDED))
    for block in range(walk.first, walk.end):
        sums = no_sums(CHUNKS)
        added = sums[0]
        if CHUNKS == 1:
            added = starting_scores(ahead, bias, needed)
            ahead = load_bias(bias, row, block + 1, (block + 1 < walk.end) & in_view(block + 1, walk, BANDED))
        batch = members.batch
        head = members.head
        for m in range(members.count):
            before = i
            slot = turn & 1
            queries_full = (turn >> 1) & 1
            if RESIDENT:
                slot = m
                queries_full = 0
            lse = stats + (batch * heads + head).to(gl.int64) * stat_rows
            rows = Rows(lse, lse + total_rows, lse + 2 * total_rows, lse + 3 * total_rows)
            view = member_view(
                walk, batch, head, lists, bits, q_segments, k_segments, intervals, strides, LISTS, HIDDEN
            )
            dropout = dropouts
            if DROPOUT:
                dropout = dropout_of_head(dropout_of_batch(dropouts, batch), head)
            for c in gl.static_range(CHUNKS):
                at = block * CHUNKS + c
                state = state_of(at, batch, head, walk, states, CHUNKS, LISTS, BANDED)
                one = sums[c]
                loaded = ahead
                if AHEAD and CHUNKS > 1:
                    following = at + 1
                    if c + 1 == CHUNKS:
                        following = (block + (m + 1 == members.count).to(gl.int32)) * CHUNKS
                    ahead = load_bias(bias, row, following, in_view(following, walk, BANDED))
                if state != 0:
                    if not AHEAD:
                        loaded = load_bias(bias, row, at, True)
                    if CHUNKS > 1:
                        added = starting_scores(loaded, bias, needed)
                    one = step(
                        i, at, one, added, smem, slot, queries_full, rows, queries, scales, exact, bias, state, view,
                        dropout, walk.seqlen_q, row, C, DV2, STAGES, LISTS, BANDED, HAS_LOW, HAS_HIGH, HIDDEN,
                        DROPOUT)  # fmt: skip
                    i += 1
                sums = with_sum(sums, c, one, CHUNKS)
            if i != before:
                if not RESIDENT:
                    mbarrier.arrive(smem.q_empty.index(slot), count=1)
                turn += 1
            batch, head = member_after(batch, head, members)
        for c in gl.static_range(CHUNKS):
            at = block * CHUNKS + c
            store_sums(dbias, dbias_q, sums[c], dropouts.rescale, row, at, walk.seqlen_q, walk.seqlen_k, DROPOUT)
