"""Hostile environments: no home, folders of others, FIFOs, links, dead writers, nonsense in variables.

A call goes on with at most one warning, nothing waits, and no file of somebody else is touched.
"""

import fcntl
import importlib.util
import io
import json
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

import dmattn_ops
from dmattn_ops import arch, choose, config, environment, shared_files, tune, tuning
from dmattn_ops.call import Call
from dmattn_ops.choose import Demand
from dmattn_ops.problem import NO_MASK, Options

ROOT = Path(__file__).parent.parent
PLACE = "Some GPU as SM8.6, 84 SMs, Triton 3.6.0"
DEMAND = Demand(4, 32, 4096, 4096, 64, 64, 2)
STRANGER = 54321  # an uid without a name
NO_HOME = ("HOME", "XDG_CACHE_HOME", "DMATTN_CACHE_DIR")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
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
    (part,) = config.parts(row)
    fitting = [v for v in part.values if config.shared_memory(row, part, v) <= arch.KNOWN[86].shared_memory]
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


# Reading the cache


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


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_no_cache_costs_one_warning_and_rows_keep_their_configurations(folder, kind):
    HOSTILE[kind](folder / "tuned.json")
    is_tuned, said = uses_the_cache()
    assert not is_tuned
    assert len(said) == 1 and str(folder / "tuned.json") in said[0] and len(said[0]) < 400, said
    assert uses_the_cache() == (False, [])


