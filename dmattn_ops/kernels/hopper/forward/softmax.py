"""The softmax of the SM 9.0 forward: P of a tile against the row maxima of earlier tiles, which are checked afterwards.

A tile's P are first computed with the maxima that are known (`top`), at the pace of the exponentials. They are right
unless one is far too large; then their sum is too. So a warp looks for new maxima, and computes its P again, only where
a sum is over `2 ** 10`: mostly never after a row's first tile. P may thus exceed 1, which costs floating point nothing.

State of a row is held as `[64, 4]`: one value in each of the four lanes that share the row. `top` is the same in all four;
`total` is a lane's part of the sum, added up at the end.

Scores without a bias come as products, in log2 units once they are multiplied by `scale`; `top` is then a whole number, so
that rescaling is exact. Beyond 2 ** 26 whole numbers are 8 and more apart, and no `top` is close to the largest score: a
row of such scores (HUGE) has its largest product as `top`, and a negative total, and each of its tiles is computed again.
With a bias (NATURAL) scores and `top` are in natural units, because 1.44 times the lowest float32, which padding masks add,
would be -inf; P costs one instruction more there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.hopper.constants import LN2, LOG2E, accumulator


class Tile(NamedTuple):
    """P of a tile, and what its rows have summed up to then."""

    p: Any
    top: Any
    total: Any
    factor: Any  # of what was summed before


class Halves(NamedTuple):
    """What `redo_code` makes of the second half of a tile, and of P of the first one."""

    p: Any
    earlier: Any
    top: Any
    total: Any
    factor: Any


@gluon.constexpr_function
def new_top(known, before, top, factor, scale):
    """Return PTX that finds the top of a row, and the factor of what was summed under the `known` one, in log2 units.

    Given is `m`, the tile's largest product. It leaves `sign` as that of the total (HUGE rows), `t`, the sum so far, and
    `peak` and `m`, such that log2 of P is `(product - peak) * scale + m`.
    """
    HUGE = "0f4C800000"  # 2 ** 26
    return f"""
        mov.b32 sign, {before}; setp.lt.s32 was, sign, 0; abs.f32 t, {before};
        mul.f32 a, m, {scale}; abs.f32 b, a; setp.gt.f32 huge, b, {HUGE}; setp.gt.and.f32 huge, a, {known}, huge;
        or.pred huge, huge, was; cvt.rpi.f32.f32 a, a; max.f32 a, a, {known};
        max.f32 peak, m, {known}; selp.f32 peak, peak, m, was;
        neg.f32 b, peak; fma.rn.f32 b, b, {scale}, {known};
        sub.f32 m, {known}, peak; mul.f32 m, m, {scale}; selp.f32 b, m, b, was;
        sub.f32 m, {known}, a; selp.f32 b, b, m, huge; ex2.approx.ftz.f32 {factor}, b;
        selp.f32 {top}, peak, a, huge; neg.f32 m, a; selp.f32 m, 0f00000000, m, huge; selp.f32 peak, peak, 0f00000000, huge;
        selp.b32 sign, 0x80000000, 0, huge;
    """


@gluon.constexpr_function
def redo_code(count, half_precision, earlier, natural):
    """Return PTX that computes the `count` P of a thread again, if a sum of any thread of the warp is too large.

    Outputs: P in pairs, P of the tile's `earlier` half in pairs (to be rescaled), then top, total and factor of what was
    summed before; inputs: the same, then scores, the sums of the new P, the totals without them, scale. Each is a tile:
    one operand for each P, those of a thread's two rows alternating in pairs, of which the first counts in row values.
    """
    sizes = [count // 2, count // 2 if earlier else 0, count, count, count]
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    pairs, others, top, total, factor = (
        [f"${start + k}" for k in range(size)] for start, size in zip(starts, sizes, strict=True)
    )
    score, part, before, scale = ([f"${2 * sum(sizes) + j * count + k}" for k in range(count)] for j in range(4))
    LIMIT = "0f44800000"  # 2 ** 10
    LOG2E = "0f3FB8AA3B"
    lines = ["{ .reg .pred p, q, huge, was; .reg .f32 a, b, m, t, peak; .reg .b32 h, sign; setp.ne.u32 p, 0, 0;"]
    for at in (0, 2):
        lines.append(f"setp.gtu.or.f32 p, {part[at]}, {LIMIT}, p;")  # true for NaN
        if not natural:
            lines.append(f"mov.b32 sign, {before[at]}; setp.lt.or.s32 p, sign, 0, p;")
    lines.append("vote.sync.any.pred q, p, 0xffffffff; @!q bra.uni DONE;")
    for row in range(2):
        at = 2 * row
        own = [k for k in range(count) if (k >> 1) & 1 == row]
        lines.append(f"max.f32 m, {score[own[0]]}, {score[own[1]]};")
        lines += [f"max.f32 m, m, {score[k]};" for k in own[2:]]
        lines += [f"shfl.sync.bfly.b32 a, m, {lane}, 0x1f, 0xffffffff; max.f32 m, m, a;" for lane in (2, 1)]
        if natural:
            lines.append(f"mov.f32 t, {before[at]}; max.f32 m, m, {top[at]}; sub.f32 a, {top[at]}, m;")
            lines.append(
                f"mul.f32 a, a, {LOG2E}; ex2.approx.ftz.f32 {factor[at]}, a; mov.f32 {top[at]}, m; neg.f32 m, m;"
            )
        else:
            lines.append(new_top(top[at], before[at], top[at], factor[at], scale[0]))
        lines.append(f"mul.f32 t, t, {factor[at]};")
        for k in own[::2]:
            for name, one in (("a", score[k]), ("b", score[k + 1])):
                if natural:
                    lines.append(f"add.f32 {name}, {one}, m; mul.f32 {name}, {name}, {LOG2E};")
                else:
                    lines.append(f"sub.f32 {name}, {one}, peak; fma.rn.f32 {name}, {name}, {scale[0]}, m;")
                lines.append(f"ex2.approx.ftz.f32 {name}, {name}; add.f32 t, t, {name};")
            lines.append(f"cvt.rn.{half_precision}x2.f32 {pairs[k // 2]}, b, a;")
        if not natural:
            lines.append("mov.b32 h, t; or.b32 h, h, sign; mov.b32 t, h;")
        lines.append(f"mov.f32 {total[at]}, t;")
        if earlier:
            lines.append(f"cvt.rn.{half_precision}x2.f32 h, {factor[at]}, {factor[at]};")
            lines += [f"mul.rn.{half_precision}x2 {others[k // 2]}, {others[k // 2]}, h;" for k in own[::2]]
    return " ".join([*lines, "DONE: }"])


@gluon.constexpr_function
def redo_operands(count, earlier):
    """Return the constraints of `redo_code`: outputs, the same registers as inputs, what is only read."""
    outputs = ["=r"] * (count if earlier else count // 2) + ["=f"] * (3 * count)
    return ",".join(outputs + [str(k) for k in range(len(outputs))] + ["f"] * (4 * count))


@gluon.constexpr_function
def rescale_code(count):
    """Return PTX that multiplies `count` accumulators by their rows' factors, if any of the warp's is not 1."""
    factors = range(2 * count, 3 * count)
    test = f"setp.neu.f32 p, ${factors[0]}, 0f3F800000; setp.neu.or.f32 p, ${factors[2]}, 0f3F800000, p;"
    body = " ".join(f"mul.f32 ${k}, ${k}, ${factors[k]};" for k in range(count))
    return "{ .reg .pred p, q; " + test + " vote.sync.any.pred q, p, 0xffffffff; @!q bra.uni SKIP; " + body + " SKIP: }"


@gluon.constexpr_function
def rescale_operands(count):
    """Return the constraints of `rescale_code`: outputs, the same registers as inputs, factors."""
    return ",".join(["=f"] * count + [str(k) for k in range(count)] + ["f"] * count)


@gluon.jit
def _first(a, b):
    return a


@gluon.jit
def by_lane(x, COLUMNS: gl.constexpr):
    """View a tile `[64, COLUMNS]` as `[64, COLUMNS / 8, 4, 2]`: pairs of columns, and the lane that holds each."""
    return x.reshape([64, COLUMNS // 8, 4, 2])


@gluon.jit
def state_of(x, COLUMNS: gl.constexpr):
    """Return `[64, 4]`: the first element that each lane holds of each row of `x`."""
    return gl.reduce(gl.reduce(by_lane(x, COLUMNS), 3, _first), 1, _first)


@gluon.jit
def over_columns(state, COLUMNS: gl.constexpr):
    """Return `[64, COLUMNS]` in the layout of an accumulator: each lane's value in all of its columns."""
    LAYOUT: gl.constexpr = accumulator(COLUMNS)
    shape = by_lane(gl.zeros([64, COLUMNS], state.dtype, layout=LAYOUT), COLUMNS)
    state = gl.convert_layout(state, gl.SliceLayout(1, gl.SliceLayout(3, shape.type.layout)), assert_trivial=True)
    spread, _ = gl.broadcast(gl.expand_dims(gl.expand_dims(state, 1), 3), shape)
    return gl.convert_layout(spread.reshape([64, COLUMNS]), LAYOUT, assert_trivial=True)


