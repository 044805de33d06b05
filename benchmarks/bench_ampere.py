"""The kernels for SM 8.0 to 8.9 against FlashAttention-2 and flex_attention, all with the instructions of one architecture.

`--arch 8.0` (the default) makes Triton write code for SM 8.0, for this library and for flex_attention, on whatever GPU there is;
torch's FlashAttention-2 uses the same instructions on every GPU. On an H100 that says how kernels compare, not how fast an A100
is. With a GPU of SM 8.x give its own architecture. In one process and in turns: milliseconds of the forward and of the backward.
`--rows` chooses parts.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import dmattn_ops
from experiments import Row, Session, begun, parser
from interval_peers import Maker, parts_of, set_up
from patterns import make_mask
from peers import Problem, Run, Unavailable, compiled_flex, flex, recorded_run
from varlen_rows import own_varlen, torch_varlen

DROPOUT = 0.1
BIAS = "bias [1, H, S, S]"
LENGTHS = tuple(range(80, 2001, 128))  # of packed sequences


class Case(NamedTuple):
    """One call; `mask` names a pattern, `keep` is the budget of a dynamic mask."""

    batch: int
    heads: int
    seqlen: int
    dim: int
    causal: bool = False
    kv_heads: int | None = None
    mask: str = ""
    dropout_p: float = 0.0
    bias: bool = False
    keep: int = 0
    packed: tuple[int, ...] = ()  # lengths of sequences

    def __str__(self) -> str:
        heads = f"H{self.heads}/{self.kv_heads}" if self.kv_heads else f"H{self.heads}"
        words = [f"B{self.batch} {heads} S{self.seqlen} D{self.dim}", "causal" if self.causal else "full", self.mask]
        words += ["dropout"] * (self.dropout_p > 0) + [BIAS] * self.bias + [f"keep {self.keep}"] * (self.keep > 0)
        words += [f"{len(self.packed)} sequences"] * bool(self.packed)
        return " ".join(filter(None, words))


PARTS: dict[str, tuple[Case, ...]] = {
    "dense": (
        *(Case(2, 16, 4096, dim, causal) for dim in (64, 128, 256) for causal in (True, False)),
        Case(1, 16, 16384, 128, True),
        Case(2, 32, 4096, 128, True, 8),
        Case(2, 16, 4096, 96, True),
        Case(16, 12, 512, 64),
        Case(2, 16, 4096, 80),
    ),
    "packed": (
        Case(1, 16, sum(LENGTHS), 64, True, packed=LENGTHS),
        Case(1, 16, sum(LENGTHS), 128, True, packed=LENGTHS),
    ),
    "masks": tuple(
        Case(2, 16, 4096, dim, mask=mask) for dim in (64, 128) for mask in ("random bits", "blocks of 128", "documents")
    ),
    "bias": (Case(2, 16, 2048, 64, bias=True), Case(2, 16, 2048, 128, bias=True)),
    "dropout": tuple(Case(2, 16, 4096, dim, True, dropout_p=DROPOUT) for dim in (64, 128)),
    "dynamic": (Case(2, 16, 4096, 128, True, keep=512), Case(1, 32, 16384, 128, True, 8, keep=1024)),
}
TINY: dict[str, tuple[Case, ...]] = {
    "dense": (Case(1, 2, 40, 16, True),),
    "packed": (Case(1, 2, 60, 16, True, packed=(20, 40)),),
    "masks": (Case(1, 2, 256, 16, mask="documents"),),
    "bias": (Case(1, 2, 40, 16, bias=True),),
    "dropout": (Case(1, 2, 40, 16, True, dropout_p=DROPOUT),),
    "dynamic": (Case(1, 2, 256, 16, True, keep=32),),
}


def documents(seqlen: int, device: str) -> Tensor:
    """Return ids `[1, S]` of eight documents of about the same length."""
    return (torch.arange(seqlen, device=device) * 8 // seqlen)[None].int()


def problem_of(case: Case, device: str) -> Problem:
    """Return the tensors of a case, and its mask as a bool tensor."""
    mask = None
    if case.mask == "documents":
        ids = documents(case.seqlen, device)
        mask = (ids[:, :, None] == ids[:, None, :])[:, None].expand(case.batch, case.heads, -1, -1)
    elif case.mask:
        pattern, sparsity = ("random", 0.5) if case.mask == "random bits" else ("block128", 0.75)
        mask = make_mask(pattern, (1, 1, case.seqlen), sparsity, device).expand(case.batch, case.heads, -1, -1)
    numbers = (case.batch, case.heads, case.seqlen, case.dim, case.causal, case.kv_heads)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return Problem(str(case), *numbers, mask=mask, device=device, dtype=dtype)


def bias_of(case: Case, problem: Problem) -> Tensor | None:
    """Return the bias of a case, a leaf."""
    if not case.bias:
        return None
    shape = (1, case.heads, case.seqlen, case.seqlen)
    return torch.randn(shape, device=problem.device, dtype=problem.dtype).requires_grad_()


def own(case: Case, problem: Problem, masked: bool = True) -> Run:
    """Run this library; `masked` False: without the mask of the case."""
    if case.packed:
        return packed_run(case, problem, own_varlen)
    (query, key, value), grad_out = problem.leaves(heads_first=False)
    bias, prepare = bias_of(case, problem), None
    if masked and case.keep:
        scores = torch.randn(case.batch, case.kv_heads or case.heads, case.seqlen, device=problem.device)
        prepare = functools.partial(dmattn_ops.dynamic_mask, scores, case.keep)
    elif case.mask == "documents":
        prepare = functools.partial(dmattn_ops.prepare_mask, documents=documents(case.seqlen, problem.device))
    elif problem.mask is not None:
        prepare = functools.partial(dmattn_ops.prepare_mask, problem.mask[:1, :1])

    mask = None if prepare is None else prepare()
    attend = functools.partial(
        dmattn_ops.flash_dmattn_func, query, key, value, mask, bias, is_causal=case.causal, dropout_p=case.dropout_p
    )
    return recorded_run(attend, [query, key, value, *([] if bias is None else [bias])], grad_out, prepare)


def packed_run(case: Case, problem: Problem, attend: Callable[..., Any]) -> Run:
    """Run a function of causal packed sequences `[total, heads, D]` on those of a case."""
    offsets = torch.tensor((0, *case.packed), dtype=torch.int32, device=problem.device).cumsum(0, dtype=torch.int32)
    leaves, grad_out = problem.leaves(heads_first=False)
    rows = [leaf.detach()[0].clone().requires_grad_() for leaf in leaves]
    return recorded_run(functools.partial(attend, *rows, offsets, max(case.packed)), rows, grad_out[0])


def fa2(case: Case, problem: Problem) -> Run:
    """Run torch's FlashAttention-2."""
    if problem.device != "cuda" or case.mask or case.bias or case.keep:
        raise Unavailable("torch's FlashAttention-2 needs CUDA, and takes neither a mask nor a bias")
    if case.packed:
        return packed_run(case, problem, torch_varlen)
    (query, key, value), grad_out = problem.leaves(heads_first=True)
    attend = functools.partial(
        F.scaled_dot_product_attention, query, key, value, is_causal=case.causal, dropout_p=case.dropout_p,
        enable_gqa=problem.grouped,
    )  # fmt: skip

    def by_flash() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return attend()

    return recorded_run(by_flash, [query, key, value], grad_out)


