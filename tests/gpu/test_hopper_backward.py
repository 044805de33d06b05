"""The SM 9.0 backward on a GPU: lengths, bands, groups, masks, strides and workspaces, against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.architecture import skip_file_without_hopper

pytestmark = pytest.mark.gpu
skip_file_without_hopper()

from dmattn_ops.call import NO_MASK, TILE, UNBOUNDED, Call, Gradients, Mask, Saved, plain_options  # noqa: E402
from dmattn_ops.choice import arch, config, resolve  # noqa: E402
from dmattn_ops.kernels.hopper.backward import launch as hopper_backward  # noqa: E402
from tests.support.tile_builder import build_lists, build_tiles, on_gpu, tile_states  # noqa: E402

LENGTHS = [(512, 512), (300, 300), (200, 333), (333, 200), (1, 77), (129, 1), (5000, 100)]
BANDS = [(-UNBOUNDED, UNBOUNDED), (-UNBOUNDED, 0), (-60, 20), (5, 40), (-UNBOUNDED, -30)]
ROUNDING = {torch.bfloat16: 8e-3, torch.float16: 1e-3}  # relative L2; eager attention in the same dtype: about the same


def configuration(dim: int) -> config.HopperBackward:
    """Return the configuration that dispatch gives to head dimension `dim`."""
    return next(row.config for row in config.BACKWARD if row.kernel == "hopper" and row.dim >= dim)


def in_band(seqlen_q: int, seqlen_k: int, band: tuple[int, int]) -> Tensor:
    """Return which keys each query sees, `[1, 1, Sq, Sk]`."""
    i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None]
    return ((j >= i + band[0]) & (j <= i + band[1]))[None, None]


def saved(out: Tensor, lse: Tensor) -> Saved:
    """Return what a backward is given for out and an exact lse: lse in two parts."""
    rounded = lse.float()
    return Saved(out, rounded, (lse - rounded).nan_to_num(0.0).float())


def draw(batch: int, seqlen: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(batch, seqlen, heads, dim, device="cuda").to(dtype)


def empty_partial_and_full_tiles(batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Draw a mask of which each head has its own tiles: a third of each kind."""
    tiles = torch.rand(batch, heads, -(-seqlen_q // TILE), -(-seqlen_k // TILE))
    tiles = tiles.repeat_interleave(TILE, 2).repeat_interleave(TILE, 3)[..., :seqlen_q, :seqlen_k]
    return (tiles > 0.33) & ((tiles > 0.67) | (torch.rand(tiles.shape) < 0.5))


def expected(inputs: tuple[Tensor, ...], visible: Tensor, scale: float, grad_lse: Tensor | None):
    """Return out, lse and the gradients of query, key, value in float64; rows without a key give zeros."""
    query, key, value, grad_out = (x.double().transpose(1, 2) for x in inputs)
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    group = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in leaves[1:])
    scores = (leaves[0] @ keys.mT * scale).masked_fill(~visible, -math.inf)
    empty = ~visible.expand(scores.shape).any(-1)
    scores = scores.masked_fill(empty[..., None], 0.0)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp().masked_fill(empty[..., None], 0.0) @ values
    loss = (out * grad_out).sum()
    if grad_lse is not None:
        loss = loss + (lse.masked_fill(empty, 0.0) * grad_lse).sum()
    grads = torch.autograd.grad(loss, leaves)
    return out.detach().transpose(1, 2), lse.detach().masked_fill(empty, -math.inf), [g.transpose(1, 2) for g in grads]


def check(
    batch: int, seqlens: tuple[int, int], heads: tuple[int, int], dim: int,
    band: tuple[int, int] = (-UNBOUNDED, UNBOUNDED), *,
    dtype: torch.dtype = torch.bfloat16, keep: Tensor | None = None, tiles: Mask = NO_MASK,
    with_grad_lse: bool = False, deterministic: bool = False,
    inputs: tuple[Tensor, ...] | None = None, outputs: tuple[Tensor, ...] | None = None, tolerance: float | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run the kernel and compare with float64; return dq, dk and dv. Outputs hold NaN before."""
    (seqlen_q, seqlen_k), (n_heads, kv_heads) = seqlens, heads
    if inputs is None:
        inputs = (
            draw(batch, seqlen_q, n_heads, dim, dtype), draw(batch, seqlen_k, kv_heads, dim, dtype),
            draw(batch, seqlen_k, kv_heads, dim, dtype), draw(batch, seqlen_q, n_heads, dim, dtype),
        )  # fmt: skip
    query, key, value, grad_out = inputs
    visible = in_band(seqlen_q, seqlen_k, band) if keep is None else keep
    if visible.shape[1] not in (1, n_heads):
        visible = visible.repeat_interleave(n_heads // visible.shape[1], 1)
    grad_lse = torch.randn(batch, n_heads, seqlen_q, device="cuda") if with_grad_lse else None
    scale = dim**-0.5 if scale is None else scale
    out, lse, want = expected(inputs, visible.cuda(), scale, grad_lse)
    options = plain_options(scale, *band, deterministic=deterministic)
    call = Call(query, key, value, None, on_gpu(tiles), None, None, None, options)
    assert hopper_backward.refusals(call) == []
    got = outputs or tuple(torch.empty_like(x) for x in (query, key, value))
    for gradient in got:
        gradient.fill_(math.nan)
    grads, given = Gradients(grad_out, grad_lse, *got, None), saved(out.to(dtype), lse)
    hopper_backward.backward(call, given, grads, resolve.backward_config(configuration(dim), call, given, grads))
    for name, mine, reference in zip(("dq", "dk", "dv"), got, want, strict=True):
        error = (mine.double() - reference).norm() / reference.norm().clamp_min(1e-20)
        assert error < (tolerance or ROUNDING[dtype]), f"{name}: {error:.2e}"
    seen = visible.cuda().expand(batch, n_heads, seqlen_q, seqlen_k)
    unseen = ~seen.any(2).view(batch, kv_heads, -1, seqlen_k).any(2)
    hidden = (~seen.any(3)).transpose(1, 2), unseen.transpose(1, 2), unseen.transpose(1, 2)
    for name, mine, where in zip(("dq", "dk", "dv"), got, hidden, strict=True):
        assert (mine[where] == 0).all(), f"{name} is not exactly 0 where nothing is visible"
    return got


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("seqlens", LENGTHS, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_bands_and_tails(dim: int, seqlens: tuple[int, int], band: tuple[int, int]) -> None:
    check(2, seqlens, (4, 2), dim, band, with_grad_lse=True)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-4])
@pytest.mark.parametrize("dim", [64, 128])
def test_scales_of_any_sign(dim: int, scale: float) -> None:
    check(2, (200, 333), (4, 2), dim, (-UNBOUNDED, -30), scale=scale)


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes the launcher see a GPU of so many multiprocessors, and of so many bytes of L2."""

    def limit(**limits: int) -> None:
        known = arch.physical(torch.device("cuda", torch.cuda.current_device()))
        monkeypatch.setattr(arch, "physical", lambda device: replace(known, **limits))

    return limit


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("dim", [64, 128])
def test_programs_that_take_many_blocks(dim: int, programs: int, band: tuple[int, int], limited) -> None:
    """Key tiles that no query sees are blocks of no step between others."""
    limited(num_sms=programs)
    check(2, (300, 700), (4, 2), dim, band, with_grad_lse=True)


@pytest.mark.parametrize("mask_heads", [2, 4])
@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("dim", [64, 128])
def test_programs_that_take_many_listed_blocks(dim: int, programs: int, mask_heads: int, limited) -> None:
    limited(num_sms=programs)
    for _ in range(5):
        keep = empty_partial_and_full_tiles(1, mask_heads, 300, 900)
        keep[..., 128:256] = False
        check(2, (300, 900), (4, 2), dim, keep=keep, tiles=build_tiles(keep))


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("programs", [3, 12, 132])
@pytest.mark.parametrize("seqlens", [(700, 700), (300, 900), (900, 300)], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_query_heads_that_take_turns(dim: int, seqlens: tuple[int, int], programs: int, ordered: bool, limited) -> None:
    limited(num_sms=programs, l2_bytes=0)
    off = seqlens[1] - seqlens[0]
    query, key = (draw(1, 1, heads, dim, torch.bfloat16) for heads in (6, 2))
    options = plain_options(1.0, -UNBOUNDED, off, deterministic=ordered)
    assert hopper_backward._interleaved(Call(query, key, key, None, NO_MASK, None, None, None, options))
    check(2, seqlens, (6, 2), dim, (-UNBOUNDED, off), with_grad_lse=True, deterministic=ordered)


@pytest.mark.parametrize("dim", [8, 40, 64, 72, 96, 128])
def test_float16_and_padded_head_dimensions(dim: int) -> None:
    check(1, (257, 300), (2, 2), dim, (-UNBOUNDED, 43), dtype=torch.float16)


@pytest.mark.parametrize("mask_heads", [1, 2, 4])
@pytest.mark.parametrize("dim", [64, 128])
def test_lists_and_bits_with_empty_rows_and_columns(dim: int, mask_heads: int) -> None:
    keep = empty_partial_and_full_tiles(2, mask_heads, 300, 400)
    keep[..., 17] = False
    keep[:, :, 5] = False
    check(2, (300, 400), (4, 2), dim, keep=keep, tiles=build_tiles(keep))


@pytest.mark.parametrize("with_queries", [True, False])
@pytest.mark.parametrize("mask_heads", [1, 2, 4])
@pytest.mark.parametrize("dim", [64, 128])
def test_segments_inside_a_band(dim: int, mask_heads: int, with_queries: bool) -> None:
    q_segments = torch.randint(0, 3, (2, 300)).sort(-1).values.int()
    k_segments = torch.randint(0, 3, (2, mask_heads, 400)).sort(-1).values.int()
    if not with_queries:
        q_segments, k_segments = None, k_segments.clamp(max=1) - 1
    ids = torch.zeros(2, 300, dtype=torch.int32) if q_segments is None else q_segments
    band = (-UNBOUNDED, 100)
    keep = (ids[:, None, :, None] == k_segments[:, :, None]) & in_band(300, 400, band)
    lists = build_lists(tile_states(keep).mT)
    tiles = Mask(row_tiles=lists, col_tiles=lists, q_segments=q_segments, k_segments=k_segments)
    check(2, (300, 400), (4, 2), dim, band, keep=keep, tiles=tiles)


def test_a_packed_gradient_is_three_views_of_one_buffer() -> None:
    qkv = torch.randn(2, 200, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    grad_out = torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    packed = torch.empty_like(qkv)
    check(2, (200, 200), (4, 4), 64, (-UNBOUNDED, 0), inputs=(*qkv.unbind(2), grad_out), outputs=packed.unbind(2))


def test_a_broadcast_grad_out_is_copied() -> None:
    query, key, value = (draw(1, 256, 2, 128, torch.bfloat16) for _ in range(3))
    grad_out = torch.randn(1, 1, 2, 128, device="cuda", dtype=torch.bfloat16).expand(1, 256, 2, 128)
    check(1, (256, 256), (2, 2), 128, inputs=(query, key, value, grad_out))


def test_very_negative_scores_do_not_overflow_in_the_tail() -> None:
    query, key = (draw(1, 200, 1, 64, torch.bfloat16) for _ in range(2))
    inputs = (query.abs() * 8, -key.abs() * 8, draw(1, 200, 1, 64, torch.bfloat16), draw(1, 200, 1, 64, torch.bfloat16))
    check(1, (200, 200), (1, 1), 64, inputs=inputs, tolerance=2e-2)


@pytest.mark.parametrize("dim", [64, 128])
def test_keys_of_unlisted_tiles_may_hold_nan(dim: int) -> None:
    keep = torch.ones(1, 1, 256, 384, dtype=torch.bool)
    keep[..., 128:256] = False
    query, key, value, grad_out = (draw(1, s, 2, dim, torch.bfloat16) for s in (256, 384, 384, 256))
    clean = check(1, (256, 384), (2, 2), dim, keep=keep, tiles=build_tiles(keep), inputs=(query, key, value, grad_out))
    dirty_key, dirty_value = key.clone(), value.clone()
    dirty_key[:, 128:256] = math.nan
    dirty_value[:, 128:256] = math.inf
    out, lse, _ = expected((query, key, value, grad_out), keep.cuda(), dim**-0.5, None)
    got = tuple(torch.full_like(x, math.nan) for x in (query, key, value))
    tiles = on_gpu(build_tiles(keep))
    call = Call(query, dirty_key, dirty_value, None, tiles, None, None, None, plain_options(dim**-0.5))
    hopper_backward.backward(
        call, saved(out.bfloat16(), lse), Gradients(grad_out, None, *got, None), configuration(dim)
    )
    for mine, reference in zip(got[1:], clean[1:], strict=True):
        assert torch.equal(mine, reference)
    assert got[0].isfinite().all()


@pytest.mark.parametrize("dim", [64, 128])
def test_dk_and_dv_repeat_bitwise(dim: int) -> None:
    inputs = tuple(draw(2, 1024, 4, dim, torch.bfloat16) for _ in range(4))
    first = check(2, (1024, 1024), (4, 4), dim, BANDS[1], inputs=inputs)
    for _ in range(10):
        again = check(2, (1024, 1024), (4, 4), dim, BANDS[1], inputs=inputs)
        assert torch.equal(first[1], again[1])
        assert torch.equal(first[2], again[2])
