"""Head dimensions of the SM 9.0 kernels on a GPU, query's and value's equal or not, against float64."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from tests.support.architecture import skip_file_without_hopper

pytestmark = pytest.mark.gpu
skip_file_without_hopper()

from dmattn_ops.call import NO_MASK, UNBOUNDED, Call, Gradients, Mask, Result, Saved, plain_options  # noqa: E402
from dmattn_ops.dispatch import run as dispatch  # noqa: E402
from dmattn_ops.kernels.hopper.backward import launch as hopper_backward  # noqa: E402
from dmattn_ops.kernels.hopper.backward_256 import launch as hopper_backward_256  # noqa: E402
from tests.support.tile_builder import build_tiles, on_gpu  # noqa: E402

# One of each kind: a part or two, in queries or values or both, and each of the rows that dispatch has for them
NAMED = (
    (80, 80), (96, 96), (72, 72), (88, 96), (112, 112), (64, 96), (96, 64), (128, 80), (24, 128), (136, 136), (160, 160),
    (192, 128), (192, 192), (176, 64), (192, 24), (128, 192), (80, 160), (64, 256), (256, 64), (200, 144), (256, 192),
)  # fmt: skip
_RANDOM = random.Random(1)
DRAWN = tuple((8 * _RANDOM.randint(1, 32), 8 * _RANDOM.randint(1, 32)) for _ in range(12))
FEW = ((80, 80), (96, 64), (192, 128), (160, 160))
FULL, CAUSAL = (-UNBOUNDED, UNBOUNDED), (-UNBOUNDED, 0)
ROUNDING = {torch.bfloat16: (4e-3, 8e-3), torch.float16: (6e-4, 1e-3)}  # relative L2 of out, and of gradients
NAN = math.nan
Results = dict[str, Tensor]


def draw(batch: int, seqlen: int, heads: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Draw rows inside wider ones: what lies beside them is NaN."""
    wide = torch.full((batch, seqlen, heads, dim + 24), NAN, device="cuda", dtype=dtype)
    rows = wide[..., 8 : dim + 8]
    return rows.copy_(torch.randn(batch, seqlen, heads, dim, device="cuda"))


