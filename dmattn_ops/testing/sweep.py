"""Compile every configuration that dispatch can return, for every architecture, without a GPU; write or verify the tables.

`python -m dmattn_ops.testing.sweep` compiles what the package's table for the installed Triton holds and fails where a
figure differs; `--write` freezes what was found instead. Calls go through the launchers themselves, so that what is compiled
is what would run.
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
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton

from dmattn_ops import arch, choose, config, dispatch, meta, resources, validation
from dmattn_ops.problem import UNBOUNDED, Options, Tiles, Varlen
from dmattn_ops.resources import Specialization, Usage

PACKAGE = Path(resources.__file__).parent
_KERNELS = "dmattn_ops.kernels."
DIRECTIONS = {"forward": config.FORWARD, "backward": config.BACKWARD}
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
KERNELS = ("portable", "hopper", "hopper256")
COMMON_DIM = 256  # wider heads are swept for the least and the most alone
SEQLEN, HEADS, GROUP = 512, 24, 4  # enough blocks that forwards share no walk, and no more than an SM each on SM 9.0
_Portable = config.PortableForward | config.PortableBackward
_DTYPES = {"tf32": torch.float32, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

PLAIN = Specialization()
CAUSAL = Specialization(band="causal")
BITS = Specialization(mask="bits")
SEGMENTS = Specialization(band="causal", mask="segments")
KEYS = Specialization(mask="key segments")
# What a call can ask of the portable kernels at once: the most shared memory and registers.
EVERYTHING = Specialization(mask="bits", bias="bias", wide_bias=True, softcap=True, dropout=True)
PORTABLE = (
    PLAIN,
    CAUSAL,
    BITS,
    replace(PLAIN, bias="key bias"),
    replace(CAUSAL, dropout=True),
    EVERYTHING,
    replace(EVERYTHING, band="causal", mask="segments"),
)
PORTABLE_FORWARD = (replace(EVERYTHING, decode=True),)
PORTABLE_BACKWARD = (replace(EVERYTHING, bias="broadcast bias"),)
UNALIGNED = (
    replace(CAUSAL, unaligned=True),
    replace(EVERYTHING, unaligned=True),
)  # where such rows have blocks of their own
WINDOW = Specialization(band="window")
HOPPER = (
    PLAIN,
    CAUSAL,
    WINDOW,
    BITS,
    replace(SEGMENTS, band=""),
    SEGMENTS,
    KEYS,
    replace(BITS, dtype="float16"),
    replace(CAUSAL, softcap=True),
    replace(CAUSAL, bias="key bias"),
    replace(BITS, bias="key bias"),
    replace(CAUSAL, bias="bias"),
    replace(CAUSAL, bias="bias", wide_bias=True),
    replace(CAUSAL, dropout=True),
    replace(CAUSAL, deterministic=True),
    replace(BITS, deterministic=True),
    replace(CAUSAL, grouped=True),
    replace(BITS, grouped=True),
    replace(SEGMENTS, grouped=True),
)


class Task(NamedTuple):
    """One row with one head dimension: its specializations share kernels, and so a process."""

    direction: str
    row: config.Row
    width: int

    @property
    def name(self) -> str:
        return resources.entry(self.row, self.direction, self.width)


def reachable(rows: tuple[config.Row, ...], sm: int) -> list[config.Row]:
    """Return the rows that `choose` can return on an architecture: of each kernel the first that suits a head dimension."""
    found: dict[config.Row, None] = {}
    widths = {min(row.dim, validation.MAX_HEAD_DIM) for row in rows}  # a choice changes where a row ends
    for itemsize in (2, 4):
        for dim in sorted(widths):
            suited, _ = choose.candidates(rows, arch.KNOWN[sm], choose.Demand(1, 1, 1, 1, dim, dim, itemsize))
            first = {row.kernel: row for row in reversed(suited)}
            for row in suited:
                if first[row.kernel] is row and row.kernel not in config.CPU:
                    found[row] = None
    return list(found)


def tasks(sms: tuple[int, ...], kernels: tuple[str, ...]) -> list[Task]:
    """Return what there is to sweep."""
    return [
        Task(direction, row, width)
        for sm in sms
        for direction, rows in DIRECTIONS.items()
        for row in reachable(rows, sm)
        if row.kernel in kernels
        for width in resources.widths(row)
    ]


def specializations(task: Task) -> tuple[Specialization, ...]:
    """Return what a row is compiled for."""
    if task.row.kernel != "portable":
        kernels = (resources.canonical(task.row.kernel, task.direction, each) for each in HOPPER)
        return tuple(
            each for each in dict.fromkeys(kernels) if not _launcher(task).refusals(*make_call(each, task.width))
        )
    if task.row.itemsize == 4:
        return tuple(replace(each, dtype="float32", wide_bias=False) for each in (CAUSAL, EVERYTHING))
    if task.row.dim > COMMON_DIM:
        return (CAUSAL, EVERYTHING)
    own = UNALIGNED if isinstance(task.row.config, _Portable) and task.row.config.unaligned else ()
    return (*PORTABLE, *(PORTABLE_FORWARD if task.direction == "forward" else PORTABLE_BACKWARD), *own)


def make_call(wanted: Specialization, width: int) -> dispatch.Call:
    """Return a call that has a specialization, its heads `width` wide. Its tensors lie on the CPU, uninitialised."""
    dtype = _DTYPES[wanted.dtype]
    heads_k = HEADS // GROUP if wanted.grouped else HEADS
    seqlen_q = 8 if wanted.decode else SEQLEN

    def rows(seqlen: int, heads: int) -> torch.Tensor:
        if wanted.unaligned:  # a narrower head, so that columns have to be tested as well
            return torch.empty(1, seqlen, heads, width - 1, dtype=dtype)
        return torch.empty(1, seqlen, heads, width, dtype=dtype)

    query, key, value = rows(seqlen_q, HEADS), rows(SEQLEN, heads_k), rows(SEQLEN, heads_k)
    bias_shape = {
        "key bias": (1, HEADS, 1, SEQLEN),
        "bias": (1, HEADS, seqlen_q, SEQLEN),
        "broadcast bias": (1, 1, seqlen_q, SEQLEN),
    }.get(wanted.bias)
    bias = torch.empty(bias_shape, dtype=torch.float32 if wanted.wide_bias else dtype) if bias_shape else None
    low = -100 if wanted.band == "window" else -UNBOUNDED
    high = 0 if wanted.band else UNBOUNDED
    varlen = None
    if wanted.varlen:
        query, key, value = query[0], key[0], value[0]
        bias = bias if bias is None else bias[0, :, 0]
        ends = torch.tensor([0, SEQLEN], dtype=torch.int32)
        varlen = Varlen(ends, ends, SEQLEN, SEQLEN, False)
    options = Options(low, high, 0.1, 30.0 * wanted.softcap, 0.1 * wanted.dropout, wanted.deterministic)
    seed = torch.zeros(1, dtype=torch.int64) if wanted.dropout else None
    return dispatch.Call(query, key, value, bias, _make_tiles(wanted, seqlen_q), seed, varlen, options)


def _make_tiles(wanted: Specialization, seqlen_q: int) -> Tiles:
    """Return lists with bits or segments `[1, H, ...]`."""
    if not wanted.mask:
        return Tiles()
    q_segments = torch.empty(1, seqlen_q, dtype=torch.int32) if wanted.mask == "segments" else None
    k_segments = torch.empty(1, HEADS, SEQLEN, dtype=torch.int32)
    if wanted.varlen:
        return Tiles(k_segments=k_segments)
    if wanted.mask == "bits":
        mask = torch.empty(1, HEADS, seqlen_q, SEQLEN, dtype=torch.bool)
        return Tiles(*meta.pack_mask_outputs(mask, 1, HEADS, seqlen_q, -UNBOUNDED, UNBOUNDED))
    lists = meta.list_tiles_outputs(k_segments, 1, HEADS, seqlen_q, SEQLEN, -UNBOUNDED, UNBOUNDED)
    return Tiles(*lists, q_segments=q_segments, k_segments=k_segments)


def _launcher(task: Task) -> ModuleType:
    kernels = dispatch._FORWARD if task.direction == "forward" else dispatch._BACKWARD
    return import_module(kernels[task.row.kernel])


def launch(task: Task, call: dispatch.Call) -> None:
    """Launch a row for a call."""
    varlen = call.varlen is not None
    out, lse = (meta.varlen_forward_outputs if varlen else meta.forward_outputs)(call.query, call.value)
    launcher = _launcher(task)
    if task.direction == "forward":
        launcher.forward(*call, out, lse, task.row.config)
        return
    grads = meta.backward_outputs(call.query, call.key, call.value, call.bias, call.bias is not None)
    dbias = grads[3] if call.bias is not None else None
    launcher.backward(
        torch.empty_like(out), torch.empty_like(lse), *call[:3], out, lse, *call[3:], *grads[:3], dbias, task.row.config
    )


def compile_one(task: Task, wanted: Specialization) -> dict[str, Usage]:
    """Compile a row for one specialization; return what each of its kernels takes."""
    from dmattn_ops.testing.compile_only import read_resources
    from dmattn_ops.testing.stand_in import compiled_launches

    sm = task.row.sm
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = wanted.dtype == "tf32"
    try:
        with compiled_launches(sm) as launches:
            launch(task, make_call(wanted, task.width))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    return {each.kernel: read_resources(each.compiled, sm, each.log).usage(arch.KNOWN[sm]) for each in launches}


Lines = dict[str, dict[str, Any]]


def sweep(todo: list[Task], jobs: int, say: Callable[[str], None]) -> Lines:
    """Compile every specialization of `todo` in `jobs` processes; return its part of a table."""
    units = [(task, wanted) for task in todo for wanted in specializations(task)]
    rows: Lines = {
        task.name: {"config": repr(task.row.config), "source": source(_launcher(task).__name__)} for task in todo
    }
    started, failed = time.time(), []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # read when a worker imports triton
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
            pending = {pool.submit(compile_one, *unit): unit for unit in units}
            for done, future in enumerate(as_completed(pending), 1):
                task, wanted = pending[future]
                try:
                    rows[task.name][resources.line_name(wanted)] = future.result()
                except Exception as error:  # of a compiler: named at the end, after everything else was compiled
                    failed.append(f"{task.name}, {resources.line_name(wanted)}: {type(error).__name__}: {error}")
                say(f"{done} of {len(units)}, {time.time() - started:.0f} s, {task.name}, {wanted}")
    if failed:
        raise RuntimeError("\n".join(failed))
    return {task.name: _in_order(task, rows[task.name]) for task in todo}


def _in_order(task: Task, lines: dict[str, Any]) -> dict[str, Any]:
    """Return a row's lines in the order of `specializations`, whatever order they were compiled in."""
    return {name: lines[name] for name in (*resources.MADE_OF, *map(resources.line_name, specializations(task)))}


