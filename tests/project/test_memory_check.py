"""The program that runs every kernel under compute-sanitizer (`tests/tools/memory_check.py`): here without a GPU."""

from __future__ import annotations

import json
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from dmattn_ops import meta
from dmattn_ops.call import Call, Mask, plain_options
from dmattn_ops.kernels.epochs import attention
from dmattn_ops.kernels.epochs import launch as packing_launch
from dmattn_ops.kernels.hopper.backward import launch as backward_launch
from tests.tools import memory_check, races, sites

KERNELS = races.KERNELS
PRETENDS = """#!{python}
import subprocess, sys
if sys.argv[1] == "--version":
    print("NVIDIA (R) Compute Sanitizer")
    print("Version 2025.3.1.0 (build 1) (public-release)")
    sys.exit(0)
tool, command = sys.argv[2], sys.argv[sys.argv.index("--error-exitcode") + 2:]
print("========= COMPUTE-SANITIZER")
if tool == "memcheck":
    print("begins one")
    print("========= Invalid __global__ read of size 4 bytes\\n=========     at backward_kernel+0x1850 in work.py:12")
    print("=========     by thread (32,0,0) in block (8,0,0)\\n=========     Address 0x7ff74886cd00\\n========= ")
    print("begins two\\n========= Uninitialized __global__ memory read of size 16 bytes")
    print("=========     at void at::native::reduce_kernel<(int)128, at::Sum<float, float>>(T3)+0xaeb0\\n========= ")
    print("========= ERROR SUMMARY: 102 errors\\n========= ERROR SUMMARY: 2 errors were not printed. Use --print-limit option")
    sys.exit(99)
if tool != "initcheck":
    print("begins one\\nends 0.5 one\\nbegins two\\nends 2.5 two\\nbegins three\\nends 0.1 three\\ncalls 3")
else:
    assert sys.argv[sys.argv.index("--show-backtrace") + 1] == "device"
    print("begins one\\nends 0.5 one\\nbegins two")
if tool == "racecheck":
    print("========= Error: Race reported between Write access at backward_kernel+0x10580 in work.py:{line}")
    print("=========     and Read access at backward_kernel+0x1850 in work.py:{read} [96 hazards]")
    print("========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)")
    sys.exit(99)
else:
    print("========= ERROR SUMMARY: 0 errors")
"""

SHARES = """#!{python}
import os, signal, sys
if sys.argv[1] == "--version":
    sys.exit(0)
first, step = sys.argv[-2:]
assert step == "3"
if first == "1" and "{broken}" == "killed":
    print("dies", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if first != "1" or "{broken}" == "None":
    print("\\n".join(f"begins {{number}}\\nends 0.1 {{number}}" for number in range(7)))
    print("calls 7")
    print(f"launched a b{{first}}")
    print("========= RACECHECK SUMMARY: 0 hazards" if "racecheck" in sys.argv else "========= ERROR SUMMARY: 0 errors")
"""


def test_a_process_that_takes_too_long_is_ended_with_what_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    inner = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(100)"
    outer = f"import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', {inner!r}])"
    said, status = memory_check._share([sys.executable, "-c", outer], 5.0)
    assert (said, status) == ("begun\n", 124)
    line = Path(f"/proc/{note.read_text()}/cmdline")
    assert not line.exists() or not line.read_bytes()


def test_the_sample_names_kernels_of_every_folder() -> None:
    kernels = memory_check.launchable()
    folders = {name.split(".")[0] for name in kernels}
    assert folders == {
        "ampere", "portable", "hopper", "epochs", "selection", "masks", "mass", "interval_lists", "ragged",
        "chosen", "decode", "kept",
    }  # fmt: skip
    forwards = {
        f"{family}.forward_kernel" for family in ("portable.forward", "hopper.forward.kernel", "ampere.forward.kernel")
    }
    assert forwards | {"portable.merge.merge_kernel"} <= kernels and len(kernels) >= 30


def test_every_call_of_the_sample_is_a_valid_one(capsys: pytest.CaptureFixture) -> None:
    memory_check.run_calls("cpu")
    lines, names = capsys.readouterr().out.splitlines(), [name for name, _ in memory_check.sample("cpu")]
    assert [line.removeprefix("begins ") for line in lines[: 2 * len(names) : 2]] == names
    assert [line.split(" ", 2)[2] for line in lines[1 : 2 * len(names) : 2]] == names
    assert lines[2 * len(names)] == f"calls {len(names)}"


