"""The operators `torch.ops.dmattn.*`: the only place that holds a schema. What arguments mean: `call.py`, `call.py`.

In every schema the tensors come first and the numbers behind them, and every argument has a name that means the same in
all of them. Where an argument stands is read from the schema (`SIGNATURES`), never counted. A program exported by an earlier
version must load, and passes arguments by position: so a new number is appended behind `needs_...`, with a default, to the
forward and to the backward (`APPENDED`), and a new tensor makes a new overload of the operators, beside `default`.

A policy of selective checkpointing is asked about overloads: compare with `torch.ops.dmattn.forward.default`, not with the
packet `torch.ops.dmattn.forward`. To save are the forward operators, and `pack_mask`, `pack_selection`, `list_tiles` and
`key_lifetimes`, which give a mask in few bytes.

What masks are made of in users' graphs is an operator wherever it sorts, scans or scatters: a compiler that fuses such an
operation with one of the caller's may fail (Inductor of torch 2.11 did, with a sort behind a cumsum on a GPU).
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from dmattn_ops.call import MASK_TENSORS, UNBOUNDED, Chosen, Mask, Options, Used
from dmattn_ops.ops.torch_privates import below_autograd as below_autograd


def _optional(*names: str) -> str:
    return ", ".join(f"Tensor? {name}=None" for name in names)


QKV = "Tensor query, Tensor key, Tensor value"
SAVED = "Tensor out, Tensor lse, Tensor lse_tail"
GRADS = "Tensor grad_out, Tensor? grad_lse"
OFFSETS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k"
BAND = f"SymInt band_lo={-UNBOUNDED}, SymInt band_hi={UNBOUNDED}"
ORIGINS = "SymInt q_origin=0, SymInt k_origin=0"
SCALARS = "float? softmax_scale=None, float softcap=0.0, float dropout_p=0.0, bool deterministic=False"
DENSE_TENSORS = _optional("bias", *MASK_TENSORS, "sink", "seed")
DENSE_NUMBERS = f"{BAND}, {ORIGINS}, SymInt? at_most=None, {SCALARS}"
VARLEN_TENSORS = (
    f"{OFFSETS}, Tensor? bias, Tensor? mask, Tensor? sink, Tensor? seed"  # no defaults before numbers without
)
VARLEN_NUMBERS = f"SymInt max_seqlen_q, SymInt max_seqlen_k, {BAND}, {ORIGINS}, bool top_left=False, {SCALARS}"
APPENDED = ", bool batch_invariant=False"  # what versions after 0.2.0 added
MAX = f"bool needs_max=False{APPENDED}"
NEEDS = f"bool needs_dbias=False, bool needs_dsink=False{APPENDED}"
OUTPUTS = "(Tensor out, Tensor lse, Tensor lse_tail, Tensor row_max)"
QKV_GRADS = "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)"
LISTS = "Tensor row_tiles, Tensor col_tiles"
# Of the overloads for calls that use a part of the keys of each batch entry: see `call.Used`.
USED = "Tensor seqlen_k_used"
USED_NUMBERS = f"{DENSE_NUMBERS}, SymInt used_lo={-UNBOUNDED}, SymInt used_hi={UNBOUNDED}"

# Of the overloads for blocks of keys that queries name: see `call.Chosen`. Of the mask there are segments at most.
CHOSEN = "Tensor chosen"
CHOSEN_NUMBERS = f"{DENSE_NUMBERS}, SymInt block=1"

SCHEMAS = {
    "forward": f"({QKV}, {DENSE_TENSORS}, {DENSE_NUMBERS}, {MAX}) -> {OUTPUTS}",
    "backward": f"({GRADS}, {QKV}, {SAVED}, {DENSE_TENSORS}, {DENSE_NUMBERS}, {NEEDS}) -> {QKV_GRADS}",
    "qkvpacked_forward": f"(Tensor qkv, {DENSE_TENSORS}, {DENSE_NUMBERS}, {MAX}) -> {OUTPUTS}",
    "qkvpacked_backward": f"({GRADS}, Tensor qkv, {SAVED}, {DENSE_TENSORS}, {DENSE_NUMBERS}, {NEEDS})"
    " -> (Tensor dqkv, Tensor dbias, Tensor dsink)",
    "varlen_forward": f"({QKV}, {VARLEN_TENSORS}, {VARLEN_NUMBERS}, {MAX}) -> {OUTPUTS}",
    "varlen_backward": f"({GRADS}, {QKV}, {SAVED}, {VARLEN_TENSORS}, {VARLEN_NUMBERS}, {NEEDS}) -> {QKV_GRADS}",
    "forward.used": f"({QKV}, {USED}, {DENSE_TENSORS}, {USED_NUMBERS}, {MAX}) -> {OUTPUTS}",
    "backward.used": f"({GRADS}, {QKV}, {SAVED}, {USED}, {DENSE_TENSORS}, {USED_NUMBERS}, {NEEDS}) -> {QKV_GRADS}",
    "qkvpacked_forward.used": f"(Tensor qkv, {USED}, {DENSE_TENSORS}, {USED_NUMBERS}, {MAX}) -> {OUTPUTS}",
    "qkvpacked_backward.used": f"({GRADS}, Tensor qkv, {SAVED}, {USED}, {DENSE_TENSORS}, {USED_NUMBERS}, {NEEDS})"
    " -> (Tensor dqkv, Tensor dbias, Tensor dsink)",
    "forward.chosen": f"({QKV}, {CHOSEN}, {DENSE_TENSORS}, {CHOSEN_NUMBERS}, {MAX}) -> {OUTPUTS}",
    "backward.chosen": f"({GRADS}, {QKV}, {SAVED}, {CHOSEN}, {DENSE_TENSORS}, {CHOSEN_NUMBERS}, {NEEDS}) -> {QKV_GRADS}",
    "pack_mask": f"(Tensor mask, Tensor? q_segments, Tensor? k_segments, SymInt seqlen_q, {BAND})"
    f" -> ({LISTS}, Tensor row_bits, Tensor col_bits)",
    "list_tiles": f"(Tensor? q_segments, Tensor k_segments, SymInt seqlen_q, {BAND}) -> ({LISTS})",
    "key_lifetimes": "(Tensor scores, Tensor? documents, SymInt keep, SymInt keep_first=0, SymInt keep_last=0,"
    " bool is_causal=True) -> (Tensor start, Tensor end)",
    "pack_intervals": "(Tensor end, Tensor? start, Tensor? hidden_from, Tensor? hidden_to, Tensor? mask, Tensor? q_segments,"
    f" Tensor? k_segments, SymInt seqlen_q, {BAND}) -> ({LISTS}, Tensor row_bits, Tensor col_bits)",
    "rank_ids": "(Tensor ids) -> Tensor ranks",
    "spread_lists": "(Tensor counts, Tensor indices, SymInt columns) -> Tensor listed",
    "pack_selection": f"(Tensor indices, Tensor? q_segments, Tensor? k_segments, SymInt block, SymInt seqlen_k, {BAND})"
    f" -> ({LISTS}, Tensor row_bits, Tensor col_bits)",
    "selection_mass": "(Tensor query, Tensor key, Tensor indices, Tensor? q_segments, Tensor? k_segments, Tensor? bias,"
    f" Tensor? lse, SymInt block, {BAND}, float? softmax_scale=None, float softcap=0.0) -> Tensor mass",
    "key_mass": f"(Tensor query, Tensor key, {_optional('bias', *MASK_TENSORS, 'lse')}, {BAND}, SymInt? at_most=None,"
    " float? softmax_scale=None, float softcap=0.0) -> Tensor mass",
}

# Operators that change their arguments in place. They stand in graphs as they are: compilers keep the order of such changes, and
# change the tensors of the caller.
_CACHE = (
    "Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor(c!) score_cache, Tensor(d!) places, Tensor(e!) length,"
    " Tensor(f!) floor, Tensor(g!) first, Tensor(h!) arrived, Tensor(i!)? bias_cache, Tensor(j!)? document, Tensor(k!)? trail"
)
_NEW_POSITIONS = "Tensor key, Tensor value, Tensor scores, Tensor? bias, Tensor? padding, Tensor? documents"
_KEPT = "SymInt keep, SymInt keep_first, SymInt keep_last, SymInt rollback, bool padding_counts=False"
CHANGING = {
    "keep_step": f"({_CACHE}, {_NEW_POSITIONS}, {_KEPT}) -> Tensor seen",
    "keep_chunk": f"({_CACHE}, {_NEW_POSITIONS}, {_KEPT}) -> (Tensor ends, Tensor keys, Tensor values, Tensor biases)",
}

# What tracers see through: in their graphs stand the operations of torch that it consists of.
COMPOSITES = {"draw_seed": "(Tensor query, SymInt? batch=None) -> Tensor seed"}

# Part of exported programs alone (`taken_apart.py`).
EXPORTED = {
    "mask_as_exported": "(Tensor part, Tensor lengths, Tensor numbers, SymInt seqlen_q, SymInt seqlen_k, SymInt band_lo,"
    " SymInt band_hi, SymInt? at_most, bool from_bottom_right) -> Tensor"
}

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
try:
    library = torch.library.Library("dmattn", "DEF")
except RuntimeError as error:
    raise ImportError(
        "the operators torch.ops.dmattn are defined already, by libdmattn.so: a program that embeds Python imports dmattn_ops"
        " before it loads the library"
    ) from error
for _name, _schema in (SCHEMAS | CHANGING | COMPOSITES | EXPORTED).items():
    library.define(_name + _schema, tags=_TAGS)


def overload(name: str) -> Any:
    """Return the overload of an operator that a schema is of: `forward` is `forward.default`."""
    packet, _, of = name.partition(".")
    return getattr(getattr(torch.ops.dmattn, packet), of or "default")


def with_overloads(*functions: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Return functions by their names, those of operators, and by overloads of these (`forward.used`), whose name they are told."""
    made = {function.__name__: function for function in functions}
    for name in SCHEMAS:
        operator, _, of = name.partition(".")
        if of and operator in made:
            made[name] = partial(made[operator], name=name)
    return made


