"""Launch the SM 9.0 forward: what it refuses, its tensor maps, its counters."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from dmattn_ops.call import (
    TILE,
    UNBOUNDED,
    Call,
    Result,
    Takes,
    bias_fits_tiles,
    bias_kind,
    hides_packed_keys,
    in_natural_units,
    mappable,
)
from dmattn_ops.choice import arch
from dmattn_ops.choice.config import HopperForward
from dmattn_ops.kernels.hopper.arguments import (
    LEAST_HEADS,
    MAX_DIM,
    PARTS,
    bias_places,
    chunk_of_tiles,
    column_parts,
    dropout_arguments,
    dropout_refusals,
    heads_side_by_side,
    heads_that_balance,
    hides_keys,
    key_numbers_as_bias,
    listed,
    ragged_refusals,
    score_factors,
    sizes_of,
    statistic_strides,
    too_long,
    unused_refusals,
)
from dmattn_ops.kernels.hopper.forward.kernel import forward_kernel
from dmattn_ops.kernels.hopper.forward.types import Traits
from dmattn_ops.kernels.hopper.kinds import BAND, BITS, INTERVALS, RAGGED, kind_of
from dmattn_ops.kernels.hopper.scores import BIAS_KINDS
from dmattn_ops.kernels.portable.again import COUNTS, entries_with_counts, forward_again
from dmattn_ops.kernels.portable.arguments import broadcast_stride
from dmattn_ops.kernels.ragged import WORDS
from dmattn_ops.kernels.ragged import tiles_of as ragged_tiles
from dmattn_ops.launching.launch import computed, launch, makes_zeros
from dmattn_ops.launching.plan import raw_stream
from dmattn_ops.launching.tensor_maps import Map, head_rows_map, pairs_map

TAKES = Takes(("none", "bits", "segments", "intervals"), sinks=True, oldest=90, newest=90)
_ROWS = 64  # queries of one consumer: the height of a warp group's matrix instruction
_PARTS = ((16, 0), (32, 0), *PARTS)
REGISTERS_OF_HALF = 80  # of a thread, at launch, where two blocks share a multiprocessor
_LONG_WALK = 4096  # keys from which on sharing a walk pays for merging the shares
# Of packed sequences, for each SM and key head of a chunk (H200, 2026-11-24, bf16, 16 heads of D 128: 24 sequences of 64 to 2000
# take 0.356 ms, and 0.422 with all tiles by their work)
_ROUNDS_OF_CHUNKS = 2.0
# Of intervals, pieces for each SM in a group of heads (H200, 2026-11-24, bf16, 16 heads of D 128, 8192 positions with 1024 kept:
# eight heads at a time take 0.200 ms, four 0.206)
_ROUNDS_OF_INTERVALS = 3.8
# Arguments of the kernel that a kind of mask may not have
_NUMBERS = (
    "q_segments",
    "k_segments",
    "start",
    "end",
    "hidden_from",
    "hidden_to",
)  # tensors of `Mask` of the same names
_MASK_TENSORS = ("bits_desc", "lists", *_NUMBERS)
_MASK_STRIDES = ("lists_b", "lists_h", "width", "bits_b", "bits_h", "segments_b", "segments_kb", "segments_kh")
_FEW_ROUNDS = 4  # pieces for each SM, up to which those of all heads alternate: the last ones to start are short then


def refusals(call: Call) -> list[str]:
    """Return every reason why this kernel cannot take a call; none means that it can."""
    query, key, value, bias = call.query, call.key, call.value, call.bias
    mask, varlen, options = call.mask, call.varlen, call.options
    reasons = ragged_refusals(call)
    if query.dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"takes bfloat16 and float16, not {query.dtype}")
    dim, dim_v = query.shape[-1], value.shape[-1]
    if dim % 8 or dim_v % 8 or max(dim, dim_v) > MAX_DIM:
        reasons.append(f"takes head dimensions that are multiples of 8 up to {MAX_DIM}, not {dim} and {dim_v}")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not mappable(tensor):
            reasons.append(f"{name} is not aligned to 16 bytes in memory and strides")
    if bias_kind(bias) == "full" and max(dim, dim_v) <= 64 and not bias_fits_tiles(bias):
        reasons.append(
            "takes a bias with queries for heads of 64 only in 16 bits and aligned rows: else portable is faster"
        )
    reasons += dropout_refusals(call) + unused_refusals(call)
    if options.softmax_scale <= 0.0:
        reasons.append("takes positive scales only")
    sizes = sizes_of(call)
    batch, longest_k = call.demand.batch if varlen is None else 1, call.demand.seqlen_k
    blocks = batch * sizes.heads * -(-sizes.seqlen_q // TILE)
    if 4 * blocks <= arch.physical(query.device).num_sms and longest_k >= _LONG_WALK:
        reasons.append(f"{blocks} blocks of queries leave most SMs idle, where shares of {longest_k} keys do not")
    if varlen is None and mask.k_segments is not None and mask.row_tiles is None:
        reasons.append("takes segments with their lists of tiles only")
    if options.batch_invariant and hides_packed_keys(call):
        reasons.append(
            "a NaN that one sequence makes of hidden keys has all computed again, which is not batch-invariant"
        )
    if varlen is None and too_long(call):
        reasons.append("takes intervals with lists of tiles, which would be too long here")
    return reasons


def tiles_of(dim: int, dim_v: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the widths of both parts of queries and keys, and of values.

    Each part of out leaves through the buffer of the same part of the queries, which is therefore as wide at least.
    """
    parts_v = column_parts(dim_v, _PARTS)
    for parts in _PARTS:
        if sum(parts) >= dim and all(own <= other for own, other in zip(parts_v, parts, strict=True)):
            return parts, parts_v
    whole = column_parts(MAX_DIM)  # queries of more than 192 columns have one part only
    return whole, whole


