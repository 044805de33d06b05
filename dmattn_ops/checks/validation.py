"""Validation: every message names the argument, what was expected and what was got.

Shapes, dtypes and devices are checked where the operators allocate (`meta/fakes.py`), so that eager, compiled, exported
and direct `torch.ops.dmattn.*` calls refuse the same; types and choices are checked by the public functions. A size
that a tracer does not know becomes a check at run time. Values are read on the CPU only: GPU kernels clamp offsets.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dmattn_ops import symbolic
from dmattn_ops.call import HEADER, TILE, UNBOUNDED, WORD_BITS, Call, Mask, Varlen
from dmattn_ops.checks import require
from dmattn_ops.checks.require import flags as flags
from dmattn_ops.checks.require import integers as integers
from dmattn_ops.checks.require import number as number
from dmattn_ops.meta import ceil_div, lse_dtype, tile_records

MAX_HEAD_DIM = 1024
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)  # of masks, padding and ids
DEVICES = ("cpu", "cuda", "meta")  # meta computes shapes only
_BIASES_OF_OTHER_RANKS = {
    2: "a bias [Sq, Sk] is passed as bias[None, None]",
    3: "a number for each key, [B, heads, Sk], is passed as bias.unsqueeze(2), and a bias [B, Sq, Sk] as bias[:, None]",
}
# of float32; integers, since `torch.compile(dynamic=True)` takes them as constants, and makes graph inputs of global floats
_LARGEST, _INVERSE_OF_SMALLEST = int(torch.finfo(torch.float32).max), int(1 / torch.finfo(torch.float32).tiny)


# The calls, checked by the operators.


def dense_tensors(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, sink: Tensor | None) -> None:
    """Refuse what is not query `[B, Sq, H, D]`, key `[B, Sk, Hkv, D]`, value `[B, Sk, Hkv, Dv]`, and their bias and sink."""
    query_key_value(query, key, value, 4)
    if bias is not None:
        (batch, seqlen_q, heads, _), (_, seqlen_k, heads_kv, _) = query.shape, key.shape
        require_broadcast("bias", bias, batch, heads, heads_kv, seqlen_q, seqlen_k)
        _require_bias_dtype(bias, query)
    if sink is not None:
        _require_sink(sink, query)


def dense_call(call: Call) -> None:
    """Refuse what does not fit the tensors of a dense call."""
    (batch, seqlen_q, heads, _), (_, seqlen_k, heads_kv, _) = call.query.shape, call.key.shape
    if call.chosen is None and any(part is not None for part in call.mask[:-1]):
        mask_tensors(call.mask, batch, heads, heads_kv, seqlen_q, seqlen_k, call.query.device)
    if call.used is not None:
        used_keys(call.used.lengths, call.query)
    _numbers_and_seed(call, batch)


def used_keys(seqlen_k_used: Tensor, query: Tensor) -> None:
    """Refuse what is no number of keys for each batch entry, int32 `[B]`, on the device of query `[B, Sq, H, D]`."""
    dense(seqlen_k_used=seqlen_k_used)
    require.shape("seqlen_k_used", seqlen_k_used, (query.shape[0],))
    require.dtype("seqlen_k_used", seqlen_k_used, torch.int32)
    require.device("seqlen_k_used", seqlen_k_used, query.device, "query")


def varlen_tensors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    sink: Tensor | None,
    lengths: Varlen,
) -> None:
    """Refuse what is not packed query `[total_q, H, D]`, key `[total_k, Hkv, D]`, value and what belongs to them."""
    query_key_value(query, key, value, 3)
    where, heads, (total_k, heads_kv, _) = query.device, query.shape[1], key.shape
    for name, cu_seqlens in (("cu_seqlens_q", lengths.cu_seqlens_q), ("cu_seqlens_k", lengths.cu_seqlens_k)):
        require.dtype(name, cu_seqlens, torch.int32)
        require.device(name, cu_seqlens, where)
        if cu_seqlens.dim() != 1 or symbolic.known_equal(cu_seqlens.shape[0], 0):
            raise ValueError(f"{name} must have shape (batch + 1,), got {require.text(cu_seqlens.shape)}")
    require.shape("cu_seqlens_k", lengths.cu_seqlens_k, (lengths.cu_seqlens_q.shape[0],))
    for name, longest in (("max_seqlen_q", lengths.max_seqlen_q), ("max_seqlen_k", lengths.max_seqlen_k)):
        if symbolic.certainly(longest < 0):
            raise ValueError(f"{name} must not be negative, got {longest}")
    if mask is not None:
        keep_mask(mask)
        require.sizes("mask", mask, (1, heads_kv, heads), (total_k,), axes=require.PACKED_AXES)
        require.device("mask", mask, where)
    if bias is not None:
        require.sizes("bias", bias, (1, heads_kv, heads), (total_k,), axes=require.PACKED_AXES)
        _require_bias_dtype(bias, query)
    if sink is not None:
        _require_sink(sink, query)


def varlen_call(call: Call) -> None:
    """Refuse what does not fit the tensors of a packed call."""
    assert call.varlen is not None
    _numbers_and_seed(call, call.varlen.cu_seqlens_q.shape[0] - 1)


def packed_qkv(qkv: Tensor) -> None:
    """Refuse what is no packed query, key and value `[B, S, 3, H, D]`."""
    require.rank("qkv", qkv, 5, require.LAYOUTS[5])
    require.dtype("qkv", qkv, *DTYPES)
    batch, seqlen, three, heads, dim = qkv.shape
    if not symbolic.same(three, 3):
        heads, hint = (three, ": pass qkv.transpose(2, 3)") if symbolic.known_equal(heads, 3) else (heads, "")
        expected = require.text((batch, seqlen, 3, heads, dim))
        raise ValueError(f"qkv must have shape {expected}, got {require.text(qkv.shape)}{hint}")


def gradients(given: Any, query: Tensor, out_shape: tuple[int, ...], row_shape: tuple[int, ...]) -> None:
    """Refuse gradients and saved outputs (`given`, by name) that do not fit the call that they are said to belong to."""
    where, own = query.device, query.dtype
    wide = lse_dtype(own)
    _require("grad_out", given.grad_out, out_shape, own, where)
    _require("out", given.out, out_shape, own, where)
    _require("lse", given.lse, row_shape, wide, where)
    _require("lse_tail", given.lse_tail, row_shape, wide, where)
    if given.grad_lse is not None:
        _require("grad_lse", given.grad_lse, row_shape, wide, where)


def selection(
    scores: Tensor, documents: Tensor | None, keep: int, keep_first: int, keep_last: int, is_causal: bool
) -> int:
    """Refuse what `key_lifetimes` cannot take; return the batch of its results."""
    require.rank("scores", scores, 3, "[B, heads, S]")
    require.dtype("scores", scores, *DTYPES)
    batch, _, seqlen = scores.shape
    if documents is not None:
        require.rank("documents", documents, 2, require.DOCUMENTS)
        batches = (1, batch) if not symbolic.known_equal(batch, 1) else (documents.shape[0],)
        require.sizes("documents", documents, batches, (seqlen,))
        require.device("documents", documents, scores.device, "scores")
        batch = symbolic.wider((batch, documents.shape[0]))
    kept_keys(keep, keep_first, keep_last, is_causal)
    return batch


def kept_keys(keep: int, keep_first: int, keep_last: int, is_causal: bool) -> list[int]:
    """Return numbers of keys, as `require.counts` does; refuse such as no dynamic mask keeps."""
    numbers = require.counts(keep=keep, keep_first=keep_first, keep_last=keep_last)
    if not is_causal and not symbolic.known_equal(keep_last, 0):
        raise ValueError(f"keep_last must be 0 where is_causal is False, got {keep_last}")
    return numbers


def mask_parts(
    mask: Tensor | None, q_segments: Tensor | None, k_segments: Tensor | None, seqlen_q: int
) -> tuple[int, int]:
    """Refuse parts of a mask that do not fit each other; return the batch and the heads of the whole."""
    require.lengths(seqlen_q=seqlen_q)
    parts = [part for part in (mask, q_segments, k_segments) if part is not None]
    where = parts[0].device
    for name, part, rank in (("mask", mask, 4), ("q_segments", q_segments, 2), ("k_segments", k_segments, 3)):
        if part is not None:
            require.rank(name, part, rank)
            require.device(name, part, where)
            if rank != 4:
                require.dtype(name, part, torch.int32)
    by_head = [part for part in (mask, k_segments) if part is not None]
    batch, heads = symbolic.wider(part.shape[0] for part in parts), symbolic.wider(part.shape[1] for part in by_head)
    batches, own_heads, seqlen_k = (1, batch), (1, heads), by_head[0].shape[-1]
    if mask is not None:
        keep_mask(mask)
        require.sizes("mask", mask, batches, own_heads, (1, seqlen_q), (seqlen_k,), axes=require.AXES)
    if q_segments is not None:
        require.sizes("q_segments", q_segments, batches, (seqlen_q,))
    if k_segments is not None:
        require.sizes("k_segments", k_segments, batches, own_heads, (seqlen_k,))
    return batch, heads


def interval_parts(read: Any) -> tuple[int, int]:
    """Refuse intervals that do not fit each other or what stands beside them; return the batch and the heads of the whole."""
    end, where = read.end, read.end.device
    require.rank("end", end, 3, "[B, heads, Sk]")
    for name in ("end", "start", "hidden_from", "hidden_to"):
        part = getattr(read, name)
        if part is not None:
            require.shape(name, part, tuple(end.shape))
            require.dtype(name, part, torch.int32)
            require.device(name, part, where, "end")
    if (read.hidden_from is None) != (read.hidden_to is None):
        raise ValueError("hidden_from and hidden_to belong together, got one of them")
    batch, heads, seqlen_k = end.shape
    if read.mask is None and read.k_segments is None:
        return batch, heads
    other_batch, other_heads = mask_parts(read.mask, read.q_segments, read.k_segments, read.seqlen_q)
    of_keys = read.k_segments if read.mask is None else read.mask
    if not symbolic.same(of_keys.shape[-1], seqlen_k):
        raise ValueError(
            f"intervals must have {require.size_text(of_keys.shape[-1])} keys as the mask or the documents have, got"
            f" {require.size_text(seqlen_k)}"
        )
    require.device("end", end, of_keys.device, "the mask")
    if not any(symbolic.known_equal(size, 1) for size in (batch, other_batch)) and not symbolic.same(
        batch, other_batch
    ):
        raise ValueError(
            f"intervals must have the batch of the mask and the documents, {require.size_text(other_batch)}, or 1, got"
            f" {require.size_text(batch)}"
        )
    most = max(heads, other_heads)
    if most % heads or most % other_heads:
        raise ValueError(f"intervals must have the heads of the mask, {other_heads}, of keys or 1, got {heads}")
    return symbolic.wider((batch, other_batch)), most


def query_key_value(query: Tensor, key: Tensor, value: Tensor, rank: int) -> None:
    """Refuse shapes that do not belong together, and dtypes, devices and head dimensions that no kernel takes.

    With rank 4: query `[B, Sq, H, D]`, key `[B, Sk, Hkv, D]`, value `[B, Sk, Hkv, Dv]`; with 3, `[total, heads, D]`.
    """
    of_query, of_key, of_value = query.shape, key.shape, value.shape
    if not len(of_query) == len(of_key) == len(of_value) == rank:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            require.rank(name, tensor, rank, require.LAYOUTS[rank])
    if (
        require.traced(query) or require.traced(key) or require.traced(value) or not of_query == of_key == of_value
    ):  # equal shapes need no closer look
        like_query, like_key = (*of_query[:-3], *of_key[-3:-1], of_query[-1]), (*of_key[:-1], of_value[-1])
        if not require.matches(key, like_query) or not require.matches(value, like_key):
            _refuse_key_or_value(of_query, of_key, of_value)
    heads, dim, heads_kv, dim_v = of_query[-2], of_query[-1], of_key[-2], of_value[-1]
    own, where = query.dtype, query.device
    if key.dtype is not own or value.dtype is not own or own not in DTYPES:
        require.dtype("query", query, *DTYPES)
        require.dtype("key", key, own, like="query")
        require.dtype("value", value, own, like="query")
    if key.device != where or value.device != where:
        require.device("key", key, where)
        require.device("value", value, where)
    for name, length in (("query", of_query[-3]), ("key", of_key[-3])):
        if symbolic.certainly(length >= UNBOUNDED):
            raise ValueError(f"{name} must have fewer than {UNBOUNDED} positions, got {length}")
    if dim == 0 or dim_v == 0:
        raise ValueError(f"query and value must have a last dimension of at least 1, got {dim} and {dim_v}")
    if heads_kv == 0 or heads % heads_kv != 0:
        raise ValueError(f"the heads of query must be a multiple of the heads of key, got {heads} and {heads_kv}")
    if dim > MAX_HEAD_DIM or dim_v > MAX_HEAD_DIM or where.type not in DEVICES or own == torch.float64:
        supported(own, where, dim, dim_v)


def supported(own: torch.dtype, where: torch.device, dim: int, dim_v: int) -> None:
    """Raise NotImplementedError with every reason why no kernel takes a call; return where there is none."""
    reasons = [
        f"the last dimension of {name} must be at most {MAX_HEAD_DIM}, got {size}"
        for name, size in (("query", dim), ("value", dim_v))
        if size > MAX_HEAD_DIM
    ]
    if where.type not in DEVICES:
        reasons.append(f"query must be on a CPU or CUDA device, got {where}")
    if own == torch.float64 and where.type == "cuda":
        reasons.append(f"query must have dtype float16, bfloat16 or float32 on a CUDA device, got {own}")
    if reasons:
        raise NotImplementedError("no kernel takes this call: " + "; ".join(reasons))


def scalars(softmax_scale: float | None, softcap: float, dropout_p: float) -> None:
    """Refuse values of the numbers of a call; a traced number that is not known yet passes."""
    if isinstance(softmax_scale, float) and not abs(softmax_scale) <= _LARGEST:
        raise ValueError(f"softmax_scale must be finite, got {softmax_scale}{_beyond_float32(softmax_scale)}")
    if isinstance(softcap, float) and (0 < softcap * _INVERSE_OF_SMALLEST < 1 or not 0 <= softcap <= _LARGEST):
        raise ValueError(f"softcap must be finite and not negative, got {softcap}{_beyond_float32(softcap)}")
    if isinstance(dropout_p, float) and not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p must be between 0 and 1, got {dropout_p}")


def _beyond_float32(number: float) -> str:
    """Return a remark for messages about a number that only float64 can hold, else an empty text."""
    beyond = 0 < abs(number) * _INVERSE_OF_SMALLEST < 1 or _LARGEST < abs(number) < math.inf
    return ", which float32 cannot hold" if beyond else ""


# Types and choices, checked by the public functions.


def tensors(**arguments: Any) -> None:
    """Refuse arguments that are not tensors."""
    for name, argument in arguments.items():
        if not isinstance(argument, Tensor):
            raise TypeError(f"{name} must be a tensor, got {require.type_text(argument)}")


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor is neither sparse nor nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def dense(**arguments: Any) -> None:
    """Refuse arguments that are not tensors, and sparse and nested tensors."""
    tensors(**arguments)
    for name, tensor in arguments.items():
        if is_dense(tensor):
            continue
        if tensor.is_nested:
            raise TypeError(
                f"{name} must be a dense tensor, got a nested one: pass its values and offsets to flash_dmattn_varlen_func"
            )
        raise TypeError(f"{name} must be a dense tensor, got layout {tensor.layout}")


def keep_mask(mask: Tensor) -> None:
    """Refuse masks that could be meant as something else: additive ones, and such as require a gradient."""
    dense(mask=mask)
    if mask.dtype.is_floating_point or mask.dtype.is_complex or mask.requires_grad:
        what = f"dtype {mask.dtype}" if not mask.requires_grad else "requires_grad=True"
        raise TypeError(
            f"mask must have dtype bool (True keeps) or an integer dtype (non-zero keeps), got {what}: pass an additive mask of"
            " 0 and -inf as bias=, and one of zeros and ones as mask != 0"
        )


def mask_lengths(of_mask_q: int, of_mask_k: int, seqlen_q: int, seqlen_k: int) -> None:
    """Refuse a prepared mask for other lengths."""
    if not (symbolic.same(of_mask_q, seqlen_q) and symbolic.same(of_mask_k, seqlen_k)):
        raise ValueError(
            f"mask must be prepared for query length {require.size_text(seqlen_q)} and key length {require.size_text(seqlen_k)}, "
            f"got {require.size_text(of_mask_q)} and {require.size_text(of_mask_k)}"
        )


# Pieces.


def require_broadcast(
    name: str, tensor: Tensor, batch: int, heads: int, heads_kv: int, seqlen_q: int, seqlen_k: int
) -> None:
    """Refuse a mask or bias that is not `[B|1, H|Hkv|1, Sq|1, Sk]`."""
    sizes = (1, batch), (1, heads_kv, heads), (1, seqlen_q), (seqlen_k,)
    require.sizes(name, tensor, *sizes, axes=require.AXES, hints=_BIASES_OF_OTHER_RANKS)


def _require(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, where: torch.device) -> None:
    if tensor.dtype is not dtype or tensor.device != where or not require.matches(tensor, shape):
        require.shape(name, tensor, shape)
        require.dtype(name, tensor, dtype)
        require.device(name, tensor, where)


def _require_bias_dtype(bias: Tensor, query: Tensor) -> None:
    require.device("bias", bias, query.device)
    if bias.dtype == torch.bool:
        raise TypeError("bias must have a floating-point dtype, got torch.bool: pass what is visible as mask=")
    if bias.dtype != query.dtype:
        require.dtype("bias", bias, query.dtype, torch.float32)


def _numbers_and_seed(call: Call, batch: int) -> None:
    options, where, heads = call.options, call.query.device, call.query.shape[-2]
    scalars(options.softmax_scale, options.softcap, options.dropout_p)
    for name, origin in (("q_origin", options.q_origin), ("k_origin", options.k_origin)):
        if symbolic.certainly(origin < 0) or symbolic.certainly(origin >= UNBOUNDED):
            raise ValueError(f"{name} must be between 0 and {UNBOUNDED - 1}, got {origin}")
    if call.mask.at_most is not None and symbolic.certainly(call.mask.at_most < 0):
        raise ValueError(f"at_most must not be negative, got {call.mask.at_most}")
    seed, dropout_p = call.seed, options.dropout_p
    if seed is not None:
        require.sizes("seed", seed, (1, batch), (1, heads))
        require.dtype("seed", seed, torch.int64)
        require.device("seed", seed, where)
    elif not isinstance(dropout_p, float) or dropout_p > 0.0:
        raise ValueError(
            f"seed must be an int64 tensor of shape (1, 1) or more where dropout_p is {dropout_p}, got None"
        )


def _require_sink(sink: Tensor, query: Tensor) -> None:
    require.shape("sink", sink, (query.shape[-2],))
    require.device("sink", sink, query.device)
    if sink.dtype != query.dtype:
        require.dtype("sink", sink, query.dtype, torch.float32)


def mask_tensors(
    mask: Mask, batch: int, heads: int, heads_kv: int, seqlen_q: int, seqlen_k: int, where: torch.device
) -> None:
    """Refuse tensors of a mask in which a kernel could read out of bounds; what lists hold is trusted."""
    rows, cols, words = ceil_div(seqlen_q, TILE), ceil_div(seqlen_k, TILE), TILE // WORD_BITS
    leading = (1, batch), (1, heads_kv, heads)
    kinds = (mask.row_bits, mask.k_segments, mask.end)
    if sum(part is not None for part in kinds) != 1:
        raise ValueError("a mask must have either row_bits and col_bits, or k_segments, or end")
    if mask.q_segments is not None and mask.k_segments is None:
        raise ValueError("a mask with q_segments must have k_segments")
    if mask.end is not None:
        if mask.row_tiles is not None or mask.col_tiles is not None:
            raise ValueError("a mask by start and end must not have lists of tiles")
        _require_part("end", mask.end, where, *leading, (seqlen_k,))
        if mask.start is not None:
            _require_part("start", mask.start, where, *leading, (seqlen_k,))
        if mask.hidden_from is not None or mask.hidden_to is not None:
            _require_part("hidden_from", mask.hidden_from, where, *leading, (seqlen_k,))
            _require_part("hidden_to", mask.hidden_to, where, *leading, (seqlen_k,))
        return
    if mask.hidden_from is not None or mask.hidden_to is not None or mask.start is not None:
        raise ValueError("a mask with start, hidden_from or hidden_to must have end")
    _require_list("row_tiles", mask.row_tiles, where, *leading, (tile_records(seqlen_q),))
    _require_list("col_tiles", mask.col_tiles, where, *leading, (tile_records(seqlen_k),))
    if mask.row_bits is not None:
        _require_part("row_bits", mask.row_bits, where, *leading, (rows * TILE,), (cols * words,))
        _require_part("col_bits", mask.col_bits, where, *leading, (cols * TILE,), (rows * words,))
    else:
        _require_part("k_segments", mask.k_segments, where, *leading, (seqlen_k,))
        if mask.q_segments is not None:
            _require_part("q_segments", mask.q_segments, where, leading[0], (seqlen_q,))


def _require_list(name: str, lists: Tensor | None, where: torch.device, *choices: tuple[int, ...]) -> None:
    width = HEADER if lists is None or lists.dim() != 4 else lists.shape[3]
    _require_part(name, lists, where, *choices, (width,))
    if symbolic.certainly(width < HEADER):
        raise ValueError(f"{name} must have a last dimension of at least {HEADER}, got {width}")


def _require_part(name: str, part: Tensor | None, where: torch.device, *choices: tuple[int, ...]) -> None:
    if part is None:
        raise ValueError(f"{name} must be a tensor where other parts of the mask are, got None")
    require.sizes(name, part, *choices)
    if part.dtype is not torch.int32 or part.device != where:
        require.dtype(name, part, torch.int32)
        require.device(name, part, where)


def _refuse_key_or_value(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> None:
    """Raise for the one of key and value that is wrong: where they differ, the one that is also unlike query."""
    agreed = tuple(
        v if k != v and v == q else k for q, k, v in zip(query[-3:-1], key[-3:-1], value[-3:-1], strict=True)
    )
    for name, sizes, last in (("key", key, query[-1]), ("value", value, value[-1])):
        expected = (*query[:-3], *agreed, last)
        if tuple(sizes) != expected:
            raise ValueError(f"{name} must have shape {require.text(expected)}, got {require.text(sizes)}")
