"""Masked tiles are skipped, exactly and to measurable effect; `python tests/test_bubble_reduction.py` runs the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # as a plain script, nothing else has done so
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import benchmark_bubble_reduction as bubble
from dmattn_ops import flash_dmattn_func, prepare_mask
from patterns import BUBBLE_PATTERNS, PATTERNS, SPARSITIES, make_mask
from peers import Problem
from table import measure
from timing import Gauge, interleaved

ROOT = Path(__file__).parent.parent


def dense_attention(query, key, value, mask):
    """Attention from its definition; queries that see no key give 0."""
    score = torch.einsum("bihd,bjhd->bhij", query, key) * query.shape[-1] ** -0.5
    weight = torch.softmax(score.masked_fill(~mask, float("-inf")), dim=-1).nan_to_num(0.0)
    return torch.einsum("bhij,bjhd->bihd", weight, value)


@pytest.mark.parametrize("sparsity", SPARSITIES)
@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_skipping_is_exact(name, sparsity):
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(1, 300, 2, 32, generator=generator, dtype=torch.float64) for _ in range(4)]
    *inputs, grad_out = (tensor.requires_grad_() for tensor in tensors)
    mask = make_mask(name, (1, 2, 300), sparsity, "cpu")
    ours, expected = flash_dmattn_func(*inputs, mask), dense_attention(*inputs, mask)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)
    found, wanted = (torch.autograd.grad(out, inputs, grad_out) for out in (ours, expected))
    for gradient, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, reference.nan_to_num(0.0), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_tiles_that_are_visited_are_those_with_something_in_them(name):
    mask = make_mask(name, (2, 2, 512), 0.9, "cpu")
    tiles = mask.view(2, 2, 4, 128, 4, 128).any(dim=5).any(dim=3)
    assert prepare_mask(mask).density().item() == pytest.approx(tiles.float().mean().item())


def test_patterns_follow_their_definitions():
    seqlen, generator = 1024, torch.Generator().manual_seed(0)
    made = {name: PATTERNS[name](seqlen, 0.5, generator) for name in PATTERNS}
    assert made["random"].float().mean().item() == pytest.approx(0.5, abs=0.01)
    assert not made["block"][:128].any()
    assert not made["block"][:, 256:384].any()
    assert made["block"][128:256, 128:256].all()
    assert made["block"].float().mean().item() == 0.25
    assert made["diagonal"].sum(-1).max() == 2 * 256 + 1
    assert made["structured"][:, :4].all()
    assert made["structured"].diagonal().all()
    columns = int(made["structured"].all(dim=0).sum())
    assert 150 <= columns <= 157  # int(0.3 * 512) drawn, and the first four keys
    blocks = made["block128"].view(8, 128, 8, 128)
    assert (blocks.any(dim=3).any(dim=1) == blocks.all(dim=3).all(dim=1)).all()
    assert made["block128"].diagonal().all()


def test_visited_tiles_fall_as_the_band_gets_narrower():
    densities = [
        prepare_mask(make_mask("diagonal", (1, 1, 2048), sparsity, "cpu")).density().item() for sparsity in SPARSITIES
    ]
    assert densities == sorted(densities, reverse=True)
    assert densities[-1] < 0.25 < 0.75 < densities[0]


def test_a_sparse_mask_takes_less_time_than_none():
    """A tenth of the tiles is left; that it takes under 0.7 of the time holds on a busy machine too."""
    mask = make_mask("block128", (1, 2, 2048), 0.95, "cpu")
    problem = Problem("sparse", 1, 2, 2048, 64, mask=mask, device="cpu", dtype=torch.float32)
    rows = {row["implementation"]: row for row in measure(problem, ["dmattn", "dmattn-unmasked"], 3, Gauge())}
    ours, dense = (rows[name]["forward_ms"] + rows[name]["backward_ms"] for name in ("dmattn", "dmattn-unmasked"))
    assert ours < 0.7 * dense


def test_benchmark_writes_a_result_file(tmp_path):
    output = tmp_path / "results.json"
    sizes = ["--batch-size", "1", "--num-heads", "2", "--seq-len", "256", "--head-dim", "32"]
    command = [sys.executable, "benchmarks/benchmark_bubble_reduction.py", *sizes, "--rounds", "1", "--device", "cpu"]
    command += ["--implementations", "dmattn", "dmattn-unmasked", "sdpa", "--output", str(output)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=300)
    results = json.loads(output.read_text())
    assert {"gpu", "date", "versions", "command", "mode", "rows", "summary"} <= results.keys()
    cases = [bubble.case_name(pattern, sparsity) for pattern in BUBBLE_PATTERNS for sparsity in SPARSITIES]
    assert [row["case"] for row in results["rows"]] == [case for case in cases for _ in range(3)]
    for row in results["rows"]:
        assert row["forward_ms"] > 0
        assert row["backward_ms"] > 0
        assert (row["prepare_ms"] is not None) == (row["implementation"] == "dmattn")
        assert 0 < row["density"] <= row["tile_density"] <= 1
    assert [line["case"] for line in results["summary"]] == cases
    assert all({"saved", "bubble", "sdpa_over_ours"} <= line.keys() for line in results["summary"])


def test_summary_states_the_share_of_time_saved():
    times = {"dmattn": (1.0, 2.0, 0.5), "dmattn-unmasked": (4.0, 8.0, None), "sdpa": (3.5, 3.5, None)}
    rows = [
        {
            "case": "block 0.9",
            "implementation": name,
            "forward_ms": forward,
            "backward_ms": backward,
            "prepare_ms": prepare,
            "density": 0.125,
            "tile_density": 0.25,
        }
        for name, (forward, backward, prepare) in times.items()
    ]
    [line] = bubble.summarise(rows)
    assert line["saved"] == 0.75
    assert line["bubble"] == 0.5
    assert line["sdpa_over_ours"] == 2.0


def test_interleaved_timing_orders_slow_and_fast():
    size = torch.randn(400, 400)
    functions = {"fast": lambda: size @ size, "slow": lambda: [size @ size for _ in range(20)]}
    samples = interleaved(functions, "cpu", rounds=3)
    assert samples["slow"].median > 3 * samples["fast"].median
    assert samples["fast"].low <= samples["fast"].median <= samples["fast"].high


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
