"""Models of transformers through `attn_implementation="dmattn"` against `eager`: logits, gradients and generated tokens."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tiny_models import DECODERS, assert_same, decoder, drawn, logits_and_gradients, t5, tokens, under  # noqa: E402
from transformers import DynamicCache, StaticCache, masking_utils  # noqa: E402
from transformers.modeling_outputs import ModelOutput  # noqa: E402

import dmattn_ops.integrations.transformers as integration  # noqa: E402
from dmattn_ops import environment, prepare_mask  # noqa: E402

B, S = 2, 19
integration.register()
names = pytest.mark.parametrize("name", DECODERS)


def padding_of(side):
    keep = torch.ones(B, S, dtype=torch.int64)
    if side is not None:
        keep[0, slice(None, 5) if side == "left" else slice(-5, None)] = 0
    return keep


@names
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_logits_and_gradients(name, side):
    model, ids, keep = decoder(name), tokens(B, S), padding_of(side)
    inputs = {"input_ids": ids, "attention_mask": keep}
    theirs = logits_and_gradients(under(model, "eager"), keep.bool(), **inputs)
    ours = logits_and_gradients(under(model, "dmattn"), keep.bool(), **inputs)
    assert_same(ours, theirs)
    assert theirs[0].std() > 0.1


@pytest.mark.parametrize("name", sorted(DECODERS.keys() - {"gpt_oss"}))  # which does not look for packing in positions
def test_packed_sequences_are_those_alone(name):
    model, ids = under(decoder(name), "dmattn"), tokens(1, S)
    positions = torch.cat([torch.arange(7), torch.arange(S - 7)])[None]
    rows = torch.ones(1, S, dtype=torch.bool)
    ours = logits_and_gradients(model, rows, input_ids=ids, position_ids=positions, use_cache=False)
    with torch.no_grad():
        alone = torch.cat([model(part).logits for part in ids.split([7, S - 7], dim=1)], dim=1)
    torch.testing.assert_close(ours[0], alone[0], atol=5e-5, rtol=1e-4)
    theirs = logits_and_gradients(under(model, "eager"), rows, input_ids=ids, position_ids=positions, use_cache=False)
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_offsets_of_packed_sequences_are_enough(name):
    model, ids = under(decoder(name), "dmattn"), tokens(1, S)
    positions = torch.cat([torch.arange(7), torch.arange(S - 7)])[None]
    offsets = torch.tensor([0, 7, S], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": S - 7, "max_length_k": S - 7}
    with torch.no_grad():
        expected = torch.cat([model(part).logits for part in ids.split([7, S - 7], dim=1)], dim=1)
        both = model(ids, position_ids=positions, use_cache=False, **lengths).logits
        with_mask = model(ids, torch.ones_like(ids), position_ids=positions, use_cache=False, **lengths).logits
    torch.testing.assert_close(both, expected, atol=5e-5, rtol=1e-4)
    torch.testing.assert_close(with_mask, expected, atol=5e-5, rtol=1e-4)


@names
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_generation_token_by_token(name, cache):
    model, ids, keep = decoder(name), tokens(B, S), padding_of("left")
    found = {}
    for implementation in ("eager", "dmattn"):
        found[implementation] = under(model, implementation).generate(
            ids,
            attention_mask=keep,
            max_new_tokens=10,
            do_sample=False,
            cache_implementation=cache,
            disable_compile=True,
            output_scores=True,
            return_dict_in_generate=True,
        )
    assert torch.equal(found["eager"].sequences, found["dmattn"].sequences)
    for theirs, ours in zip(found["eager"].scores, found["dmattn"].scores, strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-4)


@names
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_a_prefill_in_chunks_and_a_cache_longer_than_the_prompt(name, kind):
    model, ids = under(decoder(name), "dmattn"), tokens(B, S)
    whole = model(ids, use_cache=False).logits
    model = under(model, "dmattn")
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=32)
    parts = [model(part, past_key_values=cache).logits for part in ids.split([11, 5, 1, 2], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=5e-5, rtol=1e-4)


@torch.no_grad()
def test_without_a_mask_the_diagonal_starts_top_left_and_a_single_query_sees_everything():
    layer = torch.nn.Module()
    query, key = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 7, 8)
    out, _ = integration.attention_forward(layer, query, key, key, None)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True)
    torch.testing.assert_close(out.transpose(1, 2), expected)
    out, _ = integration.attention_forward(layer, query[:, :, :1], key, key, None)
    expected = torch.nn.functional.scaled_dot_product_attention(query[:, :, :1], key, key)
    torch.testing.assert_close(out.transpose(1, 2), expected)
    out, _ = integration.attention_forward(layer, query[:, :, :1], key, key, None, sliding_window=2)
    expected = torch.nn.functional.scaled_dot_product_attention(query[:, :, :1], key[:, :, -2:], key[:, :, -2:])
    torch.testing.assert_close(out.transpose(1, 2), expected)
    out, _ = integration.attention_forward(layer, query, key, key, None, is_causal=False)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, key)
    torch.testing.assert_close(out.transpose(1, 2), expected)
    out, _ = integration.attention_forward(
        layer, query, key, key, torch.tensor([[0, 1, 1, 1, 1, 1, 0]]), is_causal=False
    )
    expected = torch.nn.functional.scaled_dot_product_attention(query, key[:, :, 1:6], key[:, :, 1:6])
    torch.testing.assert_close(out.transpose(1, 2), expected)


def test_layers_of_a_forward_share_one_mask(monkeypatch):
    model, ids, keep = decoder("gemma3"), tokens(B, S), padding_of("left")
    made, seen = [], []
    make = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["dmattn"]
    attend = transformers.AttentionInterface._global_mapping["dmattn"]

    def count(*arguments, **keywords):
        made.append(make(*arguments, **keywords))
        return made[-1]

    def note(module, query, key, value, mask, **keywords):
        seen.append(mask)
        return attend(module, query, key, value, mask, **keywords)

    transformers.AttentionMaskInterface.register("counted", count)
    transformers.AttentionInterface.register("counted", note)
    under(model, "counted")(ids, attention_mask=keep)
    assert len(made) == 2  # sliding and full
    assert all(mask.prepared is not None for mask in made)
    assert {id(mask) for mask in seen} == {id(mask) for mask in made}


@pytest.mark.parametrize("kind", ["bool", "zeros", "biases"])
def test_masks_that_users_make_are_prepared_once_for_all_layers(kind, monkeypatch):
    model, ids = decoder("llama"), tokens(B, S)
    visible = (torch.rand(B, 1, S, S) < 0.5).tril() | torch.eye(S, dtype=torch.bool)
    least = torch.finfo(torch.float32).min
    additive = torch.where(visible, torch.randn(B, 1, S, S) if kind == "biases" else torch.zeros(()), least)
    given = visible if kind == "bool" else additive.clone()
    calls = []
    prepare = integration.prepare_mask
    monkeypatch.setattr(integration, "prepare_mask", lambda *a, **k: calls.append(1) or prepare(*a, **k))
    rows = torch.ones(B, S, dtype=torch.bool)
    theirs = logits_and_gradients(under(model, "eager"), rows, input_ids=ids, attention_mask=additive)
    ours = logits_and_gradients(under(model, "dmattn"), rows, input_ids=ids, attention_mask=given)
    assert_same(ours, theirs)
    assert len(calls) == 1
    given[:, :, 3, 1] = False if kind == "bool" else least  # changed in place: prepared again
    given[:, :, 4, 1] = True if kind == "bool" else 0.0
    additive[:, :, 3, 1], additive[:, :, 4, 1] = least, 0.0
    again = logits_and_gradients(model, rows, input_ids=ids, attention_mask=given)
    assert len(calls) == 2
    assert_same(again, logits_and_gradients(under(model, "eager"), rows, input_ids=ids, attention_mask=additive))


def test_a_mask_without_queries_serves_any_number_of_them():
    keep = torch.rand(B, 1, 1, S) < 0.6
    key = torch.randn(B, 2, S, 8)
    for queries in (S, 3, 1, S):  # of an encoder, and of what attends to it
        query = torch.randn(B, 2, queries, 8)
        out, _ = integration.attention_forward(torch.nn.Module(), query, key, key, keep)
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, key, attn_mask=keep)
        torch.testing.assert_close(out.transpose(1, 2), expected)


def test_t5_with_position_biases():
    model = t5()
    keep = padding_of("right")
    inputs = {"input_ids": tokens(B, S), "attention_mask": keep, "decoder_input_ids": tokens(B, 11)}
    rows = torch.ones(B, 11, dtype=torch.bool)
    theirs = logits_and_gradients(under(model, "eager"), rows, **inputs)
    ours = logits_and_gradients(under(model, "dmattn"), rows, **inputs)
    assert_same(ours, theirs)
    learned = [name for name in ours[1] if "relative_attention_bias" in name]
    assert len(learned) == 2
    assert all(ours[1][name].abs().max() > 0 for name in learned)
    generated = {
        implementation: under(model, implementation).generate(
            inputs["input_ids"], attention_mask=keep, max_new_tokens=8, do_sample=False
        )
        for implementation in ("eager", "dmattn")
    }
    assert torch.equal(generated["eager"], generated["dmattn"])


def test_an_encoder_that_looks_both_ways():
    config = transformers.ModernBertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, pad_token_id=0,
        local_attention=6, global_attn_every_n_layers=2, initializer_range=0.3, attention_dropout=0.0,
    )  # fmt: skip
    model = transformers.ModernBertForMaskedLM(config).eval()
    ids, keep = tokens(B, S), padding_of("right")
    inputs = {"input_ids": ids, "attention_mask": keep}
    theirs = logits_and_gradients(under(model, "eager"), keep.bool(), **inputs)
    assert_same(logits_and_gradients(under(model, "dmattn"), keep.bool(), **inputs), theirs)


def test_chunked_attention_of_llama_4():
    config = transformers.Llama4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, intermediate_size_mlp=48, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, attention_chunk_size=6, moe_layers=[], pad_token_id=0,
        num_local_experts=1, bos_token_id=1, eos_token_id=None, layer_types=["chunked_attention", "full_attention"],
        initializer_range=0.3, no_rope_layers=[1, 0],
    )  # fmt: skip
    model = transformers.Llama4ForCausalLM(config).eval()
    for side in (None, "left"):
        ids, keep = tokens(B, S), padding_of(side)
        inputs = {"input_ids": ids, "attention_mask": keep}
        theirs = logits_and_gradients(under(model, "eager"), keep.bool(), **inputs)
        assert_same(logits_and_gradients(under(model, "dmattn"), keep.bool(), **inputs), theirs)


def test_dropout_of_the_configuration_acts_in_training_only():
    model, ids = under(decoder("llama"), "dmattn"), tokens(B, S)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with torch.no_grad():
        still = model(ids).logits
        model.train()
        torch.manual_seed(3)
        first = model(ids).logits
        torch.manual_seed(3)
        again = model(ids).logits
        model.eval()
        assert torch.equal(model(ids).logits, still)
    assert torch.equal(first, again)
    assert (first - still).abs().max() > 1e-3


def test_replacing_attention_of_a_model_that_is_there():
    model, ids = decoder("qwen3"), tokens(B, S)
    with torch.no_grad():
        expected = under(model, "eager")(ids).logits
        assert integration.replace_attention_with_flash_dmattn(model) is model
        assert model.config._attn_implementation == "dmattn"
        torch.testing.assert_close(model(ids).logits, expected, atol=5e-5, rtol=1e-4)


def test_a_model_that_cannot_be_switched_over_is_an_error():
    config = transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    model = transformers.FalconForCausalLM(config)
    words = (
        r"^FalconForCausalLM does not go through AttentionInterface of transformers, so that its attention stays 'sdpa'"
    )
    with pytest.raises(ValueError, match=words):
        integration.replace_attention_with_flash_dmattn(model)
    with pytest.raises(TypeError, match=r"^model must be one of transformers, .*, got Linear"):
        integration.replace_attention_with_flash_dmattn(torch.nn.Linear(2, 2))


def test_asking_for_attention_weights_is_answered_with_a_warning(monkeypatch):
    monkeypatch.setattr(environment, "_said", set())
    model, ids = under(decoder("llama"), "dmattn"), tokens(B, S)
    with pytest.warns(
        UserWarning, match=r"output_attentions=True is not followed, because attention weights are never"
    ):
        assert not model(ids, output_attentions=True).attentions


def test_keys_chosen_by_indices_are_the_only_ones_beside_the_mask():
    layer = torch.nn.Module()
    query, key = torch.randn(B, 4, 5, 8), torch.randn(B, 2, 7, 8)
    indices = torch.stack([torch.randperm(7)[:3] for _ in range(B * 5)]).view(B, 5, 3).int()
    indices[..., 0] = 0  # every row sees a key
    mask = torch.rand(B, 1, 5, 7) < 0.7
    mask[..., 0] = True
    chosen = torch.zeros(B, 1, 5, 7, dtype=torch.bool).scatter(-1, indices.long().unsqueeze(1), True)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, key, attn_mask=mask & chosen, enable_gqa=True
    )
    additive = torch.zeros(B, 1, 5, 9).masked_fill(
        ~torch.nn.functional.pad(mask, (0, 2)), torch.finfo(torch.float32).min
    )
    for given in (mask, additive):
        out, _ = integration.attention_forward(layer, query, key, key, given, indices=indices)
        torch.testing.assert_close(out.transpose(1, 2), expected)
    for given, got in (
        (None, "NoneType"),
        (torch.ones(B, 7), "padding"),
        (integration.make_mask(B, 5, 7), "ForwardMask"),
    ):
        words = rf"^indices= .* takes a mask tensor \[B, 1, Sq, Sk\] beside it, got {got}: .*TENSOR_MASKS"
        with pytest.raises(NotImplementedError, match=words):
            integration.attention_forward(layer, query, key, key, given, indices=indices)


@pytest.mark.parametrize("name", ["sinks"])
def test_what_would_change_the_result_is_refused_instead_of_ignored(name):
    query = torch.randn(1, 2, 5, 8)
    with pytest.raises(
        NotImplementedError, match=rf"^{name}= .* is not supported: let this model attend through 'eager'"
    ):
        integration.attention_forward(torch.nn.Module(), query, query, query, None, **{name: torch.zeros(1, 2, 5, 1)})
    integration.attention_forward(torch.nn.Module(), query, query, query, None, **{name: None})


@pytest.mark.skipif(not hasattr(transformers, "DeepseekV32Config"), reason="this transformers has no DeepSeek-V3.2")
def test_a_model_that_chooses_its_keys_by_indices():
    config = transformers.DeepseekV32Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0,
        num_key_value_heads=4, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6,
        n_routed_experts=2, num_experts_per_tok=1, n_group=1, topk_group=1, moe_intermediate_size=16, n_shared_experts=1,
        first_k_dense_replace=1, index_n_heads=2, index_head_dim=8, index_topk=4, initializer_range=0.3,
        bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model, ids = transformers.DeepseekV32ForCausalLM(config).eval(), tokens(B, S)
    for side in (None, "left"):
        keep = padding_of(side)
        inputs = {"input_ids": ids, "attention_mask": keep}
        theirs = logits_and_gradients(under(model, "eager"), keep.bool(), **inputs)
        assert_same(logits_and_gradients(under(model, "dmattn"), keep.bool(), **inputs), theirs)
    found = [under(model, name).generate(**inputs, max_new_tokens=6, do_sample=False) for name in ("eager", "dmattn")]
    assert torch.equal(*found)


@pytest.mark.skipif(not hasattr(transformers, "DeepseekV4Config"), reason="this transformers has no DeepSeek-V4")
@pytest.mark.parametrize("side", [None, "left"])
def test_a_model_that_adds_keys_and_their_mask(side):
    config = transformers.DeepseekV4Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=8,
        pad_token_id=0, bos_token_id=1, eos_token_id=None, n_routed_experts=2, num_experts_per_tok=1, sliding_window=7,
        q_lora_rank=8, o_groups=2, o_lora_rank=8, index_n_heads=2, index_head_dim=8, index_topk=2, hc_mult=2,
        moe_intermediate_size=16, layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}, initializer_range=0.3,
    )  # fmt: skip
    model, ids, keep = drawn(transformers.DeepseekV4ForCausalLM(config)), tokens(B, S), padding_of(side)
    inputs = {"input_ids": ids, "attention_mask": keep}
    theirs = logits_and_gradients(under(model, "eager"), keep.bool(), **inputs)
    assert_same(logits_and_gradients(under(model, "dmattn"), keep.bool(), **inputs), theirs)
    found = [under(model, name).generate(**inputs, max_new_tokens=6, do_sample=False) for name in ("eager", "dmattn")]
    assert torch.equal(*found)


def test_gradient_checkpointing_and_autocast():
    model, ids = decoder("llama").float(), tokens(B, S)
    rows = torch.ones(B, S, dtype=torch.bool)
    plain = logits_and_gradients(under(model, "dmattn"), rows, input_ids=ids, attention_mask=padding_of("left"))
    model.gradient_checkpointing_enable()
    model.train()
    again = logits_and_gradients(model, rows, input_ids=ids, attention_mask=padding_of("left"))
    assert_same(again, plain)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids).logits
    assert isinstance(model(ids), ModelOutput)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), model(ids).logits, atol=0.4, rtol=0.1)


@torch.no_grad()
def test_a_prepared_mask_is_taken_as_a_models_mask():
    model, ids = decoder("llama"), tokens(B, S)
    documents = (torch.arange(S) // 8)[None]
    visible = (documents[:, :, None] == documents[:, None, :]).tril()[:, None].expand(B, 1, S, S)
    expected = under(model, "eager")(
        ids, attention_mask=torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    ).logits
    mask = prepare_mask(documents=documents, is_causal=True)
    found = under(model, "dmattn")(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-4)
