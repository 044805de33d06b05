"""The training example: its mask, its causality, and that runs resume, compile and agree with torch's attention."""

import contextlib
import io

import pytest
import torch
from torch._dynamo.utils import counters

import train
from corpus import batch, from_file, standard_library, unigram_entropy
from model import ByteModel, ModelConfig, keep_best

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


@pytest.fixture(scope="module")
def finished(text_file, tmp_path_factory):
    """A run in one go: its folder, its trainers and what it printed."""
    out, printed = tmp_path_factory.mktemp("finished"), io.StringIO()
    with contextlib.redirect_stdout(printed):
        trainers = train.main([*RUN, "--steps=24", "--compare=sdpa", f"--data={text_file}", f"--out={out}"])
    return out, trainers, printed.getvalue()


@pytest.mark.parametrize("keep", [1, 5, 40])
def test_each_query_keeps_the_best_keys_of_its_own_prefix(keep):
    score = torch.randint(0, 9, (2, 3, 40), generator=torch.Generator().manual_seed(keep)).float()  # with ties
    kept = keep_best(score, keep).tril()
    for row, scores in zip(kept.flatten(0, 1), score.flatten(0, 1), strict=True):
        for query in range(40):
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
    assert not torch.equal(first[0], second[0])
    assert (first[0].tril().sum(-1) == torch.arange(1, TINY.seqlen + 1).clamp(max=TINY.keep)).all()


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
    assert sum(counters["graph_break"].values()) == 0


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


def test_resume_refuses_a_checkpoint_of_another_run(finished, text_file):
    with pytest.raises(ValueError, match="was written with"):
        train.main([*RUN, "--steps=13", f"--data={text_file}", f"--out={finished[0]}", "--resume"])


def test_run_ends_with_the_facts_of_its_compilation(finished):
    assert "0 graph breaks, 0 recompiles after warm-up" in finished[2]
    assert f"{TINY.layers} x dmattn.backward.default" in finished[2]
    assert "dmattn and sdpa differ by at most" in finished[2]


def test_a_recompile_is_counted(text_file):
    """The fact above can be otherwise: another batch size after the warm-up compiles training and validation anew."""
    plan = train.Plan(steps=3, batch=4, validate_every=8)
    trainer = train.Trainer(TINY, plan, from_file(text_file), "cpu", "dmattn")
    draw = trainer.draw
    trainer.draw = lambda data, seed: tuple(t[: 4 - trainer.step // 2] for t in draw(data, seed))
    assert train.fit(trainer, "dmattn").recompiles == 2


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
