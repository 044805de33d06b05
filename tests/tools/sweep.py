"""Compile every configuration that dispatch can return, for every architecture, without a GPU; write or verify the tables.

`python -m tests.tools.sweep` compiles every entry of the package's table for the installed version of Triton, and fails
if a figure differs from the table. `--write` writes the figures to the table instead. Calls go through the launchers
themselves, so that exactly what would run is compiled.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

from dmattn_ops.choice import arch, resources
from dmattn_ops.choice.resources import Usage
from tests.tools.configurations import ARCHITECTURES, KERNELS, Unit, launch, units

PACKAGE = Path(resources.__file__).parents[1]
_KERNELS = ("dmattn_ops.kernels.", "dmattn_ops.launching.")
Todo = dict[str, dict[str, Unit]]  # by entry and line of a table
_OF_LISTS = ("list_tiles_kernel", "rank_kernel")  # what lists the tiles of a mask for a call is not part of its row
Rows = dict[str, dict[str, Any]]  # by entry: a digest of the source, and a line for each specialization


def compile_unit(unit: Unit) -> dict[str, Usage]:
    """Compile what a unit launches; return what each kernel takes."""
    from dmattn_ops.api.stand_in import compiled_launches
    from tests.tools.compile_only import read_resources

    sm = unit.row.sm
    with compiled_launches(sm) as launches:
        launch(unit)
    return {
        each.kernel: read_resources(each.compiled, sm, each.log).usage(arch.KNOWN[sm])
        for each in launches
        if not each.kernel.startswith("_") and each.kernel not in _OF_LISTS
    }


def sweep(todo: Todo, jobs: int, say: Callable[[str], None]) -> tuple[Rows, list[str]]:
    """Compile `todo` in `jobs` processes; return its part of a table, and what failed to compile."""
    rows: Rows = {entry: {} for entry in todo}
    started, failed = time.time(), []
    with tempfile.TemporaryDirectory() as kernels:
        os.environ["TRITON_CACHE_DIR"] = kernels  # read when a worker imports triton
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
            pending = {
                pool.submit(compile_unit, unit): (entry, line)
                for entry, lines in todo.items()
                for line, unit in lines.items()
            }
            for done, future in enumerate(as_completed(pending), 1):
                entry, line = pending[future]
                try:
                    rows[entry][line] = future.result()
                except Exception as error:  # whatever a compiler raises
                    failed.append(f"{entry}, {line}: {type(error).__name__}: {error}")
                say(f"{done} of {len(pending)}, {time.time() - started:.0f} s: {entry}, {line}")
    for entry, lines in todo.items():  # in the order of `todo`, whatever order they were compiled in
        ordered = {line: rows[entry][line] for line in lines if line in rows[entry]}
        rows[entry] = {resources.SOURCE: _source_of(lines), **ordered}
    return rows, failed


def load(version: str) -> Rows:
    """Return the rows of a version's table as it is now, none where there is no table."""
    path = resources.path(version)
    return json.loads(path.read_text())["rows"] if path.exists() else {}


def write(version: str, rows: Rows) -> None:
    """Write a table: a line for each specialization, so that a change of one is a change of one line."""
    text = [f'{{"triton": {json.dumps(version)},', f'"columns": {json.dumps(Usage._fields)},', '"rows": {']
    kept = [entry for entry in units(ARCHITECTURES, KERNELS) if entry in rows]
    for entry in kept:
        lines = [f"  {json.dumps(line)}: {json.dumps(kernels)}" for line, kernels in rows[entry].items()]
        text.append(f"{json.dumps(entry)}: {{\n" + ",\n".join(lines) + "\n}" + "," * (entry != kept[-1]))
    resources.TABLES.mkdir(exist_ok=True)
    resources.path(version).write_text("\n".join([*text, "}}"]) + "\n")


def missing(todo: Todo, rows: Rows) -> Todo:
    """Return the entries that a table lacks or does not have for every specialization."""
    return {entry: lines for entry, lines in todo.items() if set(rows.get(entry, ())) != {resources.SOURCE, *lines}}


def stale(todo: Todo, rows: Rows) -> Todo:
    """Return the entries that a table lacks, or whose kernels have changed since they were compiled."""
    lacking = missing(todo, rows)
    return {
        entry: lines
        for entry, lines in todo.items()
        if entry in lacking or rows[entry][resources.SOURCE] != _source_of(lines)
    }


def _source_of(lines: dict[str, Unit]) -> str:
    return source(next(iter(lines.values())).launcher.__name__)


@cache
def source(module: str) -> str:
    """Return a digest of the device code that a launcher's module defines or imports, and of its constants."""
    digests, pending = {}, [module]
    while pending:
        name = pending.pop()
        if name in digests:
            continue
        body = _body(name)
        digests[name] = [_dump(node) for node in body if _is_jit(node) or isinstance(node, (ast.Assign, ast.AnnAssign))]
        for node in body:
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(_KERNELS):
                continue
            imported = _body(str(node.module))
            if any(map(_is_jit, imported)):
                pending.append(str(node.module))
            else:  # host code: the constants that are imported from it
                names = {alias.name for alias in node.names}
                constants = (each for each in imported if isinstance(each, ast.Assign) and names & _targets(each))
                digests[name] += map(_dump, constants)
    text = "".join("".join(digests[name]) for name in sorted(digests))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _body(module: str) -> list[ast.stmt]:
    return ast.parse(PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py").read_text()).body


def _is_jit(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list)


def _targets(node: ast.Assign) -> set[str]:
    return {target.id for target in node.targets if isinstance(target, ast.Name)}


def _dump(node: ast.stmt) -> str:
    """Return a statement as text that does not depend on its layout, comments and docstring."""
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
        del node.body[0]
    return ast.dump(node)


def differences(found: Rows, frozen: Rows) -> Iterator[str]:
    """Tell where what was compiled is not what a table holds."""
    for entry, lines in found.items():
        for line, kernels in lines.items():
            before = frozen.get(entry, {}).get(line)
            if line != resources.SOURCE and json.loads(json.dumps(kernels)) != before:
                yield f"{entry}, {line}:\n  table {json.dumps(before)}\n  found {json.dumps(kernels)}"


def main() -> int:
    """Run what the arguments ask for; return the number of differences and failures."""
    parser = argparse.ArgumentParser(description="compile every configuration; verify or write the table of resources")
    parser.add_argument("--write", action="store_true", help="freeze what is found")
    parser.add_argument("--stale", action="store_true", help="only what the table lacks, or of other source")
    parser.add_argument("--sm", type=int, nargs="+", default=ARCHITECTURES, help="such as 90")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    version = triton.__version__
    todo = units(tuple(options.sm), tuple(options.kernels))
    if options.stale:
        todo = stale(todo, load(version))
    found, failed = sweep(todo, options.jobs, lambda line: print(f"\r{line:.118}\033[K", end="", file=sys.stderr))
    print(file=sys.stderr)
    frozen = load(version)
    changes = list(differences(found, frozen))
    print("\n".join([*changes, *failed]))
    print(f"{len(found)} rows compiled with triton {version}: {len(changes)} lines differ, {len(failed)} failed")
    if options.write:
        write(version, {**frozen, **found})
        return len(failed)
    return len(changes) + len(failed)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
