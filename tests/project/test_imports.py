"""Arrows: which room imports which, what importing the package loads, and what is said in one place only."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dmattn_ops

PACKAGE = Path(dmattn_ops.__file__).parent
ROOT = PACKAGE.parent

# The rooms in DESIGN.md: what each imports from others when it is imported, no more and no less.
DESIGN = " ".join((ROOT / "DESIGN.md").read_text().split())
ROOM = re.compile(r"- \*\*([a-z_.]+)\*\*: (?:(?! - \*\*).)*? Imports: ([a-z_., ]*)\.(?= )")
ARROWS = {room: set() if imported == "none" else set(imported.split(", ")) for room, imported in ROOM.findall(DESIGN)}


def room(name):
    """Return the room of a dotted name inside the package: a package or a module beside them, and the fakes of meta."""
    return "meta.fakes" if name.startswith("meta.fakes") else name.split(".")[0]


def room_of(path):
    return room(".".join(path.relative_to(PACKAGE).with_suffix("").parts))


def imported_rooms(path):
    """Return the rooms that a file imports outside of functions, but for its own."""
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
            for name in (f"{statement.module}.{alias.name}" for alias in statement.names):
                place = ROOT / name.replace(".", "/")
                found.add(name if place.with_suffix(".py").exists() or place.is_dir() else statement.module)
    inside = {room(name.removeprefix("dmattn_ops.")) for name in found if name.startswith("dmattn_ops.")}
    return inside - {room_of(path)}


MODULES = sorted(
    path
    for path in {*PACKAGE.rglob("*.py"), *(PACKAGE / "meta").glob("*.py")}  # a symbolic link, which rglob leaves out
    if path.name != "__main__.py" and "testing" not in path.parts and path != PACKAGE / "__init__.py"
)
ROOMS = sorted({room_of(path) for path in MODULES})


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_imports_what_design_says(name):
    imported = set().union(*(imported_rooms(path) for path in MODULES if room_of(path) == name))
    assert name in ARROWS and imported == ARROWS[name], f"DESIGN.md: {name} imports {', '.join(sorted(imported))}"


def test_every_room_is_listed_and_imports_from_rooms_above():
    above = set()
    for name, others in ARROWS.items():
        assert others <= above, name
        above.add(name)
    assert sorted(ARROWS) == ROOMS


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
    assert "dmattn_ops.api.functions" in loaded
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
        "from dmattn_ops.kernels.masks import launch as tile_mask\n"
        "from dmattn_ops.kernels.portable import backward, forward\n"
        "print(json.dumps(True))"
    )
    assert in_fresh_process(code) is True


def test_the_package_needs_nothing_of_the_tests():
    """What only this repository uses is in `tests/tools`, and a wheel has no tests."""
    for path in PACKAGE.rglob("*.py"):
        assert not re.search(r"^\s*(from|import) tests\b", path.read_text(), re.MULTILINE), path


def test_only_ops_holds_schemas_and_only_arch_asks_the_driver():
    driver = ("get_device_properties", "get_device_capability", "get_device_name")
    for path in MODULES:
        text, name = path.read_text(), path.relative_to(PACKAGE).as_posix()
        assert ("Tensor? " in text) == (name == "ops/schemas.py"), name
        if name != "choice/arch.py" and room_of(path) not in {"kernels", "launching"}:
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


def test_dir_lists_what_is_public_only():
    """Internal modules, once imported, are attributes of the package too."""
    listed = set(dir(dmattn_ops))
    assert listed == {*dmattn_ops.__all__, *dmattn_ops._MODULES, *dmattn_ops._PLACES} and "dispatch" not in listed


def test_kernels_of_sm_90_share_modules_and_not_each_other():
    """`kernels/hopper`: what kernels share stands beside their packages and imports none; backwards launch dbias."""
    folder = PACKAGE / "kernels" / "hopper"
    packages = {path.name for path in folder.iterdir() if (path / "__init__.py").exists()}
    found = set()
    for path in folder.rglob("*.py"):
        own = path.relative_to(folder).parts[0]
        imported = re.findall(r"^from dmattn_ops\.kernels\.hopper\.(\w+)", path.read_text(), re.MULTILINE)
        found |= {(own, name) for name in imported if name in packages and name != own}
    assert found == {(own, "dbias") for own in ("backward", "backward_256", "behind.py")}
