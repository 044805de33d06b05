"""The rank's share of a mask: `prepare_context_mask`, and what a call makes of a plain one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dmattn_ops import symbolic
from dmattn_ops.bands import CausalFrom, Window, visibility
from dmattn_ops.checks import require, validation
from dmattn_ops.distributed import agreement
from dmattn_ops.distributed.document_runs import Ends, ascends, mask_of_rank, read_ends, read_offsets, spans_within
from dmattn_ops.distributed.key_exchange import KeyExchange, Span, exchange_of
from dmattn_ops.distributed.mask_source import Source, is_per_key, source_of
from dmattn_ops.distributed.pieces import Piece, Sight, Spans, sight_of, spans_of
from dmattn_ops.distributed.sequence import Layout, Run, check_length, check_offsets, checked_layout, runs
from dmattn_ops.distributed.team import Group, Team, process_group, team_of
from dmattn_ops.masks.documents import as_integers, id_pair
from dmattn_ops.masks.prepare import Documents, prepare_mask
from dmattn_ops.masks.tile_mask import TileMask

METHODS = ("all_gather", "ulysses", "ring")
MAX_KNOWN = 64  # calls whose work is remembered


@dataclass(frozen=True, eq=False, repr=False)
class ContextMask:
    """A rank's share of a mask, made by `prepare_context_mask` once and used by many layers."""

    parts: tuple[TileMask, ...]  # of each piece that the rank computes, in their order; with `one_call` one of all
    team: Team
    layout: Layout
    method: str
    sight: Sight
    spans: Spans
    one_call: bool = False  # all queries of a rank are one call, on all ranks alike

    @property
    def nbytes(self) -> int:
        """The memory that the tensors take."""
        return sum(part.nbytes for part in self.parts)

    def __repr__(self) -> str:
        lengths = f"seqlen_q={self.sight.seqlen_q}, seqlen_k={self.sight.seqlen_k}"
        kind = " and ".join(sorted({part.kind for part in self.parts})) or "empty"
        return f"ContextMask(kind={kind}, method={self.method!r}, layout={self.layout!r}, {lengths}, ranks={self.team.size})"

    @property
    def of_all_ranks(self) -> str:
        """Text of what the shares of all ranks have in common. Kinds of parts may differ, and a rank may have none."""
        made = f"method={self.method!r}, layout={self.layout!r}, one_call={self.one_call}"
        return f"ContextMask({made}, {self.sight}, {self.spans})"

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ContextMask:
        """Return the mask on another device."""
        parts = tuple(part.to(device, non_blocking) for part in self.parts)
        return replace(self, parts=parts)

    def work(self, sight: Sight, by_position: bool) -> tuple[Work, tuple[TileMask, ...]]:
        """Return what a rank computes in a call with conditions `sight`, and the mask of each piece.

        `by_position` says that where queries and keys lie decides more than what is visible, so that pieces stay apart.
        """
        work = work_of(self.method, self.sight, self.spans, self.layout, self.team)
        if not self.one_call:
            return work, self.parts
        [whole] = self.parts
        if not by_position and sight.band(0, 0).contains(self.sight.band(0, 0)):
            piece = Piece(0, 0, whole.seqlen_q, 0, 0, whole.seqlen_k, 0)
            return Work((piece,), (1,), work.exchange, one_call=True), self.parts
        is_kept = not is_compiling() and not torch.is_inference_mode_enabled()  # where no tensor is made that can train
        cut = _cut.get(self) if is_kept else None
        if cut is None:
            cut = tuple(
                whole.queries(piece.row, piece.row + piece.rows).keys(piece.column, piece.column + piece.columns)
                for piece in work.pieces
            )
            if is_kept:
                _cut[self] = cut
        return work, cut


# The parts of pieces, cut of masks of one call.
_cut: WeakKeyDictionary[ContextMask, tuple[TileMask, ...]] = WeakKeyDictionary()


class Work(NamedTuple):
    """The part of a call that a rank computes: rectangles, and for the ring how many of them belong to each step."""

    pieces: tuple[Piece, ...]
    per_step: tuple[int, ...]
    exchange: KeyExchange | None  # for all_gather
    one_call: bool = False  # one piece has all queries and all keys at hand, and its mask says all that hides keys

    def steps(self) -> tuple[tuple[Piece, ...], ...]:
        """Return the pieces of each step."""
        found, first = [], 0
        for count in self.per_step:
            found.append(self.pieces[first : first + count])
            first += count
        return tuple(found)


