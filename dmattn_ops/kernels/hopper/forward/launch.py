"""Launch the SM 9.0 forward: what it refuses, its tensor maps, its counters."""

from __future__ import annotations

import torch
from torch import Tensor

from dmattn_ops.call import TILE, UNBOUNDED, Call, Mask, Result, bias_fits_tiles, bias_kind, in_natural_units, mappable
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
from dmattn_ops.kernels.ragged import WORDS
from dmattn_ops.kernels.ragged import tiles_of as ragged_tiles
from dmattn_ops.launching.launch import computed, launch
from dmattn_ops.launching.plan import raw_stream
from dmattn_ops.launching.tensor_maps import head_rows_map, pairs_map

TAKES_SINKS = True  # the kernel multiplies out by the share that they leave
_ROWS = 64  # queries of one consumer: the height of a warp group's matrix instruction
_LONG_WALK = 4096  # keys from which on sharing a walk pays for merging the shares
# Of packed sequences, for each SM and key head of a chunk (H200, 2026-11-24, bf16, 16 heads of D 128: 24 sequences of 64 to 2000
# take 0.356 ms, and 0.422 with all tiles by their work)
_ROUNDS_OF_CHUNKS = 2.0
# Of intervals, pieces for each SM in a group of heads (H200, 2026-11-24, bf16, 16 heads of D 128, 8192 positions with 1024 kept:
# eight heads at a time take 0.200 ms, four 0.206)
_ROUNDS_OF_INTERVALS = 3.8
_FEW_ROUNDS = 4  # pieces for each SM, up to which those of all heads alternate: the last ones to start are short then


