"""What README.md shows works: its Python runs (in small), and its make targets exist."""

import re
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_code_runs():
    [code] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    small = code.replace("2, 4096, 16, 4, 128", "1, 160, 4, 2, 32").replace('device = "cuda"', 'device = "cpu"')
    assert small.count("160") == 1
    assert 'device = "cpu"' in small
    names: dict = {}
    exec(small, names)
    assert names["out"].shape == (1, 160, 4, 32)
    assert names["lse"].shape == (1, 4, 160)
    for name in ("query", "key", "value", "score"):
        gradient = names[name].grad
        assert torch.isfinite(gradient).all()
        assert gradient.abs().max() > 0


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", README))
    assert {"train", "test", "bench"} <= named <= targets


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("https://") or (ROOT / link).exists(), link


def test_tables_are_those_of_the_result_files(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import readme_tables

    assert readme_tables.MARKED.search(README)
    assert readme_tables.filled(README) == README, "run python benchmarks/readme_tables.py"
