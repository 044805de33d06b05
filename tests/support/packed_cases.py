"""Packed sequences: random ones, and what their queries and keys see of each other, from the definition."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dmattn_ops.bands import CausalFrom, Window, band_of
from dmattn_ops.call import NO_MASK, Call, Varlen, plain_options


@dataclass(frozen=True)
class Packed:
    """Packed sequences by their lengths, and the band that each of them has."""

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    is_causal: bool = False
    causal_from: CausalFrom = "bottom_right"
    window: Window = (None, None)

    @property
    def offsets(self) -> tuple[Tensor, Tensor]:
        """cu_seqlens_q and cu_seqlens_k."""
        return offsets_of(self.lengths_q), offsets_of(self.lengths_k)

    @property
    def varlen(self) -> Varlen:
        """As a call has it."""
        longest = max(self.lengths_q, default=0), max(self.lengths_k, default=0)
        return Varlen(*self.offsets, *longest, self.causal_from == "top_left")

    def call(self, heads: int = 1, dim: int = 8) -> Call:
        """A call on tensors without values."""
        query, key = (
            torch.empty(sum(lengths), heads, dim, dtype=torch.bfloat16) for lengths in (self.lengths_q, self.lengths_k)
        )
        band = band_of(self.is_causal, self.causal_from, self.window)
        options = plain_options(1.0, band.lo, band.hi)
        return Call(query, key, key, None, NO_MASK, None, None, self.varlen, options)

    def keep(self) -> Tensor:
        """Which keys each query sees, `[total_q, total_k]`, sequence by sequence."""
        total = torch.zeros(sum(self.lengths_q), sum(self.lengths_k), dtype=torch.bool)
        first_q, first_k = 0, 0
        for queries, keys in zip(self.lengths_q, self.lengths_k, strict=True):
            diagonal = keys - queries if self.causal_from == "bottom_right" else 0
            i, j = torch.arange(queries)[:, None] + diagonal, torch.arange(keys)[None]
            seen = torch.ones(queries, keys, dtype=torch.bool)
            if self.is_causal:
                seen &= j <= i
            left, right = self.window
            if left is not None:
                seen &= j >= i - left
            if right is not None:
                seen &= j <= i + right
            total[first_q : first_q + queries, first_k : first_k + keys] = seen
            first_q, first_k = first_q + queries, first_k + keys
        return total


def offsets_of(lengths: tuple[int, ...]) -> Tensor:
    """Return the offsets of sequences of these lengths, int32."""
    return torch.tensor([0, *lengths]).cumsum(0).int()


def draw_packed(seed: int) -> Packed:
    """Draw sequences of uneven lengths, some of them empty on one side or both, and a band."""
    generator = torch.Generator().manual_seed(seed)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=generator))

    def lengths(count: int, longest: int) -> tuple[int, ...]:
        return tuple(0 if below(6) == 0 else 1 + below(longest) for _ in range(count))

    count, longest = (1, 2, 3, 17, 40)[below(5)], (5, 130, 700)[below(3)]
    queries = lengths(count, longest)
    keys = queries if below(2) else lengths(count, (5, 130, 700)[below(3)])
    left = below(200) if below(3) == 0 else None
    right = below(200) if below(3) == 0 else None
    return Packed(queries, keys, below(2) == 0, "top_left" if below(2) else "bottom_right", (left, right))
