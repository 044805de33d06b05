"""Direct calls of `torch.ops.dmattn.*` as nobody should make them, in groups: altered masks, saved tensors, strides, numbers.

As a script, `adversarial_calls.py GROUP ...` runs groups and prints a line for each case: its group, its name, and how it ended.
A case that ends the process has no line. Memory that an operator allocates holds NaN until something is written there.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dmattn_ops
from dmattn_ops import layout
from dmattn_ops.problem import MASK_TENSORS, UNBOUNDED, Mask

ops = torch.ops.dmattn
BATCH, HEADS, KV_HEADS, SEQLEN_Q, SEQLEN_K, DIM = 2, 4, 2, 300, 260, 32
LEAST, MOST = -(1 << 31), (1 << 31) - 1
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
INTEGERS = (-(1 << 63), -(1 << 62), -(1 << 31), -UNBOUNDED, -5, 0, 5, UNBOUNDED, 1 << 31, 1 << 62, (1 << 63) - 1)
REFUSALS = (ValueError, TypeError, RuntimeError, NotImplementedError, OverflowError)
Change = Callable[[Tensor], Any]


class Wrong(Exception):
    """A call returned something else than it must."""


class Case(NamedTuple):
    """What is called; whether it must be refused (True), must not be (False), or either (None). `nan`: NaN is no fault."""

    name: str
    run: Callable[[], object]
    refused: bool | None = None
    nan: bool = False


def qkv(dtype: torch.dtype = torch.float32, **size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value; sizes by the names b, sq, sk, h, hk, d, dv."""
    n = {"b": BATCH, "sq": SEQLEN_Q, "sk": SEQLEN_K, "h": HEADS, "hk": KV_HEADS, "d": DIM} | size
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    query, key = normal(n["b"], n["sq"], n["h"], n["d"]), normal(n["b"], n["sk"], n["hk"], n["d"])
    return query, key, normal(n["b"], n["sk"], n["hk"], n.get("dv", n["d"]))


def keep(*shape: int) -> Tensor:
    """Return a mask with wholly and partly visible tiles."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.5
    mask[..., :128, :128] = True
    return mask


def bits(**size: int) -> Mask:
    """Return a mask of bits; sizes by the names sq and sk."""
    return dmattn_ops.prepare_mask(keep(BATCH, KV_HEADS, size.get("sq", SEQLEN_Q), size.get("sk", SEQLEN_K))).mask


def segments() -> Mask:
    """Return a mask of segments whose tiles are listed."""
    return dmattn_ops.prepare_mask(keep(BATCH, KV_HEADS, 1, SEQLEN_K), seqlen_q=SEQLEN_Q).mask


def intervals() -> Mask:
    """Return a mask of intervals, a part of each hidden."""
    start = torch.arange(SEQLEN_K, dtype=torch.int32).expand(BATCH, KV_HEADS, -1).contiguous()
    return Mask(start=start, end=start + 90, hidden_from=start + 5, hidden_to=start + 9, at_most=90)


KINDS: dict[str, Callable[[], Mask]] = {"bits": bits, "segments": segments, "intervals": intervals}


def copied(mask: Mask) -> dict[str, Any]:
    """Return the arguments of a mask, each tensor a copy."""
    tensors = {name: getattr(mask, name) for name in MASK_TENSORS}
    return {name: part if part is None else part.clone() for name, part in tensors.items()} | {"at_most": mask.at_most}


def forward(mask: dict[str, Any] | None = None, inputs: Any = None, **others: Any) -> Any:
    return ops.forward(*(inputs or qkv()), **(mask or {}), **others)


def backward(mask: dict[str, Any] | None = None, good: Any = None, inputs: Any = None, **others: Any) -> Any:
    """Run the backward after a forward with a good mask; `others` are changes of its arguments, or more of them."""
    inputs = inputs or qkv()
    numbers = {name: others[name] for name in ("band_lo", "band_hi", "bias", "seed", "dropout_p") if name in others}
    out, lse, tail, _ = ops.forward(*inputs, **((mask if good is None else good) or {}), **numbers)
    given = {"grad_out": torch.ones_like(out), "grad_lse": None, "out": out, "lse": lse, "lse_tail": tail}
    for name in given:
        change = others.pop(name, None)
        given[name] = given[name] if change is None else change(lse if name == "grad_lse" else given[name])
    return ops.backward(**given, **dict(zip(("query", "key", "value"), inputs, strict=True)), **(mask or {}), **others)


def freed(tensor: Tensor) -> Tensor:
    """Return a tensor without memory."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def lists_of_tiles() -> Iterator[Case]:
    """Yield forwards over altered lists of rows, and backwards over altered lists of columns."""
    changes: list[tuple[str, Change, bool | None]] = [
        (f"word {word} is {value}", lambda t, w=word, v=value: t[..., w].fill_(v), True)
        for word in (0, 1, 2)
        for value in (-1, 50, 100_000, LEAST, MOST)
    ]
    changes += [(f"index {v}", lambda t, v=v: t[..., 4:].fill_(v), True) for v in (3, 10**6, -1, -5, LEAST, MOST)]
    changes += [
        ("ranks of 0", lambda t: t[..., 0].zero_(), True),
        ("one index twice", lambda t: t[..., 4:].zero_(), True),
        ("any numbers", lambda t: t.random_(LEAST, MOST), True),
        ("small numbers", lambda t: t.random_(-3, 8), True),
        ("more than there is room for", lambda t: (t[..., 1].fill_(1), t[..., 2].fill_(t.shape[-1] - 4)), True),
        ("the unused word", lambda t: t[..., 3].fill_(7), False),
    ]
    for (kind, dtype), (what, change, refused) in itertools.product(
        [("bits", torch.float32), ("segments", torch.float32), ("bits", torch.bfloat16)], changes
    ):
        for name in ("row_tiles", "col_tiles"):

            def run(kind: str = kind, dtype: torch.dtype = dtype, change: Change = change, name: str = name) -> object:
                good, bad = copied(KINDS[kind]()), copied(KINDS[kind]())
                change(bad[name])
                return forward(bad, qkv(dtype)) if name == "row_tiles" else backward(bad, good, qkv(dtype))

            yield Case(f"{kind} {dtype} {name}: {what}", run, refused)
    for what, change, refused in changes:

        def public(change: Change = change) -> object:
            mask = dmattn_ops.prepare_mask(keep(BATCH, KV_HEADS, SEQLEN_Q, SEQLEN_K))
            change(mask.row_tiles)
            return dmattn_ops.flash_dmattn_func(*qkv(), mask)

        yield Case(f"a prepared mask, altered in place: {what}", public, refused)


