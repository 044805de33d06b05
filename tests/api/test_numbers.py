"""Numbers: those of NumPy are taken wherever Python's are; bools, strings and tensors are not, and tensors are not read."""

import importlib
import inspect
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist

import dmattn_ops
from dmattn_ops import TileMask, biases, dynamic_mask, nn, prepare_mask, trees
from dmattn_ops.compat import flash_attn, flash_dmattn
from dmattn_ops.compat.flash_attn import bert_padding
from dmattn_ops.compat.flash_dmattn.integrations import flash_dynamic_mask_attention as of_doge
from dmattn_ops.compat.flash_dmattn.utils import mask as dense_masks
from dmattn_ops.compat.flash_dmattn.utils import padding

S, D = 6, 8
X, PACKED = torch.randn(1, S, 2, D), torch.randn(S, 2, D)
QKV = {"query": X, "key": X, "value": X}
FLASH = {"q": X, "k": X, "v": X}
ROWS = {"query": PACKED, "key": PACKED, "value": PACKED}
OFFSETS = torch.tensor([0, 2, S], dtype=torch.int32)
LENGTHS = {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS, "max_seqlen_q": 4, "max_seqlen_k": 5}
NUMBERS = {"causal_from": 1, "window_size": (2, 3), "softmax_scale": 0.5, "softcap": 4.0, "dropout_p": 0.25}
FLASHS = {"window_size": (2, -1), "softmax_scale": 0.5, "softcap": 4.0, "dropout_p": 0.25, "causal": True}
SCORES, ENDS = torch.randn(1, 2, S), torch.full((1, 1, S), 4, dtype=torch.int32)
KEPT = {"keep": 2, "keep_first": 1, "keep_last": 1}
MASK = prepare_mask(torch.rand(3, 2, S, S) < 0.6)
SLOPES = torch.rand(2)
TOP = {"window_size": 2, "min_dtype": -1e9, "block_size": 2}
CHOICE = {"attention_bias": torch.randn(1, 2, S, S), "attention_mask": None, **TOP}
DOGE = {"query": X.transpose(1, 2), "key": X.transpose(1, 2), "value": X.transpose(1, 2), "attention_mask": None}
BIASED = {**DOGE, "attention_bias": torch.randn(1, 2, S, S)}
PAIRS = {"start": 1, "stop": 3}
layer = nn.DynamicMaskAttention
CALLS = [
    (dmattn_ops.flash_dmattn_func, {**QKV, **NUMBERS}),
    (dmattn_ops.flash_dmattn_qkvpacked_func, {"qkv": torch.stack([X, X, X], 2), **NUMBERS}),
    (dmattn_ops.flash_dmattn_varlen_func, {**ROWS, **LENGTHS, **NUMBERS}),
    (dmattn_ops.explain, {**QKV, **NUMBERS}),
    (dmattn_ops.explain, {**ROWS, **LENGTHS, **NUMBERS, "causal_from": "top_left"}),
    (prepare_mask, {"intervals": (None, ENDS), "at_most": S, "seqlen_q": S, "causal_from": 0, "window_size": (None, 0)}),
    (dynamic_mask, {"scores": SCORES, **KEPT, "queries": (1, 4)}),
    (TileMask, {"lengths": torch.empty(S, S, 0), "end": ENDS, "band_lo": 1, "band_hi": 3, "at_most": 3}),
    *[(getattr(MASK, name), PAIRS) for name in ("queries", "keys", "batch")],
    (MASK.heads, {"start": 0, "stop": 1}),
    (biases.alibi_slopes, {"heads": 6}),
    (biases.alibi_of_keys, {"slopes": SLOPES, "seqlen_k": S}),
    (biases.alibi_lse, {"slopes": SLOPES, "seqlen_q": S}),
    (biases.alibi_of_distances, {"slopes": SLOPES, "seqlen_q": 2, "seqlen_k": S}),
    (biases.alibi_of_packed_keys, {"slopes": SLOPES, "cu_seqlens": OFFSETS, "total": S}),
    (biases.alibi_packed_lse, {"slopes": SLOPES, "cu_seqlens": OFFSETS, "total": S}),
    (biases.t5_buckets, {"seqlen_q": 2, "seqlen_k": 200, "buckets": 32, "max_distance": 100}),
    (biases.t5_bias, {"weight": torch.randn(32, 2), "seqlen_q": 2, "seqlen_k": 200, "max_distance": 100}),
    (layer, {"dim": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, **KEPT, "rotary_base": 50.0, "recency": 0.5, "dropout": 0.25}),
    (nn.KeyScores, {"heads": 2, "head_dim": 4, "recency": 0.5}),
    (trees.pack_prefix_tree, {"sequences": [[1, 2, 3], [1, 2, 4]], "pad_to": S}),
    (trees.tree_mask, {"ends": ENDS[0], "positions": torch.arange(S)[None], "window_size": (2, 3)}),
    (importlib.import_module("dmattn_ops.flex").to_block_mask, {"mask": MASK, "heads": 4}),
    (flash_attn.flash_attn_func, {**FLASH, **FLASHS}),
    (flash_attn.flash_attn_kvpacked_func, {"q": X, "kv": torch.stack([X, X], 2), **FLASHS}),
    (flash_attn.flash_attn_qkvpacked_func, {"qkv": torch.stack([X, X, X], 2), **FLASHS}),
    (flash_attn.flash_attn_varlen_func, {"q": PACKED, "k": PACKED, "v": PACKED, **LENGTHS, **FLASHS}),
    (flash_attn.flash_attn_varlen_kvpacked_func, {"q": PACKED, "kv": torch.stack([PACKED] * 2, 1), **LENGTHS, **FLASHS}),
    (
        flash_attn.flash_attn_varlen_qkvpacked_func,
        {"qkv": torch.stack([PACKED] * 3, 1), "cu_seqlens": OFFSETS, "max_seqlen": 4, **FLASHS},
    ),
    (bert_padding.pad_input, {"hidden_states": PACKED, "indices": torch.arange(S), "batch": 2, "seqlen": 4}),
    (bert_padding.index_put_first_axis, {"values": PACKED, "indices": torch.arange(S), "first_axis_dim": 9}),
    (flash_dmattn.flash_dmattn_func, {**QKV, "softmax_scale": 0.5, "softcap": 4.0}),
    (flash_dmattn.flash_dmattn_varlen_func, {**ROWS, **LENGTHS, "softmax_scale": 0.5, "softcap": 4.0}),
    *[
        (function, {**more, "scale": 0.5})
        for function, more in (
            (flash_dmattn.flash_dmattn_func, QKV),
            (flash_dmattn.flash_dmattn_varlen_func, {**ROWS, **LENGTHS}),
            (flash_dmattn.flex_dmattn_func, QKV),
            (flash_dmattn.triton_dmattn_func, QKV),
            (of_doge.flash_dynamic_mask_attention_forward, {"module": torch.nn.Linear(1, 1), **BIASED}),
        )
    ],
    (flash_dmattn.flex_dmattn_func, {**QKV, "softmax_scale": 0.5}),
    (flash_dmattn.triton_dmattn_func, {**QKV, "softmax_scale": 0.5}),
    *[(function, CHOICE) for function in (dense_masks.dynamic_mask, dense_masks.topk_mask, dense_masks.relu_mask)],
    (dense_masks.create_mask, {**CHOICE, "batch_size": 1, "query_len": S, "key_len": S}),
    (padding.pad_input, {"hidden_states": PACKED, "indices": torch.arange(S), "batch": 2, "seqlen": 4}),
    (
        padding.upad_input,
        {
            **{f"{name}_layer": part for name, part in QKV.items()},
            "attention_mask": torch.ones(1, S).int(),
            "query_length": S,
        },
    ),
    (
        of_doge.flash_dynamic_mask_attention_forward,
        {"module": torch.nn.Linear(1, 1), **BIASED, "scaling": 0.5, "window_size": 2, "softcap": 4.0},
    ),
    (of_doge.flash_dynamic_mask_attention_forward, {"module": torch.nn.Linear(1, 1), **BIASED, "keep_window_size": 2}),
    (
        of_doge.flash_dynamic_mask_attention_forward,
        {
            "module": torch.nn.Linear(1, 1), **DOGE, "attention_bias": None, "cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS,
            "max_length_q": 4, "max_length_k": 4,
        },
    ),
]  # fmt: skip
_NUMBER = r"\b(int|float|Window|WindowSize|CausalFrom)\b"
_PUBLIC = [  # functions and classes of which every number stands above
    *[getattr(dmattn_ops, name) for name in dmattn_ops.__all__ if name.startswith("flash")],
    dmattn_ops.explain, prepare_mask, dynamic_mask, TileMask, TileMask.queries, TileMask.keys, TileMask.batch, TileMask.heads,
    *[getattr(biases, name) for name in vars(biases) if re.match("alibi|t5", name)],
    *[getattr(flash_attn, name) for name in flash_attn.__all__],
    *[getattr(bert_padding, name) for name in bert_padding.__all__],
    *[getattr(padding, name) for name in padding.__all__],
    *[getattr(flash_dmattn, name) for name in flash_dmattn.__all__],
    dense_masks.dynamic_mask, dense_masks.create_mask, of_doge.flash_dynamic_mask_attention_forward, layer, nn.KeyScores,
    *[each for name, each in vars(trees).items() if getattr(each, "__module__", "") == trees.__name__ and name[0] != "_"],
]  # fmt: skip


