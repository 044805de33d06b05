"""What `dmattn_ops.tune` measures with: calls of a shape on random data, whether results agree, and a clock."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dmattn_ops.api import arguments
from dmattn_ops.bands import Band
from dmattn_ops.call import NO_MASK, UNBOUNDED, Call, Mask, Varlen, plain_options
from dmattn_ops.choice.tuning import Shape
from dmattn_ops.masks import prepare
from dmattn_ops.masks.tile_mask import TileMask

ROUNDS, ROUND_MS, IDLE_SECONDS = 5, 6.0, 0.005
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 4e-3}  # relative L2; float32 may use TF32
DOCUMENTS = 4  # in a sequence of a shape with segments, or with intervals without a promise
MARGIN = 0.98  # of the time of the row's own that a candidate must stay under: smaller gains are noise

Measure = Callable[[dict[Any, Callable[[], None]]], dict[Any, float]]


def parse_shape(text: str) -> Shape:
    """Return the shape that words such as "B4 H32 Hkv8 S4096 D128 bfloat16 causal masked deterministic" name; or ValueError.

    "keep512" is a causal dynamic mask that keeps 512 keys, with scores for each key head.
    """
    numbers = {
        "B": "batch",
        "H": "heads",
        "Hkv": "kv_heads",
        "S": "seqlen_q",
        "Sk": "seqlen_k",
        "D": "dim",
        "Dv": "dim_v",
    }
    fields: dict[str, Any] = {}
    causal = False
    for word in text.split():
        letters = word.rstrip("0123456789")
        if letters in numbers and letters != word:
            fields[numbers[letters]] = int(word[len(letters) :])
        elif word in ("float16", "bfloat16", "float32"):
            fields["dtype"] = word
        elif word.startswith("keep") and word[4:].isdigit():
            fields |= {"mask": "intervals", "at_most": int(word[4:]), "band_hi": 0}
        elif word in ("causal", "masked", "deterministic", "varlen"):
            causal |= word == "causal"
            fields |= {} if word == "causal" else {"mask": "bits"} if word == "masked" else {word: True}
        else:
            raise ValueError(f"a shape consists of words such as B4 H32 S4096 D128 causal, got {word!r}")
    fields.setdefault("kv_heads", fields.get("heads", 1))
    fields.setdefault("seqlen_k", fields.get("seqlen_q", Shape.seqlen_q))
    fields.setdefault("dim_v", fields.get("dim", Shape.dim))
    if "at_most" in fields:
        fields["mask_heads"] = fields["kv_heads"]
    shape = Shape(**fields)
    if not causal or shape.mask == "intervals":
        return shape
    # bands of packed sequences begin at the diagonal of each
    return replace(shape, band_hi=0 if shape.varlen else shape.seqlen_k - shape.seqlen_q)


def make_call(shape: Shape, device: torch.device) -> Call:
    """Return a call of that shape on random data; masks keep half of the elements, or four documents."""
    dtype = getattr(torch, shape.dtype)

    def rows(seqlen: int, heads: int, dim: int) -> Tensor:
        tensor = torch.randn(shape.batch, seqlen, heads, dim, device=device, dtype=dtype)
        return tensor.flatten(0, 1) if shape.varlen else tensor

    query = rows(shape.seqlen_q, shape.heads, shape.dim)
    key = rows(shape.seqlen_k, shape.kv_heads, shape.dim)
    value = rows(shape.seqlen_k, shape.kv_heads, shape.dim_v)
    bias = None if shape.bias is None else torch.randn(_bias_shape(shape), device=device, dtype=dtype)
    seed = arguments.dropout_seed(query) if shape.dropout_p else None
    varlen = None
    if shape.varlen:
        sequences = torch.arange(shape.batch + 1, dtype=torch.int32, device=device)
        offsets = sequences * shape.seqlen_q, sequences * shape.seqlen_k
        varlen = Varlen(*offsets, shape.seqlen_q, shape.seqlen_k, False)
    mask, lo, hi = _mask(shape, device)
    options = plain_options(
        shape.dim**-0.5, lo, hi, softcap=shape.softcap, dropout_p=shape.dropout_p, deterministic=shape.deterministic
    )
    return Call(query, key, value, bias, mask, None, seed, varlen, options)


def _bias_shape(shape: Shape) -> tuple[int, ...]:
    assert shape.bias is not None
    return (*shape.bias[:-1], shape.batch * shape.seqlen_k) if shape.varlen else shape.bias


def _mask(shape: Shape, device: torch.device) -> tuple[Mask, int, int]:
    """Return the tensors of a mask like the shape's, and the band to call with."""
    lo, hi, seqlen_q, seqlen_k = shape.band_lo, shape.band_hi, shape.seqlen_q, shape.seqlen_k
    mask: Tensor | TileMask | None = None
    if shape.mask == "intervals":
        mask = _intervals(shape, device)
    if shape.mask == "bits":
        mask = torch.rand(1, 1, seqlen_q, seqlen_k, device=device) < 0.5
    elif shape.mask == "segments" and seqlen_q == seqlen_k:
        mask = prepare.prepare_mask(documents=torch.arange(seqlen_k, device=device)[None] * DOCUMENTS // seqlen_k)
    elif shape.mask == "segments":
        mask = torch.rand(1, 1, 1, seqlen_k, device=device) < 0.5
    return (NO_MASK, lo, hi) if shape.varlen else prepare.resolve(mask, Band(lo, hi), seqlen_q, seqlen_k)


def _intervals(shape: Shape, device: torch.device) -> TileMask:
    """Return a dynamic mask of random scores where a promise tells how many keys it keeps; else documents as intervals."""
    heads, seqlen_q, seqlen_k = shape.mask_heads, shape.seqlen_q, shape.seqlen_k
    if shape.at_most >= 0:
        scores = torch.randn(shape.batch, heads, seqlen_k, device=device)
        mask = prepare.dynamic_mask(scores, shape.at_most, is_causal=shape.band_hi < UNBOUNDED)
        if seqlen_q <= seqlen_k:  # the last queries of a longer sequence
            return mask.queries(seqlen_k - seqlen_q, seqlen_k)
    document = torch.arange(seqlen_k, dtype=torch.int32, device=device) * DOCUMENTS // max(1, seqlen_k)
    length = -(-seqlen_q // DOCUMENTS)
    start = (document * length).expand(1, heads, -1)
    return prepare.prepare_mask(intervals=(start, start + length), seqlen_q=seqlen_q)


def written(run: Callable[[], None], outputs: list[Tensor]) -> list[Tensor]:
    """Return copies of what a run writes to the outputs: NaN where it writes nothing, as in slots of packed keys that hold none."""
    _poison(outputs)
    run()
    return [tensor.clone() for tensor in outputs]


def _poison(outputs: list[Tensor]) -> None:
    for tensor in outputs:
        tensor.fill_(math.nan)


def disagreement(attempt: Callable[[], None], outputs: list[Tensor], expected: list[Tensor]) -> str:
    """Return why a configuration is not a candidate, because it does not launch or gives other results; else an empty string.

    `expected` is what the row's own wrote (`written`): what that leaves unwritten must stay so.
    """
    _poison(outputs)
    try:
        attempt()
    except Exception as error:  # of a compiler, of a launch, for want of memory
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
    for found, truth in zip(outputs, expected, strict=True):
        finite = truth.isfinite()
        difference = (found.float() - truth.float()).where(finite, 0.0).norm()
        limit = TOLERANCE[truth.dtype] * truth.float().where(finite, 0.0).norm() + 1e-6
        if not torch.equal(found.isfinite(), finite) or not difference <= limit:
            return "other results than the row's own"
    return ""


def interleaved(functions: dict[Any, Callable[[], None]]) -> dict[Any, float]:
    """Return the milliseconds on the GPU of each function: the median over rounds in which all take turns, after a rest each.

    Launches are replayed from CUDA graphs: for few tiles, the host takes longer to launch a kernel than the GPU to run it.
    """
    captured = {key: _captured(run) for key, run in functions.items()}
    times: dict[Any, list[float]] = {key: [] for key in functions}
    for _ in range(ROUNDS):
        for key, (graph, repeats) in captured.items():
            time.sleep(IDLE_SECONDS)
            times[key].append(_elapsed_ms(graph.replay) / repeats)
    return {key: statistics.median(values) for key, values in times.items()}


def _captured(run: Callable[[], None]) -> tuple[torch.cuda.CUDAGraph, int]:
    """Return a graph that launches a function as often as fills a round, and how often that is; it must have run before."""
    repeats = max(1, min(50, int(ROUND_MS / max(_elapsed_ms(run), 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    graph.replay()
    return graph, repeats


def _elapsed_ms(run: Callable[[], None]) -> float:
    """Return the milliseconds between the events before and after a call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)