_counters: dict[tuple[int | None, int], Tensor] = {}  # of the default stream of each device, by threads


@makes_zeros
def _counter(device: torch.device) -> Tensor:
    """Return a ticket counter, a count of finished blocks, and what `unseen.note_nan` and the kernel behind it write.

    All are 0, and the kernels reset them to 0 at their end.

    What a thread launches on the default stream runs one after the other and so shares them: another thread's kernels may come
    between the two of a call. Elsewhere each launch has its own: a captured graph may be replayed on any stream, and the stream
    that warms one up allocates from the graph's memory, where nothing may stay.
    """
    shared = raw_stream(device.index) == 0 and not torch.cuda.is_current_stream_capturing()
    place = (device.index, threading.get_ident())
    counter = _counters.get(place) if shared else None
    if counter is None:
        counter = torch.zeros(COUNTS, dtype=torch.int32, device=device)
        if shared:
            _counters[place] = counter
    return counter


@makes_zeros
def _counts_of_entries(like: Tensor, entries: int) -> Tensor:
    """Return what `_counter` does for each batch entry, those of programs among the first one's."""
    return like.new_zeros(entries * COUNTS, dtype=torch.int32)


def _bytes_of_key(call: Call) -> int:
    return (call.key.shape[-1] + call.value.shape[-1]) * call.key.element_size()


def _packed_heads_at_once(call: Call) -> int:
    """Return how many key heads of packed sequences take turns."""
    of_head = call.demand.seqlen_k * _bytes_of_key(call)
    return heads_side_by_side(of_head, sizes_of(call).kv_heads, call.query.device)