def contents() -> Iterator[Case]:
    """Yield masks whose bits, ids and intervals are any numbers: what they show is read inside them."""
    for kind, make in KINDS.items():
        for seed, direction in itertools.product(range(8), (forward, backward)):

            def run(make: Any = make, seed: int = seed, direction: Any = direction) -> object:
                generator, mask = torch.Generator().manual_seed(seed), copied(make())
                for name in ("row_bits", "col_bits", "q_segments", "k_segments", "start", "end", "hidden_from"):
                    if mask[name] is not None:
                        mask[name].random_(LEAST, MOST, generator=generator)
                return direction(mask | {"at_most": None})

            yield Case(f"{kind} of any numbers, {seed}, {direction.__name__}", run, False)


def shapes() -> Iterator[Case]:
    """Yield masks of which one tensor has another shape, dtype, device or memory."""
    changes: dict[str, Change] = {
        "missing": lambda t: None, "1-D": lambda t: t.flatten(), "0-D": lambda t: torch.tensor(3, dtype=torch.int32),
        "empty": lambda t: t.new_empty(0), "a dimension more": lambda t: t[None], "int64": lambda t: t.long(),
        "float": lambda t: t.float(), "bool": lambda t: t.bool(), "int16": lambda t: t.to(torch.int16),
        "uint8": lambda t: t.to(torch.uint8), "meta": lambda t: t.to("meta"), "last less": lambda t: t[..., :-1],
        "last 0": lambda t: t[..., :0], "last more": lambda t: torch.cat((t, t[..., :1]), -1),
        "rows less": lambda t: t[..., :-1, :], "rows 0": lambda t: t[..., :0, :], "dim 1 of 0": lambda t: t[:, :0],
        "dim 0 of 0": lambda t: t[:0], "heads 3": lambda t: torch.cat((t, t[:, :1]), 1),
        "batch 3": lambda t: torch.cat((t, t[:1]), 0), "batch 1": lambda t: t[:1], "heads 1": lambda t: t[:, :1],
        "width 3": lambda t: t[..., :3], "width 4": lambda t: t[..., :4].contiguous(),
        "strided": lambda t: t.repeat_interleave(2, -1)[..., ::2], "expanded": lambda t: t[:1].expand(t.shape),
        "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2), "sparse": lambda t: t.to_sparse(),
        "complex": lambda t: t.to(torch.complex64), "freed": freed,
    }  # fmt: skip
    for kind, make in KINDS.items():
        for name in MASK_TENSORS:
            if getattr(make(), name) is None:
                continue
            for (what, change), direction in itertools.product(changes.items(), (forward, backward)):

                def run(
                    make: Any = make, name: str = name, change: Change = change, direction: Any = direction
                ) -> object:
                    bad = copied(make())
                    bad[name] = change(bad[name])
                    return direction(bad) if direction is forward else backward(bad, copied(make()))

                needed = what in ("int64", "float", "meta", "heads 3", "batch 3", "complex", "1-D", "freed")
                yield Case(f"{kind} {direction.__name__} {name}: {what}", run, True if needed else None)
    others = {
        "bits and segments": lambda: copied(bits()) | {"k_segments": segments().k_segments},
        "a longer mask": lambda: copied(bits(sq=SEQLEN_Q + 128)), "a shorter mask": lambda: copied(bits(sk=SEQLEN_K - 128)),
        "queries without keys": lambda: {"q_segments": torch.zeros(BATCH, SEQLEN_Q, dtype=torch.int32)},
        **{f"only {name}": lambda name=name: {name: getattr(bits(), name)} for name in MASK_TENSORS[:4]},
        **{f"only {name}": lambda name=name: {name: getattr(intervals(), name)} for name in ("start", "hidden_to")},
    }  # fmt: skip
    for what, mask in others.items():
        yield Case(what, lambda mask=mask: forward(mask()), True)


