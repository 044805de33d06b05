"""Dynamic masks: selection, packing, forward and backward, apart and together, from 8192 to 1048576 positions.

Beside them, in one process and in turns: dense causal attention of the same kernels; FlashAttention 4 (FA4) without a mask
and with lists of blocks and a predicate; flex_attention with the predicate. `--old ROOT` adds dense causal attention of
another checkout, in a process of its own on the same machine. `--cpu` measures the CPU's row. Parts (`--rows`):

heads32, heads16   H 32/8 and 16/16: 8192 and 32768 positions of which 1024 are kept, 32768 and 131072 with 2048
models             six models of scores at 32768 with 1024 kept, and documents
lengths            2048 kept from 8192 to 1048576 positions; of the longest, also the memory
peers              FA4 and flex_attention at 8192, 32768 and 131072 positions
cpu                B1 H8/2 S8192 D64 float32, 512 kept

`forward` and `backward` hold finding and copying keys and adding up gradients; `pack_forward` and `pack_backward` are these
alone. `whole` is selection, forward and backward in one; `share` is the part of it that is not attention.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dmattn_ops
from dmattn_ops.call import Call, Gradients, Result, Saved, plain_options
from dmattn_ops.dispatch import run as dispatch
from dynamic_targets import targets_of
from experiments import Row, Session, begun, parser
from interval_peers import Attention, Intervals, fa4, fa4_dense, flex, parts_of, set_up
from peers import Run, recorded_run
from plot import draw
from score_models import MODELS, make_scores
from timing import replayed

PARTS = ("heads32", "heads16", "models", "lengths", "peers", "cpu")
LONGEST_DENSE = 131072  # positions: beyond, one dense call takes seconds
DOCUMENT = 4096
LIMIT_S = 480  # of the process that measures another checkout


class Shape(NamedTuple):
    """One call: batch 1."""

    heads: int
    kv_heads: int
    seqlen: int
    keep: int
    dim: int = 128

    @property
    def case(self) -> str:
        return f"S{self.seqlen} keep{self.keep} H{self.heads}/{self.kv_heads} D{self.dim}"


HEADS32, HEADS16 = (
    [Shape(*heads, seqlen, keep) for seqlen, keep in ((8192, 1024), (32768, 1024), (32768, 2048), (131072, 2048))]
    for heads in ((32, 8), (16, 16))
)
LENGTHS = [Shape(32, 8, 1 << power, 2048) for power in range(13, 21)]
CPU = Shape(8, 2, 8192, 512, 64)
TINY = {
    "heads32": [Shape(4, 2, 512, 64, 32)],
    "heads16": [Shape(2, 2, 512, 64, 32)],
    "models": [Shape(4, 2, 512, 64, 32)],
    "lengths": [Shape(4, 2, 256, 64, 32), Shape(4, 2, 1024, 64, 32)],
    "peers": [Shape(4, 2, 256, 64, 32)],
    "cpu": [Shape(4, 2, 512, 64, 32)],
}
FULL = {
    "heads32": HEADS32,
    "heads16": HEADS16,
    "models": [HEADS32[1]],
    "lengths": LENGTHS,
    "peers": [HEADS32[0], HEADS32[2], HEADS32[3]],
    "cpu": [CPU],
}


def inputs(shape: Shape, device: str) -> Attention:
    """Draw the tensors of a call."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    tensors = [torch.randn(1, shape.seqlen, count, shape.dim, device=device, dtype=dtype) for count in heads]
    query, key, value = (tensor.requires_grad_() for tensor in tensors[:3])
    return Attention(query, key, value, tensors[3])


def ours(call: Attention, select: Callable[[], dmattn_ops.TileMask]) -> dict[str, Callable[[], Any]]:
    """Return everything that is timed of this library under a dynamic mask, by its name."""
    mask = select()
    run = recorded_run(
        functools.partial(dmattn_ops.flash_dmattn_func, *call.leaves, mask), [*call.leaves], call.grad_out
    )
    assert run.backward is not None

    def whole() -> tuple[Tensor, ...]:
        return torch.autograd.grad(dmattn_ops.flash_dmattn_func(*call.leaves, select()), call.leaves, call.grad_out)

    functions = {"select": select, "forward": run.forward, "backward": run.backward, "whole": whole}
    return functions | packing_alone(call, mask)


