"""The benchmark of a Llama's training step: it runs, its batches are what they say, and only compiled steps get a time."""

import json
import sys
from pathlib import Path

import pytest
import torch

import bench_transformers
import readme_tables

pytest.importorskip("transformers")

ANSWERS = {
    "first": {"loss": 4.16, "graphs": 1},  # near that of the tiny model, which one test compares with it
    "sample": {"ms": 25.0, "sm_mhz": [1500.0], "power_w": [300.0]},
    "check": {"eager_calls": 0},
}
# A process that answers at once, and notes what it was asked.
FAKE = """
import json, sys, time
name, answers, notes = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
for line in sys.stdin:
    asked = json.loads(line)
    with open(notes, "a") as file:
        print(json.dumps([name, *asked]), file=file)
    answer = answers[asked[0]]
    if answer == "die":
        sys.exit(3)
    if answer == "silence":
        time.sleep(600)
    print(json.dumps(answer), flush=True)
"""
EAGER = f"""
import sys
sys.path.insert(0, {str(Path(bench_transformers.__file__).parent)!r})
import bench_transformers
bench_transformers.compiled = lambda model, device: model
bench_transformers.serve("sdpa", "causal", "cpu", True)
"""


@pytest.fixture
def race(tmp_path, monkeypatch):
    """Run the benchmark's first part with processes that answer as `answers` says beside `ANSWERS`, by implementation.

    Returns the rows by implementation and what was asked. No process is left when it ends.
    """
    started = []
    make = bench_transformers.Worker.__init__

    def noted(worker, words):
        make(worker, words)
        started.append(worker.process)

    monkeypatch.setattr(bench_transformers.Worker, "__init__", noted)
    notes = tmp_path / "notes"

    def run(answers, *arguments, real=()):
        def command(implementation, part, options):
            if implementation in real:
                return [sys.executable, "-c", EAGER]
            asked = json.dumps(ANSWERS | answers.get(implementation, {}))
            return [sys.executable, "-c", FAKE, implementation, asked, str(notes)]

        monkeypatch.setattr(bench_transformers, "command", command)
        output = ["--rows", "causal", "--output", str(tmp_path / "result.json")]
        try:
            rows = bench_transformers.main(["--device", "cpu", "--tiny", *arguments, *output])
        finally:
            assert len(started) == 2 and all(process.poll() is not None for process in started)
        return {row["implementation"]: row for row in rows}, list(map(json.loads, notes.read_text().splitlines()))

    return run


