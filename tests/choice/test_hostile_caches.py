"""The cache of tuned configurations among hostile files, folders of others, dead writers: nothing waits, nothing is lost.

A call goes on with one warning at most, and no file of somebody else is touched.
"""

import fcntl
import json
import os
import pwd
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest
import torch

from dmattn_ops.choice import arch, shared_files, tunable, tuning
from dmattn_ops.tune import command
from tests.support import hostile
from tests.support.hostile import (
    HOSTILE,
    NO_HOME,
    PLACE,
    STRANGER,
    as_somebody_else,
    cache_file,
    case,
    entry,
    merge,
    uses_the_cache,
)

folder, public_folder, victim = hostile.own_folder, hostile.public_folder, hostile.victim


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
        (part,) = tunable.parts(task.row)
        return command.Result(task, part.put(task.row.config, part.values[-1]), 2.0, 1.0, ())

    monkeypatch.setattr(command, "tune", tuned)
    monkeypatch.setattr(tuning, "place", lambda device, on: PLACE)


SHAPES = [command.parse_shape("B1 H2 S96 D64"), command.parse_shape("B1 H2 S64 D128")]


def tune_two():
    return command.tune_shapes(SHAPES, torch.device("cpu"), ["forward"], on=arch.KNOWN[86])


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
    with pytest.raises(command.NotStored, match="it is no regular file"):
        tune_two()
    assert capsys.readouterr().out.count("now 1.0000 ms") == 2


def test_the_command_says_that_nothing_can_be_stored_before_it_measures(tuned_in_no_time, folder, monkeypatch, capsys):
    (folder / "tuned.lock").mkdir()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("measures"))
    with pytest.raises(SystemExit):
        command.main([])
    assert "it is no regular file" in capsys.readouterr().err
