"""A first use in a fresh process warns of nothing, but that C++ kernels are missing where they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STRICT = """
import warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", message="dmattn_ops runs on plain torch operations")
import torch
"""
USES = {
    "modules": """
from dmattn_ops.nn import DynamicMaskAttention
layer = DynamicMaskAttention(32, 4, 2, keep=3)
layer(torch.randn(1, 20, 32)).sum().backward()
""",
    "activate": """
import dmattn_ops
with dmattn_ops.activated(masks=True):
    torch.nn.functional.scaled_dot_product_attention(*[torch.randn(1, 2, 5, 8)] * 3)
""",
    "flash_attn": """
from dmattn_ops.compat.flash_attn import flash_attn_func
flash_attn_func(*[torch.randn(1, 5, 2, 8)] * 3, causal=True, alibi_slopes=torch.rand(2))
""",
    "flash_dmattn": """
from dmattn_ops.compat.flash_dmattn import flash_dmattn_func
flash_dmattn_func(*[torch.randn(1, 5, 2, 8)] * 3, attn_bias=torch.randn(1, 1, 1, 5), is_causal=True)
""",
    "attributes": """
import dmattn_ops
assert callable(dmattn_ops.activate) and callable(dmattn_ops.deactivate) and callable(dmattn_ops.activated)
assert dmattn_ops.nn.KeyScores and dmattn_ops.biases.alibi_slopes and dmattn_ops.flex.to_block_mask
assert dmattn_ops.compat.flash_attn.flash_attn_func and dmattn_ops.compat.flash_dmattn.flash_dmattn_func
assert {"activate", "nn", "compat"} <= set(dir(dmattn_ops))
assert callable(dmattn_ops.activate)  # again: importing its module has not hidden it
try:
    dmattn_ops.nothing
except AttributeError as error:
    assert str(error) == "module 'dmattn_ops' has no attribute 'nothing'"
else:
    raise SystemExit("no error")
""",
    "transformers": """
warnings.filterwarnings("ignore")  # importing transformers, and what that imports, is not ours
import sys
import transformers
transformers.LlamaForCausalLM
print("imported", file=sys.stderr)
warnings.simplefilter("error")
warnings.filterwarnings("ignore", message="dmattn_ops runs on plain torch operations")
from dmattn_ops.integrations.transformers import register
register()
config = transformers.LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, attn_implementation="dmattn"
)
model = transformers.LlamaForCausalLM(config)
ids = torch.randint(32, (2, 9))
model(ids, attention_mask=torch.ones_like(ids).index_fill(1, torch.tensor([0]), 0), labels=ids).loss.backward()
""",
}


@pytest.mark.parametrize("name", USES)
def test_a_first_use_warns_of_nothing(name):
    if name == "transformers":
        pytest.importorskip("transformers", reason="transformers is not installed")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", STRICT + USES[name]], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.rpartition("imported\n")[2] == ""