def load(version: str) -> Lines:
    """Return the rows of a version's table as it is now, none where there is no table."""
    path = resources.path(version)
    return json.loads(path.read_text())["rows"] if path.exists() else {}


def write(version: str, rows: Lines) -> None:
    """Write a table: a line for each specialization, so that a change of one is a change of one line."""
    order = [task.name for task in tasks(ARCHITECTURES, KERNELS)]
    text = [f'{{"triton": {json.dumps(version)},', f'"columns": {json.dumps(Usage._fields)},', '"rows": {']
    kept = [name for name in order if name in rows]
    for name in kept:
        lines = [f"  {json.dumps(line)}: {json.dumps(kernels)}" for line, kernels in rows[name].items()]
        text.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}" + "," * (name != kept[-1]))
    resources.TABLES.mkdir(exist_ok=True)
    resources.path(version).write_text("\n".join([*text, "}}"]) + "\n")


def is_configured(task: Task, lines: dict[str, Any]) -> bool:
    """Return whether a row of a table has the task's configuration and specializations."""
    names = (*resources.MADE_OF, *map(resources.line_name, specializations(task)))
    return set(lines) == set(names) and lines["config"] == repr(task.row.config)


def stale(todo: list[Task], rows: Lines) -> list[Task]:
    """Return the tasks whose row a table lacks, or that was compiled of another configuration or source."""

    def is_fresh(task: Task) -> bool:
        lines = rows.get(task.name, {})
        return is_configured(task, lines) and lines["source"] == source(_launcher(task).__name__)

    return [task for task in todo if not is_fresh(task)]


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
    """Return a statement as text, whatever its layout, comments and docstring."""
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
        del node.body[0]
    return ast.dump(node)


