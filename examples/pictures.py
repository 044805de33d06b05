"""Pictures of a run: the loss curves, and the masks of one layer's heads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from settings import PICTURES

if TYPE_CHECKING:
    from dmattn_ops import TileMask
    from trainer import Trainer

PIXELS = 1024  # along each side of a picture of a mask


def draw_pictures(trainers: dict[str, Trainer], entropy: float, out: Path, title: str = "") -> list[Path]:
    """Draw the loss curves, under a title, and the masks of one layer's heads; nothing where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, trainer in trainers.items():
        axes.plot(
            range(1, trainer.step + 1), trainer.history.train, alpha=0.4, linewidth=0.8, label=f"{name}, training"
        )
        axes.plot(*zip(*trainer.history.validation, strict=True), marker="o", markersize=3, label=f"{name}, validation")
    axes.axhline(entropy, color="grey", linestyle=":", label="entropy of single bytes")
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.set_title(title, fontsize="small")
    axes.legend()
    loss, masks = (out / name for name in PICTURES)
    figure.savefig(loss, dpi=150)

    trainer = next(iter(trainers.values()))
    heads = thinned(trainer.masks()[len(trainer.model.blocks) // 2])
    figure, panels = plt.subplots(1, len(heads), figsize=(4 * len(heads), 4.3), layout="constrained", squeeze=False)
    seqlen = trainer.model.config.seqlen
    for index, (panel, mask) in enumerate(zip(panels[0], heads, strict=True)):
        panel.imshow(mask.cpu().numpy(), cmap="binary", interpolation="nearest", extent=(0, seqlen, seqlen, 0))
        panel.set(title=f"key head {index}", xlabel="key", ylabel="query")
    figure.suptitle(f"Keys that each query sees, layer {len(trainer.model.blocks) // 2}")
    figure.savefig(masks, dpi=150)
    return [loss, masks]


def thinned(mask: TileMask) -> Tensor:
    """Return the heads `[Hkv, n, n]` of the first sequence's mask: every query and key, or every so many of a long one."""
    seqlen = mask.seqlen_q
    step = -(-seqlen // PIXELS)
    if step == 1:
        return mask.to_dense()[0]
    rows = [mask.queries(query, query + 1).to_dense()[0, :, 0, ::step] for query in range(0, seqlen, step)]
    return torch.stack(rows, dim=1)
