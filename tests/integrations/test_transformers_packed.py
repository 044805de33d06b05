"""Sequences that are packed in a row, as `position_ids` tell: every model gives what it gives for each of them alone."""

import itertools

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tiny_models import VOCABULARY, decoder, drawn, t5, tokens, under  # noqa: E402

import dmattn_ops.integrations.transformers as integration  # noqa: E402
from dmattn_ops.integrations import packed  # noqa: E402

LENGTHS = (7, 1, 11)
integration.register()
_SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    "initializer_range": 0.3, "attention_dropout": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_OF_LLAMA_4 = {
    "intermediate_size_mlp": 48, "attention_chunk_size": 4, "moe_layers": [], "num_local_experts": 1,
    "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
}  # fmt: skip
MODELS = {
    **{name: lambda name=name: decoder(name) for name in ("llama", "gemma2", "gemma3", "gpt_oss", "doge")},
    "llama4": lambda: drawn(transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**_SMALL | _OF_LLAMA_4))),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**_SMALL)),
    "roberta": lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**_SMALL)),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(**_SMALL, ffn_dim=48, word_embed_proj_dim=32, init_std=0.3, dropout=0.0)
    ),
    "modernbert": lambda: transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(**_SMALL, local_attention=6, global_attn_every_n_layers=2)
    ),
    "gemma3 both ways": lambda: transformers.Gemma3TextModel(
        transformers.Gemma3TextConfig(
            **_SMALL, sliding_window=5, query_pre_attn_scalar=8, use_bidirectional_attention=True,
            layer_types=["sliding_attention", "full_attention"],
        )
    ),
}  # fmt: skip
MASKS = ("none", "ones", "padding behind", "padding between")


def first(output):
    return output.logits if hasattr(output, "logits") else output[0]


