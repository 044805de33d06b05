"""Build the optional C++ libraries; everything else is in pyproject.toml.

`dmattn_ops/libdmattn.so` holds the CPU kernels, and `dmattn_ops/_autograd.*.so` the derivative of plain calls on a GPU.

The first is written against torch's stable interface: one file serves every torch from 2.11 on and every Python, and so
does a wheel that holds it. The second is for the torch and the Python that it is built with, which its name says; others do
without it, as they do where Python's headers are missing. What the compiler writes is kept in `build/native-<key>`, where
the key stands for the compiler and its flags: installing again compiles again exactly where one of these or a source
changed, whichever torch is there.

Torch, of which only the headers are read, is found without being imported, and not only on `sys.path`: where pip isolates
the build, the torch of the environment that pip installs into is used, and only where that has none, one is fetched.

Without a compiler or torch the package installs without the libraries, and `native.reason()` says so.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import setuptools

if int(setuptools.__version__.split(".")[0]) < 77:  # what pyproject.toml asks for, which only isolated builds read
    raise SystemExit(
        f"dmattn_ops: building needs setuptools 77 or newer, and {setuptools.__version__} is installed: upgrade it"
        " (pip install --upgrade setuptools), or leave out --no-build-isolation"
    )

from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import BaseError, CCompilerError

ROOT = Path(__file__).resolve().parent
SOURCES = ("dmattn_ops", "csrc", "meta", "tests", "docs", "examples", "benchmarks")  # no command removes these
OLDEST_TORCH = (2, 11)
VERSION_FILE = "dmattn_ops/version.py"
# What torch's headers may offer: the library loads into this version and every newer one.
TARGET = f"-DTORCH_TARGET_VERSION={OLDEST_TORCH[0] << 56 | OLDEST_TORCH[1] << 48:#x}"
KERNELS, DERIVATIVES = "dmattn_ops.libdmattn", "dmattn_ops._autograd"
CALLED = {KERNELS: "the C++ kernels", DERIVATIVES: "the C++ derivatives"}
FLAGS = ["-O3", "-g0", "-std=c++20", "-fvisibility=hidden", "-Wno-psabi"]
MATH_FLAGS = ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
LINK_FLAGS = ["-Wl,-undefined,dynamic_lookup"] if sys.platform == "darwin" else ["-Wl,--as-needed"]


def say(message: str) -> None:
    """Write one line to the build log (pip shows it with -v)."""
    print(f"dmattn_ops: {message}", file=sys.stderr, flush=True)


class Torch(NamedTuple):
    """An installed torch: its version, as in `torch.__version__`, and its folder."""

    version: str
    folder: Path


VERSIONS = runpy.run_path(VERSION_FILE)


def find_torch() -> Torch | None:
    """Return the torch to build with: the one that can be imported here, else the one of the environment.

    An isolated build imports nothing that is installed, but pip runs it with the interpreter of the environment that it
    installs into; started without pip's variables, this finds what will be imported there.
    """
    here = importlib.util.find_spec("torch")
    origin = here.origin if here else _origin_in_environment()
    if not origin or not (path := Path(origin).with_name("version.py")).exists():
        return None
    found = Torch(runpy.run_path(str(path))["__version__"], path.parent)
    numbers = re.match(r"(\d+)\.(\d+)", found.version)
    if numbers and (int(numbers[1]), int(numbers[2])) >= OLDEST_TORCH:
        return found
    say(f"torch {found.version} in {found.folder} is too old: 2.11 or newer is needed")
    return None


def _origin_in_environment() -> str:
    """Return the file that `import torch` would load in a plain start of this interpreter, "" where there is none."""
    code = "import importlib.util; found = importlib.util.find_spec('torch'); print(found and found.origin or '')"
    done = subprocess.run([sys.executable, "-E", "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def compile_jobs(sources: int) -> int:
    """Return how many sources to compile at a time: `MAX_JOBS`, or one for each processor."""
    processors, wanted = os.cpu_count() or 1, os.environ.get("MAX_JOBS", "").strip()
    if wanted and not wanted.isdecimal():
        say(f"MAX_JOBS={wanted!r} is not a number, so {processors} sources are compiled at a time")
        wanted = ""
    return max(1, min(sources, int(wanted or processors)))


def digest(parts: Iterable[str]) -> str:
    """Return a key of a sequence of texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def fitting(sources: str, library: Path) -> str:
    """Return what the stamp of a library says that was built from sources with this digest."""
    return f"{sources} {hashlib.sha256(library.read_bytes()).hexdigest()}"


