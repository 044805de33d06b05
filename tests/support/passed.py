"""Which tests passed before on the same source: where a GPU is lent for minutes at a time, its rounds add up.

`DMATTN_TEST_PASSED=FILE pytest ...` notes in FILE each test that passes, and leaves out what FILE already has. A line counts for
the source that it was noted with (the package, `meta`, `csrc`, `tests/support` and the file of the test) and for the
architecture whose kernels ran, so that FILE may be kept while both change. Tests that fail or are skipped are not noted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("dmattn_ops", "meta", "csrc", "tests/support")
SUFFIXES = {".py", ".cpp", ".h"}


@cache
def of_source() -> str:
    """Return a digest of what all tests run, and of the architecture that is asked for."""
    digest = hashlib.sha256()
    for name in ("DMATTN_ARCH", "TRITON_OVERRIDE_ARCH", "DMATTN_TEST_COMPILED"):
        digest.update(f"{name}={os.environ.get(name, '')}\n".encode())
    files = (path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)
    for path in sorted(files):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


@cache
def of_test(path: Path) -> str:
    """Return a digest of what the tests of a file depend on."""
    return hashlib.sha256(of_source().encode() + path.read_bytes()).hexdigest()[:16]


def noted() -> Path | None:
    """Return the file that `DMATTN_TEST_PASSED` names, or None."""
    name = os.environ.get("DMATTN_TEST_PASSED")
    return Path(name) if name else None


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that passed before."""
    file = noted()
    if file is None or not file.exists():
        return []
    before = {tuple(json.loads(line)) for line in file.read_text().splitlines()}
    return [item for item in items if (item.nodeid, of_test(item.path)) in before]


class Notes:
    """Notes a test when all of it has passed, in the process that collects the reports."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.called: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = noted()
        if file is None or not report.passed or os.environ.get("PYTEST_XDIST_WORKER"):
            return
        if report.when == "call":
            self.called.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid in self.called:
            path = self.root / report.nodeid.partition("::")[0]
            with file.open("a") as lines:
                lines.write(json.dumps([report.nodeid, of_test(path)]) + "\n")
