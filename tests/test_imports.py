"""Arrows: which module imports which, what importing the package loads, and what is said in one place only."""

import ast
import graphlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import dmattn_ops

PACKAGE = Path(dmattn_ops.__file__).parent
ROOT = PACKAGE.parent

# What a module imports from the package when it is imported, no more and no less, as in DESIGN.md; a folder counts as one
# module, but for meta. testing may import everything.
ARROWS = {
    "problem": (),
    "environment": (),
    "require": (),
    "privates": (),
    "version": (),
    "biases": ("require",),
    "recording": (),
    "selection": (),
    "meta": ("problem", "require"),
    "layout": ("problem", "meta"),
    "sharded": ("problem",),
    "arch": ("environment",),
    "plans": ("problem", "environment"),
    "shared_files": ("environment",),
    "bands": ("problem", "require"),
    "ops": ("problem", "privates"),
    "values": ("problem", "environment", "require"),
    "config": ("arch",),
    "taken_apart": ("problem", "require", "privates", "version", "ops", "meta", "sharded", "values", "validation"),
    "tile_mask": ("problem", "require", "meta", "layout", "sharded", "bands", "values", "taken_apart"),
    "autograd": ("privates", "ops"),
    "flops": ("bands", "ops"),
    "batching": ("ops",),
    "choose": ("problem", "arch", "config"),
    "block_mask": ("bands", "chunks", "tile_mask"),
    "chunks": ("problem", "layout", "meta", "bands"),
    "flex": ("problem", "require", "layout", "tile_mask"),
    "call": ("problem", "choose"),
    "native": ("problem", "call"),
    "packing": ("problem", "call"),
    "reference": ("problem", "layout", "meta", "call"),
    "resolve": ("arch", "problem", "config", "call"),
    "resources": ("problem", "config", "call"),
    "sinks": ("recording", "call"),
    "tuning": ("problem", "environment", "arch", "shared_files", "config", "choose", "call", "packing"),
    "validation": ("problem", "require", "bands", "meta", "call"),
    "kernels": ("problem", "recording", "selection", "meta", "arch", "config", "call", "packing"),
    "cost": ("problem", "arch", "config", "tuning"),
    "dispatch": (
        "environment",
        "recording",
        "arch",
        "config",
        "choose",
        "call",
        "packing",
        "reference",
        "resolve",
        "sinks",
        "tuning",
    ),
    "arguments": (
        "problem",
        "environment",
        "require",
        "privates",
        "sharded",
        "bands",
        "ops",
        "tile_mask",
        "validation",
    ),
    "repeats": ("problem", "plans", "bands", "ops", "tile_mask", "autograd", "arguments"),
    "documents": ("require", "layout", "sharded", "tile_mask", "validation"),
    "masks": (
        "problem",
        "require",
        "layout",
        "sharded",
        "bands",
        "values",
        "tile_mask",
        "block_mask",
        "documents",
        "validation",
    ),
    "meta.fakes": ("problem", "require", "meta", "ops", "call", "validation"),
    "backend": ("version", "arch", "native", "dispatch"),
    "api": (
        "problem",
        "require",
        "sharded",
        "bands",
        "values",
        "tile_mask",
        "autograd",
        "validation",
        "arguments",
        "repeats",
        "masks",
    ),
    "explain": (
        "problem",
        "require",
        "meta",
        "arch",
        "bands",
        "values",
        "tile_mask",
        "choose",
        "call",
        "packing",
        "resources",
        "validation",
        "dispatch",
        "arguments",
        "masks",
    ),
    "sdpa": ("problem", "bands", "masks"),
    "trees": ("problem", "require", "bands", "validation", "values", "tile_mask", "masks"),
    "tune_calls": ("problem", "bands", "tile_mask", "call", "tuning", "arguments", "masks"),
    "tune_epochs": ("meta", "arch", "call", "packing", "tuning", "dispatch", "tune_calls"),
    "tune": (
        "meta",
        "arch",
        "plans",
        "config",
        "call",
        "resolve",
        "tuning",
        "cost",
        "dispatch",
        "tune_calls",
        "tune_epochs",
    ),
    "implementations": (
        "problem",
        "environment",
        "recording",
        "layout",
        "chunks",
        "meta",
        "plans",
        "ops",
        "values",
        "call",
        "dispatch",
        "meta.fakes",
    ),
    "compat": (
        "problem",
        "biases",
        "require",
        "layout",
        "bands",
        "tile_mask",
        "reference",
        "validation",
        "arguments",
        "masks",
        "api",
    ),
    "distributed": (
        "problem",
        "environment",
        "require",
        "ops",
        "layout",
        "bands",
        "tile_mask",
        "validation",
        "values",
        "arguments",
        "documents",
        "masks",
    ),
    "nn": ("require", "selection", "validation", "layout", "tile_mask", "documents", "masks", "api"),
    "integrations": (
        "problem",
        "environment",
        "require",
        "layout",
        "meta",
        "bands",
        "tile_mask",
        "validation",
        "masks",
        "api",
        "nn",
    ),
}

