"""Run a sample of calls that covers every kernel under NVIDIA's compute-sanitizer, and write what it found to a file.

`python -m tests.tools.memory_check --output memory_check.json` runs the calls once without it, which compiles the
kernels, and once under each tool. `--tools memcheck` runs one of them; results of others stay in the file. `--compiled`
leaves out the run without a tool, for kernels that an earlier run has compiled. `--jobs` processes share the calls. Every
tensor has memory of its own meanwhile, so that an access beside it is noticed. A kernel that no call launches is a failure
too. Races count unless `races.py` has a proof that barriers order them. Under initcheck, outputs are filled before kernels write
them: the tool does not see what tensor maps store (`FILLED`), and tests with outputs full of NaN say whether all is written.
Reads of words that nothing uses are not errors where `sites.py` says why. `sites` in the file says of each call which lines of
which kernels were reported, and how often.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import dmattn_ops
from dmattn_ops import environment
from dmattn_ops.choice import arch, epochs
from dmattn_ops.dispatch import run as dispatch
from dmattn_ops.launching import plans
from tests.tools import races, sites

TOOLS = ("memcheck", "synccheck", "racecheck", "initcheck")
KERNELS = Path(dispatch.__file__).parents[1] / "kernels"
SEQLEN, HEADS, KV_HEADS = 300, 4, 2
DIMS = {64: torch.bfloat16, 128: torch.float16, 256: torch.bfloat16, 24: torch.bfloat16, 33: torch.float32}
# Beyond the print limit, a second line says how many were not printed: these are among those of the first.
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) errors?$|RACECHECK SUMMARY: (\d+) hazard)", re.MULTILINE)
_LAUNCHED, _CALLS, _BEGINS, _ENDS, _LINES = "launched ", "calls ", sites.BEGINS, "ends ", 40
_REPORTS = {  # all races are to be compared with proofs; of the rest many are enough, and the stacks of hosts take long
    "racecheck": ("--print-limit", "0"),
    "initcheck": ("--print-limit", "20000", "--show-backtrace", "device"),
}
# The functions that allocate what SM 9.0 kernels store through tensor maps, by module and name. Without this, initcheck reported
# every load of `out` before the backward.
FILLED = (
    ("dmattn_ops.meta", "forward_outputs"),
    ("dmattn_ops.meta", "backward_outputs"),
    ("dmattn_ops.meta", "qkvpacked_backward_outputs"),
    ("dmattn_ops.kernels.epochs.attention", "workspace"),  # gradients of packed keys
    ("dmattn_ops.kernels.hopper.backward.shares", "workspace"),  # dk and dv of each share
)
# Rows, biases and sums of dS by slot. Of blocks of slots without keys nobody writes them: the D 256 backward loads such a bias and
# uses nothing of it, and torch adds up such sums over heads, of which nobody reads what comes of it.
OF_SLOTS = (
    ("dmattn_ops.kernels.epochs.launch", "workspace"),
    ("dmattn_ops.kernels.hopper.backward.launch", "room_for_key_sums"),
    ("dmattn_ops.kernels.hopper.backward_256.launch", "room_for_key_sums"),
)
_SLOWEST = 5
_FOUND = 99  # the exit status of a tool that found something


_LAUNCHING = ("launch", "forward_with")  # functions whose first argument is a kernel


def launchable() -> set[str]:
    """Return all kernels that the launchers name, as `module.function` below the package of the kernels."""
    found = set()
    for path in KERNELS.rglob("*.py"):
        own = ".".join(["dmattn_ops", *path.relative_to(KERNELS.parent).with_suffix("").parts])
        tree = ast.parse(path.read_text())
        origin = {node.name: own for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                origin |= {alias.name: node.module or "" for alias in node.names}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in _LAUNCHING
                and node.args
            ):
                names = [each.id for each in ast.walk(node.args[0]) if isinstance(each, ast.Name)]
                found |= {_name(origin[name], name) for name in names if name in origin}
    return found


def _name(module: str, function: str) -> str:
    return f"{module.removeprefix('dmattn_ops.kernels.')}.{function}"


def _inputs(device: str, dtype: torch.dtype, dim: int, seqlen_q: int = SEQLEN, seqlen_k: int = SEQLEN) -> list[Tensor]:
    shapes = ((seqlen_q, HEADS), (seqlen_k, KV_HEADS), (seqlen_k, KV_HEADS))
    return [torch.randn(1, *shape, dim, device=device, dtype=dtype, requires_grad=True) for shape in shapes]


def _step(tensors: list[Tensor], *arguments: Any, function: Callable[..., Any] | None = None, **keywords: Any) -> None:
    """Run a call with its gradients."""
    out = (function or dmattn_ops.flash_dmattn_func)(*tensors, *arguments, **keywords)
    out = out[0] if isinstance(out, tuple) else out
    leaves = [each for each in (*tensors, keywords.get("bias"), keywords.get("sink")) if each is not None]
    torch.autograd.grad(out, [each for each in leaves if each.requires_grad], torch.randn_like(out))


def _bias(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, requires_grad=True)


def _kinds(device: str) -> dict[str, Callable[[], Any]]:
    """Return the keywords of calls that differ in what kernels are compiled for."""
    keep = torch.rand(1, KV_HEADS, SEQLEN, SEQLEN, device=device) < 0.5
    keep[..., :128, :128] = True
    documents = (torch.arange(SEQLEN, device=device) // 90)[None]
    start = torch.arange(SEQLEN, device=device, dtype=torch.int32).expand(1, KV_HEADS, -1)
    prepare: Any = dmattn_ops.prepare_mask
    return {
        "plain": dict,
        "causal": lambda: {"is_causal": True, "return_max": True},
        "window": lambda: {"window_size": (70, 3)},
        "bits": lambda: {"mask": prepare(keep)},
        "keys": lambda: {"mask": keep[:, :, :1]},
        "documents": lambda: {"mask": prepare(documents=documents), "is_causal": True},
        "intervals": lambda: {"mask": prepare(intervals=(start, start + 60), seqlen_q=SEQLEN), "is_causal": True},
        "hidden": lambda: {
            "mask": prepare(intervals=(start, start + 90), hidden=(start + 5, start + 9), seqlen_q=SEQLEN)
        },
        "key bias": lambda: {"bias": _bias(device, 1, KV_HEADS, 1, SEQLEN), "is_causal": True},
        "bias": lambda: {"bias": _bias(device, 1, HEADS, SEQLEN, SEQLEN)},
        "broadcast bias": lambda: {"bias": _bias(device, 1, 1, SEQLEN, SEQLEN), "mask": prepare(keep)},
        "soft cap and sink": lambda: {"softcap": 5.0, "sink": _bias(device, HEADS)},
        "dropout": lambda: {"dropout_p": 0.2},
        "deterministic": lambda: {"deterministic": True, "is_causal": True},
    }


def sample(device: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield calls by name."""
    for dim, dtype in DIMS.items():
        for name, keywords in _kinds(device).items():
            yield f"D {dim} {name}", partial(_dense, device, dtype, dim, keywords)
    for dtype in (torch.bfloat16, torch.float32):
        yield f"decoding {dtype}", partial(_decoding, device, dtype)
        yield f"packed sequences {dtype}", partial(_packed_sequences, device, dtype)
    yield "packed sequences of many tiles", partial(_many_tiles, device)
    yield "in one tensor", partial(_in_one, device)
    for dim in (64, 256):
        yield f"packed keys D {dim}", partial(_packed_keys, device, dim, 40)
        yield f"a broken promise D {dim}", partial(_packed_keys, device, dim, 5)
    yield "dynamic masks and documents", partial(_dynamic, device)
    for dtype in (torch.bfloat16, torch.float32):
        yield f"chosen blocks {dtype}", partial(_chosen, device, dtype)
    yield "kept keys", partial(_kept, device)
    yield "narrow heads of many batches", partial(_narrow, device)


