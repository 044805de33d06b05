"""Which kernels run: by device, then by architecture and problem. Outputs arrive allocated.

Kernels are imported at their first call, so that `import dmattn_ops` loads neither Triton nor a compiler. Empty problems
end here: no kernel sees a tensor without elements.
"""

from __future__ import annotations

import math
import sys
import warnings
from dataclasses import replace
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from dmattn_ops import arch, choose, config, environment, reference, tuning
from dmattn_ops.arch import Arch
from dmattn_ops.choose import Choice, Demand
from dmattn_ops.problem import TILE, Options, Tiles, Varlen

_FORWARD = {
    "hopper": "dmattn_ops.kernels.hopper.forward.launch",
    "portable": "dmattn_ops.kernels.portable.forward",
    "native": "dmattn_ops.native",
    "reference": "dmattn_ops.reference",
}
_BACKWARD = {
    "hopper": "dmattn_ops.kernels.hopper.backward.launch",
    "hopper256": "dmattn_ops.kernels.hopper.backward_256.launch",
    "portable": "dmattn_ops.kernels.portable.backward",
    "native": "dmattn_ops.native",
    "reference": "dmattn_ops.reference",
}
_NEEDS = {"hopper": 90, "hopper256": 90}  # kernels that run on one architecture only


class Call(NamedTuple):
    """What forward and backward are asked alike, and what a kernel may refuse."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    tiles: Tiles
    seed: Tensor | None
    varlen: Varlen | None
    options: Options

    @property
    def demand(self) -> Demand:
        """The numbers that the choice depends on; variable lengths count as their upper bounds."""
        *batch, seqlen_q, heads, dim = self.query.shape
        size, seqlen_k = batch[0] if batch else 1, self.key.shape[-3]
        if self.varlen is not None:
            size = self.varlen.cu_seqlens_q.shape[0] - 1
            seqlen_q, seqlen_k = self.varlen.max_seqlen_q, self.varlen.max_seqlen_k
        return Demand(size, heads, seqlen_q, seqlen_k, dim, self.value.shape[-1], self.query.element_size())


@cache
def cpu_kernels() -> str:
    """Return which kernels a CPU has: native where the extension was built, else reference, with one warning."""
    from dmattn_ops import native

    if native.available():
        return "native"
    warnings.warn(
        f"dmattn_ops runs on plain torch operations here, slowly: {native.reason()}. Install a C++ compiler and then"
        " the package again, or a wheel that holds its C++ kernels.",
        stacklevel=2,
    )
    return "reference"


def _chosen(direction: str, call: Call, on: Arch | None, tuned: bool) -> Choice:
    rows, kernels = (config.FORWARD, _FORWARD) if direction == "forward" else (config.BACKWARD, _BACKWARD)
    if not call.query.is_cuda and on is None:
        return Choice(None, config.CPU[cpu_kernels()], ())

    def refusals(kernel: str) -> list[str]:
        needed = _NEEDS.get(kernel)
        if needed is None:
            return []
        if call.query.is_cuda and arch.physical(call.query.device).sm != needed:
            return [f"runs on SM {needed // 10}.{needed % 10} only"]
        try:
            launcher = import_module(kernels[kernel])
        except (ImportError, AttributeError) as error:  # Gluon is experimental: another Triton may have another one
            return [f"needs another Triton: {error}"]
        return launcher.refusals(*call)

    choice = choose.choose(rows, on or arch.current(call.query.device), call.demand, refusals)
    if choice.row.kernel == "reference":
        _warn_legacy(choice.arch, call.demand.width, call.demand.itemsize)
    if not (tuned and call.query.is_cuda and choice.arch is not None and tuning.entries()):
        return choice
    place = tuning.place(call.query.device, choice.arch)
    masked = call.tiles.row_tiles is not None
    return tuning.tuned(choice, direction, call.demand, masked, call.options.deterministic, place)


@cache
def _warn_legacy(on: Arch, width: int, itemsize: int) -> None:
    warnings.warn(
        f"dmattn_ops has no kernels for {on} and head dimension {width} in {8 * itemsize} bits: plain torch operations"
        " run there, slowly",
        stacklevel=2,
    )


def forward_choice(call: Call, on: Arch | None = None, tuned: bool = True) -> Choice:
    """Return the row that a forward launch uses, on the call's own architecture or as `on` would.

    With `tuned`, a configuration from the user's cache takes the place of the row's own where there is one.
    """
    return _chosen("forward", call, on, tuned)


def backward_choice(call: Call, on: Arch | None = None, tuned: bool = True) -> Choice:
    """Return the row that a backward launch uses, on the call's own architecture or as `on` would.

    With `tuned`, a configuration from the user's cache takes the place of the row's own where there is one.
    """
    return _chosen("backward", call, on, tuned)


def as_run(choice: Choice, call: Call) -> Choice:
    """Return a choice with the blocks that its launcher takes for a call, of those that its row offers."""
    blocks: config.Config = choice.row.config
    if isinstance(blocks, (config.PortableForward, config.PortableBackward)):
        from dmattn_ops.kernels.portable.arguments import is_pairwise, rows_are_aligned

        aligned = rows_are_aligned(call.query, call.key, call.value)
        pairwise = is_pairwise(call.bias, call.options)
        if isinstance(blocks, config.PortableForward):
            blocks = blocks.for_call(aligned, pairwise, call.demand.seqlen_q)
        else:
            blocks = blocks.for_call(aligned, pairwise)
    elif isinstance(blocks, config.HopperForward) and (call.tiles.row_tiles is not None or call.bias is not None):
        blocks = replace(blocks, block_m=TILE)
    elif isinstance(blocks, config.HopperBackward) and call.options.softcap != 0.0:
        blocks = replace(blocks, variant="two_phase")
    return choice._replace(row=replace(choice.row, config=blocks))


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    tiles: Tiles,
    seed: Tensor | None,
    varlen: Varlen | None,
    options: Options,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Write out and lse."""
    if query.numel() == 0 or key.numel() == 0:
        out.zero_()
        lse.fill_(-math.inf)
        return
    call = Call(query, key, value, bias, tiles, seed, varlen, options)
    tuning.record(*call)
    row = forward_choice(call).row
    launch = _launcher(_FORWARD[row.kernel]).forward
    if row.takes_config:
        launch(*call, out, lse, row.config)
    else:
        launch(*call, out, lse)


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    tiles: Tiles,
    seed: Tensor | None,
    varlen: Varlen | None,
    options: Options,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dbias: Tensor | None,
) -> None:
    """Write dq, dk, dv and, where it is given, dbias."""
    if query.numel() == 0 or key.numel() == 0:
        for gradient in (dq, dk, dv) if dbias is None else (dq, dk, dv, dbias):
            gradient.zero_()
        return
    call = Call(query, key, value, bias, tiles, seed, varlen, options)
    tuning.record(*call)
    choice = backward_choice(call)
    if environment.profiles_backward():
        sys.stderr.write(profile_line(as_run(choice, call), call.demand) + "\n")
    arguments = (grad_out, grad_lse, query, key, value, out, lse, bias, tiles, seed, varlen, options, dq, dk, dv, dbias)
    launch = _launcher(_BACKWARD[choice.row.kernel]).backward
    if choice.row.takes_config:
        launch(*arguments, choice.row.config)
    else:
        launch(*arguments)


