"""Tensors of a CPU that count as those of a GPU where code asks whether the host may read what they hold."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dmattn_ops.checks import values
from dmattn_ops.dispatch import operators


@contextmanager
def values_out_of_reach() -> Iterator[None]:
    """Let masks be prepared and calls be checked as on a GPU, which the host does not wait for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "on_the_host", lambda tensor: False)
        patch.setattr(operators, "reads_values", lambda tensor: False)
        yield
