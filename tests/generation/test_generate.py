"""The example that continues a text: the same bytes as with all keys, in constant memory, and its refusals."""

import pytest
import torch

import generate
import settings
from corpus import from_file
from model import ModelConfig
from settings import CHECKPOINT, SettingError
from trainer import Trainer

TINY = ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, keep=24, seqlen=96)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the checkpoint of a model that has learned a little, without compiling."""
    made = tmp_path_factory.mktemp("run")
    (made / "text.txt").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)
    plan = settings.Plan(steps=8, batch=2, validation_batches=1, rate=0.01, warm_up=1)
    trainer = Trainer(TINY, plan, from_file(made / "text.txt"), "cpu", "dmattn")
    trainer.loss = trainer.model.loss
    for _ in range(8):
        trainer.train_step()
    trainer.save(made / CHECKPOINT)
    return made


def test_it_writes_what_it_would_with_all_keys(folder, capsys):
    """The text is longer than what the model was trained on, and than what is kept."""
    written = generate.main(
        ["--out", str(folder), "--prompt", "the quick", "--length", "150", "--device", "cpu", "--full"]
    )
    kept, full = written["kept keys"], written["all keys"]
    assert kept.text == full.text and kept.text.startswith(b"the quick") and len(kept.text) == 9 + 150
    assert kept.begin == kept.end and full.end > 10 * full.begin
    printed = capsys.readouterr().out
    assert "both wrote the same text" in printed and "MB after the prompt" in printed


def test_logits_with_caches_are_those_without(folder):
    model, bytes_ = generate.load_model(folder, "cpu"), torch.randint(256, (1, 90))
    with torch.no_grad():
        whole = model(bytes_)
        for full in (False, True):
            caches = generate.caches_of(TINY, "cpu", full=full)
            parts = torch.cat([model(part, caches=caches) for part in bytes_.split([40, 1, 1, 48], 1)], 1)
            torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--length", "0"], "--length must be at least 1, got 0"),
        (["--temperature", "-1"], "--temperature must be 0 or more"),
        (["--prompt", ""], "--prompt must not be empty"),
        (["--out", "/nowhere"], "run make train first"),
    ],
)
def test_what_cannot_work_is_refused(arguments, message):
    with pytest.raises(SettingError, match=message):
        generate.main(arguments)
