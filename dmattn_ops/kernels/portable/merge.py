"""The second kernel of a forward whose queries share a walk: it merges the outputs of the shares."""

from __future__ import annotations

import triton
import triton.language as tl

from dmattn_ops.kernels.portable.arguments import ROW_TENSORS, UNSPECIALIZED
from dmattn_ops.kernels.portable.places import head_offset
from dmattn_ops.kernels.portable.scores import LN2, LOG2E
from dmattn_ops.kernels.sinks import share_of_keys


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def merge_kernel(
    shares, share_lse, share_tail, share_max, sink, out, lse, lse_tail, row_max, share_stride, lse_stride,
    out_b, out_s, out_h, lse_b, lse_h, lse_tail_b, lse_tail_h, row_max_b, row_max_h, heads, seqlen_q, splits,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merge the shares `[splits, B, Sq, H, Dv]` of one row, weighted by exp of their lse less that of all."""
    program = tl.program_id(0)
    head = program % heads
    position = (program // heads) % seqlen_q
    batch = (program // heads // seqlen_q).to(tl.int64)
    row = (batch * heads + head) * seqlen_q + position
    shares += program.to(tl.int64) * WIDTH

    every = tl.arange(0, SPLITS)
    peak = tl.max(share_logs(share_lse + row, share_tail + row, every, lse_stride, splits, 0.0, False), 0)
    empty = peak == float("-inf")
    base = tl.where(empty, 0.0, peak)
    above = share_logs(share_lse + row, share_tail + row, every, lse_stride, splits, base, True)
    top = tl.where(empty, 0.0, tl.max(above, 0))  # not 0: the largest lse may have lost more than another
    total = tl.sum(tl.exp2((above - top) * LOG2E), 0)

    columns = tl.arange(0, PADDED)
    acc = tl.zeros((PADDED,), tl.float32)
    for first in tl.range(0, SPLITS, AT_ONCE):
        some = first + tl.arange(0, AT_ONCE)
        some_above = share_logs(share_lse + row, share_tail + row, some, lse_stride, splits, base, True)
        weight = tl.exp2((some_above - top) * LOG2E)
        # The output of a share whose weight is 0 may never have been written.
        written = (weight != 0.0)[:, None] & (columns < WIDTH)[None, :]
        pointers = shares + some.to(tl.int64)[:, None] * share_stride + columns[None, :]
        acc += tl.sum(tl.load(pointers, mask=written, other=0.0) * weight[:, None], 0)
    acc = tl.where(empty, 0.0, acc / tl.where(empty, 1.0, total))
    if sink is not None:
        log_sum = base + (top + tl.log2(tl.where(empty, 1.0, total)) * LN2)
        acc *= share_of_keys(tl.load(sink + head).to(tl.float32), tl.where(empty, float("-inf"), log_sum))
    out += head_offset(batch, head, out_b, out_h) + position.to(tl.int64) * out_s
    tl.store(out + columns, acc.to(out.dtype.element_ty), mask=columns < WIDTH)
    rest = top + tl.log2(tl.where(empty, 1.0, total)) * LN2
    row_lse = base + rest
    row_tail = (base - row_lse) + rest
    tl.store(lse + head_offset(batch, head, lse_b, lse_h) + position, tl.where(empty, float("-inf"), row_lse))
    tl.store(lse_tail + head_offset(batch, head, lse_tail_b, lse_tail_h) + position, tl.where(empty, 0.0, row_tail))
    if row_max is not None:
        largest = tl.max(
            tl.load(share_max + row + every.to(tl.int64) * lse_stride, mask=every < splits, other=float("-inf")), 0
        )
        largest = tl.where(total == total, largest, float("nan"))
        tl.store(row_max + head_offset(batch, head, row_max_b, row_max_h) + position, largest)


@triton.jit
def share_logs(lse, lse_tail, shares, stride, splits, base, WITH_TAIL: tl.constexpr):
    """Return lse of the shares less `base`, and with what it lost; -inf for those that saw nothing or were not written."""
    places = shares.to(tl.int64) * stride
    logs = tl.load(lse + places, mask=shares < splits, other=float("-inf"))
    if WITH_TAIL:
        logs = (logs - base) + tl.load(lse_tail + places, mask=logs != float("-inf"), other=0.0)
    return logs
