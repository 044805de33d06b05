"""What a training run is told to do: its command line, its defaults, and all that is refused before any work.

What cannot work raises `SettingError` with one line that says what was given and what is needed. torch is imported once the
command line was read, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import math
import signal
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sizes import ModelConfig

if TYPE_CHECKING:
    from corpus import Text

INTERRUPTED = 128 + signal.SIGINT  # the exit status of a program that Ctrl-C ended
CHECKPOINT = "checkpoint.pt"
PICTURES = ("loss.png", "mask.png")
LARGEST_HEAD = 256
LONGEST_DENSE = 16384  # bytes of a sequence whose mask torch's own attention gets as one number for each pair of bytes


class SettingError(ValueError):
    """A setting that cannot work, in one line."""


@dataclass(frozen=True)
class Plan:
    """What a run does: with the model's sizes and the text, this decides every number that comes out."""

    steps: int = 400
    batch: int = 8
    rate: float = 2e-3
    warm_up: int = 30
    weight_decay: float = 0.1
    clip: float = 1.0
    validate_every: int = 50
    validation_batches: int = 8
    seed: int = 0
    dense_steps: int = 0  # of the same model with dense causal attention, afterwards, to compare the speed


def standard(device: str) -> tuple[ModelConfig, Plan]:
    """Return sizes that take two CPU cores a few minutes, or that give a GPU something to do.

    A query sees every sixteenth key of its sequence in both. On an H200 (2026-11-26, one sequence, bfloat16, forward and
    backward) attention with 16 heads of 64 took 0.74 ms with such masks, and 1.69 ms without: 2.29 times as long. With sequences
    of 2048 bytes and 512 keys kept, masks did not pay: 0.73 ms with them and 0.58 ms without.
    """
    if device == "cuda":
        config = ModelConfig(6, 1024, 16, 16, keep=512, seqlen=8192)
        return config, Plan(600, 2, 3e-4, warm_up=60, validate_every=100, dense_steps=5)
    return ModelConfig(seqlen=1024), Plan(batch=2)


def long(device: str) -> tuple[ModelConfig, Plan]:
    """Return sizes whose attention would take nearly all of the time if it were dense.

    On a GPU 131072 bytes a sequence, of which a query sees 2048, in about 60 GB; on a CPU 8192, of which it sees 512.
    """
    if device == "cuda":
        config = ModelConfig(8, 1024, 8, 2, keep=2048, seqlen=131072)
        return config, Plan(200, 1, 3e-4, warm_up=20, validate_every=50, validation_batches=2, dense_steps=3)
    config = ModelConfig(2, keep=512, seqlen=8192)
    return config, Plan(40, 1, warm_up=5, validate_every=20, validation_batches=2, dense_steps=3)


PRESETS = {"standard": standard, "long": long}


class Parser(argparse.ArgumentParser):
    """A parser whose errors take one line."""

    def error(self, message: str) -> NoReturn:
        raise SettingError(f"{message} (--help lists the options)")


def parse(arguments: list[str], description: str | None = None) -> argparse.Namespace:
    """Return the options that the command line gives; those of the model and the plan are None where it gives none."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a file to learn instead of the standard library's source")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/train"), help="folder for checkpoint and pictures (default runs/train)"
    )
    earlier = parser.add_mutually_exclusive_group()
    earlier.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out, with its settings")
    earlier.add_argument("--overwrite", action="store_true", help="replace what an earlier run left in --out")
    parser.add_argument(
        "--compare",
        nargs="?",
        const="dense",
        choices=["dense", "sdpa"],
        help="train again and compare: with dense causal attention, which is meant where nothing is named, or with the same masks"
        " through torch's attention",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="(default cuda where torch sees a GPU, else cpu)")
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        help="sizes where no option gives others (default standard); long: sequences of 131072 bytes on a GPU, 8192 on a CPU",
    )
    parser.add_argument("--deterministic", action="store_true", help="repeatable bit for bit, as on a CPU always")
    on_cpu, on_gpu = ({**asdict(config), **asdict(plan)} for config, plan in map(standard, ("cpu", "cuda")))

    def with_default(name: str, meaning: str) -> str:
        other = "" if on_gpu[name] == on_cpu[name] else f", on a GPU {on_gpu[name]}"
        return f"{meaning} (default {on_cpu[name]}{other})"

    parser.add_argument("--stop-at", type=int, help="stop at this step, as an interruption would")
    for name, meaning in {
        "layers": "number of layers",
        "dim": "width of the model",
        "heads": "query heads, which divide --dim",
        "kv_heads": "key/value heads, which divide --heads",
        "keep": "keys that a query may see",
        "seqlen": "bytes of a sequence",
        "steps": "steps of the whole run",
        "batch": "sequences of a step",
        "warm_up": "steps until the highest learning rate",
        "validate_every": "steps from one validation and checkpoint to the next",
        "seed": "decides the first weights and the order of the text",
        "dense_steps": "steps of the same model with dense causal attention, to compare the speed",
    }.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=with_default(name, meaning))
    parser.add_argument("--rate", type=float, help=with_default("rate", "highest learning rate"))
    return parser.parse_args(arguments)


def default_device() -> str:
    """Return the device of a run that names none."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def chosen(options: argparse.Namespace, stored: dict[str, Any] | None) -> tuple[ModelConfig, Plan]:
    """Return the sizes and the plan: what the command line gives, else the checkpoint's settings, else the preset's.

    A checkpoint fixes all but the number of steps.
    """
    config, plan = (asdict(values) for values in PRESETS[options.preset or "standard"](options.device))
    if stored is not None:
        if options.preset:
            raise SettingError(f"--preset {options.preset} does nothing with --resume: the checkpoint holds the sizes")
        config, plan = dict(stored["model"]), asdict(Plan()) | stored["plan"]
    given = {name: value for name in (*config, *plan) if (value := getattr(options, name, None)) is not None}
    if stored is not None:
        fixed = {**config, **plan}
        other = [name for name, value in given.items() if name != "steps" and value != fixed[name]]
        if other:
            here = ", ".join(f"{_option(name)} {given[name]}" for name in other)
            there = ", ".join(f"{_option(name)} {fixed[name]}" for name in other)
            raise SettingError(f"the checkpoint was written with {there}, not {here}: only --steps may change")
    for values in (config, plan):
        values.update((name, value) for name, value in given.items() if name in values)
    return ModelConfig(**config), Plan(**plan)