def profile_line(choice: Choice, demand: Demand) -> str:
    """Return the line that tells a backward launch's choice."""
    return (
        f"FLASH_DMATTN_PROFILE: HeadDim={demand.dim}, Arch={choice.arch or 'CPU'}, SeqQ={demand.seqlen_q},"
        f" SeqK={demand.seqlen_k}, Batch={demand.batch}, Choice={choice.label}"
    )


def pack_mask(
    mask: Tensor,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    seqlen_q: int,
    band_lo: int,
    band_hi: int,
    row_tiles: Tensor,
    col_tiles: Tensor,
    row_bits: Tensor,
    col_bits: Tensor,
) -> None:
    """Write the lists and bits of a dense mask, of segments and of a band, all of which must hold."""
    launch = _mask_kernels(mask.device).pack_mask
    launch(mask, q_segments, k_segments, seqlen_q, band_lo, band_hi, row_tiles, col_tiles, row_bits, col_bits)


def list_tiles(
    q_segments: Tensor | None,
    k_segments: Tensor,
    seqlen_q: int,
    band_lo: int,
    band_hi: int,
    row_tiles: Tensor,
    col_tiles: Tensor,
) -> None:
    """Write the lists of segments inside a band."""
    launch = _mask_kernels(k_segments.device).list_tiles
    launch(q_segments, k_segments, seqlen_q, band_lo, band_hi, row_tiles, col_tiles)


def _mask_kernels(device: torch.device) -> ModuleType:
    if device.type != "cuda":
        return _launcher(_FORWARD[cpu_kernels()])
    if arch.physical(device).sm < config.OLDEST_TRITON:
        return reference
    return _launcher("dmattn_ops.kernels.tile_mask")


def launcher(direction: str, kernel: str) -> ModuleType:
    """Return the module whose function named `direction` launches a kernel."""
    return _launcher((_FORWARD if direction == "forward" else _BACKWARD)[kernel])


@cache
def _launcher(module: str) -> ModuleType:
    return import_module(module)
