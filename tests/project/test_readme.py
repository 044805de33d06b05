"""What README.md and the other documents show works: code runs (in small), make targets exist, tables are fresh."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import attention as registry

import dmattn_ops
from dmattn_ops.checks import validation
from dmattn_ops.compat import flash_attn

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MIGRATING = (ROOT / "docs" / "migrating.md").read_text()
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SMALL = (
    ('device = "cuda" if torch.cuda.is_available() else "cpu"', 'device = "cpu"'),
    ("2, 2048, 8, 2, 64", "1, 160, 4, 2, 32"),
    ("2, 2048, 512", "1, 160, 512"),
    ("keep=256", "keep=20"),
)


def block_with(mark):
    """Return the only block of code that has these words in it, in small."""
    [code] = [block for block in BLOCKS if mark in block]
    for written, small in SMALL:
        code = code.replace(written, small)
    return code


def run(mark, **replaced):
    """Run the block with these words as a reader does who ran the example before; return what it defines."""
    code = block_with(mark)
    for written, other in replaced.items():
        assert written in code
        code = code.replace(written, other)
    names: dict = {"torch": torch, "device": "cpu"}
    exec(code, names)
    return names


def test_the_example_runs_and_every_input_gets_a_gradient():
    names = run("dynamic_mask(scores")
    assert names["out"].shape == (1, 160, 4, 32)
    for name in ("query", "key", "value", "scores"):
        gradient = names[name].grad
        assert torch.isfinite(gradient).all()
        assert gradient.abs().max() > 0


def test_the_line_behind_the_installation_says_what_runs(capsys):
    run("backend_info()")
    assert f"dmattn_ops {dmattn_ops.__version__}, torch {torch.__version__}" in capsys.readouterr().out


def test_a_model_of_transformers_from_a_folder_computes_the_same(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    import tiny_models

    eager = tiny_models.under(tiny_models.decoder("llama"), "eager")
    eager.save_pretrained(tmp_path)
    model = run("register()", **{"path/to/model": str(tmp_path)})["model"]
    assert model.config._attn_implementation == "dmattn"
    ids = tiny_models.tokens(2, 20)
    torch.testing.assert_close(model(ids).logits, eager(ids).logits, atol=2e-5, rtol=1e-4)


def test_code_for_flash_attn_and_flash_dmattn_runs_with_other_imports():
    names = run("import flash_attn_func")
    query, key, value = drawn(6, 9)
    theirs = torch.nn.functional.scaled_dot_product_attention(*heads_first(query, key, value)).transpose(1, 2)
    torch.testing.assert_close(names["flash_attn_func"](query, key, value, causal=False), theirs)
    attn_mask, attn_bias = torch.ones(2, 2, 6, 9), torch.zeros(2, 2, 6, 9)
    torch.testing.assert_close(names["flash_dmattn_func"](query, key, value, attn_mask, attn_bias), theirs)


def test_one_line_gives_torchs_attention_on_a_gpu_to_this_library():
    assert registry.current_flash_attention_impl() is None
    try:
        run("activate()")
        assert registry.current_flash_attention_impl() == "dmattn"
    finally:
        dmattn_ops.deactivate()


def test_the_layer_for_a_model_of_ones_own_learns_its_mask():
    names = run("DynamicMaskAttention(")
    assert names["out"].shape == (1, 160, 512)
    names["out"].square().mean().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in names["layer"].parameters())


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
    assert '| `is_causal=True` with `Sq != Sk` | `is_causal=True, causal_from="top_left"`' in MIGRATING
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
    marks = re.findall(r"[^_]run\(\"([^\"]+)\"", Path(__file__).read_text())
    assert len({block_with(mark) for mark in marks}) == len(BLOCKS)


def test_what_is_said_not_to_be_supported_raises_what_is_said():
    query, key, value = drawn(6, 9)
    for dtype in (torch.float8_e4m3fn, torch.int8):
        assert "**FP8 and integer** inputs raise a TypeError" in README
        with pytest.raises(TypeError, match="query must have dtype"):
            dmattn_ops.flash_dmattn_func(query.to(dtype), key.to(dtype), value.to(dtype))
    assert "Tensors on MPS or XPU raise a NotImplementedError" in README
    for device in ("mps", "xpu"):
        with pytest.raises(NotImplementedError, match="query must be on a CPU or CUDA device"):
            validation.supported(torch.float16, torch.device(device), 64, 64)
    assert "**float64 on CUDA** a NotImplementedError" in README
    with pytest.raises(
        NotImplementedError, match="query must have dtype float16, bfloat16 or float32 on a CUDA device"
    ):
        validation.supported(torch.float64, torch.device("cuda"), 64, 64)
    assert "a `block_table` raises a NotImplementedError" in README
    lengths = (torch.tensor([0, 6]).int(), torch.tensor([0, 9]).int(), 6, 9)
    with pytest.raises(NotImplementedError, match="must not be paged"):
        flash_attn.flash_attn_varlen_func(query[0], key[0], value[0], *lengths, block_table=torch.zeros(1, 1).int())


def test_figures_in_the_text_are_those_of_the_tables():
    # The tables are those of the result files (below); a figure of the first sentence has to stand in one of them.
    text = re.sub(r"<!-- results: .*?<!-- end -->", "", README, flags=re.DOTALL)
    times = re.findall(r"([\d.]+) times", text)
    assert times
    assert [figure for figure in times if f"({figure}x)" not in README] == []
    milliseconds = re.findall(r"([\d.]+) ms", text)
    assert milliseconds
    assert [figure for figure in milliseconds if f"| {figure} |" not in README] == []


def test_no_line_of_code_is_wider_than_a_page_of_a_repository_on_the_web():
    lines = "".join(re.findall(r"```\w+\n(.*?)```", README.partition("```bibtex")[0], re.DOTALL)).splitlines()
    assert [line for line in lines if len(line) > 96] == []


def test_the_first_screen_says_what_it_is_and_how_to_install_it():
    lines = README.splitlines()
    assert len(lines) <= 210
    first = "\n".join(lines[:25])
    places = [first.find(words) for words in (" times as long", ".png", "pip install .", "backend_info()")]
    assert -1 < places[0] < places[1] < places[2] < places[3]


def targets_in(text):
    blocks = "".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    return set(re.findall(r"`make ([a-z-]+)", text) + re.findall(r"^make ([a-z-]+)", blocks, re.MULTILINE))


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"train", "test", "docs"} <= targets_in(README)
    for document in DOCUMENTS:
        named = targets_in(document.read_text())
        assert named <= targets, document.name
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    commands = re.findall(r"- run: (.*)", workflow)
    assert commands == [".ci/run", ".ci/wheel python3.10=2.11.0 python3.14", "make test-gpu"]
    assert "test-gpu" in targets
    assert (ROOT / ".ci" / "run").exists() and (ROOT / ".ci" / "wheel").exists()


def test_package_indexes_are_shown_no_relative_links_or_images():
    # An index shows the text without the files beside it: a relative image there is a broken one.
    command = [sys.executable, "setup.py", "-q", "--long-description"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    assert "# dmattn_ops" in shown
    assert "```python" in shown
    assert "https://arxiv.org/abs/2508.02124" in shown
    links = re.findall(r"\]\(([^)]+)\)|src=\"([^\"]+)\"", shown)
    assert [link for link in links if not "".join(link).startswith("https://")] == []


def test_the_design_can_be_read_in_one_sitting():
    assert len((ROOT / "DESIGN.md").read_text().split()) <= 4250  # words: a quarter of an hour


def test_tables_are_those_of_the_result_files(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import readme_tables

    assert readme_tables.MARKED.search(README)
    assert readme_tables.filled(README) == README, "run python benchmarks/readme_tables.py"
