"""Calls in two subgraphs of one graph whose sizes and numbers are symbols: checkpointed layers, and branches of `torch.cond`.

With `dynamic=True` Dynamo makes an input of the graph of each float that is read from a default or a global, and cannot pass one
that it met in a first subgraph to a second: so what is traced has none of these.
"""

import importlib
import inspect
import math
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dmattn_ops
from dmattn_ops.compat.flash_attn import flash_attn_interface
from dmattn_ops.nn import DynamicMaskAttention, IndexedAttention, KeyScores

BEHIND_OPERATORS = ("kernels", "launching", "choice", "dispatch", "tune", "testing", "sdpa", "api.compiler")
MAKE_MODULES = ("__init__", "add_dynamic_masks")
SEQLEN, HEADS, DIM = 20, 2, 8
attention = dmattn_ops.flash_dmattn_func


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def first_blocks(tensor):
    return torch.zeros(tensor.shape[0], HEADS, tensor.shape[1], 1, dtype=torch.int64)


def varlen(tensor):
    rows, offsets = tensor.flatten(0, 1), torch.tensor([0, 20, 40], dtype=torch.int32)
    return dmattn_ops.flash_dmattn_varlen_func(rows, rows, rows, offsets, offsets, 20, 20, is_causal=True)


CALLS = {
    "plain": lambda x: attention(x, x, x),
    "numbers": lambda x: attention(x, x, x, is_causal=True, softmax_scale=0.3, softcap=2.0, dropout_p=0.25),
    "documents": lambda x: attention(x, x, x, dmattn_ops.prepare_mask(documents=(torch.arange(20) // 6)[None])),
    "dynamic": lambda x: attention(x, x, x, dmattn_ops.dynamic_mask(x[..., 0].transpose(1, 2), 5)),
    "selection": lambda x: attention(x, x, x, dmattn_ops.selection_mask(first_blocks(x), block=8)),
    "packed": lambda x: dmattn_ops.flash_dmattn_qkvpacked_func(torch.stack((x, x, x), dim=2)),
    "varlen": varlen,
    "mass of keys": lambda x: dmattn_ops.key_mass(x, x) + x.sum(),
    "mass of blocks": lambda x: dmattn_ops.selection_mass(x, x, first_blocks(x), block=8) + x.sum(),
    "flash_attn": lambda x: flash_attn_interface.flash_attn_func(x, x, x, causal=True),
    "scores": KeyScores(HEADS, DIM),
}


def both(wrap, call):
    """Return a function with two subgraphs, and what it computes."""

    def twice(x):
        if wrap == "checkpoint":
            return checkpoint(call, x, use_reentrant=False) + checkpoint(call, x + 1, use_reentrant=False)
        return torch.cond(x.sum() > 0, lambda x: call(x).clone(), lambda x: call(x + 1).clone(), (x,))

    def plain(x):
        return call(x) + call(x + 1) if wrap == "checkpoint" else call(x) if x.sum() > 0 else call(x + 1)

    return twice, plain


@pytest.mark.parametrize("wrap", ["checkpoint", "cond"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_two_subgraphs_of_a_dynamic_graph(name, wrap):
    grad = wrap == "checkpoint"  # torch's cond refuses gradients whose strides are symbols
    twice, plain = both(wrap, CALLS[name])
    inputs = torch.randn(2, SEQLEN, HEADS, DIM, requires_grad=grad)
    torch.manual_seed(1)
    out = torch.compile(twice, fullgraph=True, dynamic=True, backend="aot_eager")(inputs)
    torch.manual_seed(1)
    expected = plain(inputs)
    torch.testing.assert_close(out, expected)
    if grad and name != "numbers":  # a checkpointed call draws its seed again
        found, wanted = (torch.autograd.grad(each.sin().sum(), inputs)[0] for each in (out, expected))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", [DynamicMaskAttention, IndexedAttention])
def test_checkpointed_layers_in_a_dynamic_graph(layer):
    layers = torch.nn.ModuleList([layer(32, 4, 2, keep=6) for _ in range(2)])

    def model(hidden, call):
        for each in layers:
            hidden = hidden + call(each, hidden)
        return hidden

    hidden = torch.randn(2, SEQLEN, 32)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    out = compiled(hidden, lambda each, x: checkpoint(each, x, use_reentrant=False))
    torch.testing.assert_close(out, model(hidden, lambda each, x: each(x)))


def traced_modules():
    package = Path(dmattn_ops.__path__[0])
    names = [".".join(path.relative_to(package).with_suffix("").parts) for path in sorted(package.rglob("*.py"))]
    others = (*BEHIND_OPERATORS, "__main__", "__init__")
    return [f"dmattn_ops.{name}" for name in names if not name.startswith(others) and not name.endswith(others)]


def test_no_float_of_a_default_or_a_global_is_traced():
    pytest.importorskip("transformers", reason="transformers is not installed, which integrations import")
    found = []
    for name in traced_modules():
        module = importlib.import_module(name)
        found += [
            f"{name}.{key}" for key, value in vars(module).items() if type(value) is float and math.isfinite(value)
        ]
        own = [each for each in vars(module).values() if getattr(each, "__module__", None) == name]
        functions = [each for each in own if inspect.isfunction(each)]
        for each in filter(inspect.isclass, own):
            functions += filter(inspect.isfunction, vars(each).values())
        for function in functions:
            if function.__name__ in MAKE_MODULES:
                continue
            defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
            found += [f"{name}.{function.__qualname__}" for value in defaults if type(value) is float]
    assert found == []
