"""Tuning on the GPU itself: what is found is stored, used by the next call, named by `explain`, and right."""

import pytest
import torch

import dmattn_ops
from dmattn_ops.choice import epochs, tuning
from dmattn_ops.testing import Problem, check
from dmattn_ops.tune import command
from dmattn_ops.tune import epochs as tune_epochs

pytestmark = pytest.mark.gpu


# the architecture's own kernels, and with float32 the portable ones
@pytest.mark.parametrize(("variant", "dtype"), [("dense", "bfloat16"), ("varlen", "bfloat16"), ("varlen", "float32")])
def test_a_tuned_configuration_is_used_and_agrees_with_the_oracle(variant, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv(tuning.FOLDER, str(tmp_path))
    tuning.forget()
    device = torch.device("cuda", torch.cuda.current_device())
    shape = command.parse_shape(f"B2 H4 S256 D64 {dtype} {'varlen' if variant == 'varlen' else ''}")

    def last_is_fastest(functions):
        return {key: 10.0 - place for place, key in enumerate(functions)}

    results = command.tune_shapes([shape], device, candidates=2, measure=last_is_fastest)
    assert [result.task.direction for result in results] == ["forward", "backward"]
    assert all(not trial.refused for result in results for trial in result.trials)
    if variant == "dense":
        query = torch.randn(2, 256, 4, 64, device=device, dtype=torch.bfloat16)
        text = str(dmattn_ops.explain(query, query, query))
        assert text.count("tuned: ") == sum(result.config != result.task.row.config for result in results)
    check(
        Problem(variant=variant, dtype=dtype, batch=2, heads=4, heads_k=4, seqlen_q=256, seqlen_k=256, dim=64, dim_v=64),
        "cuda",
    )  # fmt: skip
    tuning.forget()


def test_a_short_tuning_run_with_the_real_clock(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(tuning.FOLDER, str(tmp_path))
    assert command.main(["--shape", "B1 H4 S512 D64 causal", "--direction", "forward", "--candidates", "1"]) == 0
    out = capsys.readouterr().out
    assert "rank correlation" in out and str(tmp_path) in out
    assert len(tuning.entries()) == 1
    tuning.forget()


def test_tuned_lengths_of_epochs_are_used_and_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(tuning.FOLDER, str(tmp_path))
    tuning.forget()
    device = torch.device("cuda", torch.cuda.current_device())
    shape = command.parse_shape("B1 H8 Hkv2 S8192 D64 keep512")
    task = tune_epochs.prepare("forward", shape, device)
    others = [length for length in epochs.offered_epochs(task.sizes) if length not in (0, task.own)]
    result = tune_epochs.tune(task, lambda functions: {length: 1.0 + (length != others[-1]) for length in functions})
    assert result.refused == {} and result.length == others[-1]
    tuning.merge(tuning.place(device, task.on), {task.case: result.entry("2026-11-22")})
    query, key, scores = (
        torch.randn(shape, device=device) for shape in ((1, 8192, 8, 64), (1, 8192, 2, 64), (1, 2, 8192))
    )
    query, key = query.bfloat16(), key.bfloat16()
    shown = dmattn_ops.explain(query, key, key, dmattn_ops.dynamic_mask(scores, 512)).forward.packing
    assert shown.packing.epochs.length == others[-1] and "tuned: " in str(shown)
    assert command.main(["--shape", "B1 H8 Hkv2 S8192 D64 keep512", "--candidates", "1"]) == 0  # with the real clock
    assert "epochs D64 16 bits S8192+ H2+ group 4 kept 512" in capsys.readouterr().out
    tuning.forget()
