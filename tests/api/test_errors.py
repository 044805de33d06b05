"""What the public functions refuse, with which type and in which words, eager and compiled."""

import inspect
import re
import warnings

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import dmattn_ops
from dmattn_ops import environment

B, S, H, D = 2, 128, 4, 64
MASK = torch.ones(B, 1, S, S, dtype=torch.bool)


def tensor(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def dense(**changes):
    """The arguments of a call that is right but for the changes."""
    right = {"query": tensor(B, S, H, D), "key": tensor(B, S, H, D), "value": tensor(B, S, H, D)}
    return {**right, **changes}


# changes to a right call, the error, and its words
AXES = ": its axes are [B, S, heads, D], and packed sequences go to flash_dmattn_varlen_func"
DENSE = {
    "key length": (
        {"key": tensor(B, 127, H, D)},
        ValueError,
        "key must have shape (2, 128, 4, 64), got (2, 127, 4, 64)",
    ),
    "key batch": ({"key": tensor(3, S, H, D)}, ValueError, "key must have shape (2, 128, 4, 64), got (3, 128, 4, 64)"),
    "key dimension": (
        {"key": tensor(B, S, H, 32)},
        ValueError,
        "key must have shape (2, 128, 4, 64), got (2, 128, 4, 32)",
    ),
    "key heads": ({"key": tensor(B, S, 2, D)}, ValueError, "key must have shape (2, 128, 4, 64), got (2, 128, 2, 64)"),
    "value length": (
        {"value": tensor(B, 64, H, D)},
        ValueError,
        "value must have shape (2, 128, 4, 64), got (2, 64, 4, 64)",
    ),
    "value heads": (
        {"value": tensor(B, S, 1, 8)},
        ValueError,
        "value must have shape (2, 128, 4, 8), got (2, 128, 1, 8)",
    ),
    "heads": (
        {"key": tensor(B, S, 3, D), "value": tensor(B, S, 3, D)},
        ValueError,
        "the heads of query must be a multiple of the heads of key, got 4 and 3",
    ),
    "rank": ({"query": tensor(S, H, D)}, ValueError, f"query must have 4 dimensions, got 3, shape (128, 4, 64){AXES}"),
    "sparse": (
        {"query": tensor(B, S, H, D).to_sparse()},
        TypeError,
        "query must be a dense tensor, got layout torch.sparse_coo",
    ),
    "nested": (
        {"key": torch.nested.nested_tensor([tensor(5, H, D), tensor(3, H, D)], layout=torch.jagged)},
        TypeError,
        "key must be a dense tensor, got a nested one: pass its values and offsets to flash_dmattn_varlen_func",
    ),
    "nested, strided": (
        {"value": torch.nested.nested_tensor([tensor(5, H, D), tensor(3, H, D)])},
        TypeError,
        "value must be a dense tensor, got a nested one: pass its values and offsets to flash_dmattn_varlen_func",
    ),
    "sparse mask": (
        {"mask": MASK.to_sparse()},
        TypeError,
        "mask must be a dense tensor, got layout torch.sparse_coo",
    ),
    "sparse bias": (
        {"bias": tensor(1, 1, S, S).to_sparse()},
        TypeError,
        "bias must be a dense tensor, got layout torch.sparse_coo",
    ),
    "rank 0": ({"value": tensor()}, ValueError, f"value must have 4 dimensions, got 0, shape (){AXES}"),
    "no dimension": (
        {"query": tensor(B, S, H, 0), "key": tensor(B, S, H, 0)},
        ValueError,
        "query and value must have a last dimension of at least 1, got 0 and 64",
    ),
    "long": (
        {
            "query": tensor(1, 2, 1, 8, device="meta"),
            "key": tensor(1, 1 << 30, 1, 8, device="meta"),
            "value": tensor(1, 1 << 30, 1, 8, device="meta"),
        },
        ValueError,
        "key must have fewer than 1073741824 positions, got 1073741824",
    ),
    "wide": (
        {"query": tensor(1, 2, 1, 1025), "key": tensor(1, 2, 1, 1025), "value": tensor(1, 2, 1, 1300)},
        NotImplementedError,
        "no kernel takes this call: the last dimension of query must be at most 1024, got 1025; "
        "the last dimension of value must be at most 1024, got 1300",
    ),
    "integers": (
        {"query": tensor(B, S, H, D, dtype=torch.int32)},
        TypeError,
        "query must have dtype torch.float16 or torch.bfloat16 or torch.float32 or torch.float64, got torch.int32",
    ),
    "dtype of key": (
        {"key": tensor(B, S, H, D, dtype=torch.float16)},
        TypeError,
        "key must have dtype torch.float32 like query, got torch.float16",
    ),
    "device": (
        {"value": torch.zeros(B, S, H, D, device="meta")},
        ValueError,
        "value must be on cpu like query, got meta",
    ),
    "no tensor": ({"query": [1.0]}, TypeError, "query must be a tensor, got list"),
    "bias shape": (
        {"bias": tensor(B, H, S, 64)},
        ValueError,
        "bias must have shape (batch 2 or 1, heads 4 or 1, queries 128 or 1, keys 128), got (2, 4, 128, 64)",
    ),
    "bias of groups": (
        {"bias": tensor(B, 3, 1, S), "key": tensor(B, S, 2, D), "value": tensor(B, S, 2, D)},
        ValueError,
        "bias must have shape (batch 2 or 1, heads 4 or 2 or 1, queries 128 or 1, keys 128), got (2, 3, 1, 128)",
    ),
    "bias dtype": (
        {"bias": tensor(1, 1, S, S, dtype=torch.float16)},
        TypeError,
        "bias must have dtype torch.float32, got torch.float16",
    ),
    "bias rank": (
        {"bias": tensor(S, S)},
        ValueError,
        "bias must have shape (batch 2 or 1, heads 4 or 1, queries 128 or 1, keys 128), got (128, 128): a bias [Sq, Sk] is"
        " passed as bias[None, None]",
    ),
    "bias without queries": (
        {"bias": tensor(B, H, S)},
        ValueError,
        "bias must have shape (batch 2 or 1, heads 4 or 1, queries 128 or 1, keys 128), got (2, 4, 128): a number for each key,"
        " [B, heads, Sk], is passed as bias.unsqueeze(2), and a bias [B, Sq, Sk] as bias[:, None]",
    ),
    "bool bias": (
        {"bias": MASK},
        TypeError,
        "bias must have a floating-point dtype, got torch.bool: pass what is visible as mask=",
    ),
    "no bias": ({"bias": 1.0}, TypeError, "bias must be a tensor, got float"),
    "mask shape": (
        {"mask": MASK[:, :, :100]},
        ValueError,
        "mask must have shape (batch 2 or 1, heads 4 or 1, queries 128 or 1, keys 128), got (2, 1, 100, 128)",
    ),
    "mask keys": (
        {"mask": MASK[..., :100]},
        ValueError,
        "mask must have shape (batch 2 or 1, heads 4 or 1, queries 128 or 1, keys 128), got (2, 1, 128, 100)",
    ),
    "padding as a mask": (
        {"mask": MASK[:, 0, 0]},
        ValueError,
        "mask must have shape (batch 2 or 1, heads 4 or 1, queries 128 or 1, keys 128), got (2, 128): padding [B, Sk] is passed"
        " as prepare_mask(mask, seqlen_q=Sq), and a mask [Sq, Sk] as mask[None, None]",
    ),
    "mask without heads": (
        {"mask": MASK[:, 0]},
        ValueError,
        "mask must have shape (batch 2 or 1, heads 4 or 1, queries 128 or 1, keys 128), got (2, 128, 128): a mask [B, Sq, Sk]"
        " is passed as mask[:, None]",
    ),
    "array as a mask": (
        {"mask": MASK.numpy()},
        TypeError,
        "mask must be a tensor or come from prepare_mask, got numpy.ndarray",
    ),
    "mask device": ({"mask": MASK.to("meta")}, ValueError, "mask must be on cpu like query, got meta"),
    "no mask": ({"mask": "causal"}, TypeError, "mask must be a tensor or come from prepare_mask, got str"),
    "key length with a mask": (
        {"key": tensor(B, 127, H, D), "mask": MASK},
        ValueError,
        "key must have shape (2, 128, 4, 64), got (2, 127, 4, 64)",
    ),
    "prepared mask": (
        {"mask": dmattn_ops.prepare_mask(torch.ones(3, 1, S, S, dtype=torch.bool))},
        ValueError,
        "mask must have shape (batch 2 or 1, heads 4 or 1, queries 128 or 1, keys 128), got (3, 1, 128, 128)",
    ),
    "left": (
        {"window_size": (-1, None)},
        ValueError,
        "window_size left must not be negative (None is unlimited), got -1",
    ),
    "right": (
        {"window_size": (None, -2)},
        ValueError,
        "window_size right must not be negative (None is unlimited), got -2",
    ),
    "window": ({"window_size": 64}, TypeError, "window_size must be a pair (left, right), got 64"),
    "window of an array": (
        {"window_size": np.array([1, 2])},
        TypeError,
        "window_size must be a pair (left, right), got array([1, 2])",
    ),
    "window type": ({"window_size": (1.5, None)}, TypeError, "window_size left must be an int, got float"),
    "alignment": (
        {"causal_from": "center"},
        ValueError,
        "causal_from must be 'bottom_right' or 'top_left', got 'center'; an integer is the diagonal itself",
    ),
    "alignment bool": (
        {"causal_from": True},
        TypeError,
        "causal_from must be 'bottom_right', 'top_left' or an int, got bool",
    ),
    "alignment float": (
        {"causal_from": 1.0},
        TypeError,
        "causal_from must be 'bottom_right', 'top_left' or an int, got float",
    ),
    "alignment missing": (
        {"causal_from": None},
        TypeError,
        "causal_from must be 'bottom_right', 'top_left' or an int, got NoneType",
    ),
    "diagonal": (
        {"causal_from": -(1 << 30)},
        ValueError,
        "causal_from must be between -1073741823 and 1073741823, got -1073741824",
    ),
    "causal": ({"is_causal": 1}, TypeError, "is_causal must be a bool, got int"),
    "infinite scale": ({"softmax_scale": float("inf")}, ValueError, "softmax_scale must be finite, got inf"),
    "nan scale": ({"softmax_scale": float("nan")}, ValueError, "softmax_scale must be finite, got nan"),
    "scale type": ({"softmax_scale": "1"}, TypeError, "softmax_scale must be a number, got str"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap must be finite and not negative, got -1.0"),
    "tiny softcap": (
        {"softcap": 1e-60},
        ValueError,
        "softcap must be finite and not negative, got 1e-60, which float32 cannot hold",
    ),
    "scale beyond float32": (
        {"softmax_scale": 1e39},
        ValueError,
        "softmax_scale must be finite, got 1e+39, which float32 cannot hold",
    ),
    "scale beyond floats": (
        {"softmax_scale": 1 << 2000},
        ValueError,
        "softmax_scale must be finite, got an integer of 2001 bits",
    ),
    "softcap type": ({"softcap": None}, TypeError, "softcap must be a number, got NoneType"),
    "dropout": ({"dropout_p": 1.5}, ValueError, "dropout_p must be between 0 and 1, got 1.5"),
    "negative dropout": ({"dropout_p": -1}, ValueError, "dropout_p must be between 0 and 1, got -1.0"),
    "deterministic": ({"deterministic": "yes"}, TypeError, "deterministic must be a bool, got str"),
    "return_lse": ({"return_lse": 1}, TypeError, "return_lse must be a bool, got int"),
    "return_max": ({"return_max": 0}, TypeError, "return_max must be a bool, got int"),
    "additive mask": (
        {"mask": MASK.float()},
        TypeError,
        "mask must have dtype bool (True keeps) or an integer dtype (non-zero keeps), got dtype torch.float32: pass an"
        " additive mask of 0 and -inf as bias=, and one of zeros and ones as mask != 0",
    ),
    "causal elsewhere": (
        {"causal": True},
        TypeError,
        "flash_dmattn_func() got an unexpected keyword argument 'causal': here it is called is_causal",
    ),
    "grouped elsewhere": (
        {"enable_gqa": True},
        TypeError,
        "flash_dmattn_func() got an unexpected keyword argument 'enable_gqa': heads of key and value are grouped where they"
        " are fewer than those of query",
    ),
    "several masks": (
        {"mask": [MASK, MASK]},
        TypeError,
        "mask must be a tensor or come from prepare_mask, got list: one mask of several is a & b of their tensors, with"
        " documents= and intervals= of prepare_mask",
    ),
    "a part of the queries": (
        {"query": tensor(B, 2, H, D), "mask": dmattn_ops.prepare_mask(MASK)},
        ValueError,
        "mask must have shape (batch 2 or 1, heads 4 or 1, queries 2 or 1, keys 128), got (2, 1, 128, 128): the mask of some of"
        " its queries is mask.queries(start, stop), of some of its keys mask.keys(start, stop)",
    ),
    "slopes elsewhere": (
        {"alibi_slopes": 1},
        TypeError,
        "flash_dmattn_func() got an unexpected keyword argument 'alibi_slopes': here it is called bias, as"
        " dmattn_ops.biases.alibi_of_keys(slopes, Sk) returns it",
    ),
    "unknown": ({"no": 1}, TypeError, "flash_dmattn_func() got an unexpected keyword argument 'no'"),
    "sink type": ({"sink": 1.0}, TypeError, "sink must be a tensor, got float"),
    "sparse sink": (
        {"sink": torch.zeros(H).to_sparse()},
        TypeError,
        "sink must be a dense tensor, got layout torch.sparse_coo",
    ),
    "sink shape": ({"sink": tensor(1)}, ValueError, "sink must have shape (4,), got (1,)"),
    "sink dtype": (
        {"sink": tensor(H, dtype=torch.float64)},
        TypeError,
        "sink must have dtype torch.float32, got torch.float64",
    ),
    "sink device": ({"sink": tensor(H, device="meta")}, ValueError, "sink must be on cpu like query, got meta"),
}


@pytest.mark.parametrize("name", DENSE)
def test_a_wrong_call_is_refused_in_words(name):
    changes, error, words = DENSE[name]
    with pytest.raises(error, match=f"^{re.escape(words)}$"):
        dmattn_ops.flash_dmattn_func(**dense(**changes))


COMPILED = (
    "key length", "heads", "wide", "dtype of key", "bias shape", "mask shape", "right", "softcap", "dropout", "additive mask",
    "sink shape",
)  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
def test_a_wrong_compiled_call_is_refused_in_the_same_words(name):
    changes, _, words = DENSE[name]
    torch._dynamo.reset()
    compiled = torch.compile(dmattn_ops.flash_dmattn_func, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=re.escape(words)):
        compiled(**dense(**changes))


@pytest.mark.parametrize("name", ("right", "nan scale", "softcap", "dropout", "mask shape", "additive mask"))
def test_a_wrong_value_is_refused_with_the_same_type_where_graphs_may_break(name):
    changes, error, words = DENSE[name]
    torch._dynamo.reset()
    compiled = torch.compile(dmattn_ops.flash_dmattn_func, backend="eager")
    with pytest.raises(error, match=f"^{re.escape(words)}$"):
        compiled(**dense(**changes))


KEYWORDS = {
    "is_causal": False,
    "causal_from": "bottom_right",
    "window_size": (None, None),
    "softmax_scale": None,
    "softcap": 0.0,
    "dropout_p": 0.0,
    "deterministic": None,
    "sink": None,
    "return_lse": False,
    "return_max": False,
    "batch_invariant": False,
}
OF_WHOLE_BATCHES = {"seqlen_k_used": None}  # functions of packed sequences take offsets


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("flash_dmattn_func", "query key value mask bias"),
        (
            "flash_dmattn_varlen_func",
            "query key value cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k mask bias",
        ),
        ("flash_dmattn_qkvpacked_func", "qkv mask bias"),
    ],
)
def test_a_signature_tells_the_arguments_that_there_are(name, first):
    parameters = inspect.signature(getattr(dmattn_ops, name)).parameters
    positional = {each.name for each in parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD}
    keywords = KEYWORDS if "cu_seqlens_k" in parameters else KEYWORDS | OF_WHOLE_BATCHES
    assert list(parameters) == [*first.split(), *keywords]
    assert positional == set(first.split())
    assert {each: parameters[each].default for each in keywords} == keywords


def test_float64_on_cuda_names_every_reason():
    with FakeTensorMode():
        query = torch.empty(1, 2, 1, 1300, dtype=torch.float64, device="cuda")
        with pytest.raises(NotImplementedError) as caught:
            dmattn_ops.flash_dmattn_func(query, query, query)
    assert "at most 1024, got 1300" in str(caught.value)
    assert "on a CUDA device, got torch.float64" in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "swapped"),
    [
        ((2, 8, 1024, 64), True),
        ((1, 129, 130, 8), True),
        ((2, 1024, 8, 64), False),
        ((1, 1, 128, 64), False),
        ((2, 200, 129, 8), False),
    ],
)
def test_heads_in_the_place_of_positions_are_warned_of_once(shape, swapped, monkeypatch):
    monkeypatch.setattr(environment, "_said", set())
    query = torch.zeros(shape)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            dmattn_ops.flash_dmattn_func(query, query, query)
    said = [str(warning.message) for warning in caught if "transpose(1, 2)" in str(warning.message)]
    assert len(said) == swapped
    assert not swapped or f"with {shape[1]} positions and {shape[2]} heads" in said[0]
