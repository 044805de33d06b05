"""Causal and window conditions as one band of keys for each query, aligned to either corner of the scores."""

from __future__ import annotations

from typing import Literal, NamedTuple

from dmattn_ops.problem import UNBOUNDED
from dmattn_ops.require import certainly, larger

CausalFrom = Literal["bottom_right", "top_left"] | int
Window = tuple[int | None, int | None]


class Band(NamedTuple):
    """Key `j` is visible to query `i` iff `i + off + lo <= j <= i + off + hi`.

    `off` is `Sk - Sq` from the bottom right, else 0. So a band says the same for every length, and no length becomes part
    of a compiled graph by it. A limit of `UNBOUNDED` or more limits nothing.
    """

    lo: int = -UNBOUNDED
    hi: int = UNBOUNDED
    bottom_right: bool = False

    @property
    def unlimited(self) -> bool:
        """Whether it hides nothing, whatever the lengths are."""
        return _is_unbounded(self.lo) and _is_unbounded(self.hi)

    def limits(self, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """Return `(lo, hi)` from the top left, as the operators take them."""
        off = seqlen_k - seqlen_q if self.bottom_right else 0
        return shifted(self.lo, off), shifted(self.hi, off)

    def moved(self, by: int, seqlen_q: int, seqlen_k: int) -> Band:
        """Return the band of a part of the scores, in which query `i` lies where `i + by` of the same diagonal was."""
        lo, hi = self.limits(seqlen_q, seqlen_k)
        return Band(shifted(lo, by), shifted(hi, by))

    def contains(self, other: Band) -> bool:
        """Return whether this band hides nothing that `other` shows, as far as that is known without the lengths."""
        if self.unlimited:
            return True
        comparable = self.bottom_right == other.bottom_right
        return (_is_unbounded(self.lo) or (comparable and self.lo <= other.lo)) and (
            _is_unbounded(self.hi) or (comparable and self.hi >= other.hi)
        )

    def also(self, other: Band, seqlen_q: int, seqlen_k: int) -> Band:
        """Return the band of both conditions."""
        if other.contains(self):
            return self
        if self.contains(other):
            return other
        if self.bottom_right == other.bottom_right:
            return Band(_greater(self.lo, other.lo), _less(self.hi, other.hi), self.bottom_right)
        (lo, hi), (other_lo, other_hi) = self.limits(seqlen_q, seqlen_k), other.limits(seqlen_q, seqlen_k)
        return Band(_greater(lo, other_lo), _less(hi, other_hi))


NO_BAND = Band()


def band_of(is_causal: bool, causal_from: CausalFrom, window_size: Window) -> Band:
    """Return the band of a causal condition and a window; an integer `causal_from` is the offset of the diagonal."""
    left, right = window_size
    if is_causal:
        right = 0
    lo = -UNBOUNDED if left is None else max(-UNBOUNDED, -left)
    hi = UNBOUNDED if right is None else min(UNBOUNDED, right)
    if isinstance(causal_from, str):
        aligned = causal_from == "bottom_right" and not (left is None and right is None)
        return Band(lo, hi, aligned)
    return Band(shifted(lo, causal_from), shifted(hi, causal_from))


def shifted(limit: int, by: int) -> int:
    """Move a limit; one that limits nothing stays."""
    return limit if _is_unbounded(limit) else limit + by


def _is_unbounded(limit: int) -> bool:
    return certainly(abs(limit) >= UNBOUNDED)


def _greater(lo: int, other: int) -> int:
    """Return the narrower of two lower limits."""
    if _is_unbounded(lo) or _is_unbounded(other):
        return other if _is_unbounded(lo) else lo
    return larger(lo, other)


def _less(hi: int, other: int) -> int:
    """Return the narrower of two upper limits."""
    return -_greater(-hi, -other)
