"""Launch the SM 9.0 backward: what it refuses, its tensor maps, and its two kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from dmattn_ops.call import (
    HEADER,
    TILE,
    UNBOUNDED,
    Call,
    Gradients,
    Options,
    Saved,
    Takes,
    bias_kind,
    dropout_scale,
    in_natural_units,
    is_unshared,
    mappable,
)
from dmattn_ops.choice import arch
from dmattn_ops.choice.config import HopperBackward
from dmattn_ops.kernels.hopper.arguments import (
    LEAST_HEADS,
    bias_places,
    chunk_of_tiles,
    column_parts,
    delta_factor,
    dropout_arguments,
    dropout_refusals,
    even_groups,
    heads_that_balance,
    hides_rows,
    room_for_key_sums,
    row_strides,
    score_factors,
    sizes_of,
    statistic_strides,
    too_long,
    unused_refusals,
)
from dmattn_ops.kernels.hopper.backward.kernel import backward_kernel
from dmattn_ops.kernels.hopper.backward.rows import RowTraits, prepare_kernel
from dmattn_ops.kernels.hopper.backward.shares import add_shares, parts_of
from dmattn_ops.kernels.hopper.backward.types import Mask, Traits, rows_of_flag
from dmattn_ops.kernels.hopper.behind import backward_with
from dmattn_ops.kernels.hopper.dbias.launch import notes as notes
from dmattn_ops.kernels.hopper.gluon_compat import VIEWS_ARE_WHOLE
from dmattn_ops.kernels.hopper.kinds import kind_of
from dmattn_ops.kernels.hopper.scores import BIAS_KINDS
from dmattn_ops.kernels.hopper.statistics import Made, Statistics
from dmattn_ops.kernels.portable.again import COUNTS
from dmattn_ops.kernels.portable.arguments import broadcast_stride
from dmattn_ops.kernels.ragged import WORDS
from dmattn_ops.kernels.ragged import tiles_of as ragged_tiles
from dmattn_ops.kernels.sinks import add_parts, parts_of_gradient
from dmattn_ops.launching.launch import launch, workspace
from dmattn_ops.launching.tensor_maps import plain_map, rows_map

TAKES = Takes(("none", "bits", "segments", "intervals"), sinks=True, oldest=90, newest=90)
MAX_DIM = 128
FEW_ROUNDS = 4  # blocks for each SM, up to which all heads go side by side: the last blocks to start are short then
# Interleaved: tiles of a head that start together read the same; rows of 3 to 8 differ by 1%, those of 1 cost 1 to 15%
RANKS_IN_ROW = 5
# Where no list has room for more than half of the query tiles, as of packed keys: the share of L2 that may be taken by what a group
# of heads reads and adds to. Such blocks are about as long as each other, so that few heads keep SMs busy (H200, 2026-11-24,
# bf16, D 128, 8192 positions with 1024 kept: 16 heads two by two 0.501 ms, eight by eight 0.514; 32 that share 8 0.801, 0.831).
SHARE_OF_SHORT_LISTS = 0.4
# Of packed sequences (H200, 2026-11-24, bf16, 16 heads of D 128): 24 sequences of 64 to 2000 take 1.01 ms, and 1.53 with all heads
# and all tiles by their work; four heads at once take 0.99, but 1 to 6% more where one sequence is much longer than the others.
PACKED_HEADS = 8
ROUNDS_OF_CHUNKS = 0.5
TICKETS = COUNTS  # two counts of what programs have drawn, what `unseen.note_nan` writes, and what follows is aligned
STATISTICS = 4  # of a row: lse, delta and the pair (`rows.py`)
TILES_AT_ONCE = 4  # of dq, that a program draws where there are many


def refusals(call: Call) -> list[str]:
    """Return every reason why this kernel cannot take the request; none means that `backward` will."""
    query, key, value, bias = call.query, call.key, call.value, call.bias
    mask, varlen, options = call.mask, call.varlen, call.options
    dim, dim_v = query.shape[-1], value.shape[-1]
    reasons = {
        "a bias with queries under a soft cap": bias_kind(bias) == "full" and options.softcap != 0.0,
        "a bias that nothing shares (the portable kernels write its gradient as they go)": is_unshared(call),
        "a bias with queries and a scale of 0": bias_kind(bias) == "full" and options.softmax_scale == 0.0,
        "dropout of all weights": options.dropout_p > 0.0 and dropout_scale(options.dropout_p) == 0.0,
        "dropout at a scale of 0": options.dropout_p > 0.0 and options.softmax_scale == 0.0,
        "deterministic accumulation of dq over listed tiles": options.deterministic and mask.kind != "none",
        "deterministic accumulation of dq of variable lengths": options.deterministic and varlen is not None,
        f"dtype {query.dtype}": query.dtype not in (torch.bfloat16, torch.float16),
        f"head dimensions {dim} and {dim_v} above {MAX_DIM}": max(dim, dim_v) > MAX_DIM,
        f"head dimensions {dim} and {dim_v} that are no multiples of 8": dim % 8 != 0 or dim_v % 8 != 0,
        "intervals whose lists of tiles would be too long": varlen is None and too_long(call),
        f"head dimensions {dim} and {dim_v} in two parts with triton 3.8": VIEWS_ARE_WHOLE
        and _in_two_parts(dim, dim_v),
    }
    found = [f"the SM 9.0 backward does not support {name}" for name, holds in reasons.items() if holds]
    found += [f"the SM 9.0 backward {reason}" for reason in dropout_refusals(call)] + unused_refusals(call)
    named = (("query", query), ("key", key), ("value", value))
    return found + [f"{name}: TMA needs 16-byte aligned data and strides" for name, t in named if not mappable(t)]


def _steps(tensor: Tensor, heads: int, kv_heads: int) -> tuple[int, int, int]:
    """Return strides (batch, key head, query head of a group) of a mask `[Bm, Hm, ...]`, 0 where it broadcasts."""
    batch, head = broadcast_stride(tensor, 0), broadcast_stride(tensor, 1)
    if tensor.shape[1] == kv_heads and kv_heads != heads:
        return batch, head, 0
    return batch, head * (heads // kv_heads), head


def _mask_of(call: Call, unused: Tensor, block_n: int) -> Mask:
    """Return a call's mask as the kernel takes it.

    Tensors that a kind does not have are `unused`, so that no kernel is compiled for their absence.
    """
    mask, sizes = call.mask, sizes_of(call)
    heads, kv_heads = sizes.heads, sizes.kv_heads
    given = Mask(*[unused] * 8, *[0] * 12)
    if call.varlen is not None:
        chunk = chunk_of_tiles(even_groups(kv_heads, PACKED_HEADS), ROUNDS_OF_CHUNKS, call.query.device)
        records = ragged_tiles(call, block_n, of_keys=True, chunk=chunk, follows=True)
        return given._replace(lists=records, list_width=WORDS)
    if mask.col_tiles is None:
        return given
    batch, head, step = _steps(mask.col_tiles, heads, kv_heads)
    given = given._replace(
        lists=mask.col_tiles, list_b=batch, list_kv=head, list_step=step, list_width=mask.col_tiles.shape[-1]
    )
    if mask.col_bits is not None:
        bits = mask.col_bits.view(torch.int64)
        batch, head, step = _steps(bits, heads, kv_heads)
        return given._replace(bits=bits, bits_b=batch, bits_kv=head, bits_step=step, bits_row=bits.shape[-1])
    numbers = mask.k_segments if mask.start is None else mask.start
    assert numbers is not None
    batch, head, step = _steps(numbers, heads, kv_heads)
    given = given._replace(k_segments_b=batch, k_segments_kv=head, k_segments_step=step)
    if mask.start is not None:
        hidden = [unused if part is None else part for part in (mask.hidden_from, mask.hidden_to)]
        return given._replace(start=mask.start, end=mask.end, hidden_from=hidden[0], hidden_to=hidden[1])
    given = given._replace(k_segments=numbers)
    if mask.q_segments is None:
        return given
    return given._replace(q_segments=mask.q_segments, q_segments_b=broadcast_stride(mask.q_segments, 0))


def _interleaved(call: Call) -> bool:
    """Return whether the query heads of a group take turns at each query tile, which costs up to 3%.

    Under a causal mask the blocks of a key head have different lengths, so that head by head they drift apart; what they
    then read and add to, all of a group's query, grad_out and dq, should stay in L2, beside that of other groups (H200, D 128,
    B2 H32/4 S4096: 1.23 ms, and 1.35 head by head). Where additions to dq have an order, blocks may not drift apart: head by head,
    a shorter one would wait at each head for the longer one before it.
    """
    _, seqlen_q, _, heads, kv_heads = sizes_of(call)
    options = call.options
    of_group = heads // kv_heads * seqlen_q * _bytes_of_row(call)
    causal = options.band_hi < UNBOUNDED and options.band_lo == -UNBOUNDED and call.varlen is None
    plain = call.bias is None and call.mask.col_tiles is None and not options.dropout_p
    takes = causal and plain and heads != kv_heads
    return takes and (options.deterministic or 2 * of_group > arch.physical(call.query.device).l2_bytes)


def _bytes_of_row(call: Call) -> int:
    """Return the bytes of a query in query and grad_out, and of its sum of dq, taken as wide as query."""
    return call.query.shape[-1] * (2 * call.query.itemsize + 4)


def _order(
    call: Call, blocks_per_head: int, interleaved: bool, options: Options, config: HopperBackward, sms: int
) -> tuple[int, int, int]:
    """Return how blocks are numbered: heads_per_group, first_ranks and ranks_in_row of `work.block_of`."""
    device = call.query.device
    batch, seqlen_q, _, heads, kv_heads = sizes_of(call)
    if call.varlen is not None:
        return even_groups(kv_heads, PACKED_HEADS), 0, 1
    causal = options.band_lo == -UNBOUNDED and options.band_hi < UNBOUNDED
    if options.deterministic:
        return config.ordered_causal_heads if causal else config.ordered_heads, 0, 1
    if interleaved:
        # as many of a head start together as it has SMs, where about as many shorter ones are left to even out the ends
        first = sms // LEAST_HEADS
        return LEAST_HEADS, first if blocks_per_head > 1.8 * first else 0, RANKS_IN_ROW
    if call.mask.col_tiles is None and options.band_lo == -UNBOUNDED and options.band_hi == UNBOUNDED:
        return LEAST_HEADS, 0, blocks_per_head  # blocks of the same length: head by head
    blocks, of_head = batch * kv_heads * blocks_per_head, seqlen_q * _bytes_of_row(call)
    if blocks <= FEW_ROUNDS * sms and batch * heads * of_head <= arch.physical(device).l2_bytes:
        return batch * kv_heads, 0, 1
    lists = call.mask.col_tiles
    if lists is not None and call.mask.start is not None and 2 * TILE * (lists.shape[-1] - HEADER) <= seqlen_q:
        of_group = heads // kv_heads * of_head
        at_once = int(SHARE_OF_SHORT_LISTS * arch.physical(device).l2_bytes / of_group)
        return even_groups(batch * kv_heads, max(1, at_once)), 0, 1
    # Where there are many groups, what the last one leaves idle is little, and L2 holds more of fewer heads: 256 heads of 2048 took
    # 4% less in groups of four at D 64, 128 heads of 4096 took 1%, and at D 128 256 heads of 2048 1%. Query heads that share keys
    # read more: then busy SMs are worth more only where blocks of eight key heads fit the SMs at once. With 32 query
    # and 8 key heads, four sequences of 2048 took 5% less, and one or two of 4096 took 3% more.
    shared = heads != kv_heads and 2 * LEAST_HEADS * blocks_per_head > sms
    if causal and lists is None and blocks <= 2 * FEW_ROUNDS * sms and not shared:
        return heads_that_balance(blocks_per_head, batch * kv_heads, device), 0, 1
    return LEAST_HEADS, 0, 1


def _in_two_parts(dim: int, dim_v: int) -> bool:
    """Return whether columns of query or of value are two tiles, whose second one is a slice of shared memory."""
    return max(dim, dim_v) <= MAX_DIM and any(second > 0 for _, second in tiles_of(dim, dim_v))


def tiles_of(dim: int, dim_v: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the widths of both parts of queries and keys, and of values.

    The steps of 64 queries, for all but the narrowest heads, divide dq by its columns: in halves, or a part to each consumer.
    """
    parts, parts_v = column_parts(dim), column_parts(dim_v)
    return (64, 16) if parts == (64, 0) != parts_v else parts, parts_v


