"""Attention of one sequence on several GPUs against one, and against torch's own context parallelism.

    torchrun --nproc-per-node 4 benchmarks/bench_distributed.py

Every process has a GPU (NCCL), or runs on the CPU (gloo; `--tiny` makes the problems small enough for that). For each
case each process computes the whole problem, then all of them share it. Milliseconds of preparing the mask, of the forward
and of the backward are medians over the rounds, in which all implementations take turns, of the slowest rank; before each
part the GPU is done with the one before. `whole_ms` is a step of steps that follow each other without waiting, as in training.
Efficiency is `whole_ms` of one GPU over that of N times N. TFLOP/s are those of one GPU, for the pairs that are visible. Bytes
are what the rank that receives the most receives in a forward. The result file is written after every case.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dmattn_ops import dynamic_mask, flash_dmattn_func, prepare_mask
from dmattn_ops.distributed import (
    balanced_layout,
    context_parallel_attention,
    dynamic_context_attention,
    prepare_context_mask,
    record_traffic,
    shard_sequence,
)
from table import BACKWARD_FLOPS, Row, default_output
from timing import Gauge, write_results

HEADS, KV_HEADS, DIM = 32, 8, 128
# Lists of tensors are spread into these, which a type checker cannot tell from the other arguments.
on_one: Any = flash_dmattn_func
on_ranks: Any = context_parallel_attention
dynamic_on_ranks: Any = dynamic_context_attention
METHODS = ("all_gather", "ring", "ulysses")
ONE_GPU = "one GPU"  # the run that efficiencies are of
PARTS = ("prepare", "forward", "backward", "whole")
STEPS = 8  # that follow each other, so that what the host does before the first counts little
LONG_STEP = 100.0  # milliseconds from which on a step is repeated in rounds only: it lasts longer than what disturbs it


class Sizes(NamedTuple):
    """How large the problems are."""

    seqlen: int = 131072
    window: int = 4096
    document: int = 8192  # the mean length
    dynamic: int = 524288
    keep: int = 2048
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    dim: int = DIM


TINY = Sizes(512, 64, 128, 1024, 64, 4, 2, 16)


class Run(NamedTuple):
    """One way to compute a case: `prepare` returns what the forward takes, `forward` returns out."""

    name: str
    inputs: list[Tensor]
    prepare: Callable[[], Any]
    forward: Callable[[Any], Tensor]
    alone: bool  # whether each process computes the whole problem by itself
    around: Callable[[], AbstractContextManager[None]] = nullcontext  # what a step, backward included, runs inside


class Case(NamedTuple):
    """A problem, the pairs of query and key that it has, and the ways to compute it."""

    name: str
    pairs: float
    runs: Callable[[], list[Run]]


def main() -> None:
    """Measure what the command line asks for."""
    options = _options()
    device = _start()
    sizes = TINY if options.tiny else Sizes()
    cases = {case.name: case for case in _cases(sizes, device)}
    gauge, rows = Gauge(), []
    if dist.get_rank() == 0:
        named = f"{'prepare':>9} {'forward':>9} {'backward':>9} {'whole':>9} ms"
        print(f"{'case':<20} {'implementation':<26} {named}, TFLOP/s a GPU, efficiency")
    output = options.output or default_output(device.type, f"distributed-{dist.get_world_size()}")
    rows.append(_bandwidth(sizes, device))
    if dist.get_rank() == 0:
        print(
            f"all-gather {rows[0]['all_gather_gb_s']} GB/s, all-to-all {rows[0]['all_to_all_gb_s']} GB/s received a rank"
        )
    for name in options.cases or cases:
        began = time.perf_counter()
        measured = _measure(cases[name], sizes, options, device, gauge)
        rows += measured
        if dist.get_rank() == 0:
            print("\n".join(map(_line, measured)), f"({time.perf_counter() - began:.0f} s)", flush=True)
            write_results(output, rows, device.type, gauge)
    _leave()


def _leave() -> None:
    """End the process at once: with gloo, one that ends in the usual way sometimes aborts (seen with torch 2.13)."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="problems small enough for a CPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--repeats", type=int, default=3, help=f"calls in each round; 1 where one takes {LONG_STEP:.0f} ms"
    )
    parser.add_argument("--cases", nargs="+", choices=["causal", "documents", "window", "dynamic"])
    parser.add_argument("--runs", nargs="+", help=f"only implementations that begin with one of these, and {ONE_GPU}")
    parser.add_argument(
        "--output", type=Path, help="the result file; benchmarks/results/<date>-<device>-distributed-<N>.json"
    )
    return parser.parse_args()


