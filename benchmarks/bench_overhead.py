"""What a call costs besides its kernels: host time of a tiny call, memory of a large one, and reading a dense mask.

Host time is that of a forward and backward at B1 S128 H1 D64, eager and (on a GPU) compiled with CUDA graphs. Memory is
the peak of a forward and backward beyond inputs, outputs, gradients and what is saved for the backward. The mask's rate
counts its bytes once and is compared with a device-to-device copy, which counts bytes read and written.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

import dmattn_ops
from patterns import make_mask
from peers import IMPLEMENTATIONS, Problem, Run
from table import Row, default_output, parser
from timing import Gauge, Sample, interleaved, write_results

PEERS = ("dmattn", "sdpa")


def host_problem(device: str) -> Problem:
    """Return a call so small that only the host's work counts."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return Problem("B1 H1 S128 D64", 1, 1, 128, 64, device=device, dtype=dtype)


def whole_call(run: Run) -> Callable[[], Any]:
    """Return forward and backward as one function, the graph made anew each time."""

    def call() -> None:
        out = run.forward()
        out.backward(torch.ones_like(out))

    return call


def host_rows(device: str, rounds: int, gauge: Gauge) -> list[Row]:
    """Time the tiny call through each implementation, eager and replayed."""
    problem = host_problem(device)
    functions = {("eager", name): whole_call(IMPLEMENTATIONS[name](problem)) for name in PEERS}
    if device == "cuda":
        for name in PEERS:
            attend = IMPLEMENTATIONS[name](problem).forward
            compiled = torch.compile(functools.partial(_call, attend), mode="reduce-overhead", fullgraph=True)
            functions["cuda graphs", name] = whole_call(Run(compiled, None))
    samples = interleaved(functions, device, rounds=rounds, gauge=gauge)
    return [_host_row(problem, key, sample) for key, sample in samples.items()]


def _call(attend: Callable[[], Any]) -> Any:
    return attend()


def _host_row(problem: Problem, key: tuple[str, str], sample: Sample) -> Row:
    microseconds = [round(value * 1000, 1) for value in sample]
    return {
        "case": f"{key[0]} {problem.case}",
        "implementation": key[1],
        "call_us": microseconds[0],
        "call_range_us": microseconds[1:],
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


def mask_row(device: str, rounds: int, gauge: Gauge) -> Row:
    """Compare the rate at which a dense mask is read and packed with that of a copy."""
    seqlen = 8192 if device == "cuda" else 2048
    mask = make_mask("random", (1, 8, seqlen), 0.5, device)
    target = torch.empty_like(mask)
    functions: dict[str, Callable[[], object]]
    functions = {"prepare": functools.partial(dmattn_ops.prepare_mask, mask), "copy": lambda: target.copy_(mask)}
    samples = interleaved(functions, device, rounds=rounds, gauge=gauge)
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
    """Measure all three, print and write them."""
    options = parser(__doc__).parse_args(arguments)
    gauge = Gauge()
    rows = host_rows(options.device, options.rounds, gauge)
    rows.append(mask_row(options.device, options.rounds, gauge))
    if options.device == "cuda":
        rows += [memory_row(name) for name in PEERS]
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    write_results(options.output or default_output(options.device, "overhead"), rows, options.device, gauge)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