def _workspace(query: Tensor, total: int, dim: int, row_blocks: int) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return a float32 workspace for `total` rows, and where in it dq and the counts begin.

    It holds four statistics of every row, dq in pieces of 64 queries, then int32 counts: what programs have drawn, the blocks
    of each key head that are done (no more heads than `row_blocks`), and the additions to each piece; then a byte for each
    of `row_blocks`; all aligned.
    """
    for_heads, for_pieces = -(-row_blocks // 4) * 4, -(-2 * row_blocks // 4) * 4
    of_rows = total * (STATISTICS + dim)
    room = workspace(query, of_rows + TICKETS + for_heads + for_pieces + -(-row_blocks // 4))
    counts = room[of_rows:].view(torch.int32)
    flags = counts[TICKETS + for_heads + for_pieces :].view(torch.int8)
    return room, room[STATISTICS * total :], (counts, counts[TICKETS:], counts[TICKETS + for_heads :], flags)


def backward(call: Call, saved: Saved, grads: Gradients, config: HopperBackward) -> None:
    """Write dq, dk, dv of inputs that are dense or packed, and dbias unless it is None; `refusals` must have named no reason.

    dq, dk and dv must be such that a tensor map describes them (`mappable`), as the inputs are.
    """
    backward_with(_gradients, call, saved, grads, config)


def _gradients(call: Call, saved: Saved, grads: Gradients, config: HopperBackward, watched: bool) -> Made:
    """Write dq, dk and dv; `watched`: a NaN in them is noted."""
    query, key, value, bias, mask, options = call.query, call.key, call.value, call.bias, call.mask, call.options
    (grad_out, grad_lse, dq), (out, lse, lse_tail) = grads[:3], saved
    batch, seqlen_q, seqlen_k, heads, kv_heads = sizes_of(call)
    block_m, block_n, dim, dim_v = config.block_m, config.block_n, query.shape[-1], value.shape[-1]
    (width, second), (width_v, second_v) = tiles_of(dim, dim_v)
    columns = width + second  # of dq
    query_tiles = None if call.varlen is None else ragged_tiles(call, TILE, of_keys=False, ranked=False)
    rows = (-(-seqlen_q // TILE) if query_tiles is None else query_tiles.shape[0]) * TILE  # of a head in the workspaces
    total = batch * heads * rows
    block_rows = rows_of_flag(columns)
    room, accumulator, counts = _workspace(query, total, columns, total // block_rows)
    sink_parts = parts_of_gradient(grads, total // block_rows)
    grad_lse_strides = (0, 0, 0) if grad_lse is None else statistic_strides(grad_lse)
    launch(
        prepare_kernel, (total // block_rows,),
        out, grad_out, lse, lse_tail, grad_lse, call.sink, sink_parts, room, accumulator, *counts,
        *row_strides(out), *row_strides(grad_out), *statistic_strides(lse), *statistic_strides(lse_tail),
        *grad_lse_strides, query_tiles,
        seqlen_q, heads, rows, total, dim_v, delta_factor(options),
        T=RowTraits(block_rows, 64 if dim_v <= 64 else 128, width, second, TICKETS, in_natural_units(call)), num_warps=8,
        follows=query_tiles is not None or mask.kind == "intervals",
    )  # fmt: skip
    add_parts(sink_parts, batch, heads, grads)
    given = _mask_of(call, accumulator, block_n)
    key_sums = room_for_key_sums(call)
    blocks_per_head = -(-seqlen_k // block_n) if call.varlen is None else given.lists.shape[0]
    dq_tiles, sms = total // TILE, arch.physical(query.device).num_sms
    interleaved, (band_lo, band_hi) = _interleaved(call), options[:2]
    heads_per_group, first_ranks, ranks_in_row = _order(
        call, blocks_per_head * config.shares, interleaved, options, config, sms
    )
    pieces = total * columns // 256, 256  # rows of what adds to dq
    shares, (scale_log2, cap) = config.shares, score_factors(options)
    dk, dv = parts = parts_of(grads, shares)
    traits = Traits(
        BM=block_m, BN=block_n, D=width, D2=second, DV=width_v, DV2=second_v, MASK=kind_of(call),
        BIAS=BIAS_KINDS[bias_kind(bias)], SOFTCAP=options.softcap > 0.0, HAS_LO=band_lo > -UNBOUNDED,
        HAS_Q_SEG=mask.q_segments is not None, HIDDEN=mask.hidden_from is not None, NATURAL=in_natural_units(call),
        GROUPED=heads != kv_heads, TWO_PHASE=config.variant == "two_phase", ORDERED=options.deterministic,
        INTERLEAVED=interleaved, DROPOUT=options.dropout_p > 0.0, EDGES=hides_rows(call), WATCH=watched,
        ALONE=options.batch_invariant,
    )  # fmt: skip
    launch(
        backward_kernel, (min(batch * kv_heads * blocks_per_head * shares + dq_tiles, sms),),
        rows_map(query, block_m, width), rows_map(key, block_n, width), rows_map(value, 64, width_v),
        rows_map(grad_out, block_m, width_v), plain_map(room, (2, total), (2, block_m)),
        plain_map(room, pieces, (16, 256), offset=4 * STATISTICS * total),
        rows_map(dq, 64, width), rows_map(dk, 64, width), rows_map(dv, 64, width_v),
        rows_map(query, block_m, second) if second else None, rows_map(key, block_n, second) if second else None,
        rows_map(value, 64, second_v) if second_v else None, rows_map(grad_out, block_m, second_v) if second_v else None,
        plain_map(room, pieces, (second // 4, 256), offset=4 * STATISTICS * total) if second else None,
        rows_map(dq, 64, second) if second else None, rows_map(dk, 64, second) if second else None,
        rows_map(dv, 64, second_v) if second_v else None, accumulator, *counts, room,
        **given._asdict(), bias=bias, **bias_places(bias, heads)._asdict(), key_sums=key_sums, **dropout_arguments(call)._asdict(),
        scale=options.softmax_scale, scale_log2=scale_log2, cap=cap, kv_heads=kv_heads, group=heads // kv_heads,
        seqlen_q=seqlen_q, seqlen_k=seqlen_k, rows=rows, band_lo=band_lo, band_hi=band_hi, heads_per_group=heads_per_group,
        first_ranks=first_ranks, ranks_in_row=ranks_in_row, tiles_at_once=max(1, min(TILES_AT_ONCE, dq_tiles // sms)),
        n_heads=batch * kv_heads, n_flags=total // block_rows, shares=shares if shares > 1 else None, total=total,
        key_tiles=blocks_per_head, query_tiles=query_tiles, T=traits, num_warps=4, follows=True,
    )  # fmt: skip
    add_shares(parts, grads, shares)
    statistics = Statistics(room, counts[-1], rows, total // block_rows)
    return Made(statistics, key_sums, counts[0] if watched else None)
