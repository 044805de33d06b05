"""Models of transformers (5.x) through these kernels: `register()`, then `attn_implementation="dmattn"`.

    register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="dmattn")

or `replace_attention_with_flash_dmattn(model)` for a model that is there already. Masks are made once in a forward, as
`ForwardMask`. Masks that a model or a user made as tensors are taken too: bool ones, and additive ones, of which what is
not above `finfo.min` is hidden, and the rest is a bias that learns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.weak import WeakIdKeyDictionary

from dmattn_ops.api import functions
from dmattn_ops.checks import require
from dmattn_ops.integrations import forward_mask, hooks, own_masks, packed
from dmattn_ops.integrations.acts_as_tensor import as_additive
from dmattn_ops.integrations.dynamic_masks import DynamicMask, add_dynamic_masks
from dmattn_ops.integrations.forward_mask import ForwardMask
from dmattn_ops.integrations.own_masks import ADDITIVE_MASKS, TENSOR_MASKS
from dmattn_ops.masks.prepare import prepare_mask
from dmattn_ops.masks.tile_mask import TileMask

__all__ = [
    "DynamicMask",
    "ForwardMask",
    "add_dynamic_masks",
    "attention_forward",
    "kept_cache",
    "make_mask",
    "register",
    "replace_attention_with_flash_dmattn",
]

_prepared: WeakIdKeyDictionary = (
    WeakIdKeyDictionary()
)  # from mask tensors to what was made of them, and of which version


def register(name: str = "dmattn") -> None:
    """Make `name` an `attn_implementation` of transformers: the attention, and the masks that it wants."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, make_mask)
    hooks.watch(name)


def replace_attention_with_flash_dmattn(model: nn.Module, name: str = "dmattn") -> nn.Module:
    """Let a model of transformers attend through these kernels, and return it. Its weights stay as they are.

    Raises:
        TypeError: for what is no model of transformers.
        ValueError: for a model whose code does not let its attention be chosen.
    """
    register(name)
    if not hasattr(model, "set_attn_implementation"):
        raise TypeError(
            f"model must be one of transformers, with set_attn_implementation, got {type(model).__name__}: if it wraps such a"
            " model, pass that"
        )
    model.set_attn_implementation(name)  # type: ignore[operator]
    parts = [part for part in model.modules() if hasattr(part, "set_attn_implementation")]
    chosen = {str(getattr(part.config, "_attn_implementation", None)) for part in parts}
    if name not in chosen:
        raise ValueError(
            f"{type(model).__name__} does not go through AttentionInterface of transformers, so that its attention stays"
            f" {' and '.join(sorted(chosen))!r}: its own code would have to change"
        )
    return model


