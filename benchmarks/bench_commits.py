"""Two versions of this library in alternation on one card: what a change costs or gains, call by call.

    python benchmarks/bench_commits.py v0.2.0 HEAD

A side is a folder that holds `dmattn_ops`, or a commit, whose package is laid out in a temporary folder. Each side has a process of
its own, and they take turns at every call, so that both meet the same clock and temperature. Calls use public names that old
versions have. A forward, and a forward with its backward, are replayed as CUDA graphs; milliseconds are medians over the rounds,
and `backward_ms` is the difference of both. Kernels are compiled before, `--jobs` calls at a time.
"""

from __future__ import annotations

import argparse
import functools
import io
import math
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dmattn_ops
from timing import Gauge, elapsed_ms, replayed, write_results

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("forward", "backward")
REPEATS = 12  # replays in a round


class Call(NamedTuple):
    """A call: what computes out from the leaves, and what of it has to stay in memory."""

    attend: Callable[[], Tensor]
    leaves: list[Tensor]
    kept: Any = None


class Drawn(NamedTuple):
    """Draws the inputs of calls; `tiny` ones are seconds on a CPU."""

    device: str
    tiny: bool

    def rows(self, batch: int, seqlen: int, heads: tuple[int, int], dim: int) -> list[Tensor]:
        """Draw query, key and value."""
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        return [
            torch.randn(batch, seqlen, count, dim, device=self.device, dtype=dtype).requires_grad_()
            for count in (heads[0], heads[1], heads[1])
        ]

    def call(
        self,
        batch: int,
        seqlen: int,
        heads: tuple[int, int],
        dim: int,
        mask: Callable[[int], Any] | None = None,
        **conditions: Any,
    ) -> Call:
        """Return a call whose mask is made of its length."""
        seqlen = seqlen // 32 if self.tiny else seqlen
        leaves = self.rows(batch, seqlen, heads, dim)
        prepared = None if mask is None else mask(seqlen)
        attend = functools.partial(dmattn_ops.flash_dmattn_func, *leaves, prepared, **conditions)
        return Call(attend, leaves, prepared)

    def random(self, batch: int, rows: int, seqlen: int) -> Any:
        """Return a prepared mask of random elements, of keys alone where there is one row."""
        kept = torch.rand(batch, 1, rows, seqlen, device=self.device) < 0.5
        return dmattn_ops.prepare_mask(kept, seqlen_q=seqlen)

    def documents(self, seqlen: int) -> Any:
        """Return a causal mask of documents of 512 positions."""
        ids = torch.arange(seqlen, device=self.device, dtype=torch.int32)[None] // 512
        return dmattn_ops.prepare_mask(documents=ids, is_causal=True)

    def dynamic(self, batch: int, heads: int, share: int, seqlen: int) -> Any:
        """Return a dynamic mask that keeps a share of the keys."""
        scores = torch.randn(batch, heads, seqlen, device=self.device)
        return dmattn_ops.dynamic_mask(scores, seqlen // share)

    def packed(self, dim: int) -> Call:
        """Return a call of packed sequences."""
        lengths = torch.randint(10, 56, (16,)) * (1 if self.tiny else 32)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().to(self.device)
        total, longest = int(lengths.sum()), int(lengths.max())
        leaves = [row[0].detach().requires_grad_() for row in self.rows(1, total, (16, 16), dim)]
        attend = functools.partial(
            dmattn_ops.flash_dmattn_varlen_func, *leaves, offsets, offsets, longest, longest, is_causal=True
        )
        return Call(attend, leaves, offsets)


CALLS: dict[str, Callable[[Drawn], Call]] = {
    "dense, D128 causal": lambda draw: draw.call(2, 4096, (16, 16), 128, is_causal=True),
    "dense, D128 full": lambda draw: draw.call(2, 4096, (16, 16), 128),
    "dense, D64 causal": lambda draw: draw.call(2, 4096, (16, 16), 64, is_causal=True),
    "dense, H32/8 D128 causal": lambda draw: draw.call(2, 4096, (32, 8), 128, is_causal=True),
    "dense, D256 causal": lambda draw: draw.call(2, 4096, (8, 8), 256, is_causal=True),
    "dense, S1024 D128 causal": lambda draw: draw.call(8, 1024, (16, 16), 128, is_causal=True),
    "documents of 512, D128": lambda draw: draw.call(1, 16384, (16, 16), 128, draw.documents),
    "documents of 512, D64": lambda draw: draw.call(1, 16384, (16, 16), 64, draw.documents),
    "random bits, D128": lambda draw: draw.call(2, 4096, (16, 16), 128, lambda s: draw.random(2, s, s)),
    "random bits, D64": lambda draw: draw.call(2, 4096, (16, 16), 64, lambda s: draw.random(2, s, s)),
    "random keys, D128 causal": lambda draw: draw.call(
        2, 4096, (16, 16), 128, lambda s: draw.random(2, 1, s), is_causal=True
    ),
    "window of 1024, D128": lambda draw: draw.call(
        1, 16384, (16, 16), 128, is_causal=True, window_size=(1024, None)
    ),
    "dynamic, S8192 H32/8 D128": lambda draw: draw.call(2, 8192, (32, 8), 128, lambda s: draw.dynamic(2, 8, 8, s)),
    "dynamic, S32768 D128": lambda draw: draw.call(1, 32768, (16, 16), 128, lambda s: draw.dynamic(1, 16, 16, s)),
    "packed sequences, D128": lambda draw: draw.packed(128),
    "packed sequences, D64": lambda draw: draw.packed(64),
}  # fmt: skip


def set_up(name: str, draw: Drawn) -> tuple[Callable[[], Any], Callable[[], Any], Call]:
    """Return the forward of a call, forward and backward, and what must stay in memory as long as they are replayed."""
    torch.manual_seed(0)
    call = CALLS[name](draw)

    def forward() -> Tensor:
        with torch.no_grad():
            return call.attend()

    def whole() -> tuple[Tensor, ...]:
        out = call.attend()
        return torch.autograd.grad(out, call.leaves, torch.ones_like(out))

    if draw.device == "cpu":
        return forward, whole, call
    return replayed(forward), replayed(whole), call


def serve(draw: Drawn, names: list[str]) -> None:
    """Answer each line of standard input, the name of a call, with the milliseconds of its forward and of all of it."""
    calls = {name: set_up(name, draw) for name in names}
    print("ready", flush=True)
    for line in sys.stdin:
        forward, whole, _ = calls[line.rstrip("\n")]
        times = []
        for function in (forward, whole):
            elapsed_ms(function, 2, draw.device)
            times.append(elapsed_ms(function, REPEATS, draw.device))
        print(*times, flush=True)


@contextmanager
def laid_out(side: str) -> Iterator[Path]:
    """Give the folder of a side: itself, or a temporary one with the package of a commit."""
    if (Path(side) / "dmattn_ops").is_dir():
        yield Path(side).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", side, "dmattn_ops", "meta"], cwd=ROOT, check=True, capture_output=True
        )
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(folder, filter="data")
        yield Path(folder)


