"""From products of queries and keys to probabilities in the SM 9.0 backward kernels: a bias, its gradient, a soft cap."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import PropagateNan as _PropagateNan

from dmattn_ops.kernels.hopper.constants import LN2, LOG2E, accumulator
from dmattn_ops.kernels.hopper.gluon_compat import warpgroup_mma, warpgroup_mma_wait

ALL_NAN = gl.constexpr(_PropagateNan.ALL)
NO_BIAS = gl.constexpr(0)
KEY_BIAS = gl.constexpr(1)  # one value per key
FULL_BIAS = gl.constexpr(2)  # one per query and key
TILED_BIAS = gl.constexpr(3)  # that, which the forward loads in tiles by TMA
BIAS_KINDS = {"none": 0, "key": 1, "full": 2, "tiles": 3}  # for launchers


class Scales(NamedTuple):
    """What products are multiplied by."""

    factor: Any  # to scores in log2 units; with a soft cap to what tanh is taken of
    cap: Any  # the soft cap in log2 units
    unscale: Any  # 1 / factor
    softmax: Any  # to scores in natural units


class Exact(NamedTuple):
    """The pairs of the row statistics (`hopper/statistics.py`), and whether some row needs them: kernels say which are asked."""

    needed: Any
    first: Any  # of all rows
    second: Any


class Bias(NamedTuple):
    """A bias at one batch, and where the sums of dS `[H, Sk]` of a bias per key go."""

    start: Any  # query 0 and key 0 of head 0
    head: Any  # stride of heads
    group: Any  # query heads that read one head of the bias
    query: Any  # stride of queries, of a full bias
    factor: Any  # 1 / scale, so that a full bias can be added before the scale is applied
    sums: Any
    sums_head: Any  # stride of their heads
    seqlen_q: Any
    seqlen_k: Any


@gluon.jit
def head_of(bias, head):
    """Return where the bias of a query head begins."""
    return bias.start + (head // bias.group).to(gl.int64) * bias.head


@gluon.jit
def finite_or_lowest(bias):
    """Return a bias with NaN and +inf as -inf.

    They would reach dk and dv through queries past the end, whose lse of +inf makes P 0 otherwise, although no query may
    see them; where one does, its lse is NaN.
    """
    return gl.where(bias < float("inf"), bias, float("-inf"))


@gluon.jit
def load_key_bias(bias, head, keys, BIAS: gl.constexpr):
    """Return the bias of `keys` for a query head; without one per key anything."""
    if BIAS == KEY_BIAS:
        added = gl.load(head_of(bias, head) + keys, mask=keys < bias.seqlen_k, other=0.0)
        return finite_or_lowest(added.to(gl.float32))
    else:
        return keys


@gluon.jit
def any_flag(flags, count):
    """Return whether one of `count` bytes is not 0."""
    AT_ONCE: gl.constexpr = 512
    PLACES: gl.constexpr = gl.BlockedLayout([AT_ONCE // 32 // gl.num_warps()], [32], [gl.num_warps()], [0])
    at = gl.arange(0, AT_ONCE, layout=PLACES)
    found = gl.zeros([AT_ONCE], gl.int32, layout=PLACES)
    for first in range(0, count, AT_ONCE):
        found = found | gl.load(flags + first + at, mask=first + at < count, other=0).to(gl.int32)
    return gl.max(found, 0)


@gluon.jit
def any_flag_of_heads(flags, count, heads, step):
    """Return whether one of `count` bytes of one of some heads is not 0; heads are `step` bytes apart."""
    AT_ONCE: gl.constexpr = 512
    PLACES: gl.constexpr = gl.BlockedLayout([AT_ONCE // 32 // gl.num_warps()], [32], [gl.num_warps()], [0])
    at = gl.arange(0, AT_ONCE, layout=PLACES)
    found = gl.zeros([AT_ONCE], gl.int32, layout=PLACES)
    for _ in range(heads):
        for first in range(0, count, AT_ONCE):
            found = found | gl.load(flags + first + at, mask=first + at < count, other=0).to(gl.int32)
        flags += step
    return gl.max(found, 0)


@gluon.jit
def full_bias(bias, head, keys, queries):
    """Return a full bias of `keys` and `queries`, one of them a column, in natural units."""
    inside = (keys < bias.seqlen_k) & (queries < bias.seqlen_q)
    at = head_of(bias, head) + queries.to(gl.int64) * bias.query + keys
    return finite_or_lowest(gl.load(at, mask=inside, other=0.0).to(gl.float32))


@gluon.jit
def step_bias(bias, head, key_bias, keys, queries, exact, BIAS: gl.constexpr):
    """Return the bias of a step's scores: `key_bias`, or a full bias at `keys` and `queries`, one of them a column.

    A full bias is in the units of the products before the scale (see `first_scores`), and 0 where it is added to the scores.
    """
    if BIAS == FULL_BIAS:
        added = full_bias(bias, head, keys, queries) * bias.factor
        if exact.needed != 0:
            added = gl.zeros_like(added)
        return added
    else:
        return key_bias


@gluon.jit
def first_scores(added, N: gl.constexpr, BIAS: gl.constexpr):
    """Return the initial accumulator of scores `[64, N]`: a full bias, which then needs no registers of its own, or zeros."""
    if BIAS == FULL_BIAS:
        return added
    else:
        return gl.zeros([64, N], gl.float32, layout=accumulator(N))


@gluon.jit
def tanh(x):
    """Return tanh by one instruction of the unit that also computes exponentials, with a relative error of up to 2 ** -11.

    That is what rounding a score to float16 costs, once, and a fourth of what rounding it to bfloat16 costs. By exponentials
    and a division tanh takes three such instructions, and with them the forward took 1.8 times as long (H200, D 128).
    """
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def softened(s, scales, SOFTCAP: gl.constexpr):
    """Return (scores under a soft cap over the cap, their derivative), as the forward has them, from products `s`.

    Without a soft cap the products stay as they are.
    """
    slope = 1.0
    if SOFTCAP:
        s = tanh(s * scales.factor)
        slope = 1.0 - s * s
    return s, slope


@gluon.jit
def rounded_exponents(s, minus_lse, added, scales, BIAS: gl.constexpr, SOFTCAP: gl.constexpr, STARTED: gl.constexpr):
    """Return log2 of P from what `softened` returns, with lse rounded to log2 units.

    STARTED: the products began with lse already taken off, divided by the factor.
    """
    if SOFTCAP:
        x = s * scales.cap
        if BIAS == KEY_BIAS:
            x = x + added * LOG2E
        x = x + minus_lse
    elif BIAS == KEY_BIAS:
        x = gl.fma(s, scales.factor, added * LOG2E)
        if not STARTED:
            x = x + minus_lse
    elif STARTED:
        x = s * scales.factor
    else:
        x = gl.fma(s, scales.factor, minus_lse)
    return x


@gluon.jit
def exact_exponents(
    s, first, second, added, scales, BIAS: gl.constexpr, SOFTCAP: gl.constexpr, NATURAL: gl.constexpr
):  # fmt: skip
    """Return log2 of P from what `softened` returns, with the pair of the row statistics: P adds up to 1 at any size.

    NATURAL: all is in natural units, rounded as in the forward; always so with a bias `added` (one per key, or a full one).
    """
    if SOFTCAP:
        if not NATURAL:
            x = (s * scales.cap - first) - second
        elif BIAS == NO_BIAS:
            x = ((s * (scales.cap * LN2) - first) - second) * LOG2E
        else:
            x = (((s * (scales.cap * LN2) + added) - first) - second) * LOG2E
    elif not NATURAL:
        x = gl.fma(s, scales.factor, -first) - second
    elif BIAS == NO_BIAS:
        x = ((gl.fma(s, scales.softmax, 0.0) - first) - second) * LOG2E
    else:
        x = ((gl.fma(s, scales.softmax, added) - first) - second) * LOG2E
    return gl.minimum(x, 0.0, propagate_nan=ALL_NAN)


@gluon.jit
def no_key_sums():
    """Return sums of dS `[64, 8]` of 64 keys before the first query; all columns are the same."""
    return gl.zeros([64, 8], gl.float32, layout=accumulator(8))


@gluon.jit
def add_key_sums(sums, ds, ones, BIAS: gl.constexpr):
    """Start adding dS `[64, queries]` to the sums of its keys, as a product with ones `[1, 8, queries]`.

    Additions would take registers, which are what a step has least of: they cost 45% (D 64) and 16% (D 128) of its time
    where the product costs 6% (H200, 2026-11).
    """
    if BIAS == KEY_BIAS:
        SUMS: gl.constexpr = accumulator(8)
        ds = gl.convert_layout(ds, gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2))
        sums = warpgroup_mma(ds, ones.permute((1, 0)), sums, is_async=True)
    return sums


@gluon.jit
def finish_key_sums(sums, BIAS: gl.constexpr):
    """Wait for `add_key_sums`, and for every product before it."""
    if BIAS == KEY_BIAS:
        sums = warpgroup_mma_wait(0, deps=(sums,))
    return sums


@gluon.jit
def store_key_sums(bias, head, keys, sums, BIAS: gl.constexpr):
    """Write the sums of dS of `keys` over the queries of a head."""
    if BIAS == KEY_BIAS:
        sums = gl.convert_layout(sums, keys.type.layout)
        gl.store(bias.sums + head.to(gl.int64) * bias.sums_head + keys, sums, mask=keys < bias.seqlen_k)
