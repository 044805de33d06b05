"""Attention on many GPUs, over torch.distributed. Importing this registers the sharding rules of DTensor.

`import dmattn_ops` does not import it, because `torch.distributed.tensor` takes half a second; a public function that is
given a DTensor does.
"""

from dmattn_ops.distributed.balance import balanced_layout
from dmattn_ops.distributed.context_mask import ContextMask, prepare_context_mask
from dmattn_ops.distributed.context_parallel import context_parallel_attention
from dmattn_ops.distributed.dynamic import dynamic_context_attention
from dmattn_ops.distributed.module import ContextParallelAttention
from dmattn_ops.distributed.sequence import sequence_positions, shard_sequence, unshard_sequence
from dmattn_ops.distributed.sharding import register_sharding_rules
from dmattn_ops.distributed.team import Traffic, record_traffic

__all__ = [
    "ContextMask",
    "ContextParallelAttention",
    "Traffic",
    "balanced_layout",
    "context_parallel_attention",
    "dynamic_context_attention",
    "prepare_context_mask",
    "record_traffic",
    "register_sharding_rules",
    "sequence_positions",
    "shard_sequence",
    "unshard_sequence",
]

register_sharding_rules()