def packed(of_q: Any, of_k: Any, back: bool, dtype: torch.dtype = torch.int32, **others: Any) -> object:
    """Run packed sequences of 300 queries and 260 keys."""
    inputs = tuple(x[0] for x in qkv(b=1))
    offsets = [x if isinstance(x, Tensor) else torch.tensor(x, dtype=dtype) for x in (of_q, of_k)]
    longest = {name: others.pop(name, 300) for name in ("max_seqlen_q", "max_seqlen_k")}
    rest = {"bias": None, "mask": None, "sink": None, "seed": None} | others
    if not back:
        return ops.varlen_forward(*inputs, *offsets, **rest, **longest)
    good = [torch.tensor(x, dtype=torch.int32) for x in ([0, 100, 300], [0, 50, 260])]
    out, lse, tail, _ = ops.varlen_forward(
        *inputs, *good, **dict.fromkeys(rest), max_seqlen_q=300, max_seqlen_k=300
    )  # fmt: skip
    return ops.varlen_backward(torch.ones_like(out), None, *inputs, out, lse, tail, *offsets, **rest, **longest)


def packed_sequences() -> Iterator[Case]:
    """Yield packed sequences whose offsets, lengths, masks or biases are wrong."""
    wrong = {
        "decreasing": [0, 200, 100, 300], "beyond": [0, 100, 400], "negative": [0, -5, 300], "below 0": [-5, 100, 300],
        "late": [5, 100, 300], "short": [0, 100, 299], "most": [0, MOST, 300], "least": [0, LEAST, 300],
        "all most": [MOST] * 3, "one": [0], "one at the end": [300], "none": [], "two dimensions": [[0, 100, 300]],
        "another number": [0, 50, 100, 300], "all 0": [0, 0, 0], "a swing": [0, MOST, LEAST, 300],
    }  # fmt: skip
    good = ([0, 100, 300], [0, 50, 260])
    ones, of_short = torch.ones(1, SEQLEN_K), torch.ones(1, SEQLEN_K - 1)
    parts = {
        "short": of_short, "3 heads": torch.ones(3, SEQLEN_K), "1-D": torch.ones(SEQLEN_K), "3-D": ones[None],
        "meta": ones.to("meta"), "complex": ones.to(torch.complex64), "no heads": torch.ones(0, SEQLEN_K), "freed": freed(ones),
    }  # fmt: skip
    for back in (False, True):
        to = "backward" if back else "forward"
        for what, offsets in wrong.items():
            yield Case(f"{to} of queries: {what}", lambda o=offsets, b=back: packed(o, good[1], b), True)
            yield Case(f"{to} of keys: {what}", lambda o=offsets, b=back: packed(good[0], o, b), True)
        for dtype in (torch.int64, torch.int16, torch.uint8, torch.float32, torch.bool):
            yield Case(f"{to} {dtype}", lambda d=dtype, b=back: packed(*good, b, d), True)
        for longest in (-1, 0, 1, 199, MOST, 1 << 62, -(1 << 62)):
            for name in ("max_seqlen_q", "max_seqlen_k"):
                yield Case(f"{to} {name} {longest}", lambda b=back, n=name, m=longest: packed(*good, b, **{n: m}))
        memory: dict[str, Tensor] = {
            "strided": torch.tensor([0, 9, 100, 9, 300], dtype=torch.int32)[::2],
            "expanded": torch.zeros(1, dtype=torch.int32).expand(3), "meta": torch.zeros(3, dtype=torch.int32, device="meta"),
            "freed": freed(torch.tensor(good[0], dtype=torch.int32)),
        }  # fmt: skip
        for what, offsets in memory.items():
            refused = what != "strided"
            yield Case(f"{to} offsets: {what}", lambda o=offsets, b=back: packed(o, good[1], b), refused)
        for what, part in parts.items():
            yield Case(f"{to} bias: {what}", lambda p=part, b=back: packed(*good, b, bias=p), True)
            refused = True if what not in ("complex",) else None
            yield Case(f"{to} mask: {what}", lambda p=part, b=back: packed(*good, b, mask=p), refused)