def kept_cache(model: nn.Module, *, rollback: int = 0) -> Any:
    """Return a cache of constant size for a model with dynamic masks, `model.generate(ids, past_key_values=kept_cache(model))`.

    Each layer holds the keys that its mask can still show (see `dmattn_ops.KeptKeys`), so that the results are those of a cache
    of all keys, however long the text is. Greedy search, sampling and beam search take it. A layer with a sliding window keeps
    its window.

    Args:
        model: one of transformers, after `add_dynamic_masks`, with `attn_implementation="dmattn"`.
        rollback: how many positions can be taken back by `cache.crop(-n)`, for assisted generation.

    Raises:
        ValueError: for a model without dynamic masks, and a negative `rollback`.
        TypeError: for what is no model of transformers, and a `rollback` that is no integer.
    """
    [rollback] = require.counts(rollback=rollback)
    if not hasattr(model, "config"):
        raise TypeError(f"model must be one of transformers, with a config, got {type(model).__name__}")
    if not any(isinstance(module, DynamicMask) for module in model.modules()):
        raise ValueError(f"{type(model).__name__} has no dynamic masks: call add_dynamic_masks(model, keep) first")
    from dmattn_ops.integrations.kept_cache import KeptCache

    return KeptCache(model.config, rollback)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: ForwardMask | TileMask | Tensor | None,
    dropout: float = 0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer: what `AttentionInterface` calls.

    Args:
        module: asked for `is_causal` where that is None, and for a `dynamic_mask` (see `add_dynamic_masks`).
        query: with shape `[B, H, Sq, D]`.
        key, value: with shape `[B, Hkv, Sk, D]`.
        attention_mask: what `make_mask` or `prepare_mask` returned, a tensor `[B|1, H|Hkv|1, Sq|1, Sk]` (bool, or additive),
            padding `[B, Sk]`, or None: then a causal layer starts its diagonal in the top left corner, and a single query
            sees everything.
        dropout, scaling, softcap: as in `flash_dmattn_func`.
        sliding_window: how many keys a query sees, its own included. Masks say that themselves.
        is_causal: whether to be causal where there is no mask.
        s_aux: sinks, `[H]`.
        position_bias: with shape `[B|1, H, Sq, Sk]`.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: packed sequences of a batch of 1.
        indices: `[B, Sq, n]`: the only keys that each query sees, beside a mask tensor (sparse attention as in DeepSeek-V3.2).
        block_indices: `[B, H|Hkv|1, Sq, n]`: the only blocks of keys that each query sees; -1 is none. How many keys a block has
            says `module.indexer.block_size` (sparse attention as in MiniMax-M3).
        others: are for other attention. Those that would change the result are refused.

    Returns:
        out with shape `[B, Sq, H, Dv]`, and None for the weights.

    Raises:
        NotImplementedError: for `sinks` that differ from query to query, for `indices` beside a mask that is no tensor, and for
            `block_indices` of a layer that does not say how long its blocks are, or that has a dynamic mask.
    """
    own_masks.check_others(others)
    packed.refuse_unfollowed(query.shape[0], query.shape[2])
    cached = None if is_compiling() else _layer_beside(key)
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0, "dropout_p": dropout, "sink": s_aux}
    selector: Any = getattr(module, "dynamic_mask", None)
    if cached is not None:
        if position_bias is not None or indices is not None or block_indices is not None:
            raise NotImplementedError("kept_cache takes neither position_bias nor indices nor block_indices")
        return cached.attend(selector, (query, key, value), attention_mask, options), None
    bias = None if position_bias is None else position_bias[..., : key.shape[1]]
    mask = attention_mask if indices is None else own_masks.among(attention_mask, indices, key.shape[1])
    if mask is None or (isinstance(mask, Tensor) and mask.dim() == 2):
        mask = _by_convention(mask, query, key, causal, sliding_window)
    elif isinstance(mask, Tensor):
        mask, additive = _of_tensor(mask, query.shape[1], key.shape[1])
        bias = _sum(bias, additive)
    if (
        cu_seq_lens_q is not None
        and cu_seq_lens_k is not None
        and isinstance(mask, ForwardMask)
        and mask.documents is None
    ):
        if selector is None and bias is None and block_indices is None and not mask.dense:
            offsets, lengths = (cu_seq_lens_q, cu_seq_lens_k), (max_length_q, max_length_k)
            return _packed(mask, (query, key, value), offsets, lengths, options), None
        mask = _with_documents(mask, cu_seq_lens_k, key.device)
    if block_indices is not None:
        if selector is not None:
            raise NotImplementedError("block_indices= and a dynamic mask both choose a layer's keys: use one of them")
        mask = own_masks.among_blocks(mask, block_indices, module, key.shape[1])
    if selector is not None:
        mask, scores = selector.select(value, mask)
        bias = _sum(bias, scores)
    if isinstance(mask, ForwardMask):
        if mask.prepared is None:
            own_masks.check_length(mask, key.shape[1])
            options |= mask.keywords
        mask = mask.prepared
    if bias is not None and bias.dtype not in (query.dtype, torch.float32):
        bias = bias.to(query.dtype)
    return functions.flash_dmattn_func(query, key, value, mask, bias, **options), None  # type: ignore[return-value]


def _layer_beside(key: Tensor) -> Any:
    """Return the layer of a `kept_cache` that returned keys; None of others, and where no such cache was made."""
    module = sys.modules.get("dmattn_ops.integrations.kept_cache")
    return None if module is None else module.layer_beside(key)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Any = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **others: Any,
) -> Any:
    """Make what the layers of one forward get as their mask: what `AttentionMaskInterface` calls.

    Args:
        batch_size, q_length, kv_length: how many sequences, queries and keys.
        q_offset, kv_offset: where the first query and the first key stand.
        mask_function: says of a sequence, a head, a query and a key whether it is visible; None is causal.
        attention_mask: padding, bool `[B, keys]`; or a mask that was made before, which is returned.
        local_size: how many keys a query sees in a sliding window or a chunk, its own included.
        allow_is_causal_skip: False where the mask function is something more than causal or sliding.
        use_vmap: True where it holds a function of the model's own.
        device: where to make the mask.
        config: of the model.
        others: say whether the mask looks both ways, and the dtype of an additive one.
    """
    from transformers.masking_utils import (
        causal_mask_function,
        sdpa_mask,
    )  # torch 2.11 cannot trace `from transformers`

    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        return attention_mask
    device = torch.device(device)
    function = causal_mask_function if mask_function is None else mask_function
    model_type = getattr(config, "model_type", None)
    as_tensor = model_type in TENSOR_MASKS or model_type in ADDITIVE_MASKS
    both_ways = _looks_both_ways(function, others)
    padding = _of_keys(attention_mask, kv_length, kv_offset)
    of_queries, documents = _documents(batch_size, q_length, q_offset, kv_length, kv_offset, padding)
    if as_tensor or use_vmap or both_ways is None:
        keep = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        if of_queries is not None and documents is not None:
            keep = keep & (of_queries[:, None, :, None] == documents[:, None, None])
        if model_type in ADDITIVE_MASKS:
            return as_additive(keep, others.get("dtype") or torch.get_default_dtype())
        return keep if as_tensor else forward_mask.make_dense(keep)
    sliding = local_size is not None and getattr(config, "attention_chunk_size", None) is None
    plain = both_ways or function is causal_mask_function
    if not plain and not (sliding and (allow_is_causal_skip or q_length == 1)):
        known = None if _tells_sequences(function, attention_mask) else documents
        documents = forward_mask.runs_of(function, batch_size, kv_length, kv_offset, attention_mask, known, device)
    window = {}
    if local_size is not None:
        window = {"left": local_size, "right": local_size} if both_ways else {"left": local_size - 1}
    return forward_mask.make(
        q_length,
        kv_length,
        q_offset - kv_offset,
        is_causal=not both_ways,
        documents=documents,
        padding=padding,
        batch=batch_size,
        device=device,
        **window,
    )


def _documents(
    batch: int, q_length: int, q_offset: int | Tensor, kv_length: int, kv_offset: int, padding: Tensor | None
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return ids `[B, Sq]` and `[B, Sk]` of the packed sequences that the model's inputs tell of, to queries and to keys."""
    packing = packed.noted()
    if packing is None or packing.own_mask:
        return None, None
    keep = padding
    if padding is not None:
        places = torch.arange(q_length, device=padding.device) + (q_offset - kv_offset)
        keep = padding[:, places.clamp(0, kv_length - 1)].expand(batch, -1)
    of_queries = packing.documents(batch, q_length, keep)
    if of_queries is None:
        return None, None
    return of_queries, packed.of_keys(of_queries, packing, q_offset, kv_offset, kv_length)


