"""What README.md and the other documents show works: code runs (in small), make targets exist, tables are fresh."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dmattn_ops

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SMALL = (
    ('device = "cuda" if torch.cuda.is_available() else "cpu"', 'device = "cpu"'),
    ("2, 2048, 8, 2, 64", "1, 160, 4, 2, 32"),
    ("keep=256", "keep=20"),
    ("1024", "96"),
)


def in_small(code):
    for written, small in SMALL:
        code = code.replace(written, small)
    return code


def run(code):
    """Run a block after the lines of the first one that make its tensors; return what it defines."""
    names: dict = {}
    setup, made_mask, _ = in_small(BLOCKS[0]).partition("mask = dynamic_mask")
    exec(setup + made_mask + "(scores, keep=20)", names)
    exec(in_small(code), names)
    return names


def test_the_first_example_runs_and_every_input_gets_a_gradient():
    for written, _ in SMALL[:3]:
        assert BLOCKS[0].count(written) == 1, f"the test makes the example small by replacing {written}"
    names: dict = {}
    exec(in_small(BLOCKS[0]), names)
    assert names["out"].shape == (1, 160, 4, 32)
    for name in ("query", "key", "value", "scores"):
        gradient = names[name].grad
        assert torch.isfinite(gradient).all()
        assert gradient.abs().max() > 0


def test_prepared_masks_and_compiled_calls_run():
    [code] = [block for block in BLOCKS if "explain(" in block]
    names = run(code)
    assert names["out"].shape == (1, 160, 4, 32)
    assert names["lse"].shape == (1, 4, 160)


def test_sinks_and_the_row_maximum_run():
    [code] = [block for block in BLOCKS if "sink=" in block]
    names = run(code)
    assert names["row_max"].shape == (1, 4, 160)


def test_a_mask_can_be_cut():
    [code] = [block for block in BLOCKS if ".queries(" in block]
    assert run(code)["out"].shape == (1, 160 - 96, 4, 32)


def test_selective_checkpointing_saves_the_named_operators():
    [code] = [block for block in BLOCKS if "CheckpointPolicy" in block]
    names = run(code)
    decisions = [names["policy"](None, operator) for operator in names["SAVED"]]
    assert all(decision == names["CheckpointPolicy"].MUST_SAVE for decision in decisions)
    names["out"].sum().backward()
    assert torch.isfinite(names["query"].grad).all()


def heads_first(*tensors):
    return [tensor.transpose(1, 2) for tensor in tensors]


def drawn(queries, keys, heads=2):
    generator = torch.Generator().manual_seed(queries)
    shapes = ((2, length, heads, 8) for length in (queries, keys, keys))
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 5), (7, 7)])
def test_causal_attention_of_sdpa_is_aligned_top_left_and_takes_transposed_tensors(queries, keys):
    query, key, value = drawn(queries, keys)
    theirs = torch.nn.functional.scaled_dot_product_attention(*heads_first(query, key, value), is_causal=True)
    assert '| SDPA `is_causal=True` with `Sq != Sk` | `is_causal=True, causal_from="top_left"`' in README
    ours = dmattn_ops.flash_dmattn_func(query, key, value, is_causal=True, causal_from="top_left")
    torch.testing.assert_close(ours, theirs.transpose(1, 2))
    if queries != keys:
        other = dmattn_ops.flash_dmattn_func(query, key, value, is_causal=True)
        assert not torch.allclose(other, ours)


def test_an_additive_mask_of_sdpa_is_a_bias():
    query, key, value = drawn(6, 11)
    hidden = torch.rand(2, 1, 6, 11, generator=torch.Generator().manual_seed(0)) > 0.3
    hidden[0, 0, 2] = True
    additive = torch.zeros(2, 1, 6, 11).masked_fill(hidden, float("-inf"))
    theirs = torch.nn.functional.scaled_dot_product_attention(*heads_first(query, key, value), attn_mask=additive)
    ours = dmattn_ops.flash_dmattn_func(query, key, value, bias=additive)
    torch.testing.assert_close(ours, theirs.transpose(1, 2).nan_to_num(0.0))  # a row without keys is 0 here


def test_alibi_of_a_causal_call_is_a_bias_of_the_keys():
    query, key, value = drawn(12, 12)
    slopes, positions = torch.tensor([0.5, 0.125]), torch.arange(12)
    distance = positions[:, None] - positions  # as flash-attn adds it: -slope * (i - j)
    scores = torch.einsum("bihd,bjhd->bhij", query, key) / 8**0.5 - slopes[:, None, None] * distance
    scores = scores.masked_fill(distance < 0, float("-inf"))
    expected = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), value)
    bias = slopes[None, :, None, None] * torch.arange(12)
    out, lse = dmattn_ops.flash_dmattn_func(query, key, value, bias=bias, is_causal=True, return_lse=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse - slopes[:, None] * positions, scores.logsumexp(-1))


def test_every_block_of_code_is_run_by_a_test():
    marks = ("scores = torch.randn", "explain(", "sink=", ".queries(", "CheckpointPolicy")
    assert len(BLOCKS) == len(marks)
    for mark in marks:
        assert sum(mark in block for block in BLOCKS) == 1, mark


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"train", "test", "bench"} <= set(re.findall(r"`make ([a-z-]+)", README))
    for document in DOCUMENTS:
        named = set(re.findall(r"`make ([a-z-]+)", document.read_text()))
        assert named <= targets, document.name


def test_package_indexes_are_shown_no_relative_links_or_images():
    # An index shows the text without the files beside it: a relative image there is a broken one.
    command = [sys.executable, "setup.py", "-q", "--long-description"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    assert "# dmattn_ops" in shown
    assert "```python" in shown
    assert "https://arxiv.org/abs/2508.02124" in shown
    assert [link for link in re.findall(r"\]\(([^)]+)\)", shown) if not link.startswith("https://")] == []


def test_the_design_can_be_read_in_one_sitting():
    assert len((ROOT / "DESIGN.md").read_text().splitlines()) <= 200


def test_tables_are_those_of_the_result_files(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import readme_tables

    assert readme_tables.MARKED.search(README)
    assert readme_tables.filled(README) == README, "run python benchmarks/readme_tables.py"
