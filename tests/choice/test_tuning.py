"""The cache of tuned configurations: its file, who wins, what is refused; shapes that a run recorded."""

import json
import multiprocessing
import os
import warnings
from dataclasses import astuple, replace

import pytest
import torch

import dmattn_ops
from dmattn_ops import environment
from dmattn_ops.call import Demand
from dmattn_ops.choice import arch, choose, config, tunable, tuning

PLACE = "Some GPU as SM8.6, 84 SMs, Triton 3.6.0"
DEMAND = Demand(4, 32, 4096, 4096, 64, 64, 2)
BLOCKS = {"block_m": 64, "block_n": 64, "num_warps": 4}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv(tuning.FOLDER, str(tmp_path))
    tuning.forget()
    yield tmp_path
    tuning.forget()


def choice_of(direction="forward", demand=DEMAND):
    rows = config.FORWARD if direction == "forward" else config.BACKWARD
    return choose.choose(rows, arch.KNOWN[86], demand, lambda kernel: [])


def with_other_values(row):
    """Return the row's configuration with the last values of each part that fit."""
    made = row.config
    for part in tunable.parts(row):
        fitting = [v for v in part.values if tunable.shared_memory(row, part, v) <= arch.KNOWN[86].shared_memory]
        made = part.put(made, fitting[-1])
    return made


def store(direction="forward", demand=DEMAND, masked=False, deterministic=False, **changes):
    """Store an entry for the row of a demand, with changed fields; return the row and the tuned configuration."""
    choice = choice_of(direction, demand)
    made = with_other_values(choice.row)
    entry = tuning.entry_of(choice.row, made, 1.0, 0.75, "2026-11-21") | changes
    case = tuning.case_of(direction, choice.row, choice.arch, demand, masked, deterministic)
    tuning.merge(PLACE, {case: entry})
    return choice.row, made


def tuned(direction="forward", demand=DEMAND, masked=False, deterministic=False, place=PLACE):
    return tuning.tuned(choice_of(direction, demand), direction, demand, masked, deterministic, place)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_stored_configuration_takes_the_place_of_the_rows_own(direction):
    row, made = store(direction)
    choice = tuned(direction)
    assert choice.row.config == made != row.config
    assert astuple(choice.row) == astuple(replace(row, config=made, evidence=choice.row.evidence))
    assert choice.label == f"SM86_{row.tier}_{made.block_m}x{made.block_n}"
    assert choice.row.evidence.startswith("tuned: 0.75 ms, 1.0 ms with the row's own")


def test_other_classes_of_calls_keep_their_rows():
    store()
    for other in (
        tuned(place="Another GPU"),
        tuned(masked=True),
        tuned(deterministic=True),
        tuned(direction="backward"),
        tuned(demand=DEMAND._replace(seqlen_k=8192)),
        tuned(demand=DEMAND._replace(seqlen_k=4095)),
        tuned(demand=DEMAND._replace(batch=1, heads=1)),
        tuned(demand=DEMAND._replace(dim=128)),
        tuned(demand=DEMAND._replace(itemsize=4)),
    ):
        assert not other.row.evidence.startswith("tuned")
    assert tuned(demand=DEMAND._replace(dim=40, seqlen_k=5000)).row.evidence.startswith("tuned")


def test_the_file_is_small_versioned_json_and_read_once(folder):
    store()
    content = json.loads((folder / "tuned.json").read_text())
    assert content["version"] == tuning.VERSION
    entry = content["places"][PLACE]["forward ampere D64 16 bits S4096+"]
    assert set(entry) == {"own", "tuned", "own_ms", "tuned_ms", "date"}
    assert [path.name for path in folder.iterdir() if path.suffix == ".tmp"] == []
    for _ in range(3):
        tuned()
    assert tuning.entries.cache_info().misses == 1


def test_the_folder_is_that_of_the_user_unless_the_environment_names_one(folder, monkeypatch):
    assert tuning.path() == folder / "tuned.json"
    monkeypatch.delenv(tuning.FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "xdg"))
    assert tuning.path() == folder / "xdg" / "dmattn_ops" / "tuned.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(folder))
    assert tuning.path() == folder / ".cache" / "dmattn_ops" / "tuned.json"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[]",
        b"{}",
        b'{"version": 1}',
        b'{"version": 1, "places": []}',
        b'{"version": 1, "places": {"x": 3}}',
        b'{"version": 1, "places": {"x": {"y": 3}}}',
        b'{"version": 0, "places": {}}',
        b'{"version": "1", "places": {}}',
    ],
)
def test_a_damaged_file_or_another_version_is_ignored_with_one_warning_and_then_replaced(folder, content):
    (folder / "tuned.json").write_bytes(content)
    with pytest.warns(UserWarning, match=r"ignores its tuned configurations: .*(damaged|version)"):
        assert not tuned().row.evidence.startswith("tuned")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned()
        store()
        assert tuned().row.evidence.startswith("tuned")


