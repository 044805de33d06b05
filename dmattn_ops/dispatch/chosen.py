"""The operators of blocks of keys that queries choose, on real tensors: their mask, and the masses of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dmattn_ops import meta
from dmattn_ops.call import Result, plain_options
from dmattn_ops.checks import chosen as checks
from dmattn_ops.dispatch import run
from dmattn_ops.dispatch.operators import (
    as_contiguous,
    as_rows,
    below_autograd,
    check_values,
    for_kernels,
    launch_on,
    reads_values,
    unplanned,
)
from dmattn_ops.launching import plans
from dmattn_ops.masks import chosen
from dmattn_ops.masks.chunks import pack_in_chunks
from dmattn_ops.meta import fakes
from dmattn_ops.ops import schemas


def pack_selection(*arguments: Any) -> tuple[Tensor, ...]:
    """Compute row_tiles, col_tiles, row_bits and col_bits of chosen blocks `[B|1, Hm, Sq, k]` and segments."""
    outputs = fakes.pack_selection(*arguments)
    read = schemas.SIGNATURES["pack_selection"].read(arguments)
    indices, block, seqlen_k = read.indices, read.block, read.seqlen_k
    if reads_values(indices):
        checks.in_range(indices, checks.block_count(seqlen_k, block))
    segments = as_contiguous(read.q_segments), as_contiguous(read.k_segments)
    limits = read.band_lo, read.band_hi
    kernels = run.kernels_of_chosen_blocks(indices.device)
    if kernels is not None:
        launch_on(indices, kernels.pack_selection, indices, *segments, block, seqlen_k, *limits, *outputs)
        return outputs

    def visible(start: int, stop: int) -> Tensor:
        return chosen.shown_keys(indices[:, :, start:stop], block, seqlen_k)

    batch, heads = outputs[0].shape[:2]
    return pack_in_chunks(visible, segments, (batch * heads, indices.shape[2], seqlen_k), limits)


def selection_mass(*arguments: Any) -> Tensor:
    """Compute the probability of each chosen block, for indices `[B|1, Hm, Sq, k]`."""
    mass = fakes.selection_mass(*arguments)
    read = schemas.SIGNATURES["selection_mass"].read(arguments)
    query, key, block = as_rows(read.query), as_rows(read.key), read.block
    if reads_values(read.indices):
        checks.in_range(read.indices, checks.block_count(key.shape[1], block))
    if mass.numel() == 0 or key.shape[1] == 0:
        return mass.zero_()
    scale = query.shape[-1] ** -0.5 if read.softmax_scale is None else read.softmax_scale
    options = plain_options(scale, read.band_lo, read.band_hi, softcap=read.softcap)
    segments = as_contiguous(read.q_segments), as_contiguous(read.k_segments)
    bias = None if read.bias is None else as_rows(read.bias)
    choice = chosen.Selection(query, key, read.indices, *segments, bias, as_contiguous(read.lse), block, options)
    with torch.autocast(query.device.type, enabled=False):  # scores are of float32, whatever runs around
        launch_on(query, run.kernels_of_masses(query).selection_mass, choice, mass)
    return mass


def key_mass(*arguments: Any) -> Tensor:
    """Compute the probabilities of each key, summed over queries and the heads of a group."""
    call, read = fakes.mass_call(arguments)
    mass = meta.key_mass_outputs(call.query, call.key)
    if mass.numel() == 0 or call.query.numel() == 0:
        return mass.zero_()
    check_values(call)
    call = for_kernels(call)
    kernels = run.kernels_of_masses(call.query)
    statistics = None if read.lse is None else chosen.Statistics(read.lse.contiguous(), None)
    if statistics is None and kernels.NEEDS_STATISTICS:
        out, lse, lse_tail, _ = meta.forward_outputs(call.query, call.value, False)
        launch_on(call.query, run.forward, call, Result(out, lse, lse_tail, None))
        statistics = chosen.Statistics(lse, lse_tail)
    with torch.autocast(call.query.device.type, enabled=False):
        launch_on(call.query, kernels.key_mass, run.with_start(call), statistics, mass)
    return mass


_planned = below_autograd(pack_selection)
schemas.implement("pack_selection", plans.planned(_planned, schemas.SIGNATURES["pack_selection"]))
for _of_masses in (selection_mass, key_mass):  # their cost is far above that of launching
    schemas.implement(_of_masses.__name__, unplanned(below_autograd(_of_masses)))
