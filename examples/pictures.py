"""Pictures of a run: the loss curves, and the masks of one layer's heads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from settings import PICTURES

if TYPE_CHECKING:
    from train import Trainer


def draw_pictures(trainers: dict[str, Trainer], entropy: float, out: Path) -> list[Path]:
    """Draw the loss curves and the masks of one layer's heads; nothing where matplotlib is missing."""
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
    axes.legend()
    loss, masks = (out / name for name in PICTURES)
    figure.savefig(loss, dpi=150)

    trainer = next(iter(trainers.values()))
    [heads] = trainer.masks()[len(trainer.model.blocks) // 2]
    figure, panels = plt.subplots(1, len(heads), figsize=(4 * len(heads), 4.3), layout="constrained", squeeze=False)
    for index, (panel, mask) in enumerate(zip(panels[0], heads, strict=True)):
        panel.imshow(mask.cpu().numpy(), cmap="binary", interpolation="nearest")
        panel.set(title=f"key head {index}", xlabel="key", ylabel="query")
    figure.suptitle(f"Keys that each query sees, layer {len(trainer.model.blocks) // 2}")
    figure.savefig(masks, dpi=150)
    return [loss, masks]
