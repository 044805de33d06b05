"""Problems for the portable kernels: build one, run forward and backward into poisoned buffers, compare with the oracle."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from dmattn_ops.call import (
    NO_MASK,
    TILE,
    UNBOUNDED,
    Call,
    Gradients,
    Mask,
    Options,
    Result,
    Saved,
    Varlen,
    plain_options,
)
from dmattn_ops.choice import resolve
from dmattn_ops.choice.config import PortableBackward, PortableForward
from tests.interpreter import oracle
from tests.interpreter.hidden import amid_nan, band, hide_unseen, visible_pairs
from tests.interpreter.launchers import Backward, Forward, launcher_of
from tests.support.tile_builder import build_lists, build_segment_tiles, build_tiles, tile_states

FORWARD = PortableForward(64, 64, 4, 2)
BACKWARD = PortableBackward(64, 64, 4, 2, 64, 64, 4, 2)


@dataclass(frozen=True)
class Problem:
    """One call.

    `mask` is none, bits, segments (documents), keys (one keep bit per key), band (lists of the band), lifetimes (intervals
    of queries from the diagonal on, as of a dynamic mask), intervals (any, without lists), or hidden (intervals with hidden
    ones inside, and lists).
    """

    seed: int = 0
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    seqlen_q: int = 100
    seqlen_k: int = 140
    head_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    band_lo: int = -UNBOUNDED
    band_hi: int = UNBOUNDED
    mask: str = "none"
    mask_batch: int = 1
    mask_heads: int = 1
    density: float = 0.5
    bias: tuple[int, int, int] | None = None  # sizes of its batch, head and query dimensions
    bias_dtype: torch.dtype | None = None
    bias_spacing: int = 1  # how many rows of keys a row of the bias takes
    softcap: float = 0.0
    scale: float = 0.25
    dropout_p: float = 0.0
    seeds: tuple[int, int] = (1, 1)  # sizes of their batch and head dimensions
    q_origin: int = 0
    k_origin: int = 0
    grad_lse: bool = False
    needs_max: bool = True
    transposed: bool = False
    lengths_q: tuple[int, ...] | None = None  # packed sequences
    lengths_k: tuple[int, ...] | None = None
    top_left: bool = False
    needs_dbias: bool = True
    deterministic: bool = False

    def __repr__(self) -> str:
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Problem({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"


def rows(shape: tuple[int, ...], dtype: torch.dtype, device: str, transposed: bool = False) -> Tensor:
    """Return a NaN-filled view `[.., S, heads, D]` amid more NaN: spare rows behind the last and spare columns."""
    *lead, seqlen, heads, dim = shape
    if transposed:
        buffer = torch.full((*lead, heads, seqlen + 3, dim + 8), float("nan"), dtype=dtype, device=device)
        return buffer[..., :seqlen, :dim].transpose(-2, -3)
    buffer = torch.full((*lead, seqlen + 3, heads, dim + 8), float("nan"), dtype=dtype, device=device)
    return buffer[..., :seqlen, :, :dim]


def build_mask(problem: Problem, generator: torch.Generator) -> tuple[Tensor, Mask]:
    """Return what the mask and the band keep `[Bm, Hm, Sq, Sk]`, and the tensors that say so."""
    p = problem
    inside = band(p.seqlen_q, p.seqlen_k, p.band_lo, p.band_hi)[None, None]
    shape = (p.mask_batch, p.mask_heads)
    if p.mask == "none":
        return inside, NO_MASK
    if p.mask == "bits":
        keep = torch.rand(*shape, p.seqlen_q, p.seqlen_k, generator=generator) < p.density
        # Whole tiles of both kinds, and rows and keys that see nothing.
        cells = torch.rand(*shape, -(-p.seqlen_q // TILE), -(-p.seqlen_k // TILE), generator=generator)
        cells = cells.repeat_interleave(TILE, 2).repeat_interleave(TILE, 3)[:, :, : p.seqlen_q, : p.seqlen_k]
        keep = torch.where(cells < 0.3, True, torch.where(cells > 0.6, False, keep))
        keep[:, :, 3:5] = False
        keep[..., 7:9] = False
        keep = keep & inside
        return keep, build_tiles(keep)
    if p.mask == "band":
        tiles = build_segment_tiles(inside, None, torch.zeros(1, 1, p.seqlen_k, dtype=torch.int32))
        return inside, tiles._replace(k_segments=None)
    if p.mask == "keys":
        kept = torch.rand(*shape, p.seqlen_k, generator=generator) < p.density
        kept = kept | (torch.arange(p.seqlen_k) % 500 >= 200)
        k_segments = torch.where(kept, 0, -1).int()
        keep = kept[:, :, None, :] & inside
        return keep, build_segment_tiles(keep, None, k_segments)
    if p.mask in ("lifetimes", "intervals", "hidden"):
        intervals = draw_intervals(p, generator)
        keep = intervals_keep(intervals, p.seqlen_q) & inside
        if p.mask == "intervals":
            return keep, intervals
        states = tile_states(keep)
        return keep, intervals._replace(row_tiles=build_lists(states), col_tiles=build_lists(states.mT))
    q_segments = torch.sort(torch.randint(0, 3, (p.mask_batch, p.seqlen_q), generator=generator)).values.int()
    k_segments = torch.sort(torch.randint(0, 3, (*shape, p.seqlen_k), generator=generator)).values.int()
    keep = (q_segments[:, None, :, None] == k_segments[:, :, None, :]) & inside
    return keep, build_segment_tiles(keep, q_segments, k_segments)


def draw_intervals(problem: Problem, generator: torch.Generator) -> Mask:
    """Return intervals of queries for each key, `[Bm, Hm, Sk]`; some are empty, and some reach past the ends."""
    p = problem
    shape = (p.mask_batch, p.mask_heads, p.seqlen_k)

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    start = torch.arange(p.seqlen_k, dtype=torch.int32).expand(shape).contiguous()
    if p.mask != "lifetimes":
        start = integers(-20, max(1, p.seqlen_q))
    lasting = torch.where(integers(0, 3) == 0, p.seqlen_q, integers(-2, max(1, p.seqlen_q // 2)))
    whole = torch.arange(p.seqlen_k) // TILE == 1  # a tile of keys that every query sees, or every later one
    if p.mask != "lifetimes":
        start = torch.where(whole, 0, start)
    end = torch.where(whole, p.seqlen_q + 7, start + lasting)
    if p.mask != "hidden":
        return Mask(start=start, end=end)
    hidden_from = integers(-5, max(1, p.seqlen_q))
    hidden_to = torch.where(whole, hidden_from - 1, hidden_from + integers(-3, 60))
    return Mask(start=start, end=end, hidden_from=hidden_from, hidden_to=hidden_to)


def intervals_keep(mask: Mask, seqlen_q: int) -> Tensor:
    """Return what intervals show, by definition: `[Bm, Hm, Sq, Sk]`."""
    assert mask.start is not None and mask.end is not None
    i = torch.arange(seqlen_q)[:, None]
    keep = (mask.start[:, :, None] <= i) & (i < mask.end[:, :, None])
    if mask.hidden_from is not None and mask.hidden_to is not None:
        keep = keep & ~((mask.hidden_from[:, :, None] <= i) & (i < mask.hidden_to[:, :, None]))
    return keep


def build_bias(problem: Problem, generator: torch.Generator) -> Tensor | None:
    """Return a bias with the strides that the problem asks for."""
    if problem.bias is None:
        return None
    dtype = problem.bias_dtype or problem.dtype
    columns = problem.seqlen_k * problem.bias_spacing
    wide = torch.randn(*problem.bias, columns, generator=generator, dtype=torch.float64).to(dtype)
    return wide[..., : problem.seqlen_k]


def draw(shape: tuple[int, ...], problem: Problem, generator: torch.Generator) -> Tensor:
    """Return normal numbers, rounded to the problem's dtype."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(problem.dtype)


