"""The gradient of a bias with queries that batches or heads share, on SM 9.0: what is refused, the buffers, and the launch."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.call import TILE, UNBOUNDED, Call, Gradients, Saved, bias_kind
from dmattn_ops.choice import arch
from dmattn_ops.choice.config import HopperBackward, HopperBackward256, HopperSharedBias
from dmattn_ops.kernels.hopper.arguments import (
    bias_places,
    column_parts,
    dropout_arguments,
    mask_arguments,
    score_factors,
    sizes_of,
)
from dmattn_ops.kernels.hopper.columns import pair
from dmattn_ops.kernels.hopper.dbias.steps import allocate, consumer, producer
from dmattn_ops.kernels.hopper.dbias.types import AllRows, Members, Problem, States, Traits, Walk, test_of
from dmattn_ops.kernels.hopper.dropout import Dropout
from dmattn_ops.kernels.hopper.kinds import kind_of
from dmattn_ops.kernels.hopper.scores import Bias, Exact, Scales
from dmattn_ops.kernels.hopper.statistics import Statistics
from dmattn_ops.kernels.hopper.views import STEP, Maps, MaskTensors, band_view, block_of, mask_of
from dmattn_ops.kernels.portable.arguments import broadcast_stride
from dmattn_ops.kernels.portable.dbias import (
    ADDED_UP,
    add_parts,
    dbias_arguments,
    divisors,
    mark_tiles,
    recompute_dbias,
    reduction,
    room_for_parts,
)
from dmattn_ops.launching.launch import computed, launch
from dmattn_ops.launching.tensor_maps import rows_map

MAX_DIM = 128
KEYS = STEP.value  # of a step
SMALL_BUFFERS = 3072  # bytes of shared memory for barriers, and for what the compiler exchanges between warps
LEAST_STAGES = 3  # buffers of keys and of values: with two, a step waits for its own loads
PROLOGUE = 4  # blocks of keys of `FEW_MEMBERS` or fewer members in whose time a program begins and loads its queries
FEW_MEMBERS = 4
MOST_SPLITS = 16
INTEGERS = (
    "list_b list_h list_width bits_b bits_h bits_row q_segments_b k_segments_b k_segments_h mask_group segment_group "
    "states_b states_h states_q states_group bias_group dbias_heads batches seed_b seed_h "
    "last_dropped q_origin k_origin heads kv_group stat_rows band_lo band_hi heads_per_group n_sums splits "
    "blocks_of_split n_flags total"
).split()


@gluon.jit(do_not_specialize=INTEGERS)
def shared_bias_kernel(
    q_map, k_map, v_map, o_map, q2_map, k2_map, v2_map, o2_map, stats, flags,
    lists, bits, q_segments, k_segments, start, end, hidden_from, hidden_to, states, bias, dbias, seed,
    list_b, list_h, list_width, bits_b, bits_h, bits_row, q_segments_b, k_segments_b, k_segments_h, mask_group, segment_group,
    states_b, states_h, states_q, states_group, bias_b, bias_h, bias_q, dbias_b, dbias_h, dbias_q, bias_group, dbias_heads,
    batches, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin, scale, scale_log2, heads, kv_group,
    seqlen_q, seqlen_k, stat_rows, band_lo, band_hi, heads_per_group, n_sums, splits, blocks_of_split, n_flags, total,
    T: gl.constexpr,
):  # fmt: skip
    """Write dbias `[parts, heads, Sq, Sk]`: a program for each 128 queries of each of `splits` parts of the keys of a head.

    Each of these `n_sums` heads is a sum over `batches` batches. `stats` are the statistics of all `total` rows
    (`hopper/statistics.py`), and `flags` the flags beside them, of which `n_flags` are those of so many batches.
    RESIDENT: there are as many QUERY_BUFFERS as members, and CHUNKS is 1; otherwise there are two.
    """
    maps = Maps(
        pair(q_map, q2_map, T.D2), pair(k_map, k2_map, T.D2), pair(v_map, v2_map, T.DV2), pair(o_map, o2_map, T.DV2)
    )
    filled, smem = allocate(maps, T)
    n_tiles = (seqlen_q + 2 * STEP - 1) // (2 * STEP)
    rank, index = block_of(gl.program_id(0), n_tiles * splits, n_sums, heads_per_group)
    split = rank // n_tiles
    tile = rank - split * n_tiles
    if T.HAS_HI:
        tile = n_tiles - 1 - tile  # the last queries see the most keys
    written = index // dbias_heads
    head = index - written * dbias_heads
    batch = written * batches
    flags += written.to(gl.int64) * n_flags
    members = Members(batch, head * bias_group, bias_group, batches * bias_group)
    mask = MaskTensors(lists, bits, q_segments, k_segments, start, end, hidden_from, hidden_to, list_b, list_h, list_width, bits_b,
                       bits_h, bits_row, q_segments_b, k_segments_b, k_segments_h, mask_group, segment_group)  # fmt: skip
    row = tile * 2 * STEP
    view = band_view(mask_of(mask, batch, test_of(T)), row, 2 * STEP, seqlen_q, band_lo, band_hi, seqlen_k, False)
    blocks = (seqlen_k + T.CHUNKS * STEP - 1) // (T.CHUNKS * STEP)
    first = split * blocks_of_split
    walk = Walk(row, first, gl.minimum(first + blocks_of_split, blocks), seqlen_q, seqlen_k, view)
    of_states = States(states, states_b, states_h, states_q, states_group)
    bias += batch.to(gl.int64) * bias_b + head.to(gl.int64) * bias_h
    dbias += written.to(gl.int64) * dbias_b + head.to(gl.int64) * dbias_h
    rows = AllRows(stats, heads, stat_rows, total.to(gl.int64))
    of_head = Bias(bias, 0, 1, bias_q, 1.0 / scale, bias, 0, seqlen_q, seqlen_k)
    scales = Scales(scale_log2, 0.0, 0.0, scale)
    dropout = Dropout(seed, seed_b, seed_h, last_dropped, rescale, q_origin, k_origin)
    problem = Problem(
        members, of_states, mask, rows, scales, Exact(0, stats, stats), flags, n_flags, of_head, dropout, dbias, dbias_q
    )
    gl.warp_specialize([
        (consumer, (smem, walk, problem, 0, T)),
        (consumer, (smem, walk, problem, 1, T)),
        (producer, (maps, filled, walk, problem, kv_group, T)),
    ], [4, 1], [232, 40])  # fmt: skip


class Plan(NamedTuple):
    """How shared memory is used."""

    resident: bool  # the queries of all members stay
    query_buffers: int
    stages: int
    chunks: int


def refusals(call: Call) -> list[str]:
    """Return every reason why a portable kernel has to write dbias instead."""
    dims = call.query.shape[-1], call.value.shape[-1]
    return [f"head dimensions {dims} are over {MAX_DIM}"] * (max(dims) > MAX_DIM)


def notes(call: Call) -> list[str]:
    """Return the lines of `explain` about the gradient of a call's bias."""
    if bias_kind(call.bias) != "full":
        return []
    reasons = refusals(call)
    if reasons:
        return [f"the portable kernel computes the gradient of the bias: {'; '.join(reasons)}"]
    return ["a kernel of its own computes the gradient of the bias (shared_bias_kernel)"]


