"""Benchmarks of dynamic masks and of intervals: what they measure is what they say, and a run that is cut short keeps its rows."""

import argparse
import json
import time
from pathlib import Path

import pytest
import torch

import bench_dynamic
import bench_intervals
import dmattn_ops
import dynamic_targets
import experiments
import interval_masks
import interval_peers
import plot
import readme_tables
from interval_peers import Attention, Intervals
from peers import Run, Unavailable, recorded_run
from score_models import MODELS, make_scores

PARTS = ("first", "second")


# What is measured.


@pytest.mark.parametrize("model", MODELS)
def test_scores_have_a_number_for_each_key_and_depend_on_the_seed(model):
    scores, again, other = (make_scores(model, 2, 5000, 128, "cpu", seed) for seed in (0, 0, 1))
    assert scores.shape == (1, 2, 5000) and scores.dtype == torch.float32
    assert torch.equal(scores, again) and scores.isfinite().all()
    assert torch.equal(scores, other) == (model == "constant")
    assert torch.equal(scores[0, 0], scores[0, 1]) == (model == "constant")


def test_correlated_scores_follow_their_recurrence_across_spans():
    scores = make_scores("correlated", 1, 9000, 128, "cpu")[0, 0].double()
    noise = torch.randn(1, 9000, generator=torch.Generator().manual_seed(0))[0].double()
    steps = (scores[1:] - 0.99 * scores[:-1]) / (1 - 0.99**2) ** 0.5
    torch.testing.assert_close(steps, noise[1:], rtol=0, atol=1e-4)


def test_slopes_rise_and_fall_by_half_a_deviation_in_what_is_kept():
    rising, falling = (make_scores(model, 1, 100_000, 1000, "cpu")[0, 0] for model in ("rising", "falling"))
    assert rising[-1000:].mean() - rising[:1000].mean() == pytest.approx(0.5 * 99, abs=0.2)
    assert falling[-1000:].mean() - falling[:1000].mean() == pytest.approx(-0.5 * 99, abs=0.2)


def test_clusters_share_a_level():
    scores = make_scores("clustered", 1, 20000, 128, "cpu")[0, 0]
    near = (scores[1:] - scores[:-1]).std()
    assert near < 0.55 and scores.std() > 0.9  # two draws of the small noise apart, but for the ends of clusters


@pytest.mark.parametrize("seqlen", [256, 1000])
@pytest.mark.parametrize("name", interval_masks.MASKS)
def test_intervals_of_the_twelve_masks_are_what_their_predicates_say(name, seqlen):
    mask = interval_masks.MASKS[name](seqlen, "cpu")
    query, key = torch.meshgrid(torch.arange(seqlen), torch.arange(seqlen), indexing="ij")
    visible = mask.predicate(None, None, query, key)
    made = dmattn_ops.prepare_mask(intervals=(mask.start, mask.end), hidden=mask.hidden, seqlen_q=seqlen)
    assert torch.equal(made.to_dense()[0, 0], visible)
    assert visible.any(1).all()  # every query sees something
    padded = torch.nn.functional.pad(visible, (0, -seqlen % 128, 0, -seqlen % 128))
    tiles = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).any(3).any(1)
    assert interval_masks.nonempty_tiles(mask) == tiles.sum()


@pytest.mark.parametrize("name", interval_masks.MASKS)
def test_a_mask_as_it_is_written_computes_what_its_intervals_do(name):
    torch.manual_seed(0)
    tensors = [torch.randn(1, 300, 2, 16, dtype=torch.float64) for _ in range(4)]
    call = Attention(*(tensor.requires_grad_() for tensor in tensors[:3]), tensors[3])
    mask = interval_masks.MASKS[name](300, "cpu")
    written = bench_intervals.as_written(call, name, mask)
    natural = {"full", "causal", "sliding window", "causal document", "document", "random eviction"}
    assert (written is not None) == (name in natural)
    own = bench_intervals.as_intervals(call, mask)
    for run in (own, *([written] if written else [])):
        scores = torch.einsum("bihd,bjhd->bhij", call.query, call.key) / 4
        query, key = torch.meshgrid(torch.arange(300), torch.arange(300), indexing="ij")
        scores = scores.masked_fill(~mask.predicate(None, None, query, key), float("-inf"))
        expected = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), call.value)
        torch.testing.assert_close(run.forward(), expected)
        gradients = torch.autograd.grad(expected, call.leaves, call.grad_out)
        torch.testing.assert_close(run.backward(), gradients)


