"""What the public functions make of their arguments before they call an operator: cast, read, refuse, draw seeds."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dmattn_ops import environment, symbolic
from dmattn_ops.bands import NO_BAND, Band, CausalFrom, Window, band_of, visibility
from dmattn_ops.call import Mask, Used
from dmattn_ops.checks import dtensors, require, validation, values
from dmattn_ops.masks.tile_mask import TileMask, read
from dmattn_ops.ops import schemas, torch_privates

_SEED_END = (1 << 63) - 1
_MASKS_OF_OTHER_RANKS = {
    2: "padding [B, Sk] is passed as prepare_mask(mask, seqlen_q=Sq), and a mask [Sq, Sk] as mask[None, None]",
    3: "a mask [B, Sq, Sk] is passed as mask[:, None]",
}
MANY_HEADS = 128  # of keys; no model is known that has more


_NAMES_ELSEWHERE = {
    "causal": "is_causal",
    "attn_mask": "mask (bool) or bias (additive)",
    "attention_mask": "mask (bool) or bias (additive)",
    "block_mask": "mask, as prepare_mask returns it",
    "attn_bias": "bias",
    "scale": "softmax_scale",
    "sm_scale": "softmax_scale",
    "window": "window_size",
    "dropout": "dropout_p",
    "logits_soft_cap": "softcap",
    "sinks": "sink",
    "s_aux": "sink",
    "return_attn_probs": "return_lse",
    "alibi_slopes": "bias, as dmattn_ops.biases.alibi_of_keys(slopes, Sk) returns it",
    "score_mod": "bias (a tensor that is added) or softcap",
    "max_seqlen": "max_seqlen_q and max_seqlen_k",
    "cu_seqlens": "cu_seqlens_q and cu_seqlens_k",
    "q": "query",
    "k": "key",
    "v": "value",
}


def unknown_names(function: str, unknown: dict[str, Any]) -> None:
    """Refuse arguments that a function does not have; name its own where other libraries call it so."""
    if next(iter(unknown)) == "enable_gqa":
        hint = "heads of key and value are grouped where they are fewer than those of query"
        raise TypeError(f"{function}() got an unexpected keyword argument 'enable_gqa': {hint}")
    require.no_unknown(function, unknown, _NAMES_ELSEWHERE)


def prepared_inputs(
    rank: int, bias: Tensor | None, sink: Tensor | None, **tensors: Tensor
) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    """Refuse what is no tensor of that rank, cast for autocast, and copy where the last dimension is not contiguous."""
    prepared, strided = list(tensors.values()), False
    if type(prepared[0]) is not Tensor:
        dtensors.load_rules(prepared[0])
    for tensor in prepared:
        if not isinstance(tensor, Tensor) or tensor.dim() != rank or not validation.is_dense(tensor):
            _refuse(rank, tensors)
        if tensor.stride(-1) != 1:
            strided = True
    if bias is not None:
        validation.dense(bias=bias)
    if sink is not None:
        validation.dense(sink=sink)
    first = prepared[0]
    device_type = "cuda" if first.is_cuda else "cpu" if first.is_cpu else None
    if device_type is not None and torch.is_autocast_enabled(device_type):
        dtype, strided = torch.get_autocast_dtype(device_type), True
        prepared = [_cast(tensor, dtype) for tensor in prepared]
        bias, sink = (
            each if each is None or each.dtype == torch.float32 else _cast(each, dtype) for each in (bias, sink)
        )
    if strided:
        prepared = [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in prepared]
    if bias is not None and bias.dim() > 0 and bias.stride(-1) != 1:
        bias = bias.contiguous()
    return prepared, bias, sink


def _refuse(rank: int, tensors: dict[str, Tensor]) -> None:
    """Refuse the first that is no tensor of that rank."""
    for name, tensor in tensors.items():
        validation.dense(**{name: tensor})
        require.rank(name, tensor, rank, require.LAYOUTS[rank])


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def mask_of_keys(mask: Any) -> None:
    """Refuse what is no mask of the keys of packed sequences."""
    if isinstance(mask, TileMask):
        raise TypeError(
            "mask must be a tensor [H|Hkv|1, total_k], got a TileMask: call flash_dmattn_func on one row [1, total, H, D],"
            f" with documents={require.IDS_OF_OFFSETS} in the mask"
        )
    validation.tensors(mask=mask)
    validation.keep_mask(mask)


def refuse_shared_sequences(attention: Any) -> None:
    """Refuse a call inside torch's `context_parallel()`, which hands every rank a part of the sequence and says so to SDPA only."""
    if str(getattr(attention, "__module__", "")).startswith("torch.distributed.tensor.experimental"):
        raise RuntimeError(
            "inside torch's context_parallel() a call would attend to this rank's part of the sequence only: call"
            " dmattn_ops.distributed.context_parallel_attention with the same mesh as group, which is right there"
        )


