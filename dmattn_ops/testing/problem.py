"""Random problems: one attention call as a frozen row of data, drawn from a seed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

KERNELS = 40  # among 10000 problems for a GPU
CANDIDATES = 24
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
    intervals: str = (
        ""  # "", random, lives (from the key's own query on), hidden (random ones, and hidden parts of them)
    )
    intervals_shape: str = ""
    promise: bool = False  # at_most is given with the intervals
    bias: bool = False
    bias_shape: str = "bhq"
    bias_float32: bool = False
    nan_bias: bool = False  # NaN wherever no query sees the element
    is_causal: bool = False
    causal_from: str = "bottom_right"
    left: int | None = None
    right: int | None = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    deterministic: bool = False
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
    onednn: bool = True  # the C++ kernels may use its products
    instructions: str = ""  # of the C++ kernels: "" (the best of this processor), avx2, default


class Kernel(NamedTuple):
    """The features of a problem that its kernels are compiled for. Sizes, strides and values do not belong to them."""

    variant: str
    dtype: str
    dim: int
    dim_v: int
    group: int
    aligned: bool  # rows of query, key and value lie at multiples of 16 bytes, as far as `dim` allows
    short: bool  # few queries
    padded: bool  # the number of keys is a multiple of 16
    mask: str  # "", keys (without a query dimension) or full
    documents: bool
    intervals: str  # "", shown, hidden
    maximum: bool
    bias: str  # like mask
    bias_float32: bool
    banded: bool
    top_left: bool
    softcap: bool
    dropout: bool

    def pairs(self) -> set[tuple]:
        """Return the pairs of features that a problem with these kernels tries together."""
        traits = self._asdict() | {"dim": self.dim > 64, "dim_v": self.dim == self.dim_v, "odd": self.dim % 8 != 0}
        traits["wide"] = (self.dim > 128) + (self.dim > 256)
        return set(itertools.combinations(sorted(traits.items()), 2))


def draw(seed: int, device: str = "cpu") -> Problem:
    """Draw a problem; the same seed gives the same problem on every machine.

    On a GPU, where kernels take seconds to compile, seeds of the same ten thousand that differ by a multiple of `KERNELS` give
    problems with the same compiled kernels.
    """
    random = Random(seed)
    on_gpu = device != "cpu"
    kernel = _kernels_for_gpu(seed // 10000)[seed % KERNELS] if on_gpu else _draw_kernel(random, on_gpu)
    longest = 700 if on_gpu else 300
    dense, packed = kernel.variant != "varlen", kernel.variant == "qkvpacked"
    seqlen_q = random.of(0, 17, 63, 64, 127, 128, 129, 256, *(17 + random.below(longest) for _ in range(3)))
    if kernel.short:
        seqlen_q = random.of(1, 2, 16, random.below(17))
    seqlen_k = random.of(0, 1, 3, 65, 128, 255, random.below(longest), random.below(longest), 4 * random.below(longest))
    same = packed or kernel.documents or random.chance(0.5)
    by_key = {"": "", "shown": random.of("random", "lives"), "hidden": "hidden"}[kernel.intervals]
    seqlen_k = seqlen_q if same else seqlen_k
    seqlen_k = (seqlen_k + 15) // 16 * 16 if kernel.padded else seqlen_k | on_gpu
    heads_k = random.of(1, 1, 2, 3)
    layout = random.of("bshd", "bshd", "bhsd", "expanded", "strided") if kernel.aligned else "sliced"
    is_causal, left, right = _draw_band(kernel.banded, longest // 2, random)
    from_top = random.chance(0.3) if dense else kernel.top_left
    problem = Problem(
        seed=seed,
        variant=kernel.variant,
        dtype=kernel.dtype,
        batch=random.of(1, 1, 2, 3, 0 if random.chance(0.05) else 2),
        heads=heads_k * kernel.group,
        heads_k=heads_k,
        seqlen_q=seqlen_k if same else seqlen_q,
        seqlen_k=seqlen_k,
        dim=kernel.dim,
        dim_v=kernel.dim_v,
        layout=layout,
        mask=random.of("random", "random", "block", "block", "rows", "keys", "none") if kernel.mask else "",
        mask_shape=_draw_shape(kernel.mask, dense, random),
        mask_dtype=random.of("bool", "bool", "bool", "uint8", "int64", "int32"),
        prepared=dense and random.chance(0.4),
        documents=kernel.documents,
        intervals=by_key,
        intervals_shape=random.of("bh", "b", "k", ""),
        promise=random.chance(0.5),
        bias=bool(kernel.bias),
        bias_shape=_draw_shape(kernel.bias, dense, random),
        bias_float32=kernel.bias_float32,
        nan_bias=random.chance(0.3),
        is_causal=is_causal,
        causal_from="top_left" if from_top else "bottom_right",
        left=left,
        right=right,
        softmax_scale=random.of(None, None, None, 0.3, 1.0 / kernel.dim),
        softcap=random.of(5.0, 30.0) if kernel.softcap else 0.0,
        dropout_p=random.of(0.1, 0.5, 1.0) if kernel.dropout else 0.0,
        deterministic=random.chance(0.2),
        sink=random.of("", "", "own", "float32"),
        maximum=kernel.maximum,
        magnitude=random.of(1.0, 1.0, 1.0, 0.1, 3.0),
        lse_grad=random.chance(0.3),
        place=random.of("", "", "", "stream", "threads", "backward thread"),
    )
    return _far_from_usual(problem, on_gpu, Random(-1000 - seed))


def _far_from_usual(problem: Problem, on_gpu: bool, random: Random) -> Problem:
    """Draw what few callers do: rows that share memory or lie far apart, large scores, other instructions of the CPU.

    On a GPU, none of this is a reason to compile more than what depends on the layout.
    """
    rows, extreme, value, steep = "", "", 0.0, 1.0
    if problem.variant != "qkvpacked" and random.chance(0.15):
        rows = random.of("one", "one", "overlapping", "overlapping", "far")
    if problem.bias and random.chance(0.3):
        lowest = torch.finfo(torch.float32 if problem.bias_float32 else DTYPES[problem.dtype]).min
        extreme = random.of("rows", "keys", "all")
        value = max(random.of(-1e4, -1e9, -1e29, lowest, 1e9, 1e30), lowest)
        value = min(value, -lowest)
    elif random.chance(0.1) and problem.dtype != "float64" and not problem.softcap:
        # The eps of float64 is no room for rounded scores, and behind a soft cap the gradients of all of them are 0.
        steep = random.of(1e2, 1e3, 3e3) if problem.dtype == "float16" else random.of(1e3, 1e6, 1e9)
    problem = replace(problem, rows=rows, extreme=extreme, bias_value=value, steep=steep)
    if on_gpu:
        return problem
    return replace(problem, onednn=random.chance(0.8), instructions=instructions(problem.seed))


def instructions(seed: int) -> str:
    """Return the instructions that a problem for a CPU asks for."""
    return ("", "", "avx2", "default")[seed // ALIKE % 4]


@lru_cache(maxsize=8)
def _kernels_for_gpu(block: int) -> tuple[Kernel, ...]:
    """Draw the kernels of ten thousand problems. Each is the one of several candidates with the most untried pairs of features."""
    random = Random(-1 - block)
    chosen: list[Kernel] = []
    tried: set[tuple] = set()
    for index in range(KERNELS):
        candidates = [_draw_kernel(random, True) for _ in range(CANDIDATES)]
        if index % 3 == 0:
            candidates = [_plain(kernel, random) for kernel in candidates]
        chosen.append(max(candidates, key=lambda kernel: len(kernel.pairs() - tried)))
        tried |= chosen[-1].pairs()
    return tuple(chosen)


def _plain(kernel: Kernel, random: Random) -> Kernel:
    """Return a variant of the candidate that the kernels for SM 9.0 take, because few random candidates are."""
    dim = random.of(40, 64, 64, 96, 128, 128, 192, 256)
    kernel = kernel._replace(dtype=random.of("float16", "bfloat16"), dim=dim, dim_v=dim, aligned=True, short=False)
    return kernel._replace(bias="", dropout=False, maximum=False)


def _draw_kernel(random: Random, on_gpu: bool) -> Kernel:
    dtypes = ("float32", "float16", "bfloat16") if on_gpu else ("float64", "float32", "float32", "bfloat16", "float16")
    variant, dtype = random.of("dense", "dense", "dense", "dense", "varlen", "qkvpacked"), random.of(*dtypes)
    dim = random.of(1, 8, 16, 32, 40, 64, 64, 64, 80, 96, 128, 128, 192, 256, 1 + random.below(256))
    dim = random.of(320, 512, 1024, 257 + random.below(768)) if random.chance(0.05) else dim
    other = random.of(1, 8, 32, 64, 128, 1 + random.below(256), 300)
    dim_v = dim if variant == "qkvpacked" or random.chance(0.7) else other
    dense = variant != "varlen"
    return Kernel(
        variant=variant,
        dtype=dtype,
        dim=dim,
        dim_v=dim_v,
        group=1 if variant == "qkvpacked" else random.of(1, 1, 2, 4),
        aligned=random.chance(0.8),
        short=random.chance(0.2),
        padded=random.chance(0.4),
        mask=random.of("", "keys", "full", "full") if dense else random.of("", "keys"),
        documents=dense and random.chance(0.15),
        intervals=random.of("", "", "", "", "shown", "hidden") if dense else "",
        maximum=random.chance(0.2),
        bias=random.of("", "keys", "full" if dense else "keys") if random.chance(0.7) else "",
        bias_float32=random.chance(0.4),
        banded=random.chance(0.6),
        top_left=random.chance(0.3),
        softcap=random.chance(0.4),
        dropout=random.chance(0.3),
    )


def _draw_band(banded: bool, longest: int, random: Random) -> tuple[bool, int | None, int | None]:
    """Draw `(is_causal, left, right)`: something is hidden where `banded`."""
    is_causal, window = random.chance(0.7), random.chance(0.4)
    left = random.below(longest) if random.chance(0.7) else None
    right = random.below(longest) if random.chance(0.5) or left is None else None
    if not banded:
        return False, None, None
    return (is_causal, left, right) if window or not is_causal else (True, None, None)


def _draw_shape(kind: str, dense: bool, random: Random) -> str:
    """Draw which dimensions a mask or bias has; varlen ones have no batch and no queries."""
    if not dense:
        return random.of("h", "k", "")
    return random.of("bhq", "bq", "q", "hq", "bkq") if kind == "full" else random.of("bh", "b", "k", "")


class Random:
    """Draws from a torch generator, so that a problem depends on its seed alone."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed * 2654435761 % (1 << 62))

    def below(self, limit: int) -> int:
        return int(torch.randint(max(limit, 1), (1,), generator=self.generator))

    def chance(self, probability: float) -> bool:
        return float(torch.rand(1, generator=self.generator)) < probability

    def of(self, *options: Any) -> Any:
        return options[self.below(len(options))]
