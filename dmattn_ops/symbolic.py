"""Sizes that a tracer may not know: compared and combined without making a guard of what is not known."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.compiler import is_dynamo_compiling, is_exporting


def certainly(condition: bool) -> bool:
    """Return whether a condition on numbers holds, whatever a tracer does not know of them; makes no guard of it."""
    if type(condition) is bool and not is_dynamo_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def known(condition: bool) -> bool:
    """Return whether a condition on numbers holds, as far as that is known; a tracer makes a guard of it where it can."""
    if type(condition) is bool and not is_dynamo_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def decided(condition: bool) -> bool:
    """Return whether a condition on a number of the caller's holds: as `known`, but without a guard in an export.

    A compiler traces again for a number that its guard refuses; an exported program would be narrowed by it.
    """
    if type(condition) is bool and not is_dynamo_compiling():
        return condition
    return certainly(condition) if is_exporting() else known(condition)


def same(actual: int, expected: int) -> bool:
    """Return whether sizes are equal; of those that a tracer does not know, assume it and check it at run time."""
    if are_numbers(actual, expected):
        return actual == expected
    if known_equal(actual, expected):
        return True
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    if not guard_or_true(actual == expected):
        return False
    torch._check(actual == expected)
    return True


def known_equal(actual: int, expected: int) -> bool:
    """Return whether sizes are equal, as far as that is known."""
    return actual == expected if are_numbers(actual, expected) else known(actual == expected)


def are_numbers(size: int, other: int) -> bool:
    """Return whether sizes are numbers, not a tracer's symbols. Dynamo says of a symbol that its type is int."""
    return type(size) is int and type(other) is int and not is_dynamo_compiling()


def larger(size: int, other: int) -> int:
    """Return the larger number, without a guard where a tracer does not know it.

    Dynamo takes a size that it traces for an int and gives Python's `max` a node in the graph, while in torch 2.11 it refuses
    `torch.sym_max` of two plain numbers. Under fake tensors a traced size is a `torch.SymInt`, for which `max` would be a guard.
    """
    return max(size, other) if isinstance(size, int) and isinstance(other, int) else torch.sym_max(size, other)


def smaller(size: int, other: int) -> int:
    """Return the smaller number, as `larger` does."""
    return min(size, other) if isinstance(size, int) and isinstance(other, int) else torch.sym_min(size, other)


def wider(sizes: Iterable[int]) -> int:
    """Return the first size that is not 1, or 1."""
    return next((size for size in sizes if not known_equal(size, 1)), 1)
