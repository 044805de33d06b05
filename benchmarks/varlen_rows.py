"""Packed sequences of uneven lengths, as this library, FlashAttention 4 and torch compute them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import dmattn_ops
from peers import Run, Unavailable, recorded_run
from rows import Case

UNEVEN = (3500, 1200, 800, 700, 600, 500, 400, 300, 250, 158, 150, 128, 100, 90, 64, 64)  # 9004 in all
# 26,200 in all, drawn at random
MIXED = (
    634, 776, 313, 1651, 1720, 840, 416, 1717, 765, 1843, 1370, 1979, 1737, 585, 282, 1925, 1431, 1302, 1104, 1620,
    1276, 93, 87, 734,
)  # fmt: skip
LENGTHS = {
    "16 of 64 to 3500": UNEVEN,
    "24 of 64 to 2000": MIXED,
    "one of 60000 beside 1000 of 50": (*(50,) * 500, 60000, *(50,) * 500),
    "4096 of 64": (64,) * 4096,
}
SHAPES = (  # which lengths, query heads, key heads, head dimension; what must hold forward and backward
    ("16 of 64 to 3500", 16, 16, 128, (1.0, 1.0)),
    ("16 of 64 to 3500", 32, 8, 128, (1.0, 1.0)),
    ("16 of 64 to 3500", 16, 16, 64, (1.0, 1.0)),
    ("24 of 64 to 2000", 16, 16, 128, (1.0, 1.0)),
    ("one of 60000 beside 1000 of 50", 2, 2, 128, (0.95, 0.95)),
    ("4096 of 64", 8, 8, 128, (0.95, 0.95)),
)
Attend = Callable[..., Any]  # of query, key, value, offsets and the longest length


def own_varlen(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int) -> Tensor:
    lengths = (offsets, offsets, longest, longest)
    return dmattn_ops.flash_dmattn_varlen_func(query, key, value, *lengths, is_causal=True)


def _fa4(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int) -> Any:
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except ImportError as error:
        raise Unavailable(f"flash_attn.cute: {error}") from error
    lengths = {f"cu_seqlens_{side}": offsets for side in "qk"} | {f"max_seqlen_{side}": longest for side in "qk"}
    return flash_attn_varlen_func(query, key, value, **lengths, causal=True)


def torch_varlen(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int) -> Any:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise Unavailable(f"torch.nn.attention.varlen: {error}") from error
    known = inspect.signature(varlen_attn).parameters
    names: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" not in known:
            raise Unavailable("this torch's varlen_attn has no grouped heads")
        names["enable_gqa"] = True
    return varlen_attn(query, key, value, offsets, offsets, longest, longest, **names)


def _run(attend: Attend, lengths: tuple[int, ...], heads: int, kv_heads: int, dim: int) -> Run:
    generator = torch.Generator("cuda").manual_seed(0)
    drawn = (
        torch.randn(sum(lengths), count, dim, generator=generator, device="cuda").bfloat16()
        for count in (heads, kv_heads, kv_heads, heads)
    )
    *inputs, grad_out = drawn
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    leaves = [tensor.requires_grad_() for tensor in inputs]
    return recorded_run(functools.partial(attend, *leaves, offsets, max(lengths)), leaves, grad_out)


def cases() -> Iterator[Case]:
    """Yield the rows of packed sequences, all of them causal."""
    for name, heads, kv_heads, dim, must in SHAPES:
        runs = {
            who: functools.partial(_run, attend, LENGTHS[name], heads, kv_heads, dim)
            for who, attend in (("dmattn", own_varlen), ("fa4", _fa4), ("torch varlen_attn", torch_varlen))
        }
        grouped = "" if heads == kv_heads else f"/{kv_heads}"
        yield Case(f"varlen, {name}, H{heads}{grouped} D{dim} causal", must, runs)