def packing_alone(call: Attention, mask: dmattn_ops.TileMask) -> dict[str, Callable[[], Any]]:
    """Return what packing does besides attention: nothing where keys are not packed, as on a CPU."""
    query, key, value = (leaf.detach() for leaf in call.leaves)
    lo, hi = mask.band.limits(query.shape[1], key.shape[1])
    whole = Call(query, key, value, None, mask.mask, None, None, None, plain_options(query.shape[3] ** -0.5, lo, hi))
    on = dispatch.architecture_of(whole)
    packed = [dispatch.packing_of(direction, whole, on)[0] for direction in ("forward", "backward")]
    if None in packed:
        return {}
    attention = import_module(dispatch.PACKED)
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[0], query.shape[2], query.shape[1], device=query.device)
    result, saved = Result(out, lse, lse, None), Saved(out, lse, lse)
    grads = Gradients(call.grad_out, None, out, torch.empty_like(key), torch.empty_like(value), None)
    nothing = functools.partial(lambda *arguments: None)
    functions = {
        "pack_forward": lambda: attention.forward(whole, result, packed[0], nothing),
        "pack_backward": lambda: attention.backward(whole, saved, grads, packed[1], nothing),
    }
    return {name: replayed(function) for name, function in functions.items()} if query.is_cuda else functions


def dense(call: Attention) -> dict[str, Callable[[], Any]]:
    """Return forward, backward and both of dense causal attention of the same kernels."""
    attend = functools.partial(dmattn_ops.flash_dmattn_func, *call.leaves, is_causal=True)
    run = recorded_run(attend, [*call.leaves], call.grad_out)
    assert run.backward is not None
    both: Callable[[], Any] = lambda: torch.autograd.grad(attend(), call.leaves, call.grad_out)  # noqa: E731
    return {"forward": run.forward, "backward": run.backward, "whole": both}