def _tells_sequences(function: Callable[..., Any], attention_mask: Tensor | None) -> bool:
    """Return whether transformers has put the packed sequences into a mask function: it does so only where there is no padding."""
    if attention_mask is not None or is_compiling():  # a tracer cannot look into functions that it made
        return attention_mask is None
    return any(part.__qualname__.startswith("packed_sequence_mask_function.") for part in _parts_of(function))


def _looks_both_ways(function: Callable[..., Any], others: dict[str, Any]) -> bool | None:
    """Return whether a mask function shows keys behind the query; None for what is not known to be one of transformers'."""
    from transformers.masking_utils import bidirectional_mask_function as bidirectional
    from transformers.masking_utils import causal_mask_function as causal

    if function is causal or function is bidirectional:
        return function is bidirectional
    if function.__code__ is not _code_of_joined_masks():
        return None
    if is_compiling():  # a tracer cannot look into functions that it made
        return "allow_is_bidirectional_skip" in others
    parts = set(_parts_of(function))
    theirs = all(part.__module__ == causal.__module__ for part in parts)
    overlaid = any(part.__qualname__.startswith(("or_masks.", "blockwise_overlay.")) for part in parts)
    if not theirs or overlaid or (causal in parts) == (bidirectional in parts):
        return None
    return bidirectional in parts