def _start() -> torch.device:
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def _cases(sizes: Sizes, device: torch.device) -> list[Case]:
    length, window = sizes.seqlen, sizes.window
    lengths = _document_lengths(length, sizes.document)
    causal = {"is_causal": True}
    sliding = {"is_causal": True, "window_size": (window - 1, None)}
    of_window = window * (window + 1) / 2 + (length - window) * window
    of_dynamic = sizes.keep * (sizes.keep + 1) / 2 + (sizes.dynamic - sizes.keep) * sizes.keep
    return [
        Case("causal", length * (length + 1) / 2, lambda: [
            *_banded_runs(sizes, device, causal, "head_tail"), *_torch_runs(sizes, device)]),
        Case("documents", sum(each * (each + 1) / 2 for each in lengths), lambda: _document_runs(sizes, device, lengths)),
        Case("window", of_window, lambda: _banded_runs(sizes, device, sliding, "contiguous")),
        Case("dynamic", of_dynamic, lambda: _dynamic_runs(sizes, device)),
    ]  # fmt: skip


def _draw(sizes: Sizes, device: torch.device, seqlen: int) -> list[Tensor]:
    """Draw the whole query, key and value, the same on every rank."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    return [torch.randn(1, seqlen, count, sizes.dim, device=device, dtype=dtype) for count in heads]


def _leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def _parts(tensors: list[Tensor], layout: Any) -> list[Tensor]:
    return _leaves([shard_sequence(tensor, None, layout=layout) for tensor in tensors])


def _nothing() -> None:
    return None


def _without_argument(call: Callable[[], Tensor]) -> Callable[[Any], Tensor]:
    return lambda _: call()


def _banded_runs(sizes: Sizes, device: torch.device, conditions: dict[str, Any], layout: str) -> list[Run]:
    whole = _draw(sizes, device, sizes.seqlen)
    one, own = _leaves(whole), _parts(whole, layout)
    runs = [Run(ONE_GPU, one, _nothing, lambda _: on_one(*one, **conditions), True)]
    for method in _methods(sizes):
        call = partial(on_ranks, *own, group=None, layout=layout, method=method, **conditions)
        runs.append(Run(method, own, _nothing, _without_argument(call), False))
    # balanced in any layout, and in this one nothing has to be put in order
    if "ulysses" in _methods(sizes) and layout != "contiguous":
        parts = _parts(whole, "contiguous")
        call = partial(on_ranks, *parts, group=None, layout="contiguous", method="ulysses", **conditions)
        runs.append(Run("ulysses, contiguous", parts, _nothing, _without_argument(call), False))
    return runs


def _document_runs(sizes: Sizes, device: torch.device, lengths: list[int]) -> list[Run]:
    whole = _draw(sizes, device, sizes.seqlen)
    ids = torch.repeat_interleave(
        torch.arange(len(lengths), dtype=torch.int32, device=device), torch.tensor(lengths, device=device)
    ).unsqueeze(0)
    one = _leaves(whole)
    runs = [
        Run(
            ONE_GPU,
            one,
            lambda: prepare_mask(documents=ids, is_causal=True),
            lambda mask: on_one(*one, mask),
            True,
        )
    ]
    balanced = balanced_layout(prepare_mask(documents=ids, is_causal=True), None)
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)  # on the CPU, as a loader of data has them
    length = sizes.seqlen // dist.get_world_size()
    for layout_name, layout in (("head_tail", "head_tail"), ("contiguous", "contiguous"), ("balanced", balanced)):
        own = _parts(whole, layout)
        told: dict[str, dict[str, Any]] = {
            ", offsets on the CPU": {"cu_seqlens": offsets, "seqlen_q": length, "device": device}
        }
        if layout == balanced:
            told[""] = {"documents": shard_sequence(ids, None, layout=layout)}
        for method, (end_of_name, documents) in product(("all_gather", "ring"), told.items()):
            cut: dict[str, Any] = {"group": None, "layout": layout, "method": method}
            prepare = partial(prepare_context_mask, **documents, **cut, is_causal=True, read_documents=True)
            call = partial(on_ranks, *own, **cut)
            runs.append(Run(f"{method}, {layout_name}{end_of_name}", own, prepare, call, False))
    return runs


def _dynamic_runs(sizes: Sizes, device: torch.device) -> list[Run]:
    whole = _draw(sizes, device, sizes.dynamic)
    scores = torch.randn(1, sizes.kv_heads, sizes.dynamic, device=device)
    one, own = _leaves([*whole, scores]), _parts(whole, "contiguous")
    own += _leaves([shard_sequence(scores, None, dim=2, layout="contiguous")])

    def alone(_: Any) -> Tensor:
        mask = dynamic_mask(one[3].detach(), sizes.keep)
        return on_one(*one[:3], mask, one[3].unsqueeze(2))

    runs = [Run(ONE_GPU, one, _nothing, alone, True)]
    for exchange in ("counts", "fixed"):
        call = partial(dynamic_on_ranks, *own, sizes.keep, group=None, exchange=exchange)
        runs.append(Run(exchange, own, lambda: own[3].unsqueeze(2), call, False))
    return runs


def _torch_runs(sizes: Sizes, device: torch.device) -> list[Run]:
    """Return torch's own context parallelism, with its faster kernels; it wants as many key heads as query heads."""
    if device.type != "cuda":
        if dist.get_rank() == 0:
            print("  torch's context_parallel() has no kernels on a CPU and is left out", file=sys.stderr)
        return []
    from torch.nn.attention import SDPBackend, sdpa_kernel

    group = sizes.heads // sizes.kv_heads
    query, key, value = (tensor.transpose(1, 2) for tensor in _draw(sizes, device, sizes.seqlen))
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    own = _leaves([shard_sequence(tensor, None, dim=2) for tensor in (query, key, value)])
    query, key, value = own

    def attend(_: Any, backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    return [
        Run(
            f"torch SDPA, {name}",
            own,
            _nothing,
            partial(attend, backend=backend),
            False,
            _inside_context_parallel(device),
        )
        for name, backend in backends.items()
    ]


def _inside_context_parallel(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Return what opens torch's context_parallel(), which wants a buffer to cut: the inputs of a case are cut already."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    buffer = torch.zeros(1, 4 * dist.get_world_size(), device=device)
    return lambda: context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1])


