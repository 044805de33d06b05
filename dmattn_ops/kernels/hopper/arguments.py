"""What the launchers of the SM 9.0 kernels do alike: lists for intervals, the numbers of scores, of a bias and of dropout."""

from __future__ import annotations

from torch import Tensor

from dmattn_ops.call import Call, bias_kind
from dmattn_ops.kernels.interval_lists import listed as listed
from dmattn_ops.kernels.interval_lists import too_long as too_long
from dmattn_ops.kernels.launching.launch import workspace
from dmattn_ops.kernels.portable import arguments as portable
from dmattn_ops.problem import Options, dropout_scale

LOG2E = 1.4426950408889634


def score_factors(options: Options) -> tuple[float, float]:
    """Return what products are multiplied by, and the soft cap or 0, both in log2 units.

    With a cap the products become an exponent: cap * tanh(x) = cap - 2 cap / (exp2(product * factor) + 1).
    """
    scale, cap = options.softmax_scale, options.softcap
    return (2.0 * LOG2E * scale / cap, cap * LOG2E) if cap else (scale * LOG2E, 0.0)


def bias_places(bias: Tensor | None, heads: int) -> tuple[int, int, int, int]:
    """Return a bias's strides of batch, head and query, and how many query heads read one of its heads."""
    known = portable.bias_arguments(bias, heads)
    return known["bias_b"], known["bias_h"], known["bias_q"], known["bias_group"]


def room_for_key_sums(bias: Tensor | None, query: Tensor, seqlen_k: int) -> Tensor | None:
    """Return room `[B, H, Sk]` for the sums of dS over the queries of each head, where the bias is one per key."""
    if bias_kind(bias) != "key":
        return None
    return workspace(query, query.shape[0], query.shape[2], seqlen_k)


def dropout_arguments(call: Call) -> tuple[Tensor | None, int, int, int, float, int, int]:
    """Return the seeds, their strides, and what follows in `hopper.dropout.Dropout`."""
    known = portable.dropout_arguments(call)
    names = ("seed", "seed_b", "seed_h", "last_dropped", "rescale", "q_origin", "k_origin")
    seed, seed_b, seed_h, last, rescale, q_origin, k_origin = (known[name] for name in names)
    return seed, seed_b, seed_h, last, rescale, q_origin, k_origin


def delta_factor(options: Options) -> float:
    """Return what the backward multiplies delta by: the share of weights that are kept, since all is rescaled at its end."""
    rescale = dropout_scale(options.dropout_p)
    return 1.0 / rescale if rescale else 0.0


def dropout_refusals(options: Options) -> list[str]:
    """Return every reason why dropout keeps the SM 9.0 kernels from a call."""
    begins_inside = any(origin % 16 for origin in (options.q_origin, options.k_origin))
    return ["takes no dropout of positions that begin inside a block of 16"] * (
        options.dropout_p > 0.0 and begins_inside
    )
