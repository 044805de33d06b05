"""Attention on many GPUs, over torch.distributed. Importing this registers the sharding rules of DTensor.

`import dmattn_ops` does not import it, because `torch.distributed.tensor` takes half a second; a public function that is
given a DTensor does.
"""

from dmattn_ops.distributed.sharding import register_sharding_rules

__all__ = ["register_sharding_rules"]

register_sharding_rules()
