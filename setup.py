"""Build the optional C++ extension `dmattn_ops._native` (CPU kernels); everything else is in pyproject.toml.

Without a compiler, or without torch at build time, the package installs without it, and `native.reason()` says so.
"""

from __future__ import annotations

import glob
import os
import sys
from concurrent.futures import ThreadPoolExecutor

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

FLAGS = ["-O3", "-g0", "-std=c++20", "-fvisibility=hidden", "-Wno-psabi"]
MATH_FLAGS = ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
# at::parallel_for is a template: without OpenMP here it runs on one thread. Apple's compiler has none.
OPENMP_FLAGS = [] if sys.platform == "darwin" else ["-fopenmp"]
LINK_FLAGS = ["-Wl,-undefined,dynamic_lookup"] if sys.platform == "darwin" else ["-fopenmp"]


class BuildNative(build_ext):
    """Compile the sources side by side (`MAX_JOBS` at a time), then let setuptools link them."""

    def build_extension(self, ext: Extension) -> None:
        """Build `ext` unless it is newer than everything it depends on."""
        target = self.get_ext_fullpath(ext.name)
        if not (self.force or newer_group([*ext.sources, *ext.depends], target, "newer")):
            return
        jobs = max(1, min(len(ext.sources), int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))))
        with ThreadPoolExecutor(jobs) as pool:
            objects = list(pool.map(lambda source: self._compile(ext, source), ext.sources))
        ext.sources, ext.extra_objects = [], objects
        super().build_extension(ext)

    def _compile(self, ext: Extension, source: str) -> str:
        [built] = self.compiler.compile(
            [source], self.build_temp, include_dirs=ext.include_dirs, extra_postargs=ext.extra_compile_args
        )
        return built


def extensions() -> list[Extension]:
    """Return the extension, or nothing where it cannot be built."""
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError:
        print("dmattn_ops: torch is missing at build time, so the CPU kernels are not built", file=sys.stderr)
        return []
    if sys.platform == "win32":
        print("dmattn_ops: the CPU kernels need GCC or Clang, so they are not built here", file=sys.stderr)
        return []
    return [
        Extension(
            "dmattn_ops._native",
            sources=sorted(glob.glob("csrc/cpu/*.cpp")),
            depends=[*sorted(glob.glob("csrc/cpu/*.h")), "setup.py"],
            include_dirs=cpp_extension.include_paths(),
            library_dirs=[os.path.join(os.path.dirname(torch.__file__), "lib")],
            libraries=["c10", "torch_cpu"],
            extra_compile_args=[*FLAGS, *MATH_FLAGS, *OPENMP_FLAGS],
            extra_link_args=LINK_FLAGS,
            language="c++",
            optional=True,
        )
    ]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildNative})
