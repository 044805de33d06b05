"""Calls of the C++ operators with altered index tensors, wrong shapes, dtypes and memory, in groups.

As a script, `untrusted_calls.py GROUP` runs one group and prints a line for each case: its name, and how it ended. A case
that ends the process has no line.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmattn_ops import call as calls
from dmattn_ops import meta
from dmattn_ops.call import NO_MASK, UNBOUNDED, Mask, Varlen, plain_options
from dmattn_ops.kernels import native

BATCH, HEADS, KV_HEADS, SEQLEN_Q, SEQLEN_K, DIM = 2, 4, 2, 300, 260, 32
LEAST, MOST = -(1 << 31), (1 << 31) - 1
FREE = (-UNBOUNDED, UNBOUNDED)
REFUSALS = (ValueError, RuntimeError, TypeError)


class Case(NamedTuple):
    """What is called, and whether it must be refused; else it must end well."""

    name: str
    run: Callable[[], object]
    refused: bool = True


def qkv(**size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value; sizes by the names b, sq, sk, h, hk, d."""
    n = {"b": BATCH, "sq": SEQLEN_Q, "sk": SEQLEN_K, "h": HEADS, "hk": KV_HEADS, "d": DIM} | size
    query, key = torch.randn(n["b"], n["sq"], n["h"], n["d"]), torch.randn(n["b"], n["sk"], n["hk"], n["d"])
    return query, key, torch.randn(key.shape)


def bits() -> Mask:
    """Return a mask of bits `[2, 2, 300, 260]` with wholly and partly visible tiles."""
    keep = torch.rand(BATCH, KV_HEADS, SEQLEN_Q, SEQLEN_K, generator=torch.Generator().manual_seed(0)) < 0.5
    keep[..., :128, :128] = True
    outputs = meta.pack_mask_outputs(keep, BATCH, KV_HEADS, SEQLEN_Q, *FREE)
    native.pack_mask(keep, None, None, SEQLEN_Q, *FREE, *outputs)
    return Mask(*outputs)


def segments() -> Mask:
    """Return a mask of segments `[2, 2, 260]` in which tiles are listed."""
    ids = torch.randint(
        0, 2, (BATCH, KV_HEADS, SEQLEN_K), generator=torch.Generator().manual_seed(0), dtype=torch.int32
    )
    ids[..., :128] = 0
    lists = meta.list_tiles_outputs(ids, BATCH, KV_HEADS, SEQLEN_Q, SEQLEN_K, *FREE)
    native.list_tiles(None, ids, SEQLEN_Q, *FREE, *lists)
    return Mask(*lists, None, None, torch.zeros(BATCH, SEQLEN_Q, dtype=torch.int32), ids)


def intervals() -> Mask:
    """Return a mask of intervals `[2, 2, 260]`, a part of each hidden."""
    start = torch.arange(SEQLEN_K, dtype=torch.int32).expand(BATCH, KV_HEADS, -1).contiguous()
    return Mask(*(None,) * 6, start, start + 90, start + 5, start + 9)


def call_of(mask: Mask = NO_MASK, inputs: Any = None, **others: Any) -> calls.Call:
    """Return a call; others are `bias`, `seed`, `varlen` and numbers of its options."""
    tensors = {name: others.pop(name, None) for name in ("bias", "seed", "varlen")}
    options = plain_options(0.2, **others)
    inputs = inputs or qkv()
    return calls.Call(*inputs, tensors["bias"], mask, None, tensors["seed"], tensors["varlen"], options)


def forward(call: calls.Call, **results: Any) -> calls.Result:
    """Run the forward; results may be given by name."""
    made = dict(zip(calls.Result._fields, meta.forward_outputs(call.query, call.value, True), strict=True))
    result = calls.Result(**(made | results))
    native.forward(call, result, None)
    return result


def backward(call: calls.Call, good: calls.Call | None = None, **given: Any) -> calls.Gradients:
    """Run the backward after a forward of the call or of a good one; tensors of Saved and Gradients by name."""
    result = forward(good or call)
    saved = {"out": result.out, "lse": result.lse, "lse_tail": result.lse_tail}
    dbias = None if call.bias is None else torch.empty_like(call.bias)
    grads = {"grad_out": torch.ones_like(result.out), "grad_lse": None, "dq": torch.empty_like(call.query)}
    grads |= {"dk": torch.empty_like(call.key), "dv": torch.empty_like(call.value), "dbias": dbias}
    saved |= {name: given.pop(name) for name in tuple(given) if name in saved}
    native.backward(call, calls.Saved(**saved), calls.Gradients(**(grads | given)), None)
    return calls.Gradients(**(grads | given))