def dropout() -> Iterator[Case]:
    """Yield calls with dropout whose seed or probability is none."""
    seeds: dict[str, Callable[[], Any]] = {
        "missing": lambda: None, "int32": lambda: torch.zeros(1, 1, dtype=torch.int32), "float": lambda: torch.zeros(1, 1),
        "0-D": lambda: torch.tensor(3), "empty": lambda: torch.zeros(0, 1, dtype=torch.int64),
        "1-D": lambda: torch.zeros(1, dtype=torch.int64), "3 heads": lambda: torch.zeros(1, 3, dtype=torch.int64),
        "meta": lambda: torch.zeros(1, 1, dtype=torch.int64, device="meta"), "bool": lambda: torch.zeros(1, 1, dtype=torch.bool),
        "freed": lambda: freed(torch.tensor([[3]])), "sparse": lambda: torch.tensor([[3]]).to_sparse(),
    }  # fmt: skip
    for direction in (forward, backward):
        for what, seed in seeds.items():
            yield Case(
                f"{direction.__name__} seed {what}", lambda s=seed, d=direction: d(seed=s(), dropout_p=0.5), True
            )
        for value in (-(1 << 63), (1 << 63) - 1, 0):
            yield Case(
                f"{direction.__name__} seed {value}",
                lambda v=value, d=direction: d(seed=torch.tensor([[v]]).expand(BATCH, HEADS), dropout_p=0.5), False,
            )  # fmt: skip
        for p in (-0.1, 1.1, math.nan, math.inf, 1.0, 1 - 1e-7, 1 - 1e-9, 1e-9, 5e-324):
            refused = not 0 <= p <= 1
            yield Case(
                f"{direction.__name__} p {p}",
                lambda p=p, d=direction: d(seed=torch.tensor([[3]]), dropout_p=p),
                refused,
            )


def saved_tensors() -> Iterator[Case]:
    """Yield backwards whose saved tensors or gradients are others than their forward's."""
    wrong: dict[str, tuple[Change, bool | None, bool]] = {
        "short": (lambda t: t[:, :-1], True, False), "a head less": (lambda t: t[:, :, :-1], True, False),
        "empty": (lambda t: t[:0], True, False), "1-D": (lambda t: t.flatten(), True, False),
        "transposed": (lambda t: t.transpose(1, 2), True, False), "float64": (lambda t: t.double(), True, False),
        "half": (lambda t: t.half(), True, False), "int": (lambda t: t.int(), True, False),
        "meta": (lambda t: t.to("meta"), True, False),
        "expanded": (lambda t: t.flatten()[:1].reshape([1] * t.dim()).expand(t.shape), False, False),
        "strided": (lambda t: t.repeat_interleave(2, -1)[..., ::2], False, False), "sparse": (lambda t: t.to_sparse(), True, False),
        "freed": (freed, True, False), "complex": (lambda t: t.to(torch.complex64), True, False),
        "negated": (lambda t: torch.view_as_complex(torch.stack((t, t), -1)).conj().imag, None, False),
        "zero": (torch.zeros_like, False, False),
        **{str(x): (lambda t, x=x: torch.full_like(t, x), False, True) for x in (math.nan, math.inf, -math.inf, 1e38, -1e38)},
    }  # fmt: skip
    for which in ("out", "lse", "lse_tail", "grad_out", "grad_lse"):
        for what, (change, refused, nan) in wrong.items():
            for kind in ("", "bits", "segments", "intervals") if nan or what == "expanded" else ("",):

                def run(which: str = which, change: Change = change, kind: str = kind) -> object:
                    return backward(copied(KINDS[kind]()) if kind else None, **{which: change})

                nan_too = nan or what in ("zero", "expanded")  # statistics of other rows
                yield Case(f"{which} {what} {kind}", run, refused, nan_too)
    same = torch.randn(1, 200, 2, 32)
    yield Case("query, key and value are one", lambda: backward(inputs=(same, same, same)), False)
    yield Case("grad_out is out", lambda: backward(grad_out=lambda g: g), False)


