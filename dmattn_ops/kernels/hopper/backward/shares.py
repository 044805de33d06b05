"""Several blocks for each key tile of the SM 9.0 backward, where there are fewer key tiles than SMs: the sums of what they make."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dmattn_ops.call import Gradients
from dmattn_ops.kernels.hopper.arguments import row_strides
from dmattn_ops.launching.launch import launch, workspace
from dmattn_ops.launching.overlap import follow_kernel_before

_ROWS = 16  # of a program


@triton.jit
def _add(parts, out, rows, per_batch, heads, out_b, out_s, out_h, shares, dim, ROWS: tl.constexpr, D: tl.constexpr):
    """Write the sums over `shares` of `[B, shares, S, heads, dim]` for a program's rows of `[B, S, heads, dim]`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, D)
    inside = (row < rows)[:, None] & (column < dim)[None, :]
    batch, rest = (row // per_batch).to(tl.int64), row % per_batch
    first = parts + (batch * shares * per_batch + rest)[:, None] * dim + column[None, :]
    total = tl.zeros([ROWS, D], tl.float32)
    for share in range(shares):
        total += tl.load(first + tl.cast(share, tl.int64) * per_batch * dim, mask=inside, other=0.0).to(tl.float32)
    at = batch * out_b + (rest // heads).to(tl.int64) * out_s + (rest % heads).to(tl.int64) * out_h
    tl.store(out + at[:, None] + column[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "per_batch", "heads", "shares"])
def add_shares_kernel(
    dk_parts, dv_parts, dk, dv, rows, per_batch, heads, dk_b, dk_s, dk_h, dv_b, dv_s, dv_h, shares, dim, dim_v,
    ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Write dk and dv `[B, Sk, Hkv, D]`, of which there are `rows` rows, `per_batch` of each batch, from those of all shares."""
    follow_kernel_before()
    if tl.program_id(1) == 0:
        _add(dk_parts, dk, rows, per_batch, heads, dk_b, dk_s, dk_h, shares, dim, ROWS, D)
    else:
        _add(dv_parts, dv, rows, per_batch, heads, dv_b, dv_s, dv_h, shares, dim_v, ROWS, DV)


def parts_of(grads: Gradients, shares: int) -> tuple[Tensor, Tensor]:
    """Return a place `[B * shares, Sk, Hkv, D]` for the dk of each share, and one for dv: those of the call where there is one."""
    if shares == 1:
        return grads.dk, grads.dv
    dk, dv = (
        workspace(made, made.shape[0] * shares, *made.shape[1:], dtype=made.dtype) for made in (grads.dk, grads.dv)
    )
    return dk, dv


def add_shares(parts: tuple[Tensor, Tensor], grads: Gradients, shares: int) -> None:
    """Write dk and dv from `parts_of` them; each element is rounded once for its share, and once for the sum."""
    if shares == 1:
        return
    dk, dv = grads.dk, grads.dv
    batch, seqlen_k, heads, dim = dk.shape
    dim_v = dv.shape[-1]
    rows = batch * seqlen_k * heads
    launch(
        add_shares_kernel, (triton.cdiv(rows, _ROWS), 2), *parts, dk, dv, rows, seqlen_k * heads, heads,
        *row_strides(dk), *row_strides(dv), shares, dim, dim_v,
        ROWS=_ROWS, D=triton.next_power_of_2(dim), DV=triton.next_power_of_2(dim_v), num_warps=4,
        follows=True,
    )  # fmt: skip
