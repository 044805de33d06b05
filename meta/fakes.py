"""The operators on tensors without data: read and refuse the arguments, then allocate.

The real operators (`dispatch/operators.py`) begin with the same functions, so that both refuse and allocate alike. Every
function here takes the arguments of the operator of its name (`schemas.SCHEMAS`); defaults at the end may be left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dmattn_ops import meta
from dmattn_ops.call import NO_MASK, Call, Varlen, plain_options
from dmattn_ops.checks import chosen, kept, require, validation
from dmattn_ops.ops import schemas

_Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


def forward(*arguments: Any, name: str = "forward") -> _Outputs:
    """Return out `[B, Sq, H, Dv]`, lse and lse_tail `[B, H, Sq]`, and row_max like them (empty without needs_max)."""
    call, read = dense_call(name, arguments)
    return meta.forward_outputs(call.query, call.value, read.needs_max)


def backward(*arguments: Any, name: str = "backward") -> tuple[Tensor, ...]:
    """Return dq, dk, dv, dbias and dsink, like what they are gradients of; empty what is not asked for."""
    call, read = dense_call(name, arguments)
    return meta.backward_outputs(call.query, call.key, call.value, *_asked(call, read))


def qkvpacked_forward(*arguments: Any, name: str = "qkvpacked_forward") -> _Outputs:
    """Return out `[B, S, H, D]`, lse, lse_tail and row_max `[B, H, S]` for qkv `[B, S, 3, H, D]`."""
    call, read = dense_call(name, arguments)
    return meta.forward_outputs(call.query, call.value, read.needs_max)


def qkvpacked_backward(*arguments: Any, name: str = "qkvpacked_backward") -> tuple[Tensor, ...]:
    """Return dqkv like qkv, dbias and dsink."""
    call, read = dense_call(name, arguments)
    return meta.qkvpacked_backward_outputs(read.qkv, *_asked(call, read))


def varlen_forward(*arguments: Any) -> _Outputs:
    """Return out `[total_q, H, Dv]`, lse, lse_tail and row_max `[H, total_q]`."""
    call, read = varlen_call("varlen_forward", arguments)
    return meta.forward_outputs(call.query, call.value, read.needs_max)


def varlen_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Return dq, dk, dv, dbias and dsink, like what they are gradients of; empty what is not asked for."""
    call, read = varlen_call("varlen_backward", arguments)
    return meta.backward_outputs(call.query, call.key, call.value, *_asked(call, read))


