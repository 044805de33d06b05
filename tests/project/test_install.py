"""Installing: what is built is kept and serves every torch, one wheel serves every Python, and failures say what to do.

The environments are made up: a torch of one version file, and a compiler that writes down how it was called.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from functools import partial
from pathlib import Path

import pytest
import setuptools
import torch
from checkouts import LIBRARY, Checkout, made_up_torch

from dmattn_ops.kernels import native
from dmattn_ops.version import __version__, node_library

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the C++ kernels are not built on Windows")

ROOT = Path(__file__).parents[2]
SOURCES = sum(len(list((ROOT / "csrc" / part).glob("*.cpp"))) for part in ("cpu", "cuda"))


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


@pytest.fixture
def make_torch(tmp_path):
    return partial(made_up_torch, tmp_path)


@pytest.fixture
def only_setuptools(tmp_path):
    """A folder to import setuptools from, and nothing else of this environment."""
    folder = tmp_path / "setuptools_only"
    folder.mkdir()
    packages = Path(setuptools.__file__).parent.parent
    for name in ("setuptools", "_distutils_hack", f"setuptools-{setuptools.__version__}.dist-info"):
        (folder / name).symlink_to(packages / name)
    return folder


@pytest.fixture
def empty_environment(tmp_path):
    """The interpreter of a new virtual environment without packages."""
    venv.create(tmp_path / "empty", symlinks=True)
    return tmp_path / "empty" / "bin" / "python"


def test_what_was_built_with_one_torch_serves_another(checkout, make_torch):
    older, newer = make_torch("2.13.0+cpu", "older"), make_torch("2.14.0+cu130", "newer")
    printed = checkout.install(older)
    assert f"compiling the C++ kernels with the headers of torch 2.13.0+cpu in {older / 'torch'}" in printed
    compiled = checkout.log.read_text()
    assert f"-DTORCH_TARGET_VERSION={(2 << 56) + (11 << 48):#x}" in compiled
    assert checkout.compiled() == SOURCES
    assert "the C++ kernels are built already" in checkout.install(newer)
    assert checkout.compiled() == 0
    assert checkout.libraries() == [LIBRARY]


@pytest.mark.parametrize("changed", ["csrc/cpu/library.cpp", "csrc/cuda/plans.h", "setup.py", "flags"])
def test_what_changed_since_is_built_again_whatever_its_time_says(changed, checkout, make_torch):
    folder = make_torch("2.13.0")
    checkout.install(folder)
    assert checkout.compiled() == SOURCES
    path = checkout.folder / changed
    variables = {"CXX": f"{checkout.compiler} -DANOTHER"} if changed == "flags" else {}
    if changed != "flags":
        comment = "//" if changed.startswith("csrc") else "#"
        path.write_text(f"{path.read_text()}{comment} another line\n")
        os.utime(path, (0, 0))
    checkout.install(folder, **variables)
    assert checkout.compiled() == SOURCES
    checkout.install(folder, **variables)
    assert checkout.compiled() == 0


def test_a_wheel_holds_the_library_and_no_module_of_an_earlier_wheel_and_serves_every_python(checkout, make_torch):
    gone, path = checkout.folder / "dmattn_ops" / "gone.py", [make_torch("2.13.0")]
    gone.touch()
    checkout.run("setup.py", "-q", "bdist_wheel", "-d", "first", path=path)
    gone.unlink()
    checkout.run("setup.py", "-q", "bdist_wheel", "-d", "second", path=path)
    held = []
    for name in ("first", "second"):
        [wheel] = (checkout.folder / name).glob("*.whl")
        assert re.fullmatch(rf"dmattn_ops-{re.escape(__version__)}-py3-none-\w+\.whl", wheel.name)
        assert not wheel.name.endswith("-any.whl")
        files = zipfile.ZipFile(wheel)
        held.append(set(files.namelist()))
        tags = files.read(f"dmattn_ops-{__version__}.dist-info/WHEEL").decode()
        assert "Tag: py3-none-" in tags and "Root-Is-Purelib: false" in tags
    first, second = held
    assert second < first and first - second == {"dmattn_ops/gone.py"}
    assert {
        f"dmattn_ops/{LIBRARY}",
        "dmattn_ops/py.typed",
        "dmattn_ops/__init__.pyi",
        "dmattn_ops/meta/__init__.py",
    } <= second
    assert any(name.startswith("dmattn_ops/resource_tables/") for name in second)
    assert {name.split("/")[0] for name in second} == {"dmattn_ops", f"dmattn_ops-{__version__}.dist-info"}


def test_an_isolated_build_is_for_the_torch_of_its_environment(checkout, only_setuptools):
    """Pip isolates a build by starting the environment's interpreter without its packages: so does -S."""
    hook = "from setuptools import build_meta as b; print(b.get_requires_for_build_wheel()); b.build_editable('wheels')"
    printed = checkout.run("-S", "-c", hook, path=[only_setuptools])
    assert "[]\n" in printed
    found = f"with the headers of torch {torch.__version__} in {Path(torch.__file__).parent}\n"
    assert f"compiling the C++ kernels {found}" in printed
    has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    assert (f"compiling the C++ derivatives {found}" in printed) == has_headers
    assert checkout.libraries() == [*[node_library(torch.__version__)] * has_headers, LIBRARY]


