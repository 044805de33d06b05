"""Forward with mma.sync: a program owns a block of queries and walks its keys, of which shared memory holds one step.

The rows of a warp are its own. So their largest scores and sums stay within four lanes, and P is the left operand of the second
product as it lies in registers. Values come while scores are computed, and the next keys while the weights are. FlashAttention-2
works in the same way (Dao, 2023, arXiv:2307.08691).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from dmattn_ops.kernels.ampere.copies import (
    copy_bias,
    copy_rows,
    keep_rows,
    products,
    shared_rows,
    source_of,
    store_columns,
    whole_slices,
)
from dmattn_ops.kernels.ampere.dropout import dropout_keep
from dmattn_ops.kernels.ampere.visible import (
    has_key_words,
    loaded_words,
    pairs_of_words,
    shown,
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
    share_of,
)
from dmattn_ops.kernels.portable.primitives import KeyRows, rows_of
from dmattn_ops.kernels.portable.scores import BiasArray, Factors, load_bias, load_key_bias, log2_unit
from dmattn_ops.kernels.portable.softmax import (
    RowResults,
    Softmax,
    finish_rows,
    least_peaks,
    scores_of,
    weights_of,
)
from dmattn_ops.kernels.portable.visibility import (
    BitArray,
    KeyArrays,
    MaskArrays,
    key_marks,
    query_marks,
    rows_in_reach,
    some_nan,
    visibility,
)


@dataclass(frozen=True, eq=False, repr=False)
class Traits(Constants):
    """What the kernel is compiled for besides blocks and features."""

    same_strides: bool  # rows of keys and of values are as far apart: addresses of both take the registers of one
    bias_tiles: bool  # a bias with queries is copied to shared memory as keys are
    held: bool  # queries stay in registers
    ahead: bool  # steps without a test compute the products of the next step beside their own weights


class Buffers(NamedTuple):
    """Shared memory."""

    q: Any  # [queries, columns]
    k: Any  # [keys, columns]
    v: Any  # [keys, columns of values]
    bias: Any  # [queries, keys], or None
    held: Any  # queries as `fragments`, or None
    other_k: Any  # second buffers of keys and values with `Traits.ahead`, or None
    other_v: Any


class Queries(NamedTuple):
    """The block of queries that a program owns."""

    rows: Any  # their numbers
    marks: Any
    start: Any
    reach: Any  # Reach: the keys that they may see


@gluon.constexpr_function
def first_part(width, padded):
    """Return how many columns of values, a power of two, their first product has: all, or half where fewer are left over."""
    return padded if padded < 64 or width > padded // 2 + padded // 4 else padded // 2


@gluon.constexpr_function
def second_part(width, padded):
    """Return how many columns their second product has, 0 where there is none."""
    half = padded // 2
    return 0 if padded < 64 or width > half + half // 2 else max(16, 1 << (width - half - 1).bit_length())


@gluon.jit
def fragments(q, FIRST: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Return columns `FIRST ... WIDTH` of queries as a tuple of what registers hold of 16 of them each."""
    parts = (q.slice(FIRST, 16, 1).load(gl.DotOperandLayout(0, LAYOUT, 2)),)
    if FIRST + 16 < WIDTH:
        parts = parts + fragments(q, FIRST + 16, WIDTH, LAYOUT)
    return parts