def refuse_what_cannot_work(config: ModelConfig, plan: Plan, options: argparse.Namespace) -> None:
    """Refuse sizes and plans that no model or no training can have."""
    given = {**asdict(config), **asdict(plan)}
    for name in ("layers", "dim", "heads", "kv_heads", "keep", "seqlen", "steps", "batch", "validate_every"):
        if given[name] < 1:
            raise SettingError(f"{_option(name)} must be 1 or more, got {given[name]}")
    for name in ("warm_up", "dense_steps"):
        if given[name] < 0:
            raise SettingError(f"{_option(name)} must not be negative, got {given[name]}")
    if not 0 <= plan.seed < 1 << 31:
        raise SettingError(f"--seed must lie between 0 and 2^31 - 1, got {plan.seed}")
    if not (math.isfinite(plan.rate) and plan.rate > 0):
        raise SettingError(f"--rate must be positive and finite, got {plan.rate}")
    if config.dim % config.heads:
        raise SettingError(f"--dim {config.dim} is not a multiple of --heads {config.heads}")
    if config.heads % config.kv_heads:
        raise SettingError(f"--heads {config.heads} is not a multiple of --kv-heads {config.kv_heads}")
    if config.head_dim % 2 or config.head_dim > LARGEST_HEAD:
        sizes = f"--dim {config.dim} and --heads {config.heads} make heads of {config.head_dim}"
        raise SettingError(f"{sizes}, which must be even for rotary positions and at most {LARGEST_HEAD}")
    if options.stop_at is not None and not 1 <= options.stop_at <= plan.steps:
        raise SettingError(f"--stop-at must lie between 1 and --steps {plan.steps}, got {options.stop_at}")
    if options.compare == "sdpa" and config.seqlen > LONGEST_DENSE:
        needed = f"{plan.batch * config.heads * config.seqlen**2 * 4 / 1e9:.0f} GB"
        raise SettingError(
            f"--compare {options.compare} needs a mask of {needed} at --seqlen {config.seqlen}, and takes {LONGEST_DENSE} at most"
        )
    if options.device == "cuda" and default_device() != "cuda":
        raise SettingError("--device cuda needs a GPU that torch can see, and there is none")


def read_text(data: Path | None, seqlen: int) -> Text:
    """Read the text to learn; refuse one that has not even one sequence to train on and one to validate with."""
    from corpus import HOLD_OUT, from_file, standard_library

    try:
        text = standard_library() if data is None else from_file(data)
    except OSError as error:
        raise SettingError(f"--data {data} cannot be read: {error.strerror}") from error
    if min(map(len, text)) <= seqlen:
        source = "the standard library here" if data is None else f"--data {data}"
        size, needed = sum(map(len, text)), HOLD_OUT * (seqlen + 1)
        raise SettingError(f"{source} has {size} bytes, and --seqlen {seqlen} needs {needed} (a tenth is held out)")
    return text


def checkpoint_path(options: argparse.Namespace) -> Path:
    """Return where the checkpoint lies in --out; refuse to lose what lies there, or to go on with what does not."""
    out, checkpoint = options.out, options.out / CHECKPOINT
    earlier = [name for name in (CHECKPOINT, *PICTURES) if (out / name).exists()]
    if options.resume and CHECKPOINT not in earlier:
        raise SettingError(f"--resume needs {checkpoint}, which does not exist")
    if earlier and not (options.resume or options.overwrite):
        ways = "--resume goes on with it, --overwrite replaces it, --out FOLDER writes elsewhere"
        raise SettingError(f"{out} holds an earlier run ({', '.join(earlier)}): {ways}")
    return checkpoint


def make_folder(out: Path) -> None:
    """Make --out, or refuse one that nothing can be written to."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise SettingError(f"--out {out} cannot be written to: {error.strerror}") from error
