"""What `KeptKeys.attend` refuses: inputs and options that do not fit each other or the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from dmattn_ops.api import arguments
from dmattn_ops.checks import require, validation

if TYPE_CHECKING:
    from dmattn_ops.generation.kept_keys import KeptKeys


class Keywords(TypedDict, total=False):
    """What `attend` takes by name besides `return_lse` and `return_max`, which tell what is returned."""

    padding: Tensor | None
    documents: Tensor | None
    softmax_scale: float | None
    softcap: float
    sink: Tensor | None
    batch_invariant: bool


def check_inputs(
    cache: KeptKeys,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    padding: Tensor | None,
    documents: Tensor | None,
) -> None:
    """Refuse what does not fit each other or the cache."""
    batch, (_, new_positions, heads, _) = cache.batch, query.shape
    require.sizes("query", query, (batch,), (new_positions,), (heads,), (cache.head_dim,))
    require.sizes("key", key, (batch,), (new_positions,), (cache.kv_heads,), (cache.head_dim,))
    require.sizes("value", value, (batch,), (new_positions,), (cache.kv_heads,), (cache.value_dim,))
    require.dtype("query", query, cache.dtype, like="the cache")
    require.device("query", query, cache.device, "the cache")
    validation.dense_tensors(query, key, value, bias, sink)
    validation.dense(scores=scores)
    if not scores.is_floating_point():
        require.dtype("scores", scores, *validation.DTYPES)
    require.sizes("scores", scores, (1, batch), (1, cache.kv_heads), (new_positions,))
    require.device("scores", scores, cache.device, "the cache")
    for name, part in (("padding", padding), ("documents", documents)):
        if part is not None:
            validation.dense(**{name: part})
            require.dtype(name, part, torch.bool, *validation.INTEGERS)
            require.sizes(name, part, (1, batch), (new_positions,))
            require.device(name, part, cache.device, "the cache")
    if cache.bias is not None and cache.bias.shape[1] not in (cache.kv_heads, heads):
        raise ValueError(f"query must have {cache.bias.shape[1]} heads as the biases before, got {heads}")
    if bias is None:
        return
    validation.require_broadcast("bias", bias, batch, heads, cache.kv_heads, 1, new_positions)
    if cache.bias is not None:
        require.sizes("bias", bias, (1, batch), (cache.bias_heads,), (1,), (new_positions,), axes=require.AXES)
        require.dtype("bias", bias, cache.bias.dtype, like="the biases before")


def checked_options(
    *,
    softmax_scale: float | None = None,
    softcap: float = 0,
    sink: Tensor | None = None,
    return_lse: bool = False,
    return_max: bool = False,
    batch_invariant: bool = False,
) -> dict[str, Any]:
    """Return the options of a call to `flash_dmattn_func`; refuse others before anything is stored."""
    arguments.read_numbers(False, "bottom_right", (None, None), softmax_scale, softcap, 0.0)
    arguments.switches(None, return_lse, return_max)
    validation.flags(batch_invariant=batch_invariant)
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "softcap": softcap, "return_lse": return_lse}
    return options | {"return_max": return_max, "batch_invariant": batch_invariant}
