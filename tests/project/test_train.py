"""The training example: its mask, its causality, and that runs resume, compile and agree with torch's attention."""

import contextlib
import io
import re
import signal
from dataclasses import replace

import pytest
import torch

import benefit
import settings
import train
import training
from corpus import batch, from_file, unigram_entropy
from dmattn_ops import dynamic_mask, prepare_mask
from model import ByteModel, ModelConfig, attend_dmattn
from settings import CHECKPOINT, SettingError
from trainer import Trainer, checksum, learning_rate

TINY = ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, keep=24, seqlen=96)
SIZES = ["--layers=2", "--dim=32", "--heads=4", "--kv-heads=2", "--keep=24", "--seqlen=96", "--batch=4"]
RUN = [*SIZES, "--validate-every=8", "--rate=0.01", "--warm-up=4", "--device=cpu"]


@pytest.fixture(autouse=True, scope="module")
def keep_torch_as_it_was():
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(autouse=True)
def forget_compiled_models():
    torch._dynamo.reset()  # one function compiled for many models would reach the limit of recompiles


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)
    return path


@pytest.fixture
def tiny_trainer(text_file):
    """A trainer that has taken a step, without compiling."""
    trainer = Trainer(
        TINY, settings.Plan(steps=8, batch=2, validation_batches=1), from_file(text_file), "cpu", "dmattn"
    )
    trainer.loss = trainer.model.loss
    trainer.train_step()
    return trainer


@pytest.fixture(scope="module")
def finished(text_file, tmp_path_factory):
    """A run in one go: its folder, its trainers and what it printed.

    It comes before `forget_compiled_models` and compiles for its own sizes all the same: code for sizes that vary, left by an
    earlier test, gives other last bits than the run that a test compares with this one.
    """
    torch._dynamo.reset()
    out, printed = tmp_path_factory.mktemp("finished"), io.StringIO()
    with contextlib.redirect_stdout(printed):
        trainers = train.main([*RUN, "--steps=24", "--compare=sdpa", f"--data={text_file}", f"--out={out}"])
    return out, trainers, printed.getvalue()


@pytest.mark.parametrize("keep", [1, 5, 96])
@pytest.mark.parametrize("tied", [False, True])
def test_each_query_of_the_model_keeps_the_best_keys_of_its_own_prefix(keep, tied):
    """By the definition: of equal scores the earlier key is better, and no later key counts."""
    seen = []

    def attend(query, key, value, mask, bias):
        seen.append((mask.to_dense(), bias[:, :, 0]))
        return attend_dmattn(query, key, value, mask, bias)

    torch.manual_seed(keep)
    model = ByteModel(replace(TINY, keep=keep), attend)
    for block in model.blocks if tied else ():
        exact = block.attention.score
        block.attention.score = lambda value, exact=exact: (4 * exact(value)).round()
    with torch.no_grad():
        model(torch.randint(0, 256, (2, TINY.seqlen)))
    assert len(seen) == TINY.layers
    for mask, score in seen:
        assert mask.shape == (2, TINY.kv_heads, TINY.seqlen, TINY.seqlen)
        assert (score[..., None] == score[..., None, :]).sum() > score.numel() or not tied
        for row, scores in zip(mask.flatten(0, 1), score.flatten(0, 1).tolist(), strict=True):
            for query in range(TINY.seqlen):
                prefix = sorted(range(query + 1), key=lambda key: (-scores[key], key))
                assert sorted(prefix[:keep]) == row[query].nonzero().flatten().tolist()


def test_bytes_of_the_future_never_change_logits_of_the_past():
    torch.manual_seed(0)
    model = ByteModel(TINY)
    first = torch.randint(0, 256, (1, TINY.seqlen))
    for split in (1, 40, 95):
        second = first.clone()
        second[:, split:] = torch.randint(0, 256, (1, TINY.seqlen - split))
        with torch.no_grad():
            before, after = model(first), model(second)
        torch.testing.assert_close(before[:, :split], after[:, :split], rtol=0, atol=1e-5)
        assert (before[:, split:] - after[:, split:]).abs().max() > 1e-3


def test_the_mask_follows_the_data():
    torch.manual_seed(0)
    model = ByteModel(TINY)
    first, second = [], []
    with torch.no_grad():
        model(torch.randint(0, 256, (1, TINY.seqlen)), first)
        model(torch.randint(0, 256, (1, TINY.seqlen)), second)
    assert len(first) == TINY.layers
    one, other = (dynamic_mask(scores[0], TINY.keep).to_dense() for scores in (first, second))
    assert not torch.equal(one, other)
    assert (one.sum(-1) == torch.arange(1, TINY.seqlen + 1).clamp(max=TINY.keep)).all()