def prepare_context_mask(
    mask: Tensor | TileMask | None = None,
    *,
    group: Group | None,
    documents: Documents | None = None,
    cu_seqlens: Tensor | None = None,
    seqlen_q: int | None = None,
    layout: Layout = "head_tail",
    method: str = "all_gather",
    is_causal: bool = False,
    causal_from: CausalFrom = "bottom_right",
    window_size: Window = (None, None),
    read_documents: bool = False,
    device: torch.device | str | None = None,
) -> ContextMask:
    """Do this rank's share of the work of a mask once, to use it for many layers, forward and backward.

    All ranks of the group must call it, with the same shapes: what describes keys is gathered. Conditions that the call
    asks again hold as well.

    Args:
        mask: which keys to keep, of the keys that this rank holds, `[B|1, H|Hkv|1, 1, s]` or `[B|1, s]`; or what its queries see
            of all keys, `[B|1, H|Hkv|1, s, Sk]`, keys in the order of the sequence; or a `TileMask` of the whole sequence, the same
            on every rank, of which this rank's share is cut: the way for dynamic masks and intervals.
        group: the ranks that share the sequence: a process group, a mesh of one dimension, or None for the default group.
        documents: integer ids `[B|1, s]` of the positions that this rank holds, or a pair (of queries, of keys).
        cu_seqlens: instead of documents, offsets int32 `[n + 1]` of packed sequences in the whole sequence, the same on
            every rank; the batch is then 1.
        seqlen_q: the length of this rank's queries, where it is not that of its keys and no argument tells it.
        layout: how the sequence is dealt to the ranks, see `shard_sequence`.
        method: "all_gather", "ulysses" or "ring": the call that uses the mask must name the same.
        is_causal, causal_from, window_size: as in `flash_dmattn_func`, for the lengths of the whole sequence.
        read_documents: read on the host where documents end, so that only keys of documents that a rank has queries of travel;
            where an id returns after another one, nothing is read. With method "all_gather", chunks that ascend on each rank and
            no mask but padding, all queries of a rank are then one call, unless that has dropout, a bias for each pair or a
            condition that was not given here. The host waits for the GPU once where ids or offsets are on it. The numbers become
            part of a compiled graph: use it in eager mode, or where all batches have the same documents.
        device: where the mask is used; None: where its arguments are. With ids or offsets on the CPU and `device="cuda"`,
            `read_documents` does not wait for the GPU, so that the host prepares a mask while that computes the step before.
            This needs a group with a CPU backend ("cpu:gloo,cuda:nccl"), by which ids are gathered and requests compared.

    Raises:
        ValueError, TypeError: as `prepare_mask`, and for lengths that do not fit the layout.
    """
    team = team_of(group)
    documents = as_integers(documents)
    named: dict[str, Any] = {
        "mask": mask, "documents": documents, "cu_seqlens": cu_seqlens, "seqlen_q": seqlen_q, "layout": layout,
        "method": method, "is_causal": is_causal, "causal_from": causal_from, "window_size": window_size,
        "read_documents": read_documents,
    }  # fmt: skip
    asked: list[Sight] = []

    def describe() -> dict[str, str]:
        asked.append(_checked(named, team))
        _check_backend(mask, documents, group, team)
        texts = {name: agreement.text_of(argument) for name, argument in named.items()}
        return texts | {"device": "None" if device is None else torch.device(device).type}

    agreement.agreed("prepare_context_mask", group, team, describe)
    sight, layout = asked[0], named["layout"]
    source = source_of(mask, documents, cu_seqlens, team, layout, method, sight)
    spans = spans_of(sight, layout, team.size)
    ends = _read(source, sight.seqlen_k) if read_documents else None
    if ends is not None:
        spans = spans_within(ends, spans, layout, team.size)
    if device is not None:
        source = source.to(torch.device(device))
    work = work_of(method, sight, spans, layout, team)
    if ends is not None and work.exchange is not None and source.of_keys and ascends(layout, team.size):
        keep = source.mask if isinstance(source.mask, Tensor) else None
        whole = mask_of_rank(ends, keep, sight, work.exchange, source.device)
        return ContextMask((whole,), team, layout, method, sight, spans, one_call=True)
    return ContextMask(parts_of(source, sight, work.pieces), team, layout, method, sight, spans)


