"""`KeptKeys`: the keys that a causal dynamic mask can still show, in memory whose size does not depend on the text.

Letters: `B` batch, `H` query heads, `Hkv` key and value heads, `D` head dimension of query and key, `Dv` of value, `N` slots,
`n` positions of one call.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dmattn_ops.api import arguments
from dmattn_ops.api.functions import flash_dmattn_func
from dmattn_ops.bands import NO_BAND, Band
from dmattn_ops.checks import require, validation, values
from dmattn_ops.generation.checks import Keywords, check_inputs, checked_options
from dmattn_ops.masks.documents import as_integers
from dmattn_ops.masks.kept import NEVER, UNNAMED, Known, Rule, Stored, Token
from dmattn_ops.masks.tile_mask import from_intervals

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it since Python 3.11

_ROUND_TO = 16  # slots


class KeptKeys:
    """An exact key/value cache of constant size, for generation under a causal `dynamic_mask`.

    A key that has left the `keep` best of its prefix can never return, because later keys only add competitors. So
    `keep + keep_first + keep_last` keys of each head are all that a query can ever see, however long the text is. `attend` returns
    what `flash_dmattn_func` would return for its queries over the whole sequence with the whole mask. All tensors keep their
    sizes and addresses, and nothing is read on the host, so that steps can be compiled and captured in CUDA graphs.

    Args:
        batch: `B`, how many sequences.
        kv_heads: `Hkv`.
        head_dim: `D`.
        keep: how many of the best keys a query sees.
        keep_first: how many keys at the start of its document a query sees in any case.
        keep_last: how many keys, up to its own, a query sees in any case.
        value_dim: `Dv`; None is `head_dim`.
        dtype: of keys and values.
        device: where the tensors lie; None is torch's default.
        rollback: how many positions `crop` can take back (speculative decoding): that many more keys are stored.

    Attributes:
        length: int64 `[B]`, how many positions each sequence has, padding not counted.
        slots: `N`, how many keys of each head have room.
        nbytes: how many bytes the tensors take.
    """

    bias: Tensor | None
    document: Tensor | None
    trail: Tensor | None

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        head_dim: int,
        keep: int,
        *,
        keep_first: int = 0,
        keep_last: int = 0,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | int | None = None,
        rollback: int = 0,
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        named = {"keep": keep, "keep_first": keep_first, "keep_last": keep_last, "batch": batch, "kv_heads": kv_heads}
        sizes = require.lengths(**named, head_dim=head_dim, value_dim=value_dim, rollback=rollback)
        self.keep, self.keep_first, self.keep_last, self.batch, self.kv_heads = sizes[:5]
        self.head_dim, self.value_dim, self.rollback = sizes[5:]
        for name in ("kv_heads", "head_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {require.type_text(dtype)}")
        if dtype not in validation.DTYPES:
            raise TypeError(f"dtype must be {' or '.join(map(str, validation.DTYPES))}, got {dtype}")
        most = self.keep + self.keep_first + self.keep_last + self._stored_back
        self.slots = -(-most // _ROUND_TO) * _ROUND_TO
        rows = (self.batch, self.kv_heads)
        with lasting():
            self.key = torch.zeros(*rows, self.slots, self.head_dim, dtype=dtype, device=device)
            self.value = torch.zeros(*rows, self.slots, self.value_dim, dtype=dtype, device=device)
            self.scores = torch.zeros(*rows, self.slots, device=device, dtype=torch.float32)
            self.places = torch.full((*rows, 4, self.slots), -1, device=device)  # what `Known` holds beside the scores
            self.length = torch.zeros(self.batch, dtype=torch.int64, device=device)
            self.floor = torch.zeros_like(self.length)  # the shortest length that `crop` can go back to
            self.first = torch.full_like(self.length, NEVER)  # where the first key of the document stands
            self.arrived = torch.zeros_like(self.length, dtype=torch.int32)  # a step counts in it, and leaves zeros
        # Room that is made when they are given; `masks.kept.Stored` says what all tensors hold.
        self.bias = self.document = self.trail = None
        self.bias_heads = 0
        self._keep_addresses()

    @property
    def dtype(self) -> torch.dtype:
        """That of keys and values."""
        return self.key.dtype

    @property
    def device(self) -> torch.device:
        """Where the cache lies."""
        return self.key.device

    @property
    def nbytes(self) -> int:
        """How many bytes the tensors take."""
        return sum(part.nbytes for part in self._state().values())

    @overload
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scores: Tensor, bias: Tensor | None = ...,
        *, return_lse: Literal[False] = ..., return_max: Literal[False] = ..., **keywords: Unpack[Keywords],
    ) -> Tensor: ...  # fmt: skip
    @overload
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scores: Tensor, bias: Tensor | None = ...,
        *, return_lse: bool = ..., return_max: bool = ..., **keywords: Unpack[Keywords],
    ) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scores: Tensor,
        bias: Tensor | None = None,
        *,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        softmax_scale: float | None = None,
        softcap: float = 0,
        sink: Tensor | None = None,
        return_lse: bool = False,
        return_max: bool = False,
        batch_invariant: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the attention of the next `n` positions, whose keys are stored; `n = 1` is a step of generation.

        Args:
            query: with shape `[B, n, H, D]` and the dtype of the cache.
            key: with shape `[B, n, Hkv, D]`.
            value: with shape `[B, n, Hkv, Dv]`.
            scores: with shape `[B|1, Hkv|1, n]`, any floating dtype: what each key is worth (see `dynamic_mask`).
            bias: with shape `[B|1, H|Hkv|1, 1, n]`, added to the scores of attention, and stored with its keys. Room for it is made
                at the first call that has one; later calls need as many heads, and 0 is stored where they have none.
            padding: bool or integer `[B|1, n]`, False or 0 for what is no position. The results are those of the sequence without
                it; its own rows of out are 0, of lse and the maximum -inf.
            documents: integer or bool ids `[B|1, n]`: an id other than the one before begins a document, which sees no earlier
                keys. Calls without ids go on with the document.
            softmax_scale, softcap, sink, return_lse, return_max: as in `flash_dmattn_func`.
            batch_invariant: whether the bits of a sequence's results must not depend on the others of the batch.

        Returns:
            out with shape `[B, n, H, Dv]`; with `return_lse` then lse, and with `return_max` then the largest score of each row,
            with shape `[B, H, n]`. There are no gradients.

        Raises:
            ValueError: for shapes, devices and values that do not fit; the cache is then as it was.
            TypeError: for types and dtypes.
            NotImplementedError: where no kernel takes the call.
        """
        options: dict[str, Any] = {"softmax_scale": softmax_scale, "softcap": softcap, "sink": sink}
        options |= {"return_lse": return_lse, "return_max": return_max, "batch_invariant": batch_invariant}
        return self.attend_beside((query, key, value, scores, bias), padding, documents, False, options)

    @torch.no_grad()
    def attend_beside(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
        padding: Tensor | None,
        documents: Tensor | None,
        padding_counts: bool,
        options: dict[str, Any],
    ) -> Tensor | tuple[Tensor, ...]:
        """Do the work of `attend`. With `padding_counts`, padding takes a position and is no key, as in `DynamicMaskAttention`."""
        *inputs, scores, bias = tensors
        named = dict(zip(("query", "key", "value"), inputs, strict=True))
        (query, key, value), bias, sink = arguments.prepared_inputs(4, bias, options.get("sink"), **named)
        documents = as_integers(documents)
        check_inputs(self, query, key, value, scores, bias, sink, padding, documents)
        options = checked_options(**options) | {"sink": sink}
        stored_key, stored_value = self.key.transpose(1, 2), self.value.transpose(1, 2)
        new_positions = query.shape[1]
        if new_positions == 0:
            return flash_dmattn_func(query, stored_key, stored_value, **options)
        self._make_room(scores, bias, documents)
        rule = Rule(self.keep, self.keep_first, self.keep_last, self.rollback, padding_counts)
        token = Token(key, value, scores, bias, padding, documents)
        if new_positions == 1:
            seen = torch.ops.dmattn.keep_step(*self._stored(), *token, *rule)
            return self._attention(query, stored_key, stored_value, seen, self.bias, NO_BAND, options)
        ends, keys, values, biases = torch.ops.dmattn.keep_chunk(*self._stored(), *token, *rule)
        given = None if self.bias is None else biases
        out = self._attention(query, keys, values, ends, given, Band(hi=self.slots), options)
        if padding is None or padding_counts:
            return out
        return blank(out, padding != 0)

    def reset(self) -> None:
        """Forget all keys."""
        self.places.fill_(-1)
        for part, start in ((self.length, 0), (self.floor, 0), (self.first, NEVER)):
            part.fill_(start)
        if self.document is not None and self.trail is not None:
            self.document.fill_(UNNAMED)
            self.trail.copy_(torch.stack([self.first, self.document], -1)[:, None])

    @torch.no_grad()
    def reorder(self, index: Tensor) -> None:
        """Let each sequence go on from that of an `index`, integers `[B]`, as beam search does."""
        validation.dense(index=index)
        require.dtype("index", index, torch.int32, torch.int64)
        require.shape("index", index, (self.batch,))
        require.device("index", index, self.device, "the cache")
        if values.on_the_host(index) and bool(((index < 0) | (index >= self.batch)).any()):
            raise ValueError(f"index must have numbers from 0 to {self.batch - 1}, got {index.tolist()}")
        for part in self._state().values():
            part.copy_(part.index_select(0, index))

    @torch.no_grad()
    def crop(self, count: int | Tensor) -> None:
        """Take back the last `count` positions of each sequence, an int or integers `[B]`: at most `rollback` in all.

        Keys that these positions had displaced are among the best again. What was taken back counts against `rollback` until as
        many new positions have come.

        Raises:
            ValueError: for an int beyond `rollback`; on the CPU also for a sequence that is too short, or whose last positions were
                taken back already. On a GPU, where no values are read, such a count becomes the largest possible one.
            TypeError: for what is neither an int nor a tensor of integers.
        """
        if isinstance(count, Tensor):
            validation.dense(count=count)
            require.dtype("count", count, *validation.INTEGERS)
            if count.dim() == 0:
                raise TypeError("count must be an int or integers [B], got a tensor without dimensions")
            require.shape("count", count, (self.batch,))
            require.device("count", count, self.device, "the cache")
        else:
            [count] = require.counts(count=count)
            if count > self.rollback:
                raise ValueError(f"count must be at most rollback, {self.rollback}, got {require.number_text(count)}")
        possible = self.length - self.floor
        wanted = count.long() if isinstance(count, Tensor) else torch.full_like(possible, count)
        if values.on_the_host(wanted) and bool(((wanted < 0) | (wanted > possible)).any()):
            got = wanted.tolist() if isinstance(count, Tensor) else count
            raise ValueError(f"count must be from 0 to what can be taken back, {possible.tolist()}, got {got}")
        length = self.length - wanted.clamp(min=0).minimum(possible)
        after = length.view(-1, 1, 1)
        known = self._known()
        gone = known.position >= after
        outranked_, ended = (torch.where(part >= after, NEVER, part) for part in (known.outranked, known.ended))
        undone = torch.stack([known.position, outranked_, known.protected, ended], 2)
        self.places.copy_(torch.where(gone.unsqueeze(2), -1, undone))
        first = self.first
        if self.document is not None and self.trail is not None:
            index = (length % self.trail.shape[1]).view(-1, 1, 1).expand(-1, 1, 2)
            first, document = self.trail.gather(1, index).squeeze(1).unbind(-1)
            self.document.copy_(document)
        self.first.copy_(torch.where(first >= length, NEVER, first))
        self.length.copy_(length)

    def to(self, device: Any = None, dtype: torch.dtype | None = None, *, non_blocking: bool = False) -> KeptKeys:
        """Return the cache on another device, or with keys and values of another dtype; itself where nothing changes."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        if dtype is not None and dtype not in validation.DTYPES:
            raise TypeError(f"dtype must be {' or '.join(map(str, validation.DTYPES))}, got {dtype}")
        moved, changed = copy.copy(self), False
        for name, part in self._state().items():
            own = dtype if name in ("key", "value") or (name == "bias" and part.dtype == self.dtype) else None
            part_there = part.to(device=device, dtype=own, non_blocking=non_blocking)
            changed |= part_there is not part
            setattr(moved, name, part_there)
        if not changed:
            return self
        for name, part in self._state().items():  # no tensor is shared: attending changes them
            if getattr(moved, name) is part:
                setattr(moved, name, part.clone())
        moved._keep_addresses()
        return moved

    def __repr__(self) -> str:
        return (
            f"KeptKeys({self.batch}, {self.kv_heads}, {self.head_dim}, {self.keep}, keep_first={self.keep_first},"
            f" keep_last={self.keep_last}, value_dim={self.value_dim}, dtype={self.dtype}, device={str(self.device)!r},"
            f" rollback={self.rollback})"
        )

    @property
    def _stored_back(self) -> int:
        return max(1, self.rollback)

    def _stored(self) -> Stored:
        return Stored._make(getattr(self, name) for name in Stored._fields)

    def _state(self) -> dict[str, Tensor]:
        """Return every tensor by its name, all with the batch first, but for those that are not needed yet."""
        return {name: part for name, part in self._stored()._asdict().items() if part is not None}

    def _known(self) -> Known:
        return Known(self.scores, *self.places.unbind(2))

    def _keep_addresses(self) -> None:
        """Tell compilers that the tensors stay where they are, so that they capture CUDA graphs which write them."""
        if self.device.type == "cuda" and not is_compiling():
            for part in self._state().values():
                torch._dynamo.mark_static_address(part, guard=False)

    def _make_room(self, scores: Tensor, bias: Tensor | None, documents: Tensor | None) -> None:
        """Make room for what is given for the first time: scores of float64, biases, ids of documents."""
        before = len(self._state()), self.scores.dtype
        with lasting():
            if scores.dtype == torch.float64 and self.scores.dtype != torch.float64:
                self.scores = self.scores.double()
            if bias is not None and self.bias is None:
                self.bias_heads = bias.shape[1]
                heads = max(self.bias_heads, self.kv_heads)
                self.bias = torch.zeros(self.batch, heads, self.slots, dtype=bias.dtype, device=self.device)
            if documents is not None and self.document is None:
                self.document = torch.full_like(self.length, UNNAMED)
                state = torch.stack([self.first, self.document], -1)
                self.trail = state[:, None].repeat(1, self.rollback + 1, 1)
        if before != (len(self._state()), self.scores.dtype):
            self._keep_addresses()

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        end: Tensor,
        bias: Tensor | None,
        band: Band,
        options: dict[str, Any],
    ) -> Any:
        """Return the attention of queries to keys seen before the query `end`, int32 `[B, Hkv, keys]`, inside a band."""
        most = self.keep + self.keep_first + self.keep_last
        mask = from_intervals((None, end), None, most, query.shape[1], band)
        return flash_dmattn_func(query, key, value, mask, None if bias is None else bias.unsqueeze(2), **options)


def blank(results: Any, counted: Tensor) -> Any:
    """Return results whose rows that are not counted, bool `[B|1, n]`, are empty: out 0, lse and the maximum -inf."""
    if isinstance(results, Tensor):
        return torch.where(counted[:, :, None, None], results, 0)
    out, *statistics = results
    statistics = [torch.where(counted[:, None], part, -torch.inf) for part in statistics]
    return torch.where(counted[:, :, None, None], out, 0), *statistics


def lasting() -> AbstractContextManager[Any]:
    """Return a context that makes tensors which can be changed inside and outside of inference mode."""
    return nullcontext() if is_compiling() else torch.inference_mode(False)