TORCH = find_torch()


def holds_sources(folder: Path) -> bool:
    """Return whether removing a folder would remove sources: it is a folder of them, or lies in one, or one lies in it."""
    place = folder.resolve()
    return ROOT.is_relative_to(place) or any(place.is_relative_to(ROOT / name) for name in SOURCES)


class Commands(Distribution):
    """Refuse commands that would clear a folder of sources: `clean --all --build-lib .`, `bdist_wheel --bdist-dir .`."""

    def run_command(self, command: str) -> None:
        """Run a command of setuptools."""
        asked = self.get_command_obj(command)
        asked.ensure_finalized()
        cleared = []
        if command == "clean" or command.startswith("bdist"):
            names = ("build_temp", "build_lib", "build_scripts", "bdist_base", "bdist_dir")
            cleared = [(name, Path(found)) for name in names if (found := getattr(asked, name, None))]
        if command == "install_lib":
            cleared = [("install_dir", Path(asked.install_dir, "dmattn_ops"))]
        for name, folder in cleared:
            if holds_sources(folder):
                option = name.replace("_", "-")
                raise SystemExit(
                    f"dmattn_ops: {command} would replace or remove the sources in {folder.resolve()}: name another --{option}"
                )
        super().run_command(command)


class Build(build):
    """Forget modules that an earlier wheel was made of: setuptools would put them into this one.

    That is done in the folder that setuptools chooses. One that the user names (`--build-lib`) may hold anything.
    """

    def finalize_options(self) -> None:
        """Remember whether the folder was named."""
        self.named = any((self.build_lib, self.build_purelib, self.build_platlib))
        super().finalize_options()

    def run(self) -> None:
        """Clear the folder, and build."""
        modules = Path(self.build_lib, "dmattn_ops")
        if not self.named and not holds_sources(modules):
            shutil.rmtree(modules, ignore_errors=True)
        super().run()


class BuildModules(build_py):
    """Copy modules, but for those that lie where they are to go (`--build-lib .`): setuptools would remove them first."""

    def copy_file(self, infile: str, outfile: str, *arguments: Any, **keywords: Any) -> tuple[str, bool]:
        """Copy a file."""
        if os.path.exists(outfile) and os.path.samefile(infile, outfile):
            return outfile, False
        return super().copy_file(infile, outfile, *arguments, **keywords)


