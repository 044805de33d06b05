"""Direct calls of `torch.ops.dmattn.*` as nobody should make them, in groups: altered masks, saved tensors, strides, numbers.

As a script, `adversarial_calls.py GROUP ...` runs groups and prints a line for each case: its group, its name, and how it ended.
A case that ends the process has no line. Memory that an operator allocates holds NaN until something is written there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import adversarial_inputs as inputs
import adversarial_masks as masks
import torch
from adversarial_cases import REFUSALS, Case, Wrong
from torch import Tensor

GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    each.__name__: each
    for each in (
        masks.lists_of_tiles, masks.contents, masks.shapes, masks.bands, masks.masks, inputs.packed_sequences, inputs.dropout,
        inputs.saved_tensors, inputs.sizes, inputs.strides, inputs.inputs_and_biases, inputs.not_finite, inputs.numbers,
    )
}  # fmt: skip


def tensors(found: Any) -> Iterator[Tensor]:
    """Yield the dense tensors of floating numbers in a result."""
    if isinstance(found, (tuple, list)):
        for each in found:
            yield from tensors(each)
    elif isinstance(found, Tensor) and found.is_floating_point() and found.is_cpu and found.layout == torch.strided:
        yield found


def ended(case: Case) -> str:
    """Run a case; return "refused", "returned", or what is wrong with how it ended."""
    try:
        found = case.run()
        holes = 0 if case.nan else sum(int(each.isnan().sum()) for each in tensors(found))
    except Wrong as error:
        return f"wrong: {error}"
    except REFUSALS as error:
        text = " ".join(str(error).split())
        return f"out of memory: {text}" if "alloc" in text and "storage" not in text else "refused"
    except BaseException as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return f"{holes} NaN in what it returned" if holes else "returned"


def main(groups: list[str]) -> None:
    """Run the cases of groups, one line for each."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    for group in groups:
        torch.manual_seed(0)
        for case in GROUPS[group]():
            print(f"{group}\t{case.name}\t{ended(case)}\t{case.refused}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
