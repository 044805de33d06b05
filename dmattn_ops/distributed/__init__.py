"""Attention on many GPUs, over torch.distributed."""

from dmattn_ops.distributed.balance import balanced_layout
from dmattn_ops.distributed.context_mask import ContextMask, prepare_context_mask
from dmattn_ops.distributed.context_parallel import context_parallel_attention
from dmattn_ops.distributed.dynamic import dynamic_context_attention
from dmattn_ops.distributed.module import ContextParallelAttention
from dmattn_ops.distributed.sequence import sequence_positions, shard_sequence, unshard_sequence
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
    "sequence_positions",
    "shard_sequence",
    "unshard_sequence",
]
