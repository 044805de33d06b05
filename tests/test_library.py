"""The library's own operators, which serve programs without Python, return what the operators of the package return."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dmattn_ops
from dmattn_ops.kernels import native
from dmattn_ops.testing import check, draw

pytestmark = pytest.mark.skipif(not native.available(), reason=f"THE LIBRARY IS NOT TESTED: {native.reason()}")

LIBRARY = Path(native.__file__).parents[1] / native.LIBRARY
SCRIPT = Path(__file__).with_name("library_calls.py")
CASES = 24


class Recorded(TorchDispatchMode):
    """Notes what operators of the package are called with, and what they return."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        returned = function(*arguments, **(keywords or {}))
        if function.namespace == "dmattn":
            name = function._schema.name.partition("::")[2]
            self.calls.append((name, self._kept(arguments), self._kept(returned), self._is_exact(function, arguments)))
        return returned

    @staticmethod
    def _kept(values):
        """Return tensors with their strides, apart from what is done to them later."""
        if isinstance(values, torch.Tensor):
            kept = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype) if values.numel() else values
            return kept.copy_(values.detach()) if not _overlaps(values) else values.detach().clone()
        return tuple(map(Recorded._kept, values)) if isinstance(values, (tuple, list)) else values

    @staticmethod
    def _is_exact(function, arguments):
        """Return whether both have the same kernels do all of the work: sinks are torch operations in Python."""
        names = [argument.name for argument in function._schema.arguments]
        return dict(zip(names, arguments, strict=False)).get("sink") is None


def _overlaps(tensor):
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def repeated(calls, folder):
    """Return what the library says of the calls, without Python's operators."""
    torch.save(calls, folder / "calls.pt")
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", SCRIPT, LIBRARY, folder / "calls.pt"] if sys.version_info >= (3, 11) else [
        sys.executable, SCRIPT, LIBRARY, folder / "calls.pt"
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_random_problems_return_the_same(tmp_path):
    with Recorded() as recorded:
        for seed in range(CASES):
            check(draw(seed))
    names = {name for name, *_ in recorded.calls}
    print(names, len(recorded.calls))
    *wrong, made = repeated(recorded.calls, tmp_path)
    assert not wrong, "\n".join(wrong)
    assert made == f"{len(recorded.calls)} calls"
