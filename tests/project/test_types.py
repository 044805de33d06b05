"""What type checkers know of the public functions: which tensors a call returns, and which arguments it has."""

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import torch
from dmattn_ops import flash_dmattn_func, flash_dmattn_qkvpacked_func, flash_dmattn_varlen_func
from torch import Tensor
from typing_extensions import assert_type

query = torch.randn(1, 8, 2, 16)
lengths = torch.tensor([0, 8], dtype=torch.int32), torch.tensor([0, 8], dtype=torch.int32), 8, 8
wants: bool = bool(query.numel())
flat: Tensor = flash_dmattn_func(query, query, query, is_causal=True, window_size=(3, None)).flatten(2)
assert_type(flash_dmattn_func(query, query, query, return_lse=True), tuple[Tensor, Tensor])
assert_type(flash_dmattn_func(query, query, query, None, return_max=True), tuple[Tensor, Tensor])
both = flash_dmattn_func(query, query, query, return_lse=True, return_max=True, sink=query[0, 0, :, 0])
assert_type(both, tuple[Tensor, Tensor, Tensor])
assert_type(flash_dmattn_func(query, query, query, return_lse=wants), Tensor | tuple[Tensor, ...])
assert_type(flash_dmattn_qkvpacked_func(query), Tensor)
assert_type(flash_dmattn_varlen_func(query[0], query[0], query[0], *lengths, return_lse=True), tuple[Tensor, Tensor])
flash_dmattn_func(query, query, query, causal=True)  # type: ignore[call-overload]
flash_dmattn_func(query, query, query, is_causal="yes")  # type: ignore[call-overload]
"""


def test_a_call_has_the_type_of_what_it_returns(tmp_path: Path):
    """Comments that ignore an error which is none are errors here, so that the last two lines have one each.

    As where the package is installed, what a type checker says of the package itself is not shown.
    """
    pytest.importorskip("mypy")
    (tmp_path / "code.py").write_text(CODE)
    options = ["--config-file=", "--follow-imports=silent", "--warn-unused-ignores"]
    command = [sys.executable, "-m", "mypy", *options, str(tmp_path / "code.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout
