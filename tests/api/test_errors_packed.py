"""What calls of packed sequences and packed projections refuse, with which type and in which words."""

import re

import pytest
import torch

import dmattn_ops

S, H, D = 128, 4, 64
MASK = torch.ones(2, 1, S, S, dtype=torch.bool)


def tensor(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def packed(**changes):
    offsets = torch.tensor([0, 50, 50, 128], dtype=torch.int32)
    rows = {name: tensor(S, H, D) for name in ("query", "key", "value")}
    lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 78, "max_seqlen_k": 78}
    return {**rows, **lengths, **changes}


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


VARLEN = {
    "start": (
        {"cu_seqlens_q": int32(1, 50, 50, 128)},
        ValueError,
        "cu_seqlens_q must go from 0 to at most the length of query, 128, got 1 to 128",
    ),
    "end": (
        {"cu_seqlens_k": int32(0, 50, 50, 129)},
        ValueError,
        "cu_seqlens_k must go from 0 to at most the length of key, 128, got 0 to 129",
    ),
    "decrease": (
        {"cu_seqlens_k": int32(0, 50, 49, 128)},
        ValueError,
        "cu_seqlens_k must not decrease, got [0, 50, 49, 128]",
    ),
    "batch": ({"cu_seqlens_k": int32(0, 128)}, ValueError, "cu_seqlens_k must have shape (4,), got (2,)"),
    "rank": (
        {"cu_seqlens_q": int32(0, 128)[None]},
        ValueError,
        "cu_seqlens_q must have shape (batch + 1,), got (1, 2)",
    ),
    "empty": ({"cu_seqlens_q": int32()}, ValueError, "cu_seqlens_q must have shape (batch + 1,), got (0,)"),
    "dtype": (
        {"cu_seqlens_q": torch.tensor([0, 50, 50, 128])},
        TypeError,
        "cu_seqlens_q must have dtype torch.int32, got torch.int64",
    ),
    "device": (
        {"cu_seqlens_k": int32(0, 50, 50, 128).to("meta")},
        ValueError,
        "cu_seqlens_k must be on cpu like query, got meta",
    ),
    "lengths": (
        {"cu_seqlens_q": int32(50, 78), "cu_seqlens_k": int32(50, 78)},
        ValueError,
        "cu_seqlens_q must go from 0 to at most the length of query, 128, got 50 to 78: lengths become offsets by"
        " torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))",
    ),
    "type": ({"cu_seqlens_q": [0, 128]}, TypeError, "cu_seqlens_q must be a tensor, got list"),
    "sparse": (
        {"cu_seqlens_k": torch.tensor([0, 128], dtype=torch.int32).to_sparse()},
        TypeError,
        "cu_seqlens_k must be a dense tensor, got layout torch.sparse_coo",
    ),
    "longest": ({"max_seqlen_q": 77}, ValueError, "max_seqlen_q must be at least the longest sequence, 78, got 77"),
    "negative": ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k must not be negative, got -1"),
    "longest type": ({"max_seqlen_k": torch.tensor(78)}, TypeError, "max_seqlen_k must be an int, got Tensor"),
    "query": (
        {"query": tensor(1, S, H, D)},
        ValueError,
        "query must have 3 dimensions, got 4, shape (1, 128, 4, 64): its axes are [total, heads, D], and sequences of one length go"
        " to flash_dmattn_func",
    ),
    "value": ({"value": tensor(127, H, D)}, ValueError, "value must have shape (128, 4, 64), got (127, 4, 64)"),
    "mask": ({"mask": MASK[:, 0, 0]}, ValueError, "mask must have shape (heads 4 or 1, keys 128), got (2, 128)"),
    "prepared mask": (
        {"mask": dmattn_ops.prepare_mask(documents=torch.zeros(1, S, dtype=torch.int32))},
        TypeError,
        "mask must be a tensor [H|Hkv|1, total_k], got a TileMask: call flash_dmattn_func on one row [1, total, H, D], with"
        " documents=torch.bucketize(torch.arange(total), cu_seqlens[1:], right=True)[None] in the mask",
    ),
    "mask type": ({"mask": True}, TypeError, "mask must be a tensor, got bool"),
    "scale elsewhere": (
        {"scale": 1.0},
        TypeError,
        "flash_dmattn_varlen_func() got an unexpected keyword argument 'scale': here it is called softmax_scale",
    ),
    "bias": ({"bias": tensor(4, 127)}, ValueError, "bias must have shape (heads 4 or 1, keys 128), got (4, 127)"),
    "bias dtype": (
        {"bias": tensor(4, S, dtype=torch.int8)},
        TypeError,
        "bias must have dtype torch.float32, got torch.int8",
    ),
}


@pytest.mark.parametrize("name", VARLEN)
def test_a_wrong_packed_call_is_refused_in_words(name):
    changes, error, words = VARLEN[name]
    with pytest.raises(error, match=f"^{re.escape(words)}$"):
        dmattn_ops.flash_dmattn_varlen_func(**packed(**changes))


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((2, 9, 3, 16), "qkv must have 5 dimensions, got 4, shape (2, 9, 3, 16): its axes are [B, S, 3, H, D]"),
        ((2, 9, 4, 3, 16), "qkv must have shape (2, 9, 3, 4, 16), got (2, 9, 4, 3, 16): pass qkv.transpose(2, 3)"),
    ],
)
def test_a_wrong_packed_projection_is_refused_in_words(shape, words):
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        dmattn_ops.flash_dmattn_qkvpacked_func(tensor(*shape))
    if len(shape) == 5:
        with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
            torch.ops.dmattn.qkvpacked_forward(tensor(*shape))


def test_a_packed_projection_of_another_dtype_is_refused_by_its_own_name():
    words = "^qkv must have dtype torch.float16 or torch.bfloat16 or torch.float32 or torch.float64, got torch.int32$"
    for attend in (dmattn_ops.flash_dmattn_qkvpacked_func, torch.ops.dmattn.qkvpacked_forward):
        with pytest.raises(TypeError, match=words):
            attend(torch.zeros(2, 9, 3, 4, 16, dtype=torch.int32))
