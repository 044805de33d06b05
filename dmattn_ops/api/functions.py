"""The public functions: exact attention that skips what masks, causal and window conditions hide.

Dynamic mask attention: Shi et al., arXiv 2508.02124. Tiled exact attention: Dao, FlashAttention-2, arXiv 2307.08691.

Letters: `B` batch, `H` query heads, `Hkv` key and value heads (`H % Hkv == 0`: query head `h` reads key head
`h // (H // Hkv)`), `Sq` and `Sk` query and key length, `D` head dimension of query and key, `Dv` of value (1 to 1024;
above 256 the results are exact, but no kernel was made fast there).
"""

from __future__ import annotations

from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional

from dmattn_ops.api import arguments, chosen, repeats
from dmattn_ops.bands import CausalFrom, Window
from dmattn_ops.call import Used, Varlen
from dmattn_ops.checks import dtensors, require, validation, values
from dmattn_ops.masks import prepare
from dmattn_ops.masks.tile_mask import TileMask, as_bits
from dmattn_ops.ops import autograd

_OPERATORS = {
    "forward": torch.ops.dmattn.forward.default,
    "forward.used": torch.ops.dmattn.forward.used,
    "forward.chosen": torch.ops.dmattn.forward.chosen,
    "qkvpacked_forward": torch.ops.dmattn.qkvpacked_forward.default,
    "qkvpacked_forward.used": torch.ops.dmattn.qkvpacked_forward.used,
    "varlen_forward": torch.ops.dmattn.varlen_forward.default,
}