def pack_mask(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return row_tiles, col_tiles, row_bits and col_bits of a mask `[Bm, Hm, Sq or 1, Sk]` and segments."""
    read = schemas.SIGNATURES["pack_mask"].read(arguments)
    batch, heads = validation.mask_parts(read.mask, read.q_segments, read.k_segments, read.seqlen_q)
    return meta.pack_mask_outputs(read.mask, batch, heads, read.seqlen_q, read.band_lo, read.band_hi)


def list_tiles(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return row_tiles and col_tiles of segments `[B|1, Sq]` and `[B|1, Hm, Sk]`."""
    read = schemas.SIGNATURES["list_tiles"].read(arguments)
    keys = read.k_segments
    batch, heads = validation.mask_parts(None, read.q_segments, keys, read.seqlen_q)
    return meta.list_tiles_outputs(keys, batch, heads, read.seqlen_q, keys.shape[-1], read.band_lo, read.band_hi)


def key_lifetimes(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return start and end `[B', Hm, S]` of the queries that see each key; `B'` is the wider batch of both arguments."""
    read = schemas.SIGNATURES["key_lifetimes"].read(arguments)
    batch = validation.selection(*read)
    return meta.key_lifetimes_outputs(read.scores, batch)


def keep_step(*arguments: Any) -> Tensor:
    """Return which slots of a cache the new query sees, `[B, Hkv, N]`."""
    read = schemas.SIGNATURES["keep_step"].read(arguments)
    kept.step(read)
    return meta.keep_step_outputs(read.places)


def keep_chunk(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ends, keys, values and biases of the slots of a cache and of new positions behind them."""
    read = schemas.SIGNATURES["keep_chunk"].read(arguments)
    kept.chunk(read)
    return meta.keep_chunk_outputs(read.key_cache, read.value_cache, read.bias_cache, read.key.shape[1])


def pack_intervals(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return row_tiles, col_tiles, row_bits and col_bits of intervals `[B|1, Hm, Sk]` beside a mask and segments."""
    read = schemas.SIGNATURES["pack_intervals"].read(arguments)
    batch, heads = validation.interval_parts(read)
    return meta.pack_mask_outputs(read.end, batch, heads, read.seqlen_q, read.band_lo, read.band_hi)


def rank_ids(*arguments: Any) -> Tensor:
    """Return ranks like ids `[B, S]`."""
    read = schemas.SIGNATURES["rank_ids"].read(arguments)
    require.rank("ids", read.ids, 2, "[B, S]")
    require.dtype("ids", read.ids, *validation.INTEGERS)
    return meta.rank_ids_outputs(read.ids)


def spread_lists(*arguments: Any) -> Tensor:
    """Return bool `[..., columns]` on a tensor without data: the columns that the first `counts [...]` of `[..., slots]` name."""
    read = schemas.SIGNATURES["spread_lists"].read(arguments)
    for name, tensor in (("counts", read.counts), ("indices", read.indices)):
        require.dtype(name, tensor, torch.int32)
    require.shape("counts", read.counts, tuple(read.indices.shape[:-1]))
    require.device("counts", read.counts, read.indices.device, "indices")
    require.counts(columns=read.columns)
    return meta.spread_lists_outputs(read.indices, read.columns)


def pack_selection(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return row_tiles, col_tiles, row_bits and col_bits of chosen blocks `[B|1, Hm, Sq, k]` and segments."""
    read = schemas.SIGNATURES["pack_selection"].read(arguments)
    batch, heads = chosen.blocks(read.indices, read.q_segments, read.k_segments, read.block, read.seqlen_k)
    sizes = (read.indices.shape[2], read.seqlen_k, read.band_lo, read.band_hi)
    return meta.bits_outputs(read.indices, batch, heads, *sizes)


def selection_mass(*arguments: Any) -> Tensor:
    """Return the probability of each chosen block, `[B, Hkv or H, Sq, k]`, for indices `[B|1, Hm, Sq, k]`."""
    read = schemas.SIGNATURES["selection_mass"].read(arguments)
    chosen.mass_of_selection(read)
    return meta.selection_mass_outputs(read.query, read.key, read.indices)


def key_mass(*arguments: Any) -> Tensor:
    """Return the probabilities of each key, summed over queries and the heads of a group, `[B, Hkv, Sk]`."""
    call, _ = mass_call(arguments)
    return meta.key_mass_outputs(call.query, call.key)


def mass_call(arguments: tuple[Any, ...]) -> tuple[Call, Any]:
    """Read the arguments of `key_mass`; return the call whose probabilities are wanted, with keys for values, and all by name."""
    read = schemas.SIGNATURES["key_mass"].read(arguments)
    validation.dense_tensors(read.query, read.key, read.key, read.bias, None)
    scale = read.query.shape[-1] ** -0.5 if read.softmax_scale is None else read.softmax_scale
    options = plain_options(scale, read.band_lo, read.band_hi, softcap=read.softcap)
    call = Call(read.query, read.key, read.key, read.bias, schemas.mask_of(read), None, None, None, options)
    validation.dense_call(call)
    chosen.row_sums(read.lse, read.query)
    return call, read


def dense_call(name: str, arguments: tuple[Any, ...]) -> tuple[Call, Any]:
    """Read the arguments of a dense operator and refuse what no kernel may see; return the call, and all by name."""
    read = schemas.SIGNATURES[name].read(arguments)
    if name.startswith("qkvpacked"):
        validation.packed_qkv(read.qkv)
        query, key, value = read.qkv.unbind(2)
    else:
        query, key, value = read.query, read.key, read.value
    validation.dense_tensors(query, key, value, read.bias, read.sink)
    options = schemas.options_of(read, query.shape[-1])
    call = Call(query, key, value, read.bias, schemas.mask_of(read), read.sink, read.seed, None, options)
    call = call._replace(used=schemas.used_of(read), chosen=schemas.chosen_of(read))
    if call.chosen is not None:
        chosen.of_call(call)
    validation.dense_call(call)
    if "grad_out" in read._fields:
        batch, seqlen_q, heads, _ = query.shape
        validation.gradients(read, query, (batch, seqlen_q, heads, value.shape[-1]), (batch, heads, seqlen_q))
    return call, read


def varlen_call(name: str, arguments: tuple[Any, ...]) -> tuple[Call, Any]:
    """Read the arguments of an operator for variable lengths; like `dense_call`. Its mask `[H|Hkv|1, total_k]` is in `read`."""
    read = schemas.SIGNATURES[name].read(arguments)
    require.rank("query", read.query, 3)
    offsets = read.cu_seqlens_q, read.cu_seqlens_k
    varlen = Varlen(*offsets, read.max_seqlen_q, read.max_seqlen_k, read.top_left)
    validation.varlen_tensors(read.query, read.key, read.value, read.bias, read.mask, read.sink, varlen)
    options = schemas.options_of(read, read.query.shape[-1])
    call = Call(read.query, read.key, read.value, read.bias, NO_MASK, read.sink, read.seed, varlen, options)
    validation.varlen_call(call)
    if name.endswith("backward"):
        total, heads, _ = read.query.shape
        validation.gradients(read, read.query, (total, heads, read.value.shape[-1]), (heads, total))
    return call, read


def _asked(call: Call, read: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the bias and the sink whose gradients are asked for."""
    return call.bias if read.needs_dbias else None, call.sink if read.needs_dsink else None


# Called with the operator and the arguments of each call that a tracer makes; must not raise
when_traced: list[Callable[[str, tuple[Any, ...]], None]] = []


def _traced(name: str, fake: Callable[..., Any], *arguments: Any) -> Any:
    """Return what the fake of an operator returns, and tell of the call, which it has not refused."""
    made = fake(*arguments)
    for tell in when_traced:
        tell(name, arguments)
    return made


for _name, _fake in schemas.with_overloads(
    forward, backward, qkvpacked_forward, qkvpacked_backward, varlen_forward, varlen_backward, pack_mask, list_tiles,
    key_lifetimes, pack_intervals, rank_ids, spread_lists, pack_selection, selection_mass, key_mass, keep_step,
    keep_chunk,
).items():  # fmt: skip
    torch.library.register_fake(f"dmattn::{_name}", partial(_traced, _name, _fake), lib=schemas.library)
