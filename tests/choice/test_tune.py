"""`python -m dmattn_ops.tune` without a GPU: kernels and clock are stand-ins, everything between them is real."""

import json
from types import SimpleNamespace

import pytest
import torch

from dmattn_ops.call import UNBOUNDED
from dmattn_ops.choice import arch, tunable, tuning
from dmattn_ops.dispatch import run as dispatch
from dmattn_ops.tune import command
from dmattn_ops.tune.command import parse_shape

PLACE = "Some GPU"
CPU = torch.device("cpu")


class Kernels:
    """Launchers that write the same numbers for every configuration but for some that they break."""

    def __init__(self):
        self.launched = []
        self.breaks = lambda made: None

    def forward(self, call, result, made):
        self._write(made, result.out, result.lse)

    def backward(self, call, saved, grads, made):
        self._write(made, grads.dq, grads.dk, grads.dv)

    def _write(self, made, *outputs):
        self.launched.append(made)
        number = self.breaks(made)
        for output in outputs:
            output.fill_(2.0 if number is None else number)


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """Stand-ins for all launchers, and a cache of the test's own."""
    monkeypatch.setenv(tuning.FOLDER, str(tmp_path))
    monkeypatch.setattr(tuning, "place", lambda device, on: PLACE)
    made = Kernels()
    monkeypatch.setattr(dispatch, "launcher", lambda direction, kernel: made)
    tuning.forget()
    yield made
    tuning.forget()


def measured_by(milliseconds):
    """Return a clock that reads the configuration."""

    def measure(functions):
        return {key: milliseconds(run.args[0]) for key, run in functions.items()}

    return measure


def prepared(text, direction="forward"):
    return command.prepare(direction, parse_shape(text), CPU, arch.KNOWN[86])


def fits(task, part, values):
    return tunable.shared_memory(task.row, part, values) <= task.on.shared_memory


def test_words_name_a_shape():
    shape = parse_shape("B4 H32 Hkv8 S4096 D128 float16 causal")
    assert shape == tuning.Shape(4, 32, 8, 4096, 4096, 128, 128, "float16", band_hi=0)
    assert parse_shape("S100 Sk300 causal").band_hi == 200
    assert parse_shape("S100 Sk300 causal varlen").band_hi == 0
    assert parse_shape("H2 Dv32 masked deterministic varlen") == tuning.Shape(
        heads=2, kv_heads=2, dim_v=32, mask="bits", deterministic=True, varlen=True
    )
    assert parse_shape("").band_hi == UNBOUNDED
    for word in ("B", "4", "Q4", "B4x", "fast"):
        with pytest.raises(ValueError, match=f"got '{word}'"):
            parse_shape(word)


@pytest.mark.parametrize("direction", command.DIRECTIONS)
def test_the_fastest_configuration_is_found_kernel_by_kernel(kernels, direction):
    task = prepared("B1 H2 S64 D64", direction)
    best = task.row.config
    for part in tunable.parts(task.row):
        best = part.put(best, next(values for values in part.values[::-1] if fits(task, part, values)))
    result = command.tune(
        task,
        candidates=0,
        measure=measured_by(lambda made: sum(part.of(made) != part.of(best) for part in tunable.parts(task.row)) + 1.0),
    )
    assert result.config == best and result.ms == 1.0 < result.own_ms


def test_few_candidates_are_tried_and_those_predicted_best(kernels):
    task = prepared("B1 H2 S64 D64")
    (part,) = tunable.parts(task.row)
    result = command.tune(task, candidates=3, measure=measured_by(lambda made: 1.0))
    assert len(result.trials) == 4 and result.trials[0].values == part.of(task.row.config)
    predictions = [trial.predicted for trial in result.trials[1:]]
    every = command.tune(task, candidates=0, measure=measured_by(lambda made: 1.0)).trials
    assert predictions == sorted(trial.predicted for trial in every[1:])[:3]


def test_gains_within_the_noise_change_nothing(kernels):
    task = prepared("B1 H2 S64 D64")
    result = command.tune(task, measure=measured_by(lambda made: 1.0 if made == task.row.config else 0.99))
    assert result.config == task.row.config and "the row's own stays" in str(result)


