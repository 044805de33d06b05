"""How runs of the training example end: checkpoints, refusals, pictures."""

# ruff: noqa: F401, F811 (fixtures of the other file)

import math
import shlex
import signal
import subprocess
import sys

import pytest
import torch

import train
import training
from corpus import batch, from_file, standard_library, unigram_entropy
from model import LARGEST_EXPONENT
from settings import CHECKPOINT
from tests.project.test_train import (
    RUN,
    SIZES,
    TINY,
    contents,
    finished,
    forget_compiled_models,
    interrupt_in_step,
    keep_torch_as_it_was,
    refusal,
    text_file,
    tiny_trainer,
)


@pytest.mark.parametrize("step, times, kept", [(1, 1, 0), (4, 2, 0), (11, 2, 8)])
def test_a_run_that_stops_at_once_keeps_the_last_checkpoint(
    step, times, kept, text_file, tmp_path, monkeypatch, capsys
):
    """A second Ctrl-C, or the first where nothing is to be saved, may leave a step half done: that is never saved."""
    interrupt_in_step(monkeypatch, step, times)
    with pytest.raises(SystemExit) as stopped:
        train.main([*RUN, "--steps=24", f"--data={text_file}", f"--out={tmp_path}"])
    assert stopped.value.code == 130
    printed = capsys.readouterr().out
    if kept:
        assert f"holds step {kept} of 24" in printed
        assert training.load_state(tmp_path / CHECKPOINT, "cpu")["step"] == kept
    else:
        assert printed.splitlines()[-1] == "stopped; nothing was saved"
        assert contents(tmp_path) == {}


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(loss, text_file, tmp_path, monkeypatch):
    take = training.Trainer.train_step
    monkeypatch.setattr(training.Trainer, "train_step", lambda self: loss if take(self) and self.step == 8 else 5.0)
    line = refusal([*RUN, "--steps=24", f"--data={text_file}", f"--out={tmp_path}"])
    assert line == f"the loss is {loss} at step 8: try a smaller --rate than 0.01"
    assert contents(tmp_path) == {}


def test_no_score_of_a_key_grows_without_end(tiny_trainer):
    with torch.no_grad():
        for name, parameter in tiny_trainer.model.named_parameters():
            if name.endswith(("gain", "delta.weight")):
                parameter.fill_(50.0)
    position = max(parameter.max() for name, parameter in tiny_trainer.model.named_parameters() if "slope" in name)
    most = math.exp(LARGEST_EXPONENT) + position * TINY.seqlen / TINY.keep
    assert all(score.max() <= most for score in tiny_trainer.scores())
    assert math.isfinite(tiny_trainer.train_step())
    assert all(parameter.isfinite().all() for parameter in tiny_trainer.model.parameters())


def test_the_program_ends_with_one_line_and_no_traceback(tmp_path):
    command = [sys.executable, train.__file__, "--heads=5", f"--out={tmp_path / 'run'}"]  # there may be an earlier run
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr == "train.py: --dim 192 is not a multiple of --heads 5\n"
    assert done.stdout == ""


def test_a_recompile_is_counted(text_file):
    """The fact above can be otherwise: another batch size after the warm-up compiles anew, once for training and validation."""
    plan = training.Plan(steps=3, batch=4, validate_every=8)
    trainer = training.Trainer(TINY, plan, from_file(text_file), "cpu", "dmattn")
    draw = trainer.draw
    trainer.draw = lambda data, seed: tuple(t[: 4 - trainer.step // 2] for t in draw(data, seed))
    assert training.fit(trainer, "dmattn").recompiles == 1


def test_pictures_are_drawn_where_matplotlib_is_installed(finished):
    pytest.importorskip("matplotlib")
    for name in ("loss.png", "mask.png"):
        assert (finished[0] / name).read_bytes().startswith(b"\x89PNG")


def test_standard_library_is_split_and_batches_follow_their_seed():
    text = standard_library()
    assert len(text.train) > 5 * len(text.validation) > 0
    assert 2.0 < unigram_entropy(text.validation) < 5.6
    first, again, other = (batch(text.train, 2, 16, seed) for seed in (1, 1, 2))
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])


def test_text_that_is_too_short_is_refused(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="must have more than 96 bytes"):
        batch(from_file(path).validation, 1, 96, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_trains_on_the_gpu(text_file, tmp_path):
    arguments = [*SIZES, "--steps=24", "--rate=0.01", "--warm-up=4", "--device=cuda", "--compare=sdpa"]
    trainers = train.main([*arguments, f"--data={text_file}", f"--out={tmp_path}"])
    ours, theirs = (torch.tensor(trainers[name].history.train) for name in ("dmattn", "sdpa"))
    assert ours[-1] < ours[0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.1)  # bfloat16, whose differences grow from step to step


def test_an_interrupted_run_is_saved_and_says_how_to_resume(finished, text_file, tmp_path, monkeypatch, capsys):
    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        interrupt_in_step(patch, 11)
        with pytest.raises(SystemExit) as stopped:
            train.main([*RUN, "--steps=24", f"--data={text_file}", f"--out={tmp_path}"])
    assert stopped.value.code == 130
    assert signal.getsignal(signal.SIGINT) is handler
    *_, held, how = capsys.readouterr().out.splitlines()
    assert held == f"stopped: {tmp_path / CHECKPOINT} holds step 11 of 24"
    _, script, *arguments = shlex.split(how.removeprefix("go on with: "))
    assert script.endswith("examples/train.py")
    resumed = train.main([*arguments, "--device=cpu"])["dmattn"]
    assert resumed.history == finished[1]["dmattn"].history
    for name, parameter in finished[1]["dmattn"].model.state_dict().items():
        assert torch.equal(parameter, resumed.model.state_dict()[name]), name
