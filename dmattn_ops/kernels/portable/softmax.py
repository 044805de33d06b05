"""The running softmax of a forward: from products to weights, and what is written of rows when their keys have been walked.

Nothing here asks how a block lies in registers, so that the kernels in Gluon call the same functions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dmattn_ops.kernels.portable.places import head_offset
from dmattn_ops.kernels.portable.scores import (
    LN2,
    capped,
    least_peak,
    log2_unit,
    lse_terms,
    natural_units,
    row_units,
)
from dmattn_ops.kernels.sinks import share_of_keys


class Softmax(NamedTuple):
    """The running softmax of a block of queries.

    `peak` is the largest score in natural units, or the largest product; `base` is what exponents are relative to
    (`scores.row_units`).
    """

    acc: Any
    peak: Any
    base: Any
    total: Any


class Weights(NamedTuple):
    """The weights of a step, relative to the largest scores so far, and what those before it shrink by."""

    p: Any
    shrink: Any
    peak: Any
    base: Any


class RowResults(NamedTuple):
    """Pointers and strides of the statistics of rows, which are written, and of the sink, with the factor of dropout."""

    lse: Any
    lse_b: Any
    lse_h: Any
    lse_tail: Any
    lse_tail_b: Any
    lse_tail_h: Any
    row_max: Any  # None where nobody asks for it
    row_max_b: Any
    row_max_h: Any
    sink: Any
    rescale: Any  # of dropout


@triton.jit
def least_peaks(zeros, factors, features: tl.constexpr):
    """Return (peak, base) of rows that have seen no key yet; `zeros` has one number for each."""
    peak = zeros + float("-inf")
    base = peak
    if not features.natural:
        unit = log2_unit(factors, features)
        peak = zeros + least_peak(unit)
        base = peak * row_units(peak, unit)
    return peak, base


@triton.jit
def scores_of(products, added, factors, features: tl.constexpr):
    """Return scores from products and a bias: in natural units, or products that are the larger the larger the score is."""
    score, _ = capped(products, factors, features)
    if features.sign < 0:
        score = -score
    if features.sign == 0:
        score = score * 0.0
    if features.natural:  # always so with a bias
        score = tl.fma(score, factors.factor, added)
    return score


@triton.jit
def weights_of(score, peak, base, unit, features: tl.constexpr):
    """Return the weights of a block of scores; `peak` and `base` are those of the rows so far."""
    new_peak = tl.maximum(peak, tl.max(score, 1))
    units = natural_units(new_peak) if features.natural else row_units(new_peak, unit)
    new_base = tl.fma(new_peak, units, 0.0)  # rounded by itself: not as a part of the difference below
    finite = new_base
    if features.natural:
        # A row whose scores are all -inf so far has a base of -inf; subtracting that from -inf would give NaN.
        finite = tl.where(new_base == float("-inf"), 0.0, new_base)
    p = tl.exp2(tl.fma(score, units[:, None], finite[:, None] * -1.0))
    shrink = tl.exp2(base - finite)
    return Weights(p, shrink, new_peak, new_base)


@triton.jit
def finish_rows(peak, total, rows, first, results, head, features: tl.constexpr):
    """Write the statistics of `rows`, `first` elements further, and return what their sums of values are multiplied by."""
    place = head.place
    unit = log2_unit(head.factors, features)
    empty = total == 0.0
    scale = 1.0 / tl.where(empty, 1.0, total)
    if features.dropout:
        scale *= results.rescale
    row_lse, row_tail = lse_terms(peak, total, unit, features.natural)
    if results.sink is not None:
        scale *= share_of_keys(tl.load(results.sink + place.head).to(tl.float32), row_lse)
    inside = rows < place.length_q
    at = first + place.q_begin + rows
    tl.store(
        results.lse + head_offset(place.batch, place.head, results.lse_b, results.lse_h) + at, row_lse, mask=inside
    )
    lse_tail = results.lse_tail + head_offset(place.batch, place.head, results.lse_tail_b, results.lse_tail_h)
    tl.store(lse_tail + at, row_tail, mask=inside)
    if results.row_max is not None:
        largest = peak
        if not features.natural:
            largest = tl.where(empty, float("-inf"), peak * unit * LN2)
        largest = tl.where(total == total, largest, float("nan"))
        row_max = results.row_max + head_offset(place.batch, place.head, results.row_max_b, results.row_max_h)
        tl.store(row_max + at, largest, mask=inside)
    return scale
