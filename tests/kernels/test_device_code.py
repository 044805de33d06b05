"""Device code is given records with names: few arguments, few constants, and no long tuples.

What is a kernel, and not a function of one, its name says, or its decorator, which lists arguments that are not specialized.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "dmattn_ops" / "kernels"
MOST_ARGUMENTS = 12
MOST_CONSTANTS = 4  # of a kernel; its other arguments stand one by one, as numbers of a tuple would be specialized
MOST_OF_A_KERNEL = 80
MOST_POSITIONS = 3  # of a tuple that is taken apart


def device_functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the name of each device function, with its file, and its code."""
    for path in sorted(KERNELS.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list):
                yield f"{path.relative_to(KERNELS).as_posix()}:{node.name}", node


FUNCTIONS = dict(device_functions())
ENTRIES = {
    name: node
    for name, node in FUNCTIONS.items()
    if name.endswith("_kernel") or any(isinstance(each, ast.Call) for each in node.decorator_list)
}
WITH_OPERANDS = (
    "forward",
    "keys",
    "queries",
    "dbias",
)  # kernels of `portable`, which launchers give the same arguments


def long_targets(function: ast.FunctionDef) -> list[str]:
    """Return what takes a tuple apart by more positions than allowed, and what reads one at a later position."""
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            found += [ast.unparse(node)] * (len(node.targets[0].elts) > MOST_POSITIONS)
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.slice, ast.Constant)
            and isinstance(node.slice.value, int)
        ):
            found += [ast.unparse(node)] * (node.slice.value > MOST_POSITIONS)
    return found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_device_function_has_few_arguments_and_takes_no_long_tuple_apart(name: str) -> None:
    arguments = FUNCTIONS[name].args.args
    constants = [each.arg for each in arguments if "constexpr" in ast.unparse(each.annotation or ast.Constant(0))]
    if name in ENTRIES:
        assert len(constants) <= MOST_CONSTANTS
        assert len(arguments) <= MOST_OF_A_KERNEL
    else:
        assert len(arguments) <= MOST_ARGUMENTS
    assert long_targets(FUNCTIONS[name]) == []


def run_time_arguments(kernel: ast.FunctionDef) -> list[str]:
    """Return the names of the arguments of a kernel that are no constants."""
    return [each.arg for each in kernel.args.args if each.annotation is None]


@pytest.mark.parametrize(("one", "other"), list(combinations(WITH_OPERANDS, 2)))
def test_kernels_have_the_arguments_that_they_share_in_one_order(one: str, other: str) -> None:
    first, second = (run_time_arguments(ENTRIES[f"portable/{name}.py:{name}_kernel"]) for name in (one, other))
    shared = set(first) & set(second)
    assert len(shared) > 40
    assert [name for name in first if name in shared] == [name for name in second if name in shared]


def test_long_tuples_are_found() -> None:
    code = "def f(x):\n    a, b, c, d = x\n    e, g = x\n    return x[4] + x[1]\n"
    function = ast.parse(code).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert long_targets(function) == ["a, b, c, d = x", "x[4]"]
    plain = [name for name in ENTRIES if name.startswith(("portable/", "epochs/"))]
    assert len(plain) == 14 and len(ENTRIES) > 18 and len(FUNCTIONS) > 130