def packed_row(start=0):
    """Tokens of several sequences in a row, and their positions."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None] + start
    return tokens(1, sum(LENGTHS)), positions


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_packed_sequences_are_those_alone(name, training):
    torch.manual_seed(1)
    model = under(MODELS[name]().train(training), "dmattn")
    start = 1 if name == "roberta" else 0  # its positions begin behind the padding's
    ids, positions = packed_row(start)
    parts = ids.split(LENGTHS, dim=1)
    with torch.no_grad():
        alone = [first(model(part, position_ids=torch.arange(part.shape[1])[None] + start)) for part in parts]
    takes_cache = name not in ("roberta", "bert", "modernbert")
    for mask, use_cache in itertools.product(MASKS, (None, True) if takes_cache and not training else (None,)):
        given, where = ids, positions
        more = {} if use_cache is None else {"use_cache": use_cache}
        if mask != "none":
            more["attention_mask"] = torch.ones_like(ids)
        if mask.startswith("padding"):  # its positions count or stand still, as it happens
            gap = torch.zeros(1, 3, dtype=torch.int64)
            at = LENGTHS[0] if mask == "padding between" else ids.shape[1]
            given, where = (
                torch.cat([t[:, :at], gap + fill, t[:, at:]], 1) for t, fill in ((ids, 2), (positions, start))
            )
            more["attention_mask"] = torch.cat([torch.ones_like(ids[:, :at]), gap, torch.ones_like(ids[:, at:])], 1)
        if training:
            found = first(model(given, position_ids=where, **more))
        else:
            with torch.no_grad():
                found = first(model(given, position_ids=where, **more))
        if mask.startswith("padding"):
            found = found[more["attention_mask"].bool()][None]
        error = (found - torch.cat(alone, 1)).abs().max()
        assert error < 1e-4 * found.abs().max(), (mask, use_cache, error)


@pytest.mark.parametrize("name", ["llama", "bert", "gemma3 both ways"])
def test_positions_may_come_in_order_of_the_arguments_and_offsets_say_the_same(name):
    model = under(MODELS[name]().eval(), "dmattn")
    ids, positions = packed_row()
    offsets = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    with torch.no_grad():
        expected = first(model(ids, position_ids=positions))
        before = (torch.ones_like(ids), torch.zeros_like(ids)) if name == "bert" else (torch.ones_like(ids),)
        torch.testing.assert_close(first(model(ids, *before, positions)), expected)
        by_offsets = first(model(ids, torch.ones_like(ids), position_ids=positions, cu_seq_lens_q=offsets))
        torch.testing.assert_close(by_offsets, expected)


@pytest.mark.parametrize("name", ["llama", "bert", "llama4"])
def test_a_compiled_model_keeps_them_apart_with_a_mask_of_ones(name):
    torch._dynamo.reset()
    model = under(MODELS[name]().eval(), "dmattn")
    ids, positions = packed_row()
    with torch.no_grad():
        expected = first(model(ids, position_ids=positions))
        model.compile(fullgraph=True, backend="eager")
        found = first(model(ids, attention_mask=torch.ones_like(ids), position_ids=positions))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert packed.noted() is None
    torch._dynamo.reset()


@torch.no_grad()
def test_a_chunk_of_a_prompt_goes_on_with_the_cache_and_what_begins_anew_does_not():
    model = under(decoder("llama"), "dmattn")
    ids, _ = packed_row()
    one, two = ids[:, :9], ids[:, 9:]
    for kind in ("dynamic", "static"):
        cache = (
            transformers.DynamicCache()
            if kind == "dynamic"
            else transformers.StaticCache(model.config, max_cache_len=32)
        )
        model(one[:, :5], past_key_values=cache)
        positions = torch.cat([torch.arange(5, 9), torch.arange(10)])[None]
        found = model(ids[:, 5:], past_key_values=cache, position_ids=positions).logits
        torch.testing.assert_close(found[:, :4], model(one).logits[:, 5:], atol=5e-5, rtol=1e-4)
        torch.testing.assert_close(found[:, 4:], model(two).logits, atol=5e-5, rtol=1e-4)


def test_positions_that_only_count_tell_nothing():
    keep = torch.tensor([[False, False, True, True, False, True], [True] * 6])
    by_count = (keep.cumsum(-1) - 1).clamp(min=0)
    places = torch.arange(6).expand(2, 6)
    for positions in (by_count, by_count.masked_fill(~keep, 1), places, places + 3):
        assert not packed.runs(positions, keep)[keep].any()
    assert not packed.runs(places, None).any()
    assert packed.runs(torch.tensor([[0, 1, 0, 0, 1, 5]]), None).tolist() == [[0, 0, 1, 2, 2, 3]]
    of_an_image = torch.tensor([[0, 1, 2, 2, 2, 2, 4, 0, 1]])  # the axis of time: four patches, then a new sequence
    assert packed.runs(of_an_image, None, several=True).tolist() == [[0, 0, 0, 0, 0, 0, 0, 1, 1]]


@pytest.mark.parametrize("kind", ["encoder", "state space", "own masks"])
def test_models_that_cannot_keep_them_apart_refuse_them_in_words(kind):
    ids, positions = packed_row()
    more = {}
    if kind == "encoder":
        config = transformers.BertConfig(**_SMALL, is_decoder=True, add_cross_attention=True)
        model, more["encoder_hidden_states"] = transformers.BertModel(config), torch.randn(1, 5, 32)
        words = "nothing says which part of the encoder's output"
    elif kind == "state space":
        config = transformers.FalconH1Config(**_SMALL, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8)
        model, words = (
            transformers.FalconH1Model(config),
            "FalconH1Model also has layers that mix them without attention",
        )
    else:
        model, words = (
            transformers.LayoutLMModel(transformers.LayoutLMConfig(**_SMALL)),
            "this model makes its masks itself",
        )
    model = under(model.eval(), "dmattn")
    with torch.no_grad():
        assert first(model(ids, position_ids=torch.arange(ids.shape[1])[None], **more)).isfinite().all()
        with pytest.raises(
            NotImplementedError, match=rf"^position_ids or cu_seq_lens_q tell of packed sequences .*{words}"
        ):
            model(ids, position_ids=positions, **more)


def test_a_mask_of_the_callers_own_says_everything():
    model = under(t5(), "dmattn")  # without positions: nothing is noted
    assert model(tokens(1, 5), decoder_input_ids=tokens(1, 4)).logits.isfinite().all()
    model, (ids, positions) = under(decoder("llama"), "dmattn"), packed_row()
    whole = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    with torch.no_grad():
        expected = under(model, "sdpa")(ids, attention_mask=whole, position_ids=positions).logits
        found = under(model, "dmattn")(ids, attention_mask=whole, position_ids=positions).logits
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-4)
