"""Variables of the environment: how they are read, and that nonsense in them costs a call one warning at most."""

import io
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import dmattn_ops
from dmattn_ops import environment
from dmattn_ops.call import NO_MASK, Call, Options
from dmattn_ops.choice import shared_files, tuning
from dmattn_ops.dispatch import run
from dmattn_ops.kernels import native
from tests.support import hostile
from tests.support.hostile import HOSTILE, NO_HOME, STRANGER, as_somebody_else

ROOT = Path(__file__).parents[2]
folder, public_folder, victim = hostile.own_folder, hostile.public_folder, hostile.victim


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
from dmattn_ops import environment; from dmattn_ops.choice import tuning
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


@pytest.mark.parametrize("compiled", [False, True])
def test_warnings_name_the_line_of_the_user(compiled, monkeypatch):
    attend = dmattn_ops.flash_dmattn_func
    attend = torch.compile(attend, backend="aot_eager") if compiled else attend
    query = torch.randn(1, 4, 1, 8, requires_grad=True)
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(native, "reason", lambda: "there is a reason")
    run.cpu_kernels.cache_clear()
    try:
        with pytest.warns(UserWarning, match="slowly: there is a reason$") as said:
            attend(query, query, query)
    finally:
        run.cpu_kernels.cache_clear()
    assert [warning.filename for warning in said] == [__file__]
