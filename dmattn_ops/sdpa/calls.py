"""Calls of this library's operators for torch's: bands, packed sequences, additive masks, the state of dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dmattn_ops.bands import NO_BAND, Band, band_of
from dmattn_ops.call import MASK_TENSORS, NO_MASK, Mask
from dmattn_ops.masks.prepare import prepare_mask

_GOLDEN, _MIX_1, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685  # of splitmix64, as int64
Offsets = tuple[Tensor, Tensor, int, int] | None


class Refused(Exception):
    """Says why a call is left to torch."""


def refuse(names: list[str]) -> None:
    """Refuse a call that asks for these things."""
    if names:
        raise Refused(f"it asks for {' and '.join(names)}")


def flash_band(is_causal: bool, left: int | None, right: int | None) -> Band:
    """Return the band of flash attention's window, in which None and negative sizes are unlimited."""
    window = tuple(None if limit is None or limit < 0 else limit for limit in (left, right))
    return band_of(is_causal, "bottom_right", window)  # type: ignore[arg-type]


def packed_offsets(cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int) -> Offsets:
    """Return the offsets of packed sequences, or None for a dense call."""
    if cum_seq_q is None or cum_seq_q.numel() == 0:  # a saved None may come back as a tensor without elements
        return None
    if cum_seq_k is None:
        raise Refused("it has no offsets of keys")
    return cum_seq_q.to(torch.int32), cum_seq_k.to(torch.int32), int(max_q), int(max_k)


def _numbers(scale: float | None, dropout_p: float) -> dict[str, Any]:
    """Return the numbers of an operator that torch's functions give, by their names."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return {"softmax_scale": scale, "dropout_p": dropout_p, "deterministic": deterministic}


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Offsets,
    band: Band,
    scale: float | None,
    dropout_p: float,
    state: Tensor,
    bias: Tensor | None = None,
    mask: Mask = NO_MASK,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of `[B, S, heads, D]`, or packed `[total, heads, D]`."""
    numbers = _numbers(scale, dropout_p)
    if offsets is not None:
        seed = seeds_of(state, offsets[0].shape[0] - 1, query.shape[-2]) if dropout_p else None
        packed = (query, key, value, *offsets[:2], None, None, None, seed, *offsets[2:])
        return torch.ops.dmattn.varlen_forward.default(*packed, band_lo=band.lo, band_hi=band.hi, **numbers)[:2]
    seed = seeds_of(state, query.shape[0], query.shape[-2]) if dropout_p else None
    lo, hi = band.limits(query.shape[1], key.shape[1])
    tensors = {**_parts_of(mask), "bias": bias, "seed": seed, "band_lo": lo, "band_hi": hi}
    return torch.ops.dmattn.forward.default(query, key, value, **tensors, **numbers)[:2]