def _read(source: Source, seqlen: int) -> Ends | None:
    """Return where documents end, read on the host; None where there are none, or they are not one run each."""
    if source.offsets is not None:
        return read_offsets(source.offsets, seqlen)
    return None if source.documents is None else read_ends(source.documents)


def _checked(named: dict[str, Any], team: Team) -> Sight:
    """Refuse what does not fit; return the conditions on the whole sequence."""
    mask, documents, cu_seqlens, layout = (named[name] for name in ("mask", "documents", "cu_seqlens", "layout"))
    is_causal = named["is_causal"]
    conditions = is_causal, *visibility(is_causal, named["causal_from"], named["window_size"])
    validation.flags(read_documents=named["read_documents"])
    check_choice(named["method"], METHODS)
    layout = named["layout"] = checked_layout(layout, team.size)
    [seqlen_q] = [None] if named["seqlen_q"] is None else require.counts(seqlen_q=named["seqlen_q"])
    refuse_two_packings(mask, documents, cu_seqlens)
    length_q, length_k = _lengths(mask, documents, cu_seqlens, seqlen_q, team)
    check_length("the queries", length_q, layout, team.size)
    check_length("the keys", length_k, layout, team.size)
    sight = sight_of(*conditions, length_q * team.size, length_k * team.size)
    if cu_seqlens is not None:
        check_offsets(cu_seqlens, sight.seqlen_k)
        if length_q != length_k:
            raise ValueError(f"cu_seqlens needs as many queries as keys, got {length_q} and {length_k}")
    _check_sizes(mask, documents, cu_seqlens, sight, team)
    if mask is not None and named["method"] == "ulysses" and not (isinstance(mask, Tensor) and mask.dim() == 2):
        heads = mask.shape[1]
        if heads % team.size and team.size % heads:
            raise ValueError(
                f"mask must have a multiple or a divisor of the {team.size} ranks as heads with method 'ulysses', got {heads}"
            )
    return sight


