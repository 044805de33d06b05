"""Random uses of `KeptKeys` beside a plain definition in float64 that remembers the whole sequence."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import torch
from selection_cases import SHAPES_OF_SCORES, draw_scores
from torch import Tensor

from dmattn_ops import KeptKeys


@dataclass
class Token:
    """A position that one sequence has: key `[Hkv, D]`, value `[Hkv, Dv]`, score `[Hkv]`, bias `[H]`, id; None goes on."""

    key: Tensor
    value: Tensor
    score: list[float]
    bias: Tensor
    document: int | None


def is_better(one: tuple[float, int], other: tuple[float, int]) -> bool:
    """Return whether a key (score, position) is better than another: NaN is worse than everything, then the earlier key counts."""
    (score, position), (other_score, other_position) = one, other
    if math.isnan(score) or math.isnan(other_score):
        return position < other_position if math.isnan(score) == math.isnan(other_score) else math.isnan(other_score)
    return score > other_score or (score == other_score and position < other_position)


def seen(tokens: list[Token], head: int, keep: int, keep_first: int, keep_last: int) -> list[int]:
    """Return which keys the last of the tokens sees, by the definition of `dynamic_mask`."""
    begin, document = 0, None
    for j, token in enumerate(tokens):
        if token.document is not None:
            begin = begin if document in (None, token.document) else j
            document = token.document
    mine = range(begin, len(tokens))
    worth = [(token.score[head], position) for position, token in enumerate(tokens)]
    return [
        j
        for j in mine
        if j - begin < keep_first
        or len(tokens) - 1 - j < keep_last
        or sum(is_better(worth[other], worth[j]) for other in mine) < keep
    ]


def answer(query: Tensor, tokens: list[Token], numbers: dict) -> tuple[Tensor, Tensor, Tensor]:
    """Return out `[H, Dv]`, lse and the maximum `[H]` of a query `[H, D]` that stands where the last token stands."""
    heads, (kv_heads, dim) = query.shape[0], tokens[0].key.shape
    groups = heads // kv_heads
    out = torch.zeros(heads, tokens[0].value.shape[1], dtype=torch.float64)
    lse = torch.full((heads,), -math.inf, dtype=torch.float64)
    most = lse.clone()
    for kv_head in range(kv_heads):
        keys = seen(tokens, kv_head, *numbers["rule"])
        if not keys:
            continue
        key = torch.stack([tokens[j].key[kv_head] for j in keys]).double()
        value = torch.stack([tokens[j].value[kv_head] for j in keys]).double()
        scale = 1 / math.sqrt(dim) if numbers["softmax_scale"] is None else numbers["softmax_scale"]
        for head in range(kv_head * groups, (kv_head + 1) * groups):
            score = key @ query[head].double() * scale
            if numbers["softcap"]:
                score = numbers["softcap"] * torch.tanh(score / numbers["softcap"])
            score = score + torch.stack([tokens[j].bias[head] for j in keys]).double()
            lse[head], most[head] = score.logsumexp(0), score.max()
            out[head] = torch.exp(score - lse[head]) @ value
            if numbers["sink"] is not None:
                out[head] *= torch.sigmoid(lse[head] - numbers["sink"][head].double())
    return out, lse, most


@dataclass
class Problem:
    """A cache in use, drawn from a seed: chunks, steps, padding, documents, biases and positions that are taken back."""

    seed: int
    longest: int = 40
    numbers: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pick = pick = random.Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.batch, self.kv_heads, groups = pick.choice((1, 2, 3)), pick.choice((1, 2)), pick.choice((1, 2, 3))
        self.heads, self.dim, self.value_dim = self.kv_heads * groups, pick.choice((1, 4, 8)), pick.choice((1, 4, 8))
        small = pick.choice((2, 6, 12))
        rule = (
            pick.choice((0, 1, pick.randint(0, small), pick.randint(0, small), self.longest + 3)),
            *(pick.choice((0, 0, 1, pick.randint(0, small), self.longest + 1)) for _ in range(2)),
        )
        self.rollback = pick.choice((0, 0, 1, 3, 7))
        self.numbers = {
            "rule": rule,
            "softmax_scale": pick.choice((None, 0.5)),
            "softcap": pick.choice((0.0, 0.0, 2.0)),
            "sink": self.normal(self.heads) if pick.random() < 0.3 else None,
        }
        keep, keep_first, keep_last = rule
        self.cache = KeptKeys(
            self.batch, self.kv_heads, self.dim, keep, keep_first=keep_first, keep_last=keep_last,
            value_dim=self.value_dim, dtype=torch.float64, rollback=self.rollback,
        )  # fmt: skip
        for part in (self.cache.key, self.cache.value, self.cache.scores):
            part.fill_(math.nan)  # what was never written
        self.kind = pick.choice((*SHAPES_OF_SCORES, "tied", "special"))
        self.score_heads = pick.choice((1, self.kv_heads))
        self.score_dtype = pick.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16))
        self.bias_heads = pick.choice((None, 1, self.kv_heads, self.heads))
        self.bias_dtype = pick.choice((torch.float32, torch.float64))
        self.bias_from = pick.choice((0, 0, 2))  # the first call that has one
        self.with_documents, self.with_padding = pick.random() < 0.4, pick.random() < 0.4
        self.documents_from = pick.choice((0, 0, 2)) if self.with_documents else 1 << 30
        self.tokens: list[list[Token]] = [[] for _ in range(self.batch)]
        self.ids = [0] * self.batch
        self.possible = [0] * self.batch  # how many positions may be taken back
        self.whole = draw_scores((self.batch, self.score_heads, 4 * self.longest), self.kind, self.generator)
        self.calls = 0

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def run(self) -> int:
        """Use the cache until the sequences are long enough; return how many rows were compared."""
        compared, total = 0, 0
        steps = self.pick.random() < 0.3
        while total < self.longest:
            count = self.pick.choice((1, 1, 1, 2, self.pick.randint(0, 9), self.pick.randint(1, self.longest)))
            count = 1 if steps and self.pick.random() < 0.9 else count
            compared += self.attend(count, total)
            total += count
            if self.rollback and self.pick.random() < 0.4:
                self.crop()
            if self.pick.random() < 0.05:
                self.reorder()
        return compared

    def attend(self, count: int, origin: int) -> int:
        pick, batch = self.pick, self.batch
        query = self.normal(batch, count, self.heads, self.dim)
        key, value = (
            self.normal(batch, count, self.kv_heads, self.dim),
            self.normal(batch, count, self.kv_heads, self.value_dim),
        )
        scores = self.whole[..., origin : origin + count].to(self.score_dtype).clone()
        bias = None
        if self.bias_heads is not None and self.calls >= self.bias_from and pick.random() < 0.9:
            bias = self.normal(batch, self.bias_heads, 1, count).to(self.bias_dtype)
        padding = None
        if self.with_padding and pick.random() < 0.8:
            padding = torch.rand(batch, count, generator=self.generator) < pick.choice((0.0, 0.3, 0.8, 1.0))
            if pick.random() < 0.4:
                padding = padding.sort(-1, descending=pick.random() < 0.5).values
        documents = None
        if self.calls >= self.documents_from and pick.random() < 0.8:
            rows = []
            for b in range(batch):
                row = []
                for _ in range(count):
                    self.ids[b] += pick.random() < pick.choice((0.02, 0.3))
                    row.append(self.ids[b] % 5 - 2)
                rows.append(row)
            documents = torch.tensor(rows, dtype=pick.choice((torch.int32, torch.int64))).view(batch, count)
        expected = [torch.zeros(batch, count, self.heads, self.value_dim, dtype=torch.float64)]
        expected += [torch.full((batch, self.heads, count), -math.inf, dtype=torch.float64) for _ in range(2)]
        for b in range(batch):
            for i in range(count):
                if padding is not None and not padding[b, i]:
                    for part in (query, key, value):
                        part[b, i] = math.nan
                    continue
                worth = scores[b, :, i].double().expand(self.kv_heads).tolist()
                of_heads = torch.zeros(self.heads, dtype=torch.float64)
                if bias is not None:
                    of_heads = bias[b, :, 0, i].double().repeat_interleave(self.heads // self.bias_heads)
                document = None if documents is None else int(documents[b, i])
                self.tokens[b].append(Token(key[b, i].clone(), value[b, i].clone(), worth, of_heads, document))
                self.possible[b] = min(self.possible[b] + 1, self.rollback)
                found = answer(query[b, i], self.tokens[b], self.numbers)
                expected[0][b, i], expected[1][b, :, i], expected[2][b, :, i] = found
        if padding is not None:
            hidden = ~padding[:, None]
            scores = torch.where(hidden, math.nan, scores.expand(batch, -1, -1))
            bias = None if bias is None else torch.where(hidden[:, :, None], math.nan, bias)
        given = [part.clone() for part in (query, key, value, scores)]
        got = self.cache.attend(
            query, key, value, scores, bias, padding=padding, documents=documents, softmax_scale=self.numbers["softmax_scale"],
            softcap=self.numbers["softcap"], sink=self.numbers["sink"], return_lse=True, return_max=True,
        )  # fmt: skip
        for name, one, other in zip(("out", "lse", "the maximum"), got, expected, strict=True):
            torch.testing.assert_close(
                one, other, atol=1e-9, rtol=1e-9, msg=lambda text, name=name: f"{self!r}: {name}: {text}"
            )
        for part, before in zip((query, key, value, scores), given, strict=True):
            assert torch.equal(part.nan_to_num(7), before.nan_to_num(7))
        assert self.cache.length.tolist() == [len(row) for row in self.tokens]
        self.calls += 1
        return batch * count

    def crop(self) -> None:
        if self.pick.random() < 0.5:
            counts = [self.pick.randint(0, most) for most in self.possible]
            self.cache.crop(torch.tensor(counts))
        else:
            counts = [self.pick.randint(0, min(self.possible))] * self.batch
            self.cache.crop(counts[0])
        for b, count in enumerate(counts):
            self.possible[b] -= count
            del self.tokens[b][len(self.tokens[b]) - count :]

    def reorder(self) -> None:
        index = [self.pick.randrange(self.batch) for _ in range(self.batch)]
        self.cache.reorder(torch.tensor(index))
        self.tokens = [list(self.tokens[b]) for b in index]
        self.possible = [self.possible[b] for b in index]
        self.ids = [self.ids[b] for b in index]
