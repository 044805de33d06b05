"""Backward with mma.sync: a program owns a block of keys and walks the queries of every head that reads it, with five products.

    S = Q K^T    dP = dO V^T    P, dS to shared memory    dv += P^T dO    dq += dS K    dk += dS^T Q

P and dS are written to shared memory once, and read from there as they are and transposed. dq is added up in memory, in float32
and in any order; its elements lie there such that the 32 additions of a warp are adjacent (`finish.py`). FlashAttention-2 works in
the same way (Dao, 2023, arXiv:2307.08691). The gradient of a bias that many batches share is added up like dq where that is faster
than a kernel of its own (`dbias.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from dmattn_ops.kernels.ampere.backward.finish import add_to_sums, first_sum, sums_of_tile
from dmattn_ops.kernels.ampere.backward.order import await_turn, pass_turn, turn_of
from dmattn_ops.kernels.ampere.copies import (
    copy_bias,
    copy_numbers,
    copy_rows,
    keep_rows,
    product,
    products,
    registers_of_rows,
    shared_rows,
    source_of,
    store_columns,
    whole_slices,
)
from dmattn_ops.kernels.ampere.dropout import dropout_keep
from dmattn_ops.kernels.ampere.visible import (
    hides_whole_keys,
    pairs_of,
    visible_pairs,
    where_visible,
    words_of_rows,
)
from dmattn_ops.kernels.ampere.walks import lanes, longest_first, start_of, steps_of
from dmattn_ops.kernels.constants import Constants
from dmattn_ops.kernels.portable.arguments import ROW_TENSORS, UNSPECIALIZED
from dmattn_ops.kernels.portable.dropout import Seeds
from dmattn_ops.kernels.portable.heads import Operands, head_of, program_of
from dmattn_ops.kernels.portable.places import (
    Band,
    Lengths,
    Lists,
    band_of,
    last_owned,
    part_of,
    plan_walk,
)
from dmattn_ops.kernels.portable.primitives import rows_of, statistics_of, store_scores
from dmattn_ops.kernels.portable.scores import (
    Bias,
    BiasArray,
    Factors,
    capped,
    load_bias,
    load_key_bias,
    probabilities,
    score_gradient,
)
from dmattn_ops.kernels.portable.visibility import (
    BitArray,
    KeyArrays,
    MaskArrays,
    key_marks,
    rows_in_reach,
    some_nan,
)

# Heads whose blocks are computed at the same time: L2 then holds what they walk. 4 of 16 heads of 16384: 8.47 ms, all 8.92.
ABREAST = gl.constexpr(4)
ABREAST_IN_ORDER = gl.constexpr(16)  # the fewer, the more blocks of a head wait for each other


@dataclass(frozen=True, eq=False, repr=False)
class Traits(Constants):
    """How the warps of a program share its products, and how many buffers it has: one constant of the kernel."""

    score_warps: int  # along the queries of S and dP
    key_warps: int  # along the keys of dk and dv
    query_warps: int  # along the queries of dq
    query_stages: int  # buffers of queries, 1 or 2
    grad_stages: int  # and of gradients of out
    same_strides: bool  # rows of queries and of these gradients are as far apart: addresses take the registers of one
    bias_tiles: bool  # a bias with queries is copied to shared memory, into the buffer of P before that is made
    ordered: bool  # additions to dq have a fixed order (`order.py`)
    key_sums: bool  # the sums of dS over the queries are written, of a bias per key
    adds_to_bias: bool  # dS is added to the sums of a bias that batches share, not written


class Buffers(NamedTuple):
    """Shared memory."""

    q: Any  # [stages, queries, columns]
    grad_out: Any  # [stages, queries, columns of values]
    log_sum: Any  # [stages of q, queries]
    log_rest: Any
    delta: Any  # [stages of grad_out, queries]
    k: Any  # [keys, columns]
    v: Any  # [keys, columns of values]
    p: Any  # [queries, keys]; until a step makes it, the bias of the step where that comes in tiles
    ds: Any


class Queries(NamedTuple):
    """The queries of one head, which are walked."""

    query: Any  # copies.Source
    grad_out: Any  # copies.Source
    statistics: Any  # primitives.Statistics
    dq: Any  # where the sums of the first one lie
    turns: Any  # a counter for each step of queries, or None
    dbias: Any  # scores.Bias, or None where dS is not written
    bias_sums: Any  # sums of dS over batches, or None
    reach: Any  # Reach: those that may see an owned key


class Keys(NamedTuple):
    """The block of keys that a program owns."""

    rows: Any  # their numbers
    marks: Any
    bias: Any  # [1, keys], or 0.0
    start: Any


class HeadWalk(NamedTuple):
    """One query head, and the walk of the owned keys through its queries."""

    head: Any  # heads.Head, with bits and the band as queries have them
    steps: Any
    reach: Any  # Reach: the queries that may see an owned key


class Sums(NamedTuple):
    """Sums over queries for a block of keys."""

    dk: Any
    dv: Any
    ds: Any  # the sum of dS over the queries of one head


@gluon.jit
def fetch_queries(buffers, stage, queries, start, length, shape: gl.constexpr, CHECKED: gl.constexpr):
    """Fetch queries `start ...`, with the logarithms of their sums."""
    WARPS: gl.constexpr = gl.num_warps()
    M: gl.constexpr = shape.block_m
    QUERY_ROWS: gl.constexpr = shape.query_rows
    reach = queries.reach
    copy_rows(buffers.q.index(stage), queries.query, start, reach.begin, reach.end, QUERY_ROWS, CHECKED, WARPS)
    copy_numbers(buffers.log_sum.index(stage), queries.statistics.log_sum, start, length, M, WARPS)
    copy_numbers(buffers.log_rest.index(stage), queries.statistics.log_rest, start, length, M, WARPS)
    async_copy.commit_group()


@gluon.jit
def fetch_gradients(buffers, stage, queries, start, length, shape: gl.constexpr, CHECKED: gl.constexpr):
    """Fetch the gradients of out of queries `start ...`, with their delta."""
    WARPS: gl.constexpr = gl.num_warps()
    M: gl.constexpr = shape.block_m
    OUT_ROWS: gl.constexpr = shape.out_rows
    reach = queries.reach
    copy_rows(buffers.grad_out.index(stage), queries.grad_out, start, reach.begin, reach.end, OUT_ROWS, CHECKED, WARPS)
    copy_numbers(buffers.delta.index(stage), queries.statistics.delta, start, length, M, WARPS)
    async_copy.commit_group()


@gluon.jit
def gather(
    sums, start, number, walk, queries, keys, buffers, shape: gl.constexpr, features: gl.constexpr, T: gl.constexpr,
    PARTIAL: gl.constexpr, CAREFUL: gl.constexpr,
):  # fmt: skip
    """Add the queries from `start` on, which are in shared memory, and return the sums and the start of the next step.

    The queries of that one are fetched meanwhile. `CAREFUL`: rows of queries that see no key may be NaN; dq is left as it is,
    which those before have added to.
    """
    WARPS: gl.constexpr = gl.num_warps()
    SCORES: gl.constexpr = products(T.score_warps, WARPS // T.score_warps)
    KEYS: gl.constexpr = products(T.key_warps, WARPS // T.key_warps)
    QUERIES: gl.constexpr = products(T.query_warps, WARPS // T.query_warps)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    M: gl.constexpr = shape.block_m
    N: gl.constexpr = shape.block_n
    HEAD: gl.constexpr = shape.padded_head
    head = walk.head
    length = head.place.length_q
    dtype: gl.constexpr = buffers.q.dtype
    q_stage = number % T.query_stages
    grad_stage = number % T.grad_stages
    next_start = start_of(walk.steps, number + 1, M, features, PARTIAL)
    async_copy.wait_group(0)  # Triton puts a barrier of the block behind it
    if T.query_stages == 2:
        fetch_queries(buffers, 1 - q_stage, queries, next_start, length, shape, PARTIAL)
    if T.grad_stages == 2:
        fetch_gradients(buffers, 1 - grad_stage, queries, next_start, length, shape, PARTIAL)
    own_queries = start + gl.arange(0, M, layout=ROW)
    pairs = None
    if PARTIAL and features.mask == "bits":  # on their way beside the products
        pairs = words_of_rows(head, own_queries, length, keys.start, M, N, SCORES)
    q = buffers.q.index(q_stage)
    grad_out = buffers.grad_out.index(grad_stage)
    log_sum = buffers.log_sum.index(q_stage).load(ROW)
    log_rest = buffers.log_rest.index(q_stage).load(ROW)
    delta = buffers.delta.index(grad_stage).load(ROW)
    if CAREFUL:
        QUERY_ROWS: gl.constexpr = shape.query_rows
        OUT_ROWS: gl.constexpr = shape.out_rows
        kept = (log_sum != float("inf")).to(gl.int32)
        keep_rows(q, kept, QUERY_ROWS, WARPS)
        keep_rows(grad_out, kept, OUT_ROWS, WARPS)
    zeros = gl.zeros([M, N], gl.float32, layout=SCORES)
    scores = product(q, buffers.k.permute([1, 0]), zeros, whole_slices(shape.head_dim), SCORES)
    # In front of the stores of P: only so can ptxas put exponentials between products.
    grad_p = product(grad_out, buffers.v.permute([1, 0]), zeros, whole_slices(shape.value_dim), SCORES)
    if CAREFUL and hides_whole_keys(features):
        # What lies behind the last query sees these keys, too. It adds nothing, as its rows are 0 and P is at most 1; but 0 times
        # a key that is not finite would be NaN.
        scores = gl.where((own_queries < length)[:, None], scores, 0.0)
    scores, slope = capped(scores, head.factors, features)
    added = keys.bias
    if T.bias_tiles:
        added = buffers.p.load(SCORES).to(gl.float32)
    elif features.bias == "full":
        # Also of a step without a test: past the last key there may be anything, or nothing.
        added = load_bias(head, own_queries, keys.rows, False, True)
    p = probabilities(scores, added, head.factors, log_sum[:, None], log_rest[:, None], features.natural)
    if PARTIAL:
        if pairs is None:
            pairs = pairs_of(head, own_queries, keys.rows, keys.marks, start, keys.start, features)
        p = where_visible(pairs, p, 0.0, features)
    keep = True
    kept_p = p
    if features.dropout:
        keep = dropout_keep(head.dropout, start, keys.start, M, N, features, SCORES, T.score_warps == WARPS)
        kept_p = gl.where(keep, p, 0.0)
    buffers.p.store(kept_p.to(dtype))
    ds = score_gradient(p, grad_p, delta[:, None], keep, head.dropout, features.dropout)
    if PARTIAL:
        ds = where_visible(pairs, ds, 0.0, features)
        if features.softcap:
            slope = where_visible(pairs, slope, 0.0, features)
    key_sum = sums.ds
    if T.key_sums:
        key_sum += gl.sum(ds, 0)
    if queries.dbias is not None:
        store_scores(queries.dbias, ds, own_queries, keys.rows, head.place)
    if queries.bias_sums is not None and not CAREFUL:
        of_tile = queries.bias_sums + sums_of_tile(0, start, 0, 0, head.place.length_k, M, N)
        add_to_sums(of_tile, ds, M, N, T.score_warps, WARPS // T.score_warps)
    if features.softcap:
        ds *= slope
    buffers.ds.store(ds.to(dtype))
    dv = product(buffers.p.permute([1, 0]), grad_out, sums.dv, M, KEYS)
    if T.bias_tiles:
        copy_bias(buffers.p, head, next_start, keys.start, M, N, True, WARPS)
        async_copy.commit_group()
    if T.grad_stages == 1:
        fetch_gradients(buffers, 0, queries, next_start, length, shape, PARTIAL)
    if not CAREFUL:
        dq = product(buffers.ds, buffers.k, gl.zeros([M, HEAD], gl.float32, layout=QUERIES), N, QUERIES)
        if T.ordered:
            await_turn(queries.turns + start // M, turn_of(start, keys.start, head.mask.lo, N))
        # Also in rows behind the end, which have room and are not read.
        add_to_sums(queries.dq + start.to(gl.int64) * HEAD, dq, M, HEAD, T.query_warps, WARPS // T.query_warps)
        if T.ordered:
            pass_turn(queries.turns + start // M)
    dk = product(buffers.ds.permute([1, 0]), q, sums.dk, M, KEYS)
    if T.query_stages == 1:
        fetch_queries(buffers, 0, queries, next_start, length, shape, PARTIAL)
    return Sums(dk, dv, key_sum), next_start


@gluon.jit
def some_infinite(buffer, block: gl.constexpr):
    """Return whether a buffer of rows holds an infinity or NaN."""
    held = buffer.load(registers_of_rows(block.padded, gl.num_warps())).to(gl.float32)
    return some_nan(held - held)


@gluon.jit
def seen_by_head(walk, keys, shape: gl.constexpr, features: gl.constexpr, T: gl.constexpr):
    """Return which of the owned keys some query of a head sees: `[keys]`, 0 where none does."""
    SCORES: gl.constexpr = products(T.score_warps, gl.num_warps() // T.score_warps)
    M: gl.constexpr = shape.block_m
    head, steps = walk.head, walk.steps
    seen = keys.rows * 0
    for number in range(steps.n_partial):
        start = start_of(steps, number, M, features, True)
        own_queries = start + gl.arange(0, M, layout=gl.SliceLayout(1, SCORES))
        visible = visible_pairs(head, own_queries, keys.rows, keys.marks, keys.start, features)
        seen = gl.maximum(seen, gl.max(visible.to(gl.int32), 0))
    return gl.where(steps.count > steps.n_partial, 1, seen)


@gluon.jit
def clear_keys(buffers, seen, shape: gl.constexpr):
    """Set the keys that nobody sees to 0: dS is 0 there, and dq would be NaN if they are not finite."""
    KEY_ROWS: gl.constexpr = shape.key_rows
    keep_rows(buffers.k, seen, KEY_ROWS, gl.num_warps())


@gluon.jit
def gather_head(
    sums, walk, queries, keys, buffers, shape: gl.constexpr, features: gl.constexpr, T: gl.constexpr, CAREFUL: gl.constexpr
):  # fmt: skip
    """Add all queries of one head to the sums."""
    head, steps = walk.head, walk.steps
    length = head.place.length_q
    if steps.count > 0:
        start = start_of(steps, 0, shape.block_m, features, True)
        if T.bias_tiles:
            copy_bias(buffers.p, head, start, keys.start, shape.block_m, shape.block_n, True, gl.num_warps())
        fetch_queries(buffers, 0, queries, start, length, shape, True)
        fetch_gradients(buffers, 0, queries, start, length, shape, True)
        if features.mask != "none" and features.group == 1 and not CAREFUL:
            async_copy.wait_group(0)
            KEY_ROWS: gl.constexpr = shape.key_rows
            if some_infinite(buffers.k, KEY_ROWS):
                clear_keys(buffers, seen_by_head(walk, keys, shape, features, T), shape)
        for number in range(steps.n_partial):
            sums, start = gather(sums, start, number, walk, queries, keys, buffers, shape, features, T, True, CAREFUL)
        for number in range(steps.n_partial, steps.count):
            sums, start = gather(sums, start, number, walk, queries, keys, buffers, shape, features, T, False, CAREFUL)
    async_copy.wait_group(0)
    return sums


@gluon.jit
def walk_of(operands, band, place, index, start_k, last_k, shape: gl.constexpr, features: gl.constexpr):
    """Return query head `index` and the walk of the owned keys through its queries, a `HeadWalk`."""
    turned = head_of(operands, place, index, start_k, band_of(band, place, True), features)
    walk = plan_walk(turned, start_k, last_k, operands.lists, shape, features, True)
    steps = steps_of(part_of(walk, True), part_of(walk, False))
    reach = rows_in_reach(turned.mask, start_k, last_k, place.length_q, features)
    return HeadWalk(head_of(operands, place, index, start_k, band_of(band, place, False), features), steps, reach)


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def backward_kernel(
    query, key, value, bias, grad_out, log_sum, log_rest, delta, dq_sums, turns, dk, dv, dbias, key_sums, tiles, bits,
    q_segments, k_segments, start, end, hidden_from, hidden_to, seed, cu_seqlens_q, cu_seqlens_k,
    query_b, query_s, query_h, key_b, key_s, key_h, value_b, value_s, value_h, grad_out_b, grad_out_s, grad_out_h,
    dk_b, dk_s, dk_h, dv_b, dv_s, dv_h, dbias_q,
    bias_b, bias_h, bias_q, bias_group, tiles_b, tiles_h, tiles_w, bits_b, bits_h, bits_r, mask_group,
    q_segments_b, keys_b, keys_h, key_group, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin,
    blocks, dq_rows, heads, seqlen_q, seqlen_k, longest_q, longest_k, band_lo, band_hi, ratio, factor, softmax_scale,
    shape: gl.constexpr, features: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """Write dk and dv of one block of keys of one key head, add to dq, and write what is asked for of the bias.

    `tiles` are those of keys, `bits` those of queries. `dq_sums` `[B, H, dq_rows, columns]` are 0 at first (`finish.py`), and so
    are `turns` `[B, H, dq_rows / M]`, which are None unless additions to them have an order. The sums of dS over the queries go
    into `key_sums` `[B, H, Sk]`, and dS itself into `dbias` `[B, H, Sq, Sk]`, whose heads follow each other, unless these are None.
    Where `T.adds_to_bias`, dS is added to the tiles of `dbias` (`finish.sums_of_tile`) instead, which are 0 at first.
    """
    WARPS: gl.constexpr = gl.num_warps()
    SCORES: gl.constexpr = products(T.score_warps, WARPS // T.score_warps)
    KEYS: gl.constexpr = products(T.key_warps, WARPS // T.key_warps)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    M: gl.constexpr = shape.block_m
    N: gl.constexpr = shape.block_n
    KEY_ROWS: gl.constexpr = shape.key_rows
    VALUE_ROWS: gl.constexpr = shape.value_rows
    QUERY_ROWS: gl.constexpr = shape.query_rows
    OUT_ROWS: gl.constexpr = shape.out_rows
    HEAD: gl.constexpr = shape.padded_head
    VALUE: gl.constexpr = shape.padded_value
    GROUP: gl.constexpr = features.group
    WALKS: gl.constexpr = 1 if features.mask == "none" else 2
    dtype: gl.constexpr = query.dtype.element_ty
    lengths = Lengths(heads, seqlen_q, seqlen_k, longest_q, longest_k, cu_seqlens_q, cu_seqlens_k)
    lists = Lists(tiles, tiles_b, tiles_h, tiles_w, mask_group)
    operands = Operands(
        lists,
        MaskArrays(
            BitArray(bits, bits_b, bits_h, bits_r, mask_group),
            KeyArrays(k_segments, start, end, hidden_from, hidden_to, keys_b, keys_h, key_group),
            q_segments,
            q_segments_b,
        ),
        BiasArray(bias, bias_b, bias_h, bias_q, bias_group),
        Seeds(seed, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin),
        Factors(ratio, factor),
    )
    program = longest_first(blocks, ABREAST_IN_ORDER if T.ordered else ABREAST)
    place, start_k = program_of(program, lanes(), blocks, lengths, lists, shape, features, True)
    if start_k >= place.length_k:
        return

    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    buffers = Buffers(
        gl.allocate_shared_memory(dtype, [T.query_stages, M, QUERY_ROWS.padded], shared_rows(QUERY_ROWS.padded)),
        gl.allocate_shared_memory(dtype, [T.grad_stages, M, OUT_ROWS.padded], shared_rows(OUT_ROWS.padded)),
        gl.allocate_shared_memory(gl.float32, [T.query_stages, M], LINE),
        gl.allocate_shared_memory(gl.float32, [T.query_stages, M], LINE),
        gl.allocate_shared_memory(gl.float32, [T.grad_stages, M], LINE),
        gl.allocate_shared_memory(dtype, [N, KEY_ROWS.padded], shared_rows(KEY_ROWS.padded)),
        gl.allocate_shared_memory(dtype, [N, VALUE_ROWS.padded], shared_rows(VALUE_ROWS.padded)),
        gl.allocate_shared_memory(dtype, [M, N], shared_rows(N)),
        gl.allocate_shared_memory(dtype, [M, N], shared_rows(N)),
    )
    if T.same_strides:
        grad_out_s = query_s
    kv_head = place.head
    band = Band(band_lo, band_hi)
    last_k = last_owned(place, start_k, shape, True)
    own_keys = start_k + gl.arange(0, N, layout=COLUMN)
    first_walk = walk_of(operands, band, place, kv_head * GROUP, start_k, last_k, shape, features)
    reach = rows_in_reach(first_walk.head.mask, 0, place.length_q - 1, place.length_k, features)
    own = source_of(rows_of(key, key_b, key_s, key_h, place.batch, kv_head, place.k_begin), KEY_ROWS, WARPS)
    copy_rows(buffers.k, own, start_k, reach.begin, reach.end, KEY_ROWS, True, WARPS)
    own = source_of(rows_of(value, value_b, value_s, value_h, place.batch, kv_head, place.k_begin), VALUE_ROWS, WARPS)
    copy_rows(buffers.v, own, start_k, reach.begin, reach.end, VALUE_ROWS, True, WARPS)
    async_copy.commit_group()
    if features.mask != "none" and GROUP > 1:  # with one head, while the first queries are fetched
        async_copy.wait_group(0)
        if some_infinite(buffers.k, KEY_ROWS):
            seen = own_keys * 0
            for member in range(GROUP):
                walk = walk_of(operands, band, place, kv_head * GROUP + member, start_k, last_k, shape, features)
                keys = Keys(own_keys, key_marks(walk.head, own_keys, features), 0.0, start_k)
                seen = gl.maximum(seen, seen_by_head(walk, keys, shape, features, T))
            clear_keys(buffers, seen, shape)

    key_grad = gl.zeros([N, HEAD], gl.float32, layout=KEYS)
    value_grad = gl.zeros([N, VALUE], gl.float32, layout=KEYS)
    for CAREFUL in gl.static_range(WALKS):
        wanted = True
        if CAREFUL:
            wanted = some_nan(key_grad) | some_nan(value_grad)
        if wanted:
            key_grad = gl.zeros([N, HEAD], gl.float32, layout=KEYS)
            value_grad = gl.zeros([N, VALUE], gl.float32, layout=KEYS)
            for member in range(GROUP):
                index = kv_head * GROUP + member
                every_head = place.batch.to(gl.int64) * heads + index
                walk = first_walk
                if GROUP > 1 or CAREFUL:
                    walk = walk_of(operands, band, place, index, start_k, last_k, shape, features)
                head_dbias = None
                tile_sums = None
                if T.adds_to_bias:
                    tile_sums = dbias + sums_of_tile(index // bias_group, 0, start_k, dq_rows, seqlen_k, M, N)
                elif dbias is not None:
                    head_dbias = Bias(dbias + every_head * seqlen_q * dbias_q, dbias_q)
                sums_of_head = dq_sums + (every_head * dq_rows + first_sum(place, M, features)) * shape.padded_head
                queries = Queries(
                    source_of(
                        rows_of(query, query_b, query_s, query_h, place.batch, index, place.q_begin), QUERY_ROWS, WARPS
                    ),
                    source_of(
                        rows_of(grad_out, grad_out_b, grad_out_s, grad_out_h, place.batch, index, place.q_begin),
                        OUT_ROWS,
                        WARPS,
                    ),
                    statistics_of(log_sum, log_rest, delta, every_head * seqlen_q + place.q_begin),
                    sums_of_head,
                    None if turns is None else turns + every_head * (dq_rows // M),
                    head_dbias,
                    tile_sums,
                    walk.reach,
                )
                key_bias = 0.0
                if features.bias == "key":
                    key_bias = load_key_bias(walk.head, own_keys)[None, :]
                keys = Keys(own_keys, key_marks(walk.head, own_keys, features), key_bias, start_k)
                sums = Sums(key_grad, value_grad, gl.zeros([N], gl.float32, layout=COLUMN))
                sums = gather_head(sums, walk, queries, keys, buffers, shape, features, T, CAREFUL)
                if T.key_sums:
                    at = key_sums + every_head * seqlen_k + place.k_begin + own_keys
                    gl.store(at, sums.ds, mask=own_keys < place.length_k)
                key_grad = sums.dk
                value_grad = sums.dv

    if features.dropout:
        value_grad *= rescale
    dk = rows_of(dk, dk_b, dk_s, dk_h, place.batch, kv_head, place.k_begin)
    dv = rows_of(dv, dv_b, dv_s, dv_h, place.batch, kv_head, place.k_begin)
    store_columns(dk, key_grad * softmax_scale, start_k, place.length_k, 0, HEAD, KEY_ROWS)
    store_columns(dv, value_grad, start_k, place.length_k, 0, VALUE, VALUE_ROWS)
