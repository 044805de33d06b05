"""Pair biases: the page's example and the benchmark compute what torch does, and nothing is expanded over rows."""

from __future__ import annotations

import json

import pytest
import torch

import bench_pair_bias
import pair_bias


def drawn(batch: int, rows: int, length: int, heads: int, dim: int) -> list[torch.Tensor]:
    """Leaves query, key, value and bias in float64, and which keys each row has; one row has none."""
    torch.manual_seed(0)
    shape = (batch, rows, length, heads, dim)
    leaves = [torch.randn(shape, dtype=torch.float64).requires_grad_() for _ in range(3)]
    bias = torch.randn(batch, heads, length, length, dtype=torch.float64).requires_grad_()
    keep = torch.rand(batch, rows, length) > 0.3
    keep[0, 0] = False
    return [*leaves, bias, keep]


@pytest.mark.parametrize("shape", [(1, 3, 17, 2, 8), (2, 5, 33, 4, 16), (3, 1, 9, 1, 5)])
def test_rows_that_share_a_bias_equal_the_definition(shape):
    *leaves, keep = drawn(*shape)
    query, key, value, bias = leaves
    out = pair_bias.rows_with_bias(query, key, value, bias, keep)
    scores = torch.einsum("bnqhd,bnkhd->bnhqk", query, key) * shape[-1] ** -0.5 + bias.unsqueeze(1)
    weights = scores.masked_fill(~keep[:, :, None, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    expected = torch.einsum("bnhqk,bnkhd->bnqhd", weights, value)
    grad_out = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(result, leaves, grad_out) for result in (out, expected))
    torch.testing.assert_close(out, expected, atol=1e-9, rtol=1e-9)
    for name, own, other in zip(("dq", "dk", "dv", "dbias"), found, wanted, strict=True):
        torch.testing.assert_close(own, other.nan_to_num(0.0), atol=1e-9, rtol=1e-9, msg=name)


def test_neither_the_bias_nor_its_gradient_is_expanded_over_the_rows():
    batch, rows, length, heads = 2, 7, 16, 4
    *leaves, keep = drawn(batch, rows, length, heads, 8)
    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            nonlocal largest
            made = function(*arguments, **(keywords or {}))
            for part in made if isinstance(made, (tuple, list)) else (made,):
                if isinstance(part, torch.Tensor) and part.dtype == torch.float64:
                    largest = max(largest, part.numel())
            return made

    with Largest():
        pair_bias.rows_with_bias(*leaves, keep).sum().backward()
    inputs = batch * rows * length * heads * 8
    assert largest == inputs < batch * rows * heads * length * length
    assert leaves[3].grad is not None and leaves[3].grad.shape == (batch, heads, length, length)


def test_the_example_learns_the_same_as_on_torch():
    losses = pair_bias.main(["--residues=20", "--steps=4", "--channels=16", "--dim=8", "--device=cpu"])
    own, torchs = losses["rows_with_bias"], losses["rows_by_torch"]
    assert own[-1] < own[0] and own == pytest.approx(torchs, rel=1e-3)


def test_the_benchmark_measures_every_part(tmp_path):
    output = tmp_path / "results.json"
    rows = bench_pair_bias.main(["--tiny", "--rounds=1", "--device=cpu", f"--output={output}"])
    measured = {row["implementation"] for row in rows if "missing" not in row}
    assert {"dmattn", "sdpa"} <= measured and set(bench_pair_bias.PEERS) <= {row["implementation"] for row in rows}
    assert all(row["forward_ms"] > 0 and row["backward_ms"] > 0 for row in rows if "missing" not in row)
    assert json.loads(output.read_text())["rows"] == rows
    with pytest.raises(SystemExit, match="needs a GPU"):
        bench_pair_bias.main(["--device=cpu", f"--output={output}"])
