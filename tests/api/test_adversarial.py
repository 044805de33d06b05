"""Direct calls of the operators as nobody should make them: none ends its process, reads or writes out of bounds, or is wrong.

Each group runs in a process of its own, so that one that breaks its memory ends there and nowhere else.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import adversarial_calls
import pytest
from adversarial_calls import GROUPS, Case, Wrong, ended

from dmattn_ops.kernels import native

LEAST_CASES = 2100  # of all groups


@pytest.mark.skipif(not native.available(), reason=f"THE C++ KERNELS ARE NOT TESTED: {native.reason()}")
@pytest.mark.parametrize("group", GROUPS)
def test_no_call_ends_its_process_or_returns_what_was_not_computed(group: str) -> None:
    script = pathlib.Path(adversarial_calls.__file__)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(script), group]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    cases = [line.split("\t") for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"ended with {done.returncode} after {cases[-1:]}: {done.stderr[-2000:]}"
    assert len(cases) == sum(1 for _ in GROUPS[group]())
    expected = {"True": ("refused",), "False": ("returned",), "None": ("refused", "returned")}
    wrong = [f"{name}: {found}, expected {wanted}" for _, name, found, wanted in cases if found not in expected[wanted]]
    assert not wrong, "\n".join(wrong)


def test_the_groups_hold_as_many_cases_as_the_documentation_says() -> None:
    assert sum(1 for group in GROUPS.values() for _ in group()) >= LEAST_CASES


def test_what_is_wrong_has_another_name_than_what_is_refused() -> None:
    import torch

    def fail(error: Exception) -> None:
        raise error

    assert ended(Case("", lambda: fail(Wrong("differs")))) == "wrong: differs"
    assert ended(Case("", lambda: fail(ValueError("no")))) == "refused"
    assert ended(Case("", lambda: fail(MemoryError("bad_alloc")))).startswith("MemoryError")
    assert ended(Case("", lambda: fail(RuntimeError("DefaultCPUAllocator: can't allocate")))).startswith(
        "out of memory"
    )
    assert ended(Case("", lambda: (torch.tensor([1.0, torch.nan]),))) == "1 NaN in what it returned"
    assert ended(Case("", lambda: torch.tensor([torch.nan]), nan=True)) == "returned"