def _parts_of(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield the functions that a mask function was made of, itself included."""
    yield function
    for cell in function.__closure__ or ():
        held = cell.cell_contents
        for part in held if isinstance(held, tuple) else (held,):
            if isinstance(part, FunctionType):
                yield from _parts_of(part)


@torch.compiler.assume_constant_result
def _code_of_joined_masks() -> Any:
    """Return the code that all functions made by `and_masks` share: it tells them from a model's own."""
    from transformers.masking_utils import and_masks

    return and_masks().__code__


def _of_keys(padding: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """Return padding bool `[B, Sk]` of the keys from `kv_offset` on; those that it does not know are not there."""
    if padding is None:
        return None
    if padding.dim() != 2:
        raise ValueError(
            "attention_mask must be padding [B, S], or a mask [B, 1, S, S], bool or additive, got shape"
            f" {require.text(padding.shape)}"
        )
    missing = max(0, kv_offset + kv_length - padding.shape[1])
    return torch.nn.functional.pad(padding != 0, (0, missing))[:, kv_offset : kv_offset + kv_length]


def _by_convention(
    padding: Tensor | None, query: Tensor, key: Tensor, causal: bool, sliding_window: int | None
) -> ForwardMask:
    """Return the mask of a layer that was given none, or only padding `[B, Sk]`."""
    q_length, kv_length = query.shape[1], key.shape[1]
    return forward_mask.make(
        q_length,
        kv_length,
        kv_length - 1 if q_length == 1 else 0,
        is_causal=causal,
        left=sliding_window - 1 if causal and sliding_window is not None else None,
        padding=_of_keys(padding, kv_length, 0),
        device=query.device,
    )


def _of_tensor(mask: Tensor, q_length: int, kv_length: int) -> tuple[TileMask, Tensor | None]:
    """Return a mask `[B|1, Hm, Sq|1, Sk]` prepared once for all layers, and, where it is additive, the bias that it is."""
    cut = mask if mask.shape[-1] == kv_length else mask[..., :kv_length]
    additive = cut if mask.is_floating_point() else None
    traced = is_compiling() or mask.is_inference()
    state = (q_length, kv_length, None if traced else mask._version)
    known = None if traced else _prepared.get(mask)
    if known is not None and known[0] == state:
        return known[1], additive
    # what is kept for later calls must be fit for training, whatever mode the first one runs in
    with nullcontext() if is_compiling() else torch.inference_mode(False), torch.no_grad():
        keep = cut if additive is None else cut > torch.finfo(mask.dtype).min
        made = prepare_mask(keep, seqlen_q=q_length)
    if not traced:
        _prepared[mask] = (state, made)
    return made, additive


def _packed(
    mask: ForwardMask,
    tensors: tuple[Tensor, Tensor, Tensor],
    offsets: tuple[Tensor, Tensor],
    lengths: tuple[int | None, int | None],
    options: dict[str, Any],
) -> Tensor:
    """Attend in packed sequences whose offsets the mask did not know."""
    query, key, value = (part.flatten(0, 1) for part in tensors)
    longest_q, longest_k = (
        int(total) if length is None else int(length) for length, total in zip(lengths, mask.shape[2:], strict=True)
    )
    out = functions.flash_dmattn_varlen_func(
        query,
        key,
        value,
        offsets[0].to(torch.int32),
        offsets[1].to(torch.int32),
        longest_q,
        longest_k,
        None if mask.padding is None else mask.padding.reshape(1, -1),
        is_causal=mask.is_causal,
        window_size=(mask.left, mask.right),
        **options,
    )
    return out.unflatten(0, tensors[0].shape[:2])  # type: ignore[union-attr]


def _with_documents(mask: ForwardMask, offsets: Tensor, device: torch.device) -> ForwardMask:
    """Return the mask with the documents that offsets `[N + 1]` tell."""
    if mask.dense:
        raise NotImplementedError(
            "cu_seq_lens_q beside a mask that a model's own function was evaluated for, which must keep the sequences apart itself"
        )
    places = torch.arange(mask.kv_length, device=device)
    documents = torch.bucketize(places, offsets[1:], right=True)[None].to(torch.int32)
    return replace(mask, documents=documents).prepare(device)


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return first if second is None else second
    return first + second
