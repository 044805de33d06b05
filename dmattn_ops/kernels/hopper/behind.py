"""What both SM 9.0 backwards do around their kernels: before them, where a NaN was noted, and for the gradient of a bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dmattn_ops.call import Call, Gradients, Saved, mappable
from dmattn_ops.choice.config import HopperBackward, HopperBackward256
from dmattn_ops.kernels.hopper.arguments import key_numbers_as_bias, listed
from dmattn_ops.kernels.hopper.dbias.launch import bias_gradient
from dmattn_ops.kernels.hopper.statistics import Made
from dmattn_ops.kernels.portable.again import backward_again
from dmattn_ops.launching.launch import computed


def backward_with(
    gradients: Callable[[Call, Saved, Gradients, Any, bool], Made],
    call: Call,
    saved: Saved,
    grads: Gradients,
    config: HopperBackward | HopperBackward256,
) -> None:
    """Write all gradients of a call, of which `gradients` writes dq, dk and dv; its last argument says whether a NaN is noted."""
    given = listed(call)
    call, watched = key_numbers_as_bias(given), given.mask.kind != "none"
    if not mappable(grads.grad_out):  # an expanded gradient, such as that of out.sum()
        grads = grads._replace(grad_out=computed(Tensor.contiguous, grads.grad_out))
    made = gradients(call, saved, grads, config, watched)
    if made.counts is not None:
        backward_again(given, saved, grads, made.key_sums, made.counts)
    bias_gradient(call, saved, grads, made.statistics, made.key_sums, config)
