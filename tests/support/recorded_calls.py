"""Calls of operators, and what the library makes of them in a process without the package."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dmattn_ops.kernels import native

LIBRARY = Path(native.__file__).parents[1] / native.LIBRARY
SCRIPT = Path(__file__).parent / "library_calls.py"
ALONE = "libdmattn.so alone does not have it"  # of attention to a part of the keys, and what reads chosen blocks


class Recorded(TorchDispatchMode):
    """Notes what operators of the package are called with, and what they return."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        returned = function(*arguments, **(keywords or {}))
        if function.namespace == "dmattn":
            name = function._schema.name.partition("::")[2]
            overload = function._schema.overload_name
            name, kept = (f"{name}.{overload}", ALONE) if overload else (name, self._kept(returned))
            self.calls.append((name, self._kept(arguments), kept, self._is_exact(function, arguments)))
        return returned

    @staticmethod
    def _kept(values):
        """Return tensors with their strides, apart from what is done to them later."""
        if isinstance(values, torch.Tensor):
            kept = (
                torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=values.device)
                if values.numel()
                else values
            )
            return kept.copy_(values.detach()) if not _overlaps(values) else values.detach().clone()
        return tuple(map(Recorded._kept, values)) if isinstance(values, (tuple, list)) else values

    @staticmethod
    def _is_exact(function, arguments):
        """Return whether both have the same kernels do all of the work: sinks are torch operations in Python."""
        names = [argument.name for argument in function._schema.arguments]
        return dict(zip(names, arguments, strict=False)).get("sink") is None


def _overlaps(tensor):
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def repeated(calls, folder, **variables):
    """Return what the library alone says of the calls, in a process without the package and with some variables."""
    torch.save(calls, folder / "calls.pt")
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"} | variables
    command = [sys.executable, SCRIPT, LIBRARY, folder / "calls.pt"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def made(call):
    """Return the calls of operators that a function makes, and what they return."""
    with Recorded() as recorded:
        call()
    return recorded.calls
