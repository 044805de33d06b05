"""The example that fine-tunes a model of transformers with dynamic masks."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import finetune_sparse

TINY = ["--steps=12", "--batch=2", "--seqlen=64", "--keep=8", "--keep-first=1", "--keep-last=4", "--device=cpu"]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)
    return path


def test_a_small_model_learns_and_is_kept(text_file, tmp_path, capsys):
    out = tmp_path / "kept"
    losses = finetune_sparse.main([*TINY, "--rate=3e-3", f"--data={text_file}", f"--out={out}"])
    assert losses["sparse, after"] < 0.8 * losses["sparse, before"]
    printed = capsys.readouterr().out
    assert "13 of up to 64 keys seen" in printed
    model = finetune_sparse.load(out, finetune_sparse.small_model())
    ids = torch.randint(0, 256, (1, 40))
    with torch.no_grad():
        logits = model(ids).logits
    fresh = finetune_sparse.load(out, finetune_sparse.small_model())
    with torch.no_grad():
        assert torch.equal(fresh(ids).logits, logits)
    with pytest.raises(SystemExit):
        finetune_sparse.main([*TINY, f"--out={out}"])
    assert "is not empty" in capsys.readouterr().err


def test_a_model_from_a_folder_whose_scores_alone_are_trained(text_file, tmp_path):
    folder = tmp_path / "model"
    torch.manual_seed(0)
    original = finetune_sparse.small_model()
    original.save_pretrained(folder)
    out = tmp_path / "out"
    losses = finetune_sparse.main([*TINY, "--only-masks", f"--model={folder}", f"--data={text_file}", f"--out={out}"])
    assert losses.keys() == {"dense", "sparse, before", "sparse, after"}
    kept = torch.load(out / finetune_sparse.WEIGHTS)
    for name, value in original.state_dict().items():
        assert torch.equal(kept[name], value), name
    scores = [name for name in kept if "dynamic_mask" in name]
    assert len(scores) == 6
    assert any(kept[name].abs().max() > 0 for name in scores if name.endswith(".A"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps=0"], "--steps must be at least 1, got 0"),
        (["--keep-first=-1"], "--keep-first must not be negative, got -1"),
        (["--device=gpu"], "--device must be cpu or cuda, got gpu"),
        (["--model=/nowhere"], "--model: /nowhere does not exist"),
        (["--data=/nowhere"], "--data: /nowhere does not exist"),
    ],
)
def test_options_are_refused_in_one_line(options, message, capsys):
    with pytest.raises(SystemExit):
        finetune_sparse.main(options)
    assert message in capsys.readouterr().err


def test_a_text_that_is_too_short_is_refused_in_one_line(tmp_path):
    (tmp_path / "short.txt").write_text("a" * 300)
    with pytest.raises(
        SystemExit, match="--seqlen must be less than the 30 tokens of the text or its part held out, got 99"
    ):
        finetune_sparse.main([*TINY, f"--data={tmp_path / 'short.txt'}", "--seqlen=99"])
