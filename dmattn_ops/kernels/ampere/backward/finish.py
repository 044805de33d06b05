"""The sums of dq and of a shared bias's gradient: how they lie in memory meanwhile, and the kernels that read them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dmattn_ops.kernels.ampere.copies import products, registers_of_rows, store_columns
from dmattn_ops.kernels.ampere.walks import lanes
from dmattn_ops.kernels.portable.arguments import ROW_TENSORS, UNSPECIALIZED
from dmattn_ops.kernels.portable.heads import program_of
from dmattn_ops.kernels.portable.places import Lengths, Lists, Place
from dmattn_ops.kernels.portable.primitives import rows_of, store_scores
from dmattn_ops.kernels.portable.scores import Bias


@gluon.jit
def places_of_sums(ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return where the sums of `[ROWS, COLUMNS]` lie: those of a warp's 32 lanes are adjacent. The first row is a multiple of 8."""
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    of_column = (column >> 1) % 4 + ((column % 2) + 2 * (column >> 3)) * 32
    return (row % 8) * 4 + (row >> 3) * (8 * COLUMNS) + of_column


@gluon.constexpr_function
def alone(dim, layout):
    """Return the layout of numbers along one of the eight dimensions of a tensor in `layout`."""
    for other in range(7, -1, -1):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def along(dim: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the numbers 0 to before `COUNT` along one of the eight dimensions of `LAYOUT`."""
    numbers = gl.arange(0, COUNT, layout=alone(dim, LAYOUT))
    for other in gl.static_range(8):
        if other != dim:
            numbers = gl.expand_dims(numbers, other)
    return numbers


@gluon.jit
def add_to_sums(
    pointer, dq, ROWS: gl.constexpr, COLUMNS: gl.constexpr, ROW_WARPS: gl.constexpr, COLUMN_WARPS: gl.constexpr
):
    """Add a product `[ROWS, COLUMNS]` of `ROW_WARPS` times `COLUMN_WARPS` warps to the sums (`places_of_sums`) from `pointer` on.

    Each dimension is one of registers, warps or lanes alone: so each thread has one address, and what its registers add to that
    are constants of the instructions.
    """
    ROW_PARTS: gl.constexpr = ROWS // (16 * ROW_WARPS)  # that registers hold, as those of columns
    COLUMN_PARTS: gl.constexpr = COLUMNS // (8 * COLUMN_WARPS)
    parts = gl.reshape(dq, [ROW_PARTS, ROW_WARPS, 2, 8, COLUMN_PARTS, COLUMN_WARPS, 4, 2])
    LAYOUT: gl.constexpr = parts.type.layout
    own = along(1, ROW_WARPS, LAYOUT) * (16 * COLUMNS) + along(5, COLUMN_WARPS, LAYOUT) * 64
    own = own + along(3, 8, LAYOUT) * 4 + along(6, 4, LAYOUT)
    of_row = along(0, ROW_PARTS, LAYOUT) * (ROW_WARPS * 16 * COLUMNS) + along(2, 2, LAYOUT) * (8 * COLUMNS)
    of_column = along(4, COLUMN_PARTS, LAYOUT) * (COLUMN_WARPS * 64) + along(7, 2, LAYOUT) * 32
    gl.atomic_add((pointer + own) + (of_row + of_column), parts, sem="relaxed")


@gluon.jit
def first_sum(place, STEP: gl.constexpr, features: gl.constexpr):
    """Return the row of the sums at which a sequence begins: each has room for whole steps of `STEP` queries."""
    first = place.q_begin
    if features.varlen:
        first = (place.q_begin // STEP + place.sequence) * STEP
    return first


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def finish_kernel(
    dq_sums, log_sum, dq, cu_seqlens_q, cu_seqlens_k, dq_b, dq_s, dq_h,
    blocks, dq_rows, heads, seqlen_q, seqlen_k, longest_q, longest_k, softmax_scale,
    shape: gl.constexpr, features: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """Write dq of one block of queries: 0 where a query sees no key, whatever its own gradient was."""
    LAYOUT: gl.constexpr = products(gl.num_warps(), 1)
    M: gl.constexpr = shape.block_m
    HEAD: gl.constexpr = shape.padded_head
    QUERY_ROWS: gl.constexpr = shape.query_rows
    lengths = Lengths(heads, seqlen_q, seqlen_k, longest_q, longest_k, cu_seqlens_q, cu_seqlens_k)
    place, start_q = program_of(
        gl.program_id(0), lanes(), blocks, lengths, Lists(0, 0, 0, 0, 1), shape, features, False
    )
    if start_q >= place.length_q:
        return
    every_head = place.batch.to(gl.int64) * heads + place.head
    row = start_q + gl.arange(0, M, layout=gl.SliceLayout(1, LAYOUT))
    inside = row < place.length_q
    first = every_head * dq_rows + first_sum(place, STEP, features) + start_q
    at = dq_sums + first * shape.padded_head + places_of_sums(M, HEAD, LAYOUT)
    sums = gl.load(at, mask=inside[:, None], other=0.0)
    row_log_sum = gl.load(log_sum + every_head * seqlen_q + place.q_begin + row, mask=inside, other=0.0)
    made = gl.where((row_log_sum == float("inf"))[:, None], 0.0, sums * softmax_scale)
    rows = rows_of(dq, dq_b, dq_s, dq_h, place.batch, place.head, place.q_begin)
    store_columns(rows, made, start_q, place.length_q, 0, HEAD, QUERY_ROWS)


@gluon.jit
def sums_of_tile(head, start_q, start_k, dq_rows, seqlen_k, M: gl.constexpr, N: gl.constexpr):
    """Return where the sums of a tile `[M, N]` of a head's scores begin: tiles of keys follow each other, then those of queries."""
    of_queries = head * (dq_rows // M) + start_q // M
    return (of_queries.to(gl.int64) * gl.cdiv(seqlen_k, N) + start_k // N) * (M * N)


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def finish_bias_kernel(
    bias_sums, dbias, dbias_h, dbias_q, blocks, dq_rows, seqlen_q, seqlen_k,
    M: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Write `ROWS` queries of one tile `[M, N]` of dbias `[1, heads, Sq, Sk]` from its sums."""
    LAYOUT: gl.constexpr = products(1, gl.num_warps())
    STORED: gl.constexpr = registers_of_rows(N, gl.num_warps())
    key_blocks = gl.cdiv(seqlen_k, N)
    program = gl.program_id(0)
    start_k = program % key_blocks * N
    start_q = program // key_blocks % blocks * ROWS
    head = program // key_blocks // blocks
    first = bias_sums + sums_of_tile(head, start_q, start_k, dq_rows, seqlen_k, M, N) + start_q % M * N
    sums = gl.convert_layout(gl.load(first + places_of_sums(ROWS, N, LAYOUT)), STORED)
    queries = start_q + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORED))
    keys = start_k + gl.arange(0, N, layout=gl.SliceLayout(0, STORED))
    zero = program * 0
    place = Place(zero, zero, head, zero, seqlen_q, zero, seqlen_k, zero)
    store_scores(Bias(dbias + head.to(gl.int64) * dbias_h, dbias_q), sums, queries, keys, place)