@gluon.jit
def columns_of(buffers, FIRST: gl.constexpr, LAYOUT: gl.constexpr):
    """Return 16 columns of queries as the left operand of a product."""
    if buffers.held is not None:
        part = buffers.held[FIRST // 16]
    else:
        part = buffers.q.slice(FIRST, 16, 1).load(gl.DotOperandLayout(0, LAYOUT, 2))
    return part


@gluon.jit
def multiply(buffers, k, M: gl.constexpr, N: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Return Q K^T `[M, N]`, 16 columns of the heads at a time; the next ones are fetched before each product."""
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 2)
    found = gl.zeros([M, N], gl.float32, layout=LAYOUT)
    left = columns_of(buffers, 0, LAYOUT)
    right = k.slice(0, 16, 1).permute([1, 0]).load(RIGHT)
    for first in gl.static_range(0, WIDTH, 16):
        next_left = left
        next_right = right
        if first + 16 < WIDTH:
            next_left = columns_of(buffers, first + 16, LAYOUT)
            next_right = k.slice(first + 16, 16, 1).permute([1, 0]).load(RIGHT)
        found = mma_v2(left, right, found)
        left = next_left
        right = next_right
    return found


@gluon.jit
def slices(p, M: gl.constexpr, N: gl.constexpr):
    """Return P `[M, N]` as a tuple of parts of 16 keys; no register moves."""
    if N > 16:
        left, right = gl.split(gl.permute(gl.reshape(p, [M, 2, N // 2]), [0, 2, 1]))
        parts = slices(left, M, N // 2) + slices(right, M, N // 2)
    else:
        parts = (p,)
    return parts


@gluon.jit
def add_values(p, v, acc, M: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Return acc + P V, 16 keys at a time; the values of the next ones are fetched before each product."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 2)
    parts = slices(p, M, N)
    values = v.slice(0, 16, 0).load(RIGHT)
    for number in gl.static_range(N // 16):
        next_values = values
        if (number + 1) * 16 < N:
            next_values = v.slice((number + 1) * 16, 16, 0).load(RIGHT)
        acc = mma_v2(gl.convert_layout(parts[number], LEFT, assert_trivial=True), values, acc)
        values = next_values
    return acc


@gluon.jit
def add_weighted(p, v, acc, shrink, shape: gl.constexpr, LAYOUT: gl.constexpr):
    """Return each part of acc times `shrink`, plus P V."""
    FIRST: gl.constexpr = first_part(shape.value_dim, shape.padded_value)
    SECOND: gl.constexpr = second_part(shape.value_dim, shape.padded_value)
    M: gl.constexpr = shape.block_m
    N: gl.constexpr = shape.block_n
    if SECOND == 0:
        acc = (add_values(p, v, acc[0] * shrink[:, None], M, N, LAYOUT),)
    else:
        left = add_values(p, v.slice(0, FIRST, 1), acc[0] * shrink[:, None], M, N, LAYOUT)
        right = add_values(p, v.slice(FIRST, SECOND, 1), acc[1] * shrink[:, None], M, N, LAYOUT)
        acc = (left, right)
    return acc


@gluon.jit
def sums_of_lanes(p, M: gl.constexpr, N: gl.constexpr):
    """Return the sums `[M, 4]` of what each of the four lanes of a row holds of P `[M, N]`."""
    return gl.sum(gl.sum(gl.reshape(p, [M, N // 8, 4, 2]), 1), 2)


@gluon.jit
def softmax_of_nothing(factors, shape: gl.constexpr, features: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the softmax of rows that have seen no key yet; `total` has the sums of each lane."""
    M: gl.constexpr = shape.block_m
    N: gl.constexpr = shape.block_n
    FIRST: gl.constexpr = first_part(shape.value_dim, shape.padded_value)
    SECOND: gl.constexpr = second_part(shape.value_dim, shape.padded_value)
    acc = (gl.zeros([M, FIRST], gl.float32, layout=LAYOUT),)
    if SECOND > 0:
        acc = (acc[0], gl.zeros([M, SECOND], gl.float32, layout=LAYOUT))
    zeros = gl.zeros([M], gl.float32, layout=gl.SliceLayout(1, LAYOUT))
    peak, base = least_peaks(zeros, factors, features)
    return Softmax(acc, peak, base, sums_of_lanes(gl.zeros([M, N], gl.float32, layout=LAYOUT), M, N))


@gluon.jit
def weigh(
    sums, found, words, start, queries, buffers, head, shape: gl.constexpr, features: gl.constexpr,
    PARTIAL: gl.constexpr, CAREFUL: gl.constexpr,
):  # fmt: skip
    """Add the keys from `start` on, whose values are in shared memory, by their products `found` with the queries.

    `words` are those of the keys (`visible.has_key_words`), or None. `CAREFUL`: values that nobody of the block sees may be NaN.
    """
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = products(WARPS, 1)
    M: gl.constexpr = shape.block_m
    N: gl.constexpr = shape.block_n
    VALUE_ROWS: gl.constexpr = shape.value_rows
    own_keys = start + gl.arange(0, N, layout=gl.SliceLayout(0, LAYOUT))
    added = 0.0
    if features.bias == "key":
        added = load_key_bias(head, own_keys)[None, :]
    if buffers.bias is not None:
        added = buffers.bias.load(LAYOUT).to(gl.float32)
    elif features.bias == "full":
        added = load_bias(head, queries.rows, own_keys, False, PARTIAL)
    score = scores_of(found, added, head.factors, features)
    if PARTIAL:
        if has_key_words(features):
            words = gl.convert_layout(words, gl.SliceLayout(0, LAYOUT))
            pairs = pairs_of_words(words, queries.rows, queries.start, features)
            visible = shown(pairs, features)
        else:
            marks = key_marks(head, own_keys, features)
            visible = visibility(head, queries.marks, marks, queries.rows, own_keys, start, features, False)
            pairs = visible
            if features.mask == "bits":
                pairs = words_of_rows(head, queries.rows, head.place.length_q, start, M, N, LAYOUT)
        score = where_visible(pairs, score, float("-inf"), features)
        if CAREFUL:
            keep_rows(buffers.v, gl.max(visible.to(gl.int32), 0), VALUE_ROWS, WARPS)
    weights = weights_of(score, sums.peak, sums.base, log2_unit(head.factors, features), features)
    of_lanes = sums_of_lanes(weights.p, M, N)
    shrink = gl.convert_layout(weights.shrink, gl.SliceLayout(1, of_lanes.type.layout), assert_trivial=True)
    total = sums.total * shrink[:, None] + of_lanes
    p = weights.p
    if features.dropout:
        p = gl.where(dropout_keep(head.dropout, queries.start, start, M, N, features, LAYOUT, True), p, 0.0)
    acc = add_weighted(p.to(buffers.v.dtype), buffers.v, sums.acc, weights.shrink, shape, LAYOUT)
    return Softmax(acc, weights.peak, weights.base, total)


@gluon.jit
def attend(
    sums, start, number, steps, queries, keys, buffers, head, shape: gl.constexpr, features: gl.constexpr,
    PARTIAL: gl.constexpr, CAREFUL: gl.constexpr,
):  # fmt: skip
    """Add the keys from `start` on, which are in shared memory, and return the sums and the start of the next step.

    The keys of that one are fetched meanwhile.
    """
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = products(WARPS, 1)
    M: gl.constexpr = shape.block_m
    N: gl.constexpr = shape.block_n
    KEY_ROWS: gl.constexpr = shape.key_rows
    VALUE_ROWS: gl.constexpr = shape.value_rows
    place, reach = head.place, queries.reach
    ahead = start_of(steps, number + 1, N, features, PARTIAL)
    async_copy.wait_group(0)  # Triton puts a barrier of the block behind it
    copy_rows(buffers.v, keys.value, start, reach.begin, reach.end, VALUE_ROWS, PARTIAL, WARPS)
    if buffers.bias is not None:
        copy_bias(buffers.bias, head, queries.start, start, M, N, PARTIAL, WARPS)
    async_copy.commit_group()
    words = None
    if PARTIAL and has_key_words(features):
        words = loaded_words(head, queries.start, start, M, N, features)
    found = multiply(buffers, buffers.k, M, N, whole_slices(KEY_ROWS.width), LAYOUT)
    async_copy.wait_group(0)
    copy_rows(buffers.k, keys.key, ahead, 0, place.length_k, KEY_ROWS, PARTIAL, WARPS)
    async_copy.commit_group()
    return weigh(sums, found, words, start, queries, buffers, head, shape, features, PARTIAL, CAREFUL), ahead


@gluon.jit
def fetch_ahead(k, v, start, later, keys, length, shape: gl.constexpr, CHECKED: gl.constexpr):
    """Wait for what comes; then fetch keys `later ...` and values `start ...`."""
    WARPS: gl.constexpr = gl.num_warps()
    KEY_ROWS: gl.constexpr = shape.key_rows
    VALUE_ROWS: gl.constexpr = shape.value_rows
    async_copy.wait_group(0)
    copy_rows(k, keys.key, later, 0, length, KEY_ROWS, CHECKED, WARPS)
    copy_rows(v, keys.value, start, 0, length, VALUE_ROWS, CHECKED, WARPS)
    async_copy.commit_group()


@gluon.jit
def attend_ahead(sums, start, number, steps, queries, keys, buffers, head, shape: gl.constexpr, features: gl.constexpr):
    """Add the steps from `number` on, an even number of steps without a test, and return the sums.

    The keys of the first, from `start` on, come to `buffers.k`. Products of a step are computed beside the weights of the one
    before it; those behind the last are not used.
    """
    LAYOUT: gl.constexpr = products(gl.num_warps(), 1)
    M: gl.constexpr = shape.block_m
    N: gl.constexpr = shape.block_n
    KEY_ROWS: gl.constexpr = shape.key_rows
    WIDTH: gl.constexpr = whole_slices(KEY_ROWS.width)
    length = head.place.length_k
    turned = Buffers(buffers.q, buffers.other_k, buffers.other_v, None, buffers.held, buffers.k, buffers.v)
    ahead = start_of(steps, number + 1, N, features, True)
    fetch_ahead(buffers.other_k, buffers.v, start, ahead, keys, length, shape, True)
    found = multiply(buffers, buffers.k, M, N, WIDTH, LAYOUT)
    for first in range(number, steps.count, 2):
        later = start_of(steps, first + 2, N, features, False)
        fetch_ahead(buffers.k, buffers.other_v, ahead, later, keys, length, shape, False)
        following = multiply(buffers, buffers.other_k, M, N, WIDTH, LAYOUT)
        sums = weigh(sums, found, None, start, queries, buffers, head, shape, features, False, False)
        start = later
        later = start_of(steps, first + 3, N, features, False)
        fetch_ahead(buffers.other_k, buffers.v, start, later, keys, length, shape, False)
        found = multiply(buffers, buffers.k, M, N, WIDTH, LAYOUT)
        sums = weigh(sums, following, None, ahead, queries, turned, head, shape, features, False, False)
        ahead = later
    return sums


@gluon.jit
def attend_share(
    queries, keys, steps, buffers, head, shape: gl.constexpr, features: gl.constexpr, T: gl.constexpr,
    CAREFUL: gl.constexpr,
):  # fmt: skip
    """Return the softmax after all steps, with the sums of whole rows."""
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = products(WARPS, 1)
    KEY_ROWS: gl.constexpr = shape.key_rows
    sums = softmax_of_nothing(head.factors, shape, features, LAYOUT)
    if steps.count > 0:
        start = start_of(steps, 0, shape.block_n, features, True)
        copy_rows(buffers.k, keys.key, start, 0, head.place.length_k, KEY_ROWS, True, WARPS)
        async_copy.commit_group()
        held = None
        if T.held:
            async_copy.wait_group(1)
            held = fragments(buffers.q, 0, whole_slices(KEY_ROWS.width), LAYOUT)
        own = Buffers(buffers.q, buffers.k, buffers.v, buffers.bias, held, buffers.other_k, buffers.other_v)
        for number in range(steps.n_partial):
            sums, start = attend(sums, start, number, steps, queries, keys, own, head, shape, features, True, CAREFUL)
        single = steps.count
        if T.ahead:
            single = steps.n_partial + (steps.count - steps.n_partial) % 2
        for number in range(steps.n_partial, single):
            sums, start = attend(sums, start, number, steps, queries, keys, own, head, shape, features, False, CAREFUL)
        if T.ahead:
            sums = attend_ahead(sums, start, single, steps, queries, keys, own, head, shape, features)
    async_copy.wait_group(0)
    total = gl.convert_layout(gl.sum(sums.total, 1), gl.SliceLayout(1, LAYOUT))
    return Softmax(sums.acc, sums.peak, sums.base, total)


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def forward_kernel(
    query, key, value, bias, out, lse, lse_tail, row_max, sink, tiles, bits,
    q_segments, k_segments, start, end, hidden_from, hidden_to, seed, cu_seqlens_q, cu_seqlens_k,
    query_b, query_s, query_h, key_b, key_s, key_h, value_b, value_s, value_h, out_b, out_s, out_h, out_split,
    lse_b, lse_h, lse_tail_b, lse_tail_h, row_max_b, row_max_h, lse_split,
    bias_b, bias_h, bias_q, bias_group, tiles_b, tiles_h, tiles_w, bits_b, bits_h, bits_r, mask_group,
    q_segments_b, keys_b, keys_h, key_group, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin,
    blocks, heads, seqlen_q, seqlen_k, longest_q, longest_k, band_lo, band_hi, ratio, factor,
    shape: gl.constexpr, features: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """Write out and the statistics of one block of queries, or of one share of its walk (`program_id(1)` says which)."""
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
    split = gl.program_id(1)
    splits = gl.num_programs(1)
    place, start_q = program_of(
        longest_first(blocks, gl.num_programs(0) // blocks), lanes(), blocks, lengths, lists, shape, features, False
    )
    if start_q >= place.length_q:
        return

    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = products(WARPS, 1)
    QUERY_ROWS: gl.constexpr = shape.query_rows
    KEY_ROWS: gl.constexpr = shape.key_rows
    VALUE_ROWS: gl.constexpr = shape.value_rows
    FIRST: gl.constexpr = first_part(shape.value_dim, shape.padded_value)
    SECOND: gl.constexpr = second_part(shape.value_dim, shape.padded_value)
    dtype: gl.constexpr = query.dtype.element_ty
    bias_tile = None
    if T.bias_tiles:
        bias_tile = gl.allocate_shared_memory(dtype, [shape.block_m, shape.block_n], shared_rows(shape.block_n))
    other_k = None
    other_v = None
    if T.ahead:
        other_k = gl.allocate_shared_memory(dtype, [shape.block_n, KEY_ROWS.padded], shared_rows(KEY_ROWS.padded))
        other_v = gl.allocate_shared_memory(dtype, [shape.block_n, VALUE_ROWS.padded], shared_rows(VALUE_ROWS.padded))
    buffers = Buffers(
        gl.allocate_shared_memory(dtype, [shape.block_m, QUERY_ROWS.padded], shared_rows(QUERY_ROWS.padded)),
        gl.allocate_shared_memory(dtype, [shape.block_n, KEY_ROWS.padded], shared_rows(KEY_ROWS.padded)),
        gl.allocate_shared_memory(dtype, [shape.block_n, VALUE_ROWS.padded], shared_rows(VALUE_ROWS.padded)),
        bias_tile,
        None,
        other_k,
        other_v,
    )
    own = source_of(
        rows_of(query, query_b, query_s, query_h, place.batch, place.head, place.q_begin), QUERY_ROWS, WARPS
    )
    copy_rows(buffers.q, own, start_q, 0, place.length_q, QUERY_ROWS, True, WARPS)
    async_copy.commit_group()
    kv_head = place.head // features.group
    if T.same_strides:
        value_s = key_s
    keys = KeyRows(
        source_of(rows_of(key, key_b, key_s, key_h, place.batch, kv_head, place.k_begin), KEY_ROWS, WARPS),
        source_of(rows_of(value, value_b, value_s, value_h, place.batch, kv_head, place.k_begin), VALUE_ROWS, WARPS),
    )
    head = head_of(operands, place, place.head, start_q, band_of(Band(band_lo, band_hi), place, False), features)
    last_q = last_owned(place, start_q, shape, False)
    walk = plan_walk(head, start_q, last_q, lists, shape, features, False)
    partial = share_of(part_of(walk, True), split, splits)
    steps = steps_of(partial, share_of(part_of(walk, False), split, splits))
    rows = start_q + gl.arange(0, shape.block_m, layout=gl.SliceLayout(1, LAYOUT))
    reach = rows_in_reach(head.mask, start_q, last_q, place.length_k, features)
    queries = Queries(rows, query_marks(head, rows, features), start_q, reach)
    sums = attend_share(queries, keys, steps, buffers, head, shape, features, T, False)
    if features.mask != "none":
        wanted = some_nan(sums.acc[0])
        if SECOND > 0:
            wanted = wanted | some_nan(sums.acc[1])
        if wanted:
            sums = attend_share(queries, keys, steps, buffers, head, shape, features, T, True)

    results = RowResults(
        lse, lse_b, lse_h, lse_tail, lse_tail_b, lse_tail_h, row_max, row_max_b, row_max_h, sink, rescale
    )
    scale = finish_rows(sums.peak, sums.total, rows, split.to(gl.int64) * lse_split, results, head, features)
    scale = gl.where(sums.total == 0.0, 0.0, scale)
    out += split.to(gl.int64) * out_split
    out = rows_of(out, out_b, out_s, out_h, place.batch, place.head, place.q_begin)
    OUT_ROWS: gl.constexpr = shape.out_rows
    made = gl.where((scale == 0.0)[:, None], 0.0, sums.acc[0] * scale[:, None])
    store_columns(out, made, start_q, place.length_q, 0, FIRST, OUT_ROWS)
    if SECOND > 0:
        made = gl.where((scale == 0.0)[:, None], 0.0, sums.acc[1] * scale[:, None])
        store_columns(out, made, start_q, place.length_q, FIRST, SECOND, OUT_ROWS)