def plan_of(members: int, columns: int, shared_memory: int, config: HopperSharedBias) -> Plan:
    """Return the buffers of a call whose bias has `members`; `columns` are those of a key and its value."""
    room = shared_memory - SMALL_BUFFERS
    of_queries, of_keys = 2 * KEYS * columns * 2, KEYS * columns * 2  # bytes
    stages = (room - members * of_queries) // of_keys
    if stages >= LEAST_STAGES:
        return Plan(True, members, min(stages, config.stages), 1)
    return Plan(False, 2, min((room - 2 * of_queries) // of_keys, config.stages), config.chunks)


class Division(NamedTuple):
    """In how many parts a sum is computed."""

    keys: int  # parts of the blocks of keys
    batches: int  # parts of the batches, whose sums are added up behind the kernel


def division_of(programs: int, blocks: int, batches: int, group: int, sms: int) -> Division:
    """Return in how many parts blocks of keys and batches of `group` heads are divided, so that programs fill all SMs equally."""

    begins = PROLOGUE * min(batches * group, FEW_MEMBERS)

    def time(parts: Division) -> int:
        of_block = batches // parts.batches * group + (ADDED_UP if parts.batches > 1 else 0)
        of_program = begins + -(-blocks // parts.keys) * of_block
        return -(-programs * parts.keys * parts.batches // sms) * of_program

    keys = range(1, max(1, min(blocks, MOST_SPLITS)) + 1)
    return min((Division(*each) for each in itertools.product(keys, divisors(batches))), key=time)


def bias_gradient(
    call: Call,
    saved: Saved,
    grads: Gradients,
    statistics: Statistics,
    key_sums: Tensor | None,
    config: HopperBackward | HopperBackward256,
) -> None:
    """Write the gradient of a call's bias, if one is wanted: of one per key from `key_sums`, of one with queries by a kernel.

    `grads.grad_out` must be mappable.
    """
    if grads.dbias is None:
        return
    if bias_kind(call.bias) != "full":
        computed(*reduction(key_sums, grads.dbias, one_by_one=call.options.batch_invariant))
    elif config.shared_bias is not None and not refusals(call):
        write_dbias(call, grads.grad_out, statistics, grads.dbias, config.shared_bias)
    else:
        assert config.dbias is not None
        recompute_dbias(call, saved, grads, config.dbias)


def write_dbias(call: Call, grad_out: Tensor, statistics: Statistics, dbias: Tensor, config: HopperSharedBias) -> None:
    """Write dbias `[B|1, H|Hkv|1, Sq, Sk]` of a call that `refusals` accepts; `grad_out` must be mappable."""
    query, key, value, bias, mask, options = call.query, call.key, call.value, call.bias, call.mask, call.options
    batch, seqlen_q, seqlen_k, heads, kv_heads = sizes_of(call)
    (width, second), (width_v, second_v) = column_parts(query.shape[-1]), column_parts(value.shape[-1])
    group = bias_places(bias, heads).bias_group
    on = arch.physical(query.device)
    sums, tiles = dbias.shape[0] * dbias.shape[1], -(-seqlen_q // TILE)
    shared = batch if dbias.shape[0] == 1 else 1
    parts = division_of(sums * tiles, -(-seqlen_k // KEYS), shared, group, on.num_sms)
    written = room_for_parts(call, dbias, parts.batches)
    batches = shared // parts.batches
    plan = plan_of(batches * group, width + second + width_v + second_v, on.shared_memory, config)
    given = mask_arguments(mask.row_tiles, mask.row_bits, mask, heads, seqlen_q, statistics.rows)
    of_states: dict[str, Any] = {"states": None, "states_b": 0, "states_h": 0, "states_q": 0, "states_group": 1}
    if mask.row_tiles is not None:
        states = mark_tiles(mask.row_tiles, -(-seqlen_k // TILE))
        of_states = {
            "states": states, "states_b": broadcast_stride(states, 0), "states_h": broadcast_stride(states, 1),
            "states_q": states.stride(2), "states_group": heads // states.shape[1],
        }  # fmt: skip
    has_lo, has_hi = options.band_lo > -UNBOUNDED, options.band_hi < UNBOUNDED
    equal = mask.kind == "none" and not has_lo and not has_hi
    blocks = -(-seqlen_k // (plan.chunks * KEYS))
    splits = min(parts.keys, blocks)
    traits = Traits(
        width, second, width_v, second_v, plan.stages, plan.chunks, plan.query_buffers, plan.resident, kind_of(call),
        HAS_LO=has_lo, HAS_HI=has_hi, HIDDEN=mask.hidden_from is not None, DROPOUT=options.dropout_p > 0.0,
    )  # fmt: skip
    tensors = query, key, value, grad_out
    firsts = zip(tensors, (width, width, width_v, width_v), strict=True)
    seconds = zip(tensors, (second, second, second_v, second_v), strict=True)
    launch(
        shared_bias_kernel, (sums * tiles * splits * parts.batches,),
        *(rows_map(tensor, KEYS, wide) for tensor, wide in firsts),
        *(rows_map(tensor, KEYS, wide) if wide else None for tensor, wide in seconds),
        statistics.rows, statistics.flags, **given._asdict(), **of_states, bias=bias, **bias_places(bias, heads)._asdict(),
        **dbias_arguments(written), dbias_heads=dbias.shape[1],
        batches=batches, **dropout_arguments(call)._asdict(), scale=options.softmax_scale, scale_log2=score_factors(options)[0],
        heads=heads, kv_group=heads // kv_heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k, stat_rows=statistics.rows_of_head,
        band_lo=options.band_lo, band_hi=options.band_hi, heads_per_group=1 if equal else config.heads_per_group,
        n_sums=sums * parts.batches, splits=splits, blocks_of_split=-(-blocks // splits),
        n_flags=statistics.n_flags // batch * batches, total=batch * heads * statistics.rows_of_head,
        T=traits, num_warps=4,
    )  # fmt: skip
    add_parts(dbias, written)
