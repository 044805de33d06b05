"""Models of transformers that choose blocks of keys (`block_indices`, as MiniMax-M3), against their eager attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from dmattn_ops import prepare_mask  # noqa: E402
from dmattn_ops.integrations import transformers as integration  # noqa: E402
from tests.support.tiny_models import assert_same, logits_and_gradients, tokens, under  # noqa: E402

integration.register()
B, S, BLOCK = 2, 23, 4
has_model = pytest.mark.skipif(not hasattr(transformers, "MiniMaxM3VLForCausalLM"), reason="no MiniMax-M3 here")


def model() -> torch.nn.Module:
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

    config = MiniMaxM3VLTextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, dense_intermediate_size=48, shared_intermediate_size=16,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8, rotary_dim=4, num_local_experts=2,
        num_experts_per_tok=1, mlp_layer_types=["dense", "dense", "sparse"], index_n_heads=2, index_head_dim=8,
        index_block_size=BLOCK, index_topk_blocks=2, index_local_blocks=1, initializer_range=0.3, bos_token_id=1,
        eos_token_id=None, pad_token_id=0,
        layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    )  # fmt: skip
    torch.manual_seed(5)
    return MiniMaxM3VLForCausalLM(config).eval()


def padding_of(side: str | None) -> Tensor:
    keep = torch.ones(B, S, dtype=torch.long)
    if side == "left":
        keep[0, :6] = 0
    if side == "right":
        keep[1, -7:] = 0
    return keep


@has_model
@pytest.mark.parametrize(
    "side", [None, "right"]
)  # behind padding on the left, the model's blocks are others (its own note)
def test_logits_and_gradients_are_those_of_eager_attention(side: str | None):
    made, keep = model(), padding_of(side)
    inputs = {"input_ids": tokens(B, S), "attention_mask": keep}
    theirs = logits_and_gradients(under(made, "eager"), keep.bool(), **inputs)
    assert_same(logits_and_gradients(under(made, "dmattn"), keep.bool(), **inputs), theirs)


@has_model
def test_generation_is_that_of_eager_attention():
    made = model()
    inputs = {
        "input_ids": tokens(B, S),
        "attention_mask": torch.ones(B, S, dtype=torch.long),
        "max_new_tokens": 8,
        "do_sample": False,
    }
    assert torch.equal(*[under(made, name).generate(**inputs) for name in ("eager", "dmattn")])


class Indexer(torch.nn.Module):
    block_size = BLOCK


class Layer(torch.nn.Module):
    """What `attention_forward` asks of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.indexer = Indexer()
        self.is_causal = True


def expected(query: Tensor, key: Tensor, keep: Tensor, blocks: Tensor) -> Tensor:
    """Return attention `[B, Sq, H, D]` to what a mask and the blocks of each key head show."""
    shown = (blocks.unsqueeze(-1) == torch.arange(key.shape[2]) // BLOCK).any(-2)
    keep = (keep & shown).repeat_interleave(query.shape[1] // blocks.shape[1], dim=1)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~keep, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ key).transpose(1, 2)


@pytest.mark.parametrize(
    "kind", ["none", "padding", "causal", "made", "documents", "dense", "bool", "additive", "prepared"]
)
def test_blocks_are_a_condition_beside_every_mask(kind: str):
    query, key = torch.randn(B, 4, S, 8), torch.randn(B, 2, S, 8)
    blocks = torch.randint(-1, -(-S // BLOCK), (B, 2, S, 3))
    causal = torch.ones(S, S, dtype=torch.bool).tril()[None, None]
    keep = padding_of("left").bool()
    documents = torch.arange(S, dtype=torch.int32)[None] // 9
    own = torch.rand(B, 1, S, S) < 0.6
    function = lambda b, h, q, k: own[b, 0, q, k]  # noqa: E731
    shown = causal
    given: object = None
    if kind == "padding":
        given, shown = keep, causal & keep[:, None, None]
    elif kind == "causal":
        given = integration.make_mask(B, S, S)
    elif kind == "made":
        given, shown = integration.make_mask(B, S, S, attention_mask=keep, local_size=7), causal & keep[:, None, None]
        shown = shown & ~torch.ones(S, S, dtype=torch.bool).tril(-7)
    elif kind == "documents":
        from dmattn_ops.integrations import forward_mask

        given = forward_mask.make(S, S, 0, is_causal=True, documents=documents, batch=B, device=torch.device("cpu"))
        shown = causal & (documents.unsqueeze(-1) == documents.unsqueeze(-2)).unsqueeze(1)
    elif kind == "dense":
        given, shown = integration.make_mask(B, S, S, mask_function=function, use_vmap=True), own
    elif kind == "bool":
        given, shown = own, own
    elif kind == "additive":
        given, shown = torch.zeros(own.shape).masked_fill(~own, torch.finfo(torch.float32).min), own
    elif kind == "prepared":
        given, shown = prepare_mask(own), own
    out, _ = integration.attention_forward(Layer(), query, key, key, given, block_indices=blocks)
    torch.testing.assert_close(out, expected(query, key, shown, blocks))


def test_blocks_of_one_query_are_a_condition_beside_a_dense_mask():
    query, key, own = torch.randn(B, 4, 1, 8), torch.randn(B, 2, S, 8), torch.rand(B, 1, 1, S) < 0.6
    blocks = torch.randint(-1, -(-S // BLOCK), (B, 2, 1, 3))
    for given in (own, prepare_mask(own, seqlen_q=1)):
        out, _ = integration.attention_forward(Layer(), query, key, key, given, block_indices=blocks)
        torch.testing.assert_close(out, expected(query, key, own, blocks))


def test_a_layer_that_does_not_say_how_long_its_blocks_are_is_refused():
    query = torch.randn(1, 2, 5, 8)
    blocks = torch.zeros(1, 1, 5, 1, dtype=torch.long)
    with pytest.raises(
        NotImplementedError, match=r"^block_indices= .* needs a layer whose indexer.block_size .* got Module"
    ):
        integration.attention_forward(torch.nn.Module(), query, query, query, None, block_indices=blocks)
    layer = Layer()
    layer.dynamic_mask = object()  # type: ignore[assignment]
    with pytest.raises(NotImplementedError, match="both choose a layer's keys"):
        integration.attention_forward(layer, query, query, query, None, block_indices=blocks)