def test_score_learns_through_the_bias():
    torch.manual_seed(0)
    model = ByteModel(TINY)
    tokens = torch.randint(0, 256, (2, TINY.seqlen + 1))
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    for block in model.blocks:
        for parameter in (block.attention.delta.weight, block.attention.gain, block.attention.slope):
            assert parameter.grad.abs().max() > 0


def test_loss_falls_below_the_entropy_of_single_bytes(finished, text_file):
    history = finished[1]["dmattn"].history
    losses = [loss for _, loss in history.validation]
    assert [step for step, _ in history.validation] == [0, 8, 16, 24]
    assert losses[0] > losses[-1]
    assert losses[-1] < unigram_entropy(from_file(text_file).validation)


def test_every_layer_calls_the_backward_operator_in_the_compiled_graph(finished):
    operators = finished[1]["dmattn"].recorder.operators
    assert operators["backward"]["dmattn.backward.default"] == TINY.layers
    assert finished[1]["sdpa"].recorder.operators["backward"] == {}
    assert "0 graph breaks" in finished[2]


def test_same_masks_through_torch_attention_give_the_same_curve(finished):
    ours, theirs = (finished[1][name].history for name in ("dmattn", "sdpa"))
    assert len(ours.train) == len(theirs.train) == 24
    torch.testing.assert_close(torch.tensor(ours.train), torch.tensor(theirs.train), rtol=0, atol=1e-3)


def test_resumed_run_continues_bit_for_bit(finished, text_file, tmp_path):
    arguments = [*RUN, "--steps=24", f"--data={text_file}", f"--out={tmp_path}"]
    train.main([*arguments, "--stop-at=11"])
    resumed = train.main([*arguments, "--resume"])["dmattn"]
    whole = finished[1]["dmattn"]
    assert resumed.history == whole.history
    for name, parameter in whole.model.state_dict().items():
        assert torch.equal(parameter, resumed.model.state_dict()[name]), name


def test_run_ends_with_the_facts_of_its_compilation(finished):
    assert "0 graph breaks, 0 recompiles after warm-up" in finished[2]
    assert f"{TINY.layers} x dmattn.backward.default" in finished[2]
    assert "dmattn and sdpa differ by at most" in finished[2]


def test_run_says_that_it_compiles_and_what_the_masks_save(finished):
    lines = finished[2].splitlines()
    assert [line.split(" (")[0] for line in lines if "compil" in line][:1] == ["dmattn: compiling the model"]
    assert any(line.startswith("dmattn: compiled in ") for line in lines)
    assert any(
        line.startswith("dmattn step 24: ") and line.endswith("tiles skipped 0%") for line in lines
    )  # of one tile
    [attention] = [line for line in lines if line.startswith("attention ")]
    times = r"attention +(\S+) ms a step with the masks, (\S+) ms without: (\S+) times as fast"
    assert all(float(number) > 0 for number in re.fullmatch(times, attention).groups())


def test_share_of_skipped_tiles_is_counted_against_causal_attention():
    everything = torch.ones(1, 2, 512, 512, dtype=torch.bool).tril()
    near = everything.triu(-100)  # two tiles in each row of tiles but the first: 7 of 10
    everything, near, short = map(prepare_mask, (everything, near, near[..., :300, :300]))
    assert benefit.tiles_skipped([everything]) == pytest.approx(0)
    assert benefit.tiles_skipped([near]) == pytest.approx(0.3)
    assert benefit.tiles_skipped([everything, near]) == pytest.approx(0.15)
    assert benefit.tiles_skipped([short]) == pytest.approx(1 / 6)  # the last tiles are not whole
    latest = dynamic_mask(torch.arange(512.0).expand(1, 2, -1), 101)  # the best are the latest: the same tiles
    assert benefit.tiles_skipped([latest]) == pytest.approx(0.3)


