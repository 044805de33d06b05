"""How many floating point operations the operators count for, in `FlopCounterMode` and for activation memory budgets.

A multiplication and an addition are 2. Counted are the pairs of query and key that the band lets see each other: exact
for causal and windowed attention, an upper bound where a mask hides more (what is inside a mask lies on the device).
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from dmattn_ops import ops
from dmattn_ops.problem import UNBOUNDED

_COUNTER = "torch.utils.flop_counter"


def visible_pairs(seqlen_q: int, seqlen_k: int, band_lo: int, band_hi: int) -> int:
    """Return the number of pairs of a query i and a key j with `i + band_lo <= j <= i + band_hi`."""
    # Keys at or before i + h, summed over queries, for the upper limit less those for the lower one.
    return max(0, _pairs_up_to(seqlen_q, seqlen_k, band_hi) - _pairs_up_to(seqlen_q, seqlen_k, band_lo - 1))


def _pairs_up_to(seqlen_q: int, seqlen_k: int, limit: int) -> int:
    """Return the number of pairs with `j <= i + limit`: the sum over i of min(max(i + limit + 1, 0), seqlen_k)."""
    first = min(max(-limit - 1, 0), seqlen_q)  # queries before it see nothing
    whole = min(max(seqlen_k - limit - 1, first), seqlen_q)  # queries from it on see everything
    rising = whole - first
    return rising * (first + limit + 1) + rising * (rising - 1) // 2 + (seqlen_q - whole) * seqlen_k


def _dense_pairs(query: torch.Size, key: torch.Size, call: tuple[Any, ...]) -> int:
    options = ops.read_call(call, query[-1]).options
    return query[0] * query[2] * visible_pairs(query[1], key[1], options.band_lo, options.band_hi)


def _varlen_pairs(query: torch.Size, key: torch.Size, lengths: tuple[Any, ...], call: tuple[Any, ...]) -> int:
    """Bound the pairs of packed sequences, whose lengths lie on the device, by what the longest allow."""
    offsets, _, longest_q, longest_k = lengths
    read = ops.read_varlen_call(call, query[-1])
    diagonal = 0 if read.top_left else longest_k - longest_q
    band = (_shifted(limit, diagonal) for limit in (read.options.band_lo, read.options.band_hi))
    longest = (offsets[0] - 1) * visible_pairs(longest_q, longest_k, *band)
    return query[1] * min(longest, query[0] * longest_k, key[0] * longest_q)


def _shifted(limit: int, by: int) -> int:
    return limit if abs(limit) == UNBOUNDED else limit + by


def forward(query: Any, key: Any, value: Any, bias: Any = None, *call: Any, **_: Any) -> int:
    """Count the products `query key` and `probabilities value`, of shapes `[B, S, heads, D]`."""
    return 2 * _dense_pairs(query, key, call) * (query[-1] + value[-1])


def backward(
    grad_out: Any,
    grad_lse: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    bias: Any = None,
    *call: Any,
    **_: Any,
) -> int:
    """Count five products: scores again, dP, dq, dk and dv."""
    return 2 * _dense_pairs(query, key, call) * (3 * query[-1] + 2 * value[-1])


def qkvpacked_forward(qkv: Any, bias: Any = None, *call: Any, **_: Any) -> int:
    """Count as `forward` does, for a shape `[B, S, 3, H, D]`."""
    query = (*qkv[:2], *qkv[3:])
    return forward(query, query, query, bias, *call)


def qkvpacked_backward(
    grad_out: Any, grad_lse: Any, qkv: Any, out: Any, lse: Any, bias: Any = None, *call: Any, **_: Any
) -> int:
    """Count as `backward` does, for a shape `[B, S, 3, H, D]`."""
    query = (*qkv[:2], *qkv[3:])
    return backward(grad_out, grad_lse, query, query, query, out, lse, bias, *call)


def varlen_forward(query: Any, key: Any, value: Any, *rest: Any, **_: Any) -> int:
    """Count as `forward` does, an upper bound for shapes `[total, heads, D]`."""
    return 2 * _varlen_pairs(query, key, rest[:4], rest[5:]) * (query[-1] + value[-1])


def varlen_backward(
    grad_out: Any, grad_lse: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, *rest: Any, **_: Any
) -> int:
    """Count as `backward` does, an upper bound for shapes `[total, heads, D]`."""
    return 2 * _varlen_pairs(query, key, rest[:4], rest[5:]) * (3 * query[-1] + 2 * value[-1])


FORMULAS = (forward, backward, qkvpacked_forward, qkvpacked_backward, varlen_forward, varlen_backward)


def register() -> None:
    """Register all formulas with torch's counter."""
    from torch.utils.flop_counter import register_flop_formula

    for formula in FORMULAS:
        register_flop_formula(getattr(torch.ops.dmattn, formula.__name__))(formula)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `register` once torch's counter is imported; importing it here would load Triton."""

    looks = False

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _COUNTER or self.looks:
            return None
        self.looks = True  # the others find it
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.looks = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                register()
                sys.meta_path.remove(self)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if _COUNTER in sys.modules:
    register()
else:
    sys.meta_path.insert(0, _AfterImport())
