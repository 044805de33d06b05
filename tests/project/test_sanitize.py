"""The sanitizers are run where a compiler has them, and where it has not, one sentence says so."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "csrc" / "sanitize.sh"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="needs the sources")


def probe(kind: str = "address", **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "DMATTN_SANITIZE_PROBE": "1", **variables}
    command = [str(SCRIPT), kind, sys.executable]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_where_the_compiler_has_the_library_the_sanitizers_are_not_skipped() -> None:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    named = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    if not os.path.isabs(named.stdout.strip()):
        pytest.skip(f"{compiler} has no libasan.so")
    done = probe(DMATTN_SANITIZE_OPTIONAL="1")
    assert done.returncode == 0 and done.stdout == "the sanitizers (address) can be run\n", done.stdout + done.stderr


@pytest.mark.parametrize(("optional", "status"), [("1", 0), ("", 1)])
def test_without_a_compiler_one_sentence_says_so(optional: str, status: int) -> None:
    done = probe(CXX="no-such-compiler", DMATTN_SANITIZE_OPTIONAL=optional)
    assert done.returncode == status
    assert done.stdout == "THE SANITIZERS (address) WERE NOT RUN: there is no compiler no-such-compiler\n"


def test_without_the_library_or_with_a_broken_one_a_sentence_says_so(tmp_path: pathlib.Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho libasan.so\n")
    compiler.chmod(0o755)
    done = probe(CXX=str(compiler), DMATTN_SANITIZE_OPTIONAL="1")
    assert done.returncode == 0 and done.stdout.endswith(f"NOT RUN: {compiler} has no libasan.so\n")
    compiler.write_text(f"#!/bin/sh\ncase $1 in -print*) echo {compiler};; *) echo no such option >&2; exit 1;; esac\n")
    done = probe(CXX=str(compiler), DMATTN_SANITIZE_OPTIONAL="1")
    assert done.returncode == 0 and "makes no program that runs (no such option)" in done.stdout


def test_the_tests_of_every_change_include_them() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert any(line.endswith("make sanitize-address") and not line.startswith("#") for line in lines)