@dataclass
class Case:
    """The tensors of a problem on the CPU; dense, or packed with a list of `(query, key)` slices."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    grad_out: Tensor
    grad_lse: Tensor | None
    keep: Tensor
    mask: Mask
    seed: Tensor
    varlen: Varlen | None
    options: Options


def build(problem: Problem) -> Case:
    """Draw the tensors of a problem from its seed."""
    p = problem
    generator = torch.Generator().manual_seed(p.seed)
    options = plain_options(
        p.scale, p.band_lo, p.band_hi, softcap=p.softcap, dropout_p=p.dropout_p, deterministic=p.deterministic,
        q_origin=p.q_origin, k_origin=p.k_origin,
    )  # fmt: skip
    seed = 0x1234_5678_9ABC_DEF0 + p.seed + 0x1_0000_0003 * torch.arange(p.seeds[0] * p.seeds[1]).view(p.seeds)
    if p.lengths_q is not None:
        return _build_packed(p, generator, options, seed)
    keep, mask = build_mask(p, generator)
    bias = build_bias(p, generator)
    if bias is not None and p.mask != "none":  # masked elements may hold anything
        seen = oracle.spread_heads(keep, p.heads, 1).expand(p.batch, p.heads, p.seqlen_q, p.seqlen_k)
        full = oracle.spread_heads(bias, p.heads, 1).expand_as(seen)
        if full.shape == bias.shape:
            bias = torch.where(seen, full, float("nan"))
    lead = (p.batch,)
    return Case(
        query=draw((*lead, p.seqlen_q, p.heads, p.head_dim), p, generator),
        key=draw((*lead, p.seqlen_k, p.kv_heads, p.head_dim), p, generator),
        value=draw((*lead, p.seqlen_k, p.kv_heads, p.value_dim), p, generator),
        bias=bias,
        grad_out=draw((*lead, p.seqlen_q, p.heads, p.value_dim), p, generator),
        grad_lse=torch.randn(*lead, p.heads, p.seqlen_q, generator=generator) if p.grad_lse else None,
        keep=keep,
        mask=mask,
        seed=seed,
        varlen=None,
        options=options,
    )


def _build_packed(p: Problem, generator: torch.Generator, options: Options, seed: Tensor) -> Case:
    """Draw packed sequences; 5 rows before the first and 4 behind the last belong to none."""
    assert p.lengths_q is not None
    assert p.lengths_k is not None
    cu_q = torch.tensor([5, *p.lengths_q]).cumsum(0).int()
    cu_k = torch.tensor([5, *p.lengths_k]).cumsum(0).int()
    total_q, total_k = int(cu_q[-1]) + 4, int(cu_k[-1]) + 4
    keep = torch.ones(p.mask_heads, total_k, dtype=torch.bool)
    mask = NO_MASK
    if p.mask == "keys":
        keep = torch.rand(p.mask_heads, total_k, generator=generator) < p.density
        mask = Mask(k_segments=torch.where(keep, 0, -1).int())
    bias = None
    if p.bias is not None:
        bias = torch.randn(p.bias[1], total_k, generator=generator).to(p.bias_dtype or p.dtype)
    return Case(
        query=draw((total_q, p.heads, p.head_dim), p, generator),
        key=draw((total_k, p.kv_heads, p.head_dim), p, generator),
        value=draw((total_k, p.kv_heads, p.value_dim), p, generator),
        bias=bias,
        grad_out=draw((total_q, p.heads, p.value_dim), p, generator),
        grad_lse=torch.randn(p.heads, total_q, generator=generator) if p.grad_lse else None,
        keep=keep,
        mask=mask,
        seed=seed,
        varlen=Varlen(cu_q, cu_k, max(p.lengths_q) + 3, max(p.lengths_k) + 3, p.top_left),
        options=options,
    )


def expected(problem: Problem, case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return out, lse and the gradients by eager torch in `dtype`."""
    p = problem
    names = ["query", "key", "value"] + (["bias"] if case.bias is not None else [])
    leaves = {name: getattr(case, name).detach().to(dtype).requires_grad_() for name in names}
    if case.bias is not None and dtype != torch.float64 and case.bias.dtype == torch.float32:
        leaves["bias"] = case.bias.detach().clone().requires_grad_()
    bias = leaves.get("bias")
    call = {"scale": p.scale, "softcap": p.softcap, "dropout_p": p.dropout_p}
    if case.varlen is None:
        dropped = None
        if p.dropout_p:
            dropped = oracle.dropout_keep(case.seed, p.dropout_p, *positions(p, p.seqlen_q, p.seqlen_k))
        out, lse, row_max = oracle.attention(
            leaves["query"], leaves["key"], leaves["value"], bias, case.keep, dropped=dropped, **call
        )
    else:
        out = torch.zeros(case.grad_out.shape, dtype=dtype)
        lse = torch.full((p.heads, out.shape[0]), float("-inf"), dtype=dtype)
        row_max = lse.clone()
        cu_q, cu_k = case.varlen.cu_seqlens_q.tolist(), case.varlen.cu_seqlens_k.tolist()
        every = None
        if p.dropout_p:
            longest = (case.varlen.max_seqlen_q, case.varlen.max_seqlen_k)
            every = oracle.dropout_keep(case.seed, p.dropout_p, *positions(p, *longest))
            every = every.expand(len(cu_q) - 1, -1, -1, -1)
        for index in range(len(cu_q) - 1):
            a, b = slice(cu_q[index], cu_q[index + 1]), slice(cu_k[index], cu_k[index + 1])
            n, m = a.stop - a.start, b.stop - b.start
            keep = case.keep[None, :, None, b] & band(n, m, p.band_lo, p.band_hi, 0 if p.top_left else m - n)
            part = None if bias is None else bias[None, :, None, b]
            dropped = None if every is None else every[index : index + 1, :, :n, :m]
            one = [leaves[name][None, s] for name, s in (("query", a), ("key", b), ("value", b))]
            part_out, part_lse, part_max = oracle.attention(*one, part, keep, dropped=dropped, **call)
            out = out.index_put((torch.arange(a.start, a.stop),), part_out[0])
            place = (torch.arange(p.heads)[:, None], torch.arange(a.start, a.stop)[None])
            lse = lse.index_put(place, part_lse[0].to(dtype))
            row_max = row_max.index_put(place, part_max[0].to(dtype))
    grads = [case.grad_out.to(dtype)]
    outputs = [out]
    if case.grad_lse is not None:
        finite = lse.isfinite()
        outputs.append(torch.where(finite, lse, 0.0))
        grads.append(case.grad_lse.to(lse.dtype))
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
    gradients = torch.autograd.grad(
        [o for o, _ in pairs], list(leaves.values()), [g for _, g in pairs], allow_unused=True
    )
    result = {"out": out.detach(), "lse": lse.detach(), "row_max": row_max}
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        result["d" + {"query": "q", "key": "k", "value": "v"}.get(name, name)] = (
            torch.zeros_like(leaf) if gradient is None else gradient
        )
    return result