def differences(found: Lines, frozen: Lines) -> Iterator[str]:
    """Tell where what was compiled is not what a table holds."""
    for name, lines in found.items():
        for line, kernels in lines.items():
            before = frozen.get(name, {}).get(line)
            if json.loads(json.dumps(kernels)) != before:
                yield f"{name}, {line}:\n  table {before}\n  found {json.dumps(kernels)}"


def main() -> int:
    """Run what the arguments ask for; return the number of differences."""
    parser = argparse.ArgumentParser(description="compile every configuration; verify or write the table of resources")
    parser.add_argument("--write", action="store_true", help="freeze what is found")
    parser.add_argument("--stale", action="store_true", help="only rows of another configuration or source")
    parser.add_argument("--sm", type=int, nargs="+", default=ARCHITECTURES, help="such as 90")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    frozen = load(triton.__version__)
    todo = tasks(tuple(options.sm), tuple(options.kernels))
    if options.stale:
        todo = stale(todo, frozen)
    found = sweep(todo, options.jobs, lambda line: print(f"\r{line:.118}\033[K", end="", file=sys.stderr))
    print(file=sys.stderr)
    changes = list(differences(found, frozen))
    print(
        "\n".join(
            [*changes, f"{len(found)} rows compiled with triton {triton.__version__}, {len(changes)} lines differ"]
        )
    )
    if options.write:
        write(triton.__version__, {**load(triton.__version__), **found})
        return 0
    return len(changes)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