def peers(call: Attention, mask: dmattn_ops.TileMask) -> tuple[dict[str, Run], list[Row]]:
    """Set up the peers under the same mask; return them, and rows for those that are missing."""
    assert mask.end is not None
    position = torch.arange(mask.seqlen_k, dtype=torch.int32, device=mask.device).expand(mask.end.shape)
    intervals = Intervals(position if mask.start is None else mask.start, mask.end)
    predicate = intervals.predicate(call.query.shape[2] // call.key.shape[2])
    own = recorded_run(
        functools.partial(dmattn_ops.flash_dmattn_func, *call.leaves, mask), [*call.leaves], call.grad_out
    )
    makers = {
        "fa4-dense": (lambda: fa4_dense(call), False),
        "flex": (lambda: flex(call, predicate, call.query.shape[2]), True),
        "fa4": (lambda: fa4(call, intervals, predicate), False),
    }
    return set_up(makers, own, ("flex", "fa4"))


def compare(rows: list[Row], old: Row | None) -> list[Row]:
    """Add speed-ups over dense attention, and the share of what is not attention, to the row of ours."""
    by_name = {row["implementation"]: row for row in rows}
    own = by_name["dmattn"]
    if "dmattn-dense" in by_name:
        own["speed_up"] = round(by_name["dmattn-dense"]["whole_ms"] / own["whole_ms"], 3)
    if old is not None:
        total = old["forward_ms"] + old["backward_ms"]
        rows.append({"implementation": "dmattn-dense-old", **old, "whole_ms": round(total, 4)})
        own["speed_up_over_old"] = round(total / own["whole_ms"], 3)
    if "pack_forward_ms" in own:
        besides = own["select_ms"] + own["pack_forward_ms"] + own["pack_backward_ms"]
        own["share"] = round(besides / own["whole_ms"], 4)
    return rows


def experiment(
    shape: Shape,
    session: Session,
    *,
    model: str = "independent",
    documents: bool = False,
    beside: Iterable[str] = (),
    old: Row | None = None,
) -> list[Row]:
    """Measure one shape: ours, and what is named by `beside` ("dense", "peers")."""
    device = session.options.device
    call = inputs(shape, device)
    scores = make_scores(model, shape.kv_heads, shape.seqlen, shape.keep, device)
    ids = torch.arange(shape.seqlen, device=device)[None] // min(DOCUMENT, shape.seqlen // 2) if documents else None
    select = functools.partial(dmattn_ops.dynamic_mask, scores, shape.keep, documents=ids)
    memory = peak_memory(call, select) if device == "cuda" else {}
    functions: dict[tuple[str, str], Callable[[], Any]] = {
        ("dmattn", part): run for part, run in ours(call, select).items()
    }
    absent: list[Row] = []
    if "dense" in beside:
        functions |= {("dmattn-dense", part): run for part, run in dense(call).items()}
    if "peers" in beside:
        found, absent = peers(call, select())
        functions |= parts_of(found)
    rows = compare(session.measured(functions), old)
    rows[0] |= {"model": "documents" if documents else model, "density": density(select()), **memory}
    return rows + absent


def density(mask: dmattn_ops.TileMask) -> float:
    """Return the share of all pairs that the mask shows."""
    assert mask.end is not None
    start = torch.arange(mask.seqlen_k, device=mask.device) if mask.start is None else mask.start
    seen = (mask.end.clamp(max=mask.seqlen_q) - start).clamp(min=0).double().mean()
    return round(seen.item() / mask.seqlen_q, 5)


def peak_memory(call: Attention, select: Callable[[], dmattn_ops.TileMask]) -> Row:
    """Return the bytes that a forward and a backward take at most, and of these what is beyond outputs and float32 dq."""
    query, key, value = call.leaves
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(dmattn_ops.flash_dmattn_func(*call.leaves, select()), call.leaves, call.grad_out)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    rows = query.shape[1] * query.shape[2]
    statistics = 2 * 4 * rows  # lse and its tail
    expected = query.nbytes + statistics + query.nbytes + key.nbytes + value.nbytes + 4 * query.numel()
    return {"peak_bytes": peak, "workspace_bytes": max(0, peak - expected)}


def dense_of(root: Path, shapes: Iterable[Shape], device: str, rounds: int) -> dict[tuple[int, ...], Row]:
    """Time dense causal attention of another checkout, in a process of its own; return times by heads, lengths and dimension."""
    wanted = sorted({(s.heads, s.kv_heads, s.seqlen, s.dim) for s in shapes if s.seqlen <= LONGEST_DENSE})
    asked = json.dumps({"shapes": wanted, "device": device, "rounds": rounds})
    command = [sys.executable, str(Path(__file__).parent / "dense_of.py"), asked]
    environment = {**os.environ, "PYTHONPATH": str(root.resolve())}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(f"--old {root} does not run: {(done.stderr.splitlines() or ['no output'])[-1]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    if not Path(answer["package"]).is_relative_to(root.resolve()):
        raise SystemExit(f"--old {root} has no dmattn_ops: {answer['package']} was imported")
    return {tuple(map(int, name.split())): times for name, times in answer["times"].items()}


def main(arguments: list[str]) -> list[Row]:
    """Measure the parts that are asked for; return all rows of the result file."""
    options = parser(__doc__, PARTS)
    options.add_argument(
        "--old", type=Path, metavar="ROOT", help="also measure dense causal attention of this checkout"
    )
    options.add_argument("--cpu", action="store_true", help="measure the row of the CPU, and nothing else")
    options.add_argument("--plot", type=Path, help="draw time over length to this picture")
    chosen = options.parse_args(arguments)
    if chosen.device == "cuda" and not chosen.rows:
        chosen.rows = [part for part in PARTS if part != "cpu"]
    session = begun(chosen, "dynamic", "bench_dynamic.py")
    shapes = TINY if chosen.tiny else FULL
    asked = [shape for part in PARTS if session.wants(part) for shape in shapes[part]]
    old = dense_of(chosen.old, asked, chosen.device, chosen.rounds) if chosen.old else {}
    for part in PARTS:
        for shape in shapes[part]:
            measure_part(part, shape, session, old.get((shape.heads, shape.kv_heads, shape.seqlen, shape.dim)))
    rows = session.finish(targets=targets_of(session.rows))
    if chosen.plot:
        draw(session.output, chosen.plot)
    return rows


def measure_part(part: str, shape: Shape, session: Session, old: Row | None) -> None:
    """Run the experiments of one part for one shape."""
    run = functools.partial(experiment, shape, session)
    has_dense = ["dense"] if shape.seqlen <= LONGEST_DENSE else []
    if part == "models":
        for model in MODELS:
            session.run(part, f"{shape.case} {model}", functools.partial(run, model=model, beside=has_dense, old=old))
        session.run(part, f"{shape.case} documents", functools.partial(run, documents=True, beside=has_dense, old=old))
    else:
        beside = [*has_dense, *(["peers"] if part == "peers" else [])]
        session.run(part, shape.case, functools.partial(run, beside=beside, old=old))


if __name__ == "__main__":
    main(sys.argv[1:])