def _methods(sizes: Sizes) -> tuple[str, ...]:
    size = dist.get_world_size()
    deals = sizes.heads % size == 0 and (sizes.kv_heads % size == 0 or size % sizes.kv_heads == 0)
    return METHODS if deals else METHODS[:2]


def _document_lengths(total: int, mean: int) -> list[int]:
    """Draw lengths of documents that fill a sequence: exponential, at least 16, the last one cut."""
    generator = torch.Generator().manual_seed(7)
    lengths: list[int] = []
    while sum(lengths) < total:
        drawn = -mean * float(torch.log1p(-torch.rand((), generator=generator)))
        lengths.append(min(max(16, int(drawn)), total - sum(lengths)))
    return lengths


def _measure(case: Case, sizes: Sizes, options: argparse.Namespace, device: torch.device, gauge: Gauge) -> list[Row]:
    """Time all ways to compute a case, in turns; return a row for each."""
    runs: dict[str, Run] = {}
    times: dict[str, list[tuple[float, ...]]] = {}
    repeats: dict[str, int] = {}
    for run in case.runs():
        if options.runs and not run.name.startswith((ONE_GPU, *options.runs)):
            continue
        try:
            _step(run, device)  # compiles, and fills caches
            repeats[run.name] = 1 if sum(_step(run, device)) >= LONG_STEP else options.repeats
        except Exception as refusal:
            if not run.name.startswith("torch"):
                raise
            print(f"  {run.name} does not run {case.name}: {str(refusal).splitlines()[0][:200]}", file=sys.stderr)
            continue
        runs[run.name], times[run.name] = run, []
    for _ in range(options.rounds):
        for name, run in runs.items():
            time.sleep(0.1 if device.type == "cuda" else 0)
            for _ in range(repeats[name]):
                times[name].append((*_step(run, device), _steps(run, device, STEPS)))
            gauge.read()
    flops = 4 * sizes.heads * sizes.dim * case.pairs
    rows: list[Row] = []
    for name, run in runs.items():
        parts = [statistics.median(part) for part in zip(*times[name], strict=True)]
        rows.append(_row(case.name, run, parts, flops, rows[0] if rows else None))
    return rows


