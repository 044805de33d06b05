"""What the C++ operators do with arguments that no checked call hands them: refuse them, before they read anything.

Each group runs in a process of its own, so that one that breaks its memory ends there and nowhere else.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from untrusted_calls import GROUPS

from dmattn_ops.kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason=f"THE C++ KERNELS ARE NOT TESTED: {native.reason()}")


@pytest.mark.parametrize("group", GROUPS)
def test_arguments_that_would_be_read_out_of_bounds_are_refused(group):
    script = pathlib.Path(__file__).parents[1] / "support" / "untrusted_calls.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), group]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    cases = [line.split("\t") for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"ended after {cases[-1:]}: {done.stderr[-2000:]}"
    assert len(cases) == sum(1 for _ in GROUPS[group]())
    wrong = [f"{name}: {ended}, expected {expected}" for name, ended, expected in cases if ended != expected]
    assert not wrong, "\n".join(wrong)