def altered_lists(kind: Callable[[], Mask], name: str) -> Iterator[Case]:
    """Yield calls whose list of tiles was altered in place: rows for the forward, columns for the backward."""
    changes: list[tuple[str, Callable[[Tensor], object], bool]] = [
        (f"word {word} is {value}", lambda t, w=word, v=value: t[..., w].fill_(v), True)
        for word in (0, 1, 2)
        for value in (-1, 50, 100_000, LEAST, MOST)
    ]
    changes += [(f"index {v}", lambda t, v=v: t[..., 4:].fill_(v), True) for v in (3, 4, 10**6, -1, -5, LEAST, MOST)]
    changes += [
        ("ranks of 0", lambda t: t[..., 0].zero_(), True),
        ("one index twice", lambda t: t[..., 4:].zero_(), True),
        ("one more than there is room for", lambda t: (t[..., 1].fill_(1), t[..., 2].fill_(t.shape[-1] - 4)), True),
        ("any numbers", lambda t: t.random_(LEAST, MOST), True),
        ("small numbers", lambda t: t.random_(-3, 8), True),
        ("wholly visible tiles at the end", lambda t: (t[..., 2].add_(t[..., 1]), t[..., 1].zero_()), True),
        ("the unused word", lambda t: t[..., 3].fill_(7), False),
    ]
    for what, change, refused in changes:

        def run(change: Callable[[Tensor], object] = change) -> object:
            good, bad = kind(), kind()
            change(getattr(bad, name))
            return forward(call_of(bad)) if name == "row_tiles" else backward(call_of(bad), call_of(good))

        yield Case(f"{name}: {what}", run, refused)


RESHAPED: dict[str, Callable[[Tensor], Tensor | None]] = {
    "one dimension": lambda t: t.flatten(),
    "no dimension": lambda t: torch.tensor(3, dtype=torch.int32),
    "no element": lambda t: t.new_empty(0),
    "a dimension more": lambda t: t[None],
    "float": lambda t: t.float(),
    "on meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "last dimension less": lambda t: t[..., :-1],
    "last dimension 0": lambda t: t[..., :0],
    "rows less": lambda t: t[..., :-1, :],
    "heads 0": lambda t: t[:, :0],
    "batch 0": lambda t: t[:0],
    "heads 3": lambda t: torch.cat((t, t[:, :1]), 1),
    "batch 3": lambda t: torch.cat((t, t[:1]), 0),
    "freed memory": lambda t: (t.untyped_storage().resize_(0), t)[1],
}
HARMLESS = {  # lists that the direction does not walk, and segments that are shared by a batch or by heads
    ("forward", "col_tiles", "last dimension less"), ("backward", "row_tiles", "last dimension less"),
    *((direction, name, "rows less") for direction in ("forward", "backward") for name in ("q_segments", "k_segments")),
}  # fmt: skip


def reshaped(kind: Callable[[], Mask]) -> Iterator[Case]:
    """Yield calls with one tensor of the mask in another shape or dtype, forward and backward."""
    for name, tensor in zip(Mask._fields[:-1], kind()[:-1], strict=True):
        if tensor is None:
            continue
        for what, change in {**RESHAPED, "missing": lambda t: None}.items():
            if what == "missing" and name in ("q_segments", "k_segments"):
                continue  # another mask, as good
            for run in (forward, backward):

                def altered(name: str = name, change: Any = change, run: Any = run) -> object:
                    bad = kind()
                    bad = bad._replace(**{name: change(getattr(bad, name))})
                    return run(call_of(bad)) if run is forward else run(call_of(bad), call_of(kind()))

                yield Case(f"{run.__name__} {name}: {what}", altered, (run.__name__, name, what) not in HARMLESS)


