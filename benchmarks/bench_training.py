"""Dynamic masks at the lengths at which people train: selection, forward and backward with the bias that trains the mask.

16384 tokens in all, independent scores, bfloat16. Beside each row stand dense causal attention of the same kernels without a bias,
the automatic choice, packed keys (in the epochs of the rule from sizes) and keys as they lie, all as CUDA graphs in one process,
and the peers that are installed: FlashAttention 4 without a mask, and flex_attention with the intervals as its predicate.
`ideal` is the number of causal pairs over the number of kept ones. Part "intervals" is a mask made before and no bias, on keys as
they lie, over dense causal attention. `--cpu` measures the CPU's part, in float32, with the C++ kernels, which decide by themselves
how keys are packed. Writes a result file; `--tiny` only shows that all of it runs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dmattn_ops
from bench_dynamic import peers
from dmattn_ops.choice import epochs
from dmattn_ops.dispatch import run as dispatch
from dmattn_ops.launching import plans
from dynamic_targets import Target, targets_of, value_of
from experiments import Row, Session, begun, parser
from interval_peers import Attention, parts_of
from peers import recorded_run
from timing import least_ms, one_thread_ms, replayed

TOKENS = 16384
SIZES = (
    (1024, 256),
    (2048, 256),
    (2048, 512),
    (4096, 512),
    (4096, 1024),
    (8192, 512),
    (8192, 1024),
    (8192, 2048),
    (16384, 1024),
)
PARTS = {"heads32": (32, 8, 128, SIZES), "heads16": (16, 16, 64, SIZES), "heads16-128": (16, 16, 128, SIZES[:4])}
INTERVALS = ((32, 8, 128), (16, 16, 64), (16, 16, 128))
CPU_SIZES = (  # batch, heads, key heads, head dimension, positions, kept; the last two are those of `make train`
    (4, 8, 2, 64, 2048, 256),
    (4, 8, 2, 64, 1024, 256),
    (4, 8, 2, 64, 2048, 512),
    (2, 8, 8, 64, 2048, 256),
    (2, 6, 2, 32, 1024, 64),
    (1, 6, 2, 32, 8192, 512),
)
CPU_TARGETS = (
    Target("CPU: speed-up over dense causal", 1.8, 2.5, value_of("cpu", "B4 S2048 keep256 H8/2", "speed_up")),
)


class Shape(NamedTuple):
    """One call."""

    heads: int
    kv_heads: int
    dim: int
    seqlen: int
    keep: int

    @property
    def case(self) -> str:
        return f"S{self.seqlen} keep{self.keep} H{self.heads}/{self.kv_heads} D{self.dim}"

    @property
    def ideal(self) -> float:
        """Causal pairs over kept ones."""
        kept = min(self.keep, self.seqlen)
        return round(self.seqlen * (self.seqlen + 1) / (kept * (kept + 1) + 2 * kept * (self.seqlen - kept)), 2)


class Problem:
    """The tensors of a call, and what is timed of it."""

    def __init__(self, shape: Shape, tokens: int, device: str) -> None:
        batch, self.keep = max(1, tokens // shape.seqlen), shape.keep
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
        *rows, self.grad_out = (
            torch.randn(batch, shape.seqlen, own, shape.dim, device=device, dtype=dtype) for own in heads
        )
        self.scores = torch.randn(batch, shape.kv_heads, shape.seqlen, device=device)
        self.rows = [row.requires_grad_() for row in rows]
        self.leaves = [*self.rows, self.scores[:, :, None].clone().requires_grad_()]

    def select(self) -> dmattn_ops.TileMask:
        """Return the mask."""
        return dmattn_ops.dynamic_mask(self.scores, self.keep)

    def whole(self) -> tuple[Tensor, ...]:
        """Select keys, and compute out and all gradients."""
        query, key, value, bias = self.leaves
        return torch.autograd.grad(
            dmattn_ops.flash_dmattn_func(query, key, value, self.select(), bias), self.leaves, self.grad_out
        )

    def dense(self) -> tuple[Tensor, ...]:
        """Compute dense causal attention and its gradients."""
        return torch.autograd.grad(dmattn_ops.flash_dmattn_func(*self.rows, is_causal=True), self.rows, self.grad_out)

    def masked(self, mask: dmattn_ops.TileMask) -> tuple[Tensor, ...]:
        """Compute attention under a mask that was made before, and its gradients."""
        query, key, value = self.rows
        return torch.autograd.grad(dmattn_ops.flash_dmattn_func(query, key, value, mask), self.rows, self.grad_out)


@contextmanager
def packed(way: str) -> Iterator[None]:
    """Pack keys as the library decides ("auto"), always or never."""
    decided = dispatch.packing_of

    def forced(direction: str, call: Any, *given: Any, **named: Any) -> tuple[epochs.Packing | None, list[str]]:
        if call.mask.kind != "intervals" or way == "auto":
            return decided(direction, call, *given, **named)
        if way == "not packed":
            return None, ["measured without"]
        return epochs.packing_for(call, own_length(call)), []

    dispatch.packing_of = forced
    plans.forget()
    try:
        yield
    finally:
        dispatch.packing_of = decided
        plans.forget()


def own_length(call: Any) -> int:
    """Return the length of epochs by the rule, whether or not packing is expected to pay."""
    sizes = epochs.sizes_of(call)
    return epochs.epoch_length(
        sizes.seqlen_q, sizes.seqlen_k, sizes.at_most, sizes.band_hi, sizes.heads // sizes.packed_heads
    )


def captured(function: Callable[[], Any], way: str, device: str) -> Callable[[], Any]:
    """Return a function as a CUDA graph, with keys packed or not; on a CPU the function itself."""
    if device != "cuda":
        return function
    with packed(way):
        return replayed(function)


def measure(shape: Shape, session: Session, tokens: int) -> list[Row]:
    """Measure one row."""
    device = session.options.device
    problem = Problem(shape, tokens, device)
    functions = {("dmattn-dense", "whole"): captured(problem.dense, "auto", device)}
    for way in ("auto", "packed", "not packed"):
        functions["dmattn" if way == "auto" else f"dmattn {way}", "whole"] = captured(problem.whole, way, device)
    functions["dmattn", "select"] = captured(problem.select, "auto", device)
    query, key, value = problem.rows
    found, absent = peers(Attention(query, key, value, problem.grad_out), problem.select())
    return over_dense(session.measured(functions | parts_of(found)), shape.ideal) + absent


def as_they_lie(shape: Shape, session: Session, tokens: int) -> list[Row]:
    """Measure a mask that was made before, without a bias, on keys as they lie."""
    device = session.options.device
    problem = Problem(shape, tokens, device)
    masked = functools.partial(problem.masked, problem.select())
    functions = {
        ("dmattn-dense", "whole"): captured(problem.dense, "auto", device),
        ("dmattn not packed", "whole"): captured(masked, "not packed", device),
    }
    return over_dense(session.measured(functions), None)


def on_cpu(shape: Shape, session: Session, tokens: int) -> list[Row]:
    """Measure one row of the CPU: the whole as it is trained, and its parts and those of dense attention apart.

    Times are those of the fastest calls, because a CPU is rarely left alone as long as this takes: wall time, or the CPU time
    of one thread, which other processes disturb least.
    """
    problem = Problem(shape, tokens, "cpu")
    query, key, value, bias = problem.leaves
    masked = functools.partial(dmattn_ops.flash_dmattn_func, query, key, value, problem.select(), bias)
    dense = functools.partial(dmattn_ops.flash_dmattn_func, *problem.rows, is_causal=True)
    functions: dict[tuple[str, str], Callable[[], Any]] = {
        ("dmattn-dense", "whole"): problem.dense,
        ("dmattn", "whole"): problem.whole,
        ("dmattn", "select"): problem.select,
    }
    for name, attend, leaves in (("dmattn-dense", dense, problem.rows), ("dmattn", masked, problem.leaves)):
        run = recorded_run(attend, leaves, problem.grad_out)
        assert run.backward is not None
        functions |= {(name, "forward"): run.forward, (name, "backward"): run.backward}
    timer = one_thread_ms if session.options.one_thread else least_ms
    return over_dense(session.measured(functions, least=timer), shape.ideal)


def over_dense(rows: list[Row], ideal: float | None) -> list[Row]:
    """Add to each row how many times as fast as dense attention it is."""
    dense = next(row["whole_ms"] for row in rows if row["implementation"] == "dmattn-dense")
    for row in rows:
        row["speed_up"] = round(dense / row["whole_ms"], 3)
        if ideal is not None and row["implementation"] == "dmattn":
            row["ideal"] = ideal
    return rows


def main(arguments: list[str]) -> list[Row]:
    """Measure the parts that are asked for; return all rows of the result file."""
    options = parser(__doc__, (*PARTS, "intervals", "cpu"))
    options.add_argument("--cpu", action="store_true", help="measure the rows of the CPU, and nothing else")
    options.add_argument("--one-thread", action="store_true", help="of the CPU: CPU time of one thread, not wall time")
    chosen = options.parse_args(arguments)
    chosen.rows = chosen.rows or [*PARTS, "intervals"]
    session = begun(chosen, "training", "bench_training.py")
    tokens = 512 if chosen.tiny else TOKENS
    for part, (heads, kv_heads, dim, sizes) in PARTS.items():
        for seqlen, keep in ((256, 64),) if chosen.tiny else sizes:
            shape = Shape(2, 1, 32, seqlen, keep) if chosen.tiny else Shape(heads, kv_heads, dim, seqlen, keep)
            session.run(part, shape.case, functools.partial(measure, shape, session, tokens))
    for heads, kv_heads, dim in INTERVALS:
        for seqlen in (256,) if chosen.tiny else (4096, 16384):
            shape = Shape(2, 1, 32, seqlen, 64) if chosen.tiny else Shape(heads, kv_heads, dim, seqlen, 1024)
            session.run("intervals", shape.case, functools.partial(as_they_lie, shape, session, tokens))
    for batch, *of_shape in ((2, 2, 1, 32, 256, 64),) if chosen.tiny else CPU_SIZES:
        shape = Shape(*of_shape)
        session.run("cpu", f"B{batch} {shape.case}", functools.partial(on_cpu, shape, session, batch * shape.seqlen))
    return session.finish(**{"targets": targets_of(session.rows, CPU_TARGETS)} if chosen.cpu else {})


if __name__ == "__main__":
    main(sys.argv[1:])