def sizes() -> Iterator[Case]:
    """Yield calls with sizes of 0, and head dimensions up to 100,000."""
    for what, size in {
        "no batch": {"b": 0}, "no queries": {"sq": 0}, "no keys": {"sk": 0}, "neither": {"sq": 0, "sk": 0}, "no heads": {"h": 0},
        "no key heads": {"hk": 0}, "no heads at all": {"h": 0, "hk": 0}, "no batch, no keys": {"b": 0, "sk": 0},
        "no dimension": {"d": 0, "dv": 5}, "no value": {"dv": 0},
    }.items():  # fmt: skip
        n = {"b": BATCH, "h": HEADS, "sq": SEQLEN_Q, "sk": SEQLEN_K, "d": DIM} | size
        yield Case(f"forward {what}", lambda s=size: forward(inputs=qkv(**s)))
        yield Case(f"backward {what}", lambda s=size: backward(inputs=qkv(**s)))
        bias = torch.zeros(n["b"], n["h"], n["sq"], n["sk"])
        yield Case(f"bias {what}", lambda s=size, b=bias: backward(inputs=qkv(**s), bias=b, needs_dbias=True))

        def masked(s: dict[str, int] = size, n: dict[str, int] = n, rows: bool = True) -> object:
            shown = torch.ones(n["b"], n["h"] if rows else 1, n["sq"] if rows else 1, n["sk"], dtype=torch.bool)
            return backward(copied(dmattn_ops.prepare_mask(shown, seqlen_q=n["sq"]).mask), inputs=qkv(**s))

        yield Case(f"bits {what}", masked)
        yield Case(f"segments {what}", lambda masked=masked: masked(rows=False))

        def in_one(n: dict[str, int] = n) -> object:
            out, lse, tail, _ = ops.qkvpacked_forward(x := torch.randn(n["b"], n["sq"], 3, n["h"], n["d"]))
            return ops.qkvpacked_backward(out, lse, x, out, lse, tail)

        yield Case(f"qkvpacked {what}", in_one)
    for dim in (1, 3, 255, 257, 1000, 1023, 1024, 1025, 4096, 100_000):
        small = {"b": 1, "sq": 20, "sk": 20, "h": 2, "hk": 1}
        yield Case(f"dimension {dim}", lambda d=dim, s=small: backward(inputs=qkv(**s, d=d)), dim > 1024)
        yield Case(f"value {dim}", lambda d=dim, s=small: backward(inputs=qkv(**s, d=16, dv=d)), dim > 1024)


def equal_to_copies(inputs: list[Tensor], **others: Any) -> object:
    """Run a call on views and on contiguous copies of them; Wrong where the results differ."""
    both = [
        (*backward(inputs=tuple(x), **others), *forward(inputs=x)) for x in (inputs, [x.contiguous() for x in inputs])
    ]
    room = 1e-2 if inputs[0].dtype == torch.bfloat16 else 1e-4
    for one, other in zip(*both, strict=True):
        if not torch.allclose(one.double(), other.double(), rtol=room, atol=room, equal_nan=True):
            raise Wrong(f"strides change a result by {(one.double() - other.double()).abs().max():.3g}")
    return both


def strides() -> Iterator[Case]:
    """Yield inputs whose elements share memory, and compare with copies."""
    dims = ([0], [1], [2], [3], [0, 1], [1, 2], [0, 1, 2], [0, 1, 2, 3])
    for which, dim, dtype, (seqlen, heads) in itertools.product(range(3), dims, DTYPES, ((300, 4), (5, 2))):

        def expanded(
            which: int = which, dim: Any = dim, dtype: Any = dtype, seqlen: int = seqlen, heads: int = heads
        ) -> object:
            inputs = list(qkv(dtype, sq=seqlen, sk=256, h=heads))
            one = inputs[which][tuple(slice(0, 1) if d in dim else slice(None) for d in range(4))]
            inputs[which] = one.expand(inputs[which].shape)
            return equal_to_copies(inputs)

        yield Case(f"{('query', 'key', 'value')[which]} expanded in {dim}, {dtype}, {seqlen} queries", expanded, False)
    overlaps = (
        (0, 1, 16, 1),
        (0, 0, 0, 1),
        (0, 8, 0, 1),
        (0, 64, 1, 1),
        (0, 31, 7, 1),
        (0, 16, 8, 1),
        (0, 32, 0, 1),
        (3, 33, 32, 1),
    )
    for dtype, seqlen, steps in itertools.product(DTYPES, (5, 300), overlaps):

        def overlapping(dtype: Any = dtype, seqlen: int = seqlen, steps: Any = steps) -> object:
            base = torch.randn(256 * 256, generator=torch.Generator().manual_seed(0)).to(dtype)
            key = base.as_strided((1, 256, 2, 32), steps)
            return equal_to_copies([qkv(dtype, b=1, sq=seqlen, h=2)[0], key, key])

        yield Case(f"rows at {steps}, {dtype}, {seqlen} queries", overlapping, False)