def test_batches_are_padded_on_the_left_and_packed_without_gaps():
    sizes = bench_transformers.TINY
    padded = bench_transformers.batch_of("padded", sizes, "cpu")
    keep = padded["attention_mask"]
    assert keep.sum(1).tolist() == [sizes.seqlen, sizes.seqlen * 3 // 4]
    assert torch.equal(keep, keep.sort(1).values)
    assert torch.equal(padded["labels"] == bench_transformers.IGNORED, keep == 0)
    packed = bench_transformers.batch_of("packed", sizes, "cpu")
    positions = packed["position_ids"][0]
    starts = (positions == 0).nonzero().flatten().tolist()
    assert positions.shape == (sizes.batch * sizes.seqlen,) and len(starts) == len(bench_transformers.DOCUMENTS) + 1
    ends = [*starts[1:], len(positions)]
    assert all(torch.equal(positions[a:b], torch.arange(b - a)) for a, b in zip(starts, ends, strict=True))


def test_a_tiny_run_writes_the_steps_of_all_implementations_and_equal_losses(tmp_path):
    output = tmp_path / "result.json"
    rows = bench_transformers.main(
        ["--device", "cpu", "--tiny", "--rounds", "2", "--rows", "packed", "--output", str(output)]
    )
    assert json.loads(output.read_text())["rows"] == rows
    found = {row["implementation"]: row for row in rows}
    assert set(found) == set(bench_transformers.IMPLEMENTATIONS) and {row["part"] for row in rows} == {"packed"}
    assert "no backward on a CPU" in found["flex"]["missing"]
    assert found["sdpa"]["loss"] == pytest.approx(found["dmattn"]["loss"], rel=1e-4)
    for name in ("dmattn", "sdpa"):
        low, high = found[name]["step_range_ms"]
        assert 0 < low <= found[name]["step_ms"] <= high
        assert found[name]["graphs"] == 1 and found[name]["eager_calls"] == 0
    assert found["dmattn"]["times_dmattn"] == 1.0
    table = readme_tables.steps_table(rows).splitlines()
    assert len(table) == 4 and " dmattn_ops " in table[2] and " 1.00x " in table[2] and " SDPA " in table[3]


def test_implementations_take_turns_with_samples_of_several_steps(race):
    slow = {"sample": ANSWERS["sample"] | {"ms": 100.0}}
    rows, asked = race({"sdpa": slow}, "--rounds", "2")
    first = [[name, "first"] for name in ("dmattn", "sdpa")]
    short = [[name, "sample", bench_transformers.STEPS] for name in ("dmattn", "sdpa")]
    samples = [["dmattn", "sample", 8], ["sdpa", "sample", 3]]  # 0.2 s, but three steps at least
    assert sorted(asked[:2]) == first  # at once, so that either may be the first
    assert asked[2:] == 2 * short + 2 * samples + [[name, "check"] for name in ("dmattn", "sdpa")]
    assert rows["dmattn"]["step_ms"] == 25.0 and rows["sdpa"]["times_dmattn"] == 4.0


def test_clock_and_power_of_all_processes_are_in_the_file(race, tmp_path):
    race({"sdpa": {"sample": ANSWERS["sample"] | {"sm_mhz": [1900.0]}}}, "--rounds", "1")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["sm_mhz"] == [1500.0, 1900.0] and result["power_w"] == [300.0, 300.0]


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"first": {"loss": 5.16, "graphs": 1}}, "the loss is 5.1600, and 4.1600 with dmattn"),
        ({"first": {"loss": float("nan"), "graphs": 1}}, "the loss is nan, and 4.1600 with dmattn"),
        ({"first": {"error": "no kernel\nfor this"}}, "no kernel"),
        ({"first": "die"}, "its process ended with exit status 3"),
        ({"sample": "die"}, "its process ended with exit status 3"),
        ({"first": "silence"}, "took longer than 2 s"),
        ({"check": {"eager_calls": 17}}, "it ran eagerly: a step called 17 operators that no graph calls"),
    ],
)
def test_an_implementation_that_fails_is_a_row_with_the_reason_and_no_time(race, answers, reason):
    rows, _ = race({"sdpa": answers}, "--rounds", "1", "--seconds", "2")
    assert rows["sdpa"]["missing"] == reason and "step_ms" not in rows["sdpa"]
    assert rows["dmattn"]["step_ms"] == 25.0


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"first": {"error": "no kernel"}}, "no kernel"),
        ({"first": {"loss": float("nan"), "graphs": 1}}, "the loss with dmattn is nan"),
        ({"sample": "die"}, "exit status 3"),
        ({"check": {"eager_calls": 15}}, "it ran eagerly"),
    ],
)
def test_that_dmattn_fails_is_an_error(race, answers, reason):
    with pytest.raises(RuntimeError, match=reason):
        race({"dmattn": answers}, "--rounds", "1")


def test_a_process_that_trains_eagerly_gets_no_time(race):
    rows, _ = race({}, "--rounds", "1", real=("sdpa",))
    assert rows["sdpa"]["missing"].startswith("it ran eagerly") and "step_ms" not in rows["sdpa"]
    assert rows["dmattn"]["step_ms"] == 25.0


def test_without_transformers_no_process_is_started(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(bench_transformers, "Worker", None)
    with pytest.raises(SystemExit, match="needs transformers"):
        bench_transformers.main(["--device", "cpu", "--tiny", "--output", str(tmp_path / "result.json")])


def test_a_step_whose_profile_shows_no_optimizer_proves_nothing():
    with pytest.raises(RuntimeError, match="not known what ran"):
        bench_transformers.eager_calls(lambda: torch.ones(2).sum())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("part", bench_transformers.PARTS)
@torch.no_grad()  # flex_attention has no backward on a CPU
def test_a_model_with_flex_attention_is_compiled_too(part):
    torch.compiler.reset()
    sizes = bench_transformers.TINY
    model, batch = bench_transformers.llama(sizes, "cpu"), bench_transformers.batch_of(part, sizes, "cpu")
    model.set_attn_implementation("sdpa")
    expected = model(**batch).loss
    model.set_attn_implementation("flex_attention")
    torch.testing.assert_close(bench_transformers.compiled(model, "cpu")(**batch).loss, expected)


@pytest.mark.parametrize("part", bench_transformers.PARTS)
@torch.no_grad()
def test_the_loss_of_every_part_is_that_of_sdpa(part):
    from dmattn_ops.integrations.transformers import register

    register()
    sizes = bench_transformers.TINY
    model, batch = bench_transformers.llama(sizes, "cpu"), bench_transformers.batch_of(part, sizes, "cpu")
    model.set_attn_implementation("sdpa")
    expected = model(**batch).loss
    model.set_attn_implementation("dmattn")
    torch.testing.assert_close(model(**batch).loss, expected)