def _dense(device: str, dtype: torch.dtype, dim: int, keywords: Callable[[], dict[str, Any]]) -> None:
    _step(_inputs(device, dtype, dim), **keywords())


def _narrow(device: str) -> None:
    tensors = [
        torch.randn(64, 70, HEADS, 16, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    keep = torch.rand(64, 1, 1, 70, device=device) < 0.9
    _step(tensors, keep, bias=_bias(device, 1, HEADS, 70, 70))


def _decoding(device: str, dtype: torch.dtype) -> None:
    _step(_inputs(device, dtype, 64, 1, 4000), is_causal=True)


def _packed_sequences(device: str, dtype: torch.dtype, offsets: tuple[int, ...] = (0, 100, 100, 297, SEQLEN)) -> None:
    total, places = offsets[-1], torch.tensor(offsets, dtype=torch.int32, device=device)
    tensors = [each.detach()[0].requires_grad_() for each in _inputs(device, dtype, 64, total, total)]
    function = dmattn_ops.flash_dmattn_varlen_func
    _step(tensors, places, places, SEQLEN, SEQLEN, function=function, is_causal=True)


def _many_tiles(device: str) -> None:
    """Pack more sequences than the kernel that records their tiles reads at a time where there are few."""
    offsets = tuple(100 * sequence + 90 * (sequence % 2) for sequence in range(171))
    _packed_sequences(device, torch.bfloat16, offsets)


def _in_one(device: str) -> None:
    qkv = torch.randn(1, SEQLEN, 3, HEADS, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    _step([qkv], function=dmattn_ops.flash_dmattn_qkvpacked_func, is_causal=True)


def _packed_keys(device: str, dim: int, at_most: int) -> None:
    """Pack the keys of a dynamic mask although there are few; on a GPU, a promise that is too small makes NaN."""
    scores = torch.randn(1, KV_HEADS, 900, device=device)
    mask = dmattn_ops.dynamic_mask(scores, 40)
    if device != "cpu":  # which refuses a broken promise
        mask = replace(mask, at_most=at_most)
    bias = scores[:, :, None].clone().requires_grad_()
    unseen = OF_SLOTS if device != "cpu" else ()
    with patch.multiple(epochs, pays=lambda sizes: True, LEAST_EPOCH=256), filled(unseen):
        _step(_inputs(device, torch.bfloat16, dim, 900, 900), mask, is_causal=True, bias=bias)


def _chosen(device: str, dtype: torch.dtype) -> None:
    inputs = _inputs(device, dtype, 64)
    indices = torch.randint(-1, -(-SEQLEN // 24), (1, KV_HEADS, SEQLEN, 40), device=device)
    mask = dmattn_ops.selection_mask(indices, block=24, is_causal=True)
    _step(inputs, mask)
    more_heads = torch.randn(1, SEQLEN, 4 * KV_HEADS, 64, device=device, dtype=dtype, requires_grad=True)
    _step([more_heads, *inputs[1:]], mask)
    query, key = (each.detach() for each in inputs[:2])
    dmattn_ops.selection_mass(query, key, indices, block=24)
    for kept in (None, mask):
        dmattn_ops.key_mass(query, key, kept, is_causal=True)


def _kept(device: str) -> None:
    cache = dmattn_ops.KeptKeys(1, KV_HEADS, 64, 40, dtype=torch.bfloat16, device=device)
    for length in (60, 1, 1):
        query, key, value = (each.detach() for each in _inputs(device, torch.bfloat16, 64, length, length))
        cache.attend(query, key, value, torch.randn(1, KV_HEADS, length, device=device))


def _dynamic(device: str) -> None:
    for seqlen in (900, 5000):
        documents = (torch.arange(seqlen, device=device) // 400)[None]
        for more in ({}, {"documents": documents}, {"keep_first": 4, "keep_last": 20}, {"is_causal": False}):
            dmattn_ops.dynamic_mask(torch.randn(2, KV_HEADS, seqlen, device=device), 30, **more)  # type: ignore[arg-type]
        dmattn_ops.prepare_mask(documents=documents, is_causal=True)  # more tiles than the kernel of lists sorts


@contextlib.contextmanager
def filled(functions: Iterable[tuple[str, str]]) -> Iterator[None]:
    """Let functions, named by module and name, allocate zeros; not integers, which are slots and lists."""
    with contextlib.ExitStack() as undo:
        for module, name in functions:
            place = import_module(module)
            undo.enter_context(patch.object(place, name, partial(_zeros, getattr(place, name))))
        yield


def _zeros(allocate: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    made = allocate(*arguments, **keywords)
    for tensor in (made,) if isinstance(made, Tensor) else made or ():
        if tensor.is_floating_point():
            tensor.zero_()
    return made


def run_calls(device: str, first: int = 0, step: int = 1) -> set[str]:
    """Run each `step`-th call of the sample from the `first` on; return the kernels that they launched."""
    launched: set[str] = set()
    if device != "cpu":
        from triton.runtime.jit import JITFunction

        run = JITFunction.run

        def noted(self: Any, *arguments: Any, **keywords: Any) -> Any:
            launched.add(_name(self.fn.__module__, self.fn.__name__))
            return run(self, *arguments, **keywords)

        JITFunction.run = noted
    calls = 0
    for number, (name, call) in enumerate(sample(device)):
        if number % step == first:
            print(f"{_BEGINS}{name}", flush=True)
            begun = time.perf_counter()
            torch.manual_seed(number)
            call()
            if device != "cpu":
                torch.cuda.synchronize()
            print(f"{_ENDS}{time.perf_counter() - begun:.1f} {name}", flush=True)
            calls += 1
    _let_go(device)
    print(f"{_CALLS}{calls}")
    print(f"{_LAUNCHED}{' '.join(sorted(launched))}")
    return launched


def _let_go(device: str) -> None:
    """Run one more backward, behind which torch's autograd thread holds nothing of the backwards before it.

    Where tensors have memory of their own, that thread still frees some of the last backward while the process ends, and torch
    then aborts: 6 of 135 processes on an H200, some of which ran nothing of this library, and none of 90 that ended with this.
    """
    leaf = torch.zeros(1, device=device, requires_grad=True)
    leaf.sum().backward()


def _share(command: list[str], limit: float) -> tuple[str, int]:
    """Run a process with a part of the calls; return what it printed and its exit status.

    A process that is ended by a signal prints where each of its threads was.
    """
    variables = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONFAULTHANDLER": "1"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=variables, start_new_session=True, **pipes)
    try:
        return process.communicate(timeout=limit)[0], process.returncode
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the tool, and the Python that it runs
        return process.communicate()[0], 124


def _last_words(shares: list[tuple[str, int]]) -> list[list[str]]:
    """Return the last lines of each process that ended badly, which is not to find something."""
    return [said.splitlines()[-_LINES:] for said, status in shares if status not in (0, _FOUND)]


def under(tool: str | None, sanitizer: str, limit: float, device: str, jobs: int = 1) -> dict[str, Any]:
    """Run the sample in processes of its own, under a tool if one is named; return what is known of it.

    That there are no errors is known only where the tool says so of every process, each of which told how many calls it made.
    """
    command = [sys.executable, "-m", "tests.tools.memory_check", "--device", device]
    if tool is not None:
        options = [*_REPORTS.get(tool, ()), "--target-processes", "all", "--error-exitcode", str(_FOUND), *command]
        command = [sanitizer, "--tool", tool, *options, *(["--filled"] if tool == "initcheck" else [])]
    begun = time.time()
    with ThreadPoolExecutor(jobs) as pool:
        commands = [[*command, "--calls", str(first), str(jobs)] for first in range(jobs)]
        shares = list(pool.map(lambda each: _share(each, limit), commands))
    text, statuses = "\n".join(said for said, _ in shares), [status for _, status in shares]
    # a crash counts more than a find
    status = next((each for each in statuses if each not in (0, _FOUND)), max(statuses))
    lines = text.splitlines()
    found = [int(one or other) for one, other in _SUMMARY.findall(text)]
    calls = [int(line.removeprefix(_CALLS)) for line in lines if line.startswith(_CALLS)]
    launched = [line.removeprefix(_LAUNCHED).split() for line in lines if line.startswith(_LAUNCHED)]
    ended = [line.removeprefix(_ENDS).split(" ", 1) for line in lines if line.startswith(_ENDS)]
    open_calls = {line.removeprefix(_BEGINS) for line in lines if line.startswith(_BEGINS)} - {
        name for _, name in ended
    }
    slowest = sorted(((float(seconds), name) for seconds, name in ended), reverse=True)[:_SLOWEST]
    known = len(calls) == jobs and (tool is None or len(found) >= jobs)
    reported: Counter[str] = sum((sites.of(said) for said, _ in shares), Counter())
    result = {
        "errors": sum(found) or (0 if known else None),
        "status": status, "calls": len(ended), "seconds": round(time.time() - begun, 1),
        "did not end": sorted(open_calls), "last words": _last_words(shares),
        "slowest": [f"{seconds} s {name}" for seconds, name in slowest],
        "kernels": sorted(set().union(*launched)),
        "sites": dict(reported.most_common()),
        "said": [line for line in lines if line.startswith("=========") or "Error" in line][:_LINES],
    }  # fmt: skip
    if tool == "racecheck" and known:
        result |= races.judge(text).as_result() | {"version": races.version(sanitizer)}
    if tool == "initcheck" and known:
        unused = sites.unused(reported)
        result |= {"errors": sum(found) - sum(unused.values()), "of words that nothing uses": unused}
    return result


def is_clean(result: dict[str, Any]) -> bool:
    """Return whether a run ended well, made all calls, and found nothing but what is no error (`races.py`, `sites.py`)."""
    ended = (0, _FOUND) if result.get("proven to be ordered") or result.get("of words that nothing uses") else (0,)
    return result["status"] in ended and result["errors"] == 0 and result["calls"] > 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="a sample of calls that covers every kernel under compute-sanitizer")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--compiled", action="store_true", help="kernels are compiled: no run without a tool before")
    parser.add_argument("--output", type=Path, default=Path("memory_check.json"), help="other tools' results stay")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for each run")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--sanitizer", default=shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=max(1, min(8, (os.cpu_count() or 1) // 2)),
        help="processes that share the calls: compiling takes minutes in one, and initcheck longer",
    )
    parser.add_argument("--calls", type=int, nargs=2, help=argparse.SUPPRESS)  # run these here, without a tool
    parser.add_argument("--filled", action="store_true", help=argparse.SUPPRESS)  # with `FILLED`
    return parser.parse_args()


def main() -> int:
    """Run what the arguments ask for; return the number of runs that are not clean, and of kernels that were not launched."""
    options = _options()
    if options.calls:
        os.environ[environment.CHECK] = "0"
        plans.forget()
        with filled(FILLED if options.filled else ()):
            run_calls(options.device, *options.calls)
        return 0
    if shutil.which(options.sanitizer) is None:
        print(f"there is no {options.sanitizer}: compute-sanitizer is a part of the CUDA toolkit")
        return 1
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    bad, runs = 0, options.tools if options.compiled else (None, *options.tools)
    for number, tool in enumerate(runs):
        name = tool or "without a tool"
        results[name] = under(tool, options.sanitizer, options.limit, options.device, options.jobs)
        machine = {"torch": torch.__version__, "device": _device_name(options.device)}
        results[name] |= machine | {"when": time.strftime("%F")}
        if number == 0 and options.device != "cpu":
            sm90 = (
                arch.current(torch.device(options.device)).sm == 90
            )  # what the other GPUs are given is not launched here
            summed = "ampere.backward.finish.finish_bias_kernel"
            elsewhere = ("ampere.",) if sm90 else ("hopper.", "decode.", "ragged.", summed)
            missing = sorted(launchable() - set(results[name]["kernels"]))
            results["not launched"] = [each for each in missing if not each.startswith(elsewhere)]
            bad += len(results["not launched"])
            print("not launched:", *results["not launched"])
        options.output.write_text(json.dumps(results, indent=1) + "\n")
        clean = is_clean(results[name])
        bad += not clean
        summary = f"{results[name]['errors']} errors, {results[name]['calls']} calls, {results[name]['seconds']} s"
        print(f"{name}: {'clean' if clean else 'NOT CLEAN'}, {summary}, status {results[name]['status']}", flush=True)
        for words in results[name]["last words"]:
            print(f"{name}: a process ended badly, and said:", *words, sep="\n    ", flush=True)
        if results[name]["did not end"]:
            print(f"{name}: did not end:", ", ".join(results[name]["did not end"]), flush=True)
    return bad


def _device_name(device: str) -> str:
    return "CPU" if device == "cpu" else torch.cuda.get_device_name()


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