def inputs_and_biases() -> Iterator[Case]:
    """Yield inputs and biases of other shapes, dtypes, layouts and memory."""
    shapes = (
        (BATCH, HEADS, SEQLEN_Q, SEQLEN_K),
        (1, 1, 1, SEQLEN_K),
        (BATCH, 1, SEQLEN_Q, SEQLEN_K),
        (1, HEADS, 1, SEQLEN_K),
    )
    for shape, is_expanded in itertools.product((*shapes, (1, KV_HEADS, SEQLEN_Q, SEQLEN_K)), (False, True)):

        def biased(shape: Any = shape, is_expanded: bool = is_expanded) -> object:
            bias = torch.randn(shape)
            bias = bias[:1, :1, :1].expand(shape) if is_expanded else bias
            return backward(bias=bias, needs_dbias=True)

        def masked(shape: Any = shape, is_expanded: bool = is_expanded) -> object:
            mask = torch.randn(shape) > 0
            mask = mask[:1, :1, :1].expand(shape) if is_expanded else mask
            return dmattn_ops.flash_dmattn_func(*qkv(), mask, is_causal=True)

        yield Case(f"bias {shape}, expanded {is_expanded}", biased, False)
        yield Case(f"mask {shape}, expanded {is_expanded}", masked, False)
    square = (1, 1, SEQLEN_Q, SEQLEN_K)
    for what, (bias, refused) in {
        "expanded last": (torch.randn(1, 1, SEQLEN_Q, 1).expand(square), False),
        "transposed": (torch.randn(1, 1, SEQLEN_K, SEQLEN_Q).mT, False), "short": (torch.randn(1, 1, SEQLEN_Q, SEQLEN_K - 1), True),
        "fewer queries": (torch.randn(1, 1, SEQLEN_Q - 1, SEQLEN_K), True),
        "3 heads": (torch.randn(1, 3, SEQLEN_Q, SEQLEN_K), True),
        "no heads": (torch.randn(1, 0, SEQLEN_Q, SEQLEN_K), True), "3-D": (torch.randn(1, SEQLEN_Q, SEQLEN_K), True),
        "int": (torch.ones(square, dtype=torch.int32), True), "half": (torch.ones(square, dtype=torch.half), True),
        "float64": (torch.ones(square, dtype=torch.float64), True), "freed": (freed(torch.ones(square)), True),
        "meta": (torch.ones(square, device="meta"), True), "sparse": (torch.ones(square).to_sparse(), True),
    }.items():  # fmt: skip
        yield Case(f"bias {what}", lambda b=bias: backward(bias=b, needs_dbias=True), refused)
    query, key, value = qkv()
    for what, wrong in {
        "mixed dtypes": (query, key.double(), value), "3 of 4 heads": qkv(hk=3), "fewer heads": qkv(h=2, hk=4),
        "shorter value": (query, key, value[:, :-1]), "longer value": (query, key, qkv(sk=SEQLEN_K + 1)[2]),
        "another batch": (query, key[:1], value[:1]), "another dimension": (query, key[..., :16], value),
        "3-D": (query[0], key[0], value[0]), "5-D": (query[None], key[None], value[None]),
        **{str(d): tuple(x.to(d) for x in (query, key, value)) for d in (torch.int32, torch.bool, torch.complex64, torch.uint16)},
    }.items():  # fmt: skip
        yield Case(f"inputs: {what}", lambda w=wrong: forward(inputs=w), True)
    kinds: dict[str, Change] = {
        "sparse": lambda t: t.to_sparse(), "mkldnn": lambda t: t.to_mkldnn(), "meta": lambda t: t.to("meta"),
        "zeros": lambda t: torch._efficientzerotensor(t.shape), "negated": torch._neg_view, "freed": freed,
        "nested": lambda t: torch.nested.nested_tensor(list(t)),
        "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
        "numpy": lambda t: t.numpy(), "None": lambda t: None, "csr": lambda t: t[0, :, 0].to_sparse_csr(),
    }  # fmt: skip
    for (what, change), which, public in itertools.product(kinds.items(), (0, 1, 2, None), (False, True)):
        if what == "None" and not public:
            continue  # the dispatcher passes it on; Python says that it has no shape

        def other_kind(change: Change = change, which: int | None = which, public: bool = public) -> object:
            inputs = [change(x) if which in (None, index) else x for index, x in enumerate(qkv())]
            return dmattn_ops.flash_dmattn_func(*inputs) if public else ops.forward(*inputs)

        yield Case(f"{'function' if public else 'operator'} {which} {what}", other_kind)


