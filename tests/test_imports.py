"""Arrows: which module imports which, what importing the package loads, and what is said in one place only."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import dmattn_ops

PACKAGE = Path(dmattn_ops.__file__).parent
ROOT = PACKAGE.parent

# What a module may import from the package when it is imported, as in DESIGN.md; testing may import everything.
ARROWS = {
    "problem": (),
    "packing": ("problem",),
    "version": (),
    "meta": ("problem",),
    "layout": ("problem",),
    "environment": (),
    "shared_files": ("environment",),
    "arch": ("problem", "environment"),
    "config": ("problem", "arch"),
    "choose": ("problem", "arch", "config"),
    "ops": ("problem",),
    "validation": ("problem", "meta"),
    "meta.fakes": ("problem", "meta", "ops", "validation"),
    "reference": ("problem", "meta", "layout"),
    "native": ("problem",),
    "tuning": ("problem", "environment", "shared_files", "arch", "config", "choose"),
    "cost": ("problem", "arch", "config", "tuning"),
    "dispatch": ("problem", "meta", "environment", "arch", "config", "choose", "tuning", "reference"),
    "tune": ("problem", "arch", "config", "cost", "tuning", "plans", "dispatch", "masks", "api"),
    "explain": ("problem", "arch", "config", "choose", "dispatch", "masks", "resources", "validation", "api"),
    "resources": ("problem", "config"),
    "plans": ("problem", "environment"),
    "implementations": ("problem", "meta", "meta.fakes", "ops", "validation", "plans", "dispatch"),
    "autograd": ("problem", "ops"),
    "flops": ("problem", "ops"),
    "masks": ("problem", "meta", "layout", "ops", "validation"),
    "api": ("problem", "validation", "masks", "ops", "autograd"),
    "selection": (),
    "selection.order": (),
    "selection.reference": ("selection.order",),
    "kernels": ("problem", "config", "meta", "arch", "selection.order", "packing", "kernels"),
}


def module_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts[0] == "kernels":
        return "kernels"
    return ".".join(part for part in parts if part != "__init__")


def project_imports(path):
    """Return the modules of the package that a file imports outside of functions."""
    found = set()
    pending = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue  # lazy
        pending.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            exists = {name for name in names if (PACKAGE.parent / name.replace(".", "/")).with_suffix(".py").exists()}
            packages = {name for name in names if (PACKAGE.parent / name.replace(".", "/") / "__init__.py").exists()}
            found |= exists | packages or {node.module}
    inside = {name.removeprefix("dmattn_ops.") for name in found if name.startswith("dmattn_ops.")}
    return {"kernels" if name.startswith("kernels") else name for name in inside}


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


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_what_its_arrow_allows(path):
    name = module_of(path)
    assert name in ARROWS, f"draw the arrow of {name} in ARROWS and DESIGN.md"
    assert project_imports(path) <= set(ARROWS[name])


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
        "from dmattn_ops.kernels import tile_mask\n"
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
