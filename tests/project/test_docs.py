"""The documentation: examples run, links and anchors exist, every public name is there, and what is generated is fresh."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import dmattn_ops

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDES = sorted(DOCS.glob("*.md"))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob(".github/**/*.md"), *DOCS.glob("**/*.md")])
FENCED = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?:\]\(|<img [^>]*src=\")([^)\s\"]+)[)\"]")
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
BESIDE = ("testing",)  # modules that are public besides those that `dmattn_ops` has as attributes
ON_TWO_RANKS = {"distributed.md"}
NO_OBJECTS = {"__version__"}  # told in words


def of_page(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module that writes pictures and tables."""
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    monkeypatch.delitem(sys.modules, "generate", raising=False)
    return importlib.import_module("generate")


def run_code(page: Path) -> int:
    """Run the code of a page from its first line to its last; return how many blocks there are."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    return len(blocks)


@pytest.mark.parametrize("page", GUIDES, ids=of_page)
def test_code_runs(page: Path, two_ranks: Callable) -> None:
    if page.name in ("transformers.md", "trees.md"):
        pytest.importorskip("transformers", reason="transformers is not installed")
    if page.name in ON_TWO_RANKS:
        assert min(two_ranks(run_code, page, limit=240.0)) > 0
    else:
        run_code(page)


def slug(heading: str) -> str:
    """Return the anchor of a heading, as Python-Markdown makes it."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("**", "")
    plain = re.sub(r"[^\w\s-]", "", plain.encode("ascii", "ignore").decode()).strip().lower()
    return re.sub(r"[-\s]+", "-", plain)


def anchors(page: Path) -> set[str]:
    text = page.read_text()
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {slug(heading) for heading in headings} | set(DIRECTIVE.findall(text))


def wrong_links(page: Path) -> list[str]:
    """Return the links of a page that lead nowhere: to files that do not exist, or headings that their page does not have."""
    wrong = []
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        if re.match(r"https?://|mailto:", link):
            continue
        target, _, anchor = link.partition("#")
        place = page.parent / target if target else page
        if not place.exists() or (anchor and (place.suffix != ".md" or anchor not in anchors(place))):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=of_page)
def test_links_lead_somewhere(page: Path) -> None:
    assert wrong_links(page) == []


def test_wrong_links_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A heading, `named`\n\n```text\n# no heading\n```\n")
    page = tmp_path / "page.md"
    good = ["other.md", "other.md#a-heading-named", "#own", "https://example.org/#x"]
    bad = ["missing.md", "other.md#no-heading", "#no-heading", "pictures/missing.svg"]
    links = "".join(f"[text]({link})\n" for link in [*good, *bad])
    page.write_text(f'# Own\n{links}<img alt="x" src="missing.png" width="9">\n')
    assert wrong_links(page) == [*bad, "missing.png"]


def settings() -> str:
    return (ROOT / "mkdocs.yml").read_text()


def test_every_page_has_a_place_in_the_navigation_and_every_place_a_page() -> None:
    navigation = settings().partition("\nnav:\n")[2].partition("\ntheme:")[0]
    named = re.findall(r"(\S+\.md)$", navigation, re.MULTILINE)
    [documents] = re.findall(r"^PAGES = (\{.*?\})$", (DOCS / "hooks.py").read_text(), re.MULTILINE | re.DOTALL)
    beside = ast.literal_eval(documents)  # pages made of documents outside of docs
    assert all((ROOT / source).exists() for source in beside)
    assert sorted(named) == sorted([*(str(page.relative_to(DOCS)) for page in DOCS.glob("**/*.md")), *beside.values()])


def public_names() -> Iterator[str]:
    """Yield every public name: of `dmattn_ops`, of the modules that are its attributes, and of their modules with `__all__`."""
    yield from (f"dmattn_ops.{name}" for name in dmattn_ops.__all__ if name not in NO_OBJECTS)
    yield from (f"dmattn_ops.{module}.{name}" for name, module in dmattn_ops._PLACES.items())
    for name in (*dmattn_ops._MODULES, *BESIDE):
        module = importlib.import_module(f"dmattn_ops.{name}")
        yield from names_of(module, whole=not hasattr(module, "__path__"))
        for found in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{module.__name__}."):
            if found.name.endswith("integrations.transformers"):
                pytest.importorskip("transformers", reason="transformers is not installed")
            if not found.name.endswith(".__main__"):
                yield from names_of(importlib.import_module(found.name), whole=False)


def names_of(module: ModuleType, whole: bool) -> list[str]:
    """Return the names in `__all__`; of a module that is public as a `whole`, else those that it defines."""
    names = getattr(module, "__all__", None)
    if names is None:
        own = (name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__)
        names = [name for name in own if whole and not name.startswith("_") and callable(getattr(module, name))]
    return [f"{module.__name__}.{name}" for name in names]


