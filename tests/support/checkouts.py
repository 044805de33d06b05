"""Copies of the project to build in, with a made-up torch and compiler."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARY = "libdmattn.so"
COMPILER = """#!/bin/sh
echo "$@" >> {log}
while [ $# -gt 1 ]; do test "$1" = -o && out=$2; shift; done
{then}
"""


class Checkout:
    """A copy of what a build reads, and how to build there with a made-up torch and compiler."""

    def __init__(self, folder):
        self.folder, self.log, self.compiler = folder / "checkout", folder / "compiled", folder / "c++"
        self.folder.mkdir()
        for name in ("setup.py", "pyproject.toml", "Makefile", "MANIFEST.in", "README.md", "DESIGN.md", "LICENSE"):
            shutil.copy(ROOT / name, self.folder)
        for name in ("csrc", "meta", "dmattn_ops"):
            left = shutil.ignore_patterns("*.so", "__pycache__")
            shutil.copytree(ROOT / name, self.folder / name, symlinks=True, ignore=left)
        self.write_compiler()

    def write_compiler(self, then='echo built > "$out"'):
        self.compiler.write_text(COMPILER.format(log=self.log, then=then))
        self.compiler.chmod(0o755)

    def run(self, *command, python=(sys.executable,), path=(), returns=0, **variables):
        """Run Python in the checkout with `path` before its other folders; return what it printed."""
        compilers = {"CC": self.compiler, "CXX": self.compiler}
        linkers = dict.fromkeys(("LDSHARED", "LDCXXSHARED"), f"{self.compiler} -shared")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **compilers, **linkers, **variables}
        done = subprocess.run(
            [*python, *command],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == returns, done.stderr
        return done.stdout + done.stderr

    def install(self, *path, **keywords):
        """Install for development, as `pip install -e` does, and return what the build log says."""
        hook = "from setuptools import build_meta; build_meta.build_editable('wheels')"
        return self.run("-c", hook, path=path, **keywords)

    def libraries(self):
        return sorted(path.name for path in (self.folder / "dmattn_ops").glob("*.so"))

    def compiled(self):
        """Return how many sources were compiled since the last question."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return sum(" -c " in line for line in lines)


def made_up_torch(folder, version, name="torch"):
    """Return a folder to import a torch of that version from; `name` is that of the folder."""
    package = folder / name / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "version.py").write_text(f"__version__ = '{version}'\n")
    return package.parent
