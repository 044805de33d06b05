"""A bias and a soft cap in the SM 9.0 kernels, forward and backward with dbias, through the public function."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.architecture import skip_file_without_hopper

pytestmark = pytest.mark.gpu
skip_file_without_hopper()

from dmattn_ops import flash_dmattn_func  # noqa: E402
from dmattn_ops.testing import check  # noqa: E402
from dmattn_ops.testing.problem import Problem  # noqa: E402

DIMS = [64, 128, 256]
PER_KEY = ["", "b", "h", "k", "bh", "bk"]  # dimensions that are not broadcast; "k" stands for Hkv heads
PER_PAIR = ["q", "bq", "hq", "bkq", "bhq"]
GROUPED = Problem(
    variant="dense", dtype="bfloat16", batch=2, heads=4, heads_k=2, seqlen_q=333, seqlen_k=517, bias=True, lse_grad=True
)


def run(taken: list[str], dim: int, backward: str | None = None, **changes) -> None:
    """Compare one problem with the oracle, the third time from its plan, and see that SM 9.0 kernels took it."""
    check(replace(GROUPED, **({"dim": dim, "dim_v": dim} | changes)), "cuda", repeats=3)
    slow = dim == 64 and "q" in changes.get("bias_shape", "")  # a bias with queries whose rows TMA cannot load
    assert set(taken[::2]) == {"portable" if slow else "hopper"}
    assert set(taken[1::2]) == {backward or ("hopper" if dim <= 128 else "hopper256")}


@pytest.mark.parametrize("float32", [False, True])
@pytest.mark.parametrize("shape", PER_KEY)
@pytest.mark.parametrize("dim", DIMS)
def test_a_bias_per_key_and_its_gradient_for_every_broadcast(taken, dim: int, shape: str, float32: bool) -> None:
    run(taken, dim, bias_shape=shape, bias_float32=float32)


@pytest.mark.parametrize("lengths", [(2, 300), (129, 1), (64, 64), (700, 128)])  # one query is for the decoding kernel
@pytest.mark.parametrize("dim", DIMS)
def test_a_bias_per_key_without_groups_in_float16(taken, dim: int, lengths: tuple[int, int]) -> None:
    sizes = {"heads": 2, "seqlen_q": lengths[0], "seqlen_k": lengths[1]}
    run(taken, dim, dtype="float16", bias_shape="bh", is_causal=True, **sizes)


@pytest.mark.parametrize("causal_from", ["top_left", "bottom_right"])
@pytest.mark.parametrize("lengths", [(100, 128), (333, 517), (517, 333)])
@pytest.mark.parametrize("dim", DIMS)
def test_nan_in_the_bias_of_keys_that_no_query_sees(
    taken, dim: int, lengths: tuple[int, int], causal_from: str
) -> None:
    """With 100 queries from the top left, only queries past the end would see the last 28 keys."""
    band = {"is_causal": True, "causal_from": causal_from, "left": 90}
    run(taken, dim, bias_shape="bk", nan_bias=True, seqlen_q=lengths[0], seqlen_k=lengths[1], **band)


@pytest.mark.parametrize(
    ("mask", "mask_shape"), [("random", "bkq"), ("rows", "bq"), ("block", "hq"), ("none", "bhq"), ("keys", "bk")]
)
@pytest.mark.parametrize("dim", DIMS)
def test_a_bias_per_key_under_masks_with_nan_where_it_is_hidden(taken, dim: int, mask: str, mask_shape: str) -> None:
    run(taken, dim, bias_shape="bk", nan_bias=True, mask=mask, mask_shape=mask_shape, is_causal=True)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"is_causal": True, "causal_from": "top_left"},
        {"left": 90, "right": 3},
        {"mask": "block", "mask_shape": "bkq"},
        {"documents": True, "is_causal": True, "seqlen_q": 520},
        {"intervals": "random", "is_causal": True},
        {"softcap": 5.0, "magnitude": 3.0, "dtype": "float16"},
        {"dropout_p": 0.3},
        {"sink": "float32", "maximum": True},
        {"nan_bias": True, "is_causal": True, "dtype": "float16"},
        {"seqlen_q": 2, "seqlen_k": 8},  # one query is for the decoding kernel
        {"seqlen_q": 1000, "seqlen_k": 72},
    ],
    ids=lambda changes: " ".join(f"{name}={value}" for name, value in changes.items()) or "full",
)
@pytest.mark.parametrize("shape", ["q", "bq", "kq"])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_a_bias_that_comes_in_tiles(taken, dim: int, shape: str, changes: dict) -> None:
    """Rows of whole pieces of 16 bytes: the forward for SM 9.0 takes them at every head dimension up to 128."""
    sizes = {"dim": dim, "dim_v": dim, "seqlen_k": 520, "bias_shape": shape}
    check(replace(GROUPED, **(sizes | changes)), "cuda", repeats=3)
    assert set(taken[::2]) == {"hopper"}


@pytest.mark.parametrize("shape", PER_PAIR)
@pytest.mark.parametrize("dim", DIMS)
def test_a_bias_per_pair_and_its_gradient_for_every_broadcast(taken, dim: int, shape: str) -> None:
    backward = "portable" if shape == "bhq" else None
    run(taken, dim, backward, bias_shape=shape)
    taken.clear()
    masked = {"mask": "block", "mask_shape": "bkq", "is_causal": True}
    run(taken, dim, backward, bias_shape=shape, nan_bias=True, bias_float32=True, **masked)


@pytest.mark.parametrize("causal_from", ["top_left", "bottom_right"])
@pytest.mark.parametrize("dim", DIMS)
def test_nan_in_pairs_that_no_query_sees(taken, dim: int, causal_from: str) -> None:
    run(taken, dim, bias_shape="bkq", nan_bias=True, is_causal=True, causal_from=causal_from)


@pytest.mark.parametrize("dim", DIMS)
def test_keys_at_minus_infinity_are_hidden(dim: int) -> None:
    torch.manual_seed(0)
    query, key, value, grad_out = (torch.randn(1, 300, 2, dim, device="cuda").bfloat16() for _ in range(4))
    bias = torch.randn(1, 2, 1, 300, device="cuda")
    keep = torch.rand(1, 2, 1, 300, device="cuda") < 0.5
    keep[:, 1] = False  # a head without a key
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, bias)]
    results = []
    for mask, added in ((keep, bias), (None, bias.masked_fill(~keep, float("-inf")))):
        out, lse = flash_dmattn_func(query, key, value, mask, added, return_lse=True)
        results.append([out, lse, *torch.autograd.grad(out, leaves, grad_out)])
    for hidden, infinite in zip(*results, strict=True):
        torch.testing.assert_close(infinite, hidden, rtol=2e-2, atol=2e-2)
    assert not results[1][0][:, :, 1].any()
    assert not any(gradient[:, :, 1].any() for gradient in results[1][2:5])
    assert not results[1][5][:, 1].any()


@pytest.mark.parametrize("softcap", [3.0, 30.0])
@pytest.mark.parametrize(("dim", "shape"), [(64, None), (64, "bk"), (128, None), (128, "bk"), (256, None)])
def test_a_soft_cap_and_its_derivative(taken, dim: int, shape: str | None, softcap: float) -> None:
    bias = {"bias": shape is not None, "bias_shape": shape or ""}
    run(taken, dim, softcap=softcap, magnitude=3.0, is_causal=True, **bias)
    taken.clear()
    run(taken, dim, softcap=softcap, magnitude=3.0, mask="random", mask_shape="bkq", heads=2, **bias)


@pytest.mark.parametrize(("mask", "kernel"), [("", "hopper"), ("block", "hopper256")])
def test_a_deterministic_call_sums_dbias_in_a_fixed_order(taken, mask: str, kernel: str) -> None:
    run(taken, 128, kernel, bias_shape="k", deterministic=True, mask=mask)
