"""A tiny model with random weights of any type that transformers knows, made from its configuration class alone.

Sizes are told by the names of a configuration's arguments. Where that makes no model that runs with `eager`, other sizes and
other inputs are tried; of some types nothing is made.
"""

import inspect
import itertools
import re

import torch
from transformers import AutoModel, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

VOCABULARY, LENGTH, PADDED, LARGEST = 120, 12, 4, 5_000_000
# (pattern of a configuration's argument, its value), the first that fits; only integers are replaced
_SIZES = [
    (r"^(.*_)?(bos|eos|pad|sep|cls|mask|unk|start)_token_id$|^decoder_start_token_id$", 1),
    (r"(image|video|audio|vision|boi|eoi|boa|eoa)\w*_token_(id|index)$", VOCABULARY - 1),
    (r"vocab_size\w*$|^n_vocab$|num_embeddings$", VOCABULARY),
    (r"(num_key_value_heads|num_kv_heads|n_kv_heads|num_global_key_value_heads|multi_query_group_num)", 2),
    (r"(num|n|encoder|decoder)\w*_heads?$|^n_head$|num_heads$|^linear_num_\w+_heads$", 4),
    (r"(num_\w*layers|n_layers?|_layers|^depth|num_\w*blocks)$", 2),
    (r"(^head_dim|_head_dim|^d_kv|attention_head_size)$", 8),
    (r"(kv_lora_rank|q_lora_rank)$", 8),
    (r"num_experts_per_tok|num_selected_experts|moe_topk|^moe_k$|top_?k$", 1),
    (r"(num_\w*experts|n_\w*experts)$", 2),
    (r"(intermediate_size\w*|ffn_dim|d_ff|ffn_hidden_size|d_inner|mlp_dim|ffn_intermediate\w*)$", 48),
    (r"(hidden_size|d_model|n_embd|embed_dim|hidden_dim|projection_dim|^dim|embedding_size|emb_dim|^width)$", 32),
    (r"(max_position_embeddings|n_positions|max_\w*positions|max_seq_len\w*|n_ctx)$", 128),
    (r"^(image_size|img_size)$", 32),
    (r"^patch_size$", 8),
    (r"sliding_window$|local_attention$|attention_chunk_size$", 6),
]  # fmt: skip
_OTHER_SIZES = (  # other values for those names, as {pattern: value}
    {},
    {"key_value_heads": 4},
    {r"^num_hidden_layers$": 6},
    {r"^num_hidden_layers$": 6, "key_value_heads": 4},
    {"rotary_dim": 4},
    {"(num_\\w*layers)$": 4, "head_dim$": 16},
)


def types():
    """The model types that `AutoModel` makes."""
    return sorted(name for name in CONFIG_MAPPING if name in MODEL_MAPPING_NAMES)


def _size(name, default, other):
    for pattern, value in [*other.items(), *_SIZES]:
        if re.search(pattern, name):
            return value if default <= 0 else min(value, default)
    return default


def _arguments(kind, other):
    """Arguments that make a configuration of a class small, those of the configurations inside included."""
    parameters = inspect.signature(kind.__init__).parameters.items()
    chosen = {name: _size(name, part.default, other) for name, part in parameters if type(part.default) is int}
    whole = kind() if kind.sub_configs else None
    for name in kind.sub_configs:
        inside = getattr(whole, name, None)
        if isinstance(inside, PreTrainedConfig):
            chosen[name] = {**_arguments(type(inside), other), "model_type": inside.model_type}
    return chosen


def build(config, attention):
    """A model in evaluation whose attention looks at something; the same weights each time."""
    torch.manual_seed(0)
    return drawn(AutoModel.from_config(config, attn_implementation=attention, dtype=torch.float32))


def drawn(model):
    """The model in evaluation, with weights that are not small."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.is_floating_point():
                parameter.normal_(std=0.25)
    return model.eval()


def _inputs(made, images):
    """Inputs of a model: tokens whose last ones are padding, images, sounds."""
    names, config = inspect.signature(type(made).forward).parameters, made.config
    torch.manual_seed(1)
    found = {}
    if "input_ids" in names:
        found["input_ids"] = torch.randint(3, 90, (2, LENGTH))
        if "attention_mask" in names:
            found["attention_mask"] = torch.ones(2, LENGTH, dtype=torch.int64)
            found["attention_mask"][0, -PADDED:] = 0
    if "decoder_input_ids" in names:
        found["decoder_input_ids"] = torch.randint(3, 90, (2, LENGTH - 2))
    if "pixel_values" in names and (images or made.main_input_name == "pixel_values"):
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 32) or 32
        size = size if isinstance(size, int) else size[0]
        found["pixel_values"] = torch.randn(2, getattr(vision, "num_channels", 3), size, size)
    if made.main_input_name == "input_features":
        encoder = getattr(config, "audio_config", config)
        bins = next(
            (getattr(encoder, name) for name in ("num_mel_bins", "input_dim", "n_mels") if hasattr(encoder, name)), 80
        )
        found["input_features"] = torch.randn(2, bins, 200) if not images else torch.randn(2, 200, bins)
        if "attention_mask" in names:
            found["attention_mask"] = torch.ones(2, 200, dtype=torch.int64)
            found["attention_mask"][0, 120:] = 0
    if made.main_input_name == "input_values":
        found["input_values"] = torch.randn(2, 4000)
    return found


def tiny(kind):
    """A configuration of a type, inputs, and what `eager` makes of them; None where no choice of sizes and inputs runs."""
    for other, images in itertools.product(_OTHER_SIZES, (False, True)):
        try:
            config = CONFIG_MAPPING[kind]
            config = config(**_arguments(config, other))
            with torch.device("meta"):
                if sum(part.numel() for part in AutoModel.from_config(config).parameters()) > LARGEST:
                    return None
            model = build(config, "eager")
            inputs = _inputs(model, images)
            return config, inputs, output(model, inputs)
        except Exception:  # of any kind: sizes that do not fit, another input, a missing package
            continue
    return None


@torch.no_grad()
def output(model, inputs):
    """The first tensor of floating-point numbers that a model returns, without the rows of padding."""
    torch.manual_seed(2)
    found = model(**inputs)
    parts = found.values() if hasattr(found, "values") else found
    made = next(part for part in parts if isinstance(part, torch.Tensor) and part.is_floating_point())
    keep = inputs.get("attention_mask")
    return made[keep.bool()] if keep is not None and made.dim() == 3 and made.shape[:2] == keep.shape else made
