"""A tiny model with random weights of any type that transformers knows, made from its configuration class alone, and inputs."""

import inspect
import re

import torch
import transformers
from transformers import AutoModel, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

VOCABULARY, LENGTH, PADDED = 120, 12, 4
LARGEST = 5_000_000
# (pattern of a configuration's argument, its value), the first that fits; only integers are replaced
_SIZES = [
    (r"^(.*_)?(bos|eos|pad|sep|cls|mask|unk|start)_token_id$|^decoder_start_token_id$", 1),
    (r"(image|video|audio|vision|boi|eoi|boa|eoa)\w*_token_(id|index)$", VOCABULARY - 1),
    (r"vocab_size\w*$|^n_vocab$|num_embeddings$", VOCABULARY),
    (r"(num_key_value_heads|num_kv_heads|n_kv_heads|num_global_key_value_heads|multi_query_group_num)", 2),
    (r"(num|n|encoder|decoder)\w*_heads?$|^n_head$|num_heads$|^linear_num_\w+_heads$", 4),
    (r"(num_\w*layers|n_layers?|_layers|^depth|num_\w*blocks)$", 2),
    (r"(^head_dim|_head_dim|^d_kv|attention_head_size)$", 8),
    (r"(kv_lora_rank|q_lora_rank|rope_head_dim)$", 8),
    (r"num_experts_per_tok|num_selected_experts|moe_topk|^moe_k$|top_?k$", 1),
    (r"(num_\w*experts|n_\w*experts)$", 2),
    (r"(intermediate_size\w*|ffn_dim|d_ff|ffn_hidden_size|d_inner|mlp_dim|ffn_intermediate\w*)$", 48),
    (r"(hidden_size|d_model|n_embd|embed_dim|hidden_dim|projection_dim|^dim|embedding_size|emb_dim|^width)$", 32),
    (r"(max_position_embeddings|n_positions|max_\w*positions|max_seq_len\w*|n_ctx)$", 128),
    (r"^(image_size|img_size)$", 32),
    (r"^patch_size$", 8),
    (r"sliding_window$|local_attention$|attention_chunk_size$", 6),
]  # fmt: skip


def types():
    """The model types that `AutoModel` makes."""
    mapping = transformers.models.auto.modeling_auto.MODEL_MAPPING_NAMES
    return sorted(name for name in CONFIG_MAPPING_NAMES if name in mapping)


def _arguments(kind):
    """Arguments that make a configuration of a class small, those of the configurations inside included."""
    chosen = {}
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        default = parameter.default
        if isinstance(default, bool) or not isinstance(default, int):
            continue
        for pattern, value in _SIZES:
            if re.search(pattern, name):
                chosen[name] = min(value, default) if default > 0 else value
                break
    if kind.sub_configs:
        whole = kind()
        for name in kind.sub_configs:
            inside = getattr(whole, name, None)
            if isinstance(inside, PreTrainedConfig):
                chosen[name] = {**_arguments(type(inside)), "model_type": inside.model_type}
    return chosen


def model(kind, attention):
    """A model of a type, in evaluation, whose attention looks at something."""
    config = CONFIG_MAPPING[kind]
    config = config(**_arguments(config))
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModel.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{kind} is not tiny: {size} parameters")
    torch.manual_seed(0)
    made = AutoModel.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() > 1 and parameter.is_floating_point():
                parameter.normal_(std=0.25)
    return made


def inputs(made):
    """Inputs of a model: tokens whose first ones are padding, images, sounds."""
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
    if "pixel_values" in names and made.main_input_name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 32) or 32
        size = size if isinstance(size, int) else size[0]
        found["pixel_values"] = torch.randn(2, getattr(vision, "num_channels", 3), size, size)
    if made.main_input_name == "input_features" and "input_features" in names:
        found["input_features"] = torch.randn(2, getattr(config, "num_mel_bins", 80), 200)
    if made.main_input_name == "input_values" and "input_values" in names:
        found["input_values"] = torch.randn(2, 4000)
    return found
