"""What the guides show runs, from the first line of a page to its last, and their links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GUIDES = sorted((ROOT / "docs").glob("*.md"))
ON_TWO_RANKS = {"distributed.md"}


def run_code(page):
    """Run the code of a page from its first line to its last; return how many blocks there are."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    return len(blocks)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_code_runs(page, two_ranks):
    if page.name == "transformers.md":
        pytest.importorskip("transformers", reason="transformers is not installed")
    if page.name in ON_TWO_RANKS:
        assert min(two_ranks(run_code, page, limit=240.0)) > 0
    else:
        run_code(page)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert link.startswith("https://") or (page.parent / link).exists(), link


def test_the_guides_are_there():
    assert {"distributed.md", "transformers.md", "migrating.md", "module.md"} <= {page.name for page in GUIDES}
