"""Dropout in the SM 9.0 kernels: which weights they drop, bit for bit, and results and gradients of every feature beside it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.architecture import skip_file_without_hopper

pytestmark = pytest.mark.gpu
skip_file_without_hopper()

from dmattn_ops.call import NO_MASK, Call, Gradients, Result, Saved, dropout_scale, plain_options  # noqa: E402
from dmattn_ops.choice import config, resolve  # noqa: E402
from dmattn_ops.kernels import reference  # noqa: E402
from dmattn_ops.kernels.hopper.backward import launch as hopper_backward  # noqa: E402
from dmattn_ops.kernels.hopper.forward import launch as hopper_forward  # noqa: E402
from dmattn_ops.testing import check  # noqa: E402
from dmattn_ops.testing.problem import Problem  # noqa: E402

LENGTHS = [(512, 512), (333, 517), (517, 333), (1, 300), (300, 1)]
ORIGINS = [(0, 0), (48, 1 << 20)]
CHANCES = [0.1, 0.5, 1.0, 2.0**-32]
GROUPED = Problem(
    variant="dense", dtype="bfloat16", batch=2, heads=4, heads_k=2, seqlen_q=333, seqlen_k=517, lse_grad=True,
    dropout_p=0.2,
)  # fmt: skip


def row_of(rows: tuple[config.Row, ...], dim: int) -> config.Config:
    """Return the configuration that dispatch gives to heads `dim` wide."""
    return next(row.config for row in rows if row.kernel == "hopper" and row.dim >= dim)


def singled_out(length: int, heads: int, dim: int) -> Tensor:
    """Return `[2, length, heads, dim]` where head `h` has a 1 in column `c` of row `h * dim + c`."""
    rows = torch.eye(heads * dim, device="cuda", dtype=torch.bfloat16)[:length].view(1, length, heads, dim)
    return rows.expand(2, -1, -1, -1).contiguous()


def forward_of(call: Call) -> Result:
    """Run the forward launcher on outputs full of NaN."""
    query = call.query
    out = query.new_full((*query.shape[:3], call.value.shape[-1]), math.nan)
    lse = query.new_full((query.shape[0], query.shape[2], query.shape[1]), math.nan, dtype=torch.float32)
    result = Result(out, lse, torch.full_like(lse, math.nan), None)
    assert hopper_forward.refusals(call) == []
    hopper_forward.forward(call, result, resolve.forward_config(row_of(config.FORWARD, query.shape[-1]), call, result))
    return result


def backward_of(call: Call, saved: Saved, grad_out: Tensor) -> Gradients:
    """Run the backward launcher on outputs full of NaN."""
    empty = (torch.full_like(tensor, math.nan) for tensor in (call.query, call.key, call.value))
    grads = Gradients(grad_out, None, *empty, None)
    assert hopper_backward.refusals(call) == []
    offered = row_of(config.BACKWARD, call.query.shape[-1])
    hopper_backward.backward(call, saved, grads, resolve.backward_config(offered, call, saved, grads))
    return grads


def call_of(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, origins: tuple[int, int]) -> Call:
    """Return a call whose two batches have seeds of their own, which all heads share."""
    seed = torch.tensor([[(1 << 62) - 99], [-12345678901]], device="cuda")
    options = plain_options(0.1, dropout_p=dropout_p)._replace(q_origin=origins[0], k_origin=origins[1])
    return Call(query, key, value, None, NO_MASK, None, seed, None, options)


def kept_of(call: Call) -> Tensor:
    """Return which weights the reference keeps, `[2, Sq, Sk]`."""
    options, seqlens = call.options, (call.query.shape[1], call.key.shape[1])
    return reference.philox_keep(call.seed, *seqlens, options.dropout_p, options.q_origin, options.k_origin)[:, 0]


@pytest.mark.parametrize("dropout_p", CHANCES)
@pytest.mark.parametrize("origins", ORIGINS, ids=str)
@pytest.mark.parametrize("seqlens", LENGTHS, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_forward_drops_what_the_reference_drops(
    dim: int, seqlens: tuple[int, int], origins: tuple[int, int], dropout_p: float
) -> None:
    """Where all scores are 0, a value that is 1 for one key shows whether its weight is kept."""
    seqlen_q, seqlen_k = seqlens
    heads = -(-seqlen_k // dim)
    query, key = (torch.zeros(2, seqlen, heads, dim, device="cuda").bfloat16() for seqlen in seqlens)
    call = call_of(query, key, singled_out(seqlen_k, heads, dim), dropout_p, origins)
    out = forward_of(call).out
    found = out.view(2, seqlen_q, heads * dim)[..., :seqlen_k].float()
    kept = kept_of(call)
    assert torch.equal(found != 0, kept) or dropout_scale(dropout_p) == 0
    expected = kept * (dropout_scale(dropout_p) / seqlen_k)
    torch.testing.assert_close(found.double(), expected.double(), rtol=4e-3, atol=0)


@pytest.mark.parametrize("dropout_p", [chance for chance in CHANCES if dropout_scale(chance)])  # else portable
@pytest.mark.parametrize("origins", ORIGINS, ids=str)
@pytest.mark.parametrize("seqlens", LENGTHS, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_the_backward_drops_what_the_reference_drops(
    dim: int, seqlens: tuple[int, int], origins: tuple[int, int], dropout_p: float
) -> None:
    """The same with grad_out, which then shows weights in dv."""
    seqlen_q, seqlen_k = seqlens
    heads = -(-seqlen_q // dim)
    query, key, value = (
        torch.zeros(2, n, heads, dim, device="cuda").bfloat16() for n in (seqlen_q, seqlen_k, seqlen_k)
    )
    call = call_of(query, key, value, dropout_p, origins)
    lse = torch.full((2, heads, seqlen_q), math.log(seqlen_k), device="cuda")
    saved = Saved(torch.zeros_like(query), lse, torch.zeros_like(lse))
    grads = backward_of(call, saved, singled_out(seqlen_q, heads, dim))
    found = grads.dv.view(2, seqlen_k, heads * dim)[..., :seqlen_q].mT.float()
    kept = kept_of(call)
    assert torch.equal(found != 0, kept)
    expected = kept * (dropout_scale(dropout_p) / seqlen_k)
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-2, atol=0)
    assert not grads.dq.any()
    assert not grads.dk.any()


@pytest.mark.parametrize("dim", [64, 128])
def test_launches_that_are_repeated_give_the_same_bits(dim: int) -> None:
    torch.manual_seed(dim)
    query, key, value, grad_out = (torch.randn(2, n, 4, dim, device="cuda").bfloat16() for n in (700, 900, 900, 700))
    call = call_of(query, key, value, 0.3, (0, 0))
    first = forward_of(call)
    one = backward_of(call, Saved(*first[:3]), grad_out)
    for _ in range(20):
        again = forward_of(call)
        assert all(torch.equal(a, b) for a, b in zip(first[:3], again[:3], strict=True))
        other = backward_of(call, Saved(*first[:3]), grad_out)
        assert torch.equal(one.dk, other.dk)
        assert torch.equal(one.dv, other.dv)
        torch.testing.assert_close(one.dq, other.dq, rtol=2e-2, atol=2e-3)  # added up in any order


def run(taken: list[str], dim: int, backward: str = "hopper", forward: str = "hopper", **changes) -> None:
    """Compare one problem with the oracle, the third time from its plan, and see which kernels took it."""
    check(replace(GROUPED, **({"dim": dim, "dim_v": dim} | changes)), "cuda", repeats=3)
    assert set(taken[::2]) == {forward}
    assert set(taken[1::2]) == {backward}


@pytest.mark.parametrize(
    "lengths", [(512, 512), (1, 300), (129, 1), (64, 64), (700, 128), (100, 700), (333, 517)], ids=str
)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dim", [40, 64, 96, 128])
def test_any_length(taken, dim: int, causal: bool, lengths: tuple[int, int]) -> None:
    run(taken, dim, seqlen_q=lengths[0], seqlen_k=lengths[1], is_causal=causal)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dropout_p", [0.05, 0.9, 1.0, 2.0**-32])
@pytest.mark.parametrize("dim", [64, 128])
def test_any_chance(taken, dim: int, dropout_p: float, dtype: str) -> None:
    backward = "portable" if dropout_p == 1.0 else "hopper"  # where nothing is kept, lse alone has a gradient
    run(taken, dim, backward, dtype=dtype, dropout_p=dropout_p, is_causal=True, heads_k=4)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("mask", "mask_shape"), [("random", "bkq"), ("rows", "bq"), ("block", "hq"), ("none", "bhq"), ("keys", "bk")]
)
@pytest.mark.parametrize("dim", [64, 128])
def test_masks(taken, dim: int, mask: str, mask_shape: str, causal: bool) -> None:
    run(taken, dim, mask=mask, mask_shape=mask_shape, is_causal=causal)


@pytest.mark.parametrize("left", [0, 90])
@pytest.mark.parametrize("dim", [64, 128])
def test_windows(taken, dim: int, left: int) -> None:
    run(taken, dim, left=left, right=40)


@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("shape", ["", "bk"])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_bias_per_key_and_a_soft_cap(taken, dim: int, shape: str, softcap: float) -> None:
    run(taken, dim, bias=True, bias_shape=shape, softcap=softcap, is_causal=True)


@pytest.mark.parametrize("shape", ["q", "hq"])
def test_a_bias_per_pair(taken, shape: str) -> None:
    run(taken, 128, bias=True, bias_shape=shape, is_causal=True)


@pytest.mark.parametrize("dim", [64, 128])
def test_scores_so_large_that_lse_is_kept_in_two_parts(taken, dim: int) -> None:
    run(taken, dim, magnitude=100.0, softmax_scale=30.0)


@pytest.mark.parametrize("dim", [64, 128])
def test_dq_in_a_fixed_order(taken, dim: int) -> None:
    run(taken, dim, deterministic=True, is_causal=True)


def test_positions_that_begin_inside_a_block_of_16_are_refused() -> None:
    query = torch.zeros(2, 64, 1, 64, device="cuda").bfloat16()
    call = call_of(query, query, query, 0.1, (8, 0))
    assert [reason for reason in hopper_forward.refusals(call) if "16" in reason]
    assert [reason for reason in hopper_backward.refusals(call) if "16" in reason]
