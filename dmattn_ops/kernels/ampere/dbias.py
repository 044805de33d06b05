"""The gradient of a bias with queries that batches or heads share, with mma.sync: a program owns a block of it.

For each batch and head that reads the block, dS is computed again from two products, and added up in registers. So there are no
additions in memory, and the sums are the same each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from dmattn_ops.call import TILE as _TILE
from dmattn_ops.call import Call
from dmattn_ops.choice.configurations import AmpereSharedBias
from dmattn_ops.kernels.ampere.arguments import LEAST_COLUMNS, bias_comes_in_tiles
from dmattn_ops.kernels.ampere.copies import (
    copy_bias,
    copy_numbers,
    copy_rows,
    product,
    products,
    shared_rows,
    source_of,
    whole_slices,
)
from dmattn_ops.kernels.ampere.dropout import dropout_keep
from dmattn_ops.kernels.ampere.visible import pairs_of, where_visible, words_of_rows
from dmattn_ops.kernels.constants import Constants
from dmattn_ops.kernels.portable.arguments import ROW_TENSORS, UNSPECIALIZED, Extent, shape_of
from dmattn_ops.kernels.portable.dbias import launch_blocks
from dmattn_ops.kernels.portable.dropout import Seeds, dropout_of
from dmattn_ops.kernels.portable.heads import Head
from dmattn_ops.kernels.portable.places import Band, Place, head_offset
from dmattn_ops.kernels.portable.primitives import Array, Statistics, rows_in, store_scores
from dmattn_ops.kernels.portable.scores import (
    Bias,
    BiasArray,
    Factors,
    bias_of,
    capped,
    load_bias,
    probabilities,
    score_gradient,
)
from dmattn_ops.kernels.portable.visibility import (
    BitArray,
    KeyArrays,
    MaskArrays,
    key_marks,
    mask_of_head,
)

TILE = gl.constexpr(_TILE)


@dataclass(frozen=True, eq=False, repr=False)
class Traits(Constants):
    """How the warps of a program share its products, and how many buffers it has."""

    score_warps: int  # along the queries
    stages: int  # buffers of what a member reads, 1 or 2
    bias_tiles: bool  # the bias is copied to shared memory, once for all members


class Buffers(NamedTuple):
    """Shared memory: each but the bias `[stages, ...]`."""

    q: Any
    grad_out: Any
    k: Any
    v: Any
    log_sum: Any
    log_rest: Any
    delta: Any
    bias: Any  # [queries, keys], or None


class Inputs(NamedTuple):
    """What dS is made of."""

    query: Any  # Array
    grad_out: Any
    key: Any
    value: Any
    statistics: Any  # primitives.Statistics, from the first row of all on
    heads: Any  # of queries


class States(NamedTuple):
    """States of tiles `[Bm, Hm, nQ, nK]`, 0 empty, 1 partial, 2 full (`portable.dbias.mark_tiles`), with strides."""

    states: Any
    states_b: Any
    states_h: Any
    states_q: Any
    group: Any  # query heads that share those of a head


@gluon.jit
def fetch_rows(shared, array, place, head, start, length, block: gl.constexpr, WARPS: gl.constexpr):
    """Fetch the rows `start ...` of a head into a buffer."""
    rows = rows_in(array, place.batch, head, place.k_begin)
    copy_rows(shared, source_of(rows, block, WARPS), start, 0, length, block, True, WARPS)


@gluon.jit
def fetch(buffers, stage, inputs, place, start_q, start_k, shape: gl.constexpr, features: gl.constexpr):
    """Fetch what the batch and the head of a `place` read."""
    WARPS: gl.constexpr = gl.num_warps()
    M: gl.constexpr = shape.block_m
    QUERY_ROWS: gl.constexpr = shape.query_rows
    OUT_ROWS: gl.constexpr = shape.out_rows
    KEY_ROWS: gl.constexpr = shape.key_rows
    VALUE_ROWS: gl.constexpr = shape.value_rows
    kv_head = place.head // features.group
    length_q, length_k = place.length_q, place.length_k
    fetch_rows(buffers.q.index(stage), inputs.query, place, place.head, start_q, length_q, QUERY_ROWS, WARPS)
    fetch_rows(buffers.k.index(stage), inputs.key, place, kv_head, start_k, length_k, KEY_ROWS, WARPS)
    fetch_rows(buffers.grad_out.index(stage), inputs.grad_out, place, place.head, start_q, length_q, OUT_ROWS, WARPS)
    fetch_rows(buffers.v.index(stage), inputs.value, place, kv_head, start_k, length_k, VALUE_ROWS, WARPS)
    first = (place.batch.to(gl.int64) * inputs.heads + place.head) * length_q
    copy_numbers(buffers.log_sum.index(stage), inputs.statistics.log_sum + first, start_q, length_q, M, WARPS)
    copy_numbers(buffers.log_rest.index(stage), inputs.statistics.log_rest + first, start_q, length_q, M, WARPS)
    copy_numbers(buffers.delta.index(stage), inputs.statistics.delta + first, start_q, length_q, M, WARPS)
    async_copy.commit_group()


@gluon.jit
def gradient_of(
    buffers, stage, head, start_q, start_k, shape: gl.constexpr, features: gl.constexpr, T: gl.constexpr,
    PARTIAL: gl.constexpr,
):  # fmt: skip
    """Return dS of one batch and head; `PARTIAL`: some pairs may be hidden."""
    WARPS: gl.constexpr = gl.num_warps()
    SCORES: gl.constexpr = products(T.score_warps, WARPS // T.score_warps)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    M: gl.constexpr = shape.block_m
    N: gl.constexpr = shape.block_n
    queries = start_q + gl.arange(0, M, layout=ROW)
    keys = start_k + gl.arange(0, N, layout=gl.SliceLayout(0, SCORES))
    pairs = None
    if PARTIAL and features.mask == "bits":  # on their way beside the products
        pairs = words_of_rows(head, queries, head.place.length_q, start_k, M, N, SCORES)
    zeros = gl.zeros([M, N], gl.float32, layout=SCORES)
    found = product(
        buffers.q.index(stage), buffers.k.index(stage).permute([1, 0]), zeros, whole_slices(shape.head_dim), SCORES
    )
    grad_p = product(
        buffers.grad_out.index(stage),
        buffers.v.index(stage).permute([1, 0]),
        zeros,
        whole_slices(shape.value_dim),
        SCORES,
    )
    found, _ = capped(found, head.factors, features)
    if buffers.bias is not None:
        added = buffers.bias.load(SCORES).to(gl.float32)
    else:
        added = load_bias(head, queries, keys, False, True)
    log_sum = buffers.log_sum.index(stage).load(ROW)
    log_rest = buffers.log_rest.index(stage).load(ROW)
    delta = buffers.delta.index(stage).load(ROW)
    p = probabilities(found, added, head.factors, log_sum[:, None], log_rest[:, None], features.natural)
    keep = True
    if features.dropout:
        keep = dropout_keep(head.dropout, start_q, start_k, M, N, features, SCORES, T.score_warps == WARPS)
    ds = score_gradient(p, grad_p, delta[:, None], keep, head.dropout, features.dropout)
    if PARTIAL:
        if pairs is None:
            pairs = pairs_of(head, queries, keys, key_marks(head, keys, features), start_q, start_k, features)
        ds = where_visible(pairs, ds, 0.0, features)
    return ds


@gluon.jit
def state_of(states, place, band, start_q, start_k, shape: gl.constexpr, features: gl.constexpr):
    """Return 0, 1 or 2: a head sees no pair of the block, some, or all."""
    end_q, end_k = start_q + shape.block_m, start_k + shape.block_n
    if features.listed:
        at = head_offset(place.batch, place.head // states.group, states.states_b, states.states_h) + start_k // TILE
        state = gl.load(states.states + at + (start_q // TILE).to(gl.int64) * states.states_q).to(gl.int32)
        state = gl.where(end_k > place.length_k, gl.minimum(state, 1), state)  # whatever lists hold
    else:
        state = ((end_k > start_q + band.lo) & (start_k < end_q + band.hi)).to(gl.int32)
        if features.mask == "none":
            state += ((start_k >= end_q - 1 + band.lo) & (end_k - 1 <= start_q + band.hi)).to(gl.int32)
    return state


@gluon.jit
def member_of(number, first, count, group):
    """Return the place of the batch and head with a `number` among those that read the block, the last one behind the end."""
    number = gl.minimum(number, count - 1)
    batch = first.batch + number // group
    head = first.head + number % group
    return Place(batch, batch, head, first.q_begin, first.length_q, first.k_begin, first.length_k, first.shift)


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def dbias_kernel(
    query, key, value, bias, grad_out, log_sum, log_rest, delta, dbias, states, bits,
    q_segments, k_segments, start, end, hidden_from, hidden_to, seed,
    query_b, query_s, query_h, key_b, key_s, key_h, value_b, value_s, value_h, grad_out_b, grad_out_s, grad_out_h,
    dbias_b, dbias_h, dbias_q,
    bias_b, bias_h, bias_q, bias_group, states_b, states_h, states_q, bits_b, bits_h, bits_r, mask_group,
    q_segments_b, keys_b, keys_h, key_group, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin,
    blocks, key_blocks, dbias_heads, batches, heads, seqlen_q, seqlen_k, band_lo, band_hi, ratio, factor,
    shape: gl.constexpr, features: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """Write one block of dbias `[parts, heads, Sq, Sk]`: the sum of dS over `batches` batches and `bias_group` heads."""
    WARPS: gl.constexpr = gl.num_warps()
    SCORES: gl.constexpr = products(T.score_warps, WARPS // T.score_warps)
    M: gl.constexpr = shape.block_m
    N: gl.constexpr = shape.block_n
    masks = MaskArrays(
        BitArray(bits, bits_b, bits_h, bits_r, mask_group),
        KeyArrays(k_segments, start, end, hidden_from, hidden_to, keys_b, keys_h, key_group),
        q_segments,
        q_segments_b,
    )
    biases = BiasArray(bias, bias_b, bias_h, bias_q, bias_group)
    seeds = Seeds(seed, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin)
    inputs = Inputs(
        Array(query, query_b, query_s, query_h),
        Array(grad_out, grad_out_b, grad_out_s, grad_out_h),
        Array(key, key_b, key_s, key_h),
        Array(value, value_b, value_s, value_h),
        Statistics(log_sum, log_rest, delta),
        heads,
    )
    seen = States(states, states_b, states_h, states_q, mask_group)
    band = Band(band_lo, band_hi)
    program = gl.program_id(0)
    start_k = program % key_blocks * N
    start_q = program // key_blocks % blocks * M
    first_head = program // key_blocks // blocks % dbias_heads * bias_group
    written = program // key_blocks // blocks // dbias_heads
    first_batch = written * batches
    zero = program * 0
    first = Place(first_batch, first_batch, first_head, zero, seqlen_q, zero, seqlen_k, zero)
    count = batches * bias_group
    HEAD: gl.constexpr = shape.padded_head
    VALUE: gl.constexpr = shape.padded_value
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = query.dtype.element_ty
    bias_tile = None
    if T.bias_tiles:
        bias_tile = gl.allocate_shared_memory(dtype, [M, N], shared_rows(N))
    buffers = Buffers(
        gl.allocate_shared_memory(dtype, [T.stages, M, HEAD], shared_rows(HEAD)),
        gl.allocate_shared_memory(dtype, [T.stages, M, VALUE], shared_rows(VALUE)),
        gl.allocate_shared_memory(dtype, [T.stages, N, HEAD], shared_rows(HEAD)),
        gl.allocate_shared_memory(dtype, [T.stages, N, VALUE], shared_rows(VALUE)),
        gl.allocate_shared_memory(gl.float32, [T.stages, M], LINE),
        gl.allocate_shared_memory(gl.float32, [T.stages, M], LINE),
        gl.allocate_shared_memory(gl.float32, [T.stages, M], LINE),
        bias_tile,
    )
    if T.bias_tiles:
        own = Head(first, 0, bias_of(biases, first, first_head, features), 0, 0, 0)
        copy_bias(buffers.bias, own, start_q, start_k, M, N, True, WARPS)
    if count > 0:  # batches may be empty
        fetch(buffers, 0, inputs, first, start_q, start_k, shape, features)
    total = gl.zeros([M, N], gl.float32, layout=SCORES)
    for number in range(count):
        place = member_of(number, first, count, bias_group)
        later = member_of(number + 1, first, count, bias_group)
        stage = number % T.stages
        async_copy.wait_group(0)  # Triton puts a barrier of the block behind it
        if T.stages == 2:
            fetch(buffers, 1 - stage, inputs, later, start_q, start_k, shape, features)
        state = state_of(seen, place, band, start_q, start_k, shape, features)
        head = Head(
            place,
            0,
            bias_of(biases, place, place.head, features),
            dropout_of(seeds, place, place.head, features),
            mask_of_head(masks, place, place.head, band, features),
            Factors(ratio, factor),
        )
        for PARTIAL in gl.static_range(2):
            if state == 2 - PARTIAL:
                total += gradient_of(buffers, stage, head, start_q, start_k, shape, features, T, PARTIAL)
        if T.stages == 1:
            fetch(buffers, 0, inputs, later, start_q, start_k, shape, features)
    async_copy.wait_group(0)
    made = Bias(dbias + head_offset(written, first_head // bias_group, dbias_b, dbias_h), dbias_q)
    queries = start_q + gl.arange(0, M, layout=gl.SliceLayout(1, SCORES))
    keys = start_k + gl.arange(0, N, layout=gl.SliceLayout(0, SCORES))
    store_scores(made, total, queries, keys, first)


def broadcast_dbias(
    call: Call, arguments: dict[str, Any], size: Extent, dbias: Tensor, config: AmpereSharedBias
) -> None:
    """Write dbias `[B|1, H|Hkv|1, Sq, Sk]`: a program for each of its blocks."""
    launch_blocks(
        dbias_kernel,
        call,
        arguments,
        size,
        dbias,
        shape=shape_of(call, config.block_m, config.block_n, True, LEAST_COLUMNS),
        T=Traits(config.score_warps, config.stages, bias_comes_in_tiles(call)),
        num_warps=config.num_warps,
    )
