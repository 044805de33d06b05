"""Rounds of tests add up: what passed on the same source is left out, and nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parents[1] / "support"
CONFTEST = """
import passed

def pytest_configure(config):
    config.pluginmanager.register(passed.Notes(config.rootpath))

def pytest_collection_modifyitems(config, items):
    gone = passed.left_out(items)
    config.hook.pytest_deselected(items=gone)
    items[:] = [item for item in items if item not in gone]
"""
TESTS = """
import pytest

@pytest.fixture
def broken_at_the_end():
    yield
    raise ValueError

@pytest.mark.parametrize("number", [1, 2])
def test_right(number): pass
def test_wrong(): assert False
def test_ends_badly(broken_at_the_end): pass
def test_skipped(): pytest.skip("no")
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def round_of_tests(*arguments, **variables):
        names = {"DMATTN_TEST_PASSED": str(tmp_path / "passed"), "PYTHONPATH": str(SUPPORT), **variables}
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "DMATTN"))}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
            cwd=tmp_path, env=environment | names, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        return done.stdout.splitlines()[-1]

    return round_of_tests


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "two workers"])
def test_a_second_round_runs_what_has_not_passed(run, workers):
    first, second = run(*workers), run(*workers)
    assert "1 failed, 3 passed, 1 skipped, 1 error" in first
    assert "1 failed, 1 passed, 1 skipped" in second and "1 error" in second  # its call passes, and its end does not


def test_what_passed_on_other_source_counts_no_more(run, tmp_path):
    run()
    assert "2 deselected" in run()
    assert "deselected" not in run(DMATTN_ARCH="8.0")
    file = tmp_path / "test_some.py"
    file.write_text(file.read_text() + "\n")
    assert "deselected" not in run()