def backward(
    tensors: tuple[Tensor, ...],
    offsets: Offsets,
    band: Band,
    scale: float | None,
    dropout_p: float,
    state: Tensor,
    bias: Tensor | None = None,
    mask: Mask = NO_MASK,
    needs_dbias: bool = False,
) -> tuple[Tensor, ...]:
    """Return dq, dk, dv and dbias; `tensors` are grad_out, query, key, value, out and lse."""
    grad_out, query, key, value, out, lse = tensors
    lse = torch.where(lse == torch.inf, -torch.inf, lse)  # of empty rows, where torch's own forward wrote it
    saved = (grad_out, None, query, key, value, out, lse, torch.zeros_like(lse))
    numbers = _numbers(scale, dropout_p)
    if offsets is not None:
        seed = seeds_of(state, offsets[0].shape[0] - 1, query.shape[-2]) if dropout_p else None
        packed = (*saved, *offsets[:2], None, None, None, seed, *offsets[2:])
        return torch.ops.dmattn.varlen_backward.default(*packed, band_lo=band.lo, band_hi=band.hi, **numbers)[:4]
    seed = seeds_of(state, query.shape[0], query.shape[-2]) if dropout_p else None
    lo, hi = band.limits(query.shape[1], key.shape[1])
    rest = {**_parts_of(mask), "bias": bias, "seed": seed, "band_lo": lo, "band_hi": hi, "needs_dbias": needs_dbias}
    return torch.ops.dmattn.backward.default(*saved, **rest, **numbers)[:4]


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out `[B, H, Sq, Dv]`, lse and the state of dropout of `[B, heads, S, D]`, from the top left corner."""
    bias, mask = _mask_of(bias, query.shape[2], is_causal, narrow=True)
    state = new_state(query, dropout_p)
    band = band_of(is_causal, "top_left", (None, None)) if is_causal else NO_BAND
    query, key, value = (_rows(part).transpose(1, 2) for part in (query, key, value))
    out, lse = forward(query, key, value, None, band, scale, dropout_p, state, bias, mask)
    return out.transpose(1, 2), lse, state


def sdpa_backward(
    tensors: tuple[Tensor, ...],
    bias: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    state: Tensor,
    needs_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value `[B, heads, S, D]` and of the bias."""
    bias, mask = _mask_of(bias, tensors[0].shape[2], is_causal, narrow=not needs_dbias)
    band = band_of(is_causal, "top_left", (None, None)) if is_causal else NO_BAND
    *heads_first, lse = tensors
    seqlen_first = (_rows(part).transpose(1, 2) for part in heads_first)
    given = (*seqlen_first, lse.contiguous())
    dq, dk, dv, dbias = backward(given, None, band, scale, dropout_p, state, bias, mask, needs_dbias)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), dbias if needs_dbias else None


def _mask_of(bias: Tensor | None, seqlen_q: int, is_causal: bool, *, narrow: bool) -> tuple[Tensor | None, Mask]:
    """Return an additive mask as a bias, without the dimensions it repeats if `narrow`, and what it does not hide, packed."""
    if bias is None or bias.numel() == 0:
        return None, NO_MASK
    if bias.dim() != 4:
        raise Refused(f"its bias has {bias.dim()} dimensions")
    shown = bias.detach()
    for dim in range(3):
        if shown.shape[dim] > 1 and shown.stride(dim) == 0:
            shown = shown.narrow(dim, 0, 1)
    prepared = prepare_mask(shown > -torch.inf, seqlen_q=seqlen_q, is_causal=is_causal, causal_from="top_left").mask
    return _rows(shown if narrow else bias), prepared


def _parts_of(mask: Mask) -> dict[str, Any]:
    """Return the tensors of a mask by the names that the operators have for them."""
    return {name: getattr(mask, name) for name in (*MASK_TENSORS, "at_most")}


def new_state(query: Tensor, dropout_p: float) -> Tensor:
    """Return the state of dropout, int64 `[2]`: a number drawn from torch's generator, and 0."""
    state = torch.zeros(2, dtype=torch.int64, device=query.device)
    if dropout_p:
        state[:1] = torch.randint((1 << 63) - 1, (1,), dtype=torch.int64, device=query.device)
    return state


def seeds_of(state: Tensor, batch: int, heads: int) -> Tensor:
    """Return a seed of each sequence and head, int64 `[B, H]`, mixed from one number (splitmix64, Steele et al. 2014)."""
    steps = torch.arange(1, batch * heads + 1, device=state.device)
    mixed = state[:1] + steps * _GOLDEN
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        mixed = (mixed ^ _shifted(mixed, shift)) * factor
    return (mixed ^ _shifted(mixed, 31)).view(batch, heads)


def _shifted(number: Tensor, by: int) -> Tensor:
    """Shift int64 to the right, filling with zeros."""
    return (number >> by) & ((1 << (64 - by)) - 1)


def no_offset(query: Tensor) -> Tensor:
    """Return the number that torch saves beside the state."""
    return torch.zeros((), dtype=torch.uint64, device=query.device)


def _rows(tensor: Tensor) -> Tensor:
    """Return a tensor whose last dimension is contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def like(result: Tensor, tensor: Tensor) -> Tensor:
    """Return a result with the strides that torch has told a compiler: those of `tensor`, made dense."""
    if result.shape != tensor.shape or result.stride() == torch.empty_like(tensor, device="meta").stride():
        return result
    return torch.empty_like(tensor).copy_(result)
