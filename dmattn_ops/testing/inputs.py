"""The tensors of a problem, in the memory layouts that callers have."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from dmattn_ops.testing.combinations import Random
from dmattn_ops.testing.problem import DTYPES, Problem

_FAR = (1 << 31) + 64  # elements
MASK_DTYPES = {"bool": torch.bool, "uint8": torch.uint8, "int32": torch.int32, "int64": torch.int64}
ALL = slice(None)


@dataclass
class Part:
    """One sequence of a varlen problem, or a whole dense one: where it lies, and which keys its queries see."""

    queries: tuple  # index into query and out, giving [B, Sq, heads, D]
    keys: tuple
    bias: tuple  # index into bias, giving [B, heads, Sq or 1, Sk]
    queries_4d: tuple  # the same where a leading dimension of 1 was added
    keys_4d: tuple
    batch: slice
    keep: Tensor  # [B, H, Sq, Sk]


@dataclass
class Inputs:
    """The tensors as the caller passes them, and the parts that the oracle computes one by one."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    bias: Tensor | None
    documents: Tensor | None
    intervals: list[Tensor]  # start and end, and what is hidden, int32 [B|1, heads, Sk]
    sink: Tensor | None
    grad_out: Tensor
    grad_lse: Tensor
    parts: list[Part]
    joined: tuple[int, int] = (0, 0)  # dimensions of out and lse along which parts are joined
    offsets: tuple[Tensor, Tensor] | None = None
    at_most: int | None = None  # of a problem that promises it: the most keys of a head that a query sees
    used: Tensor | None = None  # how many keys of each batch entry are used, int32 [B]


