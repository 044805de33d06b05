"""Continue a text with the model that `train.py` trained, in memory that does not grow with the text.

    make train
    python examples/generate.py --prompt "def " --length 2000
    python examples/generate.py --length 5000 --full

Each layer holds the keys that its mask can still show (`dmattn_ops.KeptKeys`), which gives the results of holding them all.
`--full` writes the same text again with a cache of all keys, and prints memory and speed of both.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmattn_ops import KeptKeys, dynamic_mask, flash_dmattn_func
from model import ByteModel, Cache, ModelConfig
from settings import CHECKPOINT, Parser, SettingError
from trainer import load_state


class Written(NamedTuple):
    """A text, what the caches took in bytes after the prompt and at its end, and bytes of text per second."""

    text: bytes
    begin: int
    end: int
    speed: float


class AllKeys:
    """A cache of all keys, to compare with: what generating needs where nothing is thrown away."""

    def __init__(self, keep: int, batch: int, device: str) -> None:
        self.keep = keep
        self.parts: tuple[Tensor, ...] = ()  # key and value [B, S, Hkv, D], scores [B, Hkv, S]
        self.length = torch.zeros(batch, dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Tensor, bias: Tensor) -> Tensor:
        """Attend with the last rows of the mask of all keys; the bias of a key is its score."""
        if self.parts:
            pairs = zip(self.parts, (key, value, scores), (1, 1, 2), strict=True)
            key, value, scores = (torch.cat([held, new], axis) for held, new, axis in pairs)
        self.parts = key, value, scores
        self.length += query.shape[1]
        total = scores.shape[2]
        mask = dynamic_mask(scores, self.keep, queries=(total - query.shape[1], total))
        return flash_dmattn_func(query, key, value, mask, scores.unsqueeze(2))


def caches_of(config: ModelConfig, device: str, *, full: bool = False) -> list[Cache]:
    """Return an empty cache for each layer."""
    if full:
        return [AllKeys(config.keep, 1, device) for _ in range(config.layers)]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    sizes = (1, config.kv_heads, config.head_dim, config.keep)
    return [KeptKeys(*sizes, dtype=dtype, device=device) for _ in range(config.layers)]


@torch.no_grad()
def write(
    model: ByteModel, caches: Sequence[Cache], prompt: bytes, length: int, temperature: float, seed: int
) -> Written:
    """Write `length` bytes after a prompt; temperature 0 takes the likeliest byte each time."""
    device = model.embedding.weight.device.type
    generator = torch.Generator().manual_seed(seed)
    coming, text = list(prompt), bytearray(prompt)
    sizes: list[int] = []
    began = time.perf_counter()
    for _ in range(length):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = model(torch.tensor([coming], device=device), caches=caches)[0, -1].float().cpu()
        if not sizes:  # the prompt is behind us
            sizes, began = [sum(cache.nbytes for cache in caches)], time.perf_counter()
        if temperature > 0:
            weights = torch.softmax(logits / temperature, dim=-1)
            coming = [int(torch.multinomial(weights, 1, generator=generator))]
        else:
            coming = [int(logits.argmax())]
        text += bytes(coming)
    speed = (length - 1) / max(time.perf_counter() - began, 1e-9)
    return Written(bytes(text), sizes[0], sum(cache.nbytes for cache in caches), speed)


def load_model(folder: Path, device: str) -> ByteModel:
    """Return the model of a checkpoint."""
    path = folder / CHECKPOINT
    if not path.exists():
        raise SettingError(f"{path} does not exist: run make train first, or give its folder as --out")
    state = load_state(path, device)
    model = ByteModel(ModelConfig(**state["settings"]["model"])).to(device)
    model.load_state_dict(state["model"])
    return model.eval()


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/train"), help="folder of the checkpoint")
    parser.add_argument("--prompt", default="def ", help="how the text begins")
    parser.add_argument("--length", type=int, default=1000, help="how many bytes to write")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest byte")
    parser.add_argument("--seed", type=int, default=0, help="decides what is drawn")
    parser.add_argument("--full", action="store_true", help="write it again with a cache of all keys, and compare")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    if options.length < 1:
        raise SettingError(f"--length must be at least 1, got {options.length}")
    if not options.temperature >= 0:
        raise SettingError(f"--temperature must be 0 or more, got {options.temperature}")
    if not options.prompt:
        raise SettingError("--prompt must not be empty")
    return options


def main(arguments: list[str]) -> dict[str, Written]:
    """Write as the command line says; return what was written by the name of the cache."""
    options = parse(arguments)
    model = load_model(options.out, options.device)
    how: dict[str, Any] = {name: getattr(options, name) for name in ("length", "temperature", "seed")}
    written = {}
    for name in ("kept keys", "all keys") if options.full else ("kept keys",):
        caches = caches_of(model.config, options.device, full=name == "all keys")
        written[name] = write(model, caches, options.prompt.encode(), **how)
        if name == "kept keys":
            print(written[name].text.decode(errors="replace"), end="\n\n")
        begin, end = (f"{size / 1e6:.2f} MB" for size in written[name][1:3])
        print(
            f"{name:<10}{begin} after the prompt, {end} at the end, {written[name].speed:,.0f} bytes of text per second"
        )
    if options.full:
        same = written["kept keys"].text == written["all keys"].text
        print("both wrote the same text" if same else "the texts part where rounding decided between two bytes")
    return written


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SettingError as error:
        print(f"generate.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None
