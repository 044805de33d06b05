"""The size gate: files, functions and parameter lists stay small enough to be read at once.

The house's numbers are 400 lines for a file (500 with device code), 60 for a host function without its docstring, and 8
public parameters before the `*`. A tenth more is let through, so that nobody splits a thought for one line.
"""

import ast
import inspect
from pathlib import Path

import pytest

import dmattn_ops

ROOT = Path(__file__).parents[2]
SLACK = 1.1
FILE_LINES, KERNEL_FILE_LINES, FUNCTION_LINES, PARAMETERS = 400, 500, 60, 8
# Packed sequences need both offsets and both lengths: one parameter more than the rest.
PARAMETER_EXCEPTIONS = {"flash_dmattn_varlen_func": 9}

PYTHON = sorted(
    path
    for folder in ("dmattn_ops", "meta", "benchmarks", "docs", "examples", "tests")
    for path in (ROOT / folder).rglob("*.py")
)
CPP = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".cpp", ".h"})


def _name(path):
    return str(path.relative_to(ROOT))


def _is_device_code(path):
    return "kernels" in path.parts or "csrc" in path.parts


def _is_jit(function):
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _body_lines(function):
    """Lines from the signature to the end, without the docstring."""
    docstring = function.body[0] if ast.get_docstring(function, clean=False) is not None else None
    spent = docstring.end_lineno - docstring.lineno + 1 if docstring is not None else 0
    return function.end_lineno - function.lineno + 1 - spent


def long_functions(source):
    """Return name and length of the host functions in `source` that are over the limit."""
    functions = (
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    lengths = [(function.name, _body_lines(function)) for function in functions if not _is_jit(function)]
    return [(name, length) for name, length in lengths if length > FUNCTION_LINES * SLACK]


@pytest.mark.parametrize("path", PYTHON + CPP, ids=_name)
def test_file_can_be_read_at_once(path):
    limit = (KERNEL_FILE_LINES if _is_device_code(path) else FILE_LINES) * SLACK
    assert len(path.read_text().splitlines()) <= limit


@pytest.mark.parametrize("path", PYTHON, ids=_name)
def test_host_functions_can_be_read_at_once(path):
    assert long_functions(path.read_text()) == []


def test_gate_sees_a_long_function_but_neither_docstrings_nor_device_code():
    body = "\n".join(f"    x = {line}" for line in range(80))
    assert long_functions(f"def long():\n{body}") == [("long", 81)]
    assert long_functions(f"@triton.jit\ndef kernel():\n{body}") == []
    documented = '    """' + "\n" * 80 + '    """\n    return 1'
    assert long_functions(f"def documented():\n{documented}") == []


@pytest.mark.parametrize("name", sorted(dmattn_ops.__all__))
def test_public_function_takes_few_positional_parameters(name):
    function = getattr(dmattn_ops, name)
    if not inspect.isfunction(function):
        pytest.skip("not a function")
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    positional = sum(kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds)
    assert positional <= PARAMETER_EXCEPTIONS.get(name, PARAMETERS)