def not_finite() -> Iterator[Case]:
    """Yield calls in which everything is one number that is none, or too large or small."""
    numbers = (math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e-45)
    for number, dtype, kind in itertools.product(numbers, (*DTYPES, torch.float16), ("", *KINDS)):

        def run(number: float = number, dtype: Any = dtype, kind: str = kind) -> object:
            def filled(tensor: Tensor) -> Tensor:
                return torch.full(tensor.shape, number).to(tensor.dtype)

            bias = torch.full((1, HEADS, SEQLEN_Q, SEQLEN_K), number).to(dtype)
            others = {"bias": bias, "needs_dbias": True, "grad_out": filled, "grad_lse": filled}
            return backward(copied(KINDS[kind]()) if kind else None, inputs=tuple(map(filled, qkv(dtype))), **others)

        yield Case(f"{number} {dtype} {kind}", run, False, nan=True)


def shown_by(low: int, high: int) -> Tensor:
    """Return what a band of any integers shows, `[Sq, Sk]`: from 64-bit limits that cannot overflow beside positions."""
    low, high = (max(-(1 << 40), min(1 << 40, limit)) for limit in (low, high))
    distance = torch.arange(SEQLEN_K) - torch.arange(SEQLEN_Q)[:, None]
    return (distance >= low) & (distance <= high)


def bands() -> Iterator[Case]:
    """Yield bands of any integers: what they show is what integers say that do not overflow."""
    for low, high in itertools.product(INTEGERS, INTEGERS):

        def seen(low: int = low, high: int = high) -> object:
            out, lse, *_ = forward(band_lo=low, band_hi=high)
            if not torch.equal(lse == -math.inf, ~shown_by(low, high).any(-1).expand(lse.shape)):
                raise Wrong("other rows see nothing than in Python's integers")
            return out, backward(band_lo=low, band_hi=high)

        def packs(low: int = low, high: int = high) -> object:
            made = ops.pack_mask(
                torch.ones(1, 1, SEQLEN_Q, SEQLEN_K, dtype=torch.bool), None, None, SEQLEN_Q, low, high
            )
            ops.list_tiles(None, torch.zeros(1, 1, SEQLEN_K, dtype=torch.int32), SEQLEN_Q, low, high)
            if not torch.equal(layout.dense(Mask(*made), low, high, SEQLEN_Q, SEQLEN_K)[0, 0], shown_by(low, high)):
                raise Wrong("a packed band shows something else than Python's integers")
            return made

        yield Case(f"band {low} {high}", seen, False)
        yield Case(f"packed band {low} {high}", packs, False)


def numbers() -> Iterator[Case]:
    """Yield scales, soft caps, origins and promises at the ends of their types."""
    for name, values in {
        "softmax_scale": (math.nan, math.inf, -math.inf, 0.0, -1.0, 1e300, 1e-300, 3.4e38),
        "softcap": (math.nan, math.inf, -1.0, 1e300, 1e-300, 1e-45, 5e-324, 3.4e38),
    }.items():
        for value in values:
            refused = True if not math.isfinite(value) or (name == "softcap" and value < 0) else None
            finite = abs(value) < 1e38  # scores that overflow make NaN
            yield Case(f"{name} {value}", lambda n=name, v=value: forward(**{n: v}), refused, nan=not finite)
    for name, value in itertools.product(("q_origin", "k_origin"), INTEGERS):
        refused = not 0 <= value < UNBOUNDED
        yield Case(f"{name} {value}", lambda n=name, v=value: forward(**{n: v}), refused)
    for value in INTEGERS:
        mask = copied(intervals()) | {"at_most": value}
        yield Case(f"at_most {value}", lambda m=mask: forward(m), value < 90)


