"""What an argument must be: rank, shape, dtype, device. A size that a tracer does not know becomes a check at run time."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import Parameter, signature
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from dmattn_ops.call import UNBOUNDED
from dmattn_ops.symbolic import are_numbers, certainly, decided, known_equal, same

_SAYS_TRACED = hasattr(Tensor, "_has_symbolic_sizes_strides")  # else shapes tell, which takes longer
AXES = ("batch", "heads", "queries", "keys")  # of masks and biases
PACKED_AXES = ("heads", "keys")  # of those of packed sequences
LAYOUTS = {  # of queries, keys and values
    3: "[total, heads, D], and sequences of one length go to flash_dmattn_func",
    4: "[B, S, heads, D], and packed sequences go to flash_dmattn_varlen_func",
    5: "[B, S, 3, H, D]",
}
IDS_OF_OFFSETS = "torch.bucketize(torch.arange(total), cu_seqlens[1:], right=True)[None]"
DOCUMENTS = f"[B, S], ids; offsets become ids by {IDS_OF_OFFSETS}"


def no_unknown(function: str, unknown: dict[str, Any], elsewhere: dict[str, str]) -> None:
    """Refuse arguments that a function does not have; `elsewhere` says what its own are called by names of other libraries."""
    name = next(iter(unknown))
    hint = f": here it is called {elsewhere[name]}" if name in elsewhere else ""
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def without_unknown(function: Any) -> None:
    """Take `unknown` out of what `inspect.signature` tells: it is there to be refused with a hint, and is no argument."""
    full = signature(function)
    known = [each for each in full.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    function.__signature__ = full.replace(parameters=known)


def rank(name: str, tensor: Tensor, expected: int, axes: str = "") -> None:
    """Refuse another number of dimensions; `axes` says what they are, and what to do with others."""
    if tensor.dim() != expected:
        meaning = f": its axes are {axes}" if axes else ""
        got = f"got {tensor.dim()}, shape {text(tensor.shape)}"
        raise ValueError(f"{name} must have {expected} dimensions, {got}{meaning}")


def shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Refuse another shape."""
    if not matches(tensor, expected):
        raise ValueError(f"{name} must have shape {text(expected)}, got {text(tensor.shape)}")


def dtype(name: str, tensor: Tensor, *allowed: torch.dtype, like: str = "") -> None:
    """Refuse another dtype, with a TypeError; `like` names the argument whose dtype it has to be."""
    if tensor.dtype not in allowed:
        wanted = " or ".join(map(str, dict.fromkeys(allowed))) + (f" like {like}" if like else "")
        raise TypeError(f"{name} must have dtype {wanted}, got {tensor.dtype}")


def device(name: str, tensor: Any, expected: torch.device, like: str = "query") -> None:
    """Refuse another device than that of the argument `like`."""
    if tensor.device != expected:
        raise ValueError(f"{name} must be on {expected} like {like}, got {tensor.device}")


def sizes(
    name: str, tensor: Any, *choices: tuple[int, ...], axes: tuple[str, ...] = (), hints: dict[int, str] | None = None
) -> None:
    """Refuse a tensor or a TileMask in whose shape a size is not one of its choices.

    `axes` names the dimensions, and `hints` says, by another number of dimensions, what to do with such a tensor.
    """
    given = tensor.shape
    if len(given) == len(choices) and all(map(_one_of, given, choices)):
        return
    allowed = [" or ".join(dict.fromkeys([size_text(size) for size in reversed(of_axis)])) for of_axis in choices]
    if axes:
        allowed = [f"{axis} {size}" for axis, size in zip(axes, allowed, strict=True)]
    hint = "" if hints is None or len(given) not in hints else f": {hints[len(given)]}"
    raise ValueError(f"{name} must have shape ({', '.join(allowed)}), got {text(given)}{hint}")


def is_integer(argument: Any) -> bool:
    """Return whether an argument is an integer: of Python, of NumPy or traced; neither a bool nor a tensor is one."""
    return isinstance(argument, (int, torch.SymInt, Integral)) and not isinstance(argument, bool)