def flash_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | TileMask | None = None,
    bias: Tensor | None = None,
    *,
    is_causal: bool = False,
    causal_from: CausalFrom = "bottom_right",
    window_size: Window = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0,
    dropout_p: float = 0,
    deterministic: bool | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    return_max: bool = False,
    batch_invariant: bool = False,
    seqlen_k_used: Tensor | None = None,
    **unknown: Any,
) -> Tensor | tuple[Tensor, ...]:
    """Compute attention, `dropout(softmax(score)) @ value`, over the keys that each query sees.

    `score = softmax_scale * <query, key> + bias`, whose first part goes through the soft cap where there is one. A key is
    visible where the mask keeps it and the causal and window conditions hold. Skipping the others is exact: the result is that
    of dense attention under the same mask. A query that sees no key, or only scores of -inf, has `out = 0`, `lse = -inf` and
    gradients of exactly 0.

    Differentiable once, in reverse mode, in query, key, value, bias and sink, through out and lse.

    Args:
        query: with shape `[B, Sq, H, D]`; float16, bfloat16 or float32, on the CPU also float64.
        key: with shape `[B, Sk, Hkv, D]`. Any strides are taken as they are, but for a last dimension that is not
            contiguous: that costs a copy.
        value: with shape `[B, Sk, Hkv, Dv]`.
        mask: with shape `[B|1, H|Hkv|1, Sq|1, Sk]`, or what `prepare_mask` or `dynamic_mask` returned. bool (True keeps)
            or an integer dtype (non-zero keeps). A floating-point mask is refused: one of 0 and -inf is a `bias`, one of
            zeros and ones is `mask != 0`. Not differentiable. A dimension of 1 is never expanded in memory.
        bias: with shape `[B|1, H|Hkv|1, Sq|1, Sk]`; dtype of query, or float32. Added after softcap. Its gradient has
            the same shape and dtype.
        is_causal: whether key `j` must satisfy `j <= i + off` for query `i`.
        causal_from: where the diagonal starts: "bottom_right" (`off = Sk - Sq`), "top_left" (`off = 0`), or the integer
            `off`.
        window_size: `(left, right)`: key `j` must satisfy `i + off - left <= j <= i + off + right`; None is unlimited.
        softmax_scale: factor of the scores; None is `1 / sqrt(D)`.
        softcap: 0 is off; else `softmax_scale * <query, key>` becomes `softcap * tanh(softmax_scale * <query, key> / softcap)`
            before the bias is added. In 16 bits the kernels for SM 9.0 compute tanh with a relative error of up to 2 ** -11,
            what rounding the score to float16 once costs.
        dropout_p: probability with which an attention weight is dropped; drawn from torch's generator of the device.
        deterministic: whether repeated calls give the same bits, forward and backward; None follows
            `torch.are_deterministic_algorithms_enabled()`.
        sink: a logit of each head, with shape `[H]` and dtype float32 or query's: it takes its share of every softmax and
            gives nothing, so that `out` is multiplied by `sigmoid(lse - sink)`; lse stays without it, -inf is no sink, and
            dropout never drops it. Differentiable.
        return_lse: whether to return lse as well.
        return_max: whether to return the largest score of each row as well.
        batch_invariant: whether results of a batch entry have bits that depend on that entry alone: on no other one, the batch
            size, tuning or repetition, for one device, dtype and version. Implies `deterministic`.
        seqlen_k_used: how many keys of each batch entry are used, int32 `[B]` on the device of query, from 0 to `Sk`: keys
            from there on are hidden, whatever they hold. With "bottom_right", `off` is then `seqlen_k_used[b] - Sq`; "top_left", an
            integer `causal_from` and what a prepared mask has folded in keep their place. On a GPU the host does not read
            it: kernels clamp it.

    Returns:
        out with shape `[B, Sq, H, Dv]`; with `return_lse` then lse with shape `[B, H, Sq]` and dtype float32 (float64
        where query is float64): the natural logarithm of the sum of `exp(score)` over visible keys, before dropout; with
        `return_max` then the largest score of each row over visible keys, like lse, -inf for rows without any, not
        differentiable.

    Raises:
        ValueError: for shapes, devices and values that do not fit.
        TypeError: for types and dtypes.
        NotImplementedError: where no kernel takes the call (float64 on CUDA, a head dimension above 1024), and for
            forward-mode derivatives; RuntimeError for a second derivative.
    """
    if unknown:
        arguments.unknown_names("flash_dmattn_func", unknown)
    given = (is_causal, causal_from, window_size, softmax_scale, softcap, dropout_p)
    band, scalars = arguments.read_numbers(*given)
    same_bits = arguments.switches(deterministic, return_lse, return_max, batch_invariant)
    if isinstance(mask, TileMask) and mask.chosen is not None:
        plain = seqlen_k_used is None and bias is None and dropout_p == 0.0
        named = chosen.call_of(query, key, value, mask, sink, band, (*scalars, same_bits)) if plain else None
        if named is not None and (is_compiling() or chosen.is_gathered(*named)):
            return _call("forward.chosen", *named, return_lse, return_max, batch_invariant)
        mask = as_bits(mask)  # which are made once for all calls
    call = None
    plain = bias is None and sink is None and seqlen_k_used is None and dropout_p == 0.0
    if plain and not is_compiling() and not _is_replaced():
        switches = same_bits, return_max, batch_invariant
        call = repeats.signature_of(query, key, value, mask, band, (*scalars, *switches))
        found = None if call is None else repeats.again(call, query, key, value, mask, return_lse)
        if found is not None:
            return _wanted(found, return_lse, return_max)
    tensors_given = (query, key, value)
    (query, key, value), bias, sink = arguments.prepared_inputs(4, bias, sink, query=query, key=key, value=value)
    (batch, seqlen_q, heads, _), (_, seqlen_k, heads_kv, _) = query.shape, key.shape
    if not is_compiling() and heads_kv > arguments.MANY_HEADS:
        arguments.warn_of_swapped_dimensions(key)
    band, used = arguments.used_keys(seqlen_k_used, query, seqlen_k, band)
    taken = None if mask is None else arguments.taken_as_it_is(mask, query, key, band)
    # to resolve a mask and to draw seeds launches work before the operator validates
    if dropout_p != 0.0 or (mask is not None and taken is None):
        validation.dense_tensors(query, key, value, bias, sink)
        arguments.check_mask(mask, query, (1, batch), (1, heads_kv, heads), (1, seqlen_q), (seqlen_k,))
    (*parts, at_most), *limits = taken or prepare.resolve(mask, band, seqlen_q, seqlen_k)
    seed = arguments.dropout_seed(query) if dropout_p != 0.0 else None
    tensors, numbers = (bias, *parts, sink, seed), (*limits, 0, 0, at_most, *scalars, same_bits)
    result = _dense("forward", (query, key, value), tensors, numbers, used, return_lse, return_max, batch_invariant)
    if call is not None:
        repeats.remember(call, tensors_given, (query, key, value, *tensors), (*numbers, return_max, batch_invariant))
    return result