def refusals(call: Call) -> list[str]:
    """Return every reason why this kernel cannot take a call; none means that it can."""
    query, key, value, bias, tiles, _, _, varlen, options = call[:9]
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
    _, seqlen_q, _, heads, _ = sizes_of(call)
    batch, longest_k = call.demand.batch if varlen is None else 1, call.demand.seqlen_k
    blocks = batch * heads * -(-seqlen_q // TILE)
    if 4 * blocks <= arch.physical(query.device).num_sms and longest_k >= _LONG_WALK:
        reasons.append(f"{blocks} blocks of queries leave most SMs idle, where shares of {longest_k} keys do not")
    if varlen is None and tiles.k_segments is not None and tiles.row_tiles is None:
        reasons.append("takes segments with their lists of tiles only")
    if varlen is None and too_long(call):
        reasons.append("takes intervals with lists of tiles, which would be too long here")
    return reasons


def tiles_of(dim: int, dim_v: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the widths of both parts of queries and keys, and of values.

    Each part of out leaves through the buffer of the same part of the queries, which is therefore as wide at least.
    """
    parts_v = column_parts(dim_v)
    for parts in PARTS:
        if sum(parts) >= dim and all(own <= other for own, other in zip(parts_v, parts, strict=True)):
            return parts, parts_v
    whole = column_parts(MAX_DIM)  # queries of more than 192 columns have one part only
    return whole, whole


_counters: dict[int | None, Tensor] = {}  # of the default stream of each device


def _counter(device: torch.device) -> Tensor:
    """Return a ticket counter and a count of finished blocks. Both are 0, and the kernel resets them to 0 at its end.

    Launches of the default stream run one after the other and so share them. Elsewhere each launch has its own: a captured
    graph may be replayed on any stream, and the stream that warms one up allocates from the graph's memory, where nothing
    may stay.
    """
    shared = raw_stream(device.index) == 0 and not torch.cuda.is_current_stream_capturing()
    counter = _counters.get(device.index) if shared else None
    if counter is None:
        counter = torch.zeros(2, dtype=torch.int32, device=device)
        if shared:
            _counters[device.index] = counter
    return counter


def _broadcast(tensor: Tensor) -> tuple[int, int]:
    """Return the strides of batch and heads, 0 where the size is 1."""
    return (tensor.stride(0) if tensor.shape[0] > 1 else 0, tensor.stride(1) if tensor.shape[1] > 1 else 0)


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
    if not has_hi and kind == "band":
        return 1
    blocks = -(-seqlen_q // block_m)
    few = batch * heads * blocks <= _FEW_ROUNDS * device.num_sms
    if few and batch * kv_heads * seqlen_k * of_key <= device.l2_bytes // 2:
        return batch * heads
    if kind == "intervals":
        return heads_that_balance(blocks, batch * heads, call.query.device, _ROUNDS_OF_INTERVALS)
    causal = kind == "band" and not has_lo
    return heads_that_balance(blocks, batch * heads, call.query.device) if causal else LEAST_HEADS


def _kind_of_mask(call: Call, block_m: int, heads: int) -> tuple[str, tuple[object, ...], tuple[int, ...]]:
    """Return the kernel's kind of mask, and what `_mask_arguments` does of it."""
    if call.varlen is not None:
        chunk = chunk_of_tiles(_packed_heads_at_once(call), _ROUNDS_OF_CHUNKS, call.query.device)
        records = ragged_tiles(call, block_m, of_keys=False, chunk=chunk)
        return "ragged", (None, records, *(None,) * 6), (0, 0, WORDS, 1, 0, 0, 0, 0, 0, 1)
    kind = "band" if call.mask.kind == "none" else call.mask.kind
    return kind, *_mask_arguments(call.mask, heads)


def _mask_arguments(mask: Mask, heads: int) -> tuple[tuple[object, ...], tuple[int, ...]]:
    """Return (bits, lists, query segments, key segments, intervals) of a mask, and their strides and groups."""
    if mask.row_tiles is None:
        return (None,) * 8, (0, 0, 0, 1, 0, 0, 0, 0, 0, 1)
    lists = mask.row_tiles
    listed = (*_broadcast(lists), lists.shape[-1], heads // lists.shape[1])
    if mask.row_bits is not None:
        bits = mask.row_bits
        flags = (int(bits.shape[0] > 1), int(bits.shape[1] > 1))
        return (pairs_map(bits, _ROWS, TILE // 32), lists, *(None,) * 6), (*listed, *flags, 0, 0, 0, 1)
    queries, keys = mask.q_segments, mask.start if mask.k_segments is None else mask.k_segments
    assert keys is not None
    query_stride = 0 if queries is None or queries.shape[0] == 1 else queries.stride(0)
    strides = (query_stride, *_broadcast(keys), heads // keys.shape[1])
    numbers = (mask.k_segments, mask.start, mask.end, mask.hidden_from, mask.hidden_to)
    return (None, lists, queries, *numbers), (*listed, 0, 0, *strides)


def forward(call: Call, result: Result, config: HopperForward) -> None:
    """Write out `[B, Sq, H, Dv]` and lse `[B, H, Sq]`, or those of packed sequences; what cannot be taken is in `refusals`."""
    call = key_numbers_as_bias(listed(call))
    query, key, value, bias, mask, options = call.query, call.key, call.value, call.bias, call.mask, call.options
    out, lse = result.out, result.lse
    batch, seqlen_q, seqlen_k, heads, kv_heads = sizes_of(call)
    (width, second), (width_v, second_v) = tiles_of(query.shape[-1], value.shape[-1])
    block_m, block_n, rows = config.block_m, config.block_n, _ROWS
    kind, (bits, *numbers), strides = _kind_of_mask(call, block_m, heads)
    # lists hold the band of bits already; all others test it
    lo, hi = (-UNBOUNDED, UNBOUNDED) if kind == "bits" else options[:2]
    has_lo, has_hi = lo > -UNBOUNDED, hi < UNBOUNDED
    blocks = numbers[0].shape[0] if kind == "ragged" else -(-seqlen_q // block_m)
    items = blocks * batch * heads
    num_sms = arch.physical(query.device).num_sms
    natural, softcap = in_natural_units(call), options.softcap > 0.0
    factor, cap = score_factors(options)
    cap_inner, scale = (factor, cap) if softcap else (0.0, factor)
    if natural:
        scale = options.softcap if softcap else options.softmax_scale
    seed, *dropping = dropout_arguments(call)
    # where every block has one piece of work, nothing is drawn
    counter = computed(_counter, query.device) if items > num_sms else lse.view(torch.int32)
    launch(
        forward_kernel, (min(items, num_sms),),
        head_rows_map(query, rows, width), head_rows_map(key, block_n, width), head_rows_map(value, block_n, width_v),
        head_rows_map(out, rows, width_v), head_rows_map(query, rows, second) if second else None,
        head_rows_map(key, block_n, second) if second else None, head_rows_map(value, block_n, second_v) if second_v else None,
        head_rows_map(out, rows, second_v) if second_v else None, bits,
        pairs_map(bias, rows, block_n) if config.bias_tiles else None, lse, result.lse_tail, result.row_max, call.sink,
        *numbers, bias,
        seed, counter, scale, cap_inner,
        seqlen_q, seqlen_k, heads, heads // kv_heads, batch * heads, blocks,
        _heads_at_once(call, kind, has_lo, has_hi, block_m), items, lo, hi, *statistic_strides(lse)[:2], *strides,
        *bias_places(bias, heads), *dropping,
        BM=block_m, BN=block_n, D=width, D2=second, DV=width_v, DV2=second_v, STAGES=config.stages,
        Q_STAGES=config.query_stages, MASK=kind, BIAS="tiles" if config.bias_tiles else bias_kind(bias),
        HAS_LO=has_lo, HAS_HI=has_hi, SOFTCAP=softcap, HIDDEN=mask.hidden_from is not None,
        NATURAL=natural, DROPOUT=options.dropout_p > 0.0, EDGES=hides_keys(call), num_warps=4,
    )  # fmt: skip
