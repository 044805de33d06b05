"""An object that models take for the tensor it stands for: what it does not answer itself, its tensor answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

# fmt: off
_OPERATORS = (
    "getitem", "and", "rand", "or", "ror", "xor", "rxor", "invert", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv",
    "rtruediv", "neg", "lt", "le", "gt", "ge", "matmul", "rmatmul",
)
# fmt: on
_WHILE_COMPILING = (
    "the model's code computes with its mask, which is not followed while compiling: add its config.model_type to"
    " dmattn_ops.integrations.transformers.TENSOR_MASKS"
)


class ActsAsTensor:
    """A base class for objects that are used where code expects a bool mask `[B, 1, Sq, Sk]`, True where a key is visible.

    Its methods, operators, indices and functions of torch make the tensor, each time anew. Whoever adds it to something means
    an additive mask: then it is 0 where a key is visible, and the least finite number elsewhere.
    """

    def tensor(self) -> Tensor:
        """Return the bool tensor that the object stands for."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_compiling():  # a tracer does not know the names of functions: whether it is added to something
            raise NotImplementedError(_WHILE_COMPILING)
        spelt = getattr(function, "__name__", "")
        _refuse_change(spelt)
        others = [part for part in args if isinstance(part, Tensor) and part.is_floating_point()]
        additive = others[0].dtype if others and spelt.strip("_") in ("add", "radd", "iadd") else None
        return function(*_tensors_in(args, additive), **_tensors_in(kwargs or {}, None))

    def __getattr__(self, name: str) -> Any:
        # asked for what the class does not have; whether a tensor has it is known without making one
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        _refuse_change(name)
        return getattr(self.tensor(), name)

    def __eq__(self, other: object) -> Any:
        return self.tensor() == other if isinstance(other, (bool, int, float, Tensor)) else self is other

    def __ne__(self, other: object) -> Any:
        return self.tensor() != other if isinstance(other, (bool, int, float, Tensor)) else self is not other

    __hash__ = object.__hash__

    def __setitem__(self, index: Any, value: Any) -> None:
        _refuse_change("__setitem__")


def _refuse_change(spelt: str) -> None:
    """Refuse what would change the tensor in place: it is made for the moment, so that the change would be lost."""
    if spelt == "__setitem__" or (spelt.endswith("_") and not spelt.startswith("_")):
        raise NotImplementedError(
            f"the model's code changes its mask in place ({spelt}), and this mask is not a tensor: add its config.model_type to"
            " dmattn_ops.integrations.transformers.TENSOR_MASKS"
        )


def _tensors_in(value: Any, additive: torch.dtype | None) -> Any:
    """Return a value, or what a tuple, list or dict holds, with tensors for the objects of `ActsAsTensor`."""
    if isinstance(value, ActsAsTensor):
        keep = value.tensor()
        return keep if additive is None else as_additive(keep, additive)
    if type(value) in (tuple, list):
        return type(value)([_tensors_in(part, additive) for part in value])
    if type(value) is dict:
        return {name: _tensors_in(part, additive) for name, part in value.items()}
    return value


def as_additive(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where a bool mask is True, and the least finite number of the dtype elsewhere."""
    return torch.zeros_like(keep, dtype=dtype).masked_fill(~keep, torch.finfo(dtype).min)


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: ActsAsTensor, *others: Any) -> Any:
        keep = self.tensor()
        if name in ("add", "radd") and isinstance(others[0], Tensor) and others[0].is_floating_point():
            keep = as_additive(keep, others[0].dtype)
        return getattr(keep, f"__{name}__")(*_tensors_in(others, None))

    return operate


for _name in _OPERATORS:
    setattr(ActsAsTensor, f"__{_name}__", _operator(_name))