def refusal(arguments):
    """Return the one line that a run is refused with."""
    with pytest.raises(SettingError) as error:
        train.main([str(argument) for argument in arguments])
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--layers=0"], "--layers must be 1 or more, got 0"),
        (["--dim=0"], "--dim must be 1 or more"),
        (["--heads=5"], "--dim 32 is not a multiple of --heads 5"),
        (["--kv-heads=3"], "--heads 4 is not a multiple of --kv-heads 3"),
        (["--kv-heads=-2"], "--kv-heads must be 1 or more, got -2"),
        (["--dim=36"], "make heads of 9, which must be even"),
        (["--dim=2048"], "make heads of 512, which must be even for rotary positions and at most 256"),
        (["--keep=0"], "--keep must be 1 or more, got 0"),
        (["--seqlen=0"], "--seqlen must be 1 or more"),
        (["--steps=0"], "--steps must be 1 or more, got 0"),
        (["--batch=0"], "--batch must be 1 or more"),
        (["--validate-every=0"], "--validate-every must be 1 or more"),
        (["--dense-steps=-1"], "--dense-steps must not be negative, got -1"),
        (["--preset=short"], "argument --preset: invalid choice: 'short'"),
        (
            ["--preset=long", "--compare=sdpa", "--seqlen=20000"],
            "--compare sdpa needs a mask of 26 GB at --seqlen 20000",
        ),
        (["--warm-up=-1"], "--warm-up must not be negative, got -1"),
        (["--rate=nan"], "--rate must be positive and finite, got nan"),
        (["--rate=0"], "--rate must be positive and finite, got 0.0"),
        (["--seed=-1"], "--seed must lie between 0 and"),
        (["--stop-at=99"], "--stop-at must lie between 1 and --steps 24, got 99"),
        (["--steps=many"], "argument --steps: invalid int value: 'many'"),
        (["--stride=2"], "unrecognized arguments: --stride=2"),
        (["--resume", "--overwrite"], "not allowed with argument"),
        (["--resume"], "--resume needs .*checkpoint.pt, which does not exist"),
        (["--data=missing.txt"], "--data missing.txt cannot be read: No such file"),
        (["--data=."], "--data . cannot be read: Is a directory"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_any_work(arguments, told, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "Trainer", None)
    out = tmp_path / "out"
    line = refusal([*RUN, "--steps=24", f"--data={text_file}", f"--out={out}", *arguments])
    assert re.search(told, line), line
    assert not out.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_device_that_is_not_there_is_refused(text_file, tmp_path):
    assert "--device cuda needs a GPU" in refusal([*RUN, "--device=cuda", f"--data={text_file}", f"--out={tmp_path}"])


@pytest.mark.parametrize("size", [0, 1, 96, 969])
def test_text_without_a_sequence_to_validate_with_is_refused(size, tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * size)
    line = refusal([*RUN, f"--data={path}", f"--out={tmp_path / 'out'}"])
    assert line.endswith(f"has {size} bytes, and --seqlen 96 needs 970 (a tenth is held out)")


def test_the_shortest_text_that_is_not_refused_has_a_batch(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * 970)
    for part in settings.read_text(path, 96):
        assert batch(part, 2, 96, 0)[0].shape == (2, 96)


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_a_folder_that_cannot_be_written_to_is_refused(where, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "Trainer", None)
    (tmp_path / "file").write_text("not a folder")
    line = refusal([*RUN, f"--data={text_file}", f"--out={tmp_path / where}"])
    assert line.startswith(f"--out {tmp_path / where} cannot be written to: ")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("left", [CHECKPOINT, "loss.png", "mask.png"])
def test_earlier_results_are_never_overwritten_unasked(left, text_file, tmp_path):
    (tmp_path / left).write_bytes(b"hours of work")
    line = refusal([*RUN, "--steps=1", f"--data={text_file}", f"--out={tmp_path}"])
    assert line.startswith(f"{tmp_path} holds an earlier run ({left})")
    assert all(option in line for option in ("--resume", "--overwrite", "--out"))
    assert contents(tmp_path) == {left: b"hours of work"}


def test_earlier_results_are_overwritten_where_that_is_asked_for(text_file, tmp_path):
    (tmp_path / CHECKPOINT).write_bytes(b"hours of work")
    train.main([*RUN, "--steps=1", f"--data={text_file}", f"--out={tmp_path}", "--overwrite"])
    assert training.load_state(tmp_path / CHECKPOINT, "cpu")["step"] == 1


def _flipped(state):
    next(iter(state["model"].values())).view(torch.int32).view(-1)[3] ^= 1 << 20


def _in(*places, value):
    def change(state):
        *outer, last = places
        for place in outer:
            state = state[place]
        if value is None:
            del state[last]
        else:
            state[last] = value

    return change


DAMAGES = {
    "a flipped bit": (_flipped, True, "its content does not fit its checksum"),
    "another loss": (_in("history", "train", 0, value=9.0), True, "its content does not fit its checksum"),
    "a later version": (_in("version", value=9), True, "has version 9, and this program reads up to 2"),
    "no text": (
        _in("settings", "text", value=None),
        False,
        "it must hold settings of the model, the plan and the text",
    ),
    "a lost size": (_in("settings", "model", "heads", value=None), False, "its settings of the model must be layers, "),
    "no number": (_in("settings", "plan", "steps", value="8"), False, "steps must be a number, got '8'"),
    "a step before": (_in("step", value=-1), False, "its step must be a number from 0 on, got -1"),
    "a lost step": (_in("step", value=3), False, "its history must hold the losses of 3 steps"),
    "no history": (_in("history", value=[]), False, "its history must hold the losses of"),
    "a lost weight": (_in("model", "head.weight", value=None), False, 'Missing key.*"head.weight"'),
    "another shape": (_in("model", "norm.weight", value=torch.ones(3)), False, "size mismatch for norm.weight"),
    "no weights": (_in("model", value=3), False, "Expected state_dict to be dict-like"),
    "no groups": (_in("optimizer", "param_groups", value=None), False, "param_groups"),
    "another moment": (
        _in("optimizer", "state", 0, "exp_avg", value=torch.ones(2)),
        False,
        r"exp_avg of a parameter .* is \(2,\)",
    ),
    "no moment": (_in("optimizer", "state", 0, "exp_avg_sq", value=None), False, "exp_avg_sq"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused_in_words(name, tiny_trainer, tmp_path):
    """Also where the checksum was made of what is wrong, as in a file of another program's."""
    change, keeps_checksum, words = DAMAGES[name]
    path = tmp_path / "checkpoint.pt"
    tiny_trainer.save(path)
    state = torch.load(path, weights_only=True)
    change(state)
    if not keeps_checksum:
        del state["checksum"]
        state["checksum"] = checksum(state)
    torch.save(state, path)
    with pytest.raises(SettingError, match=f"^{re.escape(str(path))} (is damaged: .*)?{words}"):
        tiny_trainer.load(path)


def test_a_checkpoint_cut_short_or_overwritten_in_part_is_refused(tiny_trainer, tmp_path):
    path = tmp_path / "checkpoint.pt"
    tiny_trainer.save(path)
    whole = path.read_bytes()
    for place in range(0, len(whole), len(whole) // 40):
        for damaged in (whole[:place], whole[:place] + bytes([255]) * 60 + whole[place + 60 :]):
            path.write_bytes(damaged)
            try:
                training.load_state(path, "cpu")
            except SettingError as error:
                assert re.search(r"is not a checkpoint of this program$|is damaged: ", str(error))
            else:
                assert len(damaged) >= len(whole)  # only what nobody reads was overwritten: the checksum fits


def test_a_checkpoint_of_the_first_version_loads(tiny_trainer, tmp_path):
    path = tmp_path / "checkpoint.pt"
    tiny_trainer.save(path)
    state = torch.load(path, weights_only=True)
    del state["version"], state["checksum"]
    torch.save(state, path)
    tiny_trainer.load(path)
    assert tiny_trainer.step == 1


@pytest.mark.parametrize("written", [b"", b"no checkpoint", {"weights": 1}])
def test_a_file_that_is_no_checkpoint_is_refused(written, text_file, tmp_path):
    path = tmp_path / CHECKPOINT
    path.write_bytes(written) if isinstance(written, bytes) else torch.save(written, path)
    line = refusal([*RUN, f"--data={text_file}", f"--out={tmp_path}", "--resume"])
    assert line == f"{path} is not a checkpoint of this program"


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--layers=3"], "was written with --layers 2, not --layers 3: only --steps may change"),
        (["--rate=0.5", "--keep=9"], "with --keep 24, --rate 0.01, not --keep 9, --rate 0.5: only --steps may change"),
        (["--steps=13"], "checkpoint.pt is at step 24 already, beyond --steps 13"),
        ([], "checkpoint.pt is at step 24 already: give a larger --steps to go on"),
    ],
)
def test_resume_names_what_differs(arguments, told, finished, text_file):
    before = contents(finished[0])
    line = refusal([*RUN, f"--data={text_file}", f"--out={finished[0]}", "--resume", *arguments])
    assert line.endswith(told)
    assert contents(finished[0]) == before


def test_resume_refuses_a_preset(finished, text_file):
    line = refusal([*RUN, f"--data={text_file}", f"--out={finished[0]}", "--resume", "--preset=long"])
    assert line == "--preset long does nothing with --resume: the checkpoint holds the sizes"


def test_resume_refuses_another_text(finished):
    line = refusal([*RUN, "--steps=30", f"--out={finished[0]}", "--resume"])
    assert line.endswith("was written with another text: give the same --data")


def test_a_run_is_resumed_with_its_own_settings_and_more_steps(finished, text_file, tmp_path):
    (tmp_path / CHECKPOINT).write_bytes((finished[0] / CHECKPOINT).read_bytes())
    trainer = train.main(["--resume", "--steps=30", f"--data={text_file}", f"--out={tmp_path}", "--device=cpu"])[
        "dmattn"
    ]
    assert trainer.model.config == TINY
    assert trainer.step == 30
    assert trainer.history.train[:24] == finished[1]["dmattn"].history.train
    assert [step for step, _ in trainer.history.validation] == [0, 8, 16, 24, 30]
    assert trainer.optimizer.param_groups[0]["lr"] == learning_rate(29, trainer.plan)


def interrupt_in_step(monkeypatch, step, times=1):
    """Let Ctrl-C arrive, `times` times, while a trainer takes its step number `step`."""
    take = training.Trainer.train_step

    def train_step(trainer):
        if trainer.step == step - 1:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return take(trainer)

    monkeypatch.setattr(training.Trainer, "train_step", train_step)