def known(result):
    """A result as something that can be compared."""
    if isinstance(result, TileMask):
        return result.to_dense().tolist()
    if isinstance(result, torch.nn.Module):
        return repr(result), {name: part.shape for name, part in result.state_dict().items()}
    if isinstance(result, (tuple, list)):
        return [known(each) for each in result]
    if isinstance(result, torch.Tensor):
        return str(result.dtype), result.tolist()
    return str(result)


def variants(value):
    """The same number as NumPy has it."""
    if isinstance(value, tuple):
        return [tuple(None if each is None else kind(each) for each in value) for kind in (np.int64, np.int8)]
    if isinstance(value, int):
        return [kind(value) for kind in (np.int64, np.int32, np.uint8)]
    kinds = (np.float64, np.float32, np.float16) if abs(value) < 1e4 else (np.float64,)
    return [*[kind(value) for kind in kinds], *([np.int64(value)] if value == int(value) else [])]


def wrong(value):
    """What is no number there. Tensors are on the meta device: to read one is an error of another type."""
    others = [True, np.bool_(True), "2", torch.empty((), dtype=torch.int64, device="meta")]
    if isinstance(value, tuple):
        return [(other, value[1]) for other in others] + [(value[0], other) for other in others]
    return others + ([0.5, np.float64(2.0)] if isinstance(value, int) else [])


