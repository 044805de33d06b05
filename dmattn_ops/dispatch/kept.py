"""The operator that makes a step of a cache of kept keys, on real tensors. Unlike all others it changes its arguments."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dmattn_ops.dispatch import run
from dmattn_ops.dispatch.operators import as_rows, below_autograd, launch_on
from dmattn_ops.launching import plans
from dmattn_ops.masks.kept import Rule, Stored, Token
from dmattn_ops.meta import fakes
from dmattn_ops.ops import schemas


def keep_step(*arguments: Any) -> tuple[Tensor]:
    """Append one position to each sequence of a cache; compute which slots its query sees, int32 `[B, Hkv, N]`."""
    seen = fakes.keep_step(*arguments)
    read = schemas.SIGNATURES["keep_step"].read(arguments)
    stored, token = (
        Stored._make(read[: len(Stored._fields)]),
        Token._make(read[len(Stored._fields) :][: len(Token._fields)]),
    )
    token = token._replace(key=as_rows(token.key), value=as_rows(token.value))
    rule = Rule(*read[-len(Rule._fields) :])
    launch_on(stored.key, run.kernels_of_steps(stored.key.device).keep_step, stored, token, rule, seen)
    return (seen,)


_planned = plans.planned(below_autograd(keep_step), schemas.SIGNATURES["keep_step"])


def _operator(*arguments: Any) -> tuple[Tensor, None]:
    plans.refuse_export("keep_step", arguments[0], "an operator that libdmattn.so does not have")
    return _planned(*arguments)[0][0], None


schemas.implement("keep_step", _operator)
