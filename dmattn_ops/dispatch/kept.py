"""The operators that append positions to a cache of kept keys, on real tensors. Unlike all others they change their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dmattn_ops.dispatch import run
from dmattn_ops.dispatch.operators import as_rows, below_autograd, launch_on
from dmattn_ops.launching import plans
from dmattn_ops.masks.kept import Appended, Rule, Stored, Token
from dmattn_ops.meta import fakes
from dmattn_ops.ops import schemas


def keep_step(*arguments: Any) -> tuple[Tensor]:
    """Append one position to each sequence of a cache; compute which slots its query sees, int32 `[B, Hkv, N]`."""
    seen = fakes.keep_step(*arguments)
    stored, token, rule = _read("keep_step", arguments)
    launch_on(stored.key, run.kernels_of_steps(stored.key.device).keep_step, stored, token, rule, seen)
    return (seen,)


def keep_chunk(*arguments: Any) -> tuple[Tensor, ...]:
    """Append positions to each sequence of a cache; compute what their queries attend to, and until where (`Appended`)."""
    outputs = ends, keys, values, biases = fakes.keep_chunk(*arguments)
    stored, token, rule = _read("keep_chunk", arguments)
    appended = Appended(ends, keys, values, None if stored.bias is None else biases)
    if keys.shape[0]:
        launch_on(keys, run.kernels_of_chunks(stored, token).keep_chunk, stored, token, rule, appended)
    return outputs


def _read(name: str, arguments: tuple[Any, ...]) -> tuple[Stored, Token, Rule]:
    """Return the arguments of an operator as its launchers take them: with contiguous last dimensions."""
    read = schemas.SIGNATURES[name].read(arguments)
    stored, new = Stored._make(read[: len(Stored._fields)]), read[len(Stored._fields) :][: len(Token._fields)]
    token = Token._make(new)
    bias = None if token.bias is None else as_rows(token.bias)
    token = token._replace(key=as_rows(token.key), value=as_rows(token.value), scores=as_rows(token.scores), bias=bias)
    return stored, token, Rule(*read[-len(Rule._fields) :])


def _implement(operator: Callable[..., tuple[Tensor, ...]]) -> None:
    name = operator.__name__
    planned = plans.planned(below_autograd(operator), schemas.SIGNATURES[name])

    def call(*arguments: Any) -> tuple[Any, None]:
        plans.refuse_export(name, arguments[0], "an operator that libdmattn.so does not have")
        outputs = planned(*arguments)[0]
        return outputs if len(outputs) > 1 else outputs[0], None

    schemas.implement(name, call)


for _operator in (keep_step, keep_chunk):
    _implement(_operator)
