"""Fine-tune a model of transformers with dynamic masks: each query sees the best keys of its prefix, scored from their values.

`python examples/finetune_sparse.py --model FOLDER` takes a model (and its tokenizer, if there is one) from a folder, gives
its layers dynamic masks, and trains it on the source of Python's standard library, or on `--data FILE`. Without `--model`, a
small Llama with random weights learns bytes. Printed are the validation losses of the dense model, of the sparse one before,
and of the sparse one afterwards; `--out FOLDER` keeps the weights and the settings of the masks, which `load` reads.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from corpus import Text, batch, from_file, standard_library
from dmattn_ops.integrations.transformers import DynamicMask, add_dynamic_masks, replace_attention_with_flash_dmattn

BYTES = 256
WEIGHTS, MASKS = "weights.pt", "dynamic_masks.json"
MOST_CHARACTERS = 4_000_000  # of the text that a tokenizer reads


def arguments(given: list[str] | None) -> argparse.Namespace:
    """Read and check the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, help="folder of a causal language model; none is a small one of random weights"
    )
    parser.add_argument("--data", type=Path, help="text file; none is the source of Python's standard library")
    parser.add_argument("--out", type=Path, help="folder for the result; it must be empty")
    parser.add_argument("--keep", type=int, default=64, help="best keys that a query sees")
    parser.add_argument("--keep-first", type=int, default=4, help="first keys that it sees beside them")
    parser.add_argument("--keep-last", type=int, default=16, help="last keys that it sees beside them")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument(
        "--rate", type=float, default=3e-4, help="learning rate of the weights; scores learn ten times as fast"
    )
    parser.add_argument(
        "--only-masks", action="store_true", help="train the scores alone, and leave the weights as they are"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(given)
    for name in ("steps", "batch", "seqlen"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    for name in ("keep", "keep_first", "keep_last"):
        if getattr(options, name) < 0:
            parser.error(f"--{name.replace('_', '-')} must not be negative, got {getattr(options, name)}")
    if options.device not in ("cpu", "cuda"):
        parser.error(f"--device must be cpu or cuda, got {options.device}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: there is no GPU that this torch can use")
    for name in ("model", "data"):
        path = getattr(options, name)
        if path is not None and not path.exists():
            parser.error(f"--{name}: {path} does not exist")
    if options.out is not None and options.out.exists() and any(options.out.iterdir()):
        parser.error(f"--out: {options.out} is not empty")
    return options


def small_model() -> nn.Module:
    """Return a Llama of bytes with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=BYTES,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    return LlamaForCausalLM(config)


def model_and_text(folder: Path | None, data: Path | None) -> tuple[nn.Module, Text]:
    """Return the model, and the text in its tokens: bytes where it has no tokenizer."""
    text = standard_library() if data is None else from_file(data)
    if folder is None:
        return small_model(), text
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    if (folder / "tokenizer.json").exists() or (folder / "tokenizer_config.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

        def tokens(part: Tensor) -> Tensor:
            decoded = bytes(part[:MOST_CHARACTERS].tolist()).decode("utf-8", errors="replace")
            return torch.tensor(tokenizer(decoded)["input_ids"])

        return model, Text(tokens(text.train), tokens(text.validation))
    if model.config.vocab_size < BYTES:
        raise SystemExit(f"{folder} has no tokenizer, and {model.config.vocab_size} tokens are too few for bytes")
    return model, text


def load(folder: Path, model: nn.Module) -> nn.Module:
    """Give a model of the same configuration the masks and the weights that a run kept."""
    replace_attention_with_flash_dmattn(model)
    add_dynamic_masks(model, **json.loads((folder / MASKS).read_text()))
    model.load_state_dict(torch.load(folder / WEIGHTS, map_location="cpu"))
    return model


@torch.no_grad()
def validate(model: nn.Module, draw: Callable[[int], tuple[Tensor, Tensor]], batches: int = 4) -> float:
    """Return the mean loss in nats per token of fixed batches."""
    model.eval()
    losses = [loss_of(model, *draw(number)).item() for number in range(batches)]
    return sum(losses) / len(losses)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    logits = model(input_ids=inputs, use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def parameter_groups(model: nn.Module, rate: float, only_masks: bool) -> list[dict[str, Any]]:
    """Return what the optimizer trains: scores ten times as fast as weights, which were learned before."""
    of_masks = {
        id(part) for module in model.modules() if isinstance(module, DynamicMask) for part in module.parameters()
    }
    scores = [part for part in model.parameters() if id(part) in of_masks]
    weights = [part for part in model.parameters() if id(part) not in of_masks]
    for part in weights:
        part.requires_grad_(not only_masks)
    groups: list[dict[str, Any]] = [{"params": scores, "lr": 10 * rate}]
    return groups if only_masks else [*groups, {"params": weights, "lr": rate}]


def main(given: list[str] | None = None) -> dict[str, float]:
    """Run; return the validation losses by name."""
    options = arguments(given)
    torch.manual_seed(options.seed)
    model, text = model_and_text(options.model, options.data)
    shortest = min(map(len, text))
    if shortest <= options.seqlen:
        raise SystemExit(
            f"--seqlen must be less than the {shortest} tokens of the text or its part held out, got {options.seqlen}"
        )
    replace_attention_with_flash_dmattn(model.to(options.device))

    def draw(part: Tensor, number: int) -> tuple[Tensor, Tensor]:
        inputs, targets = batch(part, options.batch, options.seqlen, number)
        return inputs.to(options.device), targets.to(options.device)

    def of_validation(number: int) -> tuple[Tensor, Tensor]:
        return draw(text.validation, number)

    losses = {"dense": validate(model, of_validation)}
    masks = {"keep": options.keep, "keep_first": options.keep_first, "keep_last": options.keep_last}
    add_dynamic_masks(model, **masks)
    losses["sparse, before"] = validate(model, of_validation)
    optimizer = torch.optim.AdamW(parameter_groups(model, options.rate, options.only_masks), betas=(0.9, 0.95))
    began = time.perf_counter()
    model.train()
    for step in range(1, options.steps + 1):
        loss = loss_of(model, *draw(text.train, (options.seed << 32) + step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, options.steps // 10) == 0:
            speed = step * options.batch * options.seqlen / (time.perf_counter() - began)
            print(f"step {step}: loss {loss.item():.3f}, {speed:,.0f} tokens/s", flush=True)
    losses["sparse, after"] = validate(model, of_validation)
    seen = min(options.seqlen, options.keep + options.keep_first + options.keep_last)
    print(f"validation loss, {seen} of up to {options.seqlen} keys seen:")
    for name, value in losses.items():
        print(f"  {name}: {value:.3f}")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), options.out / WEIGHTS)
        (options.out / MASKS).write_text(json.dumps(masks))
        print(f"kept in {options.out}")
    return losses


if __name__ == "__main__":
    main()