def problem(
    dim: int, dim_v: int, seqlens: tuple[int, int] = (333, 517), heads: tuple[int, int] = (4, 2),
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Draw query, key, value and grad_out."""
    (seqlen_q, seqlen_k), (n_heads, kv_heads) = seqlens, heads
    query, key = draw(2, seqlen_q, n_heads, dim, dtype), draw(2, seqlen_k, kv_heads, dim, dtype)
    return query, key, draw(2, seqlen_k, kv_heads, dim_v, dtype), draw(2, seqlen_q, n_heads, dim_v, dtype)


def empty_beside(like: Tensor) -> Tensor:
    """Return an output of NaN that lies inside wider rows of 7."""
    wide = torch.full((*like.shape[:-1], like.shape[-1] + 24), 7.0, device="cuda", dtype=like.dtype)
    return wide[..., 8 : like.shape[-1] + 8].fill_(NAN)


def assert_untouched_beside(output: Tensor) -> None:
    """Assert that nothing was written beside an output of `empty_beside`."""
    whole = output.as_strided((*output.shape[:-1], output.stride(-2)), output.stride(), output.storage_offset() - 8)
    beside = torch.cat([whole[..., :8], whole[..., output.shape[-1] + 8 :]], -1)
    assert (beside == 7).all()


def run(
    inputs: tuple[Tensor, ...], band: tuple[int, int] = FULL, tiles: Mask = NO_MASK, bias: Tensor | None = None,
    softcap: float = 0.0, deterministic: bool = False, grad_lse: Tensor | None = None,
) -> Results:  # fmt: skip
    """Run what dispatch chooses, which must be kernels for SM 9.0, or that of one query; outputs hold NaN before."""
    query, key, value, grad_out = inputs
    options = plain_options(query.shape[-1] ** -0.5, *band, softcap=softcap, deterministic=deterministic)
    call = Call(query, key, value, bias, tiles, None, None, None, options)
    lse = query.new_full((query.shape[0], query.shape[2], query.shape[1]), NAN, dtype=torch.float32)
    result = Result(empty_beside(grad_out), lse, torch.full_like(lse, NAN), None)
    choice = dispatch.forward_choice(call, result)
    assert choice.row.kernel == ("decode" if query.shape[1] == 1 else "hopper"), choice
    dispatch.launcher("forward", choice.row.kernel).forward(call, result, choice.row.config)
    dq, dk, dv = (empty_beside(tensor) for tensor in (query, key, value))
    dbias = None if bias is None else torch.full_like(bias, NAN)
    saved, grads = Saved(result.out, lse, result.lse_tail), Gradients(grad_out, grad_lse, dq, dk, dv, dbias)
    choice = dispatch.backward_choice(call, saved, grads)
    assert choice.row.kernel in ("hopper", "hopper256"), choice
    dispatch.launcher("backward", choice.row.kernel).backward(call, saved, grads, choice.row.config)
    for output in (result.out, dq, dk, dv):
        assert_untouched_beside(output)
    found = {"out": result.out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    return found if dbias is None else found | {"dbias": dbias}


def visible_of(inputs: tuple[Tensor, ...], band: tuple[int, int]) -> Tensor:
    """Return which keys each query sees, `[1, 1, Sq, Sk]`."""
    i, j = (torch.arange(tensor.shape[1], device="cuda") for tensor in inputs[:2])
    return ((j[None] >= i[:, None] + band[0]) & (j[None] <= i[:, None] + band[1]))[None, None]


def compare(
    found: Results, inputs: tuple[Tensor, ...], visible: Tensor, softcap: float = 0.0, bias: Tensor | None = None,
    grad_lse: Tensor | None = None,
) -> dict[str, float]:  # fmt: skip
    """Compare with float64; what sees nothing, or is seen by nothing, must be exactly 0. Return relative errors."""
    query, key, value, grad_out = (tensor.double().transpose(1, 2) for tensor in inputs)
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    if bias is not None:
        leaves.append(bias.double().requires_grad_())
    group = query.shape[1] // key.shape[1]
    keys, values = (leaf.repeat_interleave(group, 1) for leaf in leaves[1:3])
    scores = leaves[0] @ keys.mT * inputs[0].shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + leaves[3]
    empty = ~visible.expand(scores.shape).any(-1)
    scores = scores.masked_fill(~visible, -math.inf).masked_fill(empty[..., None], 0.0)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp().masked_fill(empty[..., None], 0.0) @ values
    loss = (out * grad_out).sum()
    if grad_lse is not None:
        loss = loss + (lse.masked_fill(empty, 0.0) * grad_lse).sum()
    wanted = dict(zip(("dq", "dk", "dv", "dbias"), torch.autograd.grad(loss, leaves), strict=False)) | {
        "out": out.detach()
    }
    assert torch.equal(found["lse"] == -math.inf, empty)
    assert ((found["lse"].double() - lse.detach())[~empty].abs() <= 1e-3).all()
    of_out, of_gradients = ROUNDING[inputs[0].dtype]
    errors = {}
    for name, want in wanted.items():
        got = found[name].double() if name == "dbias" else found[name].double().transpose(1, 2)
        # of a single key dq and dk are exactly 0: what is left is the rounding of out in delta
        least = 1e-20 if key.shape[2] > 1 else 0.2 * grad_out.norm().item()
        errors[name] = ((got - want).norm() / want.norm().clamp_min(least)).item()
        assert errors[name] < (of_out if name == "out" else of_gradients), f"{name}: {errors[name]:.2e}"
    seen = visible.expand(scores.shape)
    unseen = (~seen.any(2)).unflatten(1, (-1, group)).all(2).transpose(1, 2)
    for name, where in {"out": empty.transpose(1, 2), "dq": empty.transpose(1, 2), "dk": unseen, "dv": unseen}.items():
        assert (found[name][where] == 0).all(), f"{name} is not exactly 0 where nothing is visible"
    return errors


@pytest.fixture(autouse=True)
def poisoned_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the backward's workspaces with NaN before they are used."""
    for launcher in (hopper_backward, hopper_backward_256):
        make = launcher.workspace
        monkeypatch.setattr(launcher, "workspace", lambda *arguments, make=make: make(*arguments).fill_(NAN))


@pytest.mark.parametrize("dims", (*NAMED, *DRAWN), ids=str)
def test_any_two_head_dimensions(dims: tuple[int, int]) -> None:
    for seqlens, band, dtype in (((333, 517), (-UNBOUNDED, 184), torch.bfloat16), ((257, 129), CAUSAL, torch.float16)):
        inputs = problem(*dims, seqlens, dtype=dtype)
        grad_lse = torch.randn(2, 4, seqlens[0], device="cuda")
        found = run(inputs, band, grad_lse=grad_lse)
        compare(found, inputs, visible_of(inputs, band), grad_lse=grad_lse)


@pytest.mark.parametrize("band", [FULL, (-130, 70), (5, 40), (-UNBOUNDED, -200)], ids=str)
@pytest.mark.parametrize("dims", FEW, ids=str)
def test_bands(dims: tuple[int, int], band: tuple[int, int]) -> None:
    for seqlens in ((300, 300), (1, 300), (700, 1), (640, 333)):
        inputs = problem(*dims, seqlens, (6, 2))
        compare(run(inputs, band), inputs, visible_of(inputs, band))


@pytest.mark.parametrize("dims", FEW, ids=str)
def test_masks_of_bits(dims: tuple[int, int]) -> None:
    inputs = problem(*dims, (400, 700))
    tiles = torch.rand(2, 4, 4, 6).repeat_interleave(128, 2).repeat_interleave(128, 3)[..., :400, :700]
    keep = (tiles > 0.33) & ((tiles > 0.67) | (torch.rand(tiles.shape) < 0.5))
    compare(run(inputs, tiles=on_gpu(build_tiles(keep))), inputs, keep.cuda())


@pytest.mark.parametrize("dims", FEW, ids=str)
def test_a_soft_cap(dims: tuple[int, int]) -> None:
    query, *others = problem(*dims, (400, 400))
    inputs = (query.mul_(3), *others)
    compare(run(inputs, CAUSAL, softcap=2.0), inputs, visible_of(inputs, CAUSAL), softcap=2.0)


@pytest.mark.parametrize("dims", FEW, ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 1, 517), (1, 1, 333, 520)], ids=str)
def test_a_bias(dims: tuple[int, int], shape: tuple[int, ...]) -> None:
    inputs = problem(*dims)
    bias = torch.randn(shape, device="cuda")[..., :517]
    compare(run(inputs, CAUSAL, bias=bias), inputs, visible_of(inputs, CAUSAL), bias=bias)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", FEW, ids=str)
def test_repeated_launches_agree(dims: tuple[int, int], deterministic: bool) -> None:
    inputs = problem(*dims, (1500, 1500), (6, 2))
    first = run(inputs, CAUSAL, deterministic=deterministic)
    for _ in range(20):
        again = run(inputs, CAUSAL, deterministic=deterministic)
        for name, one in first.items():
            if name == "dq" and not deterministic and max(dims) <= 128:  # key tiles add to it in any order
                assert (one.double() - again[name].double()).norm() <= 4e-3 * one.double().norm()
            else:
                assert torch.equal(one, again[name]), name
