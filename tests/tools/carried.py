"""Find Gluon kernels in which triton 3.6 loses the updates of a loop bound.

Gluon's inliner in triton 3.6 treats a variable that a `for` loop updates as dead if only the bounds of inner loops read it.
The updates are dropped, and every iteration of the outer loop uses the first value. A `while` loop is compiled correctly,
and so are all loops with triton 3.9. An example that goes wrong:

    n = gl.load(counts)
    for g in range(groups):
        for t in range(n):  # n stays what it was
            ...
        n = gl.load(counts + g + 1)
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from triton._C.libtriton import ir, passes
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

_VALUE = re.compile(r"%\w+")
_RESULT = re.compile(r"\s*(%\w+)(?::\d+)? = (.*)")
_FOR = re.compile(r"= scf\.for %\w+ = (%\w+)(?:#\d+)? to (%\w+)(?:#\d+)? step (%\w+)(?:#\d+)?")
_CARRIED = re.compile(r" iter_args\((.*?)\) -> ")
_LOCATION = re.compile(r" loc\((?:[^()]|\([^()]*\))*\)")


@dataclass
class _Loop:
    line: str
    indent: int
    carried: list[str]
    inner_bounds: set[str] = field(default_factory=set)  # the values that bounds of inner loops are computed from


def stale_bounds(source: str, sm: int) -> list[str]:
    """Return the loops of a Gluon kernel's IR, before any pass, that lose the updates of a bound of an inner loop."""
    sources: dict[str, list[str]] = {}  # of each value
    around: list[_Loop] = []
    found = []
    for line in _LOCATION.sub("", _inlined(source, sm)).splitlines():
        indent = len(line) - len(line.lstrip())
        if made := _RESULT.match(line):
            sources[made[1]] = _VALUE.findall(made[2])
        if loop := _FOR.search(line):
            bounds = _computed_from(loop.groups(), sources)
            for outer in around:
                outer.inner_bounds |= bounds
            if carried := _CARRIED.search(line):
                names = [pair.split(" = ")[0] for pair in carried[1].split(", ")]
                sources.update({name: [] for name in names})
                around.append(_Loop(line.strip(), indent, names))
        elif around and indent == around[-1].indent + 2 and line.lstrip().startswith("scf.yield"):
            closed = around.pop()
            yielded = line.split("scf.yield")[1].split(" : ")[0].split(",")
            kept = {name for name, value in zip(closed.carried, yielded, strict=True) if value.strip() == name}
            if kept & closed.inner_bounds:
                found.append(closed.line)
    return found


def _inlined(source: str, sm: int) -> str:
    """Return a module after Gluon's inliner."""
    context = ir.context()
    ir.load_dialects(context)
    make_backend(GPUTarget("cuda", sm, 32)).load_dialects(context)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.mlir")
        path.write_text(source)
        module = ir.parse_mlir_module(str(path), context)
    manager = ir.pass_manager(context)
    passes.gluon.add_inliner(manager)
    manager.run(module, "inline")
    return str(module)


def _computed_from(values: tuple[str, ...], sources: dict[str, list[str]]) -> set[str]:
    """Return `values` and all that they are computed from."""
    found, todo = set(), list(values)
    while todo:
        value = todo.pop()
        if value not in found:
            found.add(value)
            todo += sources.get(value, [])
    return found
