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

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.columns import allocate_rows, buffer_at, load_rows, multiply, transposed
from dmattn_ops.kernels.hopper.constants import accumulator
from dmattn_ops.kernels.hopper.dbias.types import Member, Own, Rows, Shared, banded, test_of
from dmattn_ops.kernels.hopper.dropout import dropout_of_batch, dropout_of_head, mark_dropped, score_gradient
from dmattn_ops.kernels.hopper.gluon_compat import mbarrier, warpgroup_mma_wait
from dmattn_ops.kernels.hopper.kinds import BAND, BITS
from dmattn_ops.kernels.hopper.scores import (
    FULL_BIAS,
    Exact,
    any_flag,
    exact_exponents,
    finite_or_lowest,
    full_bias,
    rounded_exponents,
)
from dmattn_ops.kernels.hopper.views import STEP, View, head_view, load_row_numbers, load_select, mask_of, visible

# The 64 x 64 scores of a consumer as they are read from the bias and written to dbias: a thread has pieces of 8 keys, and
# four of them have 32 keys of a row. What a thread holds of the accumulator comes from these four: no shared memory is needed.
SCORES = gl.constexpr(accumulator(64))
PIECES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [0, 32], [8, 0]],
        [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)


@gluon.jit
def allocate(maps, T: gl.constexpr):
    """Return the buffers as TMA fills them (four dimensions) and as the tensor cores read them (two)."""
    dtype: gl.constexpr = maps.q[0].dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    STAGES: gl.constexpr = T.STAGES
    QUERY_BUFFERS: gl.constexpr = T.QUERY_BUFFERS
    q, q2 = allocate_rows(maps.q, 2 * QUERY_BUFFERS, STEP, T.D, T.D2, dtype)
    o, o2 = allocate_rows(maps.o, 2 * QUERY_BUFFERS, STEP, T.DV, T.DV2, dtype)
    k, k2 = allocate_rows(maps.k, STAGES, STEP, T.D, T.D2, dtype)
    v, v2 = allocate_rows(maps.v, STAGES, STEP, T.DV, T.DV2, dtype)
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
def state_of(at, batch, head, walk, states, T: gl.constexpr):
    """Return the state of the program's queries and the 64 keys of step `at`, as in `States`."""
    if T.MASK != BAND:
        tile = states.start + batch.to(gl.int64) * states.batch + (head // states.group).to(gl.int64) * states.head
        tile += (walk.row // (2 * STEP)).to(gl.int64) * states.query + at // 2
        return gl.load(tile, mask=at * STEP < walk.seqlen_k, other=0).to(gl.int32)
    elif banded(T):
        inside = (at * STEP < walk.seqlen_k) & (at >= walk.view.first) & (at < walk.view.end)
        whole = (at >= walk.view.full_first) & (at < walk.view.full_end)
        return gl.where(inside, gl.where(whole, 2, 1), 0)
    elif T.CHUNKS == 1:
        return 2
    else:  # the last chunks may be past the end
        return gl.where(at * STEP < walk.seqlen_k, 2, 0)


@gluon.jit
def load_keys(i, at, batch, kv_head, maps, smem, T: gl.constexpr):
    """Load the keys of step `at` as the program's `i`-th."""
    b = i % T.STAGES
    free = ((i // T.STAGES) & 1) ^ 1
    full = smem.k_full.index(b)
    mbarrier.wait(smem.k_empty.index(b), free)
    mbarrier.expect(full, STEP * (T.D + T.D2) * 2)
    load_rows(maps.k, batch, at * STEP, kv_head, full, smem.k, b, T.D)
    full = smem.v_full.index(b)
    mbarrier.wait(smem.v_empty.index(b), free)
    mbarrier.expect(full, STEP * (T.DV + T.DV2) * 2)
    load_rows(maps.v, batch, at * STEP, kv_head, full, smem.v, b, T.DV)


@gluon.jit
def producer(maps, smem, walk, problem, kv_group, T: gl.constexpr):
    """Load the queries of each member, once where they stay, and the keys of every step that shows something."""
    CHUNKS: gl.constexpr = T.CHUNKS
    members = problem.members
    i = 0
    turn = 0
    loaded = 0  # a bit for each member whose queries stay
    for block in range(walk.first, walk.end):
        batch = members.batch
        head = members.head
        for m in range(members.count):
            shown = 0
            for c in gl.static_range(CHUNKS):
                shown = shown | state_of(block * CHUNKS + c, batch, head, walk, problem.states, T)
            if shown != 0:
                slot = turn & 1
                wanted = True
                if T.RESIDENT:
                    slot = m
                    wanted = ((loaded >> m) & 1) == 0
                    loaded = loaded | (1 << m)
                else:
                    mbarrier.wait(smem.q_empty.index(slot), ((turn >> 1) & 1) ^ 1)
                if wanted:
                    full = smem.q_full.index(slot)
                    mbarrier.expect(full, 2 * STEP * (T.D + T.D2 + T.DV + T.DV2) * 2)
                    for c in gl.static_range(2):
                        load_rows(maps.q, batch, walk.row + c * STEP, head, full, smem.q, slot * 2 + c, T.D)
                        load_rows(maps.o, batch, walk.row + c * STEP, head, full, smem.o, slot * 2 + c, T.DV)
                turn += 1
                for c in gl.static_range(CHUNKS):
                    at = block * CHUNKS + c
                    if state_of(at, batch, head, walk, problem.states, T) != 0:
                        load_keys(i, at, batch, head // kv_group, maps, smem, T)
                        i += 1
            batch, head = member_after(batch, head, members)


@gluon.jit
def in_view(at, walk, T: gl.constexpr):
    """Return whether the band shows something of the keys of step `at`."""
    if banded(T):
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
def step(i, at, total, added, state, smem, own, member, walk, problem, C: gl.constexpr, T: gl.constexpr):
    """Add dS of one member's queries and the keys of step `at` to the sums."""
    TEST: gl.constexpr = test_of(T)
    TESTED: gl.constexpr = banded(T) or T.MASK != BAND
    b = i % T.STAGES
    full = (i // T.STAGES) & 1
    queries = own.queries
    minus_lse = gl.load(member.rows.minus_lse + queries)
    delta = gl.load(member.rows.delta + queries)
    if T.MASK == BITS:
        numbers = load_row_numbers(member.view, queries, walk.seqlen_q, TEST)
        select = load_select(at, member.view, queries, numbers, TEST, SCORES)
    mbarrier.wait(smem.q_full.index(member.slot), member.full)
    mbarrier.wait(smem.k_full.index(b), full)
    s = multiply(buffer_at(smem.q, member.slot * 2 + C), transposed(buffer_at(smem.k, b)), added, True)
    mbarrier.wait(smem.v_full.index(b), full)
    zero = gl.zeros([STEP, STEP], gl.float32, layout=SCORES)
    dp = multiply(buffer_at(smem.o, member.slot * 2 + C), transposed(buffer_at(smem.v, b)), zero, False)
    s = warpgroup_mma_wait(2 if T.DV2 > 0 else 1, deps=(s,))
    mbarrier.arrive(smem.k_empty.index(b), count=1)
    if own.exact.needed != 0:
        keys = at * STEP + gl.arange(0, STEP, layout=gl.SliceLayout(0, SCORES))
        natural = full_bias(problem.bias, 0, keys[None, :], queries[:, None])
        first = gl.load(member.rows.first + queries)[:, None]
        second = gl.load(member.rows.second + queries)[:, None]
        p = gl.exp2(exact_exponents(s, first, second, natural, problem.scales, FULL_BIAS, False, True))
    else:
        p = gl.exp2(rounded_exponents(s, minus_lse[:, None], added, problem.scales, FULL_BIAS, False, False))
    if TESTED:
        if state == 1:
            if T.MASK != BITS:
                numbers = load_row_numbers(member.view, queries, walk.seqlen_q, TEST)
                select = load_select(at, member.view, queries, numbers, TEST, SCORES)
            p = visible(p, queries, select, TEST, SCORES)
    if T.DROPOUT:
        p = mark_dropped(p, member.dropout, own.row, at * STEP, STEP, True)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    mbarrier.arrive(smem.v_empty.index(b), count=1)
    if TESTED:
        if (
            state == 1
        ):  # hidden values and rows of grad_out need not be finite; a NaN that somebody sees is in delta as well
            dp = gl.where(p == 0.0, 0.0, dp)
    if T.DROPOUT:
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
def store_sums(problem, sums, row, at, walk, T: gl.constexpr):
    """Write the sums of a consumer's queries and the keys of step `at`."""
    if T.DROPOUT:
        sums = sums * problem.dropout.rescale
    sums = gl.convert_layout(sums.to(problem.dbias.dtype.element_ty), PIECES)
    queries = row + gl.arange(0, STEP, layout=gl.SliceLayout(1, PIECES))
    keys = at * STEP + gl.arange(0, STEP, layout=gl.SliceLayout(0, PIECES))
    inside = (queries < walk.seqlen_q)[:, None] & (keys < walk.seqlen_k)[None, :]
    gl.store(problem.dbias + queries.to(gl.int64)[:, None] * problem.dbias_q + keys[None, :], sums, mask=inside)


@gluon.jit
def member_view(walk, batch, head, given, T: gl.constexpr):
    """Return the view (lists, bits, segments, intervals) that the program's queries have of the keys of a member."""
    TEST: gl.constexpr = test_of(T)
    mask = mask_of(given, batch, TEST)
    view = View(
        mask.lists, mask.bits, mask.row_segments, mask.column_segments, mask.intervals, mask.bits_row, walk.view.band_lo,
        walk.view.band_hi, walk.view.columns, walk.view.first, walk.view.full_first, walk.view.full_end, walk.view.end,
    )  # fmt: skip
    return head_view(view, mask, 0, head, TEST)


@gluon.jit
def consumer(smem, walk, problem, C: gl.constexpr, T: gl.constexpr):
    """Write dbias of queries `C * 64 ...` of the program."""
    CHUNKS: gl.constexpr = T.CHUNKS
    members = problem.members
    bias = problem.bias
    row = walk.row + C * STEP
    queries = row + gl.arange(0, STEP, layout=gl.SliceLayout(1, SCORES))
    needed = any_flag(problem.flags, problem.n_flags)
    own = Own(row, queries, Exact(needed, problem.exact.first, problem.exact.second))
    i = 0
    turn = 0
    # The bias of a step is loaded a step ahead, or with sums of all members before the next keys; where lists leave most steps
    # out and members take turns, only when a step is taken.
    AHEAD: gl.constexpr = CHUNKS == 1 or T.MASK == BAND
    ahead = load_bias(bias, row, walk.first * CHUNKS, AHEAD and in_view(walk.first * CHUNKS, walk, T))
    for block in range(walk.first, walk.end):
        sums = no_sums(CHUNKS)
        added = sums[0]
        if CHUNKS == 1:
            added = starting_scores(ahead, bias, needed)
            ahead = load_bias(bias, row, block + 1, (block + 1 < walk.end) & in_view(block + 1, walk, T))
        batch = members.batch
        head = members.head
        for m in range(members.count):
            before = i
            slot = turn & 1
            queries_full = (turn >> 1) & 1
            if T.RESIDENT:
                slot = m
                queries_full = 0
            lse = problem.rows.stats + (batch * problem.rows.heads + head).to(gl.int64) * problem.rows.rows
            total = problem.rows.total
            rows = Rows(lse, lse + total, lse + 2 * total, lse + 3 * total)
            view = member_view(walk, batch, head, problem.mask, T)
            dropout = problem.dropout
            if T.DROPOUT:
                dropout = dropout_of_head(dropout_of_batch(dropout, batch), head)
            member = Member(slot, queries_full, rows, view, dropout)
            for c in gl.static_range(CHUNKS):
                at = block * CHUNKS + c
                state = state_of(at, batch, head, walk, problem.states, T)
                one = sums[c]
                loaded = ahead
                if AHEAD and CHUNKS > 1:
                    following = at + 1
                    if c + 1 == CHUNKS:
                        following = (block + (m + 1 == members.count).to(gl.int32)) * CHUNKS
                    ahead = load_bias(bias, row, following, in_view(following, walk, T))
                if state != 0:
                    if not AHEAD:
                        loaded = load_bias(bias, row, at, True)
                    if CHUNKS > 1:
                        added = starting_scores(loaded, bias, needed)
                    one = step(i, at, one, added, state, smem, own, member, walk, problem, C, T)
                    i += 1
                sums = with_sum(sums, c, one, CHUNKS)
            if i != before:
                if not T.RESIDENT:
                    mbarrier.arrive(smem.q_empty.index(slot), count=1)
                turn += 1
            batch, head = member_after(batch, head, members)
        for c in gl.static_range(CHUNKS):
            store_sums(problem, sums[c], row, block * CHUNKS + c, walk, T)
