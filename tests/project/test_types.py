"""What type checkers know of the public functions: which tensors a call returns, and which arguments it has."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import dmattn_ops

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


STUB = ast.parse(Path(dmattn_ops.__file__).with_suffix(".pyi").read_text())


def test_the_stub_has_the_public_names():
    named = {alias.asname for node in STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    named |= {node.name for node in STUB.body if isinstance(node, ast.FunctionDef)}
    assert named - {None} == set(dir(dmattn_ops))


@pytest.mark.parametrize("function", ["flash_dmattn_func", "flash_dmattn_qkvpacked_func", "flash_dmattn_varlen_func"])
def test_every_overload_has_the_arguments_of_the_function(function: str):
    classes = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
    parameters = inspect.signature(getattr(dmattn_ops, function)).parameters.values()
    by_name = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    overloads = [node for node in STUB.body if isinstance(node, ast.FunctionDef) and node.name == function]
    assert len(overloads) == 5
    for node in overloads:
        assert [each.arg for each in node.args.args] == [each.name for each in parameters if each.name not in by_name]
        declared, pending = {each.arg for each in node.args.kwonlyargs}, [ast.unparse(node.args.kwarg.annotation)[7:-1]]
        while pending:
            declared |= {each.target.id for each in classes[pending[0]].body if isinstance(each, ast.AnnAssign)}
            pending = [base.id for base in classes[pending[0]].bases if base.id in classes]
        assert declared == by_name