@pytest.mark.parametrize("wrong", [1.9, float("nan"), float("inf"), "raises"])
def test_a_configuration_that_fails_or_computes_something_else_never_wins(kernels, wrong):
    task = prepared("B1 H2 S64 D64 causal")

    def breaks(made):
        if made == task.row.config:
            return None
        if wrong == "raises":
            raise RuntimeError("out of resources\nin detail")
        return wrong

    kernels.breaks = breaks
    timed = []
    result = command.tune(task, measure=lambda functions: timed.append(len(functions)) or dict.fromkeys(functions, 1.0))
    assert result.config == task.row.config and timed == [1, 2]
    reasons = {trial.refused for trial in result.trials[1:]}
    assert reasons == {"RuntimeError: out of resources" if wrong == "raises" else "other results than the row's own"}
    assert reasons.pop() in result.table()


def test_what_a_kernel_leaves_unwritten_is_found(kernels):
    task = prepared("B1 H2 S64 D64 causal")
    kernels._write = lambda made, *outputs: made == task.row.config and [o.fill_(2.0) for o in outputs]
    result = command.tune(task, measure=measured_by(lambda made: 1.0))
    assert all(trial.refused for trial in result.trials[1:])


def test_what_the_own_configuration_leaves_unwritten_too_is_no_difference(kernels):
    task = prepared("B1 H2 S64 D64")
    kernels._write = lambda made, *outputs: [o[:, :48].fill_(2.0) for o in outputs]  # as of packed keys
    result = command.tune(task, measure=measured_by(lambda made: 1.0))
    assert len(result.trials) > 1 and not any(trial.refused for trial in result.trials)


def test_each_case_is_tuned_once_for_its_heaviest_shape_and_stored(kernels, capsys):
    shapes = [parse_shape(text) for text in ("B1 H2 S64 D64", "B1 H2 S96 D64", "B1 H2 S64 D64 masked")]
    clock = measured_by(lambda made: 1.0 / made.block_n)
    results = command.tune_shapes(shapes, CPU, ["forward"], on=arch.KNOWN[86], candidates=0, measure=clock)
    assert [(str(result.task.case), result.task.shape.seqlen_q) for result in results] == [
        ("forward ampere D64 16 bits S0+ few tiles", 96),
        ("forward ampere D64 16 bits S0+ few tiles masked", 64),
    ]
    stored = json.loads(tuning.path().read_text())["places"][PLACE]
    assert {name: entry["tuned"]["block_n"] for name, entry in stored.items()} == {
        str(result.task.case): 128 for result in results
    }
    assert "tuned as forward ampere D64" in capsys.readouterr().out
    demand = shapes[0].demand
    choice = dispatch.offered("forward", results[0].task.call, arch.KNOWN[86])
    assert tuning.tuned(choice, "forward", demand, False, False, PLACE).row.config == results[0].config


def test_a_dry_run_stores_nothing(kernels):
    clock = measured_by(lambda made: 1.0 / made.block_n)
    command.tune_shapes([parse_shape("B1 H2 S64 D64")], CPU, on=arch.KNOWN[86], measure=clock, store=False)
    assert not tuning.path().exists()


def test_plain_torch_operations_leave_nothing_to_tune(kernels, capsys):
    assert command.tune_shapes([parse_shape("B1 H2 S64 D64")], CPU) == []
    assert "nothing to tune" in capsys.readouterr().out


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_one_line_and_only_on_a_terminal(terminal, monkeypatch, capsys):
    written = []
    stream = SimpleNamespace(isatty=lambda: terminal, write=written.append, flush=lambda: None)
    monkeypatch.setattr(command.sys, "stderr", stream)
    progress = command.Progress(2)
    progress.show("first")
    progress.finish("found")
    progress.show("second")
    assert capsys.readouterr().out == "found\n"
    assert "".join(written).count("\n") == 0
    assert ("############............] 1/2 second" in "".join(written)) == terminal == bool(written)


def test_the_command_says_what_is_wrong_with_its_arguments(capsys, monkeypatch, tmp_path):
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            command.main([])
        assert "needs a GPU" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for arguments, message in (
        (["--shape", "B4 X9"], "got 'X9'"),
        (["--recorded", str(tmp_path / "none.jsonl")], "No such file"),
        (["--direction", "sideways"], "invalid choice"),
    ):
        with pytest.raises(SystemExit):
            command.main(arguments)
        assert message in capsys.readouterr().err
