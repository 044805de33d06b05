"""Models of transformers under torch.compile(fullgraph=True): the same numbers, and one graph while a cache fills."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from functorch.compile import make_boxed_func  # noqa: E402
from tiny_models import assert_same, decoder, logits_and_gradients, t5, tokens, under  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402

import dmattn_ops.integrations.transformers as integration  # noqa: E402
from dmattn_ops.ops.schemas import SIGNATURES  # noqa: E402

B, S = 2, 19
integration.register()
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=slow) for name in ("gemma2", "gemma3", "gpt_oss", "qwen3"))]
)
def test_a_compiled_forward_and_backward(name, kind):
    model = under(decoder(name), "dmattn")
    if kind == "padded":
        keep = torch.ones(B, S, dtype=torch.int64)
        keep[0, :5] = 0
        inputs, rows = {"input_ids": tokens(B, S), "attention_mask": keep, "use_cache": False}, keep.bool()
    else:
        positions = torch.cat([torch.arange(7), torch.arange(S - 7)])[None]
        inputs = {"input_ids": tokens(1, S), "position_ids": positions, "use_cache": False}
        rows = torch.ones(1, S, dtype=torch.bool)
    expected = logits_and_gradients(model, rows, **inputs)
    model.compile(fullgraph=True, backend="aot_eager")
    assert_same(logits_and_gradients(model, rows, **inputs), expected)


@pytest.mark.parametrize("kind", ["causal", "padded", "packed"])
def test_tiles_are_listed_once_for_all_layers_forward_and_backward(kind):
    # while compiling, transformers always says which sequence each position belongs to, so that "causal" has a mask too
    model = under(decoder("llama"), "dmattn")
    inputs = {"input_ids": tokens(B, S), "use_cache": False}
    if kind == "padded":
        inputs["attention_mask"] = torch.ones(B, S, dtype=torch.int64)
    if kind == "packed":
        inputs["position_ids"] = torch.cat([torch.arange(7), torch.arange(S - 7)]).expand(B, -1)
    called = []

    def count(graph, _):
        called.extend(node for node in graph.graph.nodes if str(node.target).startswith("dmattn."))
        return make_boxed_func(graph.forward)

    compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=count, bw_compiler=count))
    compiled(**inputs).logits.sum().backward()
    layers = model.config.num_hidden_layers
    names = [str(node.target) for node in called]
    assert names.count("dmattn.list_tiles.default") == 1
    assert names.count("dmattn.forward.default") == names.count("dmattn.backward.default") == layers > 1
    assert len(names) == 1 + 2 * layers
    for node in called:
        if str(node.target) != "dmattn.list_tiles.default":
            given = dict(zip(SIGNATURES[str(node.target).split(".")[1]].names, node.args, strict=False))
            assert given["row_tiles"] is not None and given["col_tiles"] is not None
            assert given["start"] is None and given["end"] is None


@pytest.mark.slow
@torch.no_grad()
def test_doge_compiles_forward():  # with any attention, aot_eager fails in the backward of Doge's softplus
    model, ids = under(decoder("doge"), "dmattn"), tokens(B, S)
    keep = torch.ones(B, S, dtype=torch.int64)
    keep[0, :5] = 0
    expected = model(ids, attention_mask=keep, use_cache=False).logits
    model.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(model(ids, attention_mask=keep, use_cache=False).logits, expected)


@pytest.mark.slow
def test_t5_compiles():
    model = under(t5(), "dmattn")
    keep = torch.ones(B, S, dtype=torch.int64)
    keep[0, -5:] = 0
    inputs = {"input_ids": tokens(B, S), "attention_mask": keep, "decoder_input_ids": tokens(B, 9), "use_cache": False}
    rows = torch.ones(B, 9, dtype=torch.bool)
    expected = logits_and_gradients(model, rows, **inputs)
    model.compile(fullgraph=True, backend="aot_eager")
    assert_same(logits_and_gradients(model, rows, **inputs), expected)


@torch.no_grad()
def test_one_graph_decodes_while_a_static_cache_fills():
    model, ids = under(decoder("llama"), "dmattn"), tokens(B, S)
    keep = torch.ones(B, S, dtype=torch.int64)
    keep[0, :5] = 0
    expected = model.generate(ids, attention_mask=keep, max_new_tokens=6, do_sample=False)
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module

    model.compile(fullgraph=True, backend=backend)
    cache = transformers.StaticCache(model.config, max_cache_len=32)
    options = {"attention_mask": keep, "max_new_tokens": 6, "do_sample": False, "disable_compile": True}
    found = model.generate(ids, past_key_values=cache, **options)
    assert torch.equal(found, expected)
    assert len(graphs) == 2  # the prompt and a token
    operators = [node for graph in graphs for node in graph.graph.nodes if "dmattn" in str(node.target)]
    assert operators
