"""Generation: a step with kept keys beside decoding with all keys, prompts in chunks, and batch-invariant calls.

Caches of several layers take turns, so that no cache is in L2. `graph_ms` is the time of a replayed CUDA graph, `eager_ms` that of
calls from Python, the host included; both are for one layer. Copy speed is the read and written bytes of a copy of 1 GB in the
same process and in the same turns. Parts (`--rows`):

step        one position is appended to a cache that keeps 2048 keys (attention and eviction, B16 H32/8 D128), beside decoding
            with a cache of all 131072 positions: our own, and torch's scaled_dot_product_attention
full        decoding with a cache of all 32768 positions, batch 1 and 16: share of copy speed, and batch-invariant calls
prompt      a prompt of 131072 positions in one call and in chunks of 8192
invariant   forward and backward of batch-invariant and of deterministic calls beside plain ones

The time of a step does not depend on how long the text is: its cache holds the best of twice as many keys as it keeps.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from dmattn_ops import KeptKeys, dynamic_mask, flash_dmattn_func
from dynamic_targets import targets_of
from experiments import Row, Session, begun, missing, parser
from generation_targets import TARGETS
from timing import elapsed_ms, interleaved

PARTS = ("step", "full", "prompt", "invariant")
COPIED = 1 << 30  # bytes
BACKENDS = {"sdpa-fa2": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION}
Functions = dict[tuple[str, str], Callable[[], Any]]


class Shape(NamedTuple):
    """Sequences of some length, and how many keys a dynamic mask keeps of them."""

    batch: int
    seqlen: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    keep: int = 2048
    chunk: int = 8192
    layers: int = 4

    @property
    def case(self) -> str:
        return f"B{self.batch} H{self.heads}/{self.kv_heads} S{self.seqlen} D{self.dim}"

    def draw(self, device: str, seqlen: int, heads: int) -> Tensor:
        """Draw `[B, S, heads, D]`."""
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        return torch.randn(self.batch, seqlen, heads, self.dim, dtype=dtype, device=device)


FULL = {
    "step": [Shape(16, 131072)],
    "full": [Shape(16, 32768), Shape(1, 32768, layers=16)],
    "prompt": [Shape(1, 131072)],
    "invariant": [Shape(4, 4096), Shape(2, 8192)],
}
TINY = {part: [Shape(2, 96, 4, 2, 16, keep=12, chunk=32, layers=2)] for part in PARTS}


def replayed(calls: list[Callable[[], Any]], device: str) -> Callable[[], Any]:
    """Return the replay of a CUDA graph of some calls; on a CPU the calls themselves."""
    if device != "cuda":
        return functools.partial(one_after_another, calls)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            one_after_another(calls)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_after_another(calls)
    return graph.replay


def one_after_another(calls: Iterable[Callable[[], Any]]) -> None:
    """Make some calls."""
    for call in calls:
        call()


def copying(device: str) -> Functions:
    """Return what copies 1 GB, or less on a CPU."""
    source = torch.empty(COPIED if device == "cuda" else 1 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {("copy", "graph"): functools.partial(target.copy_, source)}


def times(session: Session, functions: Functions, layers: int) -> dict[str, Row]:
    """Time functions in turns; return a row for each implementation, in milliseconds of a layer."""
    device, rounds = session.options.device, session.options.rounds
    samples = interleaved(functions, device, rounds=rounds, gauge=session.gauge, timer=elapsed_ms)
    rows: dict[str, Row] = {}
    for (name, part), sample in samples.items():
        each = 1 if name == "copy" else layers
        row = rows.setdefault(name, {"implementation": name})
        row[f"{part}_ms"] = round(sample.median / each, 5)
        row[f"{part}_range_ms"] = [round(sample.low / each, 5), round(sample.high / each, 5)]
    return rows


def decoding(shape: Shape, session: Session, invariant: bool) -> tuple[Functions, list[Row]]:
    """Return what attends with one query for each head to all keys, and rows for what does not run."""
    device = session.options.device
    query = shape.draw(device, 1, shape.heads)
    caches = [[shape.draw(device, shape.seqlen, shape.kv_heads) for _ in range(2)] for _ in range(shape.layers)]
    full = [functools.partial(flash_dmattn_func, query, *cache) for cache in caches]
    ways: dict[str, list[Callable[[], Any]]] = {"dmattn-full": [*full]}
    if invariant:
        ways["dmattn-invariant"] = [functools.partial(call, batch_invariant=True) for call in full]
    laid = [[part.transpose(1, 2) for part in (query, *cache)] for cache in caches]
    sdpa = functools.partial(scaled_dot_product_attention, enable_gqa=True)
    for name in BACKENDS if device == "cuda" else ():
        ways[name] = [functools.partial(sdpa, *parts) for parts in laid]
    functions, absent = {}, []
    for name, calls in ways.items():
        try:
            with sdpa_kernel(BACKENDS[name]) if name in BACKENDS else nullcontext():
                functions[name, "graph"] = replayed(calls, device)
        except RuntimeError as error:
            if name not in BACKENDS:
                raise
            absent.append(missing(name, error))
            continue
        if name not in BACKENDS:
            functions[name, "eager"] = functools.partial(one_after_another, calls)
    return functions, absent


def share_of_copy(row: Row, read: int, copy: Row, device: str) -> None:
    """Note the bytes that a call must read, in GB/s and as a share of copy speed."""
    copied = 2 * (COPIED if device == "cuda" else 1 << 20)
    row["gb_per_s"] = round(read / row["graph_ms"] / 1e6, 1)
    row["share_of_copy"] = round(row["gb_per_s"] / (copied / copy["graph_ms"] / 1e6), 4)


def step(shape: Shape, session: Session) -> list[Row]:
    """Measure a step with kept keys beside decoding with all keys."""
    device = session.options.device
    caches = [
        KeptKeys(shape.batch, shape.kv_heads, shape.dim, shape.keep, dtype=dtype_of(device), device=device)
        for _ in range(shape.layers)
    ]
    for cache in caches:
        cache.attend(*position(shape, device, 2 * shape.keep))
    new = position(shape, device, 1)
    calls: list[Callable[[], Any]] = [functools.partial(cache.attend, *new) for cache in caches]
    launches = launched(calls[0]) if device == "cuda" else None
    functions: Functions = {
        ("dmattn", "graph"): replayed(calls, device),
        ("dmattn", "eager"): functools.partial(one_after_another, calls),
    }
    full, absent = decoding(shape, session, False)
    rows = times(session, functions | full | copying(device), shape.layers)
    own = rows["dmattn"] | {"launches": launches, "cache_bytes": caches[0].nbytes, "slots": caches[0].slots}
    read = caches[0].key.nbytes + caches[0].value.nbytes
    share_of_copy(own, read, rows["copy"], device)
    own["over_full"] = round(rows["dmattn-full"]["graph_ms"] / own["graph_ms"], 2)
    own["over_full_eager"] = round(rows["dmattn-full"]["eager_ms"] / own["eager_ms"], 2)
    peers = [rows[name]["graph_ms"] for name in BACKENDS if name in rows]
    if peers:
        own["over_sdpa"] = round(min(peers) / own["graph_ms"], 2)
    rows["dmattn"] = own
    bytes_of_all = 2 * shape.batch * shape.seqlen * shape.kv_heads * shape.dim * new[1].element_size()
    share_of_copy(rows["dmattn-full"], bytes_of_all, rows["copy"], device)
    return [*rows.values(), *absent]


def dtype_of(device: str) -> torch.dtype:
    """Return the dtype that is measured on a device."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def position(shape: Shape, device: str, count: int) -> tuple[Tensor, ...]:
    """Draw query, key, value and scores of `count` positions."""
    tensors = [shape.draw(device, count, heads) for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    return *tensors, torch.randn(shape.batch, shape.kv_heads, count, device=device)


def launched(call: Callable[[], Any]) -> int:
    """Return how many kernels a call launches."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def full(shape: Shape, session: Session) -> list[Row]:
    """Measure decoding with all keys, plain and batch-invariant."""
    device = session.options.device
    functions, absent = decoding(shape, session, True)
    rows = times(session, functions | copying(device), shape.layers)
    read = 2 * shape.batch * shape.seqlen * shape.kv_heads * shape.dim * dtype_of(device).itemsize
    for name in rows.keys() - {"copy"}:
        share_of_copy(rows[name], read, rows["copy"], device)
    own = rows["dmattn-full"]
    own["implementation"] = "dmattn"
    own["invariant_ratio"] = round(rows["dmattn-invariant"]["graph_ms"] / own["graph_ms"], 3)
    return [*rows.values(), *absent]


def prompt(shape: Shape, session: Session) -> list[Row]:
    """Measure a prompt in one call, and in chunks; and the same call without a cache."""
    device = session.options.device
    cache = KeptKeys(shape.batch, shape.kv_heads, shape.dim, shape.keep, dtype=dtype_of(device), device=device)
    query, key, value, scores = position(shape, device, shape.seqlen)

    def attend(size: int) -> None:
        cache.reset()
        for start in range(0, shape.seqlen, size):
            now = slice(start, start + size)
            cache.attend(query[:, now], key[:, now], value[:, now], scores[..., now])

    def without_cache() -> Tensor:
        return flash_dmattn_func(query, key, value, dynamic_mask(scores, shape.keep))

    ways: dict[str, Callable[[], Any]] = {
        "dmattn": functools.partial(attend, shape.chunk),
        "dmattn-one-call": functools.partial(attend, shape.seqlen),
        "dmattn-without-cache": without_cache,
    }
    functions: Functions = {(name, "eager"): way for name, way in ways.items()}
    functions |= {(name, "graph"): replayed([way], device) for name, way in ways.items()}
    rows = times(session, functions, 1)
    for name, part in (("chunks_ratio", "graph_ms"), ("chunks_ratio_eager", "eager_ms")):
        rows["dmattn"][name] = round(rows["dmattn"][part] / rows["dmattn-one-call"][part], 3)
    return list(rows.values())


def invariant(shape: Shape, session: Session) -> list[Row]:
    """Measure both directions of causal calls: plain, deterministic and batch-invariant."""
    device = session.options.device
    leaves = [shape.draw(device, shape.seqlen, each) for each in (shape.heads, shape.kv_heads, shape.kv_heads)]
    grad_out = torch.randn_like(leaves[0])
    leaves = [leaf.requires_grad_() for leaf in leaves]
    functions: Functions = {}
    for name, options in {
        "dmattn-plain": {},
        "dmattn-deterministic": {"deterministic": True},
        "dmattn": {"batch_invariant": True},
    }.items():
        attend = functools.partial(flash_dmattn_func, *leaves, is_causal=True, **options)
        functions[name, "forward"] = torch.no_grad()(attend)
        functions[name, "backward"] = functools.partial(
            torch.autograd.grad, attend(), leaves, grad_out, retain_graph=True
        )
    rows = times(session, functions, 1)
    plain = rows["dmattn-plain"]
    for row in rows.values():
        for part in ("forward", "backward"):
            row[f"{part}_ratio"] = round(row[f"{part}_ms"] / plain[f"{part}_ms"], 3)
        both = [each["forward_ms"] + each["backward_ms"] for each in (row, plain)]
        row["ratio"] = round(both[0] / both[1], 3)
    return list(rows.values())


def main(arguments: list[str]) -> list[Row]:
    """Measure the parts that are asked for; return all rows of the result file."""
    chosen = parser(__doc__, PARTS).parse_args(arguments)
    session = begun(chosen, "generation", "bench_generation.py")
    experiments = {"step": step, "full": full, "prompt": prompt, "invariant": invariant}
    for part, shapes in (TINY if chosen.tiny else FULL).items():
        for shape in shapes:
            session.run(part, shape.case, functools.partial(experiments[part], shape, session), keep=shape.keep)
    return session.finish(targets=targets_of(session.rows, TARGETS))


if __name__ == "__main__":
    main(sys.argv[1:])