def test_no_file_is_no_reason_to_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning.entries() == {}


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        {},
        {**BLOCKS, "block_m": 48},
        {**BLOCKS, "block_m": "64"},
        {**BLOCKS, "block_m": None},
        {**BLOCKS, "block_m": [64]},
        {**BLOCKS, "num_warps": 99},
        {**BLOCKS, "sm_count": 1},
        {name: value for name, value in BLOCKS.items() if name != "num_warps"},
        {"stages": 2, "variant": "overlapped"},
    ],
    ids=str,
)
def test_an_entry_with_fields_or_values_that_the_row_does_not_offer_is_refused(values):
    row, _ = store(tuned=values)
    assert tuned().row == row


def test_an_entry_measured_against_another_configuration_of_the_row_is_refused():
    row, _ = store(own={**BLOCKS, "num_warps": 8})
    assert tuned().row == row


def test_an_entry_that_does_not_fit_shared_memory_is_refused():
    row, made = store()
    case = tuning.case_of("forward", row, arch.KNOWN[86], DEMAND, False, False)
    entry = tuning.entries()[PLACE][str(case)]
    assert tuning.tuned_config(row, arch.KNOWN[86], entry) == made
    assert tuning.tuned_config(row, replace(arch.KNOWN[86], shared_memory=1024), entry) is None


def test_numbers_reach_the_launcher_as_the_row_offers_them():
    row, made = store()
    values = {name: float(value) for name, value in tuning.entry_of(row, made, 1, 1, "")["tuned"].items()}
    store(tuned=values)
    used = tuned().row.config
    assert used == made and all(type(getattr(used, name)) is int for name in BLOCKS)


@pytest.mark.parametrize("rows", [config.FORWARD, config.BACKWARD], ids=["forward", "backward"])
def test_every_row_offers_its_own_values_first_and_none_twice(rows):
    for row in rows:
        for part in tunable.parts(row):
            assert part.values[0] == part.of(row.config)
            assert len(set(part.values)) == len(part.values) > 1
            for values in part.values:
                assert part.of(part.put(row.config, values)) == values


def write_entries(folder, writer, count):
    os.environ[tuning.FOLDER] = folder
    for number in range(count):
        case = tuning.Case("forward", "portable", writer, 16, number, False, False, False)
        tuning.merge(PLACE, {case: {"writer": writer, "number": number}})


def test_several_processes_write_at_once_and_nothing_is_lost(folder):
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_entries, args=(str(folder), writer, 15)) for writer in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):  # a reader always finds a whole file
        tuning.forget()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tuning.entries()
    assert all(writer.exitcode == 0 for writer in writers)
    tuning.forget()
    found = {(entry["writer"], entry["number"]) for entry in tuning.entries()[PLACE].values()}
    assert found == {(writer, number) for writer in range(3) for number in range(15)}


def test_a_run_records_each_shape_once(folder, monkeypatch):
    file = folder / "shapes.jsonl"
    monkeypatch.setenv(environment.RECORD, str(file))
    query = torch.randn(2, 40, 4, 16)
    key = torch.randn(2, 50, 2, 16)
    for _ in range(2):
        dmattn_ops.flash_dmattn_func(query, key, key, is_causal=True)
    dmattn_ops.flash_dmattn_func(query, key, key, torch.ones(1, 1, 40, 50, dtype=torch.bool), deterministic=True)
    shape = tuning.Shape(2, 4, 2, 40, 50, 16, 16, "float32", band_hi=10)
    masked = replace(shape, band_hi=tuning.UNBOUNDED, mask="bits", deterministic=True)
    assert tuning.read_record(file) == [shape, masked]
    assert len(file.read_text().splitlines()) == 2


def test_a_record_that_is_none_names_the_line(folder):
    file = folder / "shapes.jsonl"
    file.write_text(json.dumps({"batch": 2}) + '\n{"unknown": 1}\n')
    with pytest.raises(ValueError, match=r"line 2 of .* is no recorded shape"):
        tuning.read_record(file)
