"""The C++ CPU kernels against a float64 formula, through their launchers."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from native_calls import (
    FREE,
    Call,
    asked,
    band_keep,
    blocky,
    check,
    draw,
    launch,
    masked,
    packed,
    per_head,
    philox_keep,
    plain,
    run_forward,
)
from torch import Tensor

from dmattn_ops import call as calls
from dmattn_ops.call import NO_MASK, UNBOUNDED, Mask, Varlen
from dmattn_ops.kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason=f"THE C++ KERNELS ARE NOT TESTED: {native.reason()}")


@pytest.mark.parametrize("seed", range(240))
def test_random_problems_hold_the_error_budget(seed):
    dtypes = (torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)
    check(draw(seed, dtypes[seed % len(dtypes)]))


def test_nan_in_wholly_masked_tiles_and_masked_bias_never_arrives():
    keep = torch.ones(1, 1, 300, 260, dtype=torch.bool)
    keep[..., 128:256] = False
    keep[:, :, :128, 5] = False
    call = masked(plain(), keep)
    clean = launch(call)
    call.bias = torch.zeros(1, 1, 300, 260)
    call.bias[:, :, :, 128:256] = math.nan
    call.bias[:, :, :128, 5] = math.inf
    for tensor in (call.key, call.value):
        tensor[:, 128:256] = math.nan
    dirty = launch(call)
    for name, before, after in zip(("out", "lse", "dq", "dk", "dv"), clean, dirty, strict=False):
        assert torch.allclose(before, after, atol=1e-5), name
    assert dirty[5].isfinite().all()
    assert dirty[5][..., 128:256].eq(0).all()
    assert dirty[5][:, :, :128, 5].eq(0).all()


def test_nan_gradient_of_an_empty_row_stays_there():
    keep = torch.rand(1, 2, 300, 260) < 0.5
    keep[:, :, 17] = False
    call = masked(plain(), keep)
    call.grad_out[:, 17] = math.nan
    call.query[:, 17] = math.inf
    assert all(x.isfinite().all() for x in launch(call)[2:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 8, 33, 64, 128, 256, 300, 512, 1024])
def test_one_visible_key_gives_its_value_and_no_gradient_to_the_score(dim, dtype):
    generator = torch.Generator().manual_seed(dim)
    query, value, grad_out = (torch.randn(2, 40, 2, dim, generator=generator).to(dtype) for _ in range(3))
    keep = torch.eye(40, dtype=torch.bool).view(1, 1, 40, 40)
    out, lse, dq, dk, dv, _ = launch(
        masked(Call(query, query, value, keep.expand(2, 2, 40, 40), grad_out=grad_out), keep)
    )
    assert torch.equal(out, value)
    torch.testing.assert_close(lse, 0.3 * query.float().square().sum(-1).transpose(1, 2), rtol=3e-5, atol=3e-5)
    assert dq.eq(0).all()
    assert dk.eq(0).all()
    torch.testing.assert_close(dv, grad_out, rtol=3e-5, atol=3e-5)


def test_rows_with_only_minus_infinity_are_empty():
    call = plain()
    call.bias = torch.zeros(1, 1, 300, 260)
    call.bias[:, :, 40] = -math.inf
    actual = launch(call)
    assert actual[0][:, 40].eq(0).all()
    assert actual[1][..., 40].eq(-math.inf).all()
    assert actual[2][:, 40].eq(0).all()
    assert all(x.isfinite().all() for x in (actual[0], *actual[2:]))


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_zero_lengths(lengths):
    call = plain(*lengths)
    out, lse, dq, dk, dv, _ = launch(call)
    assert out.eq(0).all()
    assert lse.eq(-math.inf).all()
    assert dq.eq(0).all()
    assert dk.eq(0).all()
    assert dv.eq(0).all()
    empty = torch.ones(1, 1, *lengths, dtype=torch.bool)
    lists = packed(empty, lengths[0], batch=1, heads=1).row_tiles
    assert lists[..., 1:4].eq(0).all() if 0 in lengths else lists.shape[2] == 2


def test_results_do_not_depend_on_timing_or_threads():
    keep = blocky((1, 2, 900, 700), torch.Generator().manual_seed(0))
    call = masked(plain(900, 700), keep)
    call.bias = torch.randn(1, 1, 900, 700)
    call.dropout_p, call.seed = 0.2, torch.tensor([[99]])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        runs = [launch(call) for _ in range(3)]
        torch.set_num_threads(1)
        runs.append(launch(call))
    finally:
        torch.set_num_threads(threads)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_dropout_follows_philox():
    # With scores 0, values that single out one key show its probability: kept / (n (1 - p)).
    call = plain(200, 150, heads=1)
    call.scale, call.dropout_p, call.seed = 0.0, 0.3, torch.tensor([[-(1 << 62) + 12345]])
    call.value = torch.eye(150).view(1, 150, 1, 150)
    call.grad_out = torch.zeros(1, 200, 1, 150)
    out = launch(call)[0]
    kept = philox_keep(call.seed, (1, 1, 200, 150), 0.3)
    torch.testing.assert_close(out[0, :, 0], kept[0, 0] / (150 * 0.7))


def sequences(lengths_q: list[int], lengths_k: list[int]) -> tuple[Tensor, Tensor]:
    return tuple(torch.tensor([0, *np.cumsum(x)], dtype=torch.int32) for x in (lengths_q, lengths_k))


@pytest.mark.parametrize("top_left", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [(), ("band",), ("keys", "bias"), ("band", "keys", "bias", "dropout", "softcap")])
def test_variable_lengths_equal_each_sequence_alone(features, dtype, top_left):
    generator = torch.Generator().manual_seed(len(features))
    lengths_q, lengths_k = [130, 0, 5, 300], [200, 7, 0, 290]
    offsets = sequences(lengths_q, lengths_k)
    query, key, value, grad_out = (
        torch.randn(sum(lengths), heads, 24, generator=generator).to(dtype)
        for lengths, heads in ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2), (lengths_q, 4))
    )
    band = (-100, 3) if "band" in features else FREE
    key_keep = torch.rand(2, sum(lengths_k), generator=generator) < 0.6 if "keys" in features else None
    bias = torch.randn(4, sum(lengths_k), generator=generator).to(dtype) if "bias" in features else None
    mask = NO_MASK if key_keep is None else Mask(k_segments=key_keep.int().sub(1).unsqueeze(0))
    seed = torch.arange(4).view(4, 1)  # one for each sequence
    call = Call(query, key, value, torch.ones(0), bias, mask, seed, band, grad_out=grad_out)
    call.dropout_p, call.softcap = 0.2 * ("dropout" in features), 2.0 * ("softcap" in features)
    actual = launch(call, Varlen(*offsets, 300, 300, top_left))
    dropout = philox_keep(seed, (4, 4, 300, 300), call.dropout_p)
    for b in range(4):
        rows, cols = (slice(int(x[b]), int(x[b + 1])) for x in offsets)
        seqlen_q, seqlen_k = lengths_q[b], lengths_k[b]
        off = 0 if top_left else seqlen_k - seqlen_q
        shifted = (-UNBOUNDED if band[0] == -UNBOUNDED else band[0] + off, band[1] if band == FREE else band[1] + off)
        keep = band_keep(seqlen_q, seqlen_k, shifted).expand(1, 4, -1, -1)
        if key_keep is not None:
            keep = keep & per_head(key_keep[None, :, None, cols], 4)
        part = dataclasses.replace(
            call, query=query[None, rows], key=key[None, cols], value=value[None, cols], grad_out=grad_out[None, rows]
        )
        part.keep, part.bias = keep, None if bias is None else bias[None, :, None, cols]
        part.dropout_keep = dropout[b : b + 1, :, :seqlen_q, :seqlen_k]
        got = [None if x is None else x[None] for x in actual]
        got = [got[0][:, rows], got[1][..., rows], got[2][:, rows], got[3][:, cols], got[4][:, cols], got[5]]
        got[5] = None if got[5] is None else got[5][:, :, None, cols]
        check(part, got)


@pytest.mark.parametrize("offsets", [[-50, 30, 20, 1 << 30], [90, 40, -7, 10], [10, 20, 30, 40]])
def test_offsets_that_lie_stay_inside_the_tensors(offsets):
    call = plain(64, 64)
    dense = dataclasses.replace(call, **{n: getattr(call, n)[0] for n in ("query", "key", "value", "grad_out")})
    lies = torch.tensor(offsets, dtype=torch.int32)
    actual = launch(dense, Varlen(lies, lies, 64, 64, True))
    assert all(x.isfinite().all() for x in (actual[0], *actual[2:5]))  # rows of no sequence are 0, not what was there


def test_a_packed_gradient_is_written_through_views():
    qkv = torch.randn(2, 150, 3, 2, 16)
    query, key, value = qkv.unbind(2)
    keep = torch.ones(2, 2, 150, 150, dtype=torch.bool)
    call = Call(query, key, value, keep, grad_out=torch.randn(2, 150, 2, 16))
    call.grad_lse = torch.ones(()).expand(2, 2, 150)
    result = run_forward(call)
    gradient = torch.full_like(qkv, math.nan)
    saved = calls.Saved(result.out, result.lse, result.lse_tail)
    wanted = calls.Gradients(call.grad_out, call.grad_lse, *gradient.unbind(2), None)
    native.backward(asked(call), saved, wanted, None)
    check(call, [result.out, result.lse, *gradient.unbind(2), None])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_value_passes_unchanged_through_one_key(dtype):
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    value = every.view(256, 1, 1, 256)
    query = torch.zeros(256, 1, 1, 8, dtype=dtype)
    keep = torch.ones(256, 1, 1, 1, dtype=torch.bool)
    call = Call(query, query, value, keep, grad_out=torch.zeros_like(value))
    out = run_forward(call).out
    rest = value.isfinite()
    assert torch.equal(out[rest], value[rest])
    assert torch.equal(out.isnan(), value.isnan())
    assert torch.equal(out.isinf(), value.isinf())


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_other_instruction_sets_hold_the_same_budget(capability):
    # The instruction set is chosen once in a process.
    chosen = (
        "random_problems and (0 or 7) or pack_mask and 1 or 16_bit or dropout_follows or one_visible_key or dynamic"
        " or random_intervals and 3 or large_constant or add_up or soft_caps"
    )
    names = ("test_native_masks.py", "test_native_intervals.py", "test_native_scores.py")
    files = [__file__, *(str(pathlib.Path(__file__).with_name(name)) for name in names)]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files, "-k", chosen]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["expanded", "overlapping", "apart", "far"])
def test_rows_that_overlap_or_lie_far_apart_are_read_right(layout, dtype, tmp_path):
    # Decoding takes rows from where they lie if a product can.
    generator = torch.Generator().manual_seed(0)
    query, grad_out = (torch.randn(1, 5, 1, 16, generator=generator).to(dtype) for _ in range(2))
    key, value = (torch.randn(1, 64, 1, 16, generator=generator).to(dtype) for _ in range(2))
    if layout == "expanded":
        value = value[:, :1].expand(key.shape)
    elif layout == "overlapping":
        key, value = (x.flatten().as_strided((1, 64, 1, 16), (0, 4, 0, 1)) for x in (key, value))
    else:  # a tile beyond an int, or already one row, in a sparse file: the pages between two rows take no room
        key, stride = key[:, :16], (1 << 31) + 16 if layout == "far" else 143165632
        rows = torch.from_file(str(tmp_path / "rows"), shared=True, size=15 * stride + 16, dtype=dtype)
        value = rows.as_strided(key.shape, (0, stride, 0, 1)).copy_(value[:, :16])
    keep = torch.ones(1, 1, 5, key.shape[1], dtype=torch.bool)
    check(Call(query, key, value, keep, grad_out=grad_out))


@pytest.mark.parametrize("kind", ["bits", "decoding", "softcap"])
def test_nan_at_an_element_that_is_hidden_in_a_visible_tile_never_arrives(kind):
    keep = torch.rand(1, 2, 300, 260, generator=torch.Generator().manual_seed(0)) < 0.5
    keep[..., 7] = keep[:, :, 11] = False
    call = plain()
    if kind == "decoding":
        keep = keep[:, :, :100]
        call = dataclasses.replace(
            call, query=call.query[:, :100], grad_out=call.grad_out[:, :100], keep=call.keep[:, :, :100]
        )
    call.softcap = 2.0 * (kind == "softcap")
    call = masked(call, keep)
    clean = launch(call)
    call.key[:, 7] = call.value[:, 7] = math.nan
    call.query[:, 11] = call.grad_out[:, 11] = math.inf
    for before, after in zip(clean[:5], launch(call)[:5], strict=True):
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)


def test_nan_at_a_visible_value_reaches_the_queries_that_see_it_and_no_others():
    keep = torch.rand(1, 2, 300, 260, generator=torch.Generator().manual_seed(0)) < 0.5
    call = masked(plain(), keep)
    call.value[:, 7] = math.nan
    out = run_forward(call).out
    assert torch.equal(out.isnan().all(-1), keep[..., 7].transpose(1, 2))
    assert torch.equal(out.isnan().any(-1), keep[..., 7].transpose(1, 2))
