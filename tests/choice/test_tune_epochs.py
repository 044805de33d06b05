"""Tuning the length of epochs without a GPU: launches and clock are stand-ins, everything between them is real."""

import json

import pytest
import torch

from dmattn_ops.choice import arch, epochs, tuning
from dmattn_ops.dispatch import run
from dmattn_ops.tune import command
from dmattn_ops.tune import epochs as tune_epochs
from dmattn_ops.tune.command import parse_shape

CPU, ON, PLACE = torch.device("cpu"), arch.KNOWN[90], "Some GPU"
SHAPE = "B1 H16 Hkv2 S4096 D32 keep256"


class Launches:
    """Launches that write the same numbers for every length of epochs, but for some that they break."""

    def __init__(self):
        self.lengths, self.broken = [], {}

    def write(self, packed, *outputs):
        length = 0 if packed is None else packed.epochs.length
        self.lengths.append(length)
        number = self.broken.get(length, 2.0)
        if isinstance(number, Exception):
            raise number
        for output in outputs:
            output.fill_(number)


@pytest.fixture
def launches(tmp_path, monkeypatch):
    monkeypatch.setenv(tuning.FOLDER, str(tmp_path))
    monkeypatch.setattr(tuning, "place", lambda device, on: PLACE)
    made = Launches()
    monkeypatch.setattr(run, "run_forward", lambda call, result, packed: made.write(packed, result.out, result.lse))
    monkeypatch.setattr(
        run, "run_backward", lambda call, saved, grads, packed: made.write(packed, grads.dq, grads.dk, grads.dv)
    )
    tuning.forget()
    yield made
    tuning.forget()


def clock(milliseconds):
    """Return a clock that reads the length of epochs."""
    return lambda functions: {length: milliseconds[length] for length in functions}


TIMES = {0: 9.0, 256: 5.0, 384: 4.0, 512: 3.0, 768: 2.0, 1024: 2.5}


def prepared(direction="forward", text=SHAPE):
    return tune_epochs.prepare(direction, parse_shape(text), CPU, ON)


def test_words_name_a_dynamic_mask():
    shape = parse_shape("B2 H8 Hkv2 S4096 D64 keep300")
    assert (shape.mask, shape.at_most, shape.mask_heads, shape.band_hi) == ("intervals", 300, 2, 0)
    with pytest.raises(ValueError, match="got 'keepall'"):
        parse_shape("keepall")


@pytest.mark.parametrize("direction", command.DIRECTIONS)
def test_every_offered_length_is_tried_and_the_fastest_kept(launches, direction):
    task = prepared(direction)
    assert task.own == 512 and epochs.offered_epochs(task.sizes) == tuple(TIMES)
    result = tune_epochs.tune(task, clock(TIMES))
    assert result.length == 768 and set(launches.lengths) == set(TIMES)
    assert "3.0000 ms in epochs of 512 queries, now 2.0000 ms in epochs of 768 queries (6 tried)" in str(result)
    assert "with keys as they lie          9.0000 ms" in result.table()


def test_gains_within_the_noise_change_no_length(launches):
    result = tune_epochs.tune(prepared(), clock(TIMES | {768: 2.99, 1024: 3.5}))
    assert result.length == 512 and "3.0000 ms in epochs of 512 queries, which stays" in str(result)


@pytest.mark.parametrize("broken", [1.9, float("nan"), RuntimeError("out of memory\nin detail")], ids=str)
def test_a_length_that_fails_or_computes_something_else_never_wins(launches, broken):
    launches.broken[768] = broken
    result = tune_epochs.tune(prepared(), clock(TIMES))
    assert result.length == 1024 and 768 not in result.milliseconds
    told = "RuntimeError: out of memory" if isinstance(broken, Exception) else "other results than the row's own"
    assert told in result.refused[768] and told in result.table()


@pytest.mark.parametrize("text", ["B1 H4 S4096 D32 causal", "B1 H4 S4096 D32 masked"])
def test_other_masks_have_no_epochs(text):
    assert prepared(text=text) is None


def test_the_cpu_has_no_epochs():
    assert tune_epochs.prepare("forward", parse_shape(SHAPE), CPU, None) is None


def test_a_shape_that_the_rule_does_not_pack_may_be_packed(launches):
    task = prepared(text="B1 H4 Hkv2 S1024 D32 keep256")
    assert task.own == 0
    result = tune_epochs.tune(task, clock({0: 2.0, 256: 1.5, 384: 1.0, 512: 1.2, 768: 1.3, 1024: 1.4}))
    assert result.length == 384 and "2.0000 ms with keys as they lie, now 1.0000 ms in epochs of 384" in str(result)


def test_lengths_are_stored_once_for_each_case_and_used_by_dispatch(launches, monkeypatch, capsys):
    monkeypatch.setattr(command, "prepare", lambda *arguments: None)  # configurations: tests/choice/test_tune.py
    shapes = [parse_shape(SHAPE), parse_shape("B1 H16 Hkv2 S5000 D32 keep256")]
    command.tune_shapes(shapes, CPU, on=ON, measure=clock(TIMES), table=True)
    stored = json.loads(tuning.path().read_text())["places"][PLACE]
    case = "epochs D32 16 bits S4096+ H2+ group 8 kept 256"
    assert {name: (entry["own"]["epoch"], entry["tuned"]["epoch"]) for name, entry in stored.items()} == {
        f"forward {case}": (512, 768),
        f"backward {case}": (512, 768),
    }
    assert capsys.readouterr().out.count("now 2.0000 ms in epochs of 768") == 2
    task = prepared()
    assert tuning.tuned_epoch("forward", task.call, task.sizes, 512, PLACE)[0] == 768


def test_recorded_dynamic_masks_are_tuned_as_they_were(tmp_path, monkeypatch):
    file = tmp_path / "shapes.jsonl"
    monkeypatch.setenv("DMATTN_RECORD", str(file))
    import dmattn_ops

    query, key = torch.randn(2, 300, 4, 16), torch.randn(2, 300, 2, 16)
    dmattn_ops.flash_dmattn_func(query, key, key, dmattn_ops.dynamic_mask(torch.randn(2, 2, 300), 40, keep_last=9))
    [shape] = tuning.read_record(file)
    assert (shape.mask, shape.at_most, shape.mask_heads, shape.band_hi) == ("intervals", 49, 2, 0)
    again = tuning.shape_of(command.make_call(shape, CPU))
    assert again == shape


@pytest.mark.parametrize("seqlen_q", [100, 300, 400])
def test_intervals_without_a_promise_are_tuned_with_documents(seqlen_q):
    shape = tuning.Shape(1, 4, 2, seqlen_q, 300, 16, 16, "float32", mask="intervals", mask_heads=2)
    call = command.make_call(shape, CPU)
    assert call.mask.kind == "intervals" and call.mask.at_most is None and call.mask.end.shape[1] == 2
    assert (call.mask.start < call.mask.end).all()
    assert tune_epochs.prepare("forward", shape, CPU, ON) is None
