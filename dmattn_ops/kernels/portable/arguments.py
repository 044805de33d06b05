"""The arguments of the portable kernels: strides, broadcast dimensions and compile-time switches of one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmattn_ops.call import (
    TILE,
    UNBOUNDED,
    Call,
    Mask,
    Options,
    bias_kind,
    dropout_scale,
    float32_precision,
    in_natural_units,
    last_dropped,
)
from dmattn_ops.kernels.constants import Constants

# Tensors of rows `[B, S, heads, D]`. Loads need to know of their addresses only whether they are ALIGNED, so their strides
# are not specialized: one compiled kernel serves all strides and storage offsets.
ROW_TENSORS = ("query", "key", "value", "out", "grad_out", "dq", "dk", "dv")
ROW_STATISTICS = ("lse", "lse_tail", "row_max", "grad_lse")
# Scalars that no address depends on, or whose alignment buys nothing: one compiled kernel serves all their values.
UNSPECIALIZED = (
    *(f"{name}_{dim}" for name in ROW_TENSORS for dim in "bsh"),
    *(f"{name}_{dim}" for name in ROW_STATISTICS for dim in "bh"),
    *(f"{name}_{dim}" for name in ("tiles", "bits", "keys", "seed") for dim in "bh"),
    "grad_lse_s",
    "out_split",
    "lse_split",
    "share_stride",
    "lse_stride",
    "splits",
    "heads",
    "blocks",
    "dq_rows",
    "key_blocks",
    "dbias_heads",
    "batches",
    "states_b",
    "states_h",
    "states_q",
    "seqlen_q",
    "seqlen_k",
    "longest_q",
    "longest_k",
    "band_lo",
    "band_hi",
    "bias_group",
    "mask_group",
    "key_group",
    "last_dropped",
    "q_origin",
    "k_origin",
    "tiles_w",
    "bits_r",
    "q_segments_b",
)


@dataclass(frozen=True, eq=False, repr=False)
class RowBlock(Constants):
    """A block of rows as a kernel is compiled for it, `[length, padded]`."""

    length: int
    width: int
    padded: int
    aligned: bool


@dataclass(frozen=True, eq=False, repr=False)
class Shape(Constants):
    """The blocks that a kernel is compiled for: one constant of it."""

    block_m: int  # queries
    block_n: int  # keys
    head_dim: int
    value_dim: int
    padded_head: int  # powers of two
    padded_value: int
    aligned: bool  # every row starts at a multiple of 16 bytes

    @property
    def query_rows(self) -> RowBlock:
        """Blocks of query, and of dq."""
        return RowBlock(self.block_m, self.head_dim, self.padded_head, self.aligned)

    @property
    def key_rows(self) -> RowBlock:
        """Blocks of key, and of dk."""
        return RowBlock(self.block_n, self.head_dim, self.padded_head, self.aligned)

    @property
    def value_rows(self) -> RowBlock:
        """Blocks of value, and of dv."""
        return RowBlock(self.block_n, self.value_dim, self.padded_value, self.aligned)

    @property
    def out_rows(self) -> RowBlock:
        """Blocks of out, and of its gradient."""
        return RowBlock(self.block_m, self.value_dim, self.padded_value, self.aligned)


@dataclass(frozen=True, eq=False, repr=False)
class Features(Constants):
    """The features of a call that a kernel is compiled for, as one constant of it."""

    listed: bool  # lists of tiles say where the mask shows something
    mask: str  # "none", "bits", "segments" or "intervals"
    query_segments: bool
    hidden: bool  # intervals have a hidden one
    banded: bool
    varlen: bool
    top_left: bool  # packed sequences have their diagonal there
    group: int  # query heads that read one key head
    bias: str  # "none", "key" or "full"
    natural: bool  # scores are in natural units, not in those of log2
    sign: int  # of the factor of products (`factor_sign`)
    softcap: bool
    dropout: bool
    whole_groups: bool  # of four weights that share an evaluation of Philox
    precision: str  # of products of float32


class Extent(NamedTuple):
    """Sizes of a problem; `seqlen_*` are totals and `longest_*` upper bounds where sequences are `packed`."""

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    longest_q: int
    longest_k: int
    packed: bool = False


def extent(call: Call) -> Extent:
    """Read the sizes of `[B, S, heads, D]`, or of packed `[total, heads, D]`."""
    query, key, varlen = call.query, call.key, call.varlen
    heads, kv_heads = query.shape[-2], key.shape[-2]
    if varlen is None:
        seqlen_q, seqlen_k = query.shape[1], key.shape[1]
        return Extent(query.shape[0], heads, kv_heads, seqlen_q, seqlen_k, seqlen_q, seqlen_k)
    batch = varlen.cu_seqlens_q.shape[0] - 1
    total_q, total_k = query.shape[0], key.shape[0]
    longest = min(varlen.max_seqlen_q, total_q), min(varlen.max_seqlen_k, total_k)
    return Extent(batch, heads, kv_heads, total_q, total_k, *longest, packed=True)


def blocks_and_programs(size: Extent, rows: int, heads: int, block: int, tiles: Tensor | None) -> tuple[int, int]:
    """Return the number of blocks of `block` rows in a head, for a side of `rows` rows with lists `tiles`, and of all programs.

    Packed sequences have as many together, in the order of `places.packed_block`: each needs one more than it has whole ones.
    """
    if size.packed:
        blocks = rows // block + size.batch
        return blocks, blocks * heads * (rows > 0)
    blocks = ceil_div(rows, block) if tiles is None else tiles.shape[2] * (TILE // block)
    return blocks, blocks * heads * size.batch


def row_strides(name: str, tensor: Tensor) -> dict[str, int]:
    """Return the strides `<name>_b`, `_s`, `_h` of `[B, S, heads, D]`, or of packed `[total, heads, D]`."""
    strides = tensor.stride()
    if tensor.dim() == 3:
        return {f"{name}_b": 0, f"{name}_s": strides[0], f"{name}_h": strides[1]}
    return {f"{name}_b": strides[0], f"{name}_s": strides[1], f"{name}_h": strides[2]}


def statistic_strides(name: str, tensor: Tensor | None) -> dict[str, int]:
    """Return the strides `<name>_b`, `_h` of `[B, H, S]`, or of packed `[H, total]`; zeros for None."""
    if tensor is None:
        return {f"{name}_b": 0, f"{name}_h": 0}
    strides = tensor.stride()
    if tensor.dim() == 2:
        return {f"{name}_b": 0, f"{name}_h": strides[0]}
    return {f"{name}_b": strides[0], f"{name}_h": strides[1]}


def statistic_arguments(**tensors: Tensor | None) -> dict[str, Any]:
    """Return statistics of rows and their strides as arguments."""
    arguments: dict[str, Any] = {}
    for name, tensor in tensors.items():
        arguments |= {name: tensor, **statistic_strides(name, tensor)}
    return arguments


def broadcast_stride(tensor: Tensor | None, dim: int) -> int:
    """Return the stride of a dimension; 0 where its size is 1, which serves every index, and for None."""
    return 0 if tensor is None or tensor.shape[dim] == 1 else tensor.stride(dim)


def group_size(heads: int, tensor_heads: int) -> int:
    """Return the number of query heads that share one head of a tensor with 1, Hkv or H heads."""
    return max(1, heads // max(1, tensor_heads))


# A soft cap whose quotients by scores are normal numbers of float32; beyond it the cap shows in no score.
_LEAST_CAP, _GREATEST_CAP = 1e-37, 1e25

_NO_BIAS: dict[str, Any] = {"bias": None, "bias_b": 0, "bias_h": 0, "bias_q": 0, "bias_group": 1}
_NO_LISTS: dict[str, Any] = {
    "tiles": None,
    "tiles_b": 0,
    "tiles_h": 0,
    "tiles_w": 0,
    "mask_group": 1,
}
_NO_BITS: dict[str, Any] = {"bits": None, "bits_b": 0, "bits_h": 0, "bits_r": 0}


def bias_arguments(bias: Tensor | None, heads: int) -> dict[str, Any]:
    """Return the arguments of a bias `[B|1, H|Hkv|1, Sq|1, Sk]`, or packed `[H|Hkv|1, total_k]`."""
    if bias is None:
        return _NO_BIAS
    packed = bias.dim() == 2
    return {
        "bias": bias,
        "bias_b": 0 if packed else broadcast_stride(bias, 0),
        "bias_h": broadcast_stride(bias, -2 if packed else 1),
        "bias_q": 0 if packed else broadcast_stride(bias, 2),
        "bias_group": group_size(heads, bias.shape[0 if packed else 1]),
    }


def list_arguments(tiles: Tensor | None, bits: Tensor | None, heads: int) -> dict[str, Any]:
    """Return the arguments of the lists and bits of one side: `row_*` for owned queries, `col_*` for owned keys."""
    lists = _NO_LISTS
    if tiles is not None:
        lists = {
            "tiles": tiles,
            "tiles_b": broadcast_stride(tiles, 0),
            "tiles_h": broadcast_stride(tiles, 1),
            "tiles_w": tiles.shape[3],
            "mask_group": group_size(heads, tiles.shape[1]),
        }
    if bits is None:
        return lists | _NO_BITS
    return lists | {
        "bits": bits,
        "bits_b": broadcast_stride(bits, 0),
        "bits_h": broadcast_stride(bits, 1),
        "bits_r": bits.stride(2),
    }


def mask_arguments(mask: Mask, heads: int) -> dict[str, Any]:
    """Return the arguments of a mask that both sides share: what it says of each query and key.

    Segments are `[B|1, Sq]` or packed `[total_q]`, and `[B|1, Hm, Sk]` or packed `[Hm, total_k]`; intervals `[B|1, Hm, Sk]`.
    """
    kind, queries = mask.kind, mask.q_segments
    if kind != "segments":
        queries = None
    keys = {"segments": mask.k_segments, "intervals": mask.start}.get(kind)
    return {
        "q_segments": queries,
        "q_segments_b": 0 if queries is None or queries.dim() == 1 else broadcast_stride(queries, 0),
        "k_segments": mask.k_segments if kind == "segments" else None,
        "start": mask.start,
        "end": mask.end,
        "hidden_from": mask.hidden_from,
        "hidden_to": mask.hidden_to,
        "keys_b": 0 if keys is None or keys.dim() == 2 else broadcast_stride(keys, 0),
        "keys_h": broadcast_stride(keys, -2),
        "key_group": 1 if keys is None else group_size(heads, keys.shape[-2]),
    }


def dropout_arguments(call: Call) -> dict[str, Any]:
    """Return the arguments of dropout: seeds `[B|1, H|1]`, and where queries and keys are counted from."""
    options, seed = call.options, call.seed
    return {
        "seed": seed if _drops(call) else None,
        "seed_b": broadcast_stride(seed, 0),
        "seed_h": broadcast_stride(seed, 1),
        "last_dropped": last_dropped(options.dropout_p),
        "rescale": dropout_scale(options.dropout_p),
        "q_origin": options.q_origin,
        "k_origin": options.k_origin,
    }


def _drops(call: Call) -> bool:
    return call.options.dropout_p > 0 and call.seed is not None


def factor_arguments(options: Options) -> dict[str, float]:
    """Return the factors of products before (`ratio`) and after (`factor`) the soft cap; without one, `factor` alone counts."""
    if options.softcap == 0:
        return {"ratio": 1.0, "factor": float(options.softmax_scale)}
    cap = min(max(options.softcap, _LEAST_CAP), _GREATEST_CAP)
    return {"ratio": options.softmax_scale / cap, "factor": cap}


def padded(width: int, least: int = 16) -> int:
    """Return the power of two that a head dimension is padded to: at least 16, the least that a tensor core takes."""
    return max(least, 1 << (width - 1).bit_length())


def shared_arguments(call: Call, size: Extent) -> dict[str, Any]:
    """Return the tensors and numbers that every kernel takes, except for the lists and bits of its side."""
    query, key, value, varlen, options = call.query, call.key, call.value, call.varlen, call.options
    return {
        "query": query,
        "key": key,
        "value": value,
        **row_strides("query", query),
        **row_strides("key", key),
        **row_strides("value", value),
        **bias_arguments(call.bias, size.heads),
        **mask_arguments(call.mask, size.heads),
        **dropout_arguments(call),
        **factor_arguments(options),
        "cu_seqlens_q": None if varlen is None else varlen.cu_seqlens_q,
        "cu_seqlens_k": None if varlen is None else varlen.cu_seqlens_k,
        "heads": size.heads,
        "seqlen_q": size.seqlen_q,
        "seqlen_k": size.seqlen_k,
        "longest_q": size.longest_q,
        "longest_k": size.longest_k,
        "band_lo": options.band_lo,
        "band_hi": options.band_hi,
    }


def shape_of(call: Call, block_m: int, block_n: int, aligned: bool, least: int = 16) -> Shape:
    """Return the blocks of a kernel, `least` columns wide.

    `aligned`: all rows that it loads and stores start at multiples of 16 bytes.
    """
    head_dim, value_dim = call.query.shape[-1], call.value.shape[-1]
    return Shape(block_m, block_n, head_dim, value_dim, padded(head_dim, least), padded(value_dim, least), aligned)


def is_banded(options: Options) -> bool:
    """Return whether the band has a limit."""
    return options.band_lo > -UNBOUNDED or options.band_hi < UNBOUNDED


def features_of(call: Call, tiles: Tensor | None) -> Features:
    """Return the features that a kernel is compiled for, by a call and the lists `tiles` of the kernel's side."""
    mask, varlen, options = call.mask, call.varlen, call.options
    return Features(
        listed=tiles is not None,
        mask=mask.kind,
        query_segments=mask.kind == "segments" and mask.q_segments is not None,
        hidden=mask.hidden_from is not None,
        banded=is_banded(options),
        varlen=varlen is not None,
        top_left=varlen is not None and varlen.top_left,
        group=max(1, call.query.shape[-2] // max(1, call.key.shape[-2])),
        bias=bias_kind(call.bias),
        natural=in_natural_units(call),
        sign=factor_sign(call),
        softcap=options.softcap != 0,
        dropout=_drops(call),
        whole_groups=options.q_origin % 16 == 0 and options.k_origin % 16 == 0,
        precision=float32_precision() if call.query.dtype == torch.float32 else "tf32",
    )


def ceil_div(size: int, divisor: int) -> int:
    """Divide and round up."""
    return -(-size // divisor)


def factor_sign(call: Call) -> int:
    """Return the sign of what products are multiplied by in units of log2: largest scores are sought among the products.

    Factors below the least normal float32 count as 0.
    """
    factor = factor_arguments(call.options)["factor"]
    if in_natural_units(call):
        return 1
    return 0 if abs(factor) < _LEAST_CAP else 1 if factor > 0 else -1
