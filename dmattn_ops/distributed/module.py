"""Attention over a shared sequence as a module: the inner attention of a model, in the place where torchtitan has its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dmattn_ops.bands import Window
from dmattn_ops.distributed.context_parallel import context_parallel_attention
from dmattn_ops.distributed.sequence import Layout
from dmattn_ops.distributed.team import Group


class ContextParallelAttention(nn.Module):
    """`context_parallel_attention` as the inner attention of a model. It has no weights.

    The rest of the model works on the parts of the sequence that ranks hold: shard tokens, labels and rotary positions once
    (`shard_sequence`, `sequence_positions`), with the same layout.

    Args:
        group: the ranks that share the sequence: a process group, a mesh of one dimension, or None for the default group.
        layout, method, is_causal, window_size, softcap, dropout_p, deterministic: as in `context_parallel_attention`.
            Dropout acts in training only.
    """

    def __init__(
        self,
        group: Group | None,
        *,
        layout: Layout = "head_tail",
        method: str = "all_gather",
        is_causal: bool = True,
        window_size: Window = (None, None),
        softcap: float = 0,
        dropout_p: float = 0,
        deterministic: bool | None = None,
    ) -> None:
        super().__init__()
        self.group = group
        self.layout, self.method = layout, method
        self.is_causal, self.window_size = is_causal, window_size
        self.softcap, self.dropout_p, self.deterministic = softcap, dropout_p, deterministic

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attention_masks: Any = None,
        scale: float | None = None,
        bias: Tensor | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Return out like query, `[B, s, H, Dv]` or `[s, H, Dv]`.

        Args:
            query, key, value: `[B, s, H, D]`, or one sequence `[s, H, D]`.
            attention_masks: what `context_parallel_attention` takes as mask; offsets of packed sequences, int32 `[n + 1]`; or
                a record with such offsets as `cu_seq_q`, as torchtitan has it for packed documents.
            scale: factor of the scores; None is `1 / sqrt(D)`.
            bias, sink: as in `context_parallel_attention`.
        """
        one_sequence = isinstance(query, Tensor) and query.dim() == 3
        if one_sequence:
            query, key, value = (
                part.unsqueeze(0) if isinstance(part, Tensor) else part for part in (query, key, value)
            )
        mask, offsets = attention_masks, getattr(attention_masks, "cu_seq_q", None)
        if offsets is not None:
            mask = None
        elif isinstance(mask, Tensor) and mask.dim() == 1:
            mask, offsets = None, mask
        out = context_parallel_attention(
            query,
            key,
            value,
            mask,
            bias,
            group=self.group,
            layout=self.layout,
            method=self.method,
            is_causal=self.is_causal,
            window_size=self.window_size,
            cu_seqlens=offsets,
            softmax_scale=scale,
            softcap=self.softcap,
            dropout_p=self.dropout_p if self.training else 0.0,
            deterministic=self.deterministic,
            sink=sink,
        )
        assert isinstance(out, Tensor)
        return out.squeeze(0) if one_sequence else out

    def extra_repr(self) -> str:
        """Say what is computed, and how."""
        return f"layout={self.layout!r}, method={self.method!r}, is_causal={self.is_causal}, window_size={self.window_size}"
