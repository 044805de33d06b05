"""What the kernels of a random problem are compiled for, and the combinations of it that problems for a GPU take.

A GPU's kernels take seconds to compile, so that problems for one share them. The first ten thousand of every hundred thousand
seeds take the same `COMBINATIONS` combinations, which bring together all pairs of features; every further ten thousand take as
many of their own, picked for triples of features that are new.
"""

from __future__ import annotations

import itertools
from functools import lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import torch

COMBINATIONS = 127  # a prime, so that what a problem takes from its seed by itself differs among those of a combination
OF_A_BLOCK = 10_000  # seeds in a row whose problems take the same combinations
BLOCKS = 10  # after so many, the first combinations come again
CANDIDATES = 6000  # among which pairs are covered
FOR_TRIPLES = 250  # the same for triples, of which there are many more
_MOST_FEATURES = 128
_COLUMNS = (64, 80, 96, 128, 144, 160, 192, 256)  # head dimensions that kernels of SM 9.0 have tiles for


class Kernel(NamedTuple):
    """The features of a problem that its kernels are compiled for. Sizes, strides and values do not belong to them."""

    variant: str  # dense, varlen, qkvpacked
    dtype: str
    dim: int
    dim_v: int
    group: int  # query heads of a key head
    layout: str  # whole (rows lie at multiples of 16 bytes, as far as `dim` allows), sliced (not so), repeated (they share memory)
    far: bool  # keys and values lie beyond 2^31 elements
    several: bool  # batches: dimensions of size 1 have strides of 0, which some kernels are compiled for
    several_heads: bool  # of keys
    queries: str  # "", few, one
    padded_q: bool  # the number of queries is a multiple of 16
    padded: bool  # that of keys is
    mask: str  # "", keys (without a query dimension) or full
    documents: bool
    intervals: str  # "", shown, hidden
    bias: str  # "", keys, full (an element for each score), shared (a query dimension, but fewer elements than scores)
    bias_shape: str  # as that of a problem
    bias_float32: bool
    band: str  # "", right (a limit on the right alone, as causal), left, both
    top_left: bool  # of packed sequences
    natural: bool  # a scale so large that scores are computed in natural units without a bias as well
    softcap: bool
    dropout: str  # "", some, all
    deterministic: bool
    sink: str  # "", own (the dtype of query), float32
    maximum: bool
    lse_grad: bool

    @property
    def mapped(self) -> bool:
        """Whether the kernels for SM 9.0 may take it: 16-bit elements, in rows that tensor maps describe."""
        fits = self.dim % 8 == 0 and self.dim_v % 8 == 0 and max(self.dim, self.dim_v) <= _COLUMNS[-1]
        return fits and self.dtype in ("float16", "bfloat16") and self.layout == "whole"

    @property
    def columns(self) -> int:
        """The width of the tiles that hold a query: for SM 9.0 where such kernels may take it, else a negative power of two."""
        if self.mapped:
            return next(width for width in _COLUMNS if width >= self.dim)
        return -_padded(self.dim)

    @property
    def listed(self) -> bool:
        """Whether kernels walk over lists of tiles."""
        return self.variant == "varlen" or self.documents or self.mask != "" or self.intervals != ""

    @property
    def hopper(self) -> tuple[bool, bool]:
        """Whether kernels for SM 9.0 are likely to take its forward and its backward. It decides nothing but what is picked."""
        if not self.mapped or (self.variant == "varlen" and self.dropout):
            return False, False
        widest, of_queries = max(self.dim, self.dim_v), self.bias in ("full", "shared")
        if widest <= 128:
            refused = (of_queries and self.softcap) or self.dropout == "all" or (self.deterministic and self.listed)
        else:
            refused = (self.bias != "" and self.softcap) or self.dropout != ""
        return not of_queries or widest > 64, not refused and self.bias != "full"

    @property
    def cost(self) -> int:
        """About how long all of its kernels take to compile: the backward for SM 9.0 longest, and the forward for it next."""
        forward, backward = self.hopper
        narrow = backward and max(self.dim, self.dim_v) <= 128  # with lists, their sizes decide about the kernel
        return 6 * narrow + 3 * (narrow and self.listed) + 2 * backward + forward

    def features(self) -> list[tuple[str, Any]]:
        """Return each feature by name. Head dimensions count as what tiles they need."""
        wider = _padded(self.dim_v) > _padded(self.dim)
        width = "equal" if self.dim == self.dim_v else "wider" if wider else "narrower"
        made = self._asdict() | {"dim": self.columns, "dim_v": width, "odd": self.dim % 8 != 0}
        made["forward"], made["backward"] = self.hopper
        del made["bias_shape"]
        return list(made.items())

    def pairs(self) -> set[tuple]:
        """Return the pairs of features that a problem with these kernels tries together."""
        return set(itertools.combinations(self.features(), 2))

    def triples(self) -> set[tuple]:
        """Return the triples of features that a problem with these kernels tries together."""
        return set(itertools.combinations(self.features(), 3))


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


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


