"""What features cost: determinism, dropout, biases with and without a gradient, and variable lengths against padding.

B2 H16 S4096 D128 causal, against the call without the feature; then 16 causal sequences of 256 to 2048, 16384 positions in all,
packed and padded to 2048. Prints milliseconds, and writes them as a result file; `ratio` is to the first row of a group.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import dmattn_ops
from table import Row, default_output, parser
from timing import Gauge, interleaved, kernels_ms, write_results

BATCH, HEADS, SEQLEN, DIM = 2, 16, 4096, 128
LENGTHS = (2048, 1792, 1536, 1408, 1280, 1152, 1024, 1024, 896, 896, 768, 640, 640, 512, 512, 256)
Call = tuple[Callable[..., Any], list[Tensor]]  # what is called, and what it is differentiated by


def draw(*shape: int, device: str) -> Tensor:
    """Return a leaf in bfloat16."""
    return torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_()


def features(device: str) -> Iterator[tuple[str, Call]]:
    """Yield calls with one feature each; the first has none."""
    inputs = [draw(BATCH, SEQLEN, HEADS, DIM, device=device) for _ in range(3)]
    plain = functools.partial(dmattn_ops.flash_dmattn_func, *inputs, is_causal=True)
    yield "plain", (plain, inputs)
    yield "deterministic", (functools.partial(plain, deterministic=True), inputs)
    yield "dropout 0.1", (functools.partial(plain, dropout_p=0.1), inputs)
    yield "softcap 20", (functools.partial(plain, softcap=20.0), inputs)
    for name, shape in (("[1, H, S, S]", (1, HEADS, SEQLEN, SEQLEN)), ("[B, H, 1, S]", (BATCH, HEADS, 1, SEQLEN))):
        bias = draw(*shape, device=device)
        yield f"bias {name}", (functools.partial(plain, bias=bias.detach()), inputs)
        yield f"bias {name} and its gradient", (functools.partial(plain, bias=bias), [*inputs, bias])


def lengths(device: str) -> Iterator[tuple[str, Call]]:
    """Yield the same sequences padded, padded with the padding masked, and packed."""
    longest, count = max(LENGTHS), len(LENGTHS)
    padded = [draw(count, longest, HEADS, DIM, device=device) for _ in range(3)]
    call = functools.partial(dmattn_ops.flash_dmattn_func, *padded, is_causal=True)
    yield "padded", (call, padded)
    keep = torch.arange(longest, device=device) < torch.tensor(LENGTHS, device=device)[:, None]
    mask = dmattn_ops.prepare_mask(keep, seqlen_q=longest, is_causal=True)
    yield "padded, padding masked", (functools.partial(call, mask=mask), padded)
    packed = [draw(sum(LENGTHS), HEADS, DIM, device=device) for _ in range(3)]
    offsets = torch.tensor([0, *LENGTHS], device=device).cumsum(0).int()
    q, k, v = packed
    varlen = functools.partial(
        dmattn_ops.flash_dmattn_varlen_func, q, k, v, offsets, offsets, longest, longest, is_causal=True
    )
    yield "packed", (varlen, packed)


def measure(group: str, calls: Iterator[tuple[str, Call]], rounds: int, gauge: Gauge) -> list[Row]:
    """Time forward and backward of each call of a group in turns."""
    functions: dict[tuple[str, str], Callable[[], Any]] = {}
    for name, (call, leaves) in calls:
        out = call()
        functions[name, "forward"] = call
        grad = functools.partial(torch.autograd.grad, out, leaves, torch.randn_like(out), retain_graph=True)
        functions[name, "backward"] = grad
    samples = interleaved(functions, "cuda", rounds=rounds, gauge=gauge, timer=kernels_ms)
    first = next(iter(functions))[0]
    rows = []
    for name in dict.fromkeys(name for name, _ in functions):
        row: Row = {"case": f"{group}: {name}", "implementation": "dmattn"}
        for part in ("forward", "backward"):
            sample, base = samples[name, part], samples[first, part]
            row |= {f"{part}_ms": round(sample.median, 4), f"{part}_ratio": round(sample.median / base.median, 3)}
        rows.append(row)
    return rows


def main(arguments: list[str]) -> list[Row]:
    """Measure both groups, print and write them."""
    options = parser(__doc__).parse_args(arguments)
    if options.device != "cuda":
        raise SystemExit("bench_features.py needs a GPU")
    gauge = Gauge()
    torch.manual_seed(0)
    rows = measure(f"B{BATCH} H{HEADS} S{SEQLEN} D{DIM} causal", features("cuda"), options.rounds, gauge)
    rows += measure(f"16 sequences H{HEADS} D{DIM} causal", lengths("cuda"), options.rounds, gauge)
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items() if name != "implementation"))
    write_results(options.output or default_output("cuda", "features"), rows, "cuda", gauge)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
