"""The benchmark of a Llama's training step: it runs, its batches are what they say, and every implementation computes the same."""

import json

import pytest
import torch

import bench_transformers

pytest.importorskip("transformers")


def test_batches_are_padded_on_the_left_and_packed_without_gaps():
    sizes = bench_transformers.TINY
    padded = bench_transformers.batch_of("padded", sizes, "cpu")
    keep = padded["attention_mask"]
    assert keep.sum(1).tolist() == [sizes.seqlen, sizes.seqlen * 3 // 4]
    assert torch.equal(keep, keep.sort(1).values)
    assert torch.equal(padded["labels"] == bench_transformers.IGNORED, keep == 0)
    packed = bench_transformers.batch_of("packed", sizes, "cpu")
    positions = packed["position_ids"][0]
    starts = (positions == 0).nonzero().flatten().tolist()
    assert positions.shape == (sizes.batch * sizes.seqlen,) and len(starts) == len(bench_transformers.DOCUMENTS) + 1
    ends = [*starts[1:], len(positions)]
    assert all(torch.equal(positions[a:b], torch.arange(b - a)) for a, b in zip(starts, ends, strict=True))


def test_a_tiny_run_writes_the_steps_of_all_parts_and_equal_losses(tmp_path):
    output = tmp_path / "result.json"
    rows = bench_transformers.main(["--device", "cpu", "--tiny", "--rounds", "1", "--output", str(output)])
    assert json.loads(output.read_text())["rows"] == rows
    for part in bench_transformers.PARTS:
        found = {row["implementation"]: row for row in rows if row["part"] == part}
        assert set(found) == set(bench_transformers.IMPLEMENTATIONS)
        assert "no backward on a CPU" in found["flex"]["missing"]
        assert found["sdpa"]["loss"] == pytest.approx(found["dmattn"]["loss"], rel=1e-4)
        assert found["dmattn"]["graphs"] == found["sdpa"]["graphs"] == 1
        assert found["dmattn"]["times_dmattn"] == 1.0 and found["sdpa"]["step_ms"] > 0


def test_an_implementation_with_another_loss_gets_no_time(tmp_path, monkeypatch):
    make = bench_transformers.step_of

    def wrong(model, batch, device):
        step = make(model, batch, device)
        return (lambda: step() + 1) if model.config._attn_implementation == "sdpa" else step

    monkeypatch.setattr(bench_transformers, "step_of", wrong)
    rows = bench_transformers.main(
        ["--device", "cpu", "--tiny", "--rounds", "1", "--rows", "causal", "--output", str(tmp_path / "result.json")]
    )
    [row] = [row for row in rows if row["implementation"] == "sdpa"]
    assert "step_ms" not in row and row["missing"].startswith("the loss is ")


@pytest.mark.parametrize("part", bench_transformers.PARTS)
@torch.no_grad()  # flex_attention has no backward on a CPU
def test_a_model_with_flex_attention_is_compiled_too(part):
    torch.compiler.reset()
    sizes = bench_transformers.TINY
    model, batch = bench_transformers.llama(sizes, "cpu"), bench_transformers.batch_of(part, sizes, "cpu")
    model.set_attn_implementation("sdpa")
    expected = model(**batch).loss
    model.set_attn_implementation("flex_attention")
    torch.testing.assert_close(bench_transformers.compiled(model, "cpu")(**batch).loss, expected)
