"""Installing removes nothing, whatever the command says, and leaves nothing wrong, wherever it was ended."""

import sys
import sysconfig

import pytest
from checkouts import LIBRARY, Checkout, made_up_torch

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the C++ kernels are not built on Windows")

COMMANDS = [  # and what those say that would remove sources
    ("build --build-lib .", ""),
    ("build --build-lib . --force", ""),
    ("build --build-platlib .", ""),
    ("build --build-purelib . --build-lib {folder}", ""),
    ("build --build-lib dmattn_ops/..", ""),
    ("build --build-base .", ""),
    ("build --build-base linked", ""),
    ("build --build-lib ..", ""),
    ("build_py --build-lib . --force", ""),
    ("build_ext --build-lib . --force", ""),
    ("build_ext --inplace --force --build-temp .", ""),
    ("build_clib --build-clib . --build-temp . --force", ""),
    ("install --root {folder}/stage --single-version-externally-managed --record {folder}/record", ""),
    ("clean --all", ""),
    ("clean --all --build-lib .", "clean would replace or remove the sources in {folder}: name another --build-lib"),
    ("clean --build-temp csrc", "clean would replace or remove the sources in {folder}/csrc: name another --build-temp"),
    ("build --build-lib . clean --all", "name another --build-lib"),
    ("bdist_wheel --bdist-dir .", "bdist_wheel would replace or remove the sources in {folder}: name another --bdist-dir"),
    ("bdist_wheel --bdist-dir ..", "name another --bdist-dir"),
    ("install_lib --skip-build --install-dir .", "name another --install-dir"),
]  # fmt: skip


def test_no_command_removes_sources(tmp_path):
    checkout, torch_folder = Checkout(tmp_path), made_up_torch(tmp_path, "2.13.0")
    root = checkout.folder
    beside = root.parent / "dmattn_ops" / "another.py"
    beside.parent.mkdir()
    beside.touch()
    (root / "linked").mkdir()
    (root / "linked" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}").symlink_to(root)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    for command, message in COMMANDS:
        words = command.format(folder=root).split()
        said = checkout.run("setup.py", "-q", *words, path=[torch_folder], returns=1 if message else 0)
        assert message.format(folder=root) in said
        after = {path: path.read_bytes() for path in before if path.exists()}
        assert after == before and beside.exists(), command


DIE = """
import os, pathlib, shutil, sys
left = [int(sys.argv.pop(1))]
def dying(function):
    def wrapped(*arguments, **keywords):
        if any("libdmattn" in str(argument) for argument in arguments):
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)
        return function(*arguments, **keywords)
    return wrapped
os.replace, os.unlink, shutil.copy = map(dying, (os.replace, os.unlink, shutil.copy))
pathlib.Path.write_text = dying(pathlib.Path.write_text)
import runpy
runpy.run_path("setup.py", run_name="__main__")
"""


def test_a_build_that_was_ended_anywhere_leaves_no_library_of_other_sources(tmp_path):
    """A library here is the text of a source at the time of linking."""
    checkout, torch_folder = Checkout(tmp_path), made_up_torch(tmp_path, "2.13.0")
    source = checkout.folder / "csrc" / "cpu" / "library.cpp"
    checkout.write_compiler(then='cp csrc/cpu/library.cpp "$out"')
    built, first = checkout.folder / "dmattn_ops" / LIBRARY, source.read_text()
    checkout.install(torch_folder)
    ended = 0
    while True:
        source.write_text(f"{first}// {ended}\n")
        words = ("-c", DIE, str(ended), "-q", "build_ext", "--inplace")
        try:
            checkout.run(*words, path=[torch_folder], returns=9)
        except AssertionError:  # nothing more to be ended at
            break
        assert built.read_text() in (first, source.read_text())  # whole
        ended += 1
        source.write_text(first)
        checkout.install(torch_folder)
        assert built.read_text() == first, f"ended at step {ended}"
    assert ended >= 4
    assert built.read_text() == source.read_text()
