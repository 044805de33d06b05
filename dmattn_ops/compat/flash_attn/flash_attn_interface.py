"""The functions of flash-attn 2 (2.8): dense, packed and variable lengths, over those of this library.

Translated: window sizes of -1 are unlimited; rows without a visible key have an lse of +inf; `deterministic=False` is what
it says, whatever torch's switch is. Beyond flash-attn: float32 and float64, any head dimension, unequal ones of key and
value, gradients through lse, and dropout's mask does not depend on the GPU.

ALiBi adds `-slope * |i + Sk - Sq - j|` to scores. Where no key behind the diagonal is visible that is `slope * j` less a
number of each row, which softmax does not see: a bias of each key, with lse moved back. So that its rounding is never larger
than that of the inputs, more than 16384 queries (512 in float32) are cut into calls of so many. Without causality it is a
`[B|1, H, Sq, Sk]` bias, in memory too.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F

from dmattn_ops import biases
from dmattn_ops.api import functions
from dmattn_ops.bands import Window, band_of
from dmattn_ops.checks import require, validation
from dmattn_ops.compat import weights

WindowSize = tuple[int, int]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute attention, called as flash-attn 2 is called.

    Args:
        q: with shape `[B, Sq, H, D]`.
        k, v: with shape `[B, Sk, Hkv, D]`.
        dropout_p: probability with which a weight is dropped.
        softmax_scale: factor of the scores; None is `1 / sqrt(D)`.
        causal: whether keys behind the diagonal, which ends in the bottom right corner, are hidden.
        window_size: `(left, right)` of the diagonal; -1 is unlimited.
        softcap: 0 is off; else scores become `softcap * tanh(score / softcap)`.
        alibi_slopes: float32 `[H]` or `[B, H]`, see above.
        deterministic: whether the backward gives the same bits each time.
        return_attn_probs: for tests: whether to return `(out, softmax_lse, S_dmask)`. With dropout, `S_dmask` are the weights,
            negative where they were dropped, `[B, H, Sq, Sk]` rounded up to 128; without, it is empty.
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    bias = None
    if alibi_slopes is not None:
        validation.tensors(q=q, k=k, v=v)
        alibi_slopes = _slopes_for(q, alibi_slopes, q.shape[0], q.shape[2])
        by_key, most = options["is_causal"] or options["window_size"][1] == 0, biases.exact_rows(q.dtype)
        if by_key and q.shape[1] > most:
            rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
            behind, parts = k.shape[1] - q.shape[1], []
            for first in range(0, q.shape[1], most):
                last = min(first + most, q.shape[1])
                seen = max(0, last + behind)
                parts.append(flash_attn_func(q[:, first:last], k[:, :seen], v[:, :seen], dropout_p, *rest))
            return _joined(parts, 1, 2, q) if return_attn_probs else torch.cat(parts, 1)
        if by_key:
            bias = biases.alibi_of_keys(alibi_slopes, k.shape[1])
        else:
            bias = biases.alibi_of_distances(alibi_slopes, q.shape[1], k.shape[1])

    def attend() -> Any:
        return functions.flash_dmattn_func(q, k, v, bias=bias, **options, return_lse=True)

    if not return_attn_probs:
        return attend()[0]
    (out, lse), seed = weights.with_dropout_seed(q, None, attend) if dropout_p else (attend(), None)
    probabilities = q.new_empty(0)
    if seed is not None:
        band = band_of(options["is_causal"], "bottom_right", options["window_size"])
        probabilities = weights.dense_weights(
            q, k, lse, band=band, scale=softmax_scale, softcap=softcap, bias=bias, seed=seed, dropout_p=dropout_p
        )
    if alibi_slopes is not None and bias is not None and bias.shape[2] == 1:
        lse = lse + biases.alibi_lse(alibi_slopes, q.shape[1])
    return out, torch.where(lse == -torch.inf, torch.inf, lse), probabilities


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute `flash_attn_func` of keys and values in one tensor, `[B, Sk, 2, Hkv, D]`."""
    key, value = kv.unbind(2)
    rest: Any = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, key, value, dropout_p, *rest)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute `flash_attn_func` of one tensor, `[B, S, 3, H, D]`; its gradient is written without copies."""
    if alibi_slopes is not None or return_attn_probs:
        query, key, value = qkv.unbind(2)
        rest: Any = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
        return flash_attn_func(query, key, value, dropout_p, *rest)
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    return functions.flash_dmattn_qkvpacked_func(qkv, **options)


def _one_by_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: list[tuple[slice, slice]],
    alibi_slopes: Tensor,
    numbers: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `flash_attn_varlen_func` sequence by sequence, where they are too long for one bias of each key."""
    dropout_p, softmax_scale, causal, window_size, softcap, deterministic = numbers
    parts = []
    for number, (rows, columns) in enumerate(sequences):
        slopes = alibi_slopes if alibi_slopes.shape[0] == 1 else alibi_slopes[number : number + 1]
        alone = q[None, rows], k[None, columns], v[None, columns]
        rest: tuple[Any, ...] = (softmax_scale, causal, window_size, softcap, slopes, deterministic, True)
        parts.append(flash_attn_func(*alone, dropout_p, *rest))
    out, lse, probabilities = _joined(parts, 1, 0, q)
    behind = q.shape[0] - out.shape[1]  # rows of no sequence
    return F.pad(out[0], (0, 0, 0, 0, 0, behind)), F.pad(lse[0], (0, behind), value=torch.inf), probabilities


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Compute attention of packed sequences, called as flash-attn 2 is called.

    Args:
        q: with shape `[total_q, H, D]`.
        k, v: with shape `[total_k, Hkv, D]`.
        cu_seqlens_q, cu_seqlens_k: int32 `[B + 1]`.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as in
            `flash_attn_func`; `softmax_lse` is `[H, total_q]`.

    Raises:
        NotImplementedError: for a `block_table` (paged keys), and for ALiBi without causality.
    """
    if block_table is not None:
        raise NotImplementedError("block_table is not supported: keys and values must not be paged")
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    lengths = validation.integers(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    bias = None
    if alibi_slopes is not None:
        validation.tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        alibi_slopes = _slopes_for(q, alibi_slopes, cu_seqlens_q.shape[0] - 1, q.shape[1])
        if not options["is_causal"] and options["window_size"][1] != 0:
            raise NotImplementedError(
                "alibi_slopes with variable lengths are supported for causal attention only: without it the bias is not one of"
                " each key"
            )
        if (long := _long_sequences(q, cu_seqlens_q, cu_seqlens_k, lengths)) is not None:
            numbers = dropout_p, softmax_scale, causal, window_size, softcap, deterministic
            out, lse, probabilities = _one_by_one(q, k, v, long, alibi_slopes, numbers)
            return (out, lse, probabilities) if return_attn_probs else out
        bias = biases.alibi_of_packed_keys(alibi_slopes, cu_seqlens_k, k.shape[0])

    offsets, bounds = (cu_seqlens_q, cu_seqlens_k), (lengths[0], lengths[1])

    def attend() -> Any:
        return functions.flash_dmattn_varlen_func(q, k, v, *offsets, *bounds, bias=bias, **options, return_lse=True)

    if not return_attn_probs:
        return attend()[0]
    batch = cu_seqlens_q.shape[0] - 1
    (out, lse), seed = weights.with_dropout_seed(q, batch, attend) if dropout_p else (attend(), None)
    probabilities = q.new_empty(0)
    if seed is not None:
        band = band_of(options["is_causal"], "bottom_right", options["window_size"])
        probabilities = weights.varlen_weights(
            q,
            k,
            lse,
            (cu_seqlens_q, cu_seqlens_k),
            band=band,
            scale=softmax_scale,
            softcap=softcap,
            bias=bias,
            seed=seed,
            dropout_p=dropout_p,
        )
    if alibi_slopes is not None:
        lse = lse + biases.alibi_packed_lse(alibi_slopes, cu_seqlens_q, q.shape[0])
    return out, torch.where(lse == -torch.inf, torch.inf, lse), probabilities


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute `flash_attn_varlen_func` of keys and values in one tensor, `[total_k, 2, Hkv, D]`."""
    key, value = kv.unbind(1)
    rest: Any = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(
        q, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, *rest
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute `flash_attn_varlen_func` of one tensor, `[total, 3, H, D]`."""
    query, key, value = qkv.unbind(1)
    rest: Any = (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, *rest)


def flash_attn_with_kvcache(*arguments: Any, **keywords: Any) -> Any:
    """Say what to call instead of flash-attn's function that writes into a cache, which is not here.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "flash_attn_with_kvcache is not here, since this library writes into no cache and takes no pages: write the new keys and"
        " values into yours, turn them by rotary embeddings, and call flash_attn_func(q, k_cache[:, :length],"
        " v_cache[:, :length], causal=True)"
    )