def flash_dmattn_qkvpacked_func(
    qkv: Tensor,
    mask: Tensor | TileMask | None = None,
    bias: Tensor | None = None,
    *,
    is_causal: bool = False,
    causal_from: CausalFrom = "bottom_right",
    window_size: Window = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0,
    dropout_p: float = 0,
    deterministic: bool | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    return_max: bool = False,
    batch_invariant: bool = False,
    seqlen_k_used: Tensor | None = None,
    **unknown: Any,
) -> Tensor | tuple[Tensor, ...]:
    """Compute self-attention of query, key and value in one tensor, without copies. Its gradient is one tensor too.

    Args:
        qkv: with shape `[B, S, 3, H, D]`: query, key and value.
        mask: with shape `[B|1, H|1, S|1, S]`, or what `prepare_mask` returned.
        bias: with shape `[B|1, H|1, S|1, S]`.
        is_causal, causal_from, window_size, softmax_scale, softcap, dropout_p: as in `flash_dmattn_func`.
        deterministic, sink, return_lse, return_max, batch_invariant, seqlen_k_used: as in `flash_dmattn_func`.

    Returns:
        out with shape `[B, S, H, D]`; with `return_lse` then lse, and with `return_max` then the largest score of each row,
        with shape `[B, H, S]`.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: as `flash_dmattn_func`.
    """
    if unknown:
        arguments.unknown_names("flash_dmattn_qkvpacked_func", unknown)
    (qkv,), bias, sink = arguments.prepared_inputs(5, bias, sink, qkv=qkv)
    validation.packed_qkv(qkv)
    batch, seqlen, _, heads, _ = qkv.shape
    given = (is_causal, causal_from, window_size, softmax_scale, softcap, dropout_p)
    band, scalars = arguments.read_numbers(*given)
    same_bits = arguments.switches(deterministic, return_lse, return_max, batch_invariant)
    if mask is not None or dropout_p != 0.0:
        query, key, value = qkv.unbind(2)
        validation.dense_tensors(query, key, value, bias, sink)
        arguments.check_mask(mask, qkv, (1, batch), (1, heads), (1, seqlen), (seqlen,))
    band, used = arguments.used_keys(seqlen_k_used, qkv, seqlen, band)
    (*parts, at_most), *limits = prepare.resolve(mask, band, seqlen, seqlen)
    seed = arguments.dropout_seed(qkv.select(2, 0)) if dropout_p != 0.0 else None
    tensors, numbers = (bias, *parts, sink, seed), (*limits, 0, 0, at_most, *scalars, same_bits)
    return _dense("qkvpacked_forward", (qkv,), tensors, numbers, used, return_lse, return_max, batch_invariant)