@pytest.mark.parametrize("version, asked", [(None, ["torch>=2.11"]), ("2.10.1", ["torch>=2.11"]), ("2.11.0", [])])
def test_a_torch_is_fetched_only_where_the_environment_has_none_that_will_do(
    version, asked, checkout, make_torch, only_setuptools, empty_environment
):
    path = [only_setuptools] if version is None else [only_setuptools, make_torch(version)]
    hook = "from setuptools import build_meta; print(build_meta.get_requires_for_build_wheel())"
    printed = checkout.run("-c", hook, python=[empty_environment], path=path)
    assert f"{asked}\n" in printed
    assert ("torch 2.10.1" in printed and "is too old: 2.11 or newer is needed" in printed) == (version == "2.10.1")


def test_without_torch_the_package_installs_and_says_what_is_missing(checkout, only_setuptools, empty_environment):
    printed = checkout.install(only_setuptools, python=[empty_environment])
    told = "THE C++ KERNELS ARE NOT BUILT: there is no torch here to build with; install torch first, then this again"
    assert told in printed
    assert checkout.libraries() == []


def test_a_source_distribution_that_was_made_without_torch_holds_the_sources(
    checkout, only_setuptools, empty_environment
):
    checkout.run("setup.py", "-q", "sdist", python=[empty_environment], path=[only_setuptools])
    [archive] = (checkout.folder / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.split("/", 1)[-1] for name in files.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*")}
    assert sources | {"setup.py", "pyproject.toml", "dmattn_ops/meta/__init__.py"} <= names


def test_the_sources_use_only_macros_that_every_torch_has():
    """Torch 2.12 renamed one of its stable interface, and sources that named it could not be built with torch 2.11."""
    in_2_11 = {"STABLE_TORCH_LIBRARY", "STABLE_TORCH_LIBRARY_IMPL", "TORCH_BOX"}
    for path in (ROOT / "csrc").rglob("*.*"):
        used = set(re.findall(r"\b(?:STABLE_|STD_)?(?:TORCH|AOTI|C10)_[A-Z_]+\b", path.read_text()))
        assert used <= in_2_11, f"{path}: not in torch 2.11, or not known to be there: {used - in_2_11}"


def told(printed):
    """Return the lines that the build log has from us."""
    return [line.removeprefix("dmattn_ops: ") for line in printed.splitlines() if line.startswith("dmattn_ops: ")]


def test_without_a_compiler_the_package_installs_and_says_so(checkout, make_torch):
    lines = told(checkout.install(make_torch("2.13.0"), CXX="/nowhere/g++"))
    assert lines == ["THE C++ KERNELS ARE NOT BUILT: there is no C++ compiler here (/nowhere/g++ was not found)"]
    assert checkout.libraries() == []


def test_where_compiling_fails_the_package_installs_and_says_so(checkout, make_torch):
    folder = make_torch("2.13.0")
    checkout.write_compiler(then="echo 'error: no such header' >&2; exit 1")
    printed = checkout.install(folder)
    assert "error: no such header" in printed
    assert any(line.startswith("THE C++ KERNELS ARE NOT BUILT: ") for line in told(printed))
    assert checkout.libraries() == []
    checkout.write_compiler()
    checkout.install(folder)
    assert checkout.libraries() == [LIBRARY]


@pytest.mark.parametrize("jobs", ["foo", "-2", "1.5", "0", " 3 ", ""])
def test_a_wrong_number_of_jobs_does_not_stop_the_build(jobs, checkout, make_torch):
    lines = told(checkout.install(make_torch("2.13.0"), MAX_JOBS=jobs))
    assert any(line.startswith(f"MAX_JOBS={jobs!r} is not a number") for line in lines) == (
        jobs in ("foo", "-2", "1.5")
    )
    assert checkout.compiled() == SOURCES


def test_an_old_setuptools_is_refused_in_one_line(checkout, tmp_path):
    (tmp_path / "old" / "setuptools").mkdir(parents=True)
    (tmp_path / "old" / "setuptools" / "__init__.py").write_text("__version__ = '65.5.0'\n")
    with pytest.raises(
        AssertionError, match=r"needs setuptools 77 or newer, and 65\.5\.0 is installed: upgrade it"
    ) as error:
        checkout.run("setup.py", "--version", path=[tmp_path / "old"])
    assert "Traceback" not in str(error.value)


def test_the_version_is_written_once(checkout, make_torch):
    assert checkout.run("setup.py", "--version", path=[make_torch("2.13.0")]).split()[-1] == __version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
    assert __version__ not in (ROOT / "pyproject.toml").read_text()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_is_ready_for_the_torch_that_was_there(checkout, make_torch, empty_environment):
    folder, prefix = make_torch("2.13.0"), empty_environment.parent.parent
    version = folder / "torch" / "version.py"
    stamp = checkout.folder / "build" / f"ready{prefix}".replace("/", "-")
    stamp.parent.mkdir()

    def steps():
        command = ["make", "-n", "setup", f"PYTHON={empty_environment}"]
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        return subprocess.run(
            command, cwd=checkout.folder, env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert f"cp '{version}'" in steps()
    shutil.copy(version, stamp)
    assert "Nothing to be done" in steps()
    version.write_text("__version__ = '2.14.0'\n")
    os.utime(version, (0, 0))  # a package manager may keep the time of the release
    assert "pip install" in steps()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_says_that_its_python_is_none():
    done = subprocess.run(
        ["make", "-n", "train", "PYTHON=/none"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "PYTHON=/none is no program: name a Python that has torch, or leave PYTHON out" in done.stderr
    assert "bash" not in done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_training_installs_nothing_that_only_tests_need_and_each_command_sets_up_all_that_it_needs(checkout):
    def steps(target):
        command = ["make", "-n", target]
        done = subprocess.run(command, cwd=checkout.folder, capture_output=True, text=True, check=True)
        return done.stdout

    training, testing, sweeping = steps("train"), steps("test"), steps("sweep")
    assert "install --quiet -e '.[train]'" in training
    assert "triton" not in training
    assert "[test" not in training
    assert "install --quiet -e '.[test,train]'" in testing
    assert "triton" in testing
    assert "[frameworks]" not in training + testing
    assert "install --quiet -e '.[test,train]'" in sweeping and "install --quiet -e '.[frameworks]'" in sweeping
    assert "-m venv .venv" in training
    assert "-m venv .venv" in testing


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_what_make_advises_where_it_cannot_install_makes_an_environment_that_can(
    checkout, make_torch, empty_environment
):
    environment = {**os.environ, "PYTHONPATH": str(make_torch("2.13.0"))}
    command = ["make", "test-gpu", f"PYTHON={empty_environment}"]  # which has no pip
    done = subprocess.run(
        command, cwd=checkout.folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    advised = [line.strip() for line in done.stdout.splitlines() if line.startswith("    ")]
    [needed] = re.findall(r'requires = \["(setuptools>=\d+)"\]', (ROOT / "pyproject.toml").read_text())
    assert advised == [
        f"{empty_environment} -m venv --system-site-packages DIR",
        f"DIR/bin/python -m pip install --upgrade '{needed}'",
        "make test-gpu PYTHON=DIR/bin/python",
    ]


@pytest.fixture
def reason(tmp_path, monkeypatch):
    """Return `native.reason` of a folder with files of these names."""

    def ask(*names):
        for name in names:
            (tmp_path / name).write_text("not a library")
        monkeypatch.setattr(native, "_FOLDER", tmp_path)
        return native.reason.__wrapped__()

    return ask


def test_without_a_library_it_says_what_to_do(reason, tmp_path):
    text = reason("_native-torch1.0.0+cpu.cpython-27-other.so")  # of an earlier version
    assert text.startswith(
        "the C++ kernels are not built: `pip install --force-reinstall --no-deps --no-cache-dir FOLDER`"
    )
    (tmp_path.parent / "setup.py").touch()
    assert (
        f"`{sys.executable} -m pip install --no-build-isolation --no-deps -e {tmp_path.parent}` builds them" in reason()
    )


def test_without_a_library_and_a_compiler_it_asks_for_a_compiler(reason, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    ways = "install a C++ compiler (GCC or Clang) and then this package again, or a wheel of it that holds them"
    assert reason() == f"the C++ kernels are not built: {ways}"


def test_a_library_that_does_not_load_is_a_reason_and_no_crash(reason):
    assert reason(LIBRARY).startswith(f"the C++ kernels in {LIBRARY} do not load into torch {torch.__version__} (")


@pytest.mark.skipif(not native.available(), reason=f"THE C++ KERNELS ARE NOT TESTED: {native.reason()}")
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_the_library_asks_torch_for_nothing_but_its_stable_interface():
    """C++ names of torch belong to one version; what the stable interface has is C, and its headers know the target."""
    command = ["nm", "-D", "--undefined-only", "--demangle", ROOT / "dmattn_ops" / LIBRARY]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "torch_call_dispatcher" in names
    assert not re.findall(r"\b(?:at|c10|torch|caffe2)::|\bPy[A-Z_]", names)


def test_the_sample_for_the_wheel_exists():
    """The script runs under several versions of Python and torch, with a network: nothing else notices a file that has moved."""
    named = re.findall(r"tests/\w+/test_[\w{},]+\.py", (ROOT / ".ci" / "wheel").read_text())
    assert named
    for each in named:
        before, *rest = re.split(r"[{}]", each)
        for name in [before + part + rest[1] for part in rest[0].split(",")] if rest else [before]:
            assert Path(ROOT, name).exists(), name
