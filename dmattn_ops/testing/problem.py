"""Random problems: one attention call as a frozen row of data, drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dmattn_ops.testing.combinations import Kernel, Random, combination, draw_kernel, draw_shape

ALIKE = 250  # problems for a CPU in a row that use the same instructions, which a process chooses once
DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Problem:
    """One call of the library; its repr is the line that reproduces it."""

    seed: int = 0
    variant: str = "dense"  # dense, varlen, qkvpacked
    dtype: str = "float32"
    batch: int = 1
    heads: int = 1
    heads_k: int = 1
    seqlen_q: int = 8
    seqlen_k: int = 8
    dim: int = 16
    dim_v: int = 16
    layout: str = (
        "bshd"  # bshd, bhsd (a transposed view), sliced (inside a larger buffer), strided (last stride 2), expanded
    )
    mask: str = ""  # "", random, block, rows (whole query rows empty), keys (whole keys unseen), none (nothing visible)
    mask_shape: str = "bhq"  # which of the first three dimensions are not broadcast; "k" stands for Hkv heads
    mask_dtype: str = "bool"
    prepared: bool = False  # through prepare_mask
    documents: bool = False
    # "", random, lives (from the key's own query on), ends (no start), hidden (random ones, and hidden parts of them)
    intervals: str = ""
    intervals_shape: str = ""
    promise: bool = False  # at_most is given with the intervals
    bias: bool = False
    bias_shape: str = "bhq"
    bias_float32: bool = False
    nan_bias: bool = False  # NaN wherever no query sees the element
    poison: str = ""  # what is hidden holds in the call: "" (numbers as all others), nan, inf, -inf
    behind: int = 0  # packed rows behind the last sequence, which belong to none
    is_causal: bool = False
    causal_from: str = "bottom_right"
    left: int | None = None
    right: int | None = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    deterministic: bool = False
    batch_invariant: bool = False
    used: bool = False  # a part of the keys of each batch entry is used
    sink: str = ""  # "", own (the dtype of query), float32
    maximum: bool = False
    magnitude: float = 1.0
    lse_grad: bool = False
    compiled: bool = False
    place: str = ""  # "", stream (a second one), threads (two at once), backward thread (forward in this one)
    rows: str = ""  # memory of keys and values: "", one (a single row for all), overlapping, far (beyond 2^31 elements)
    extreme: str = ""  # where the bias is `bias_value`: "", rows (some whole ones), keys (all but the first), all
    bias_value: float = 0.0
    steep: float = 1.0  # what query is multiplied by: scores far from 0 without a bias
    instructions: str = ""  # of the C++ kernels: "" (the best of this processor), avx2, default


def draw(seed: int, device: str = "cpu", kernel: Kernel | None = None) -> Problem:
    """Draw a problem; the same seed gives the same problem on every machine.

    On a GPU, where kernels take seconds to compile, what they are compiled for is the seed's `combination`, and everything else
    is random. A `kernel` takes its place.
    """
    random = Random(seed)
    on_gpu = device != "cpu"
    if kernel is None:
        kernel = combination(seed) if on_gpu else draw_kernel(random, on_gpu)
    longest = 700 if on_gpu else 300
    dense = kernel.variant != "varlen"
    batch = random.of(2, 2, 3, 0 if random.chance(0.1) else 2) if kernel.several else 1
    heads_k = random.of(2, 3) if kernel.several_heads else 1
    heads = heads_k * kernel.group
    seqlen_q, seqlen_k = _draw_lengths(kernel, longest, on_gpu, random)
    by_key = {"": "", "shown": random.of("random", "lives", "ends"), "hidden": "hidden"}[kernel.intervals]
    is_causal, left, right = _draw_band(kernel.band, longest // 2, random)
    from_top = random.chance(0.3) if dense else kernel.top_left
    layout, rows = _draw_layout(kernel, heads, random)
    problem = Problem(
        seed=seed,
        variant=kernel.variant,
        dtype=kernel.dtype,
        batch=batch,
        heads=heads,
        heads_k=heads_k,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        dim=kernel.dim,
        dim_v=kernel.dim_v,
        layout=layout,
        mask=random.of("random", "random", "block", "block", "rows", "keys", "none") if kernel.mask else "",
        mask_shape=draw_shape(kernel.mask, dense, random),
        mask_dtype=random.of("bool", "bool", "bool", "uint8", "int64", "int32"),
        prepared=dense and random.chance(0.4),
        documents=kernel.documents,
        intervals=by_key,
        intervals_shape=random.of("bh", "b", "k", ""),
        promise=random.chance(0.5),
        bias=bool(kernel.bias),
        bias_shape=kernel.bias_shape,
        bias_float32=kernel.bias_float32,
        nan_bias=random.chance(0.3),
        is_causal=is_causal,
        causal_from="top_left" if from_top else "bottom_right",
        left=left,
        right=right,
        softmax_scale=random.of(100.0, 1000.0)
        if kernel.natural
        else random.of(None, None, None, 0.3, 1.0 / kernel.dim),
        softcap=random.of(5.0, 30.0) if kernel.softcap else 0.0,
        dropout_p={"": 0.0, "some": random.of(0.1, 0.5), "all": 1.0}[kernel.dropout],
        deterministic=kernel.deterministic,
        sink=kernel.sink,
        maximum=kernel.maximum,
        magnitude=random.of(1.0, 1.0, 1.0, 0.1, 3.0),
        lse_grad=kernel.lse_grad,
        place=random.of("", "", "", "stream", "threads", "backward thread"),
        rows=rows,
    )
    return _far_from_usual(problem, kernel, on_gpu, Random(-1000 - seed))


def _far_from_usual(problem: Problem, kernel: Kernel, on_gpu: bool, random: Random) -> Problem:
    """Draw what few callers do and no kernel is compiled for: large scores, other instructions of the CPU."""
    extreme, value, steep = "", 0.0, 1.0
    if problem.bias and random.chance(0.3):
        lowest = torch.finfo(torch.float32 if problem.bias_float32 else DTYPES[problem.dtype]).min
        extreme = random.of("rows", "keys", "all")
        value = max(random.of(-1e4, -1e9, -1e29, lowest, 1e9, 1e30), lowest)
        value = min(value, -lowest)
    elif random.chance(0.1) and problem.dtype != "float64" and not problem.softcap and not kernel.natural:
        # The eps of float64 is no room for rounded scores, and behind a soft cap the gradients of all of them are 0.
        steep = random.of(1e2, 1e3, 3e3) if problem.dtype == "float16" else random.of(1e3, 1e6, 1e9)
    problem = replace(problem, extreme=extreme, bias_value=value, steep=steep)
    problem = _poisoned(problem, Random(-3000 - problem.seed))
    if on_gpu:
        return problem
    problem = replace(problem, instructions=instructions(problem.seed))
    random = Random(-5000 - problem.seed)
    used = problem.variant != "varlen" and random.chance(0.2)
    return replace(problem, used=used, batch_invariant=random.chance(0.2))


def _poisoned(problem: Problem, random: Random) -> Problem:
    """Draw what hidden rows hold. Rows that share memory with others hold what these do."""
    shared = problem.layout == "expanded" or problem.rows in ("one", "overlapping")
    poison = random.of("nan", "inf", "-inf") if random.chance(0.4) and not shared else ""
    packed = problem.variant == "varlen" and problem.batch > 0 and min(problem.seqlen_q, problem.seqlen_k) >= 4
    behind = 1 + random.below(4) if packed and random.chance(0.5) else 0
    return replace(problem, poison=poison, behind=behind)


def instructions(seed: int) -> str:
    """Return the instructions that a problem for a CPU asks for."""
    return ("", "", "avx2", "default")[seed // ALIKE % 4]


def _draw_lengths(kernel: Kernel, longest: int, on_gpu: bool, random: Random) -> tuple[int, int]:
    """Draw the numbers of queries and keys."""
    seqlen_q = random.of(0, 17, 63, 64, 127, 128, 129, 256, *(17 + random.below(longest) for _ in range(3)))
    seqlen_q = {"": seqlen_q, "few": random.of(2, 16, 2 + random.below(15)), "one": 1}[kernel.queries]
    seqlen_k = random.of(0, 1, 3, 65, 128, 255, random.below(longest), random.below(longest), 4 * random.below(longest))
    if kernel.padded_q:
        seqlen_q = (seqlen_q + 15) // 16 * 16
    elif seqlen_q % 16 == 0 and seqlen_q:
        seqlen_q += 1 if kernel.queries == "" else -1
    seqlen_k = (seqlen_k + 15) // 16 * 16 if kernel.padded else seqlen_k | (on_gpu and seqlen_k > 0)
    alike = kernel.variant == "qkvpacked" or kernel.documents
    same = alike or (kernel.padded == kernel.padded_q and random.chance(0.5))
    return seqlen_q, seqlen_q if same else seqlen_k


def _draw_layout(kernel: Kernel, heads: int, random: Random) -> tuple[str, str]:
    """Draw the memory layout of all rows, and how those of keys and values share memory or lie far apart."""
    layout = random.of("bshd", "bshd", "bhsd", "strided")
    rows = random.of("", "overlapping") if random.chance(0.15) else ""
    if kernel.layout == "sliced":
        layout, rows = "sliced", random.of(rows, rows, "one")
    elif kernel.layout == "repeated":
        rows = random.of("one", rows) if heads > 1 else "one"
        layout = random.of("expanded", layout) if rows == "one" else "expanded"
    if kernel.variant == "qkvpacked":  # to which heads that are equal are no layout of their own
        return random.of(layout, layout, "expanded") if layout != "sliced" else layout, ""
    return layout, "far" if kernel.far else rows


def _draw_band(band: str, longest: int, random: Random) -> tuple[bool, int | None, int | None]:
    """Draw `(is_causal, left, right)`."""
    left, right = random.below(longest), random.below(longest)
    causal, of_right = random.of((True, None), (True, None), (True, right), (False, right))
    if band == "left":
        return False, left, None
    return {"": (False, None, None), "right": (causal, None, of_right), "both": (causal, left, of_right)}[band]