def taken_as_it_is(mask: Tensor | TileMask, query: Tensor, key: Tensor, band: Band) -> tuple[Mask, int, int] | None:
    """Return a prepared mask that fits for certain and hides what `band` hides, as the operators take it; None for others."""
    if type(mask) is not TileMask or is_compiling():
        return None
    (batch, seqlen_q, heads, _), (_, seqlen_k, heads_kv, _) = query.shape, key.shape
    known = read(mask)
    of_batch, of_heads, *lengths = known.shape
    fits = (
        lengths == [seqlen_q, seqlen_k]
        and of_batch in (1, batch)
        and of_heads in (1, heads, heads_kv)
        and known.device == query.get_device()
        and known.on_cpu == query.is_cpu  # meta tensors have the same index as those of the CPU
        and band.contains(known.band)
    )
    return known.taken if fits else None


def warn_of_swapped_dimensions(key: Tensor) -> None:
    """Warn, once, of a key of very many heads that looks like `[B, Hkv, Sk, D]`: it has more heads than positions."""
    _, seqlen, heads, _ = key.shape
    if seqlen < heads:
        environment.warn_once(
            f"dmattn_ops: key of shape {require.text(key.shape)} is [B, S, heads, D] with {seqlen} positions and {heads} heads."
            " If it is [B, heads, S, D], pass query, key and value as tensor.transpose(1, 2), which copies nothing."
        )


def check_mask(mask: Tensor | TileMask | None, query: Tensor, *sizes: tuple[int, ...]) -> None:
    """Refuse a mask that does not broadcast to `[B, H, Sq, Sk]`, or lies elsewhere."""
    if mask is None:
        return
    if not isinstance(mask, (Tensor, TileMask)):
        hint = ""
        if isinstance(mask, (list, tuple)):
            hint = ": one mask of several is a & b of their tensors, with documents= and intervals= of prepare_mask"
        raise TypeError(f"mask must be a tensor or come from prepare_mask, got {require.type_text(mask)}{hint}")
    if isinstance(mask, Tensor):
        validation.keep_mask(mask)
    hints = _MASKS_OF_OTHER_RANKS
    if isinstance(mask, TileMask) and not (
        symbolic.known_equal(mask.seqlen_q, sizes[2][-1]) and symbolic.known_equal(mask.seqlen_k, sizes[3][-1])
    ):
        hints = {
            4: "the mask of some of its queries is mask.queries(start, stop), of some of its keys mask.keys(start, stop)"
        }
    require.sizes("mask", mask, *sizes, axes=require.AXES, hints=hints)
    require.device("mask", mask, query.device)


Numbers = tuple[Band, tuple[float | None, float, float]]


def read_numbers(*given: Any) -> Numbers:
    """Refuse types and values; return the band, and scale, softcap and dropout as the operators take them.

    `given` is causal, where from, window, scale, softcap, dropout. What was seen before is looked up.
    """
    window_size = given[2]
    if not is_compiling() and type(window_size) is tuple and len(window_size) == 2:
        try:
            return _known_numbers(*window_size, *given)
        except TypeError:  # what cannot be looked up (a traced number, say), or is to be refused
            pass
    return _new_numbers(*given)