def several_kinds() -> Iterator[Case]:
    """Yield masks of tensors that do not belong together."""
    many, ids, seen = bits(), segments(), intervals()
    yield Case("bits and segments", lambda: forward(call_of(many._replace(k_segments=ids.k_segments))))
    yield Case("bits and intervals", lambda: forward(call_of(many._replace(start=seen.start, end=seen.end))))
    yield Case("segments of queries alone", lambda: forward(call_of(Mask(q_segments=ids.q_segments))))
    yield Case("segments without lists", lambda: forward(call_of(Mask(k_segments=ids.k_segments))), False)
    yield Case("start alone", lambda: forward(call_of(Mask(start=seen.start))))
    yield Case("hidden alone", lambda: forward(call_of(Mask(hidden_from=seen.start, hidden_to=seen.end))))
    yield Case("at_most below 0", lambda: forward(call_of(seen._replace(at_most=-1))))
    yield Case("at_most of 2^62", lambda: forward(call_of(seen._replace(at_most=1 << 62))), False)
    for name in Mask._fields[:4]:
        yield Case(f"{name} alone", lambda name=name: forward(call_of(Mask(**{name: getattr(many, name)}))))
    for low, high in ((LEAST, MOST), (MOST, LEAST), (LEAST, LEAST), (MOST, MOST), (-5, 2)):
        full = torch.full_like(seen.start, low), torch.full_like(seen.start, high)
        yield Case(f"intervals {low} {high}", lambda f=full: backward(call_of(Mask(start=f[0], end=f[1]))), False)
        yield Case(
            f"hidden {low} {high}",
            lambda f=full: backward(call_of(seen._replace(hidden_from=f[0], hidden_to=f[1]))),
            False,
        )
    anything = seen.start.clone().random_(LEAST, MOST)
    yield Case("any intervals", lambda: backward(call_of(seen._replace(start=anything, hidden_to=anything))), False)


def packed_sequences() -> Iterator[Case]:
    """Yield variable lengths with offsets that lie."""
    query, key, value = (x[0] for x in qkv())

    def varlen(of_q: Any, of_k: Any, dtype: torch.dtype = torch.int32, **others: Any) -> calls.Call:
        offsets = (x if isinstance(x, Tensor) else torch.tensor(x, dtype=dtype) for x in (of_q, of_k))
        return call_of(inputs=(query, key, value), varlen=Varlen(*offsets, 300, 300, False), **others)

    good = ([0, 100, 300], [0, 50, 260])
    for what, offsets in {
        "decreasing": [0, 200, 100, 300], "beyond": [0, 100, 400], "negative": [-5, 100, 300], "late": [5, 100, 299],
        "extreme": [0, MOST, LEAST, 300], "all extreme": [MOST, MOST, MOST], "none": [0], "overlapping": [0, 200, 10, 250],
    }.items():  # fmt: skip
        yield Case(f"offsets {what}", lambda o=offsets: backward(varlen(o, o)), False)
    yield Case("different numbers", lambda: forward(varlen([0, 100, 300], [0, 260])))
    yield Case("no offsets", lambda: forward(varlen([], [])))
    yield Case("two dimensions", lambda: forward(varlen([[0, 300]], [[0, 260]])))
    yield Case("a number", lambda: forward(varlen(torch.tensor(3), torch.tensor(3))))
    yield Case("floating", lambda: forward(varlen(*good, dtype=torch.float32)))
    yield Case("dense inputs", lambda: forward(varlen(*good)._replace(query=qkv()[0])))
    yield Case("dense bias", lambda: forward(varlen(*good, bias=torch.zeros(1, 1, 300, 260))))
    yield Case("short bias", lambda: forward(varlen(*good, bias=torch.zeros(1, 259))))
    yield Case("intervals", lambda: forward(varlen(*good)._replace(mask=intervals())))
    keys = Mask(k_segments=torch.zeros(1, 1, 259, dtype=torch.int32))
    yield Case("short keys", lambda: forward(varlen(*good)._replace(mask=keys)))
    freed = torch.tensor(good[0], dtype=torch.int32)
    freed.untyped_storage().resize_(0)
    yield Case("freed", lambda: forward(varlen(freed, good[1])))


