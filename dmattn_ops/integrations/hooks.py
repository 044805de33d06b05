"""What `register` changes in the models of transformers that attend through this library, and in no others.

Before such a model runs, it is noted which packed sequences its arguments tell of (`packed`). And a model whose own code does
not let its attention be chosen is refused when it is made, instead of failing later or keeping its own attention.
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import Any

from torch import nn

from dmattn_ops.integrations import packed

_names: set[str] = set()  # that `register` has given to this library's attention
_originals: dict[str, Any] = {}


def watch(name: str) -> None:
    """From now on look after models whose attention has this name."""
    from transformers import PreTrainedModel

    _names.add(name)
    if _originals:
        return
    _originals["get_correct_attn_implementation"] = PreTrainedModel.get_correct_attn_implementation
    PreTrainedModel.get_correct_attn_implementation = _correct
    PreTrainedModel.__call__ = _call


def _call(self: Any, *arguments: Any, **keywords: Any) -> Any:
    if getattr(self.config, "_attn_implementation", None) not in _names:
        return nn.Module.__call__(self, *arguments, **keywords)
    before = packed.note(packed.told(self, arguments, keywords))
    try:
        return nn.Module.__call__(self, *arguments, **keywords)
    finally:
        packed.note(before)


def _correct(self: Any, requested_attention: str | None, *arguments: Any, **keywords: Any) -> str:
    if requested_attention in _names and not _can_be_chosen(type(self)):  # type: ignore[arg-type]
        raise ValueError(
            f"{type(self).__name__} does not go through AttentionInterface of transformers, so that it cannot attend through"
            f" {requested_attention!r}: its own code would have to change. Where it is one part of a model, name the others:"
            f" attn_implementation={{'text_config': {requested_attention!r}}}"
        )
    return _originals["get_correct_attn_implementation"](self, requested_attention, *arguments, **keywords)


@cache
def _can_be_chosen(kind: type) -> bool:
    """Return whether the attention of a class of models can be chosen by any name, as far as its source tells."""
    # a name that transformers does not promise: without it such models fail as they did, or keep their own attention
    chosen = getattr(kind, "_can_set_attn_implementation", None)
    if chosen is not None and not chosen():
        return False
    try:
        source = inspect.getsource(inspect.getmodule(kind))  # type: ignore[arg-type]
    except (OSError, TypeError):
        return True
    tables = re.findall(r"(\w+?)(?:_SELF)?_ATTENTION_CLASSES\[", source)  # by name: GIT_SELF_ATTENTION_CLASSES["sdpa"]
    return not any(kind.__name__.upper().startswith(table.replace("_", "")) for table in tables)