Planned = Callable[..., tuple[Any, Any]]
implementations: dict[
    str, Planned
] = {}  # outputs on CPU and CUDA, by operator, and what the backward finds its plan by


def implement(name: str, function: Planned) -> None:
    """Register what an operator does on real tensors, by a function that may also be called directly."""
    implementations[name] = function
    for device in ("CPU", "CUDA"):
        library.impl(name, lambda *arguments: function(*arguments)[0], device)


class Signature(NamedTuple):
    """The arguments of an operator, as its schema has them."""

    names: tuple[str, ...]
    tensors: int  # how many of them, from the first, are tensors
    required: tuple[int, ...]  # which of them must not be None
    needs: slice  # where among the numbers those stand that say which outputs are needed
    defaults: tuple[Any, ...]  # of all arguments; None where there is none
    reader: Any  # a named tuple of the arguments

    def fill(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return all arguments. The dispatcher leaves out defaults at the end."""
        return arguments + self.defaults[len(arguments) :]

    def read(self, arguments: tuple[Any, ...]) -> Any:
        """Return the arguments by name. The dispatcher takes None for a tensor that must be there, so it is refused here."""
        read = self.reader._make(self.fill(arguments))
        for place in self.required:
            if read[place] is None:
                raise TypeError(f"{self.names[place]} must be a tensor, got None")
        return read

    def split(self, arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the tensors (or None) and the numbers among `arguments`."""
        return arguments[: self.tensors], arguments[self.tensors :]

    def around_needs(self, numbers: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the numbers before those that say what is needed, and those behind them, which were appended later."""
        return numbers[: self.needs.start], numbers[self.needs.stop :]


def _signature(name: str) -> Signature:
    """Return the signature of an operator, from the schema that torch has read."""
    arguments = overload(name)._schema.arguments
    names, kinds = tuple(each.name for each in arguments), [str(each.type) for each in arguments]
    are_tensors = [kind in ("Tensor", "Optional[Tensor]") for kind in kinds]
    assert are_tensors == sorted(are_tensors, reverse=True), f"{name}: tensors come first"
    tensors, required = sum(are_tensors), tuple(place for place, kind in enumerate(kinds) if kind == "Tensor")
    defaults = tuple(each.default_value for each in arguments)
    reader = namedtuple(name.replace(".", "_"), names)  # type: ignore[misc]
    return Signature(names, tensors, required, place_of_needs(names[tensors:]), defaults, reader)


def place_of_needs(numbers: Sequence[str]) -> slice:
    """Return the slice of the numbers named `needs_...`, which stand in a row; an empty slice at the end if there are none."""
    are_needs = [number.startswith("needs_") for number in numbers]
    first = are_needs.index(True) if any(are_needs) else len(numbers)
    end = first + sum(are_needs)
    assert all(are_needs[first:end]), "what says which outputs are needed stands in a row"
    return slice(first, end)


SIGNATURES = {name: _signature(name) for name in SCHEMAS | CHANGING}


def _refuse(name: str) -> Callable[..., Any]:
    """Return a function that refuses an operator in words where torch has no kernel: without tensors, or on another device."""

    def refuse(*arguments: Any) -> Any:
        first = SIGNATURES[name].read(arguments)[SIGNATURES[name].required[0]]
        raise NotImplementedError(f"torch.ops.dmattn.{name} takes tensors on CPU and CUDA devices, got {first.device}")

    return refuse


for _name in SCHEMAS | CHANGING:
    library.impl(_name, _refuse(_name), "CompositeExplicitAutograd")
_mask_fields = attrgetter(*Mask._fields)
_option_fields = attrgetter(*Options._fields)


def mask_of(read: Any) -> Mask:
    """Return the mask among the arguments of a dense operator, read by name."""
    return Mask._make(_mask_fields(read))


def options_of(read: Any, dim: int) -> Options:
    """Return the numbers among the arguments of an operator, read by name; `dim` is the head dimension."""
    options = Options._make(_option_fields(read))
    band_lo, band_hi = _clamped(options.band_lo), _clamped(options.band_hi)
    scale = dim**-0.5 if options.softmax_scale is None else options.softmax_scale
    same_bits = options.deterministic or options.batch_invariant
    return options._replace(band_lo=band_lo, band_hi=band_hi, softmax_scale=scale, deterministic=same_bits)


def used_of(read: Any) -> Used | None:
    """Return the numbers of used keys among the arguments of an operator, read by name; None where all keys are used."""
    lengths = getattr(read, "seqlen_k_used", None)
    return None if lengths is None else Used(lengths, _clamped(read.used_lo), _clamped(read.used_hi))


def chosen_of(read: Any) -> Chosen | None:
    """Return the blocks that queries name, among the arguments of an operator, read by name; None where it takes none."""
    indices = getattr(read, "chosen", None)
    return None if indices is None else Chosen(indices, read.block)


def _clamped(limit: int) -> int:
    """Return a limit of the band inside what kernels compute with; a number that a tracer does not know stays."""
    return max(-UNBOUNDED, min(UNBOUNDED, limit)) if type(limit) is int else limit
