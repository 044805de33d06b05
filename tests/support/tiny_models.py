"""Models of transformers with a few thousand random parameters, and what is compared of them.

In float32: in float64 their eager attention makes NaN of rows that see nothing, since its softmax is in float32.
"""

import torch
import transformers

VOCABULARY = 64
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,  # attention that looks at something
}
_MIXED = ["sliding_attention", "full_attention"]
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 128,
}
DECODERS = {
    "llama": ("Llama", {}),
    "gemma2": ("Gemma2", {"sliding_window": 7, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", {"sliding_window": 7, "query_pre_attn_scalar": 8, "layer_types": _MIXED}),
    "gpt_oss": (
        "GptOss",
        {"sliding_window": 7, "num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": _YARN},
    ),
    "qwen3": ("Qwen3", {}),
    "doge": ("Doge", {"keep_window_size": 9}),
}


def decoder(name):
    """A causal language model."""
    family, more = DECODERS[name]
    config = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    return drawn(getattr(transformers, f"{family}ForCausalLM")(config(**_SIZES, **more)))


def t5():
    """A T5 with two layers on each side."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        initializer_factor=1.0, pad_token_id=0, eos_token_id=None, decoder_start_token_id=1,
    )  # fmt: skip
    return drawn(transformers.T5ForConditionalGeneration(config))


def drawn(model):
    """The model, with what starts at zero drawn too."""
    model.eval()
    for name, parameter in model.named_parameters():
        if name.endswith((".sinks", ".A")):
            torch.nn.init.normal_(parameter)
    return model


def tokens(batch, length):
    """Rows of different tokens: equal ones have equal values in Doge's first layer, and equal scores are kept at will."""
    return torch.stack([torch.randperm(VOCABULARY - 2)[:length] + 2 for _ in range(batch)])


def under(model, implementation):
    """The model with another attention."""
    model.set_attn_implementation(implementation)
    return model


def logits_and_gradients(model, rows, **inputs):
    """Logits of the rows (bool `[B, S]`) and gradients of all parameters that have one."""
    model.zero_grad()
    logits = model(**inputs).logits[rows]
    logits.double().square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return logits.detach(), gradients


def assert_same(ours, theirs):
    """Compare logits and gradients."""
    torch.testing.assert_close(ours[0], theirs[0], atol=2e-5, rtol=1e-4)
    assert ours[1].keys() == theirs[1].keys()
    scale = max(gradient.abs().max() for gradient in theirs[1].values())
    for name, gradient in theirs[1].items():
        assert (ours[1][name] - gradient).abs().max() <= 2e-5 * scale, name