def process(side: Path, options: argparse.Namespace, *arguments: str) -> subprocess.Popen[str]:
    """Start this program for a side."""
    tiny = ["--tiny"] if options.tiny else []
    command = [sys.executable, str(Path(__file__).resolve()), f"--device={options.device}", *tiny, *arguments]
    names = {"PYTHONPATH": str(side), "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(side / "cache"))}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, env=os.environ | names, text=True, **pipes)  # type: ignore[call-overload]


def compiled(sides: list[Path], options: argparse.Namespace) -> None:
    """Make every call once in processes of their own, so that kernels are compiled side by side."""

    def once(job: tuple[Path, str]) -> int:
        side, name = job
        running = process(side, options, "--compile", name)
        running.communicate()
        return running.returncode

    jobs = [(side, name) for name in options.calls for side in sides]
    with ThreadPoolExecutor(options.jobs) as pool:
        failed = [job for job, status in zip(jobs, pool.map(once, jobs), strict=True) if status]
    if failed:
        raise SystemExit(f"these calls failed: {', '.join(f'{name} of {side}' for side, name in failed)}")


def times_of(servers: list[subprocess.Popen[str]], options: argparse.Namespace) -> dict[str, list[list[list[float]]]]:
    """Return, for each call and side, the milliseconds of forward and of all of it in each round; sides take turns to be first."""
    found: dict[str, list[list[list[float]]]] = {name: [[] for _ in servers] for name in options.calls}
    for turn in range(options.rounds):
        for name in options.calls:
            for number in (0, 1) if turn % 2 == 0 else (1, 0):
                server = servers[number]
                assert server.stdin is not None and server.stdout is not None
                print(name, file=server.stdin, flush=True)
                found[name][number].append([float(time) for time in server.stdout.readline().split()])
    return found


def rows_of(found: dict[str, list[list[list[float]]]]) -> list[dict[str, Any]]:
    """Return a row for each call, and one of geometric means; ratios are of the second side's time over the first one's."""
    rows: list[dict[str, Any]] = []
    for name, of_sides in found.items():
        row: dict[str, Any] = {"case": name}
        halves = [[statistics.median(part) for part in zip(*times, strict=True)] for times in of_sides]
        for part, both in zip(PARTS, zip(*[(f, whole - f) for f, whole in halves], strict=True), strict=True):
            row |= {f"{part}_ms": [round(time, 4) for time in both], f"{part}_ratio": round(both[1] / both[0], 4)}
        rows.append(row)
    means = {
        f"{part}_ratio": round(math.exp(statistics.fmean(math.log(row[f"{part}_ratio"]) for row in rows)), 4)
        for part in PARTS
    }
    return [*rows, {"case": "geometric mean", **means}]


def main(arguments: list[str]) -> list[dict[str, Any]]:
    """Measure the calls that the command line names; return the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sides", nargs="*", help="two folders or commits, the old one first")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile at a time")
    parser.add_argument("--calls", nargs="+", choices=list(CALLS), default=list(CALLS), help="only these calls")
    parser.add_argument("--tiny", action="store_true", help="small sizes: to see that all of it runs")
    parser.add_argument("--output", type=Path, help="the result file, if there is to be one")
    parser.add_argument("--compile", choices=list(CALLS), help=argparse.SUPPRESS)  # make this call, and end
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    draw = Drawn(options.device, options.tiny)
    if options.compile or options.serve:
        set_up(options.compile, draw) if options.compile else serve(draw, options.calls)
        return []
    if len(options.sides) != 2:
        parser.error("name two folders or commits, the old one first")
    with laid_out(options.sides[0]) as old, laid_out(options.sides[1]) as new:
        compiled([old, new], options)
        servers = [process(side, options, "--serve", "--calls", *options.calls) for side in (old, new)]
        try:
            for server in servers:
                assert server.stdout is not None
                if server.stdout.readline() != "ready\n":
                    raise SystemExit("a side could not set up the calls")
            rows = rows_of(times_of(servers, options))
        finally:
            for server in servers:
                server.kill()
    for row in rows:
        times = "  ".join(f"{part} {row.get(f'{part}_ms', '')} x{row[f'{part}_ratio']:.3f}" for part in PARTS)
        print(f"{row['case']:<28} {times}")
    if options.output:
        write_results(options.output, rows, options.device, Gauge())
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
