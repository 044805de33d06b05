"""From products of queries and keys to probabilities and the gradient of scores, in the portable kernels.

Most calls count scores in units of log2, so that one fused multiplication and addition turns a product into the exponent
of a probability. A bias may be as large as float32 allows, and times log2(e) would overflow: with one, and where the scale
is large, scores are in natural units (`call.in_natural_units`).

A probability is `exp(score - log_sum)`, and the logarithm of a row's sum is kept in two numbers: `log_sum`, rounded, and
`log_rest`, what it lost (and what a sink adds). A score of 1e9 is rounded to a multiple of 64, and so is the logarithm
beside it: only the difference of the two, taken before `log_rest` is subtracted, is small and exact.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dmattn_ops.kernels.portable.places import head_rows

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LARGE = tl.constexpr(268435456.0)  # 2 ** 28
HUGE = tl.constexpr(1e38)


class Factors(NamedTuple):
    """The factors of products: `ratio` before the soft cap, `factor` after it, or alone where there is no soft cap."""

    ratio: Any
    factor: Any


class BiasArray(NamedTuple):
    """A bias with its strides; the last one is 1."""

    bias: Any
    bias_b: Any
    bias_h: Any
    bias_q: Any
    group: Any  # query heads that share a head of it


class Bias(NamedTuple):
    """The bias of one head: where query 0 and key 0 lie. Keys follow each other."""

    start: Any
    query_stride: Any


@triton.jit
def tanh(x):
    """Return tanh to a few units in the last place; a series near 0, where the quotient would cancel."""
    square = x * x
    series = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    quotient = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def capped(products, factors, features: tl.constexpr):
    """Return (products after tanh of the soft cap, its derivative), or (products, 1); `factors.factor` is not applied yet."""
    slope = 1.0
    if features.softcap:
        products = tanh(products * factors.ratio)
        slope = 1.0 - products * products
    return products, slope


@triton.jit
def bias_of(array, place, head, features: tl.constexpr):
    """Return the bias of a query head."""
    start = 0
    if features.bias != "none":
        start = head_rows(array.bias, place.batch, head // array.group, place.k_begin, array.bias_b, 1, array.bias_h)
    return Bias(start, array.bias_q)


@triton.jit
def load_bias(head, queries, keys, KEYS_OWNED: tl.constexpr, CHECKED: tl.constexpr):
    """Load the bias of `queries` and `keys` as float32, `[keys, queries]` where keys are owned, else `[queries, keys]`.

    `CHECKED`: the step may reach past the end of the walked side.
    """
    bias, place = head.bias, head.place
    query_offsets, key_offsets = queries.to(tl.int64) * bias.query_stride, keys.to(tl.int64)
    if KEYS_OWNED:
        pointers = bias.start + key_offsets[:, None] + query_offsets[None, :]
        inside = (keys < place.length_k)[:, None]
        if CHECKED:
            inside = inside & (queries < place.length_q)[None, :]
    else:
        pointers = bias.start + query_offsets[:, None] + key_offsets[None, :]
        inside = (queries < place.length_q)[:, None]
        if CHECKED:
            inside = inside & (keys < place.length_k)[None, :]
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_key_bias(head, keys):
    """Load the bias of `keys` as float32, `[keys]`."""
    bias, end = head.bias, head.place.length_k
    return tl.load(bias.start + keys.to(tl.int64), mask=keys < end, other=0.0).to(tl.float32)


@triton.jit
def log_terms(lse, lse_tail, NATURAL: tl.constexpr):
    """Return `log_sum` and `log_rest` of rows, in the units of their scores; +inf and 0 where a row is empty.

    So a probability of an empty row is 0, whatever the score. `log_rest` is in units of log2 either way.
    """
    empty = lse == float("-inf")
    if NATURAL:
        log_sum = lse
        log_rest = lse_tail * LOG2E
    else:
        log_sum = tl.fma(lse, LOG2E, 0.0)  # rounded by itself: not as a part of what follows
        log_rest = tl.fma(lse, LOG2E, -log_sum) + lse_tail * LOG2E
    return tl.where(empty, float("inf"), log_sum), tl.where(empty, 0.0, log_rest)


@triton.jit
def log2_unit(factors, features: tl.constexpr):
    """Return the positive factor that turns products into log2 units; products of a negative factor are negated before.

    Where its sign is 0 the factor is too small to tell products apart, which are 0 then.
    """
    unit = factors.factor * LOG2E
    if features.sign < 0:
        unit = -unit
    if features.sign == 0:
        unit = tl.cast(1.0, tl.float32)
    return unit


@triton.jit
def row_units(peak, unit):
    """Return the factor of the products of each row: `unit`, and in rows of large scores a power of two.

    An exponent is `product * unit - base`, rounded once, where `base` is `peak * unit`, rounded too. That moves all of a row's
    exponents by the same number, which is small, and divided out in the end; but where a score is 2 ** 28 it may be 16, and
    beyond that probabilities overflow, or all become 0. The product with a power of two is exact. It changes the weights of
    other scores than the largest, which are 0 either way: they lie 16 or more below it, as float32 holds no closer ones.
    """
    upwards = (unit.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return tl.where(tl.abs(peak) < LARGE / unit, unit, upwards.to(tl.float32, bitcast=True))


@triton.jit
def natural_units(peak):
    """Return the factor of each row's scores in natural units, as `row_units` does; 1 where twice a score may be infinite."""
    size = tl.abs(peak)
    return tl.where(size < LARGE / LOG2E, LOG2E, tl.where(size < HUGE, 2.0, 1.0))


