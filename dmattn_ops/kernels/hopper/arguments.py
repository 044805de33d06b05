"""What the launchers of the SM 9.0 kernels do alike: lists for intervals, the numbers of scores and of a bias."""

from __future__ import annotations

from torch import Tensor

from dmattn_ops.call import bias_kind
from dmattn_ops.kernels.interval_lists import listed as listed
from dmattn_ops.kernels.interval_lists import too_long as too_long
from dmattn_ops.kernels.launching.launch import workspace
from dmattn_ops.kernels.portable.arguments import bias_arguments
from dmattn_ops.problem import Options

LOG2E = 1.4426950408889634
MAX_DIM = 256
_PARTS = ((64, 0), (64, 16), (64, 32), (128, 0), (128, 16), (128, 32), (128, 64), (256, 0))


def column_parts(dim: int) -> tuple[int, int]:
    """Return the widths of one tile or two (else 0) that hold `dim` columns, as `columns.py` multiplies them."""
    return next(parts for parts in _PARTS if sum(parts) >= dim)


def score_factors(options: Options) -> tuple[float, float]:
    """Return what products are multiplied by, and the soft cap or 0, both in log2 units.

    With a cap the products become an exponent: cap * tanh(x) = cap - 2 cap / (exp2(product * factor) + 1).
    """
    scale, cap = options.softmax_scale, options.softcap
    return (2.0 * LOG2E * scale / cap, cap * LOG2E) if cap else (scale * LOG2E, 0.0)


def bias_places(bias: Tensor | None, heads: int) -> tuple[int, int, int, int]:
    """Return a bias's strides of batch, head and query, and how many query heads read one of its heads."""
    known = bias_arguments(bias, heads)
    return known["bias_b"], known["bias_h"], known["bias_q"], known["bias_group"]


def room_for_key_sums(bias: Tensor | None, query: Tensor, seqlen_k: int) -> Tensor | None:
    """Return room `[B, H, Sk]` for the sums of dS over the queries of each head, where the bias is one per key."""
    if bias_kind(bias) != "key":
        return None
    return workspace(query, query.shape[0], query.shape[2], seqlen_k)