def _slopes_for(q: Tensor, slopes: Tensor, batch: int, heads: int) -> Tensor:
    """Return slopes as the bias of a call is computed from them, float32 or float64 `[B|1, H]`.

    Refuse such as are not `[H]` or `[B|1, H]`: others could be taken for them, sequence by sequence.
    """
    validation.tensors(alibi_slopes=slopes)
    if slopes.dim() == 1:
        require.shape("alibi_slopes", slopes, (heads,))
    else:
        require.sizes("alibi_slopes", slopes, (1, batch), (heads,))
    wide = torch.promote_types(torch.float32, q.dtype)
    return slopes.to(torch.promote_types(slopes.dtype, wide) if wide == torch.float64 else wide).reshape(-1, heads)


def _long_sequences(
    q: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, lengths: list[int]
) -> list[tuple[slice, slice]] | None:
    """Return the slices of each sequence among queries and keys, if one has more queries than a bias of keys is exact for.

    Offsets are read on the host for that, where the bounds leave it open.
    """
    most = biases.exact_rows(q.dtype)
    if min(lengths[0], q.shape[0]) <= most:
        return None
    if is_compiling() or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        raise NotImplementedError(
            f"alibi_slopes with sequences of more than {most} queries read cu_seqlens on the host, which a graph cannot:"
            f" pass a max_seqlen_q of at most {most} where it holds, got {lengths[0]}"
        )
    of_queries, of_keys = (
        [slice(*each) for each in pairwise(offsets.tolist())] for offsets in (cu_seqlens_q, cu_seqlens_k)
    )
    found = list(zip(of_queries, of_keys, strict=True))
    return found if any(rows.stop - rows.start > most for rows in of_queries) else None