def test_outputs_are_filled_under_initcheck_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """initcheck does not see what tensor maps store, and would report every load of it."""
    commands = []
    monkeypatch.setattr(memory_check, "_share", lambda command, limit: commands.append(command) or ("", 0))
    for tool in (*memory_check.TOOLS, None):
        memory_check.under(tool, "compute-sanitizer", 1.0, "cuda")
    assert [command[2] for command in commands if "--filled" in command] == ["initcheck"]
    allocated = [getattr(import_module(module), name) for module, name in memory_check.FILLED]
    query = torch.full((1, 40, 2, 8), torch.nan)
    call = Call(query, query, query, None, Mask(), None, None, None, plain_options(1.0))
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)  # fills what is allocated with NaN
    try:
        assert meta.forward_outputs(query, query, True)[0].isnan().all()
        with memory_check.filled(memory_check.FILLED):
            made = [*meta.forward_outputs(query, query, True), *meta.backward_outputs(query, query, query, None, None)]
            made += [*meta.qkvpacked_backward_outputs(query, None, None), attention.workspace(query, 3, 5)]
        assert all((tensor == 0).all() for tensor in made)
        with memory_check.filled(memory_check.OF_SLOTS):
            assert backward_launch.room_for_key_sums(call) is None
            assert not backward_launch.room_for_key_sums(call._replace(bias=query[:, :1, :, 0][:, None])).any()
            assert (packing_launch.workspace(query, 3, dtype=torch.int32) != 0).all()
    finally:
        torch.use_deterministic_algorithms(False)
    assert allocated == [getattr(import_module(module), name) for module, name in memory_check.FILLED]


def test_what_a_tool_says_stands_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    tool, output = tmp_path / "compute-sanitizer", tmp_path / "found.json"
    line, read = (
        _line_of("hopper/backward/work.py", text) for text in ("work.places.index(slot).store(", "parts = work.places")
    )
    tool.write_text(PRETENDS.format(python=sys.executable, line=line, read=read))
    tool.chmod(0o755)
    arguments = ["", "--device", "cpu", "--sanitizer", str(tool), "--output", str(output), "--jobs", "1"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert memory_check.main() == 2  # memcheck found an error, and under initcheck no call was made
    found = json.loads(output.read_text())
    assert found["memcheck"]["errors"] == 102 and found["memcheck"]["status"] == 99
    assert "Invalid __global__ read" in found["memcheck"]["said"][1]
    assert found["memcheck"]["sites"] == {
        "one: Invalid __global__ read of size 4 bytes at backward_kernel in work.py:12": 1,
        "two: Uninitialized __global__ memory read of size 16 bytes at at::native::reduce_kernel": 1,
    }
    assert found["synccheck"]["sites"] == found["racecheck"]["sites"] == {}
    assert found["racecheck"]["errors"] == 0 and memory_check.is_clean(found["racecheck"])
    assert found["racecheck"]["proven to be ordered"] == {"backward_kernel: a block's place": 96}
    assert found["racecheck"]["version"] == "2025.3.1.0"
    assert memory_check.is_clean(found["synccheck"]) and not memory_check.is_clean(found["initcheck"])
    assert found["synccheck"]["slowest"] == ["2.5 s two", "0.5 s one", "0.1 s three"]
    assert found["synccheck"]["did not end"] == [] and found["initcheck"]["did not end"] == ["two"]
    assert found["without a tool"]["calls"] == sum(1 for _ in memory_check.sample("cpu"))
    assert "memcheck: NOT CLEAN, 102 errors" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*arguments, "--tools", "racecheck"])
    assert memory_check.main() == 0 and json.loads(output.read_text())["memcheck"]["errors"] == 102, (
        "others' results stay"
    )
    assert "without a tool: clean" in capsys.readouterr().out
    before = json.loads(output.read_text())
    monkeypatch.setattr(sys, "argv", [*arguments, "--tools", "racecheck", "--compiled"])
    assert memory_check.main() == 0
    assert capsys.readouterr().out.startswith("racecheck: clean, 0 errors, 3 calls")  # nothing ran before
    assert json.loads(output.read_text())["without a tool"] == before["without a tool"]