def numbers(given):
    return {
        name: value
        for name, value in given.items()
        if (isinstance(value, (int, float)) and not isinstance(value, bool))
        or (isinstance(value, tuple) and any(type(each) is int for each in value))
    }


_OTHER_NAMES = {  # by which the argument is known where it is refused
    "scale": "softmax_scale", "scaling": "softmax_scale", "keep_window_size": "window_size", "max_length_q": "max_seqlen_q",
    "max_length_k": "max_seqlen_k", "max_seqlen": "max_seqlen_q", "first_axis_dim": "seqlen",
}  # fmt: skip


@pytest.mark.parametrize(("function", "given"), CALLS, ids=[f"{each[0].__name__}-{n}" for n, each in enumerate(CALLS)])
def test_numbers_of_numpy_are_taken_and_what_is_none_is_refused(function, given):
    torch.manual_seed(0)
    expected = known(function(**given))
    found = numbers(given)
    assert found
    for name, value in found.items():
        for other in variants(value):
            torch.manual_seed(0)
            assert known(function(**{**given, name: other})) == expected, (name, type(other))
        for other in wrong(value):
            if name == "causal_from" and isinstance(other, str):
                continue  # a word of its own
            kind = ValueError if name == "block_size" else TypeError
            with pytest.raises(kind, match=_OTHER_NAMES.get(name, name)):
                function(**{**given, name: other})


def test_every_number_of_a_public_function_stands_above():
    for function in _PUBLIC:
        if not callable(function):
            continue
        named = [each for each, _ in CALLS if each == function or getattr(each, "__func__", None) is function]
        given = {name for each, values in CALLS if each in named for name in numbers(values)}
        asked = {
            parameter.name
            for parameter in inspect.signature(function).parameters.values()
            if re.search(_NUMBER, str(parameter.annotation))
        }
        assert asked <= given, (function, asked - given)


def test_numbers_of_calls_over_ranks():
    distributed = importlib.import_module("dmattn_ops.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = {"group": None}
        whole = {**QKV, **group, **NUMBERS, "is_causal": True}
        ids = torch.zeros(1, S).int()
        for function, given in (
            (distributed.context_parallel_attention, whole),
            (
                distributed.dynamic_context_attention,
                {**QKV, **group, "scores": SCORES, **KEPT, "softmax_scale": 0.5, "softcap": 4.0},
            ),
            (distributed.sequence_positions, {"seqlen": S, **group}),
            (distributed.shard_sequence, {"tensor": X, "dim": 1, **group}),
            (distributed.unshard_sequence, {"tensor": X, "dim": 1, **group}),
            (distributed.balanced_layout, {"mask": MASK, "chunks_per_rank": 2, **group}),
        ):
            test_numbers_of_numpy_are_taken_and_what_is_none_is_refused(function, given)
        made = distributed.prepare_context_mask(
            documents=ids, seqlen_q=np.int64(S), window_size=(np.int64(2), None), causal_from=np.int64(0), **group
        )
        assert torch.equal(
            distributed.context_parallel_attention(**QKV, mask=made, **group),
            dmattn_ops.flash_dmattn_func(**QKV, causal_from=0, window_size=(2, None)),
        )
    finally:
        dist.destroy_process_group()