def positions(problem: Problem, seqlen_q: int, seqlen_k: int) -> tuple[range, range]:
    """Return the positions of queries and keys in the whole sequence."""
    p = problem
    return range(p.q_origin, p.q_origin + seqlen_q), range(p.k_origin, p.k_origin + seqlen_k)


def in_16_bits(problem: Problem) -> Problem:
    """Return a problem that the kernels of mma.sync take: elements of 16 bits, in heads of whole pieces of 16 bytes."""
    dtype = torch.bfloat16 if problem.dtype == torch.float32 else problem.dtype
    widths = [-(-width // 8) * 8 for width in (problem.head_dim, problem.value_dim)]
    return replace(problem, dtype=dtype, head_dim=widths[0], value_dim=widths[1])


def run(
    problem: Problem,
    case: Case,
    device: str = "cpu",
    forward: Forward = FORWARD,
    backward: Backward = BACKWARD,
) -> dict[str, Tensor]:
    """Run both directions on views amid NaN; nothing outside of the views may be written."""
    p = problem

    def place(tensor: Tensor) -> Tensor:
        view = rows(tuple(tensor.shape), tensor.dtype, device, p.transposed)
        view.copy_(tensor)
        return view

    def on(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device)

    query, key, value, grad_out = (place(t) for t in (case.query, case.key, case.value, case.grad_out))
    bias = case.bias
    if bias is not None and device != "cpu":
        bias = amid_nan(bias, device).copy_(bias)
    tensors = (None if t is None else on(t) for t in case.mask[:-1])
    mask = Mask(*tensors, case.mask.at_most)
    seed = on(case.seed) if p.dropout_p else None
    varlen = case.varlen
    if varlen is not None:
        varlen = varlen._replace(cu_seqlens_q=on(varlen.cu_seqlens_q), cu_seqlens_k=on(varlen.cu_seqlens_k))
    out, dq, dk, dv = (
        rows(tuple(t.shape), t.dtype, device, p.transposed) for t in (case.grad_out, case.query, case.key, case.value)
    )
    lse_shape = (p.batch, p.heads, p.seqlen_q) if varlen is None else (p.heads, case.query.shape[0])
    lse, lse_tail, row_max = (
        torch.full((*lse_shape[:-1], lse_shape[-1] + spare), float("nan"), device=device)[..., : lse_shape[-1]]
        for spare in (5, 3, 1)
    )
    dbias = None
    if bias is not None and p.needs_dbias:
        dbias = torch.full(bias.shape, float("nan"), dtype=bias.dtype, device=device)
    call = Call(query, key, value, bias, mask, None, seed, varlen, case.options)
    result = Result(out, lse, lse_tail, row_max if p.needs_max else None)
    saved, grads = Saved(out, lse, lse_tail), Gradients(grad_out, on(case.grad_lse), dq, dk, dv, dbias)
    if (
        device != "cpu"
    ):  # of a row's configurations, as dispatch does: some need aligned rows, or more memory than there is
        forward = resolve.forward_config(forward, call, result)
        backward = resolve.backward_config(backward, call, saved, grads)
    launcher_of(forward).forward(call, result, forward)
    launcher_of(backward).backward(call, saved, grads, backward)
    for view in (out, dq, dk, dv):
        written = int((~view._base.isnan()).sum())
        assert written <= view.numel(), "wrote outside of an output"
    results = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    assert lse_tail.isfinite().all() or not lse.isfinite().all()
    assert (lse_tail[lse == float("-inf")] == 0).all()
    if p.needs_max:
        results["row_max"] = row_max
    if dbias is not None:
        results["dbias"] = dbias
    return results


def check(
    problem: Problem,
    device: str = "cpu",
    forward: Forward = FORWARD,
    backward: Backward = BACKWARD,
) -> None:
    """Assert `err(ours) <= 2 err(eager in the same dtype) + eps` for all outputs and gradients, and exact zeros."""
    case = build(problem)
    truth = expected(problem, case, torch.float64)
    eager = expected(problem, case, problem.dtype)
    ours = run(problem, hide_unseen(problem, case), device, forward, backward)
    p = problem
    terms = {"dq": p.seqlen_k, "dk": p.seqlen_q * p.heads // p.kv_heads, "dbias": p.batch * p.heads}  # of dS
    for name, tensor in ours.items():
        limit = 2 * oracle.error(eager[name], truth[name]) + oracle.EPSILON[problem.dtype]
        found = oracle.error(tensor, truth[name], terms.get(name, 0) * p.value_dim)
        assert found <= limit, f"{name}: error {found:.2e} over the budget {limit:.2e} in {problem}"
    assert_exact_zeros(problem, case, ours, truth)


def assert_exact_zeros(problem: Problem, case: Case, ours: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    """Assert that empty rows, and keys and bias elements that nobody sees, get exactly 0."""
    ours = {name: tensor.cpu() for name, tensor in ours.items()}
    empty = truth["lse"].transpose(-1, -2) == float("-inf")
    for name in ("out", "dq"):
        assert (ours[name][empty] == 0).all(), f"{name} of an empty row is not 0"
    seen = visible_pairs(problem, case)
    unseen = ~seen.unflatten(1, (problem.kv_heads, -1)).any(3).any(2).transpose(1, 2)
    unseen = unseen if case.varlen is None else unseen[0]
    if "dbias" in ours and case.varlen is None:
        p = problem
        rows, columns = ours["dbias"].shape[-2:]
        seen = seen if rows == p.seqlen_q else seen.any(2, keepdim=True)
        seen = seen if ours["dbias"].shape[0] == p.batch else seen.any(0, keepdim=True)
        bias_heads = ours["dbias"].shape[1]
        of_group = seen.reshape(seen.shape[0], bias_heads, p.heads // bias_heads, rows, columns).any(2)
        assert (ours["dbias"][~of_group] == 0).all(), "dbias of an element that nobody sees is not 0"
    for name in ("dk", "dv"):
        assert (ours[name][unseen] == 0).all(), f"{name} of a key that nobody sees is not 0"