@triton.jit
def least_peak(unit):
    """Return a product below all others, of which the product with any of a row's units is finite."""
    return -1.7e38 / tl.maximum(unit, 1.0)


@triton.jit
def lse_terms(peak, total, unit, NATURAL: tl.constexpr):
    """Return `lse` and `lse_tail` of rows from what `attend` found: their `peak`, and the sum of exp(score - peak).

    `log_terms` turns them into numbers that add up to the logarithm of the sum of exp(score) again.
    """
    empty = total == 0.0
    log_total = tl.log2(tl.where(empty, 1.0, total))
    if NATURAL:
        top = tl.fma(peak, LOG2E, 0.0)
        log_total -= tl.where(
            tl.abs(peak) < LARGE / LOG2E, tl.fma(peak, LOG2E, -top), 0.0
        )  # relative to the peak itself
        rest = log_total * LN2
        lse = peak + rest
        tail = (peak - lse) + rest
    else:
        top = tl.fma(peak, unit, 0.0)
        # With a power of two, the sum is relative to the peak itself, and not to what rounding makes of it.
        log_total += tl.where(tl.abs(peak) < LARGE / unit, 0.0, tl.fma(peak, unit, -top))
        lse = (top + log_total) * LN2
        log_sum = tl.fma(lse, LOG2E, 0.0)
        tail = ((top - log_sum) - tl.fma(lse, LOG2E, -log_sum) + log_total) * LN2
    return tl.where(empty, float("-inf"), lse), tl.where(empty, 0.0, tail)


@triton.jit
def probabilities(products, bias, factors, log_sum, log_rest, NATURAL: tl.constexpr):
    """Return the probabilities of products that `capped` returned, between 0 and 1.

    A product that was rounded in another way than in the forward moves a large score by more than the 0 that it should
    not pass: then a probability is 1. A NaN stays one.
    """
    # Times -1, and not negated: Triton subtracts from 0, which is an instruction that no other one absorbs.
    if NATURAL:
        score = tl.fma(products, factors.factor, bias)
        exponent = tl.fma(score - log_sum, LOG2E, log_rest * -1.0)
    else:
        exponent = tl.fma(products, factors.factor * LOG2E, log_sum * -1.0) - log_rest
    return tl.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def score_gradient(p, grad_p, delta, keep, dropout, DROPOUT: tl.constexpr):
    """Return the gradient of the scores: `p * (grad_p - delta)`, where `grad_p` passes through dropout."""
    if DROPOUT:
        grad_p = tl.where(keep, grad_p * dropout.rescale, 0.0)
    return p * (grad_p - delta)
