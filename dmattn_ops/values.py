"""What is refused for the values that a tensor holds: reads them, so only for tensors on the CPU."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from dmattn_ops import layout
from dmattn_ops.problem import Varlen


def offsets(query: Tensor, key: Tensor, lengths: Varlen) -> None:
    """Refuse offsets that do not describe the packed tensors."""
    for letter, name, packed, cu_seqlens, longest in (
        ("q", "query", query, lengths.cu_seqlens_q, lengths.max_seqlen_q),
        ("k", "key", key, lengths.cu_seqlens_k, lengths.max_seqlen_k),
    ):
        values = cu_seqlens.tolist()
        total, widest = packed.shape[0], max((b - a for a, b in pairwise(values)), default=0)
        if values[0] != 0 or values[-1] != total:
            raise ValueError(
                f"cu_seqlens_{letter} must go from 0 to the length of {name}, {total}, got {values[0]} to {values[-1]}"
            )
        if values != sorted(values):
            raise ValueError(f"cu_seqlens_{letter} must not decrease, got {values}")
        if widest > longest:
            raise ValueError(f"max_seqlen_{letter} must be at least the longest sequence, {widest}, got {longest}")


def contiguous_runs(name: str, ids: Tensor) -> None:
    """Refuse ids of which one returns after another."""
    if not layout.is_one_run_each(ids):
        raise ValueError(f"{name} must be contiguous runs of equal ids, got an id that returns after another one")


def promise(at_most: int, seen: Tensor) -> None:
    """Refuse a promise that a query breaks; `seen` are the keys that each sees."""
    most = int(seen.max()) if seen.numel() else 0
    if most > at_most:
        raise ValueError(f"at_most must be at least the most keys that a query sees, {most}, got {at_most}")