def tensors_and_numbers() -> Iterator[Case]:
    """Yield calls with wrong inputs, outputs and numbers."""
    query, key, value = qkv()
    freed = torch.randn(query.shape)
    freed.untyped_storage().resize_(0)
    yield Case("no batch, which is empty", lambda: forward(call_of(inputs=qkv(b=0))), False)
    for what, inputs in {
        "no dimension": (torch.tensor(1.0),) * 3, "short value": (query, key, value[:, :4]),
        "narrow key": (query, key[..., :8], value),
        "other batch": (query, key[:1], value[:1]), "no key heads": qkv(hk=0), "three heads": (query[:, :, :3], key, value),
        "half key": (query, key.half(), value), "integers": tuple(x.int() for x in (query, key, value)),
        "strided": (query[..., ::2], key[..., ::2], value), "freed": (freed, key, value), "on meta": (query.to("meta"), key, value),
        "sparse": (query.to_sparse(), key, value),
    }.items():  # fmt: skip
        good = meta.forward_outputs(query, value, False)
        result = calls.Result(*good[:3], None)
        yield Case(f"inputs: {what}", lambda x=inputs, r=result: native.forward(call_of(inputs=x), r, None))
    # torch hands over what lazily negated views show
    yield Case("negated", lambda: forward(call_of(inputs=(query._neg_view(), key, value))), False)
    for what, bias in {
        "short": torch.zeros(1, 1, 1, 8), "three heads": torch.zeros(1, 3, 1, SEQLEN_K), "one dimension": torch.zeros(3),
        "integers": torch.zeros(1, 1, 1, SEQLEN_K, dtype=torch.int32), "batch 3": torch.zeros(3, 1, 1, SEQLEN_K),
    }.items():  # fmt: skip
        yield Case(f"bias: {what}", lambda b=bias: forward(call_of(bias=b)))
    for what, seed in {
        "missing": None, "empty": torch.zeros(0, 1, dtype=torch.int64), "floating": torch.zeros(1, 1),
        "three heads": torch.zeros(1, 3, dtype=torch.int64), "one dimension": torch.zeros(1, dtype=torch.int64),
    }.items():  # fmt: skip
        yield Case(f"seed: {what}", lambda s=seed: forward(call_of(seed=s, dropout_p=0.5)))
    for name, number in {"softcap": -1.0, "softmax_scale": math.nan}.items():
        broken = call_of()._replace(options=call_of().options._replace(**{name: number}))
        yield Case(f"{name} {number}", lambda c=broken: forward(c))
    for low, high in ((1 << 62, 5), (-5, -(1 << 62)), (1 << 62, 1 << 62), (-(1 << 62), 1 << 62), (3, -3)):
        yield Case(f"band {low} {high}", lambda b=(low, high): backward(call_of(band_lo=b[0], band_hi=b[1])), False)
    short, double = torch.empty(BATCH, 3, HEADS, DIM), torch.zeros(BATCH, HEADS, SEQLEN_Q, dtype=torch.float64)
    for what, given in {
        "short out": {"out": short}, "half out": {"out": torch.empty(query.shape, dtype=torch.half)},
        "flat out": {"out": torch.empty(5)},
        "double lse": {"lse": double}, "short tail": {"lse_tail": torch.zeros(BATCH, HEADS, 3)},
        "half maximum": {"row_max": double.half()},
    }.items():  # fmt: skip
        yield Case(f"result: {what}", lambda g=given: forward(call_of(), **g))
    for what, given in {
        "double lse": {"lse": double}, "short lse": {"lse": double[..., :3].float()}, "half tail": {"lse_tail": double.half()},
        "short out": {"out": short}, "short grad_out": {"grad_out": short},
        "short dq": {"dq": short}, "half dq": {"dq": torch.empty(query.shape).half()},
        "half dk": {"dk": torch.empty(key.shape).half()}, "short dv": {"dv": torch.empty(BATCH, 3, KV_HEADS, DIM)},
        "double grad_lse": {"grad_lse": double}, "dbias without bias": {"dbias": torch.zeros(1, 1, 1, 8)},
        "freed dq": {"dq": freed},
    }.items():  # fmt: skip
        yield Case(f"gradients: {what}", lambda g=given: backward(call_of(), **g))
    biased = call_of(bias=torch.zeros(1, 1, SEQLEN_Q, SEQLEN_K))
    yield Case("dbias: other shape", lambda: backward(biased, dbias=torch.zeros(1, 1, 1, 8)))
    yield Case("dbias: integers", lambda: backward(biased, dbias=torch.zeros(1, 1, 300, 260, dtype=torch.int32)))