def resolve(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def is_module(path: str) -> bool:
    return path.replace(".", "/") in {
        of_page(file).removesuffix(".py").removesuffix("/__init__") for file in (ROOT / "dmattn_ops").rglob("*.py")
    }


def documented() -> set[str]:
    return {path for page in GUIDES for path in DIRECTIVE.findall(page.read_text())}


def test_every_public_name_is_in_the_documentation() -> None:
    modules = {path for path in documented() if is_module(path)}
    objects = [resolve(path) for path in documented() - modules]

    def is_shown(name: str) -> bool:
        value, (module, _, own_name) = resolve(name), name.rpartition(".")
        if isinstance(value, (bool, str)):  # a constant: told in words
            return own_name in (DOCS / "api-modules.md").read_text()
        # mkdocstrings shows what a module holds by its own name, but not what hides behind a submodule of that name.
        with_module = module in modules and value.__name__ == own_name and not is_module(name)
        return with_module or any(value is shown for shown in objects)

    missing = [name for name in public_names() if not is_shown(name)]
    assert missing == [], "add `::: NAME` to docs/api.md or docs/api-modules.md"


def test_what_the_documentation_shows_exists_and_says_what_it_is() -> None:
    for path in documented():
        shown = importlib.import_module(path) if is_module(path) else resolve(path)
        assert inspect.getdoc(shown), path


def described(docstring: str) -> set[str]:
    """Return the names of the arguments that a docstring describes."""
    section = re.search(r"^Args:\n((?:    .*\n|\n)*)", docstring + "\n", re.MULTILINE)
    entries = re.findall(r"^    (\w[\w, ]*):", section[1], re.MULTILINE) if section else []
    return {name for entry in entries for name in re.split(r", ", entry)}


@pytest.mark.parametrize("name", [name for name in dmattn_ops.__all__ if inspect.isfunction(getattr(dmattn_ops, name))])
def test_docstrings_of_functions_describe_every_argument(name: str) -> None:
    function = getattr(dmattn_ops, name)
    arguments = {
        argument.name
        for argument in inspect.signature(function).parameters.values()
        if argument.kind is not inspect.Parameter.VAR_KEYWORD
    }
    assert described(inspect.getdoc(function) or "") == arguments


def test_what_is_generated_is_fresh(generate: ModuleType) -> None:
    drawn = generate.pictures()
    kept = {path.name: path.read_text() for path in (DOCS / "pictures").iterdir()}
    assert kept == drawn, "run python docs/generate.py"
    assert generate.OPERATORS_HEADER.read_text() == generate.operators_header(), "run python docs/generate.py"
    for page in GUIDES:
        assert generate.filled(page.read_text()) == page.read_text(), f"{page.name}: run python docs/generate.py"


def test_every_picture_is_shown() -> None:
    shown = {link for page in GUIDES for link in LINK.findall(page.read_text()) if link.endswith(".svg")}
    assert shown == {f"pictures/{path.name}" for path in (DOCS / "pictures").iterdir()}


def test_the_tests_that_hold_a_promise_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (DOCS / "evidence.md").read_text())
    assert len(named) > 50
    for file, test in named:
        assert (ROOT / file).exists(), file
        assert not test or f"\ndef {test}(" in (ROOT / file).read_text(), f"{file}::{test}"


def test_files_that_contributors_are_sent_to_exist() -> None:
    named = re.findall(r"`([\w/]+\.(?:py|cpp|h|md))`", (ROOT / "CONTRIBUTING.md").read_text())
    folders = ("dmattn_ops", "tests", "csrc", "docs", "examples", "benchmarks")
    files = [f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.*")]
    assert len(named) > 10
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []


def test_what_torch_says_of_an_exported_program_without_this_library_is_what_the_page_says(tmp_path: Path) -> None:
    class Attention(torch.nn.Module):
        def forward(self, query: torch.Tensor) -> torch.Tensor:
            return dmattn_ops.flash_dmattn_func(query, query, query)

    program = torch.export.export(Attention(), (torch.randn(1, 8, 1, 8),))
    torch.export.save(program, tmp_path / "program.pt2")
    command = [sys.executable, "-c", f"import torch; torch.export.load({str(tmp_path / 'program.pt2')!r})"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    said = done.stderr + done.stdout
    assert "RuntimeError" in said
    page = (DOCS / "compile.md").read_text()
    [named] = re.findall(r"`torch.export.load` warns that it `([^`]+)` and raises a RuntimeError", page)
    assert named in said


def test_variables_of_the_environment_are_in_the_documentation() -> None:
    variable = re.compile(r"[\"'](?:FLASH_)?(DMATTN_[A-Z_]+)[\"']")
    source = "".join(path.read_text() for path in (ROOT / "dmattn_ops").glob("*.py"))
    text = (DOCS / "api.md").read_text()
    found = set(variable.findall(source))
    assert {"DMATTN_ARCH", "DMATTN_CHECK", "DMATTN_PROFILE_BACKWARD"} <= found
    assert [name for name in sorted(found) if name not in text] == []