def _heads_at_once(call: Call, kind: str, has_lo: bool, has_hi: bool, block_m: int) -> int:
    """Return how many heads take turns: where pieces of work differ in length, longest first, and still in L2."""
    batch, seqlen_q, seqlen_k, heads, kv_heads = sizes_of(call)
    of_key = _bytes_of_key(call)
    device = arch.physical(call.query.device)
    if call.varlen is not None:
        return heads // kv_heads * _packed_heads_at_once(call)
    if not has_hi and kind == BAND.value:
        return 1
    blocks = -(-seqlen_q // block_m)
    few = batch * heads * blocks <= _FEW_ROUNDS * device.num_sms
    if few and batch * kv_heads * seqlen_k * of_key <= device.l2_bytes // 2:
        return batch * heads
    if kind == INTERVALS.value:
        return heads_that_balance(blocks, batch * heads, call.query.device, _ROUNDS_OF_INTERVALS)
    causal = kind == BAND.value and not has_lo
    return heads_that_balance(blocks, batch * heads, call.query.device) if causal else LEAST_HEADS


def _mask_arguments(call: Call, kind: str, block_m: int) -> dict[str, Any]:
    """Return the kernel's arguments that say what is visible, beside the band; what a kind does not have is None, 0 or 1."""
    mask, heads = call.mask, call.query.shape[-2]
    arguments = dict.fromkeys(_MASK_TENSORS) | dict.fromkeys(_MASK_STRIDES, 0) | {"mask_group": 1, "segment_group": 1}
    if kind == RAGGED.value:
        chunk = chunk_of_tiles(_packed_heads_at_once(call), _ROUNDS_OF_CHUNKS, call.query.device)
        return arguments | {"lists": ragged_tiles(call, block_m, of_keys=False, chunk=chunk), "width": WORDS}
    lists = mask.row_tiles
    if lists is None:
        return arguments
    arguments |= {"lists": lists, "width": lists.shape[-1], "mask_group": heads // lists.shape[1]}
    arguments |= {"lists_b": broadcast_stride(lists, 0), "lists_h": broadcast_stride(lists, 1)}
    if mask.row_bits is not None:
        batch, bit_heads = mask.row_bits.shape[:2]
        words = pairs_map(mask.row_bits, _ROWS, TILE // 32)
        return arguments | {"bits_desc": words, "bits_b": int(batch > 1), "bits_h": int(bit_heads > 1)}
    queries, keys = mask.q_segments, mask.start if mask.k_segments is None else mask.k_segments
    assert keys is not None
    arguments |= {name: getattr(mask, name) for name in _NUMBERS}
    arguments |= {"segments_b": 0 if queries is None else broadcast_stride(queries, 0)}
    arguments |= {"segments_kb": broadcast_stride(keys, 0), "segments_kh": broadcast_stride(keys, 1)}
    return arguments | {"segment_group": heads // keys.shape[1]}


def _row_maps(call: Call, out: Tensor, traits: Traits) -> dict[str, Map | None]:
    """Return the tensor maps of queries, keys, values and out: of both parts of their columns, None without a second one."""
    found: dict[str, Map | None] = {}
    for name, tensor, rows, width, second in (
        ("q", call.query, _ROWS, traits.D, traits.D2),
        ("k", call.key, traits.BN, traits.D, traits.D2),
        ("v", call.value, traits.BN, traits.DV, traits.DV2),
        ("o", out, _ROWS, traits.DV, traits.DV2),
    ):
        found[f"{name}_desc"] = head_rows_map(tensor, rows, width)
        found[f"{name}2_desc"] = head_rows_map(tensor, rows, second) if second else None
    return found


def _traits(call: Call, result: Result, config: HopperForward, band: tuple[int, int], watched: bool) -> Traits:
    """Return the constants that the kernel is compiled for."""
    options = call.options
    (width, second), (width_v, second_v) = tiles_of(call.query.shape[-1], call.value.shape[-1])
    return Traits(
        BM=config.block_m,
        BN=config.block_n,
        PER_SM=config.per_sm,
        D=width,
        D2=second,
        DV=width_v,
        DV2=second_v,
        STAGES=config.stages,
        Q_STAGES=config.query_stages,
        MASK=kind_of(call),
        BIAS=BIAS_KINDS["tiles" if config.bias_tiles else bias_kind(call.bias)],
        HAS_LO=band[0] > -UNBOUNDED,
        HAS_HI=band[1] < UNBOUNDED,
        SOFTCAP=options.softcap > 0.0,
        HIDDEN=call.mask.hidden_from is not None,
        WHOLE_KEYS=call.mask.kind == "segments" and call.mask.q_segments is None,
        NATURAL=in_natural_units(call),
        DROPOUT=options.dropout_p > 0.0,
        ROW_MAX=result.row_max is not None,
        EDGES=hides_keys(call),
        WATCH=watched,
    )


def forward(call: Call, result: Result, config: HopperForward) -> None:
    """Write out `[B, Sq, H, Dv]` and lse `[B, H, Sq]`, or those of packed sequences; what cannot be taken is in `refusals`."""
    given = listed(call, ("rows",))
    watched = given.mask.kind != "none"
    call = key_numbers_as_bias(given)
    query, bias, options, lse = call.query, call.bias, call.options, result.lse
    batch, seqlen_q, seqlen_k, heads, kv_heads = sizes_of(call)
    kind = kind_of(call)
    # lists hold the band of bits already; all others test it
    band_lo, band_hi = (-UNBOUNDED, UNBOUNDED) if kind == BITS.value else options[:2]
    traits = _traits(call, result, config, (band_lo, band_hi), watched)
    mask = _mask_arguments(call, kind, config.block_m)
    tiles = mask["lists"].shape[0] if kind == RAGGED.value else -(-seqlen_q // config.block_m)
    items = tiles * batch * heads
    programs = min(items, config.per_sm * arch.physical(query.device).num_sms)
    registers = {"maxnreg": REGISTERS_OF_HALF} if config.per_sm == 2 else {}
    factor, cap = score_factors(options)
    cap_inner, scale = (factor, cap) if traits.SOFTCAP else (0.0, factor)
    if traits.NATURAL:
        scale = options.softcap if traits.SOFTCAP else options.softmax_scale
    lse_b, lse_h = statistic_strides(lse)[:2]
    # where every block has one piece of work, nothing is drawn
    entries = entries_with_counts(call) if watched else None
    if entries is not None:
        counts = computed(_counts_of_entries, lse, entries)
    else:
        counts = computed(_counter, query.device) if watched or items > programs else lse.view(torch.int32)
    launch(
        forward_kernel,
        (programs,),
        **_row_maps(call, result.out, traits),
        bias_desc=pairs_map(bias, _ROWS, config.block_n) if config.bias_tiles else None,
        lse=lse,
        lse_tail=result.lse_tail,
        row_max=result.row_max,
        sink=call.sink,
        **mask,
        bias=bias,
        **bias_places(bias, heads)._asdict(),
        **dropout_arguments(call)._asdict(),
        counter=counts,
        counts_b=None if entries is None else COUNTS,
        scale=scale,
        cap_inner=cap_inner,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        H=heads,
        kv_group=heads // kv_heads,
        heads=batch * heads,
        tiles=tiles,
        group=_heads_at_once(call, kind, traits.HAS_LO, traits.HAS_HI, config.block_m),
        items=items,
        band_lo=band_lo,
        band_hi=band_hi,
        lse_b=lse_b,
        lse_h=lse_h,
        T=traits,
        num_warps=4,
        follows=kind == INTERVALS.value,
        **registers,
    )
    if watched:
        forward_again(given, result, counts)
