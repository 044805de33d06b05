"""What the guides show runs, from the first line of a page to its last, and their links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GUIDES = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_code_runs(page):
    if page.name == "transformers.md":
        pytest.importorskip("transformers", reason="transformers is not installed")
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert link.startswith("https://") or (page.parent / link).exists(), link


def test_the_guides_are_there():
    assert {"transformers.md", "migrating.md", "module.md", "distributed.md"} <= {page.name for page in GUIDES}