class Even(Random):
    """Draws what is rare nearly as often as what is common, so that few draws bring rare features together."""

    def chance(self, probability: float) -> bool:
        return super().chance(min(max(probability, 0.1 if probability < 0.1 else 0.2), 0.6))

    def of(self, *options: Any) -> Any:
        return super().of(*dict.fromkeys(options))


def draw_kernel(random: Random, on_gpu: bool) -> Kernel:
    """Draw features that a call may have together."""
    dtypes = ("float32", "float16", "bfloat16") if on_gpu else ("float64", "float32", "float32", "bfloat16", "float16")
    variant, dtype = random.of("dense", "dense", "dense", "dense", "varlen", "qkvpacked"), random.of(*dtypes)
    dim = random.of(1, 8, 16, 32, 40, 64, 64, 64, 80, 96, 128, 128, 144, 160, 192, 256, 1 + random.below(256))
    dim = random.of(320, 512, 1024, 257 + random.below(768)) if random.chance(0.05) else dim
    other = random.of(1, 8, 32, 64, 128, 256, 1 + random.below(256), 300)
    dim_v = dim if variant == "qkvpacked" or random.chance(0.7) else other
    dense, packed = variant != "varlen", variant == "qkvpacked"
    layouts = ("whole", "whole", "whole", "sliced") if packed else ("whole", "whole", "whole", "sliced", "repeated")
    group = 1 if packed else random.of(1, 1, 2, 4)
    several, several_heads = random.chance(0.6), random.chance(0.5)
    bias = random.of("", "keys", *(("full", "shared") if dense else ())) if random.chance(0.7) else ""
    several_heads = several_heads or (bias == "shared" and not several and group == 1)  # something has to share it
    band = random.of("right", "right", "left", "both", "both") if random.chance(0.6) else ""
    softcap, documents = random.chance(0.4), dense and random.chance(0.15)
    queries = random.of("few", "few", "one") if random.chance(0.25) else ""
    padded_q, padded = queries != "one" and random.chance(0.5), random.chance(0.5)
    if packed or documents:  # as many keys as queries
        padded = padded_q
    return Kernel(
        variant=variant,
        dtype=dtype,
        dim=dim,
        dim_v=dim_v,
        group=group,
        layout=random.of(*layouts),
        far=not packed and random.chance(0.03),
        several=several,
        several_heads=several_heads,
        queries=queries,
        padded_q=padded_q,
        padded=padded,
        mask=random.of("", "keys", "full", "full") if dense else random.of("", "keys"),
        documents=documents,
        intervals=random.of("", "", "", "", "shown", "hidden") if dense else "",
        bias=bias,
        bias_shape=_draw_bias_shape(bias, dense, several, several_heads, group, random),
        bias_float32=bias != "" and random.chance(0.4),
        band=band,
        top_left=band != "" and not dense and random.chance(0.3),
        natural=bias == "" and not softcap and dtype != "float64" and random.chance(0.1),
        softcap=softcap,
        dropout=random.of("some", "some", "all") if random.chance(0.3) else "",
        deterministic=random.chance(0.2),
        sink=random.of("", "", "own", "float32"),
        maximum=random.chance(0.2),
        lse_grad=random.chance(0.3),
    )