def _step(run: Run, device: torch.device) -> tuple[float, float, float]:
    """Return the milliseconds of preparing, of the forward and of the backward, on the slowest rank."""
    with run.around():
        marks = [_mark(device, together=True)]
        prepared = run.prepare()
        marks.append(_mark(device))
        out = run.forward(prepared)
        marks.append(_mark(device))
        torch.autograd.grad(out, run.inputs, torch.ones_like(out))
        marks.append(_mark(device))
    prepare, forward, backward = _slowest([(later - earlier) * 1000 for earlier, later in pairwise(marks)])
    return prepare, forward, backward


def _steps(run: Run, device: torch.device, count: int) -> float:
    """Return the milliseconds of one of `count` steps that follow each other without waiting, on the slowest rank."""
    with run.around():
        began = _mark(device, together=True)
        for _ in range(count):
            out = run.forward(run.prepare())
            torch.autograd.grad(out, run.inputs, torch.ones_like(out))
        spent = (_mark(device) - began) * 1000 / count
    return _slowest([spent])[0]


def _slowest(milliseconds: list[float]) -> list[float]:
    """Return the most that any rank took for each part."""
    spent = torch.tensor(milliseconds)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return spent.tolist()


def _mark(device: torch.device, together: bool = False) -> float:
    """Return the time when everything up to here is done; with `together` on all ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    if together:
        dist.all_reduce(torch.zeros(1))  # on the CPU: nothing is left to do on the GPU
    return time.perf_counter()


def _row(case: str, run: Run, parts: list[float], flops: float, one: Row | None) -> Row:
    size = 1 if run.alone else dist.get_world_size()
    row: Row = {"case": case, "implementation": run.name, "ranks": size}
    row |= {f"{name}_ms": round(spent, 4) for name, spent in zip(PARTS, parts, strict=True)}
    row["forward_tflops"] = round(flops / size / parts[1] / 1e9, 4)
    row["backward_tflops"] = round(BACKWARD_FLOPS * flops / size / parts[2] / 1e9, 4)
    row["efficiency"] = 1.0 if one is None else round(one["whole_ms"] / (size * row["whole_ms"]), 4)
    row["received_bytes"] = _received(run)
    return row


def _received(run: Run) -> int:
    """Return the bytes that the rank that receives the most receives in a forward of this library's."""
    if run.name.startswith("torch"):
        return 0
    with record_traffic() as traffic, torch.no_grad():
        run.forward(run.prepare())
    most = torch.tensor([traffic.received])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def _bandwidth(sizes: Sizes, device: torch.device) -> Row:
    """Return what a rank receives in a second, in an all-gather and in an all-to-all of the size of keys and values."""
    size = dist.get_world_size()
    count = sizes.seqlen // size * sizes.kv_heads * 2 * sizes.dim
    part = torch.zeros(count // size * size, dtype=torch.bfloat16, device=device)
    whole, other = part.new_empty(size * part.numel()), torch.empty_like(part)
    found: Row = {"case": "bandwidth", "implementation": "collectives", "ranks": size}
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    for name, call, received in (
        ("all_gather", lambda: gather(whole, part), (size - 1) * part.nbytes),
        ("all_to_all", lambda: dist.all_to_all_single(other, part), (size - 1) * part.nbytes // size),
    ):
        times = []
        for _ in range(10):
            began = _mark(device, together=True)
            call()
            times.append(_mark(device) - began)
        found[f"{name}_gb_s"] = round(received / statistics.median(times) / 1e9, 2)
    return found


def _line(row: Row) -> str:
    times = " ".join(f"{row[f'{part}_ms']:9.3f}" for part in PARTS)
    rates = f"{row['forward_tflops']:8.2f} {row['backward_tflops']:8.2f}"
    return f"{row['case']:<20} {row['implementation']:<26} {times} {rates} {row['efficiency']:7.3f}"


if __name__ == "__main__":
    main()