def per_query_head(tensor: Tensor, heads: int) -> Tensor:
    """Repeat the Hkv heads of `[B, Hkv, ...]` to the query heads that read them."""
    size = tensor.shape[1]
    return tensor.repeat_interleave(heads // size, 1) if size not in (1, heads) else tensor


def band_keep(problem: Problem, seqlen_q: int, seqlen_k: int, used: int | None = None) -> Tensor:
    """Return the `[Sq, Sk]` bool tensor of the causal and window conditions, from their definition.

    They are aligned with the last of the keys, or of the first `used` ones.
    """
    offset = (seqlen_k if used is None else used) - seqlen_q if problem.causal_from == "bottom_right" else 0
    i = torch.arange(seqlen_q)[:, None] + offset
    j = torch.arange(seqlen_k)[None, :]
    keep = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if problem.is_causal:
        keep &= j <= i
    if problem.left is not None:
        keep &= j >= i - problem.left
    if problem.right is not None:
        keep &= j <= i + problem.right
    return keep


def _used_keep(problem: Problem, used: Tensor) -> Tensor:
    """Return the `[B, 1, Sq, Sk]` bool tensor of the conditions of a call of which a part of the keys is used."""
    shown = []
    for number in used.tolist():
        keep = band_keep(problem, problem.seqlen_q, problem.seqlen_k, number)
        if folds_band(problem) and is_prepared(problem):
            keep = keep & band_keep(problem, problem.seqlen_q, problem.seqlen_k)
        shown.append(keep & (torch.arange(problem.seqlen_k) < number))
    return (
        torch.stack(shown)[:, None] if shown else torch.ones(0, 1, problem.seqlen_q, problem.seqlen_k, dtype=torch.bool)
    )


def _draw_mask(problem: Problem, shape: tuple[int, ...], random: Random) -> Tensor:
    """Draw a bool mask of `shape` (the last two dimensions are queries and keys) of the problem's kind."""
    generator = random.generator
    if problem.mask == "none":
        return torch.zeros(shape, dtype=torch.bool)
    if problem.mask == "block":
        rows, cols = -(-shape[-2] // 128), -(-shape[-1] // 128)
        blocks = torch.rand((*shape[:-2], rows, cols), generator=generator) < 0.4
        return blocks.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., : shape[-2], : shape[-1]].contiguous()
    keep = torch.rand(shape, generator=generator) < random.of(0.02, 0.1, 0.5, 0.9)
    if problem.mask == "rows":
        keep &= torch.rand((*shape[:-1], 1), generator=generator) < 0.7
    if problem.mask == "keys":
        keep &= torch.rand((*shape[:-2], 1, shape[-1]), generator=generator) < 0.5
    return keep


def _draw_intervals(problem: Problem, heads: int, random: Random) -> list[Tensor]:
    """Draw start and end of the queries that see each key `[B|1, heads, Sk]`, and those of hidden ones where asked for."""
    shape = (problem.batch if "b" in problem.intervals_shape else 1, heads, problem.seqlen_k)

    def ends() -> list[Tensor]:
        drawn = torch.randint(-3, problem.seqlen_q + 4, (2, *shape), generator=random.generator, dtype=torch.int32)
        return [drawn.amin(0), drawn.amax(0)] if random.chance(0.7) else list(drawn)

    if problem.intervals == "lives":
        start = torch.arange(problem.seqlen_k, dtype=torch.int32).expand(shape).contiguous()
        longest = random.of(1, 20, 100, max(problem.seqlen_q, 1))
        return [start, start + torch.randint(0, longest, shape, generator=random.generator, dtype=torch.int32)]
    if problem.intervals == "ends":
        start = torch.zeros(shape, dtype=torch.int32)
        return [start, torch.randint(-3, problem.seqlen_q + 4, shape, generator=random.generator, dtype=torch.int32)]
    if problem.intervals == "hidden":
        shown, hidden = ends(), ends()
        if Random(-2000 - problem.seed).chance(0.5):  # the same queries from all keys: from whole tiles
            hidden = [part[..., :1].expand(shape).contiguous() for part in hidden]
        return shown + hidden
    return ends()


def intervals_keep(ends: list[Tensor], seqlen_q: int) -> Tensor:
    """Return the `[B|1, heads, Sq, Sk]` bool tensor of intervals, from their definition."""
    i = torch.arange(seqlen_q, device=ends[0].device)[:, None]
    inside = [
        (i >= low[..., None, :]) & (i < high[..., None, :]) for low, high in zip(ends[::2], ends[1::2], strict=True)
    ]
    return inside[0] & ~inside[1] if len(inside) == 2 else inside[0]


def folds_band(problem: Problem) -> bool:
    """Return whether a prepared mask takes the band of its problem in, so that the call adds what the mask has already."""
    return problem.seed % 2 == 1


def is_prepared(problem: Problem) -> bool:
    """Return whether a problem prepares its mask."""
    return bool(problem.documents or problem.intervals or (problem.prepared and problem.mask))


def _promised(problem: Problem, ends: list[Tensor]) -> int | None:
    """Return the most keys of a head that a query sees of intervals on the CPU, where the problem gives that promise.

    It is read here and not where the mask is prepared: that may happen in a captured graph, which refuses to wait for a number.
    """
    if not ends or not problem.promise:
        return None
    keep = intervals_keep(ends, problem.seqlen_q)
    if folds_band(problem):
        keep = keep & band_keep(problem, problem.seqlen_q, problem.seqlen_k)
    return int(keep.sum(-1).max()) if keep.numel() else 0


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Return the values of a `[B, S, H, D]` tensor in another memory layout, with NaN in the memory between them."""
    if layout == "bhsd":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        batch, seqlen, heads, dim = tensor.shape
        buffer = tensor.new_full((batch, seqlen + 2, heads + 1, dim + 5), float("nan"))
        buffer[:, 1 : seqlen + 1, :heads, 3 : dim + 3] = tensor
        return buffer[:, 1 : seqlen + 1, :heads, 3 : dim + 3]
    if layout == "strided":
        buffer = tensor.new_full((*tensor.shape, 2), float("nan"))
        buffer[..., 0] = tensor
        return buffer[..., 0]
    if layout == "expanded":  # every head is the first: a stride of 0
        return tensor[:, :, :1].expand_as(tensor)
    return tensor


def placed(tensor: Tensor, rows: str) -> Tensor:
    """Return keys or values `[B, S, heads, D]` whose rows share memory ("one", "overlapping": other values) or lie far apart."""
    _, seqlen, heads, dim = tensor.shape
    if tensor.numel() == 0:
        return tensor
    if rows == "one":
        return tensor[:, :1].expand_as(tensor)
    if rows == "overlapping":  # each begins 8 elements after the one before it, or what it takes to fit
        step = min(8, dim)
        return tensor.contiguous().flatten().as_strided(tensor.shape, (seqlen * heads * step, heads * step, step, 1))
    if rows == "far":
        spread = next((axis for axis in (1, 0, 2) if tensor.shape[axis] > 1), 1)
        together = tensor.narrow(spread, 0, 1).contiguous()  # what lies at one place
        distance = max(_FAR // max(1, tensor.shape[spread] - 1), together.numel()) // 64 * 64 + 64
        strides = [*together.stride()]
        strides[spread] = distance
        elements = (tensor.shape[spread] - 1) * distance + together.numel()
        return _sparse(elements, tensor).as_strided(tensor.shape, strides).copy_(tensor)
    return tensor


def _sparse(elements: int, like: Tensor) -> Tensor:
    """Return a flat tensor; on a CPU a sparse file, of which only what is written takes room."""
    if like.device.type != "cpu":
        return torch.empty(elements, dtype=like.dtype, device=like.device)
    with tempfile.NamedTemporaryFile() as file:
        return torch.from_file(file.name, shared=True, size=elements, dtype=like.dtype)


def _seen(keep: Tensor, extent: tuple[int, ...], heads: int) -> Tensor:
    """Return the elements of a broadcast tensor of `extent` that any query sees."""
    if extent[1] not in (1, heads):
        keep = keep.unflatten(1, (extent[1], -1)).any(2)
    for dim, size in enumerate(extent):
        if size == 1 and keep.shape[dim] != 1:
            keep = keep.any(dim, keepdim=True)
    return keep


class _Normal:
    """Draws normal tensors in float64 and rounds them to the problem's dtype."""

    def __init__(self, problem: Problem, random: Random, device: str) -> None:
        self.dtype, self.generator, self.device = DTYPES[problem.dtype], random.generator, device
        self.wide = torch.float64 if self.dtype == torch.float64 else torch.float32

    def __call__(self, *shape: int, scale: float = 1.0, wide: bool = False) -> Tensor:
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale
        return values.to(self.wide if wide else self.dtype).to(self.device)


def poisoned(problem: Problem, inputs: Inputs) -> Inputs:
    """Write what `call.poison` says, in place, into everything that is hidden; return the inputs.

    That are keys that no query of their batch entry and head group sees with their values, queries that see no key with what
    arrives for their results, and elements of the bias that nobody sees.
    """
    if not problem.poison:
        return inputs
    poison = float(problem.poison)
    for part in inputs.parts:
        no_key = ~part.keep.any(-1)
        no_query = unseen_keys(problem, part).transpose(1, 2)[..., None]
        for tensor in (inputs.query, inputs.grad_out):
            tensor[part.queries].masked_fill_(no_key.transpose(1, 2)[..., None], poison)
        statistic = inputs.grad_lse if len(part.queries) == 1 else inputs.grad_lse[None, :, part.queries[1]]
        statistic.masked_fill_(no_key, poison)
        for tensor in (inputs.key, inputs.value):
            tensor[part.keys].masked_fill_(no_query, poison)
    if inputs.bias is not None:
        inputs.bias.masked_fill_(hidden_bias(problem, inputs, inputs.bias), poison)
    return inputs


def hidden_bias(problem: Problem, inputs: Inputs, bias: Tensor) -> Tensor:
    """Return the elements of the bias that no query sees."""
    hidden = torch.ones_like(bias, dtype=torch.bool)
    for part in inputs.parts:
        of_part = hidden[part.bias]
        of_part &= ~_seen(part.keep, tuple(of_part.shape), problem.heads)
    return hidden


def unseen_keys(problem: Problem, part: Part) -> Tensor:
    """Return the keys `[B, Hkv, Sk]` that no query of their batch entry and head group sees."""
    return ~part.keep.any(2).unflatten(1, (problem.heads_k, -1)).any(2)


def _as_mask(keep: Tensor, problem: Problem, device: str) -> Tensor:
    mask = keep.to(MASK_DTYPES[problem.mask_dtype]).to(device)
    return mask * -3 if problem.mask_dtype == "int32" else mask  # any non-zero value keeps


def make_inputs(problem: Problem, device: str) -> Inputs:
    """Make the tensors of a dense or packed problem on `device`."""
    random = Random(problem.seed + 1)
    normal = _Normal(problem, random, device)
    batch, sq, sk = problem.batch, problem.seqlen_q, problem.seqlen_k

    def extent(shape: str) -> tuple[int, int, int, int]:
        heads = problem.heads if "h" in shape else problem.heads_k if "k" in shape else 1
        return batch if "b" in shape else 1, heads, sq if "q" in shape else 1, sk

    query = normal(batch, sq, problem.heads, problem.dim, scale=problem.magnitude * problem.steep)
    key = normal(batch, sk, problem.heads_k, problem.dim, scale=problem.magnitude)
    value = normal(batch, sk, problem.heads_k, problem.dim_v, scale=problem.magnitude)
    used = None
    if problem.used:
        used = torch.randint(sk + 1, (batch,), generator=Random(-problem.seed).generator, dtype=torch.int32)
    band = band_keep(problem, sq, sk) if used is None else _used_keep(problem, used)
    keep = band.expand(batch, problem.heads, sq, sk).clone()
    mask = documents = bias = None
    if problem.mask:
        drawn = _draw_mask(problem, extent(problem.mask_shape), random)
        keep &= per_query_head(drawn, problem.heads)
        mask = _as_mask(drawn, problem, device)
    if problem.documents:
        ids = torch.randint(-2, 2 + random.below(4), (batch, sq), generator=random.generator)
        ids = ids.sort(-1).values if random.chance(0.6) else ids
        keep &= (ids[:, None, :, None] == ids[:, None, None, :]).expand_as(keep)
        documents = ids.to(device)
    ends: list[Tensor] = []
    if problem.intervals:
        ends = _draw_intervals(problem, extent(problem.intervals_shape)[1], random)
        keep &= per_query_head(intervals_keep(ends, sq), problem.heads)
    if problem.bias:
        bias = _with_extremes(normal(*extent(problem.bias_shape), wide=problem.bias_float32), problem)
        if problem.nan_bias:
            bias = torch.where(_seen(keep, bias.shape, problem.heads).to(device), bias, float("nan"))
    query, key, value = (laid_out(tensor, problem.layout) for tensor in (query, key, value))
    key, value = placed(key, problem.rows), placed(value, problem.rows)
    whole = Part((ALL,), (ALL,), (ALL,), (ALL,), (ALL,), ALL, keep.to(device))
    grad_out, grad_lse = normal(batch, sq, problem.heads, problem.dim_v), normal(batch, problem.heads, sq, wide=True)
    at_most = _promised(problem, ends)
    ends, sink = [end.to(device) for end in ends], _draw_sink(problem, normal)
    used = None if used is None else used.to(device)
    return Inputs(
        query, key, value, mask, bias, documents, ends, sink, grad_out, grad_lse, [whole], at_most=at_most, used=used
    )


def _with_extremes(bias: Tensor, problem: Problem) -> Tensor:
    """Give a bias the problem's large value where the problem says: in its first rows, at all keys but the first, or everywhere."""
    if problem.extreme == "rows" and bias.dim() == 4:
        bias[:, :, : max(1, bias.shape[2] // 3)] = problem.bias_value
    elif problem.extreme:
        bias[..., problem.extreme == "keys" :] = problem.bias_value
    return bias


def _draw_sink(problem: Problem, normal: _Normal) -> Tensor | None:
    if not problem.sink:
        return None
    sink = normal(problem.heads, scale=2.0, wide=problem.sink == "float32")
    sink[: problem.seed % 3 == 0] = float("-inf")  # of the first head: no sink
    return sink


def _draw_lengths(random: Random, batch: int, longest: int) -> list[int]:
    return [random.of(0, longest, random.below(longest + 1), random.below(longest + 1)) for _ in range(batch)]


def make_varlen_inputs(problem: Problem, device: str) -> Inputs:
    """Make packed sequences; `seqlen_q` and `seqlen_k` are the upper bounds of their lengths."""
    random = Random(problem.seed + 1)
    normal = _Normal(problem, random, device)
    ends_q, ends_k = (
        torch.tensor([0, *_draw_lengths(random, problem.batch, longest)]).cumsum(0)
        for longest in (problem.seqlen_q, problem.seqlen_k)
    )
    total_q, total_k = int(ends_q[-1]) + problem.behind, int(ends_k[-1]) + problem.behind
    query = normal(total_q, problem.heads, problem.dim, scale=problem.magnitude * problem.steep)
    key = normal(total_k, problem.heads_k, problem.dim, scale=problem.magnitude)
    value = normal(total_k, problem.heads_k, problem.dim_v, scale=problem.magnitude)
    query, key, value = (laid_out(tensor[None], problem.layout)[0] for tensor in (query, key, value))
    key, value = (placed(tensor[None], problem.rows)[0] for tensor in (key, value))

    def heads(shape: str) -> int:
        return problem.heads if "h" in shape else problem.heads_k if "k" in shape else 1

    mask = bias = key_keep = None
    if problem.mask:
        drawn = _draw_mask(replace(problem, mask_shape=""), (1, heads(problem.mask_shape), 1, total_k), random)
        key_keep, mask = per_query_head(drawn, problem.heads), _as_mask(drawn[0, :, 0], problem, device)
    if problem.bias:
        bias = _with_extremes(normal(heads(problem.bias_shape), total_k, wide=problem.bias_float32), problem)
    parts = []
    for index, ((q0, q1), (k0, k1)) in enumerate(
        zip(pairwise(ends_q.tolist()), pairwise(ends_k.tolist()), strict=True)
    ):
        keep = band_keep(problem, q1 - q0, k1 - k0).expand(1, problem.heads, -1, -1).clone()
        if key_keep is not None:
            keep &= key_keep[..., k0:k1]
        queries, keys = (None, slice(q0, q1)), (None, slice(k0, k1))
        part_bias = (None, ALL, None, slice(k0, k1))
        in_4d = (ALL, slice(q0, q1)), (ALL, slice(k0, k1))
        parts.append(Part(queries, keys, part_bias, *in_4d, slice(index, index + 1), keep.to(device)))
    if problem.behind:
        last_q, last_k = slice(int(ends_q[-1]), total_q), slice(int(ends_k[-1]), total_k)
        keep = torch.zeros(1, problem.heads, problem.behind, problem.behind, dtype=torch.bool, device=device)
        at = (None, last_q), (None, last_k), (None, ALL, None, last_k), (ALL, last_q), (ALL, last_k)
        parts.append(Part(*at, slice(0, 1), keep))
    if not parts:
        empty = torch.ones(1, problem.heads, 0, 0, dtype=torch.bool, device=device)
        nothing = (None, slice(0, 0))
        parts = [
            Part(
                nothing,
                nothing,
                (None, ALL, None, slice(0, 0)),
                (ALL, nothing[1]),
                (ALL, nothing[1]),
                slice(0, 0),
                empty,
            )
        ]
    grad_out, grad_lse = normal(total_q, problem.heads, problem.dim_v), normal(problem.heads, total_q, wide=True)
    offsets = tuple(ends.to(torch.int32).to(device) for ends in (ends_q, ends_k))
    sink = _draw_sink(problem, normal)
    return Inputs(query, key, value, mask, bias, None, [], sink, grad_out, grad_lse, parts, (1, 2), offsets)  # type: ignore[arg-type]