def integer(name: str, argument: Any) -> int:
    """Return an integer as Python (or a tracer) has it; refuse what is none."""
    if not is_integer(argument):
        raise TypeError(f"{name} must be an int, got {type_text(argument)}")
    return argument if isinstance(argument, (int, torch.SymInt)) else int(argument)  # type: ignore[return-value]


def counts(**arguments: Any) -> list[int]:
    """Return integers from 0 on, as `integer` does; refuse others."""
    numbers = []
    for name, argument in arguments.items():
        count = integer(name, argument)
        if decided(count < 0):
            raise ValueError(f"{name} must not be negative, got {number_text(count)}")
        numbers.append(count)
    return numbers


def lengths(**arguments: Any) -> list[int]:
    """Return numbers of positions, which `counts` takes and which kernels can count; refuse others."""
    numbers = counts(**arguments)
    for name, length in zip(arguments, numbers, strict=True):
        if certainly(length >= UNBOUNDED):
            raise ValueError(f"{name} must be less than {UNBOUNDED}, got {length}")
    return numbers


def part(name: str, start: int, stop: int, size: int) -> tuple[int, int]:
    """Return a range of positions; refuse one that does not lie in `size` of them."""
    start, stop = integer(f"the start of {name}", start), integer(f"the stop of {name}", stop)
    if decided(start < 0) or decided(stop < start) or decided(size < stop):
        given = f"{number_text(start)} to {number_text(stop)}"
        raise ValueError(f"{name} must be a range inside 0 to {size_text(size)}, got {given}")
    return start, stop


def traced(tensor: Tensor) -> bool:
    """Return whether a size may be a symbol, which a comparison would turn into a guard."""
    if _SAYS_TRACED:
        return tensor._has_symbolic_sizes_strides
    return any(type(size) is not int for size in tensor.shape)


def matches(tensor: Tensor, expected: tuple[int, ...]) -> bool:
    """Return whether a tensor has that shape."""
    if not traced(tensor):
        return tensor.shape == expected
    return tensor.dim() == len(expected) and all(map(same, tensor.shape, expected))


def _one_of(actual: int, choices: tuple[int, ...]) -> bool:
    if are_numbers(actual, choices[-1]):
        for choice in choices:  # noqa: SIM110 - a generator costs as much again, `in` makes Dynamo look for the same object
            if actual == choice:
                return True
        return False
    return any(known_equal(actual, choice) for choice in choices[:-1]) or same(actual, choices[-1])


def text(sizes: Iterable[int]) -> str:
    """Return a shape as messages show it."""
    texts = [size_text(size) for size in sizes]
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"


def size_text(size: Any) -> str:
    """Return a size as messages show it: the number where a tracer's symbol stands for one."""
    traced = isinstance(size, torch.SymInt) and not is_dynamo_compiling()
    return f"{int(size)}" if traced and size.node.has_hint() else f"{size}"


def number_text(number: int) -> str:
    """Return a refused number as messages show it; Dynamo, which formats no symbols, reads the one that it traces."""
    return f"{int(number)}"


def type_text(argument: Any) -> str:
    """Return a type as messages show it: numpy's bool is no bool."""
    name = type(argument).__name__
    return f"numpy.{name}" if type(argument).__module__ == "numpy" else name


def flags(**arguments: Any) -> None:
    """Refuse arguments that are not bool."""
    for name, argument in arguments.items():
        if not isinstance(argument, bool):
            raise TypeError(f"{name} must be a bool, got {type_text(argument)}")


def integers(**arguments: Any) -> list[int]:
    """Return arguments as Python (or traced) integers; refuse others."""
    return [integer(name, argument) for name, argument in arguments.items()]


def number(name: str, argument: Any) -> Any:
    """Return a number of Python or NumPy (or a traced one) as a float; refuse anything else."""
    if type(argument) is float or isinstance(argument, torch.SymFloat):
        return argument
    if isinstance(argument, bool) or not isinstance(argument, (int, torch.SymInt, Real)):
        raise TypeError(f"{name} must be a number, got {type_text(argument)}")
    try:
        return argument * 1.0 if isinstance(argument, (int, torch.SymInt)) else float(argument)
    except OverflowError:
        raise ValueError(f"{name} must be finite, got an integer of {int(argument).bit_length()} bits") from None  # type: ignore[arg-type]
