"""The costs of a call beside its main kernels: time on the host, memory, and the kernels that only move bytes.

Host time is that of a forward and backward at B1 S128 H1 D64, without a mask, with a prepared one, and with one that is
passed as a tensor (torch's SDPA always gets it so), eager and (on a GPU, but for the last) compiled with CUDA graphs: many calls
in a row and no synchronisation between them, `call_us` until the last one returned, `done_us` until the device was through as
well. Memory is the peak of a forward and backward beyond inputs, outputs, gradients and what is saved for the backward.
Rates of bytes are compared with
a device-to-device copy, which counts bytes read and written: packing a dense mask counts the mask once, the kernel before
the backward's main kernel (statistics with a zeroed accumulator) what it reads and writes.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import dmattn_ops
from patterns import make_mask
from peers import IMPLEMENTATIONS, Problem, Run, recorded_run
from table import Row, default_output, parser
from timing import Gauge, interleaved, kernels_ms, write_results

PEERS = ("dmattn", "sdpa")


def host_problem(device: str, masked: bool) -> Problem:
    """Return a call so small that only the host's work counts."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    mask = make_mask("random", (1, 1, 128), 0.5, device) if masked else None
    return Problem(f"B1 H1 S128 D64{' mask' * masked}", 1, 1, 128, 64, mask=mask, device=device, dtype=dtype)


def with_tensor(problem: Problem) -> Run:
    """Run this library with the problem's mask as it is."""
    inputs, grad_out = problem.leaves(heads_first=False)
    attend = functools.partial(dmattn_ops.flash_dmattn_func, *inputs, problem.mask)
    return recorded_run(attend, inputs, grad_out)


def whole_call(run: Run, compiled: bool) -> Callable[[], Any]:
    """Return forward and backward as one function, the graph made anew each time."""
    forward = _compiled(run.forward) if compiled else run.forward

    def call() -> Any:
        if compiled:
            torch.compiler.cudagraph_mark_step_begin()  # what the last call returned may be overwritten
        return torch.autograd.grad(forward(), run.inputs, run.grad_out)

    return call


def _compiled(attend: Any) -> Callable[[], Any]:
    """Compile a partial application, its arguments being inputs of the graph."""

    def function(*arguments: Any, **keywords: Any) -> Any:
        return attend.func(*arguments, **keywords)

    compiled = torch.compile(function, mode="reduce-overhead", fullgraph=True)
    return functools.partial(compiled, *attend.args, **attend.keywords)


def host_rows(device: str, rounds: int) -> list[Row]:
    """Time the tiny calls through each implementation, eager and replayed, in turns."""
    calls = {}
    for masked in (False, True):
        problem = host_problem(device, masked)
        for mode in ("eager", "cuda graphs") if device == "cuda" else ("eager",):
            for name in PEERS:
                run = IMPLEMENTATIONS[name](problem)
                calls[f"{mode} {problem.case}", name] = whole_call(run, mode != "eager")
    calls[f"eager {problem.case}", "dmattn, a tensor"] = whole_call(with_tensor(problem), compiled=False)
    for call in calls.values():
        host_times(call, device, 5)  # compiles, fills caches, captures graphs
    times: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            times[key].append(host_times(call, device))
    return [_host_row(*key, *zip(*pairs, strict=True)) for key, pairs in times.items()]


def host_times(call: Callable[[], Any], device: str, repeats: int = 100) -> tuple[float, float]:
    """Return the microseconds of one call until the host returned, and until the device was through."""
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    returned = time.perf_counter()
    if device == "cuda":
        torch.cuda.synchronize()
    return (returned - began) * 1e6 / repeats, (time.perf_counter() - began) * 1e6 / repeats


def _host_row(case: str, name: str, returned: tuple[float, ...], done: tuple[float, ...]) -> Row:
    return {
        "case": case,
        "implementation": name,
        "call_us": round(statistics.median(returned), 1),
        "call_range_us": [round(min(returned), 1), round(max(returned), 1)],
        "done_us": round(statistics.median(done), 1),
    }


