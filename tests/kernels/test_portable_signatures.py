"""Plain Triton kernels are typed: few constants, records instead of long lists of arguments and tuples."""

import ast
from itertools import combinations
from pathlib import Path

import pytest

FOLDERS = [Path(__file__).parents[2] / "dmattn_ops/kernels" / name for name in ("portable", "epochs")]
MOST_CONSTANTS, MOST_ARGUMENTS, MOST_UNPACKED = 4, 12, 3


def device_functions():
    """Return the jitted functions of the folders by their names, `module.function`."""
    found = {}
    for path in sorted(path for folder in FOLDERS for path in folder.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(
                "triton.jit" in ast.unparse(each) for each in node.decorator_list
            ):
                found[f"{path.stem}.{node.name}"] = node
    return found


FUNCTIONS = device_functions()
# A kernel that is launched says which of its arguments are not specialized.
KERNELS = {name: node for name, node in FUNCTIONS.items() if isinstance(node.decorator_list[0], ast.Call)}


def run_time_arguments(node):
    return [argument.arg for argument in node.args.args if argument.annotation is None]


def test_all_functions_are_found():
    assert len(KERNELS) == 11 and len(FUNCTIONS) > 80


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_have_few_constants(name):
    node = KERNELS[name]
    assert len(node.args.args) - len(run_time_arguments(node)) <= MOST_CONSTANTS


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in KERNELS])
def test_device_functions_have_few_arguments(name):
    assert len(FUNCTIONS[name].args.args) <= MOST_ARGUMENTS


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_long_tuple_is_unpacked(name):
    targets = [target for node in ast.walk(FUNCTIONS[name]) if isinstance(node, ast.Assign) for target in node.targets]
    assert not [target for target in targets if isinstance(target, ast.Tuple) and len(target.elts) > MOST_UNPACKED]


@pytest.mark.parametrize(("one", "other"), list(combinations(["forward", "keys", "queries", "dbias"], 2)))
def test_kernels_have_the_arguments_that_they_share_in_one_order(one, other):
    first, second = (run_time_arguments(KERNELS[f"{name}.{name}_kernel"]) for name in (one, other))
    shared = set(first) & set(second)
    assert len(shared) > 40
    assert [name for name in first if name in shared] == [name for name in second if name in shared]
