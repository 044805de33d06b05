"""Hostile things in the place of files, other users, and a cache of tuned configurations that a call would use."""

import json
import os
import shutil
import signal
import stat
import tempfile
import warnings
from pathlib import Path

import pytest

from dmattn_ops import environment
from dmattn_ops.call import Demand
from dmattn_ops.choice import arch, choose, config, tunable, tuning

PLACE = "Some GPU as SM8.6, 84 SMs, Triton 3.6.0"
DEMAND = Demand(4, 32, 4096, 4096, 64, 64, 2)
STRANGER = 54321  # an uid without a name
NO_HOME = ("HOME", "XDG_CACHE_HOME", "DMATTN_CACHE_DIR")


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """A cache of the test's own, nothing said yet, and an end to whatever hangs."""
    monkeypatch.setenv("DMATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(environment, "_said", set(), raising=False)
    monkeypatch.setattr(tuning, "LOCK_SECONDS", 0.2, raising=False)
    tuning.forget()

    def hangs(number, frame):
        raise AssertionError("hangs")

    previous = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(20)
    yield tmp_path
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)
    tuning.forget()


@pytest.fixture
def public_folder():
    """A folder that everybody may enter and read, which `tmp_path` is not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def choice():
    return choose.choose(config.FORWARD, arch.KNOWN[86], DEMAND, lambda kernel: [])


def case():
    return tuning.case_of("forward", choice().row, choice().arch, DEMAND, False, False)


def entry():
    row = choice().row
    (part,) = tunable.parts(row)
    fitting = [v for v in part.values if tunable.shared_memory(row, part, v) <= arch.KNOWN[86].shared_memory]
    return tuning.entry_of(row, part.put(row.config, fitting[-1]), 1.0, 0.75, "2026-11-21")


def cache_file():
    return {"version": 1, "places": {PLACE: {str(case()): entry()}}}


def merge():
    tuning.merge(PLACE, {case(): entry()})


def uses_the_cache():
    """Return whether a call on a GPU gets a tuned configuration, else its row's own, and the warnings of two such calls."""
    tuning.forget()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = [tuning.tuned(choice(), "forward", DEMAND, False, False, PLACE).row.config for _ in range(2)]
    assert found[0] == found[1]
    return found[0] != choice().row.config, [str(warning.message) for warning in said]


def as_somebody_else(function):
    """Return what a function of an unprivileged user returns, as text; ours may be root, whom no mode keeps out."""
    if os.geteuid() != 0:
        return str(function())
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            told = str(function())
        except BaseException as error:
            told = f"raised {error!r}"
        os.write(writing, told.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        text = told.read()
    os.waitpid(child, 0)
    return text


def sparse(file):
    with file.open("wb") as out:
        out.truncate(1 << 36)


HOSTILE = {
    "FIFO": os.mkfifo,
    "directory": Path.mkdir,
    "link to itself": lambda file: file.symlink_to(file),
    "device that never ends": lambda file: file.symlink_to("/dev/zero"),
    "terminal": lambda file: file.symlink_to("/dev/tty"),
    "64 GB": sparse,
    "endless brackets": lambda file: file.write_bytes(b"[" * 200_000),
    "endless objects": lambda file: file.write_bytes(b'{"a":' * 100_000),
    "endless number": lambda file: file.write_bytes(b'{"version": ' + b"9" * 100_000 + b"}"),
    "long version": lambda file: file.write_text(json.dumps({"version": "x" * 100_000, "places": {}})),
    "noise": lambda file: file.write_bytes(bytes(range(256)) * 9),
    "truncated": lambda file: file.write_text(json.dumps(cache_file())[:-20]),
}


@pytest.fixture
def victim(tmp_path_factory):
    """A file that is not the cache's."""
    file = tmp_path_factory.mktemp("victim") / "precious"
    file.write_text("precious")
    file.chmod(0o640)
    yield file
    assert file.read_text() == "precious" and stat.S_IMODE(file.stat().st_mode) == 0o640
