"""Plain eager calls of `flash_dmattn_func` that repeat an earlier one: from what it is given to the plan in one look-up.

A call takes this way only if shape, strides, dtype and device of every tensor, those of the mask included, all numbers and all
switches equal those of an earlier call, and if its tensors are plain ones: everything that the longer way would decide follows
from these. A mask that is a tensor is packed each time, since it may hold other values. Calls with a bias, a sink, dropout or
autocast, with tensors that have to be copied, and with a prepared mask that hides less than the call asks for always take the
longer way.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter

from dmattn_ops.api.arguments import taken_as_it_is
from dmattn_ops.bands import Band
from dmattn_ops.call import MASK_TENSORS, NO_MASK
from dmattn_ops.launching import plans
from dmattn_ops.masks import prepare
from dmattn_ops.masks.tile_mask import TileMask, read
from dmattn_ops.ops import autograd, schemas

_PLAIN = (Tensor, Parameter)
_NAME = "forward"
_BITS_ALONE = (None,) * (len(MASK_TENSORS) - 4)  # in place of the tensors of a mask behind lists and bits
_NOT_PLAIN = "not plain"  # stands in place of the description of a mask whose calls are never repeated
_described: WeakKeyDictionary[TileMask, Hashable] = WeakKeyDictionary()


def signature_of(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | TileMask | None, band: Band, numbers: tuple[Any, ...]
) -> Hashable | None:
    """Return the key that tells a call from others, None for a call that is not plain; `numbers` are those beside the band."""
    tensors = (query, key, value, mask) if isinstance(mask, Tensor) else (query, key, value)
    for tensor in tensors:
        if type(tensor) not in _PLAIN or tensor.is_neg():
            return None
    if (
        _NAME not in autograd.kernels  # of a torch without some private names
        or not plans.may_repeat(query)
        or not autograd.in_plain_mode()
        or torch.is_autocast_enabled("cuda")
    ):
        return None
    of_mask: Hashable = None
    try:
        if mask is not None and not isinstance(mask, Tensor):
            if type(mask) is not TileMask or taken_as_it_is(mask, query, key, band) is None:
                return None
            of_mask = _described.get(mask) or _describe(mask)
            if of_mask == _NOT_PLAIN:
                return None
        return (plans.described(tensors), of_mask, band, numbers, plans.switches(query))
    except (RuntimeError, ValueError):  # sparse and nested tensors have no strides; tensors of other ranks
        return None


def _describe(mask: TileMask) -> Hashable:
    """Return the part of a plan's key that a mask adds, and cache it: a mask never changes."""
    known = read(mask)
    tensors, *limits = known.taken
    if not autograd.all_plain((mask.lengths, *tensors)):  # a DTensor, say, has no memory that a kernel could read
        _described[mask] = _NOT_PLAIN
        return _NOT_PLAIN
    found = _described[mask] = (plans.described(tensors[:-1]), tensors.at_most, known.band, *limits)
    return found


def again(
    found: Hashable, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | TileMask | None, needs_lse: bool
) -> tuple[Any, ...] | None:
    """Compute a call with that signature by the plan of an earlier one; None where there is none yet.

    Without `needs_lse`, lse may be None.
    """
    repeat = plans.repeat(found)
    if repeat is None:
        return None
    of_mask: tuple[Tensor | None, ...] = NO_MASK[:-1]
    if isinstance(mask, TileMask):
        of_mask = read(mask).taken[0][:-1]
    elif mask is not None:
        of_mask = _packed(mask, query.shape[1], repeat)
    tensors = (query, key, value, None, *of_mask, None, None)
    if not needs_lse and repeat.node is not None:
        autograd.refuse_tangents((query, key, value))  # which the node does not see
        out = repeat.attend(tensors)
        if out is not None:
            return out, None, None, None
    return autograd.kernels[_NAME]((*tensors, *repeat.numbers), repeat, needs_lse)


def _packed(mask: Tensor, seqlen_q: int, repeat: plans.Repeat) -> tuple[Tensor | None, ...]:
    """Return what a mask is packed into: by the plan of an earlier one once there is one, if it does nothing but launch."""
    if repeat.packing:
        plans.enter_thread()
        ran = repeat.packing[0].run((mask, None, None))
        if ran is not None:
            return (*ran[0], *_BITS_ALONE)
    limits = repeat.numbers[:2]
    if not repeat.packing and mask.shape[2] != 1:
        found = plans.find("pack_mask", (prepare.narrowed(mask), None, None), (seqlen_q, *limits))
        if found is not None and found.only_launches:
            repeat.packing.append(found)
    return prepare.packed(mask, seqlen_q, *limits)[:-1]


def remember(found: Hashable, given: tuple[Tensor, ...], tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> None:
    """Remember the plan of a call with that signature, if it has one and was computed with the tensors it was given."""
    if all(one is other for one, other in zip(given, tensors, strict=False)):
        around_needs = schemas.SIGNATURES[_NAME].around_needs(numbers)
        compute, gradients = schemas.implementations[_NAME], autograd.gradients[_NAME]
        plans.remember(found, _NAME, tensors, numbers, compute, around_needs, gradients)
