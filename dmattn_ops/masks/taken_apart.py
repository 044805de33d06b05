"""A `TileMask` where others take it apart: leaves of a tree, inputs of exported programs, fields that are given anew, files.

An exported program computes with the numbers of the mask that it was exported with: the ends of the band, `at_most` and the
alignment. Programs of torch compare them with those of a mask that they are called with; packages of AOTInductor drop
everything that is no tensor. So the leaves of a mask end with a tensor that has no elements and whose sizes are its numbers,
and an exported program compares these sizes, by an operator whose result it needs.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmattn_ops import symbolic
from dmattn_ops.call import CHOSEN_TENSORS, HEADER, MASK_TENSORS, TILE, UNBOUNDED
from dmattn_ops.checks import chosen, dtensors, require, validation, values
from dmattn_ops.meta import ceil_div
from dmattn_ops.ops import schemas
from dmattn_ops.ops.torch_privates import pytree
from dmattn_ops.version import __version__

TileMask = Any  # its module imports this one
FORMAT = 2  # of files; those of version 0.2.0 do not say one, and are 0; those before 2 hold no chosen blocks
TENSORS = ("lengths", *MASK_TENSORS, *CHOSEN_TENSORS)
NUMBERS = ("band_lo", "band_hi", "at_most", "from_bottom_right")
_RANKS = dict.fromkeys(("row_tiles", "col_tiles", "row_bits", "col_bits"), 4) | {
    "q_segments": 2,
    "chosen": 4,
    "block_keys": 2,
}
_HOLDER = "numbers"  # the last leaf


# What a mask must be.


def require_fitting(mask: TileMask) -> dict[str, int]:
    """Return the integers of a mask as Python has them; refuse fields that are no mask.

    That are other types, dtypes, devices and shapes than those that belong to its lengths.
    """
    fields = {name: getattr(mask, name) for name in TENSORS}
    given = {name: part for name, part in fields.items() if part is not None or name == "lengths"}
    validation.tensors(**given)
    for name, part in given.items():
        validation.dense(**{name: part})
        require.rank(name, part, _RANKS.get(name, 3))
    limits = {"band_lo": mask.band_lo, "band_hi": mask.band_hi}
    numbers = dict(zip(limits, validation.integers(**limits), strict=True))
    validation.flags(from_bottom_right=mask.from_bottom_right)
    if mask.at_most is not None:
        [numbers["at_most"]] = require.counts(at_most=mask.at_most)
    lengths = given.pop("lengths")
    require.sizes("lengths", lengths, *((size,) for size in lengths.shape[:2]), (0,))
    for name, size in zip(("Sq", "Sk"), lengths.shape, strict=False):
        if symbolic.certainly(size >= UNBOUNDED):
            raise ValueError(f"{name} of a mask must be less than {UNBOUNDED}, got {size}")
    if mask.chosen is not None or mask.block_keys is not None:
        _require_chosen(mask, given)
        return numbers
    batch = symbolic.wider(part.shape[0] for part in given.values())
    heads = symbolic.wider(part.shape[1] for name, part in given.items() if name != "q_segments")
    parts = mask.mask
    validation.mask_tensors(parts, batch, heads, heads, lengths.shape[0], lengths.shape[1], lengths.device)
    return numbers


def _require_chosen(mask: TileMask, given: dict[str, Tensor]) -> None:
    """Refuse fields that are no chosen blocks, with segments beside them."""
    others = [name for name in given if name not in (*CHOSEN_TENSORS, "q_segments", "k_segments")]
    if others or mask.at_most is not None or len(given.keys() & set(CHOSEN_TENSORS)) < len(CHOSEN_TENSORS):
        raise ValueError("a mask of chosen blocks must have chosen and block_keys, and nothing else but segments")
    require.sizes("block_keys", mask.block_keys, (mask.block_keys.shape[0],), (0,))
    chosen.blocks(mask.chosen, mask.q_segments, mask.k_segments, mask.block_keys.shape[0], mask.seqlen_k)
    require.sizes(
        "chosen", mask.chosen, *((size,) for size in (*mask.chosen.shape[:2], mask.seqlen_q)), (mask.chosen.shape[3],)
    )
    for name, part in given.items():
        require.device(name, part, mask.lengths.device, "lengths")


def _require_readable(mask: TileMask) -> None:
    """Refuse lists by which a kernel would leave its tensors, or which it would not walk as a whole. Reads them on the host."""
    for name, length in (("row_tiles", mask.seqlen_k), ("col_tiles", mask.seqlen_q)):
        lists = getattr(mask, name)
        if lists is None:
            continue
        local = lists.to_local() if dtensors.is_sharded(lists) else lists
        if type(local) is not Tensor or local.is_meta:  # fakes have no values
            continue
        values.lists(name, local, ceil_div(length, TILE))
        counts, tiles = local[..., 1:3].sum(-1, keepdim=True), local[..., HEADER:]
        listed = torch.where(torch.arange(tiles.shape[-1], device=local.device) < counts, tiles, -1).sort(-1).values
        if bool(((listed[..., 1:] == listed[..., :-1]) & (listed[..., 1:] >= 0)).any()):
            raise ValueError(f"each record of {name} must list a tile once, got one twice")
        if bool((local[..., 3] != 0).any()):
            raise ValueError(f"word 3 of the records of {name} must be 0, got another number")


# Files and copies.


def state_of(mask: TileMask) -> dict[str, Any]:
    """Return the state of a mask that a file holds: its fields, and the format's number."""
    return {**{field.name: getattr(mask, field.name) for field in dataclasses.fields(mask)}, "format": FORMAT}