ROOMS = {"kernels", "selection", "packing", "distributed", "integrations", "compat", "nn", "sdpa"}


def module_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return node(".".join(part for part in parts if part != "__init__"))


def node(name):
    """Return the module that a dotted name inside the package counts as."""
    room = name.split(".")[0]
    return room if room in ROOMS else name


def project_imports(path):
    """Return the modules of the package that a file imports outside of functions, but for its own."""
    found = set()
    pending = [ast.parse(path.read_text())]
    while pending:
        statement = pending.pop()
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue  # lazy
        pending.extend(ast.iter_child_nodes(statement))
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module is not None:
            names = {f"{statement.module}.{alias.name}" for alias in statement.names}
            exists = {name for name in names if (PACKAGE.parent / name.replace(".", "/")).with_suffix(".py").exists()}
            packages = {name for name in names if (PACKAGE.parent / name.replace(".", "/") / "__init__.py").exists()}
            found |= exists | packages or {statement.module}
    inside = {node(name.removeprefix("dmattn_ops.")) for name in found if name.startswith("dmattn_ops.")}
    return inside - {module_of(path)}


MODULES = sorted(
    {
        path
        for path in [
            *PACKAGE.rglob("*.py"),
            *(PACKAGE / "meta").glob("*.py"),
        ]  # a symbolic link, which rglob leaves out
        if path.name != "__main__.py" and "testing" not in path.parts and path != PACKAGE / "__init__.py"
    }
)
NAMES = sorted({module_of(path) for path in MODULES})


@pytest.mark.parametrize("name", NAMES)
def test_a_module_imports_what_its_arrow_says(name):
    assert name in ARROWS, f"draw the arrow of {name} in ARROWS and DESIGN.md"
    imported = set().union(*(project_imports(path) for path in MODULES if module_of(path) == name))
    assert imported == set(ARROWS[name])


def test_arrows_never_turn_back():
    assert list(graphlib.TopologicalSorter(ARROWS).static_order())
    assert set(ARROWS) == set(NAMES)


def in_fresh_process(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_loads_neither_triton_nor_a_compiler_nor_kernels():
    loaded = in_fresh_process(
        "import sys, json, torch; before = set(sys.modules); import dmattn_ops;"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    heavy = [
        name
        for name in loaded
        if name.split(".")[0] in {"triton", "torch", "setuptools", "ninja", "numpy"}
        or name.startswith("dmattn_ops.kernels")
    ]
    assert "dmattn_ops.api" in loaded
    assert [name for name in heavy if not name.startswith("torch.")] == []
    assert not {"torch._dynamo", "torch._inductor", "torch.utils.cpp_extension", "torch.utils.flop_counter"} & set(
        loaded
    )


def test_importing_touches_no_gpu_and_prints_nothing():
    code = (
        "import io, contextlib, warnings, json, torch; text = io.StringIO();\n"
        "with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text), warnings.catch_warnings():\n"
        "    warnings.simplefilter('error'); import dmattn_ops\n"
        "print(json.dumps([text.getvalue(), torch.cuda.is_initialized()]))"
    )
    assert in_fresh_process(code) == ["", False]


@pytest.mark.parametrize(
    "order",
    [
        "import torch.utils.flop_counter, dmattn_ops",
        "import dmattn_ops, torch.utils.flop_counter",
        "import dmattn_ops, importlib.util as u; u.find_spec('torch.utils.flop_counter'); import torch.utils.flop_counter",
    ],
)
def test_flop_formulas_are_registered_whatever_is_imported_first(order):
    registry = "torch.utils.flop_counter.flop_registry"
    code = f"{order}, json, torch; print(json.dumps(torch.ops.dmattn.backward in {registry}))"
    assert in_fresh_process(code) is True


def test_portable_kernels_need_no_gluon():
    pytest.importorskip("triton")
    code = (
        "import sys, json; sys.modules['triton.experimental.gluon'] = None\n"
        "from dmattn_ops.kernels.tile_mask import launch as tile_mask\n"
        "from dmattn_ops.kernels.portable import backward, forward\n"
        "print(json.dumps(True))"
    )
    assert in_fresh_process(code) is True


def test_only_ops_holds_schemas_and_only_arch_asks_the_driver():
    driver = ("get_device_properties", "get_device_capability", "get_device_name")
    for path in MODULES:
        text, name = path.read_text(), module_of(path)
        assert ("Tensor? " in text) == (name == "ops"), name
        if name not in {"arch", "kernels"}:
            assert not any(question in text for question in driver), name


def test_public_names_are_documented():
    for name in dmattn_ops.__all__:
        assert getattr(dmattn_ops, name).__doc__, name
    assert set(dmattn_ops.__all__) >= {
        "flash_dmattn_func",
        "flash_dmattn_varlen_func",
        "flash_dmattn_qkvpacked_func",
        "prepare_mask",
    }