def mask_operators() -> Iterator[Case]:
    """Yield calls of pack_mask and list_tiles."""
    keep, ids = torch.ones(1, 1, SEQLEN_Q, SEQLEN_K, dtype=torch.bool), torch.zeros(1, 1, SEQLEN_K, dtype=torch.int32)
    queries = torch.zeros(1, SEQLEN_Q, dtype=torch.int32)

    def pack(mask: Tensor = keep, seqlen_q: int = SEQLEN_Q, q: Any = None, k: Any = None, **given: Any) -> object:
        names = ("row_tiles", "col_tiles", "row_bits", "col_bits")
        made = dict(zip(names, meta.pack_mask_outputs(keep, 1, 1, SEQLEN_Q, *FREE), strict=True))
        return native.pack_mask(mask, q, k, seqlen_q, *given.pop("band", FREE), **(made | given))

    def listed(k: Tensor = ids, seqlen_q: int = SEQLEN_Q, q: Any = None, **given: Any) -> object:
        made = dict(zip(("row_tiles", "col_tiles"), meta.list_tiles_outputs(ids, 1, 1, 300, 260, *FREE), strict=True))
        return native.list_tiles(q, k, seqlen_q, *FREE, **(made | given))

    small = torch.zeros(1, 1, 3, 4, dtype=torch.int32)
    for what, mask in {
        "three dimensions": keep[0], "two heads": keep.expand(1, 2, -1, -1), "two batches": keep.expand(2, -1, -1, -1),
        "fewer queries": keep[:, :, :-1], "fewer keys": keep[..., :100], "complex": keep.to(torch.complex64),
        "on meta": keep.to("meta"), "sparse": keep.to_sparse(),
    }.items():  # fmt: skip
        yield Case(f"mask: {what}", lambda m=mask: pack(m))
    for seqlen_q in (-1, -128, 10 * SEQLEN_Q, 1 << 40, 1 << 62):
        yield Case(f"pack seqlen_q {seqlen_q}", lambda s=seqlen_q: pack(seqlen_q=s))
        yield Case(f"list seqlen_q {seqlen_q}", lambda s=seqlen_q: listed(seqlen_q=s))
    yield Case("lists too small", lambda: pack(row_tiles=small, col_tiles=small))
    yield Case("bits too small", lambda: pack(row_bits=small, col_bits=small))
    yield Case("bits of 64", lambda: pack(row_bits=torch.zeros(1, 1, 384, 12, dtype=torch.int64)))
    yield Case("strided bits", lambda: pack(row_bits=torch.zeros(1, 1, 384, 24, dtype=torch.int32)[..., ::2]))
    yield Case("any band", lambda: pack(band=(1 << 62, -(1 << 62))), False)
    yield Case("short queries", lambda: pack(q=queries[:, :-1], k=ids))
    yield Case("short keys", lambda: pack(q=queries, k=ids[..., :-1]))
    yield Case("queries of three dimensions", lambda: pack(q=queries[None], k=ids))
    yield Case("floating ids", lambda: listed(k=ids.float()))
    yield Case("ids of two dimensions", lambda: listed(k=ids[0]))
    yield Case("two heads of ids", lambda: listed(k=ids.expand(1, 2, -1)))
    yield Case("other queries", lambda: listed(q=torch.zeros(1, 500, dtype=torch.int32)))
    yield Case("lists of three words", lambda: listed(row_tiles=small[..., :3].contiguous()))
    yield Case("lists of three dimensions", lambda: listed(row_tiles=small[0]))


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "rows_of_bits": lambda: altered_lists(bits, "row_tiles"),
    "columns_of_bits": lambda: altered_lists(bits, "col_tiles"),
    "rows_of_segments": lambda: altered_lists(segments, "row_tiles"),
    "columns_of_segments": lambda: altered_lists(segments, "col_tiles"),
    "shapes_of_bits": lambda: reshaped(bits),
    "shapes_of_segments": lambda: reshaped(segments),
    "shapes_of_intervals": lambda: reshaped(intervals),
    "several_kinds": several_kinds,
    "packed_sequences": packed_sequences,
    "tensors_and_numbers": tensors_and_numbers,
    "mask_operators": mask_operators,
}


def main(group: str) -> None:
    """Run the cases of a group, one line for each."""
    torch.manual_seed(0)
    for case in GROUPS[group]():
        try:
            case.run()
            ended = "returned"
        except REFUSALS as error:
            ended = "out of memory" if "alloc" in str(error) else "refused"
        expected = "refused" if case.refused else "returned"
        print(f"{case.name}\t{ended}\t{expected}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
