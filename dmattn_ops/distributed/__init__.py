"""Attention on many GPUs: sequences that several ranks share."""

from dmattn_ops.distributed.context_mask import ContextMask, prepare_context_mask
from dmattn_ops.distributed.context_parallel import context_parallel_attention
from dmattn_ops.distributed.dynamic import dynamic_context_attention
from dmattn_ops.distributed.sequence import sequence_positions, shard_sequence, unshard_sequence

__all__ = [
    "ContextMask",
    "context_parallel_attention",
    "dynamic_context_attention",
    "prepare_context_mask",
    "sequence_positions",
    "shard_sequence",
    "unshard_sequence",
]
