"""How many floating point operations the operators count for, in `FlopCounterMode` and for activation memory budgets.

A multiplication and an addition count as 2. Pairs of query and key inside the band are counted. This is exact for causal and
windowed attention, and an upper bound where a mask hides more, because the contents of a mask are on the device.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from dmattn_ops.bands import shifted
from dmattn_ops.ops import schemas

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


def _count(name: str, arguments: tuple[Any, ...]) -> int:
    """Return the operations of a call of the operator `name`, whose tensors are shapes."""
    read = schemas.SIGNATURES[name + _overload_of(name, arguments)].read(arguments)
    if name.startswith("qkvpacked"):
        query = key = value = (*read.qkv[:2], *read.qkv[3:])
    else:
        query, key, value = read.query, read.key, read.value
    pairs = _varlen_pairs(query, key, read) if name.startswith("varlen") else _dense_pairs(query, key, read)
    dim, dim_v = query[-1], value[-1]
    return 2 * pairs * (3 * dim + 2 * dim_v if name.endswith("backward") else dim + dim_v)


def _overload_of(name: str, arguments: tuple[Any, ...]) -> str:
    """Return the overload that arguments are of, which torch's counter does not know.

    Where ".used" has a tensor `[B]`, the others have one of four dimensions. That of ".chosen" comes before all tensors of the
    default one, so that a tensor, or None, is in the place of its first number.
    """
    used, default = schemas.SIGNATURES.get(f"{name}.used"), schemas.SIGNATURES[name]
    if used is None:
        return ""
    place = used.names.index("seqlen_k_used")
    if len(arguments) > place and arguments[place] is not None and len(arguments[place]) == 1:
        return ".used"
    has_more = f"{name}.chosen" in schemas.SIGNATURES and len(arguments) > default.tensors
    is_chosen = has_more and (
        arguments[default.tensors] is None or isinstance(arguments[default.tensors], (list, tuple, torch.Size))
    )
    return ".chosen" if is_chosen else ""


def _dense_pairs(query: Any, key: Any, read: Any) -> int:
    pairs = visible_pairs(query[1], key[1], read.band_lo, read.band_hi)
    if read.at_most is not None:
        pairs = min(pairs, query[1] * read.at_most)
    if getattr(read, "chosen", None) is not None:
        pairs = min(pairs, query[1] * read.chosen[-1] * read.block)
    return query[0] * query[2] * pairs


def _varlen_pairs(query: Any, key: Any, read: Any) -> int:
    """Bound the pairs of packed sequences, whose lengths lie on the device, by what the longest allow."""
    longest_q, longest_k = read.max_seqlen_q, read.max_seqlen_k
    diagonal = 0 if read.top_left else longest_k - longest_q
    band = shifted(read.band_lo, read.band_hi, diagonal)
    longest = (read.cu_seqlens_q[0] - 1) * visible_pairs(longest_q, longest_k, *band)
    return query[1] * min(longest, query[0] * longest_k, key[0] * longest_q)


def _formula(name: str) -> Callable[..., int]:
    def formula(*arguments: Any, **_: Any) -> int:
        return _count(name, arguments)

    formula.__name__ = name
    formula.__doc__ = f"Count the products of `torch.ops.dmattn.{name}`: two of a forward, five of a backward."
    return formula


FORMULAS = tuple(_formula(name) for name in schemas.SCHEMAS if name.endswith(("forward", "backward")))


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
