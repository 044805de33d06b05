"""Launch the forward with mma.sync, as that of the portable kernels is launched."""

from __future__ import annotations

from dmattn_ops.call import Call, Result, Takes, bias_kind
from dmattn_ops.choice.configurations import AmpereForward
from dmattn_ops.kernels.ampere.arguments import LEAST_COLUMNS, bias_comes_in_tiles, common_refusals
from dmattn_ops.kernels.ampere.forward.kernel import Traits, forward_kernel
from dmattn_ops.kernels.portable.forward import forward_with

TAKES = Takes(("none", "bits", "segments", "intervals"), sinks=True, oldest=80)
FEW_QUERIES = 16  # for which the portable kernels have blocks of their own


def refusals(call: Call) -> list[str]:
    """Return every reason why the kernel doesn't take a request; empty where it does."""
    queries = call.demand.seqlen_q
    reasons = [f"{queries} queries leave most of a block without work"] if queries <= FEW_QUERIES else []
    if call.options.batch_invariant:
        reasons.append(
            "takes keys in an order that depends on the queries beside a query, which is not batch-invariant"
        )
    return reasons + common_refusals(call)


def forward(call: Call, result: Result, config: AmpereForward) -> None:
    """Write out `[B, Sq, H, Dv]`, and lse, lse_tail and row_max `[B, H, Sq]` (packed: `[total_q, H, Dv]`, `[H, total_q]`)."""
    same_strides = call.key.stride(-3) == call.value.stride(-3)
    bias_tiles = config.bias_tiles and not config.ahead and bias_comes_in_tiles(call)
    traits = Traits(same_strides, bias_tiles, config.held, config.ahead)
    # Without a limit, ptxas gives the causal kernel with such a bias and 128 columns 32 registers on SM 8.0, and spills 21 KB.
    wide_bias = call.bias is not None and call.bias.element_size() == 4 and bias_kind(call.bias) == "full"
    limit = {"maxnreg": 255} if wide_bias else {}
    forward_with(forward_kernel, call, result, config, LEAST_COLUMNS, T=traits, **limit)
