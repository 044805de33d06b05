"""Tests on a GPU are run seldom: every name of this repository that they import, read or patch is looked up here instead."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton")
TESTS = Path(__file__).parents[1]
OURS = {"dmattn_ops", "tests", *(path.stem for path in (TESTS.parent / "benchmarks").glob("*.py"))}
FILES = sorted((TESTS / "gpu").glob("*.py"))
Found = list[object]  # what a name may stand for: several in a loop over modules


def imported(tree: ast.Module) -> tuple[dict[str, Found], list[str]]:
    """Return what the imports of this repository bind, and those that there are not."""
    bound: dict[str, Found] = {}
    missing: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in OURS:
                    importlib.import_module(alias.name)
                    whole = alias.name if alias.asname else alias.name.split(".")[0]
                    bound[alias.asname or whole] = [importlib.import_module(whole)]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            assert node.module is not None
            for alias in node.names:
                if node.module.startswith("tests.gpu."):  # importing it would skip this test
                    if alias.name not in defined(node.module):
                        missing.append(f"line {node.lineno}: {node.module} defines no {alias.name}")
                    continue
                try:
                    bound[alias.asname or alias.name] = [member(importlib.import_module(node.module), alias.name)]
                except AttributeError as error:
                    missing.append(f"line {node.lineno}: {error}")
    return bound, missing


def defined(module: str) -> set[str]:
    """Return the functions, classes and variables that a module of tests defines."""
    found: set[str] = set()
    for node in ast.parse((TESTS.parent / f"{module.replace('.', '/')}.py").read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            found |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    return found


def member(module: object, name: str) -> object:
    """Return an attribute, or a module of a package."""
    if not hasattr(module, name) and hasattr(module, "__path__"):
        try:
            return importlib.import_module(f"{module.__name__}.{name}")  # type: ignore[attr-defined]
        except ModuleNotFoundError:
            pass
    return getattr(module, name)


def looped(tree: ast.Module) -> Iterator[tuple[str, list[ast.expr]]]:
    """Yield the names that loops give to each of some expressions."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.For, ast.comprehension)) or not isinstance(node.target, ast.Name):
            continue
        if isinstance(node.iter, (ast.Tuple, ast.List)):
            yield node.target.id, node.iter.elts


def values(node: ast.expr, bound: dict[str, Found]) -> Found:
    """Return what an expression stands for, as far as it is made of imported names: nothing where it is not."""
    if isinstance(node, ast.Name):
        return bound.get(node.id, [])
    if isinstance(node, ast.Attribute):
        return [getattr(of, node.attr) for of in values(node.value, bound) if isinstance(of, ModuleType)]
    return []


def patched(tree: ast.Module) -> Iterator[ast.Call]:
    """Yield the calls that patch an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("monkeypatch.setattr", "monkeypatch.delattr"):
            yield node


def faults(source: str) -> list[str]:
    """Return the names in a test that stand for nothing."""
    tree = ast.parse(source)
    bound, found = imported(tree)
    for name, choices in looped(tree):
        bound.setdefault(name, [value for choice in choices for value in values(choice, bound)])
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            try:
                values(node, bound)
            except AttributeError as error:
                found.append(f"line {node.lineno}: {error}")
    for call in patched(tree):
        where, *rest = call.args
        try:
            if isinstance(where, ast.Constant):
                module, _, name = str(where.value).rpartition(".")
                targets: Found = [importlib.import_module(module)]
            else:
                assert isinstance(rest[0], ast.Constant), f"line {call.lineno}: which name is patched?"
                name, targets = str(rest[0].value), values(where, bound)
        except AttributeError:
            continue  # found above
        if not targets:
            found.append(f"line {call.lineno}: {ast.unparse(where)} is no module that is known here")
        found += [f"line {call.lineno}: {target} has no {name}" for target in targets if not hasattr(target, name)]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_name_of_this_repository_that_a_gpu_test_uses_exists(path: Path) -> None:
    assert faults(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "from dmattn_ops import no_such_function",
        "from dmattn_ops.kernels.hopper.dbias import launch as shared\nshared.no_such_function()",
        "from dmattn_ops.dispatch import run as dispatch\ndispatch.choose.no_such_function",
        "from dmattn_ops.choice import arch\nmonkeypatch.setattr(arch, 'no_such_function', None)",
        "from dmattn_ops.choice import arch, config\nfor module in (arch, config): monkeypatch.setattr(module, 'physical', None)",
        "from tests.gpu.test_hopper_backward import no_such_function",
        "monkeypatch.setattr('dmattn_ops.launching.plans.no_such_name', {})",
        "monkeypatch.setattr(unknown, 'name', {})",
    ],
)
def test_a_name_that_does_not_exist_is_found(line: str) -> None:
    assert len(faults(line)) == 1
