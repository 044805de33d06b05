"""The training example on long sequences: its preset, the speed of dense attention beside it, and pictures of long masks."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pictures
import settings
import train
import training
from dmattn_ops import dynamic_mask
from model import attend_dense

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SIZES = ["--layers=2", "--dim=32", "--heads=4", "--kv-heads=2", "--keep=24", "--batch=2", "--device=cpu"]


@pytest.fixture(autouse=True, scope="module")
def keep_torch_as_it_was():
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)
    return path


def test_the_long_preset_runs_in_small_and_compares_its_speed_with_dense_attention(text_file, tmp_path, capsys):
    torch._dynamo.reset()
    config, plan = settings.PRESETS["long"]("cpu")
    assert (config.seqlen, config.keep, plan.dense_steps) == (8192, 512, 3)
    sizes = [*SIZES, "--steps=3", "--seqlen=300", "--dense-steps=1", "--preset=long"]
    trainer = train.main([*sizes, f"--data={text_file}", f"--out={tmp_path / 'out'}"])["dmattn"]
    assert trainer.model.config.seqlen == 300
    lines = capsys.readouterr().out.splitlines()
    [line] = [line for line in lines if line.startswith("dense causal ")]
    speeds = r"(\S+) tokens/s with the masks, (\S+) with dense causal attention: (\S+) times as fast"
    found = re.fullmatch(rf"dense causal +{speeds}", line)
    assert all(float(number.replace(",", "")) > 0 for number in found.groups())
    assert any("0 graph breaks, 0 recompiles after warm-up" in line for line in lines)
    [packing] = [line for line in lines if line.startswith("packing ")]
    assert "keys are not packed beforehand: the CPU kernels gather the keys" in packing


def test_the_long_preset_on_a_gpu_has_sequences_of_131072_bytes():
    config, plan = settings.PRESETS["long"]("cuda")
    assert (config.seqlen, config.keep, config.head_dim) == (131072, 2048, 128)
    settings.refuse_what_cannot_work(config, plan, settings.parse(["--device=cpu"]))


def test_the_preset_of_a_gpu_is_a_size_at_which_masks_were_measured_to_pay():
    config, plan = settings.PRESETS["standard"]("cuda")
    rows = json.loads((RESULTS / "2026-11-26-nvidia-h200-training.json").read_text())["rows"]
    case = f"S{config.seqlen} keep{config.keep} H{config.heads}/{config.kv_heads} D{config.head_dim}"
    [speed_up] = [row["speed_up"] for row in rows if (row["case"], row["implementation"]) == (case, "dmattn")]
    assert speed_up > 2
    assert plan.dense_steps  # the run says so of the whole model
    on_cpu, _ = settings.PRESETS["standard"]("cpu")
    assert config.seqlen // config.keep == on_cpu.seqlen // on_cpu.keep == 16  # where both were seen to learn alike


def test_a_comparison_with_dense_attention_is_a_small_table_and_a_line_over_the_picture(
    text_file, tmp_path, capsys, monkeypatch
):
    titles = []
    draw = training.draw_pictures
    monkeypatch.setattr(training, "draw_pictures", lambda *given: titles.append(given[3]) or draw(*given))
    torch._dynamo.reset()
    sizes = [*SIZES, "--steps=4", "--seqlen=160", "--validate-every=2", "--dense-steps=1", "--compare"]
    trainers = train.main([*sizes, f"--data={text_file}", f"--out={tmp_path / 'out'}"])
    assert list(trainers) == ["dmattn", "dense"]
    assert trainers["dense"].recorder.operators["backward"]["dmattn.backward.default"] == 2
    assert "dmattn.key_lifetimes.default" not in trainers["dense"].recorder.operators["forward"]
    printed = capsys.readouterr().out
    table = re.search(
        r"^trained with +loss +tokens/s   a query sees\n"
        r"dmattn +(\d\.\d{3}) +([\d,]+)   the best 24 of up to 160 keys\n"
        r"dense +(\d\.\d{3}) +([\d,]+)   every earlier key\n"
        r"(dmattn trains (\S+) times as fast as dense, to a loss (\S+) (higher|lower))$",
        printed,
        re.MULTILINE,
    )
    ours, theirs = float(table[1]), float(table[3])
    assert ours == pytest.approx(trainers["dmattn"].history.validation[-1][1], abs=1e-3)
    assert theirs == pytest.approx(trainers["dense"].history.validation[-1][1], abs=1e-3)
    assert float(table[7]) == pytest.approx(abs(ours - theirs), abs=2e-3)
    assert titles == [table[5]]
    assert "dense causal " not in printed  # the speed beside it is in the table


def test_help_shows_defaults_and_needs_no_torch():
    code = f"""
import atexit, runpy, sys
sys.path.insert(0, {str(Path(train.__file__).parent)!r})
sys.argv = ["train.py", "--help"]
atexit.register(lambda: print("torch" in sys.modules, "dmattn_ops" in sys.modules))
runpy.run_path({train.__file__!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False False"
    told = " ".join(done.stdout.split())
    assert "keys that a query may see (default 64, on a GPU 512)" in told
    described = told.partition(" options: ")[2]
    for option in ("--out", "--device", "--preset", "--layers", "--steps", "--rate"):
        assert "(default " in described.partition(f" {option} ")[2].partition(" --")[0], option


def test_dense_attention_of_the_same_kernels_sees_every_earlier_key_and_no_mask():
    query, key, value = (torch.randn(1, 40, heads, 16) for heads in (4, 2, 2))
    mask = dynamic_mask(torch.randn(1, 2, 40), 3)
    out = attend_dense(query, key, value, mask, torch.randn(1, 2, 1, 40))
    heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_pictures_of_long_masks_show_every_so_many_queries_and_keys(monkeypatch):
    mask = dynamic_mask(torch.randn(1, 2, 90), 20)
    assert torch.equal(pictures.thinned(mask), mask.to_dense()[0])
    monkeypatch.setattr(pictures, "PIXELS", 30)
    assert torch.equal(pictures.thinned(mask), mask.to_dense()[0, :, ::3, ::3])
