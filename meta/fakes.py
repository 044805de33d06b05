"""The operators on tensors without data: refuse, then allocate. The real ones (`implementations.py`) start with the same.

Parameters are those of the schemas in `ops.py`, in their order; what they mean is in `problem.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dmattn_ops import meta, ops, validation
from dmattn_ops.problem import UNBOUNDED, Options, Tiles, Varlen


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    row_tiles: Tensor | None = None,
    col_tiles: Tensor | None = None,
    row_bits: Tensor | None = None,
    col_bits: Tensor | None = None,
    q_segments: Tensor | None = None,
    k_segments: Tensor | None = None,
    seed: Tensor | None = None,
    band_lo: int = -UNBOUNDED,
    band_hi: int = UNBOUNDED,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return out `[B, Sq, H, Dv]` and lse `[B, H, Sq]`, not computed."""