@gluon.jit
def own_lanes(row, s, COLUMNS: gl.constexpr):
    """Return `[64, 4]`: the value of each row, `[64]`, in all lanes that hold some of `s` `[64, COLUMNS]`."""
    value, _ = gl.broadcast(gl.expand_dims(row, 1), state_of(s, COLUMNS))
    return value


@gluon.jit
def sum_of_lane(p, COLUMNS: gl.constexpr):
    """Return `[64, 4]`: the sum over the columns of each lane."""
    return gl.sum(gl.sum(by_lane(p, COLUMNS), 3), 1)


@gluon.jit
def largest(s, state, BN: gl.constexpr):
    """Return `[64, 4]`, in the layout of `state`: the largest score of each lane."""
    peak = gl.max(gl.max(by_lane(s, BN), 3), 1)
    return gl.convert_layout(peak, state.type.layout, assert_trivial=True)


@gluon.jit
def halves(s, BN: gl.constexpr):
    """Return the left and the right half of a tile of scores `[64, BN]`."""
    HALF: gl.constexpr = accumulator(BN // 2)
    left, right = gl.split(s.reshape([64, 2, BN // 2]).permute([0, 2, 1]))
    return gl.convert_layout(left, HALF, assert_trivial=True), gl.convert_layout(right, HALF, assert_trivial=True)


@gluon.jit
def exponent(s, top, scale, NATURAL: gl.constexpr):
    """Return scores relative to `top` in log2 units."""
    if NATURAL:
        x = (s - top) * LOG2E
    else:
        x = gl.fma(s, scale, -top)
    return x


@gluon.jit
def softmax_first(s, state, scale, dtype: gl.constexpr, NATURAL: gl.constexpr, BN: gl.constexpr):
    """Return (P, top, total) of a row's first tile of scores `[64, BN]`; `state` has the layout of top and total."""
    LOWEST: gl.constexpr = (
        -3.4028234663852886e38 if NATURAL else -3.0e38
    )  # finite: a row without keys gives 0 and not NaN
    HUGE: gl.constexpr = 67108864.0  # 2 ** 26, as in `new_top`
    peak = gl.max(gl.max(gl.max(by_lane(s, BN), 3), 1), 1)
    if NATURAL:
        top = own_lanes(gl.maximum(peak, LOWEST), s, BN)
        p = gl.exp2(exponent(s, over_columns(top, BN), scale, NATURAL))
        total = sum_of_lane(p, BN)
    else:
        huge = (gl.abs(peak * scale) > HUGE) & (peak * scale > LOWEST)
        whole = gl.maximum(gl.ceil(peak * scale), LOWEST)
        origin = over_columns(own_lanes(gl.where(huge, peak, 0.0), s, BN), BN)
        offset = over_columns(own_lanes(gl.where(huge, 0.0, whole), s, BN), BN)
        p = gl.exp2(gl.fma(s - origin, scale, -offset))
        total = sum_of_lane(p, BN) * own_lanes(gl.where(huge, -1.0, 1.0), s, BN)
        top = own_lanes(gl.where(huge, peak, whole), s, BN)
    top = gl.convert_layout(top, state.type.layout, assert_trivial=True)
    total = gl.convert_layout(total, state.type.layout, assert_trivial=True)
    return p.to(dtype), top, total


@gluon.jit
def speculate(
    s, earlier, top, total, scale, dtype: gl.constexpr, NATURAL: gl.constexpr, EARLIER: gl.constexpr, BN: gl.constexpr
):
    """Return further scores `[64, BN]` as a `Tile`, and P of an earlier half."""
    COUNT: gl.constexpr = BN // 2  # P of a thread
    KIND: gl.constexpr = "bf16" if dtype == gl.bfloat16 else "f16"
    CODE: gl.constexpr = redo_code(COUNT, KIND, EARLIER, NATURAL)
    OPERANDS: gl.constexpr = redo_operands(COUNT, EARLIER)
    tops = over_columns(top, BN)
    p = gl.exp2(exponent(s, tops, scale, NATURAL))
    part = sum_of_lane(p, BN)
    totals, parts, before = over_columns(total + part, BN), over_columns(part, BN), over_columns(total, BN)
    p = p.to(dtype)
    ones = gl.full([64, BN], 1.0, gl.float32, layout=s.type.layout)
    if EARLIER:
        given = [p, earlier, tops, totals, ones, s, parts, before, ones * scale]
        made = Halves(
            *gl.inline_asm_elementwise(
                CODE,
                OPERANDS,
                given,
                (p.dtype, p.dtype, gl.float32, gl.float32, gl.float32),
                is_pure=False,
                pack=COUNT,
            )
        )
        earlier = made.earlier
    else:
        given = [p, tops, totals, ones, s, parts, before, ones * scale]
        made = Tile(
            *gl.inline_asm_elementwise(
                CODE, OPERANDS, given, (p.dtype, gl.float32, gl.float32, gl.float32), is_pure=False, pack=COUNT
            )
        )
    return Tile(made.p, state_of(made.top, BN), state_of(made.total, BN), state_of(made.factor, BN)), earlier


@gluon.jit
def softmax_next(
    s, top, total, scale, dtype: gl.constexpr, NATURAL: gl.constexpr, IN_HALVES: gl.constexpr, BN: gl.constexpr
):
    """Return a further tile of scores `[64, BN]` as a `Tile`.

    In halves, the scores of a half are given up before the P of the other exist: 16 registers less.
    """
    if IN_HALVES:
        HALF: gl.constexpr = BN // 2
        left, right = halves(s, BN)
        one, _ = speculate(left, 0, top, total, scale, dtype, NATURAL, False, HALF)
        other, p_left = speculate(right, one.p, one.top, one.total, scale, dtype, NATURAL, True, HALF)
        p = gl.join(p_left, other.p).permute([0, 2, 1]).reshape([64, BN])
        return Tile(p, other.top, other.total, one.factor * other.factor)
    else:
        tile, _ = speculate(s, 0, top, total, scale, dtype, NATURAL, False, BN)
        return tile


@gluon.jit
def statistics(top, total, scale, NATURAL: gl.constexpr):
    """Return (lse, lse_tail) of rows, -inf and 0 where no key is visible: what `Result` says of them."""
    empty = total == 0.0
    log_total = gl.log2(gl.abs(total))
    if NATURAL:
        log_total = log_total * LN2
        lse = top + log_total
        tail = (top - lse) + log_total
    else:
        zero = gl.zeros_like(top)
        product = gl.fma(top, zero + scale, zero)
        rest = gl.fma(top, zero + scale, -product)
        log_total = gl.where(total < 0.0, rest + log_total, log_total)  # of a HUGE row
        top = gl.where(total < 0.0, product, top)
        lse = (top + log_total) * LN2
        factor = zero + LOG2E
        anchor = gl.fma(lse, factor, zero)  # a product would be contracted into the subtraction
        tail = ((top - anchor) - gl.fma(lse, factor, -anchor) + log_total) * LN2
    return gl.where(empty, float("-inf"), lse), gl.where(empty, 0.0, tail)


@gluon.jit
def largest_of_rows(peak, total, scale, NATURAL: gl.constexpr):
    """Return the largest score of rows, of which `peak` is the largest as it was computed: -inf where no key is visible."""
    if not NATURAL:
        peak = peak * (scale * LN2)
    return gl.where(total == 0.0, float("-inf"), gl.where(total == total, peak, total))


@gluon.jit
def share_of_keys(lse, sink):
    """Return the share of the softmax that a sink leaves to the keys of rows, 0 where no key is visible."""
    share = 1.0 / (1.0 + gl.exp2((sink - lse) * LOG2E))
    return gl.where(lse == float("-inf"), 0.0, share)


@gluon.jit
def rescale(acc, factor, D: gl.constexpr):
    """Return acc `[64, D]` times factor `[64, 4]`; the branch is a warp's own, and mostly skips everything."""
    COUNT: gl.constexpr = D // 2  # accumulators of a thread; those of its two rows alternate in pairs
    CODE: gl.constexpr = rescale_code(COUNT)
    OPERANDS: gl.constexpr = rescale_operands(COUNT)
    given = [acc, over_columns(factor, D)]
    return gl.inline_asm_elementwise(CODE, OPERANDS, given, gl.float32, is_pure=False, pack=COUNT)


@gluon.jit
def row_of(state, ROW: gl.constexpr, SUM: gl.constexpr):
    """Return `[64]`: a row's sum over its four lanes, or the value that they share."""
    row = gl.sum(state, 1) if SUM else gl.max(state, 1)
    return gl.convert_layout(row, ROW, assert_trivial=True)
