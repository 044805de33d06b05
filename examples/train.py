"""Train a small language model with dynamic-mask attention under `torch.compile(fullgraph=True)`.

`python examples/train.py` learns the source of Python's standard library; `--data FILE` any other text, `--resume`
goes on where the last run stopped. `--compare` trains the same model again with dense causal attention, and prints loss and
speed of both in a small table; `--compare sdpa` does it with the same masks through torch's own attention.
`--preset long` trains on long sequences, 131072 bytes each on a GPU, and says how fast dense causal attention would be. What
a run writes goes to `--out`: a checkpoint and, where matplotlib is installed, the loss curve and a picture of the masks.
Ctrl-C stops after the step that runs, saves, and says how to go on.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import settings

if TYPE_CHECKING:
    from trainer import Trainer


def main(arguments: list[str]) -> dict[str, Trainer]:
    """Train as the command line says; return the trainers by the name of their attention."""
    options = settings.parse(arguments, __doc__)
    import training  # and torch, which takes seconds: not for --help, nor for options that cannot be read

    return training.run_all(options)


def command() -> None:
    """Run `main` on the command line's arguments; end with one line where a setting cannot work."""
    try:
        main(sys.argv[1:])
    except settings.SettingError as error:
        print(f"train.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(settings.INTERRUPTED) from None


if __name__ == "__main__":
    command()