def masks() -> Iterator[Case]:
    """Yield tensors and numbers that make no mask."""
    ids, queries = torch.zeros(1, 1, SEQLEN_K, dtype=torch.int32), torch.zeros(1, SEQLEN_Q, dtype=torch.int32)

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.bool)

    full = ones(1, 1, SEQLEN_Q, SEQLEN_K)
    for seqlen in (-1, -128, -300, 1 << 62, (1 << 63) - 1):
        yield Case(
            f"pack of {seqlen} queries", lambda s=seqlen: ops.pack_mask(ones(1, 1, 1, SEQLEN_K), None, None, s), True
        )
        yield Case(f"list of {seqlen} queries", lambda s=seqlen: ops.list_tiles(None, ids, s), True)
    for what, (mask, q, k, refused) in {
        "3-D": (full[0], None, None, True), "no keys": (full[..., :0], None, None, None),
        "no heads": (full[:, :0], None, None, None), "no batch": (full[:0], None, None, None),
        "expanded": (ones(1, 1, 1, 1).expand(2, 3, SEQLEN_Q, SEQLEN_K), None, None, False),
        "transposed": (ones(1, 1, SEQLEN_K, SEQLEN_Q).mT, None, None, False),
        "strided": (ones(1, 1, SEQLEN_Q, 2 * SEQLEN_K)[..., ::2], None, None, False),
        "overlapping": (ones(5000).as_strided((1, 1, SEQLEN_Q, SEQLEN_K), (0, 0, 1, 1)), None, None, False),
        "short queries": (full, queries[:, :-1], ids, True), "short keys": (full, None, ids[..., :-1], True),
        "3-D queries": (full, queries[None], None, True), "int64 queries": (full, queries.long(), None, True),
        "queries alone": (full, queries, None, None),
        "batches 2 and 3": (full.expand(2, -1, -1, -1), queries.expand(3, -1), None, True),
        "heads 2 and 4": (full.expand(-1, 2, -1, -1), None, ids.expand(-1, 4, -1), True), "freed": (freed(full), None, None, True),
        "extreme ids": (full, torch.full_like(queries, LEAST), torch.full_like(ids, LEAST), False),
        "meta": (full.to("meta"), None, None, None), "sparse": (full.to_sparse(), None, None, True),
    }.items():  # fmt: skip
        yield Case(f"pack: {what}", lambda m=mask, q=q, k=k: ops.pack_mask(m, q, k, SEQLEN_Q), refused)
    for seqlen in (SEQLEN_Q + 1, SEQLEN_Q - 1):
        yield Case(f"pack: {seqlen} queries", lambda s=seqlen: ops.pack_mask(full, None, None, s), True)
    for what, (q, k, seqlen) in {
        "other queries": (queries, ids, SEQLEN_Q + 200), "2-D": (None, ids[0], SEQLEN_Q), "float": (None, ids.float(), SEQLEN_Q),
    }.items():  # fmt: skip
        yield Case(f"list: {what}", lambda q=q, k=k, s=seqlen: ops.list_tiles(q, k, s), True)
    dtypes = (
        torch.complex64,
        torch.float8_e4m3fn,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.float64,
        torch.bfloat16,
    )
    for dtype in dtypes:
        yield Case(f"mask of {dtype}", lambda d=dtype: ops.pack_mask(full.to(d), None, None, SEQLEN_Q))
    documents = torch.zeros(1, 300, dtype=torch.int64)
    for what, given in {
        "float documents": {"documents": documents.float()}, "least documents": {"documents": documents - (1 << 63)},
        "far documents": {"documents": torch.randint(-(1 << 62), 1 << 62, (2, 300))}, "no batch": {"documents": documents[:0]},
        "no documents": {"documents": documents[:, :0]}, "uint64": {"documents": documents.to(torch.uint64)},
        "sizes": {"mask": ones(1, 1, 300, 300), "documents": documents[:, :-1]},
        "far window": {"mask": ones(1, 100), "seqlen_q": 100, "window_size": (1 << 70, 1 << 70)},
    }.items():  # fmt: skip
        yield Case(f"prepare_mask: {what}", lambda g=given: dmattn_ops.prepare_mask(**g).to_dense())
    for counts in itertools.product((-1, 0, 5, 1 << 62), (-(1 << 62), 0, (1 << 63) - 1), (-1, 0, 1 << 40)):
        refused = min(counts) < 0
        yield Case(
            f"key_lifetimes {counts}", lambda c=counts: ops.key_lifetimes(torch.randn(1, 1, 300), None, *c), refused
        )


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    each.__name__: each
    for each in (
        lists_of_tiles, contents, shapes, packed_sequences, dropout, saved_tensors, sizes, strides, inputs_and_biases, not_finite,
        bands, numbers, masks,
    )
}  # fmt: skip


def tensors(found: Any) -> Iterator[Tensor]:
    """Yield the dense tensors of floating numbers in a result."""
    if isinstance(found, (tuple, list)):
        for each in found:
            yield from tensors(each)
    elif isinstance(found, Tensor) and found.is_floating_point() and found.is_cpu and found.layout == torch.strided:
        yield found


def ended(case: Case) -> str:
    """Run a case; return "refused", "returned", or what is wrong with how it ended."""
    try:
        found = case.run()
        holes = 0 if case.nan else sum(int(each.isnan().sum()) for each in tensors(found))
    except Wrong as error:
        return f"wrong: {error}"
    except REFUSALS as error:
        text = " ".join(str(error).split())
        return f"out of memory: {text}" if "alloc" in text and "storage" not in text else "refused"
    except BaseException as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return f"{holes} NaN in what it returned" if holes else "returned"


def main(groups: list[str]) -> None:
    """Run the cases of groups, one line for each."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    for group in groups:
        torch.manual_seed(0)
        for case in GROUPS[group]():
            print(f"{group}\t{case.name}\t{ended(case)}\t{case.refused}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
