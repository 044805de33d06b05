"""The SM 9.0 backward for wide heads against float64 derivatives of the definition, on the GPU that it is made for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dmattn_ops.call import NO_MASK, UNBOUNDED, Call, Gradients, Mask, Saved, plain_options
from dmattn_ops.choice import config
from tests.support.architecture import needs_hopper
from tests.support.tile_builder import build_segment_tiles, build_tiles, on_gpu

pytestmark = [pytest.mark.gpu, needs_hopper]
NOTHING = slice(0)
EPS = {torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """One problem; `lo` and `hi` are the band."""

    seqlen_q: int
    seqlen_k: int
    heads: int = 2
    kv_heads: int = 2
    dim: int = 256
    dim_v: int = 256
    lo: int = -UNBOUNDED
    hi: int = UNBOUNDED
    batch: int = 2
    dtype: torch.dtype = torch.bfloat16
    grad_lse: bool = False


def poisoned(tensor: Tensor) -> Tensor:
    """Return the values of `[B, S, heads, D]` as a view: NaN stands before, after and between the rows."""
    batch, seqlen, heads, dim = tensor.shape
    buffer = tensor.new_full((batch, seqlen + 2, heads + 1, dim + 16), math.nan)
    view = buffer[:, 1 : seqlen + 1, :heads, 8 : dim + 8]
    view.copy_(tensor)
    return view


def visible(case: Case, keep: Tensor | None) -> Tensor:
    """Return which keys queries see, `[B, H, Sq, Sk]`."""
    distance = torch.arange(case.seqlen_k)[None, :] - torch.arange(case.seqlen_q)[:, None]
    band = (distance >= case.lo) & (distance <= case.hi)
    if keep is not None:
        heads = keep.shape[1]
        keep = keep.repeat_interleave(case.heads // heads, 1) if heads > 1 else keep
        band = band & keep
    return band.expand(case.batch, case.heads, -1, -1).cuda()


def derivatives(query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, grad_lse: Tensor | None, keep: Tensor):
    """Return out, lse, and (dq, dk, dv) in float64."""
    q, k, v = (tensor.double().requires_grad_() for tensor in (query, key, value))
    group = q.shape[2] // k.shape[2]
    kk, vv = (tensor.transpose(1, 2).repeat_interleave(group, 1) for tensor in (k, v))
    score = q.transpose(1, 2) @ kk.mT / math.sqrt(q.shape[-1])
    empty = ~keep.any(-1)
    score = score.masked_fill(~keep, -math.inf).masked_fill(empty[..., None], 0.0)
    lse = torch.logsumexp(score, -1)
    out = (torch.where(keep, torch.exp(score - lse[..., None]), 0.0) @ vv).transpose(1, 2)
    total = (out * grad_out.double()).sum()
    if grad_lse is not None:
        total = total + (lse * grad_lse.double()).masked_fill(empty, 0.0).sum()
    found = torch.autograd.grad(total, (q, k, v))
    return out.detach().to(query.dtype), lse.detach().masked_fill(empty, -math.inf), found


def check(
    case: Case, tiles: Mask = NO_MASK, keep: Tensor | None = None, poison: slice = NOTHING, repeats: int = 3
) -> None:
    """Launch a few times into NaN, and compare; keys and values of `poison` are NaN for the launches alone."""
    from dmattn_ops.kernels.hopper.backward_256 import launch as hopper_backward_256

    torch.manual_seed(case.seqlen_q * 1000 + case.seqlen_k)
    shapes = [(case.seqlen_q, case.heads, case.dim), (case.seqlen_k, case.kv_heads, case.dim)]
    shapes += [(case.seqlen_k, case.kv_heads, case.dim_v), (case.seqlen_q, case.heads, case.dim_v)]
    drawn = [poisoned(torch.randn((case.batch, *shape), device="cuda").to(case.dtype)) for shape in shapes]
    query, key, value, grad_out = drawn
    grad_lse = torch.randn((case.batch, case.heads, case.seqlen_q), device="cuda") if case.grad_lse else None
    seen = visible(case, keep)
    out, lse, expected = derivatives(*drawn, grad_lse, seen)
    key[:, poison] = value[:, poison] = math.nan
    options = plain_options(1 / math.sqrt(case.dim), case.lo, case.hi, deterministic=True)
    call = Call(query, key, value, None, on_gpu(tiles), None, None, None, options)
    assert hopper_backward_256.refusals(call) == []
    saved = Saved(out, lse.float(), (lse - lse.float()).nan_to_num(0.0).float())
    first = None
    for _ in range(repeats):
        grads = [torch.full_like(tensor, math.nan) for tensor in (query, key, value)]
        gradients = Gradients(grad_out, grad_lse, *grads, None)
        hopper_backward_256.backward(call, saved, gradients, config.HOPPER_BACKWARD_256.config)
        first = first or grads
        assert all(torch.equal(one, other) for one, other in zip(first, grads, strict=True)), "results changed"
    for name, actual, exact in zip(("dq", "dk", "dv"), first, expected, strict=True):
        # dq and dk of a single key are 0: what rounding makes of them is small next to dv
        error, size = (actual.double() - exact).norm().item(), max(exact.norm().item(), expected[2].norm().item() / 100)
        assert error <= EPS[case.dtype] * size, f"{name}: error {error:.3g} of {size:.3g}"
    unseen_keys = ~seen.any(2).unflatten(1, (case.kv_heads, -1)).any(2).mT
    assert not first[0][~seen.any(3).mT].any(), "dq of a query that sees nothing"
    assert not first[1][unseen_keys].any(), "dk of a key that nobody sees"
    assert not first[2][unseen_keys].any(), "dv of a key that nobody sees"


CASES = {
    "full": Case(512, 512),
    "causal": Case(1024, 1024, hi=0),
    "float16": Case(640, 640, hi=0, dtype=torch.float16),
    "grouped heads, narrow, odd lengths, bottom right": Case(333, 411, 4, 2, 192, 160, hi=78, grad_lse=True),
    "one head for all": Case(300, 200, 6, 1, hi=-100),
    "top left with keys that nobody sees": Case(130, 700, hi=0),
    "bottom right with empty rows": Case(700, 130, hi=-570, dim_v=200),
    "window": Case(1000, 1000, lo=-100, hi=37),
    "window past the first keys": Case(500, 900, dim=136, lo=200, hi=300),
    "nothing visible": Case(100, 100, lo=200, hi=300),
    "one key": Case(77, 1, dtype=torch.float16),
    "one query": Case(1, 500, hi=499),
    "prime lengths": Case(257, 127, 3, 3, 248, 8),
    "narrow": Case(500, 700, 4, 2, 64, 128, hi=200),
    "narrowest": Case(200, 300, dim=8, dim_v=64, batch=1),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_gradients_equal_the_derivatives_of_the_definition(case: Case):
    check(case)


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (2, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize("density", [0.02, 0.5])
def test_a_mask_of_bits_equals_the_dense_computation(batch: int, heads: int, density: float):
    case = Case(777, 650, 4, 2)
    torch.manual_seed(batch + heads)
    keep = torch.rand(batch, heads, 777, 650) < density
    keep &= torch.rand(batch, heads, 777, 1) < 0.8
    tiles = (torch.rand(batch, heads, 7, 6) < 0.6).repeat_interleave(128, -1).repeat_interleave(128, -2)
    keep &= tiles[..., :777, :650]
    keep[..., 256:384, 128:256] = True
    check(case, build_tiles(keep), keep)


def test_an_empty_mask_gives_zeros():
    keep = torch.zeros(1, 1, 300, 300, dtype=torch.bool)
    check(Case(300, 300), build_tiles(keep), keep)


@pytest.mark.parametrize("hi", [UNBOUNDED, 0], ids=["both ways", "causal"])
def test_documents_see_themselves_only(hi: int):
    case = Case(900, 900, 4, 2, hi=hi)
    ids = torch.randint(4, (2, 900)).sort(-1).values.int()
    keep = (ids[:, None, :, None] == ids[:, None, None, :]) & visible(replace(case, heads=1), None)[:, :1].cpu()
    check(case, build_segment_tiles(keep, ids, ids[:, None].contiguous()), keep)


@pytest.mark.parametrize("heads", [1, 2])
def test_keys_that_are_dropped_for_every_query(heads: int):
    segments = -(torch.rand(2, heads, 640) < 0.4).int()
    keep = (segments == 0).unsqueeze(2).expand(2, heads, 500, 640)
    check(Case(500, 640, 4, 2), build_segment_tiles(keep, None, segments), keep)


def test_nan_in_tiles_that_nobody_sees_stays_there():
    keep = torch.rand(1, 1, 300, 700) < 0.5
    keep[..., 384:512] = False
    check(Case(300, 700), build_tiles(keep), keep, poison=slice(384, 512))