def flash_dmattn_varlen_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    is_causal: bool = False,
    causal_from: CausalFrom = "bottom_right",
    window_size: Window = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0,
    dropout_p: float = 0,
    deterministic: bool | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    return_max: bool = False,
    batch_invariant: bool = False,
    **unknown: Any,
) -> Tensor | tuple[Tensor, ...]:
    """Compute attention of sequences of different lengths, packed one behind the other, each to itself.

    Sequence `b` has the queries `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1] - 1` and likewise the keys. Rows behind the
    last offset belong to no sequence, as in a batch that is padded to one length: nothing reads them, their out and
    gradients are 0, and their lse is -inf. On the CPU, offsets that do not describe the tensors raise. On a GPU the host
    does not read them: kernels clamp them.

    Args:
        query: with shape `[total_q, H, D]`.
        key: with shape `[total_k, Hkv, D]`.
        value: with shape `[total_k, Hkv, Dv]`.
        cu_seqlens_q: int32 `[B + 1]` on the device of query, from 0 to at most `total_q`.
        cu_seqlens_k: int32 `[B + 1]`, from 0 to at most `total_k`.
        max_seqlen_q: upper bound of the lengths of the queries, an integer.
        max_seqlen_k: upper bound of the lengths of the keys.
        mask: which keys to keep, with shape `[H|Hkv|1, total_k]`; dtypes as in `flash_dmattn_func`.
        bias: added to the scores of a key, with shape `[H|Hkv|1, total_k]`; differentiable.
        is_causal, causal_from, window_size: as in `flash_dmattn_func`, aligned in each sequence.
        softmax_scale, softcap, dropout_p, deterministic, sink, return_lse, return_max: as in `flash_dmattn_func`.
        batch_invariant: as in `flash_dmattn_func`, for the results of each sequence.

    Returns:
        out with shape `[total_q, H, Dv]`; with `return_lse` then lse, and with `return_max` then the largest score of each
        row, with shape `[H, total_q]`.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: as `flash_dmattn_func`.
    """
    if unknown:
        arguments.unknown_names("flash_dmattn_varlen_func", unknown)
    (query, key, value), bias, sink = arguments.prepared_inputs(3, bias, sink, query=query, key=key, value=value)
    validation.dense(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    lengths = validation.integers(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    if mask is not None:
        arguments.mask_of_keys(mask)
    given = (is_causal, causal_from, window_size, softmax_scale, softcap, dropout_p)
    band, scalars = arguments.read_numbers(*given)  # relative to the diagonal of each sequence
    same_bits = arguments.switches(deterministic, return_lse, return_max, batch_invariant)
    top_left = causal_from != "bottom_right"
    if dropout_p != 0.0:
        varlen = Varlen(cu_seqlens_q, cu_seqlens_k, lengths[0], lengths[1], top_left)
        validation.varlen_tensors(query, key, value, bias, mask, sink, varlen)
        if values.on_the_host(cu_seqlens_q) and not dtensors.is_sharded(cu_seqlens_q):
            values.offsets(query, key, varlen)
    seed = arguments.dropout_seed(query, cu_seqlens_q.shape[0] - 1) if dropout_p != 0.0 else None
    tensors = (query, key, value, cu_seqlens_q, cu_seqlens_k, bias, mask, sink, seed)
    numbers = (*lengths, band.lo, band.hi, 0, 0, top_left, *scalars, same_bits)
    return _call("varlen_forward", tensors, numbers, return_lse, return_max, batch_invariant)


def _dense(
    name: str,
    primals: tuple[Tensor, ...],
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[Any, ...],
    used: Used | None,
    return_lse: bool,
    return_max: bool,
    batch_invariant: bool,
) -> Tensor | tuple[Tensor, ...]:
    """Call the operator of a dense function: its overload for a part of the keys, where there is one."""
    if used is None:
        return _call(name, (*primals, *tensors), numbers, return_lse, return_max, batch_invariant)
    numbers = (*numbers, used.lo, used.hi)
    return _call(f"{name}.used", (*primals, used.lengths, *tensors), numbers, return_lse, return_max, batch_invariant)


def _call(
    name: str,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[Any, ...],
    return_lse: bool,
    return_max: bool,
    batch_invariant: bool,
) -> Tensor | tuple[Tensor, ...]:
    """Call an operator. In plain eager mode its autograd kernel is called directly, which saves one pass through the dispatcher."""
    if _is_replaced():
        arguments.refuse_shared_sequences(functional.scaled_dot_product_attention)
    given = (*tensors, *numbers, return_max, batch_invariant)
    directly = autograd.kernels.get(name)
    if directly is not None and autograd.callable_directly(*tensors):
        outputs = directly(given)
    else:
        if not is_compiling() and not autograd.kernels:
            autograd.refuse_tangents(tensors)  # derivatives as torch publicly registers them would drop these
        try:
            outputs = _OPERATORS[name](*given)
        except RuntimeError:
            dtensors.refuse_mixture(autograd.OPERATORS[name].signature.names, tensors)
            raise
    return _wanted(outputs, return_lse, return_max)


def _is_replaced() -> bool:
    """Return whether somebody has put a function of their own in the place of SDPA."""
    return not isinstance(functional.scaled_dot_product_attention, BuiltinFunctionType)


def _wanted(outputs: tuple[Any, ...], return_lse: bool, return_max: bool) -> Tensor | tuple[Tensor, ...]:
    """Return those of an operator's outputs, out, lse, lse_tail and row_max, that a function was asked for."""
    out, lse, _, row_max = outputs
    if not return_lse and not return_max:
        return out
    return (out, *((lse,) if return_lse else ()), *((row_max,) if return_max else ()))


for _function in (flash_dmattn_func, flash_dmattn_qkvpacked_func, flash_dmattn_varlen_func):
    require.without_unknown(_function)