@pytest.mark.parametrize("name", ["", "no/such/folder", "~nobody-of-this-name/x", "\udcff", "none\n"])
def test_a_folder_that_is_not_there_is_no_reason_to_warn(name, monkeypatch, tmp_path):
    monkeypatch.setenv("DMATTN_CACHE_DIR", name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert uses_the_cache() == (False, [])


@pytest.mark.parametrize("name", ["/dev/null", "/dev/null/x", "x" * 5000, __file__])
def test_a_folder_that_cannot_be_one_costs_one_warning(name, monkeypatch):
    monkeypatch.setenv("DMATTN_CACHE_DIR", name)
    is_tuned, said = uses_the_cache()
    assert not is_tuned and len(said) == 1
    with pytest.raises(OSError, match=r"Not a directory|File name too long"):
        merge()


def test_relative_folders_and_tildes_are_understood(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DMATTN_CACHE_DIR", "here")
    merge()
    assert (tmp_path / "here" / "tuned.json").is_file() and uses_the_cache() == (True, [])
    monkeypatch.setenv("DMATTN_CACHE_DIR", "~/there")
    merge()
    assert (tmp_path / "home" / "there" / "tuned.json").is_file()
    monkeypatch.delenv("DMATTN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says its specification
    assert tuning.path() == tmp_path / "home" / ".cache" / "dmattn_ops" / "tuned.json"


def test_without_a_home_and_a_name_there_is_no_cache_and_tuning_says_what_to_do(monkeypatch):
    def nameless(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", nameless)
    for name in NO_HOME:
        monkeypatch.delenv(name, raising=False)
    assert uses_the_cache() == (False, [])
    with pytest.raises(OSError, match=r"no home directory .* DMATTN_CACHE_DIR"):
        merge()


def test_an_unreadable_cache_costs_one_warning_and_is_never_overwritten(public_folder, monkeypatch):
    monkeypatch.setenv("DMATTN_CACHE_DIR", str(public_folder))
    file = public_folder / "tuned.json"
    file.write_text("unreadable")
    file.chmod(0)
    public_folder.chmod(0o777)
    told = as_somebody_else(uses_the_cache)
    assert told.startswith("(False, ['") and told.count("cannot be read: Permission denied") == 1

    def error_of_merging():
        with pytest.raises(PermissionError) as raised:
            merge()
        return raised.value

    told = as_somebody_else(error_of_merging)
    assert "Permission denied" in told and str(file) in told
    file.chmod(0o600)
    assert file.read_text() == "unreadable"
    assert sorted(each.name for each in public_folder.iterdir()) == ["tuned.json", "tuned.lock"]


def test_entries_whose_evidence_is_made_up_are_not_believed(folder):
    escape = "\x1b[31m" * 10
    for changes in ({"date": escape}, {"date": None}, {"own_ms": escape}, {"tuned_ms": "1"}, {"own_ms": float("nan")}):
        content = cache_file()
        content["places"][PLACE][str(case())] |= changes
        (folder / "tuned.json").write_text(json.dumps(content))
        assert uses_the_cache() == (False, [])
    (folder / "tuned.json").write_text(json.dumps(cache_file()))
    assert uses_the_cache() == (True, [])


# Writing the cache


@pytest.fixture
def victim(tmp_path_factory):
    """A file that is not the cache's."""
    file = tmp_path_factory.mktemp("victim") / "precious"
    file.write_text("precious")
    file.chmod(0o640)
    yield file
    assert file.read_text() == "precious" and stat.S_IMODE(file.stat().st_mode) == 0o640


@pytest.mark.parametrize("make", ["symlink_to", "hardlink_to"])
def test_a_lock_that_is_a_link_to_another_file_leaves_that_alone(folder, victim, make):
    getattr(folder / "tuned.lock", make)(victim)
    if make == "symlink_to":
        with pytest.raises(OSError, match="it is a symbolic link"):
            merge()
    else:
        merge()  # a lock is only locked: never written to, emptied or removed


def test_a_dangling_link_as_lock_makes_no_file_elsewhere(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "file"
    (folder / "tuned.lock").symlink_to(elsewhere)
    with pytest.raises(OSError, match="it is a symbolic link"):
        merge()
    assert not elsewhere.exists()


@pytest.mark.parametrize("kind", ["FIFO", "directory", "link to itself", "device that never ends"])
@pytest.mark.parametrize("name", ["tuned.lock", "tuned.json"])
def test_what_is_no_file_is_neither_waited_for_nor_replaced(folder, kind, name):
    HOSTILE[kind](folder / name)
    before = os.lstat(folder / name)
    with pytest.raises(OSError, match=r"it is (no regular file|a symbolic link)|symbolic links"):
        merge()
    assert os.lstat(folder / name).st_ino == before.st_ino


def test_a_link_is_replaced_and_its_target_is_not_written_to(folder, victim):
    (folder / "tuned.json").symlink_to(victim)
    merge()
    assert not (folder / "tuned.json").is_symlink() and uses_the_cache() == (True, [])


def test_a_link_to_a_cache_is_read(folder):
    """Mounted configurations are links."""
    (folder / "data").write_text(json.dumps(cache_file()))
    (folder / "tuned.json").symlink_to("data")
    assert uses_the_cache() == (True, [])


def test_a_file_of_that_name_that_is_no_cache_is_kept(folder):
    (folder / "tuned.json").write_text('{"learning_rate": 0.1}')
    merge()
    assert (folder / "tuned.json.old").read_text() == '{"learning_rate": 0.1}'
    assert uses_the_cache() == (True, [])


def test_a_lock_that_is_held_for_ever_costs_a_timeout(folder):
    with (folder / "tuned.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"another process has held this lock for 0\.2 s"):
            merge()
        assert time.monotonic() - began < 5
        assert uses_the_cache() == (False, [])  # readers need no lock
    merge()
    assert uses_the_cache() == (True, [])


def test_a_lock_is_waited_for(folder, monkeypatch):
    monkeypatch.setattr(tuning, "LOCK_SECONDS", 10.0)
    other = (folder / "tuned.lock").open("w")
    fcntl.flock(other, fcntl.LOCK_EX)
    release = threading.Timer(0.3, other.close)
    release.start()
    merge()
    assert not release.is_alive() and uses_the_cache() == (True, [])


def test_the_lock_of_a_killed_process_is_free(folder):
    code = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen(
        [sys.executable, "-S", "-c", code, str(folder / "tuned.lock")], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(TimeoutError):
        merge()
    holder.kill()
    holder.communicate()
    merge()
    assert uses_the_cache() == (True, [])


def test_a_file_system_without_locks_is_written_to_with_a_warning(monkeypatch):
    def flock(file, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(UserWarning, match="has no locks"):
        merge()
    assert uses_the_cache() == (True, [])


def test_a_killed_writer_leaves_the_cache_whole_and_its_temporary_file_goes_later(folder, monkeypatch):
    merge()
    before = (folder / "tuned.json").read_bytes()
    child = os.fork()
    if child == 0:
        os.replace = lambda *arguments, **keywords: os.kill(os.getpid(), signal.SIGKILL)
        tuning.merge("another place", {case(): entry()})
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (folder / "tuned.json").read_bytes() == before
    (leftover,) = folder.glob("*.tmp")
    merge()
    assert leftover.exists()  # its writer might be alive, where there are no locks
    os.utime(leftover, (0, 0))
    (folder / "tuned.json-directory.tmp").mkdir()
    (folder / "unrelated.tmp").touch()
    os.utime(folder / "unrelated.tmp", (0, 0))
    merge()
    assert sorted(each.name for each in folder.glob("*.tmp")) == ["tuned.json-directory.tmp", "unrelated.tmp"]


def test_a_full_disk_leaves_the_old_cache_and_nothing_else(folder, monkeypatch):
    merge()
    before = (folder / "tuned.json").read_bytes()

    def fails(handle, mode):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(os, "fchmod", fails)
        merge()
    assert (folder / "tuned.json").read_bytes() == before
    assert sorted(each.name for each in folder.iterdir()) == ["tuned.json", "tuned.lock"]


def modes(folder):
    return {each.name: oct(stat.S_IMODE(each.stat().st_mode)) for each in folder.iterdir()}


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_cache_in_the_home_is_for_the_user_alone(monkeypatch, tmp_path, umask):
    monkeypatch.delenv("DMATTN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = os.umask(umask)
    try:
        merge()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "dmattn_ops").stat().st_mode) == 0o700
    assert modes(tmp_path / "dmattn_ops") == {"tuned.json": "0o600", "tuned.lock": "0o600"}


@pytest.mark.parametrize(
    ("mode", "file", "lock"),
    [(0o700, 0o600, 0o600), (0o755, 0o644, 0o644), (0o770, 0o640, 0o660), (0o1777, 0o644, 0o666)],
)
def test_who_can_list_a_named_folder_can_read_the_cache_in_it(folder, mode, file, lock):
    folder.chmod(mode)
    merge()
    assert modes(folder) == {"tuned.json": oct(file), "tuned.lock": oct(lock)}
    folder.chmod(0o700)


def test_several_users_tune_in_one_folder(public_folder, monkeypatch):
    monkeypatch.setenv("DMATTN_CACHE_DIR", str(public_folder))
    public_folder.chmod(0o777)
    merge()

    def merge_another():
        tuning.merge("another place", {case(): entry()})
        return sorted(tuning.entries())

    assert as_somebody_else(merge_another) == str(sorted([PLACE, "another place"]))
    assert uses_the_cache() == (True, [])


def test_the_file_of_another_user_in_a_sticky_folder_stays(public_folder, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("needs two users")
    monkeypatch.setenv("DMATTN_CACHE_DIR", str(public_folder))
    merge()
    public_folder.chmod(0o1777)
    before = (public_folder / "tuned.json").read_bytes()

    def merge_another():
        with pytest.raises(PermissionError) as raised:
            tuning.merge("another place", {case(): entry()})
        return type(raised.value).__name__, uses_the_cache()

    assert as_somebody_else(merge_another) == str(("PermissionError", (True, [])))
    assert (public_folder / "tuned.json").read_bytes() == before
    assert modes(public_folder) == {"tuned.json": "0o644", "tuned.lock": "0o644"}


def test_root_writes_into_no_home_of_somebody_else(monkeypatch, tmp_path):
    """As under sudo, which may keep HOME: the user could not change what root leaves there."""
    monkeypatch.delenv("DMATTN_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    if os.geteuid() == 0:
        os.chown(tmp_path, STRANGER, STRANGER)
    else:
        monkeypatch.setattr(shared_files, "_user", lambda: 0)
    with pytest.raises(PermissionError, match="belongs to another user"):
        merge()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_behind_the_link_of_another_user_is_not_written_to(monkeypatch, tmp_path):
    link = tmp_path / "link"
    link.symlink_to("/")
    if os.geteuid() == 0:
        os.lchown(link, STRANGER, STRANGER)
    monkeypatch.setattr(shared_files, "_user", lambda: STRANGER + 1)
    monkeypatch.setenv("DMATTN_CACHE_DIR", str(link))
    with pytest.raises(PermissionError, match="symbolic link of another user"):
        merge()


def test_a_folder_behind_the_users_own_link_is_written_to(monkeypatch, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.setenv("DMATTN_CACHE_DIR", str(tmp_path / "link"))
    merge()
    assert (tmp_path / "real" / "tuned.json").is_file()


# Tuning


@pytest.fixture
def tuned_in_no_time(monkeypatch):
    """Make tuning find 1 ms of 2 without running anything."""

    def tuned(task, candidates=0, measure=None, show=None):
        (part,) = config.parts(task.row)
        return tune.Result(task, part.put(task.row.config, part.values[-1]), 2.0, 1.0, ())

    monkeypatch.setattr(tune, "tune", tuned)
    monkeypatch.setattr(tuning, "place", lambda device, on: PLACE)


SHAPES = [tune.parse_shape("B1 H2 S96 D64"), tune.parse_shape("B1 H2 S64 D128")]


def tune_two():
    return tune.tune_shapes(SHAPES, torch.device("cpu"), ["forward"], on=arch.KNOWN[86])


def test_what_could_not_be_stored_is_stored_with_what_is_found_next(tuned_in_no_time, monkeypatch):
    merge, calls = tuning.merge, []

    def fails_once(at, found):
        calls.append(len(found))
        if len(calls) == 1:
            raise TimeoutError("locked")
        merge(at, found)

    monkeypatch.setattr(tuning, "merge", fails_once)
    assert len(tune_two()) == 2 and calls == [1, 2]
    assert len(tuning.entries()[PLACE]) == 2


def test_tuning_prints_what_it_found_before_it_says_that_it_is_not_stored(tuned_in_no_time, folder, capsys):
    (folder / "tuned.lock").mkdir()
    with pytest.raises(tune.NotStored, match="it is no regular file"):
        tune_two()
    assert capsys.readouterr().out.count("now 1.0000 ms") == 2


def test_the_command_says_that_nothing_can_be_stored_before_it_measures(tuned_in_no_time, folder, monkeypatch, capsys):
    (folder / "tuned.lock").mkdir()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("measures"))
    with pytest.raises(SystemExit):
        tune.main([])
    assert "it is no regular file" in capsys.readouterr().err


# Recording shapes


def call():
    query = torch.randn(1, 40, 2, 16, requires_grad=True)
    dmattn_ops.flash_dmattn_func(query, query, query).sum().backward()
    assert query.grad is not None


@pytest.mark.parametrize("kind", ["FIFO", "directory", "link to itself", "device that never ends", "below a file"])
def test_a_record_that_cannot_be_written_costs_one_warning_and_no_call(folder, monkeypatch, kind):
    file = folder / "record"
    if kind == "below a file":
        file.write_text("")
        file = file / "record"
    else:
        HOSTILE[kind](file)
    monkeypatch.setenv("DMATTN_RECORD", str(file))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call()
        dmattn_ops.flash_dmattn_func(*(torch.randn(1, 48, 2, 16) for _ in range(3)))
    told = [str(warning.message) for warning in said if "plain torch operations" not in str(warning.message)]
    assert len(told) == 1 and f"DMATTN_RECORD is '{file}'" in told[0]


def test_a_record_never_writes_through_a_link(folder, monkeypatch, victim):
    (folder / "record").symlink_to(victim)
    monkeypatch.setenv("DMATTN_RECORD", str(folder / "record"))
    with pytest.warns(UserWarning, match="it is a symbolic link"):
        call()


def test_a_record_is_no_file_of_another_user_where_everybody_writes(folder, monkeypatch, victim):
    file = folder / "record"
    file.write_text("theirs")
    if os.geteuid() == 0:
        os.chown(file, STRANGER, STRANGER)
    else:
        monkeypatch.setattr(shared_files, "_user", lambda: STRANGER + 1)
    monkeypatch.setenv("DMATTN_RECORD", str(file))
    folder.chmod(0o777)
    with pytest.warns(UserWarning, match="belongs to another user"):
        call()
    assert file.read_text() == "theirs"
    folder.chmod(0o700)
    monkeypatch.setattr(tuning, "_unusable", set())
    dmattn_ops.flash_dmattn_func(*(torch.randn(1, 41, 2, 16) for _ in range(3)))
    assert file.read_text().startswith('theirs{"batch": 1')


def test_a_record_that_is_unwritable_costs_one_warning(public_folder, monkeypatch):
    monkeypatch.setenv("DMATTN_RECORD", str(public_folder / "record"))
    public_folder.chmod(0o555)
    query = torch.randn(1, 40, 2, 16)
    options = Options(-5, 5, 0, 0, 1.0, 0.0, 0.0, False)

    def record():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for length in (40, 30):
                tuning.record(Call(query, query[:, :length], query, None, NO_MASK, None, None, None, options))
        return [str(warning.message) for warning in said]

    said = as_somebody_else(record)
    assert said.count("records no shapes") == 1 and "Permission denied" in said
    public_folder.chmod(0o755)


@pytest.mark.parametrize(
    "line",
    [
        "", "1", "[]", "null", "x", "[" * 100_000, '{"bias": 3}', '{"bias": ["1"]}', '{"batch": "2"}', '{"batch": 2.0}',
        '{"batch": true}', '{"batch": null}', '{"dtype": "load"}', '{"mask": "else"}', '{"softcap": "0"}', '{"causal": true}',
    ],
    ids=lambda line: line[:20],
)  # fmt: skip
def test_a_line_that_is_no_recorded_shape_is_named(folder, line):
    (folder / "record").write_text('{"batch": 2}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"line 2 of .* is no recorded shape"):
        tuning.read_record(folder / "record")


# Variables


@pytest.mark.parametrize(
    ("name", "reads"),
    [("DMATTN_CHECK", lambda: environment.checks()), ("FLASH_DMATTN_PROFILE_BACKWARD", lambda: environment.profiles_backward())],
)  # fmt: skip
def test_a_switch_is_read_at_each_call_and_nonsense_is_off_with_one_warning(name, reads, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    assert reads() is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value, on in (("1", True), ("0", False), ("", False), (" true ", True), ("ON", True), ("no", False)):
            monkeypatch.setenv(name, value)
            assert reads() is on
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for value in ("2", "banana", "2", "\udcff", "\x1b[31m"):
            monkeypatch.setenv(name, value)
            assert reads() is False
    assert [str(warning.message) for warning in said] == [
        f"{name} must be 1 or 0, got {value!r}: dmattn_ops takes it as 0"
        for value in ("2", "banana", "\udcff", "\x1b[31m")
    ]
    monkeypatch.delenv(name)
    assert reads() is False


def closed_stream():
    stream = open(os.devnull, "w")  # noqa: SIM115
    stream.close()
    return stream


class BrokenPipe(io.TextIOBase):
    """A standard error whose reader has gone."""

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("make", [lambda: None, closed_stream, BrokenPipe], ids=["none", "closed", "broken"])
def test_a_line_for_a_standard_error_that_is_not_there_is_dropped(make, monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    environment.tell("a line")
    monkeypatch.setattr(sys, "stderr", make())
    environment.tell("another line")
    assert written.getvalue() == "a line\n"


def test_calls_run_whatever_the_environment_holds(folder):
    """One process with nonsense in every variable, without a home or a name, as an unprivileged user where that can be."""
    os.mkfifo(folder / "fifo")
    hostile = {
        "DMATTN_CACHE_DIR": str(folder / "fifo"),
        "DMATTN_RECORD": str(folder / "fifo"),
        "DMATTN_CHECK": "perhaps",
        "FLASH_DMATTN_PROFILE_BACKWARD": "banana",
        "DMATTN_ARCH": "nonsense",
        "XDG_CACHE_HOME": "\udcff",
        "MAX_JOBS": "many",
    }
    code = """
import pwd, warnings, torch, dmattn_ops
from dmattn_ops import environment, tuning
def nameless(uid):
    raise KeyError(uid)
pwd.getpwuid = nameless
query = torch.randn(1, 40, 2, 16, requires_grad=True)
for length in (40, 30):
    dmattn_ops.flash_dmattn_func(query, query[:, :length], query[:, :length]).sum().backward()
assert query.grad.isfinite().all()
assert tuning.entries() == {} and environment.checks() is False
try:
    dmattn_ops.explain(query, query, query)
except ValueError as error:
    print(error)
"""
    kept = {name: value for name, value in os.environ.items() if name not in NO_HOME}
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], env=kept | hostile, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("DMATTN_ARCH must be one of 7.5, 8.0, ") and "got 'nonsense'" in done.stdout
    said = [line for line in done.stderr.splitlines() if "UserWarning" in line and "plain torch operations" not in line]
    named = ("DMATTN_RECORD", "FLASH_DMATTN_PROFILE_BACKWARD", "tuned configurations", "DMATTN_CHECK")
    assert len(said) == len(named) and all(any(name in line for line in said) for name in named), done.stderr


@pytest.mark.parametrize(("value", "jobs"), [("", None), ("many", None), ("3", 3), ("0", 1), ("-2", 1), ("99999", 8)])
def test_the_build_takes_a_number_of_jobs_or_its_own(value, jobs, monkeypatch, capsys):
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.setattr(setuptools, "setup", lambda **keywords: None)
    monkeypatch.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("setup_of_dmattn_ops", ROOT / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    monkeypatch.setenv("MAX_JOBS", value)
    assert setup.jobs(8) == (jobs or max(1, min(8, os.cpu_count() or 1)))
    assert ("MAX_JOBS must be a number" in capsys.readouterr().err) == (value == "many")