def _draw_bias_shape(bias: str, dense: bool, several: bool, several_heads: bool, group: int, random: Random) -> str:
    """Draw which dimensions a bias has: such that each score has an element of its own, or that some share one, as is asked."""
    if bias not in ("full", "shared"):
        return draw_shape(bias, dense, random)
    sizes = {"bhq": (several, several_heads, group), "hq": (False, several_heads, group), "bkq": (several, several_heads, 1),
             "bq": (several, False, 1), "q": (False, False, 1)}  # fmt: skip
    return random.of(*[shape for shape, held in sizes.items() if (held == sizes["bhq"]) == (bias == "full")])


def draw_shape(kind: str, dense: bool, random: Random) -> str:
    """Draw which dimensions a mask or bias has; varlen ones have no batch and no queries."""
    if not dense:
        return random.of("h", "k", "")
    return random.of("bhq", "bq", "q", "hq", "bkq") if kind == "full" else random.of("bh", "b", "k", "")


def combination(seed: int) -> Kernel:
    """Return the combination that the problem of a seed takes on a GPU."""
    return combinations(block_of(seed))[seed % OF_A_BLOCK % COMBINATIONS]


def block_of(seed: int) -> int:
    """Return the number of the combinations that a seed's problem takes one of; 0 are those that cover all pairs."""
    block = seed // OF_A_BLOCK
    return 0 if block % BLOCKS == 0 else block


@lru_cache(maxsize=4)
def combinations(block: int) -> tuple[Kernel, ...]:
    """Return the combinations of a block, those that bring most together first."""
    random = Even(-1 - block)
    candidates = list(dict.fromkeys(draw_kernel(random, True) for _ in range(CANDIDATES // (4 if block else 1))))
    covering = () if block else _covering_pairs(candidates)
    missing = COMBINATIONS - len(covering)
    # half of them for SM 9.0, whose kernels few random combinations suit
    suited = [kernel for kernel in candidates if kernel.hopper[1]][: FOR_TRIPLES // 3]
    known = combinations(0) if block else covering
    more = _with_new_triples(suited, known, missing // 2)
    others = [kernel for kernel in candidates[:FOR_TRIPLES] if kernel not in more]
    return *covering, *more, *_with_new_triples(others, (*known, *more), missing - len(more))


def _covering_pairs(candidates: list[Kernel]) -> tuple[Kernel, ...]:
    """Return some of the candidates, which bring as many pairs together as all: always the one with the most new pairs next."""
    places: dict[tuple, int] = {}
    masks = []  # a bit for each ordered pair
    for kernel in candidates:
        held = [places.setdefault(feature, len(places)) for feature in kernel.features()]
        row = sum(1 << place for place in held)
        masks.append(sum(row << (place * _MOST_FEATURES) for place in held))
    assert len(places) <= _MOST_FEATURES
    missing, chosen = reduce(or_, masks), []
    while missing:
        best = max(range(len(masks)), key=lambda index: (masks[index] & missing).bit_count())
        chosen.append(candidates[best])
        missing &= ~masks[best]
    return tuple(chosen)


def _with_new_triples(candidates: list[Kernel], known: tuple[Kernel, ...], count: int) -> list[Kernel]:
    """Return `count` of the candidates, each picked for the triples of features that `known` and earlier ones lack."""
    tried = set().union(*(kernel.triples() for kernel in known))
    new = {kernel: kernel.triples() - tried for kernel in candidates}
    chosen: list[Kernel] = []
    while len(chosen) < count:
        best = max(new, key=lambda kernel: len(new[kernel]))
        chosen.append(best)
        found = new.pop(best)
        for triples in new.values():
            triples -= found
    return chosen
