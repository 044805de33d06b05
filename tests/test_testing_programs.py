"""The programs of `dmattn_ops.testing` that check memory on a GPU, and calls of all kinds for a while: here without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dmattn_ops
from dmattn_ops.testing import memory_check, soak

PRETENDS = """#!{python}
import subprocess, sys
tool, command = sys.argv[2], sys.argv[sys.argv.index("--error-exitcode") + 2:]
print("========= COMPUTE-SANITIZER")
if tool == "memcheck":
    print("========= Invalid __global__ read of size 4 bytes")
    print("========= ERROR SUMMARY: 1 error")
    sys.exit(99)
if tool != "initcheck":
    print("calls 3")
if tool == "racecheck":
    print("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")
else:
    print("========= ERROR SUMMARY: 0 errors")
"""


def test_the_sample_names_kernels_of_every_folder() -> None:
    kernels = memory_check.launchable()
    folders = {name.split(".")[0] for name in kernels}
    assert folders == {"portable", "hopper", "packing", "selection", "tile_mask", "interval_lists", "spans"}
    assert {"hopper.forward.kernel.forward_kernel", "portable.forward.merge_kernel"} <= kernels and len(kernels) >= 31


def test_every_call_of_the_sample_is_a_valid_one(capsys: pytest.CaptureFixture) -> None:
    memory_check.run_calls("cpu")
    assert capsys.readouterr().out.startswith(f"calls {sum(1 for _ in memory_check.sample('cpu'))}\n")


def test_what_a_tool_says_stands_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    tool, output = tmp_path / "compute-sanitizer", tmp_path / "found.json"
    tool.write_text(PRETENDS.format(python=sys.executable))
    tool.chmod(0o755)
    arguments = ["", "--device", "cpu", "--sanitizer", str(tool), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert memory_check.main() == 2  # memcheck found an error, and under initcheck no call was made
    found = json.loads(output.read_text())
    assert found["memcheck"]["errors"] == 1 and found["memcheck"]["status"] == 99
    assert "Invalid __global__ read" in found["memcheck"]["said"][1]
    assert found["racecheck"]["errors"] == 0 and memory_check.is_clean(found["racecheck"])
    assert memory_check.is_clean(found["synccheck"]) and not memory_check.is_clean(found["initcheck"])
    assert found["without a tool"]["calls"] == sum(1 for _ in memory_check.sample("cpu"))
    assert "memcheck: NOT CLEAN, 1 errors" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*arguments, "--tools", "racecheck"])
    assert memory_check.main() == 0 and json.loads(output.read_text())["memcheck"]["errors"] == 1, (
        "others' results stay"
    )
    assert "without a tool: clean" in capsys.readouterr().out
    before = json.loads(output.read_text())
    monkeypatch.setattr(sys, "argv", [*arguments, "--tools", "racecheck", "--compiled"])
    assert memory_check.main() == 0
    assert capsys.readouterr().out.startswith("racecheck: clean, 0 errors, 3 calls")  # nothing ran before
    assert json.loads(output.read_text())["without a tool"] == before["without a tool"]


def test_without_the_tool_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", ["", "--sanitizer", "/no/such/tool"])
    assert memory_check.main() == 1
    assert capsys.readouterr().out.startswith(
        "there is no /no/such/tool: compute-sanitizer is a part of the CUDA toolkit"
    )


def test_a_soak_continues_with_the_seeds_of_its_file(tmp_path: Path) -> None:
    output = tmp_path / "soak.json"
    command = [sys.executable, "-m", "dmattn_ops.testing.soak", "--device", "cpu", "--output", str(output)]
    for _ in range(2):
        done = subprocess.run([*command, "--seconds", "4"], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
    first, second = json.loads(output.read_text())
    assert second["first seed"] == first["next seed"] > first["first seed"] and not first["wrong"] + second["wrong"]
    assert sum(first["calls"].values()) >= 4 and " 0 wrong" in done.stdout


def test_a_soak_notices_wrong_results_and_calls_that_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = dmattn_ops.flash_dmattn_func

    def slightly_wrong(*arguments: object, **keywords: object) -> object:
        found = correct(*arguments, **keywords)  # type: ignore[arg-type]
        return tuple(each * 1.2 for each in found) if isinstance(found, tuple) else found

    monkeypatch.setattr(dmattn_ops, "flash_dmattn_func", slightly_wrong)
    tried = soak.Soak("cpu", 0)
    tried._check("eager", soak.Problem(seqlen_q=20, seqlen_k=20))
    assert len(tried.wrong) == 1 and "over the budget" in tried.wrong[0]
    tried.refused = [lambda: torch.zeros(1)]
    tried._refuse(tried.refused[0])
    assert tried.wrong[1] == "call 0 was not refused"
