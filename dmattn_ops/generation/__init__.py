"""Generation under dynamic masks: `KeptKeys`, an exact key/value cache of constant size."""

from dmattn_ops.generation.kept_keys import KeptKeys

__all__ = ["KeptKeys"]