def memory_row(name: str) -> Row:
    """Measure the peak of one large call on the GPU, beyond what any implementation needs to hold."""
    problem = Problem("memory B2 H16 S8192 D128", 2, 16, 8192, 128, causal=True)
    run = IMPLEMENTATIONS[name](problem)
    assert run.backward is not None
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()  # inputs, and the saved tensors of the call that `run` keeps
    torch.cuda.reset_peak_memory_stats()
    gradients = run.backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - held - sum(gradient.nbytes for gradient in gradients)
    accumulator = 4 * problem.batch * problem.heads * problem.seqlen * problem.dim
    return {
        "case": problem.case,
        "implementation": name,
        "extra_mb": round(peak / 1e6, 1),
        "dq_accumulator_mb": round(accumulator / 1e6, 1),
    }


def row_kernel_row(gauge: Gauge) -> list[Row]:
    """Return the rate of the kernel before the SM 9.0 backward, as the profiler times it, and of a copy."""
    problem = Problem("rows B4 H32 S8192 D128", 4, 32, 8192, 128, causal=True)
    run = IMPLEMENTATIONS["dmattn"](problem)
    assert run.backward is not None
    rows = problem.batch * problem.heads * problem.seqlen
    # two rows of 16 bits and lse; two statistics and a row of float32 zeros
    size = rows * (2 * 2 * problem.dim + 4 + 8 + 4 * problem.dim)
    source = torch.empty(rows * problem.dim * 4, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = interleaved({"copy": lambda: target.copy_(source)}, "cuda", gauge=gauge, timer=kernels_ms)["copy"].median
    copy_rate = 2 * source.nbytes / copied / 1e6
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(10):
            run.backward()
        torch.cuda.synchronize()
    times = [event.device_time for event in profile.events() if event.name.startswith("prepare_kernel")]
    if not any(times):  # on other architectures
        return []
    rate = size / statistics.median(times) / 1e3
    row = {"case": problem.case, "implementation": "prepare_kernel", "gigabytes_per_s": round(rate, 1)}
    return [{**row, "copy_gigabytes_per_s": round(copy_rate, 1), "of_copy": round(rate / copy_rate, 3)}]


def mask_row(device: str, rounds: int, gauge: Gauge) -> Row:
    """Compare the rate at which a dense mask is read and packed with that of a copy."""
    seqlen = 8192 if device == "cuda" else 2048
    mask = make_mask("random", (1, 8, seqlen), 0.5, device)
    target = torch.empty_like(mask)
    functions: dict[str, Callable[[], object]]
    functions = {"prepare": functools.partial(dmattn_ops.prepare_mask, mask), "copy": lambda: target.copy_(mask)}
    samples = interleaved(functions, device, rounds=rounds, gauge=gauge, timer=kernels_ms)
    rate, copy = mask.nbytes / samples["prepare"].median / 1e6, 2 * mask.nbytes / samples["copy"].median / 1e6
    return {
        "case": f"mask B1 H8 S{seqlen}",
        "implementation": "dmattn",
        "prepare_ms": round(samples["prepare"].median, 4),
        "gigabytes_per_s": round(rate, 1),
        "copy_gigabytes_per_s": round(copy, 1),
        "of_copy": round(rate / copy, 3),
    }


def main(arguments: list[str]) -> list[Row]:
    """Measure all of it, print and write it."""
    options = parser(__doc__).parse_args(arguments)
    gauge = Gauge()
    rows = host_rows(options.device, options.rounds)
    rows.append(mask_row(options.device, options.rounds, gauge))
    if options.device == "cuda":
        rows += [memory_row(name) for name in PEERS]
        rows += row_kernel_row(gauge)
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    write_results(options.output or default_output(options.device, "overhead"), rows, options.device, gauge)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
