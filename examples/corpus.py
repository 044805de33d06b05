"""Text to learn from: the sources of Python's standard library, which every machine has, or any file."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

HOLD_OUT = 10  # every tenth file, or tenth of a file, is for validation


class Text(NamedTuple):
    """Bytes to train on and bytes held out, uint8."""

    train: Tensor
    validation: Tensor


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def standard_library() -> Text:
    """Read the modules of the running Python's standard library, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests"}
    paths = sorted(path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts))
    files = [path.read_bytes() for path in paths]
    held_out = files[::HOLD_OUT]
    del files[::HOLD_OUT]
    return Text(_tensor(b"".join(files)), _tensor(b"".join(held_out)))


def from_file(path: Path) -> Text:
    """Read one file; its end is held out."""
    data = path.read_bytes()
    split = len(data) - len(data) // HOLD_OUT
    return Text(_tensor(data[:split]), _tensor(data[split:]))


def batch(data: Tensor, count: int, seqlen: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw `count` windows: inputs and targets `[count, seqlen]`, int64. The same seed draws the same windows."""
    if len(data) <= seqlen:
        raise ValueError(
            f"the text must have more than {seqlen} bytes to train on and to validate with, got {len(data)}"
        )
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - seqlen, (count, 1), generator=generator)
    windows = data[starts + torch.arange(seqlen + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def unigram_entropy(data: Tensor) -> float:
    """Return the entropy of single bytes in nats: the loss of the best model that sees no context."""
    share = torch.bincount(data.long(), minlength=256).double() / len(data)
    return -torch.special.xlogy(share, share).sum().item()