def test_densities_of_the_masks_that_have_simple_ones():
    def share(name, seqlen=4096):
        mask = interval_masks.MASKS[name](seqlen, "cpu")
        return sum(rows.sum().item() for rows in interval_masks.rows_of_tiles(mask)) / seqlen**2

    assert share("full") == 1.0
    assert share("causal") == pytest.approx(1 / 2, rel=1e-3)
    assert share("prefix LM") == pytest.approx(5 / 8, rel=1e-3)
    assert share("random eviction") == pytest.approx(3 / 8, rel=1e-3)  # an eighth of all: 0.75 of causal
    assert share("sliding window") == pytest.approx(1 / 16, rel=0.05)
    assert share("global + sliding") == pytest.approx(1 / 8 + 32 / 4096, rel=0.05)


def test_the_peers_predicate_over_intervals_is_the_dynamic_mask():
    mask = dmattn_ops.dynamic_mask(torch.randn(1, 2, 90), 20)
    position = torch.arange(90, dtype=torch.int32).expand(mask.end.shape)
    query, key = torch.meshgrid(torch.arange(90), torch.arange(90), indexing="ij")
    visible = Intervals(position, mask.end).predicate(3)
    for head in range(6):
        assert torch.equal(visible(torch.tensor(0), torch.tensor(head), query, key), mask.to_dense()[0, head // 3])
    shared = Intervals(position[:, :1], mask.end[:, :1]).predicate(3)
    assert torch.equal(shared(torch.tensor(0), torch.tensor(5), query, key), mask.to_dense()[0, 0])


@pytest.mark.parametrize("wrong", ["out", "dk", None])
def test_a_peer_with_other_results_is_left_out_with_the_reason(wrong):
    tensors = [torch.randn(1, 40, 2, 8) for _ in range(4)]
    call = Attention(*(tensor.requires_grad_() for tensor in tensors[:3]), tensors[3])
    attend = lambda: dmattn_ops.flash_dmattn_func(*call.leaves, is_causal=True)  # noqa: E731
    own = recorded_run(attend, [*call.leaves], call.grad_out)

    def backward():
        dq, dk, dv = own.backward()
        return dq, dk * (1.1 if wrong == "dk" else 1.001), dv

    peer = Run(lambda: attend() * (1.1 if wrong == "out" else 1.001), backward)

    def refuses():
        raise Unavailable("needs what is not here")

    makers = {"peer": (lambda: peer, False), "absent": (refuses, False)}
    found, absent = interval_peers.set_up(makers, own, ("peer", "absent"))
    assert ("peer" in found) == (wrong is None)
    reasons = {row["implementation"]: row["missing"] for row in absent}
    assert reasons["absent"] == "needs what is not here"
    if wrong is not None:
        assert reasons["peer"].startswith(f"its {wrong} differs from ours by 0.1")


def test_lists_of_blocks_that_would_not_fit_are_refused():
    with pytest.raises(Unavailable, match="its lists of blocks would take 34 GB"):
        interval_peers._block_mask(None, torch.empty(1, 1 << 20, 32, 1, device="meta"), 32)


# How it is bounded.


def session(tmp_path, *arguments):
    options = experiments.parser("", PARTS).parse_args(
        [*arguments, "--device=cpu", f"--output={tmp_path / 'results.json'}"]
    )
    return experiments.Session(options, "test")


def contents(made):
    return json.loads(made.output.read_text())


def a_row(milliseconds=1.0):
    return [{"implementation": "dmattn", "whole_ms": milliseconds}]


def test_rows_are_in_the_file_as_soon_as_they_exist(tmp_path):
    made = session(tmp_path)
    made.run("first", "small", a_row)
    assert [row["case"] for row in contents(made)["rows"]] == ["small"]
    with pytest.raises(ZeroDivisionError):  # a failure of this library is raised, and what was measured stays
        made.run("first", "large", lambda: 1 / 0)
    assert {"gpu", "date", "versions", "command", "mode"} <= contents(made).keys()
    assert [row["case"] for row in contents(made)["rows"]] == ["small"]


def test_an_experiment_that_takes_too_long_is_given_up_and_the_next_one_runs(tmp_path):
    made = session(tmp_path, "--seconds=0.2")
    began = time.perf_counter()
    made.run("first", "endless", lambda: time.sleep(20))
    assert time.perf_counter() - began < 10
    made.run("second", "quick", a_row)
    endless, quick = contents(made)["rows"]
    assert endless["missing"] == "took longer than 0.2 s" and endless["part"] == "first"
    assert quick["whole_ms"] == 1.0
    time.sleep(0.3)  # no alarm is left behind


def test_no_experiment_begins_when_the_minutes_are_over(tmp_path, capsys):
    made = session(tmp_path, "--minutes=0")
    assert made.run("first", "small", a_row) == [] and made.rows == []
    assert "first: small: left out" in capsys.readouterr().err


def test_parts_that_are_not_asked_for_are_not_run(tmp_path):
    made = session(tmp_path, "--rows", "second")
    assert made.run("first", "small", lambda: 1 / 0) == []
    assert made.run("second", "small", a_row) != []


def test_rows_are_added_to_a_file_and_those_measured_again_replaced(tmp_path):
    made = session(tmp_path)
    for case in ("a", "b"):
        made.run("first", case, a_row)
    made.finish()
    again = session(tmp_path, "--append")
    again.run("first", "b", lambda: a_row(2.0))
    again.run("second", "b", lambda: a_row(3.0))
    rows = {(row["part"], row["case"]): row["whole_ms"] for row in contents(again)["rows"]}
    assert rows == {("first", "a"): 1.0, ("first", "b"): 2.0, ("second", "b"): 3.0}
    fresh = session(tmp_path)
    fresh.run("first", "c", a_row)
    assert len(contents(fresh)["rows"]) == 1  # without --append the file is a new one


def test_rows_of_another_machine_or_version_are_not_mixed(tmp_path):
    made = session(tmp_path)
    made.run("first", "a", a_row)
    results = contents(made)
    made.output.write_text(json.dumps(results | {"versions": {"torch": "1.0"}}))
    with pytest.raises(SystemExit, match="was measured with versions"):
        session(tmp_path, "--append")


# The commands, in small.


@pytest.fixture(scope="module")
def dynamic_file(tmp_path_factory):
    output = tmp_path_factory.mktemp("dynamic") / "dynamic.json"
    bench_dynamic.main(["--tiny", "--rounds=1", "--device=cpu", f"--output={output}"])
    return output


@pytest.fixture(scope="module")
def intervals_file(tmp_path_factory):
    output = tmp_path_factory.mktemp("intervals") / "intervals.json"
    bench_intervals.main(["--tiny", "--rounds=1", "--device=cpu", f"--output={output}"])
    return output


def test_the_benchmark_of_dynamic_masks_measures_every_part(dynamic_file):
    rows = json.loads(dynamic_file.read_text())["rows"]
    assert {row["part"] for row in rows} == set(bench_dynamic.PARTS)
    own = [row for row in rows if row["implementation"] == "dmattn"]
    assert all(row[f"{part}_ms"] > 0 for row in own for part in ("select", "forward", "backward", "whole"))
    assert all(row["speed_up"] > 0 and 0 < row["density"] < 0.5 for row in own)
    assert {row["model"] for row in own if row["part"] == "models"} == {*MODELS, "documents"}
    absent = {row["implementation"]: row["missing"] for row in rows if "missing" in row}
    if not torch.cuda.is_available():
        assert absent.keys() == {"fa4-dense", "flex", "fa4"} and "CPU" in absent["flex"]


def test_a_density_is_the_share_of_visible_pairs():
    mask = dmattn_ops.dynamic_mask(torch.randn(1, 2, 200), 30, keep_last=7)
    assert bench_dynamic.density(mask) == pytest.approx(mask.to_dense().double().mean().item(), abs=1e-5)


def test_the_benchmark_of_intervals_measures_every_mask(intervals_file):
    results = json.loads(intervals_file.read_text())
    rows = [row for row in results["rows"] if "missing" not in row]
    assert {row["mask"] for row in rows} == set(interval_masks.MASKS) == set(results["published_tflops"])
    assert {row["part"] for row in rows} == set(bench_intervals.LENGTHS)
    for row in rows:
        assert row["backward_tflops"] > 0 and row["whole_ms"] >= row["forward_ms"] + row["backward_ms"] - 1e-3
    [entry] = [row for row in results["targets"] if "eviction" in row["target"]]
    assert entry["measured"] > 0


def test_without_a_gpu_the_full_sizes_are_refused_in_one_line(tmp_path):
    for benchmark in (bench_dynamic, bench_intervals):
        with pytest.raises(SystemExit, match="needs a GPU; on a CPU it takes"):
            benchmark.main(["--device=cpu", f"--output={tmp_path / 'results.json'}"])


def package(root: Path, body: str) -> Path:
    (root / "dmattn_ops").mkdir(parents=True)
    (root / "dmattn_ops" / "__init__.py").write_text(body)
    return root


def test_dense_attention_of_another_checkout_is_measured_there(tmp_path):
    code = "import time\ndef flash_dmattn_func(q, k, v, is_causal):\n    time.sleep(0.05)\n    return q + k.sum() + v.sum()\n"
    root, output = package(tmp_path / "old", code), tmp_path / "results.json"
    arguments = ["--tiny", "--rows", "heads16", "--rounds=1", "--device=cpu", f"--old={root}", f"--output={output}"]
    rows = {row["implementation"]: row for row in bench_dynamic.main(arguments)}
    old, own = rows["dmattn-dense-old"], rows["dmattn"]
    assert old["forward_ms"] >= 50 and old["whole_ms"] == pytest.approx(old["forward_ms"] + old["backward_ms"])
    assert own["speed_up_over_old"] == pytest.approx(old["whole_ms"] / own["whole_ms"], rel=1e-2)


@pytest.mark.parametrize("body", [None, "raise ImportError('half a checkout')"])
def test_a_checkout_that_does_not_run_is_refused_in_one_line(body, tmp_path):
    root = tmp_path / "empty"
    root.mkdir() if body is None else package(root, body)
    arguments = ["--tiny", "--rows", "heads16", "--device=cpu", f"--old={root}", f"--output={tmp_path / 'r.json'}"]
    with pytest.raises(SystemExit, match=f"--old {root} (does not run|has no dmattn_ops)"):
        bench_dynamic.main(arguments)


# What becomes of the files.


def own_row(part, case, whole=1.0, **fields):
    times = {"select_ms": 0.1, "forward_ms": 0.3, "backward_ms": 0.6, "whole_ms": whole}
    return {"part": part, "case": case, "implementation": "dmattn", **times, **fields}


def reached(rows):
    return {row["target"]: (row["measured"], row["reached"]) for row in dynamic_targets.targets_of(rows)}


def test_targets_are_read_from_the_rows_that_they_name():
    case = "S32768 keep1024 H32/8 D128"
    rows = [
        own_row("heads32", case, speed_up=11.0, share=0.1),
        own_row("heads32", "S8192 keep1024 H32/8 D128", speed_up=9.0, speed_up_over_old=2.4),
        own_row("lengths", "S32768 keep2048 H32/8 D128", 2.0),
        own_row("lengths", "S131072 keep2048 H32/8 D128", 8.2),
        own_row("lengths", "S1048576 keep2048 H32/8 D128", 250.0, workspace_bytes=20e9),
        {"part": "heads16", "case": "S8192 keep1024 H16/16 D128", "implementation": "dmattn", "missing": "no time"},
    ]
    assert reached(rows) == {
        "S32768 keep1024 H32/8: speed-up over dense causal": (11.0, "must"),
        "S8192 keep1024 H32/8: speed-up over dense causal": (2.4, "no"),  # the earlier kernels count
        "share beside attention, H32/8": (0.1, "must"),
        "time of 131072 over 32768 positions": (4.1, "aim"),
        "a layer of 1048576 positions, s": (0.25, "must"),
        "its memory beyond outputs, gradients and a float32 dq, GB": (20.0, "no"),
    }


def test_the_slowest_model_of_scores_is_compared_with_the_mean_of_all_six():
    rows = [own_row("models", f"S32768 {model}", 1.0, model=model) for model in (*MODELS, "documents")]
    rows[0]["whole_ms"] = 2.0
    assert reached(rows)["slowest model of scores over the mean"] == (pytest.approx(0.5 / (5.5 / 6), abs=1e-3), "no")
    assert reached(rows[1:]) == {}


def test_a_row_compares_the_whole_with_dense_attention_and_says_what_is_not_attention():
    own = own_row("heads32", "x", 2.0, pack_forward_ms=0.1, pack_backward_ms=0.2)
    dense = {"implementation": "dmattn-dense", "whole_ms": 10.0}
    bench_dynamic.compare([own, dense], {"forward_ms": 3.0, "backward_ms": 9.0})
    assert (own["speed_up"], own["speed_up_over_old"], own["share"]) == (5.0, 6.0, 0.2)


def test_tables_of_dynamic_masks_come_from_the_file(tmp_path, monkeypatch):
    rows = [
        own_row("heads32", "S8192 keep1024 H32/8", share=0.1),
        {"part": "heads32", "case": "S8192 keep1024 H32/8", "implementation": "dmattn-dense", "whole_ms": 3.0},
        own_row("peers", "S8192 keep1024 H32/8"),
        {"part": "peers", "case": "S8192 keep1024 H32/8", "implementation": "flex", "whole_ms": 7.0},
        {"part": "peers", "case": "S8192 keep1024 H32/8", "implementation": "fa4", "missing": "no package"},
    ]
    targets = [{"target": "fast", "must": 2.5, "aim": 3.0, "measured": 2.71, "reached": "must"}]
    (tmp_path / "d.json").write_text(json.dumps({"rows": rows, "targets": targets}))
    monkeypatch.setattr(readme_tables, "RESULTS", tmp_path)
    assert readme_tables.table("d.json", ["heads32"]) == (
        "| ms | selection | forward | backward | all of it | not attention | our dense causal |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| S8192 keep1024 H32/8 | 0.1 | 0.3 | 0.6 | 1 | 10% | 3 (3.0x) |\n"
    )
    assert "| flex_attention |" in readme_tables.table("d.json", ["peers"])
    assert "| 7 (7.0x) |" in readme_tables.table("d.json", ["peers"])
    assert "| fast | 2.5 | 3 | 2.71 |" in readme_tables.filled("<!-- results: d.json targets -->\n<!-- end -->")


def test_tables_of_intervals_show_published_figures_only_beside_their_length(intervals_file, monkeypatch):
    results = json.loads(intervals_file.read_text())
    monkeypatch.setattr(readme_tables, "RESULTS", intervals_file.parent)
    small = readme_tables.table(intervals_file.name, ["32768"])
    assert small.count("\n") == 2 + len(interval_masks.MASKS) and "672 / 620" not in small
    rows = [row | {"case": f"{row['mask']} S32768 H32"} for row in results["rows"] if row["part"] == "32768"]
    assert "| 672 / 620 |" in readme_tables.intervals_table(rows, results["published_tflops"])


def test_pictures_are_drawn_from_the_files(dynamic_file, intervals_file, tmp_path):
    pytest.importorskip("matplotlib")
    for source in (dynamic_file, intervals_file):
        plot.draw(source, tmp_path / "picture.png")
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_options_that_name_no_part_are_refused(capsys):
    with pytest.raises(SystemExit):
        experiments.parser("", PARTS).parse_args(["--rows", "third"])
    assert "invalid choice" in capsys.readouterr().err
    assert isinstance(experiments.parser("", PARTS), argparse.ArgumentParser)