def restore(mask: TileMask, state: dict[str, Any]) -> None:
    """Take the state that a file holds; refuse what no kernel should read, whoever wrote it."""
    found = state.get("format", 0) if isinstance(state, dict) else None
    if not isinstance(found, int) or not 0 <= found <= FORMAT:
        raise ValueError(
            f"a file holds a TileMask of format {found!r}, and dmattn_ops {__version__} reads formats 0 to {FORMAT}:"
            " load it with a newer version, or prepare the mask again"
        )
    fields = {name: part for name, part in state.items() if name != "format"}
    names = [field.name for field in dataclasses.fields(mask)]
    if found < 2:
        fields = dict.fromkeys(CHOSEN_TENSORS) | fields
    if sorted(fields, key=str) != sorted(names):
        raise ValueError(f"a file of a TileMask must hold {', '.join(names)}, got {', '.join(map(str, fields))}")
    mask.__dict__.update(fields)
    if _filled_later():
        raise ValueError(
            "a TileMask cannot be checked in a file of torch's old format, which holds what tensors hold behind everything"
            " else: save it without _use_new_zipfile_serialization=False"
        )
    mask.__dict__.update(require_fitting(mask))
    _require_readable(mask)


def _filled_later() -> bool:
    """Return whether torch is reading a file of its old format, whose tensors hold nothing yet."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_legacy_load":
        frame = frame.f_back
    return frame is not None


def assign(used: Callable[[Any], bool]) -> Callable[[Any, str, Any], None]:
    """Return a `__setattr__` of a frozen dataclass, for frameworks that copy an object and give each field of the copy anew.

    A field takes what it has, and, until the object is `used`, another tensor of the same shape and dtype.
    """

    def __setattr__(self: Any, name: str, given: Any) -> None:
        held = self.__dict__.get(name)
        if given is held and name in self.__dict__:
            return
        tensors = isinstance(held, Tensor) and isinstance(given, Tensor)
        if not tensors or held.shape != given.shape or held.dtype != given.dtype or used(self):
            kind = type(self).__name__
            raise dataclasses.FrozenInstanceError(
                f"cannot assign to {name!r}: a {kind} is never modified, dataclasses.replace makes another one"
            )
        object.__setattr__(self, name, given)

    return __setattr__


# Exported programs.


def _sizes(band_lo: int, band_hi: int, at_most: int | None, from_bottom_right: bool) -> tuple[int, ...]:
    """Return the numbers of a mask as sizes: any of them, and their strides, fit into 63 bits."""
    low, high = (symbolic.larger(0, UNBOUNDED + symbolic.smaller(UNBOUNDED, limit)) for limit in (band_lo, band_hi))
    return (
        2 * low + int(from_bottom_right),
        0,
        high,
        0 if at_most is None else 1 + symbolic.smaller(UNBOUNDED, at_most),
    )


def _text(seqlen_q: int, seqlen_k: int, sizes: tuple[int, ...]) -> str:
    low, _, high, most = sizes
    at_most = most - 1 if most else None
    numbers = f"band_lo {low // 2 - UNBOUNDED}, band_hi {high - UNBOUNDED}, at_most {at_most}"
    return f"lengths ({seqlen_q}, {seqlen_k}), {numbers}, from_bottom_right {bool(low % 2)}"


def _as_exported(
    part: Tensor, lengths: Tensor, numbers: Tensor, seqlen_q: int, seqlen_k: int, *expected: Any
) -> Tensor:
    """Return a copy of a tensor of a mask whose lengths and numbers are those that a program was exported with."""
    sizes = _sizes(*expected)
    if tuple(numbers.shape) != sizes or tuple(lengths.shape[:2]) != (seqlen_q, seqlen_k):
        raise ValueError(
            f"the program was exported with a mask of {_text(seqlen_q, seqlen_k, sizes)}, got one of"
            f" {_text(lengths.shape[0], lengths.shape[1], tuple(numbers.shape))}: export it again with this one"
        )
    return part.clone()


def _fake_as_exported(part: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(part)


schemas.library.impl("mask_as_exported", _as_exported, "CompositeExplicitAutograd")
torch.library.register_fake("dmattn::mask_as_exported", _fake_as_exported, lib=schemas.library)


# Trees.


def register(kind: type[TileMask], made: Callable[..., TileMask]) -> None:
    """Register the class as a node of torch's trees; `made` makes a mask of fields that nobody has to check."""
    names = [field.name for field in dataclasses.fields(kind)]

    def flatten(mask: TileMask) -> tuple[list[Any], Any]:
        if mask._leaves is not None:
            return mask._leaves
        held = [(name, getattr(mask, name)) for name in names]
        leaves = [(name, part) for name, part in held if part is not None]
        sizes = _sizes(*[getattr(mask, name) for name in NUMBERS])
        # Steps of 0: a copy that has the same ones takes no memory, whatever the sizes are.
        leaves.append((_HOLDER, mask.lengths.new_empty_strided(sizes, (0,) * len(sizes), dtype=torch.uint8)))
        absent = [name for name, part in held if part is None]
        # Tensors that do not begin with a batch of their own:
        whole = [name for name, _ in leaves if name in ("lengths", "block_keys", _HOLDER)]
        whole += [
            name
            for name, part in leaves
            if name in (*MASK_TENSORS, "chosen") and symbolic.known_equal(part.shape[0], 1)
        ]
        return [part for _, part in leaves], [[name for name, _ in leaves], absent, whole]

    def flatten_with_keys(mask: TileMask) -> tuple[list[Any], Any]:
        leaves, context = flatten(mask)
        return [(pytree.GetAttrKey(name), part) for name, part in zip(context[0], leaves, strict=True)], context

    def unflatten(leaves: Any, context: Any) -> TileMask:
        held, absent, _ = context
        fields = dict(zip(held, leaves, strict=True))
        if not all(
            isinstance(part, (int, torch.SymInt) if name in NUMBERS else Tensor) for name, part in fields.items()
        ):
            return _of_others(fields, context)
        numbers = fields.pop(_HOLDER)
        if torch.compiler.is_exporting():
            name = next(name for name in ("chosen", "end", "k_segments", "row_tiles") if name in fields)
            lengths, given = fields["lengths"], [fields.get(name) for name in NUMBERS]
            fields[name] = torch.ops.dmattn.mask_as_exported(
                fields[name], lengths, numbers, lengths.shape[0], lengths.shape[1], *given
            )
        return kind(**fields, **dict.fromkeys(absent))

    def _of_others(fields: dict[str, Any], context: Any) -> TileMask:
        """Return a mask of what tensors or numbers were mapped to; flattened, it is what it was made of.

        Pipelines map each tensor to the word that cuts it along the batch, and each number to the word that hands it to every
        part: so that is what tensors without a batch of their own get.
        """
        if type(fields["lengths"]).__name__ == "TensorChunkSpec":
            fields |= dict.fromkeys(context[2], fields["band_lo"])
        leaves = list(fields.values())
        del fields[_HOLDER]
        return made(**fields, _leaves=(leaves, context))

    if pytree is None:
        torch.export.register_dataclass(kind, serialized_type_name="dmattn_ops.TileMask")
        return
    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name="dmattn_ops.TileMask",
        flatten_with_keys_fn=flatten_with_keys,
    )
