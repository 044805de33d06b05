"""Launch the kernels that find for how long each key of a dynamic mask is visible (definition: `dmattn_ops.kernels.selection`).

Let T be the worst of the best `keep` keys of a document up to a position: it only gets better, and the keys that leave
the best between two positions are those between their two T. So the row is cut twice, into chunks and into spans of 64 or 128:

1. `sort_runs` sorts the keys of each chunk and of each span.
2. `sort_alive`: for the begin of each chunk, where T splits the sorted chunks before it, by bisection; then it gathers and
   sorts the worst of the best there, as many as the chunk can replace.
3. `write_deaths`: for each span, where T splits these and the sorted spans of the chunk before it; of as many of the worst of the
   best there, and of its own keys, it finds the deaths by comparing them with its own keys.

A row of one chunk needs 1 and 3 only. With documents, two small launches (`documents`) come first. Programs depend on
nothing but earlier launches; nothing is added atomically, and every number written is exact, so it is the same each time.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from dmattn_ops.kernels.portable.arguments import broadcast_stride
from dmattn_ops.kernels.selection.alive import sort_alive
from dmattn_ops.kernels.selection.deaths import write_deaths
from dmattn_ops.kernels.selection.documents import find_changes, write_bounds
from dmattn_ops.kernels.selection.keys import Traits, sort_runs
from dmattn_ops.kernels.selection.order import ranks
from dmattn_ops.launching.launch import computed, launch, workspace

# Chunks and spans of positions by the longest row that they serve: chunks are sorted whole, and their begins search all before
# them; one chunk needs no search. H200, 2026-11-26, 16384 positions in all, 16 heads, us: rows of 2048 in one chunk 41, in chunks
# of 1024 and spans of 128 66; rows of 4096, 8192 and 16384 in chunks of 512 and spans of 64 56, 66 and 69, in those 75, 77 and 78.
CUTS = ((1 << 10, 1024, 64), (1 << 11, 2048, 64), (1 << 14, 512, 64), (1 << 16, 1024, 128), (1 << 18, 2048, 128))
LONGEST_CUT = (4096, 128)
LONGEST_ROW = 1 << 24  # a chunk's begin searches 4096 runs; positions leave keys room for a bit
SORTING_WARPS = 8  # 4 for 1024 keys and 16 for 4096 spill on some architectures
SPAN = 1024  # positions of documents in a program

_KINDS = {torch.float32: ("fp32", torch.int32), torch.bfloat16: ("bf16", torch.int16), torch.float16: ("fp16", None)}


def lifetimes(
    scores: Tensor,
    documents: Tensor | None,
    keep: int,
    keep_first: int,
    keep_last: int,
    is_causal: bool,
    start: Tensor,
    end: Tensor,
    chunk: int | None = None,
    fine: int | None = None,
    span: int = SPAN,
) -> None:
    """Write the queries `[start, end)` that see each key `[B, Hm, S]` (definition: `dmattn_ops.kernels.selection`).

    Tests cut rows into other lengths, powers of two: `fine >= 32`, `chunk >= 2 * fine`.
    """
    if start.shape[2] > LONGEST_ROW:
        raise NotImplementedError(f"the kernels of dynamic masks take at most {LONGEST_ROW} keys, got {start.shape[2]}")
    cut = next((cut for longest, *cut in CUTS if start.shape[2] <= longest), LONGEST_CUT)
    chunk, fine = chunk or cut[0], fine or cut[1]
    batch, heads, seqlen = start.shape
    rows, chunks = batch * heads, triton.cdiv(seqlen, chunk)
    if rows * chunks == 0:
        return
    keep, keep_first, keep_last = (min(number, seqlen) for number in (keep, keep_first, keep_last))
    scores, kind = _readable(scores)
    bounds = scores if documents is None else _bounds(documents, span)
    size, bits = chunks * chunk, max(1, (seqlen - 1).bit_length())
    scores_b, scores_h = (broadcast_stride(scores, dim) for dim in (0, 1))
    bounds_b = 0 if documents is None or documents.shape[0] == 1 else 2 * seqlen
    several = chunks > 1
    keys = workspace(scores, rows, chunks, 2, chunk, dtype=torch.int64)
    coarse_runs = workspace(scores, rows, size, dtype=torch.int64) if several else keys
    traits = Traits(chunk, fine, kind, documents is not None, is_causal)
    launch(
        sort_runs, (rows * chunks,), scores, bounds, keys, coarse_runs, start, end,
        seqlen, size, bits, heads, scores_b, scores_h, bounds_b,
        T=traits, COARSE=several, num_warps=SORTING_WARPS,
    )  # fmt: skip
    if keep == seqlen:
        return
    if several:
        log_runs = _log_runs(chunks - 1)
        pieces = workspace(scores, rows, chunks - 1, 2, 1 << log_runs, dtype=torch.int32)
        launch(
            sort_alive, (rows * (chunks - 1),), coarse_runs, bounds, pieces, keys, size, heads, bounds_b, keep,
            CHUNK=chunk, RUNS=1 << log_runs, LOG_RUNS=log_runs, HAS_DOCUMENTS=documents is not None,
            num_warps=SORTING_WARPS, follows=True,
        )  # fmt: skip
    spans = rows * triton.cdiv(seqlen, fine)
    launch(
        write_deaths, (spans,), scores, bounds, keys, end,
        seqlen, size, bits, heads, scores_b, scores_h, bounds_b, keep, keep_first, keep_last,
        T=traits, num_warps=deaths_warps(spans),
    )  # fmt: skip


def _readable(scores: Tensor) -> tuple[Tensor, str]:
    """Return scores as `load_keys` reads them, with a contiguous last dimension, and their kind."""
    if scores.dtype == torch.float64:
        return computed(ranks, scores), "rank"
    if scores.stride(2) != 1 and scores.shape[2] != 1:
        scores = computed(Tensor.contiguous, scores)
    kind, bits = _KINDS[scores.dtype]
    return scores if bits is None else scores.view(bits), kind


def _bounds(documents: Tensor, span: int) -> Tensor:
    """Return begin and end of each position's document, `[B or 1, 2, S]`."""
    if documents.stride(1) != 1 and documents.shape[1] != 1:
        documents = computed(Tensor.contiguous, documents)
    batch, seqlen = documents.shape
    spans = triton.cdiv(seqlen, span)
    changes = workspace(documents, batch, 2, spans, dtype=torch.int32)
    bounds = workspace(documents, batch, 2, seqlen, dtype=torch.int32)
    launch(
        find_changes, (batch * spans,), documents, changes, seqlen, spans, documents.stride(0), SPAN=span, num_warps=4
    )
    launch(
        write_bounds, (batch * spans,), documents, changes, bounds, seqlen, spans, documents.stride(0),
        SPAN=span, MANY=256, num_warps=4,
    )  # fmt: skip
    return bounds


def deaths_warps(programs: int) -> int:
    """Return the warps that find the deaths of a span: one, since a search is not shared, where that fills a GPU."""
    return 1 if programs >= 1024 else 4


def _log_runs(count: int) -> int:
    """Return the logarithm of a power of four, at least 16, that is not below `count`: few, because each is a kernel."""
    log = max(4, (count - 1).bit_length())
    return log + log % 2