def _new_numbers(
    is_causal: bool,
    causal_from: CausalFrom,
    window_size: Window,
    softmax_scale: float | None,
    softcap: float,
    dropout_p: float,
) -> Numbers:
    causal_from, window_size = visibility(is_causal, causal_from, window_size)
    if softmax_scale is not None:
        softmax_scale = validation.number("softmax_scale", softmax_scale)
    softcap, dropout_p = validation.number("softcap", softcap), validation.number("dropout_p", dropout_p)
    validation.scalars(softmax_scale, softcap, dropout_p)
    return band_of(is_causal, causal_from, window_size), (softmax_scale, softcap, dropout_p)


@lru_cache(maxsize=1024, typed=True)  # typed: 1 is no bool; so the window's limits are given by themselves as well
def _known_numbers(left: int | None, right: int | None, *given: Any) -> Numbers:
    return _new_numbers(*given)


def used_keys(seqlen_k_used: Tensor | None, query: Tensor, key_length: int, band: Band) -> tuple[Band, Used | None]:
    """Return the band of a call that keeps its place, and how many keys are used, with the band that is aligned with them.

    `query` is one with the batch as its first dimension.
    """
    if seqlen_k_used is None:
        return band, None
    validation.used_keys(seqlen_k_used, query)
    if values.on_the_host(seqlen_k_used) and not dtensors.is_sharded(seqlen_k_used):
        values.used_keys(seqlen_k_used, key_length)
    if not band.bottom_right:
        return band, Used(seqlen_k_used, *NO_BAND[:2])
    return NO_BAND, Used(seqlen_k_used, *band[:2])


def switches(deterministic: bool | None, return_lse: bool, return_max: bool, batch_invariant: bool = False) -> bool:
    """Return whether results must be the same each time; refuse other types of the four."""
    if not isinstance(return_lse, bool) or not isinstance(return_max, bool) or not isinstance(batch_invariant, bool):
        validation.flags(return_lse=return_lse, return_max=return_max, batch_invariant=batch_invariant)
    if batch_invariant:
        if deterministic is not None:
            validation.flags(deterministic=deterministic)
        return True
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    if not isinstance(deterministic, bool):
        validation.flags(deterministic=deterministic)
    return deterministic


def dropout_seed(query: Tensor, batch: int | None = None) -> Tensor:
    """Draw the seeds of one call's dropout, int64 `[B, H]`, one for each sequence and head.

    A tensor, so that graphs, checkpoints and compilers see it. For packed sequences, `query [total_q, H, D]`, `batch` is
    their number.
    """
    if dtensors.is_sharded(query):
        return dtensors.seed(query, query.shape[0] if batch is None else batch)
    if is_compiling() or torch_privates.dispatch_modes is None or torch_privates.dispatch_modes() > 0:
        return torch.ops.dmattn.draw_seed(query, batch)
    return _drawn(query, batch)


def _drawn(query: Tensor, batch: int | None = None) -> Tensor:
    """Draw seeds; in a graph, once: drawn again in the backward, they would drop other weights than the forward did."""
    if batch is not None:
        with torch_privates.saved_for_backward():
            return torch.randint(_SEED_END, (batch, query.shape[-2]), dtype=torch.int64, device=query.device)
    like = query.detach()[:, :1, :, 0].sum(1)  # [B, H], also where there are no positions
    with torch_privates.saved_for_backward():
        return torch.randint_like(like, _SEED_END, dtype=torch.int64)


def _draw_seed(query: Tensor, batch: int | None = None) -> Tensor:
    validation.tensors(query=query)
    return _drawn(query, batch)


# Under vmap too: torch's own draw knows what `randomness` asks for.
for _key in ("CompositeImplicitAutograd", "FuncTorchBatched"):
    schemas.library.impl("draw_seed", _draw_seed, _key)