@pytest.mark.parametrize("tool_name", ["memcheck", "racecheck", None])
@pytest.mark.parametrize(("broken", "status", "errors"), [(None, 0, 0), ("killed", -9, None), ("silent", 0, None)])
def test_processes_that_share_the_calls_count_as_one_run(
    tool_name: str | None,
    broken: str | None,
    status: int,
    errors: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(SHARES.format(python=sys.executable, broken=broken))
    tool.chmod(0o755)
    if tool_name is None:
        monkeypatch.setattr(sys, "executable", str(tool))
    found = memory_check.under(tool_name, str(tool), 60.0, "cpu", jobs=3)
    assert found["status"] == status and found["errors"] == errors
    assert found["kernels"] == ["a", "b0", *([] if broken else ["b1"]), "b2"] and found["calls"] == (
        14 if broken else 21
    )
    assert found["last words"] == ([["dies"]] if broken == "killed" else [])
    assert memory_check.is_clean(found) == (broken is None)


def _line_of(path: str, begins: str) -> int:
    lines = (races.KERNELS / path).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip().startswith(begins))


@pytest.mark.parametrize("proof", races.PROOFS, ids=lambda proof: f"{proof.kernel} {proof.memory}")
def test_every_proof_that_a_race_is_none_stands_in_the_source(
    proof: races.Proof, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert proof.missing() == []
    folder = tmp_path / proof.folder
    monkeypatch.setattr(races, "KERNELS", tmp_path)
    for chain in proof.chains:  # without any line of a chain, the proof does not hold
        for file, text in chain:
            shutil.copytree(KERNELS / proof.folder, folder, dirs_exist_ok=True)
            lines = (folder / file).read_text().splitlines()
            (folder / file).write_text("\n".join(line for line in lines if not line.strip().startswith(text)))
            assert proof.missing(), text


def test_a_race_counts_unless_its_two_lines_are_proven_to_be_ordered() -> None:
    write = _line_of("hopper/forward/walk.py", "smem.pieces.index(slot).store(parts)")
    read = _line_of("hopper/forward/kernel.py", "parts = smem.pieces.index(slot).load(PIECE)")
    said = (
        "========= Error: Race reported between {kind} access at {kernel}+0xc080 in walk.py:{write}\n"
        "=========     and {other} access at {kernel}+0x310 in kernel.py:{read} [40 hazards]\n"
        "=========     and {other} access at {kernel}+0xdb10 in kernel.py:{read} [56 hazards]\n"
        "========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)\n"
    )
    as_it_is: dict[str, Any] = {
        "kind": "Write", "other": "Read", "kernel": "forward_kernel", "write": write, "read": read, "count": 1,
    }  # fmt: skip
    found = races.judge(said.format(**as_it_is))
    assert found == ({"forward_kernel: a piece of work": 96}, [])
    for change in (
        {"write": write + 1},
        {"read": read - 1},
        {"kernel": "other_kernel"},
        {"other": "Write"},
        {"read": 10**6},
    ):
        found = races.judge(said.format(**{**as_it_is, **change}))
        assert len(found.unproven) == 2 and not found.proven, change
        assert memory_check.is_clean({"status": 99, "calls": 3, **found.as_result()}) is False
    assert races.judge(said.format(**{**as_it_is, "count": 7})).unproven == ["6 of 7 reports were not printed"]
    assert races.judge("========= Error: Race reported between Write access at somewhere").unproven, (
        "what cannot be read"
    )
    assert races.judge("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)") == ({}, [])


def test_a_read_of_unwritten_memory_counts_unless_nothing_uses_its_words() -> None:
    (unused,) = sites.UNUSED
    line = _line_of(unused.path, unused.begins)
    said = (
        "begins documents\n========= Uninitialized __global__ memory read of size 4 bytes\n"
        "=========     at {kernel}+0xf020 in {file}:{line}\n=========     by thread (320,0,0) in block (8,0,0)\n"
    )
    as_it_is = {"kernel": "forward_kernel", "file": "walk.py", "line": line}
    found = sites.of(said.format(**as_it_is) * 3)
    assert sum(sites.unused(found).values()) == sum(found.values()) == 3
    for change in ({"kernel": "backward_kernel"}, {"file": "work.py"}, {"line": line + 1}, {"line": 10**6}):
        found = sites.of(said.format(**{**as_it_is, **change}))
        assert len(found) == 1 and not sites.unused(found), change
    written = sites.of(said.format(**as_it_is).replace("Uninitialized __global__ memory", "Invalid __global__"))
    assert len(written) == 1 and not sites.unused(written)


def test_without_the_tool_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", ["", "--sanitizer", "/no/such/tool"])
    assert memory_check.main() == 1
    assert capsys.readouterr().out.startswith(
        "there is no /no/such/tool: compute-sanitizer is a part of the CUDA toolkit"
    )
