"""Adversarial calls of the operators with other inputs, saved tensors, memory, sizes and numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from adversarial_cases import (
    BATCH,
    DIM,
    DTYPES,
    HEADS,
    INTEGERS,
    KINDS,
    KV_HEADS,
    LEAST,
    MOST,
    SEQLEN_K,
    SEQLEN_Q,
    Case,
    Change,
    Wrong,
    backward,
    copied,
    forward,
    freed,
    intervals,
    ops,
    qkv,
)  # fmt: skip
from torch import Tensor

import dmattn_ops
from dmattn_ops.call import UNBOUNDED


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
            early = what in ("short", "all 0")  # rows behind the last offset belong to no sequence
            yield Case(f"{to} of queries: {what}", lambda o=offsets, b=back: packed(o, good[1], b), not early)
            yield Case(f"{to} of keys: {what}", lambda o=offsets, b=back: packed(good[0], o, b), what != "all 0")
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
            refused = what not in ("strided", "expanded")  # whose numbers are right
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