def _check_sizes(
    mask: Tensor | TileMask | None, documents: Documents | None, cu_seqlens: Tensor | None, sight: Sight, team: Team
) -> None:
    """Refuse tensors that do not fit each other: a rank that computes no piece would not notice."""
    pair = () if documents is None else id_pair(documents)
    named = {"mask": mask} if isinstance(mask, Tensor) else {}
    batch = symbolic.wider(part.shape[0] for part in (*pair, *named.values())) if pair or named else 1
    for ids, whole in zip(pair, (sight.seqlen_q, sight.seqlen_k), strict=False):
        require.sizes("documents", ids, (1, batch), (whole // team.size,))
    for part in named.values():
        of_rank = part[:, None, None, :] if part.dim() == 2 else part
        per_key = is_per_key(of_rank, sight.seqlen_k, team.size)
        rows, columns = (1, sight.seqlen_k // team.size) if per_key else (sight.seqlen_q // team.size, sight.seqlen_k)
        sizes = (1, batch), (of_rank.shape[1],), (rows,), (columns,)
        require.sizes("mask", of_rank, *sizes, axes=require.AXES)
        for name, others in (("documents", pair[:1]), ("cu_seqlens", () if cu_seqlens is None else (cu_seqlens,))):
            for other in others:
                require.device(name, other, part.device, "mask")


def _check_backend(
    mask: Tensor | TileMask | None, documents: Documents | None, group: Group | None, team: Team
) -> None:
    """Refuse tensors on the CPU that the group has no backend to gather."""
    gathered = [*((mask,) if isinstance(mask, Tensor) else ()), *(() if documents is None else id_pair(documents))]
    on_cpu = team.size > 1 and any(part.device.type == "cpu" for part in gathered)
    if on_cpu and not is_compiling() and not agreement.has_cpu_backend(process_group(group)):
        raise ValueError(
            "documents and masks on the CPU need a group with a CPU backend, got one without: initialise it with"
            ' init_process_group("cpu:gloo,cuda:nccl")'
        )


def check_choice(method: str, choices: tuple[str, ...]) -> None:
    """Refuse a method that there is not."""
    if method not in choices:
        raise ValueError(f"method must be one of {', '.join(map(repr, choices))}, got {method!r}")


def refuse_two_packings(mask: Any, documents: Documents | None, cu_seqlens: Tensor | None) -> None:
    """Refuse documents beside offsets, and either beside what is cut already."""
    if documents is not None and cu_seqlens is not None:
        raise ValueError("documents and cu_seqlens say the same: give one of them")
    if isinstance(mask, TileMask) and (documents is not None or cu_seqlens is not None):
        raise ValueError("documents stand beside a TileMask: fold them into it with prepare_mask(documents=...)")


def work_of(method: str, sight: Sight, spans: Spans, layout: Layout, team: Team, *, by_place: bool = False) -> Work:
    """Return the pieces that this rank computes, given the keys that each run of queries of each rank may see.

    `by_place` says that only where queries and keys lie decides what is visible, so that a ring may join pieces. In eager mode the
    work of the last calls is remembered: it takes milliseconds to find where there are many ranks.
    """
    if symbolic.are_numbers(sight.seqlen_q, sight.seqlen_k):
        return _known_work(method, sight, spans, layout, team, by_place)
    return _work_of(method, sight, spans, layout, team, by_place)  # a tracer's symbols have no hash


def _work_of(method: str, sight: Sight, spans: Spans, layout: Layout, team: Team, by_place: bool) -> Work:
    if method == "ulysses":
        return Work((Piece(0, 0, sight.seqlen_q, 0, 0, sight.seqlen_k, 0),), (1,), None)
    own = runs(layout, team.size, team.rank, sight.seqlen_q // team.size)
    if method == "all_gather":
        exchange = exchange_of(team, layout, sight.seqlen_k, spans)
        pieces = []
        for number, (run, (first, stop)) in enumerate(zip(own, spans[team.rank], strict=True)):
            place = exchange.place(first) if first < stop else 0
            pieces.append(Piece(number, run.local, run.length, run.origin, place, stop - first, first))
        return Work(tuple(pieces), (len(pieces),), exchange)
    of_keys = [runs(layout, team.size, rank, sight.seqlen_k // team.size) for rank in range(team.size)]
    steps = []
    for step in range(_last_step(spans, of_keys) + 1):
        theirs = of_keys[(team.rank - step) % team.size]
        pieces = _ring_step(own, spans[team.rank], theirs)
        steps.append(in_one_piece(pieces, sight, own, theirs) if by_place else pieces)
    return Work(tuple(piece for step in steps for piece in step), tuple(len(step) for step in steps), None)


_known_work = lru_cache(MAX_KNOWN)(_work_of)


def _last_step(spans: Spans, of_keys: list[tuple[Run, ...]]) -> int:
    """Return the last step of a ring in which some rank sees keys of the rank so many places before it."""
    size = len(spans)
    return max(
        (rank - owner) % size
        for rank, owner in product(range(size), repeat=2)
        if rank == owner or _sees(spans[rank], of_keys[owner])
    )


def _sees(spans: tuple[Span, ...], theirs: tuple[Run, ...]) -> bool:
    return any(max(first, run.origin) < min(stop, run.origin + run.length) for first, stop in spans for run in theirs)


def _ring_step(own: tuple[Run, ...], spans: tuple[Span, ...], theirs: tuple[Run, ...]) -> list[Piece]:
    """Return the pieces of the runs of this rank's queries, which may see such spans, with the keys of a rank."""
    found = []
    for number, (run, (first, stop)) in enumerate(zip(own, spans, strict=True)):
        for of_keys in theirs:
            low, high = max(first, of_keys.origin), min(stop, of_keys.origin + of_keys.length)
            if low < high:
                column = of_keys.local + low - of_keys.origin
                found.append(Piece(number, run.local, run.length, run.origin, column, high - low, low))
    return found


def in_one_piece(pieces: list[Piece], sight: Sight, own: tuple[Run, ...], theirs: tuple[Run, ...]) -> list[Piece]:
    """Return one piece instead of several of a step of a ring, where its band shows the same; else these.

    A rank's runs lie behind each other, as if nothing were between them. A causal band over them shows the same where what
    lies between makes no difference: with layout "head_tail", in every step.
    """
    if len(pieces) < 2 or not sight.is_causal or sight.window != (None, None):
        return pieces
    row, column = min(piece.row for piece in pieces), min(piece.column for piece in pieces)
    rows = max(piece.row + piece.rows for piece in pieces) - row
    columns = max(piece.column + piece.columns for piece in pieces) - column
    covered = [
        [run for run in of_side if first <= run.local and run.local + run.length <= first + length]
        for of_side, first, length in ((own, row, rows), (theirs, column, columns))
    ]
    if [sum(run.length for run in of_side) for of_side in covered] != [rows, columns]:
        return pieces  # a piece ends inside a run
    query, key = covered[0][0].origin, covered[1][0].origin
    for of_queries in covered[0]:
        for of_keys in covered[1]:
            # query i of the run sees its keys up to i + seen
            seen = sight.diagonal + of_queries.origin - of_keys.origin
            by_one = sight.diagonal + query - key + (of_queries.local - row) - (of_keys.local - column)
            least, most = -of_queries.length, of_keys.length - 1  # nothing is visible, and everything
            if min(max(seen, least), most) != min(max(by_one, least), most):
                return pieces
    return [Piece(pieces[0].run, row, rows, query, column, columns, key)]


def parts_of(source: Source, sight: Sight, pieces: tuple[Piece, ...]) -> tuple[TileMask, ...]:
    """Return the mask of each piece, with the band folded in."""
    ids = source.ids(sight.seqlen_k)
    return tuple(_part(source.mask, ids, sight, piece) for piece in pieces)


def _part(mask: Tensor | TileMask | None, ids: tuple[Tensor, Tensor] | None, sight: Sight, piece: Piece) -> TileMask:
    queries, keys = (piece.query, piece.query + piece.rows), (piece.key, piece.key + piece.columns)
    if isinstance(mask, TileMask):
        if queries != (0, mask.seqlen_q):
            mask = mask.queries(*queries)
        if keys != (0, mask.seqlen_k):
            mask = mask.keys(*keys)
        return mask.also(sight.band(piece.query, piece.key))
    if mask is not None:
        rows = slice(None) if mask.shape[2] == 1 else slice(piece.row, piece.row + piece.rows)
        mask = mask[:, :, rows, slice(*keys)]
    documents = None
    if ids is not None:
        documents = ids[0][:, slice(*queries)], ids[1][:, slice(*keys)]
    known = documents is not None or (mask is not None and mask.shape[2] != 1)
    return prepare_mask(
        mask,
        documents=documents,
        seqlen_q=None if known else piece.rows,
        is_causal=sight.is_causal,
        causal_from=sight.diagonal + piece.query - piece.key,
        window_size=sight.window,
    )


def _lengths(
    mask: Tensor | TileMask | None,
    documents: Documents | None,
    cu_seqlens: Tensor | None,
    seqlen_q: int | None,
    team: Team,
) -> tuple[int, int]:
    """Return the numbers of queries and of keys that this rank holds."""
    if isinstance(mask, TileMask):
        for name, length in (("queries", mask.seqlen_q), ("keys", mask.seqlen_k)):
            if length % team.size:
                raise ValueError(f"mask must have a multiple of {team.size} ranks as {name}, got {length}")
        return mask.seqlen_q // team.size, mask.seqlen_k // team.size
    if isinstance(mask, Tensor):
        validation.keep_mask(mask)
        if mask.dim() not in (2, 4):
            raise ValueError(
                "mask must have shape (B|1, H|Hkv|1, 1, s), (B|1, s) or (B|1, H|Hkv|1, s, Sk), got "
                + require.text(mask.shape)
            )
    elif mask is not None:
        raise TypeError(f"mask must be a tensor or a TileMask, got {require.type_text(mask)}")
    if documents is not None:
        of_queries, of_keys = id_pair(documents)
        return of_queries.shape[1], of_keys.shape[1]
    if isinstance(mask, Tensor):
        one_query = mask.dim() == 4 and mask.shape[3] == team.size and seqlen_q in (None, 1)  # else they are keys
        if mask.dim() == 4 and (mask.shape[2] != 1 or one_query):
            return mask.shape[2], mask.shape[3] // team.size
        length = mask.shape[-1]
        return (length if seqlen_q is None else seqlen_q), length
    if cu_seqlens is not None and seqlen_q is not None:
        return seqlen_q, seqlen_q
    raise ValueError(
        "prepare_context_mask needs a mask or documents, or cu_seqlens with seqlen_q; causal and window conditions alone"
        " need no mask"
    )