def flex_of(case: Case, problem: Problem) -> Run:
    """Run flex_attention, compiled; a bias is added in its `score_mod`."""
    if problem.device != "cuda" or case.dropout_p or case.keep or case.packed:
        raise Unavailable(
            "flex_attention has no backward on a CPU, no dropout, and takes no dynamic masks or packed sequences here"
        )
    bias = bias_of(case, problem)
    if bias is None:
        return flex(problem)
    shared = bias
    leaves, grad_out = problem.leaves(heads_first=True)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + shared[0, h, i, j]

    return recorded_run(
        functools.partial(compiled_flex()[0], *leaves, score_mod=score_mod), [*leaves, shared], grad_out
    )


def experiment(case: Case, session: Session) -> list[Row]:
    """Measure one case."""
    problem = problem_of(case, session.options.device)
    ours = own(case, problem)
    makers: dict[str, Maker] = {
        "fa2": (functools.partial(fa2, case, problem), not case.packed),
        "flex": (functools.partial(flex_of, case, problem), True),
    }
    if case.keep:
        makers["dense"] = (functools.partial(own, case, problem, False), False)
    found, absent = set_up(makers, ours, () if case.dropout_p or case.bias or case.keep else ("fa2", "flex"))
    return session.measured(parts_of({"dmattn": ours} | found)) + absent


def main(arguments: list[str]) -> list[Row]:
    """Measure the parts that are asked for; return all rows of the result file."""
    options = parser(__doc__, PARTS)
    options.add_argument("--arch", default="8.0", help="the architecture whose code runs, such as 8.9")
    chosen = options.parse_args(arguments)
    session = begun(chosen, f"ampere-{chosen.arch}", "bench_ampere.py")
    os.environ["DMATTN_ARCH"], os.environ["TRITON_OVERRIDE_ARCH"] = chosen.arch, f"sm{chosen.arch.replace('.', '')}"
    for part, cases in (TINY if chosen.tiny else PARTS).items():
        for case in cases:
            session.run(part, str(case), functools.partial(experiment, case, session), arch=chosen.arch)
    return session.finish()


if __name__ == "__main__":
    main(sys.argv[1:])
