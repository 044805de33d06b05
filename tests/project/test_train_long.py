"""The training example on long sequences: its preset, the speed of dense attention beside it, and pictures of long masks."""

import re

import pytest
import torch

import pictures
import settings
import train
from dmattn_ops import dynamic_mask
from model import attend_dense

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