class BuildNative(build_ext):
    """Compile and link where the result is kept, then copy it to where setuptools expects the extension."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the file's name. That of the kernels says nothing of this Python: the library does not depend on one."""
        path = Path(*fullname.split("."))
        if TORCH is not None and path.name == DERIVATIVES.split(".")[-1]:
            return str(path.with_name(VERSIONS["node_library"](TORCH.version)))
        return str(path.with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        """Build `ext` unless the kept one was made of the same sources; say so where that fails."""
        compiler, called = self.compiler.compiler_so_cxx, CALLED[ext.name]
        if shutil.which(compiler[0]) is None:
            if ext.name == KERNELS:  # once
                say(f"{called.upper()} ARE NOT BUILT: there is no C++ compiler here ({compiler[0]} was not found)")
            return
        missing = [] if ext.name == KERNELS else [path for path in headers_of_derivatives() if not path.exists()]
        if missing:
            say(f"{called} are not built, without which calls take some microseconds more: there is no {missing[0]}")
            return
        target = Path(self.get_ext_fullpath(ext.name))
        key = digest([*compiler, *ext.extra_compile_args, *ext.extra_link_args, target.name])[:8]
        folder = Path(self.get_finalized_command("build").build_base, f"native-{key}")
        kept, stamp = folder / target.name, folder / f"{target.name}.sources"
        # By content: times tell nothing where files were copied.
        sources = digest(Path(path).read_bytes().hex() for path in [*ext.sources, *ext.depends])
        # The stamp names the library too, so that it fits no other one, wherever a build was interrupted.
        if self.force or not kept.exists() or not stamp.exists() or stamp.read_text() != fitting(sources, kept):
            say(f"compiling {called} with the headers of torch {TORCH.version} in {TORCH.folder}")
            partial = kept.with_suffix(".partial")
            try:
                self._link(ext, self._compile(ext, folder), partial)
            except (BaseError, CCompilerError) as error:
                say(f"{called.upper()} ARE NOT BUILT: {error}")
                return
            text = fitting(sources, partial)
            os.replace(partial, kept)
            stamp.write_text(text)
        else:
            say(f"{called} are built already")
        target.parent.mkdir(parents=True, exist_ok=True)
        copied = target.with_suffix(".partial")
        shutil.copy(kept, copied)  # with the time of now: setuptools copies what is newer into an editable package
        os.replace(copied, target)  # whole, and apart from the one that a running process may have loaded

    def _compile(self, ext: Extension, folder: Path) -> list[str]:
        def compiled(source: str) -> str:
            options = {
                "include_dirs": ext.include_dirs,
                "macros": ext.define_macros,
                "extra_postargs": ext.extra_compile_args,
            }
            [built] = self.compiler.compile([source], str(folder), **options)
            return built

        with ThreadPoolExecutor(compile_jobs(len(ext.sources))) as pool:
            return list(pool.map(compiled, ext.sources))

    def _link(self, ext: Extension, objects: list[str], library: Path) -> None:
        self.compiler.link_shared_object(
            objects,
            str(library),
            libraries=ext.libraries,
            library_dirs=ext.library_dirs,
            extra_postargs=ext.extra_link_args,
            target_lang="c++",
        )


class Wheel(bdist_wheel):
    """Say that a wheel serves every Python: it holds no extension of one, at most the library."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of the interpreter, its interface and the platform."""
        return "py3", "none", super().get_tag()[2]


def extensions() -> list[Extension]:
    """Return the extensions that can be built."""
    if TORCH is None:
        say("THE C++ KERNELS ARE NOT BUILT: there is no torch here to build with; install torch first, then this again")
        return []
    if sys.platform == "win32":
        say("THE C++ KERNELS ARE NOT BUILT: they need GCC or Clang")
        return []
    headers, libraries, common = TORCH.folder / "include", [str(TORCH.folder / "lib")], ["setup.py", VERSION_FILE]
    kernels = Extension(
        KERNELS,
        sources=sorted(glob.glob("csrc/cpu/*.cpp") + glob.glob("csrc/cuda/*.cpp")),
        depends=[*sorted(glob.glob("csrc/*/*.h")), *common],
        define_macros=[("DMATTN_VERSION", f'"{VERSIONS["__version__"]}"')],
        include_dirs=[str(headers)],
        library_dirs=libraries,
        libraries=["torch_cpu"],
        extra_compile_args=[*FLAGS, TARGET, *MATH_FLAGS],
        extra_link_args=LINK_FLAGS,
        language="c++",
        optional=True,
    )
    if "-fsanitize" in os.environ.get("CXXFLAGS", ""):  # `csrc/sanitize.sh`, whose tests call the kernels alone
        return [kernels]
    derivatives = Extension(
        DERIVATIVES,
        sources=["csrc/autograd/node.cpp"],
        depends=common,
        define_macros=[("DMATTN_NODE", DERIVATIVES.split(".")[-1])],
        include_dirs=[str(headers), str(headers / "torch/csrc/api/include"), sysconfig.get_path("include")],
        library_dirs=libraries,
        libraries=["torch", "torch_cpu", "torch_python", "c10"],
        extra_compile_args=FLAGS,
        extra_link_args=LINK_FLAGS,
        language="c++",
        optional=True,
    )
    return [kernels, derivatives]


def headers_of_derivatives() -> list[Path]:
    """Return headers without which the derivatives cannot be built: torch's that is not of the stable interface, and Python's."""
    assert TORCH is not None
    return [
        TORCH.folder / "include/torch/csrc/autograd/custom_function.h",
        Path(sysconfig.get_path("include"), "Python.h"),
    ]


def description() -> str:
    """Return README.md as package indexes show it: without images and links to files, which lie in the repository only."""
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"^(!\[[^]]*\]\((?!https:)[^)]*\)|<img [^>]*>)\n\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\[([^]]+)\]\((?!https:)[^)]*\)", r"\1", text)


setup(
    ext_modules=extensions(),
    distclass=Commands,
    cmdclass={"build": Build, "build_ext": BuildNative, "build_py": BuildModules, "bdist_wheel": Wheel},
    long_description=description(),
    long_description_content_type="text/markdown",
    # An isolated build asks what it needs by running egg_info. It needs a torch of its own only where the environment has
    # none: pip then fetches the same one twice, to build with and to install.
    setup_requires=["torch>=2.11"] if TORCH is None and "egg_info" in sys.argv else [],
)
