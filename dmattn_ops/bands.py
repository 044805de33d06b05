"""Causal and window conditions as one band of keys for each query, aligned to either corner of the scores."""

from __future__ import annotations

from typing import Literal, NamedTuple

from dmattn_ops import symbolic
from dmattn_ops.call import UNBOUNDED
from dmattn_ops.checks import require
from dmattn_ops.symbolic import certainly, known, larger

CausalFrom = Literal["bottom_right", "top_left"] | int
Window = tuple[int | None, int | None]
ALIGNMENTS = ("bottom_right", "top_left")


class Band(NamedTuple):
    """Key `j` is visible to query `i` iff `i + off + lo <= j <= i + off + hi`.

    `off` is `Sk - Sq` from the bottom right, else 0. So a band says the same for every length, and no length becomes part
    of a compiled graph by it. A `lo` of `-UNBOUNDED` or less and a `hi` of `UNBOUNDED` or more limit nothing, since
    positions are smaller. What hides nothing of the whole hides nothing of a part: such a limit stays where others are moved.
    """

    lo: int = -UNBOUNDED
    hi: int = UNBOUNDED
    bottom_right: bool = False

    @property
    def unlimited(self) -> bool:
        """Whether it hides nothing, whatever the lengths are."""
        return _any_key_before(self.lo) and _any_key_behind(self.hi)

    def limits(self, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """Return `(lo, hi)` from the top left, as the operators take them."""
        off = seqlen_k - seqlen_q if self.bottom_right else 0
        return shifted(self.lo, self.hi, off)

    def moved(self, by: int, seqlen_q: int, seqlen_k: int) -> Band:
        """Return the band of a part of the scores, in which query `i` lies where `i + by` of the same diagonal was."""
        return Band(*shifted(*self.limits(seqlen_q, seqlen_k), by))

    def contains(self, other: Band) -> bool:
        """Return whether this band hides nothing that `other` shows, as far as that is known without the lengths."""
        if self.unlimited:
            return True
        comparable = self.bottom_right == other.bottom_right
        return (_any_key_before(self.lo) or (comparable and known(self.lo <= other.lo))) and (
            _any_key_behind(self.hi) or (comparable and known(self.hi >= other.hi))
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
    aligned = causal_from == "bottom_right" and not (left is None and right is None)
    diagonal = 0 if isinstance(causal_from, str) else causal_from
    lo, hi = (None if left is None else diagonal - left), (None if right is None else diagonal + right)
    return Band(
        -UNBOUNDED if lo is None or symbolic.decided(lo <= -UNBOUNDED) else lo,
        UNBOUNDED if hi is None or symbolic.decided(hi >= UNBOUNDED) else hi,
        aligned,
    )


def shifted(lo: int, hi: int, by: int) -> tuple[int, int]:
    """Move the limits of a band; one that limits nothing stays."""
    return (lo if _any_key_before(lo) else lo + by), (hi if _any_key_behind(hi) else hi + by)


def _any_key_before(lo: int) -> bool:
    """Return whether a lower limit limits nothing."""
    return certainly(lo <= -UNBOUNDED)


def _any_key_behind(hi: int) -> bool:
    """Return whether an upper limit limits nothing."""
    return certainly(hi >= UNBOUNDED)


def _greater(lo: int, other: int) -> int:
    """Return the narrower of two lower limits."""
    if _any_key_before(lo) or _any_key_before(other):
        return other if _any_key_before(lo) else lo
    return larger(lo, other)


def _less(hi: int, other: int) -> int:
    """Return the narrower of two upper limits."""
    return -_greater(-hi, -other)


def visibility(is_causal: bool, causal_from: CausalFrom, window_size: Window) -> tuple[CausalFrom, Window]:
    """Return the alignment of a causal condition and the limits of a window as Python integers; refuse other values."""
    if not isinstance(is_causal, bool):
        require.flags(is_causal=is_causal)
    if isinstance(causal_from, str):
        if causal_from not in ALIGNMENTS:
            raise ValueError(
                f"causal_from must be 'bottom_right' or 'top_left', got {causal_from!r}; an integer is the diagonal itself"
            )
    elif not require.is_integer(causal_from):
        raise TypeError(
            f"causal_from must be 'bottom_right', 'top_left' or an int, got {require.type_text(causal_from)}"
        )
    else:
        causal_from = require.integer("causal_from", causal_from)
        if symbolic.decided(abs(causal_from) >= UNBOUNDED):
            got = require.number_text(causal_from)
            raise ValueError(f"causal_from must be between {1 - UNBOUNDED} and {UNBOUNDED - 1}, got {got}")
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size must be a pair (left, right), got {window_size!r}")
    left, right = window_size
    if left is None and right is None:
        return causal_from, (None, None)
    left, right = _window_limit("left", left), _window_limit("right", right)
    return causal_from, (left, right)


def _window_limit(side: str, limit: int | None) -> int | None:
    """Return the reach of a window to one side; refuse what is neither a number of keys nor None."""
    if limit is None:
        return None
    limit = require.integer(f"window_size {side}", limit)
    if limit < 0:
        got = require.number_text(limit)
        raise ValueError(f"window_size {side} must not be negative (None is unlimited), got {got}")
    return limit