def _joined(parts: list[Any], rows: int, of_weights: int, like: Tensor) -> Any:
    """Return out, lse and weights of calls one behind the other: out along dimension `rows`, weights along `of_weights`."""
    outs, lses, weights_of = zip(*parts, strict=True)
    if not any(each.numel() for each in weights_of):
        return torch.cat(outs, rows), torch.cat(lses, 2), like.new_empty(0)
    longest = [max(each.shape[dim] for each in weights_of) for dim in (2, 3)]
    padded = [
        F.pad(each, (0, longest[1] - each.shape[3], 0, longest[0] - each.shape[2] if of_weights == 0 else 0))
        for each in weights_of
    ]
    return torch.cat(outs, rows), torch.cat(lses, 2), torch.cat(padded, of_weights)


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    deterministic: bool,
) -> dict[str, Any]:
    """Return the keywords of this library's functions."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size must be a pair (left, right), got {window_size!r}")
    limits = [None if limit is None else require.integer("window_size", limit) for limit in window_size]
    left, right = (None if limit is None or limit < 0 else limit for limit in limits)
    window: Window = (left, right)
    return {
        "dropout_p": dropout_p,
        "softmax_scale": softmax_scale,
        "is_causal": bool(causal),
        "window_size": window,
        "softcap": softcap,
        "deterministic": bool(deterministic),
    }
