"""Attention with a pair bias: the rows of a batch entry share a bias `[1, H, S, S]`, whose gradient is asked for.

The sizes are those of triangle attention: S rows of S positions, few and narrow heads, bfloat16, and a key mask for each row. In
one process and in turns: milliseconds of the forward and of the backward with the bias's gradient, and the most memory that both
take beyond the inputs. `sdpa` gets bias and mask as one additive tensor, as its users write it; `flex` adds the bias in its
`score_mod`; `cuequivariance` is NVIDIA's kernel for this, where its package is installed. `--rows` chooses sizes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dmattn_ops import flash_dmattn_func
from experiments import Row, Session, begun, parser
from interval_peers import TOLERANCE, Maker, parts_of, set_up
from peers import Run, Unavailable, compiled_flex, recorded_run


class Size(NamedTuple):
    """Rows of as many positions; `seqlen` of both."""

    seqlen: int
    heads: int
    dim: int


SIZES = {
    f"S{seqlen} H{heads} D{dim}": Size(seqlen, heads, dim)
    for seqlen, heads, dim in (
        (256, 4, 32),
        (256, 8, 16),
        (384, 4, 32),
        (512, 4, 32),
        (512, 16, 16),
        (768, 4, 32),
        (1024, 4, 32),
    )
}
TINY = {"S256 H4 D32": Size(24, 2, 8)}


class Inputs(NamedTuple):
    """Leaves query, key, value `[N, S, H, D]` and bias `[1, H, S, S]`; the keys of each row, bool `[N, S]`; the gradient of out."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor
    keep: Tensor
    grad_out: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [self.query, self.key, self.value, self.bias]


def draw(size: Size, device: str) -> Inputs:
    """Return random inputs; a twentieth of the keys of each row does not exist."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = (size.seqlen, size.seqlen, size.heads, size.dim)
    query, key, value, grad_out = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    bias = torch.randn(1, size.heads, size.seqlen, size.seqlen, device=device, dtype=dtype)
    keep = torch.rand(size.seqlen, size.seqlen, device=device) > 0.05
    for leaf in (query, key, value, bias):
        leaf.requires_grad_()
    return Inputs(query, key, value, bias, keep, grad_out)


def dmattn(inputs: Inputs) -> Run:
    """Run this library."""
    attend = functools.partial(
        flash_dmattn_func, inputs.query, inputs.key, inputs.value, inputs.keep[:, None, None], inputs.bias
    )
    return recorded_run(attend, inputs.leaves, inputs.grad_out)


def _heads_first(inputs: Inputs) -> list[Tensor]:
    return [leaf.detach().transpose(1, 2).contiguous().requires_grad_() for leaf in inputs.leaves[:3]]


def sdpa(inputs: Inputs) -> Run:
    """Run torch's attention, with the kernel that it chooses; adding the mask to the bias is a part of the call."""
    query, key, value = _heads_first(inputs)
    hidden = ~inputs.keep[:, None, None]

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=inputs.bias.masked_fill(hidden, -torch.inf))

    return recorded_run(attend, [query, key, value, inputs.bias], inputs.grad_out.transpose(1, 2).contiguous())


def flex(inputs: Inputs) -> Run:
    """Run flex_attention, compiled, which gathers the bias and hides keys in its `score_mod`."""
    if inputs.query.device.type == "cpu":
        raise Unavailable("flex_attention has no backward on a CPU")
    shared, keep = inputs.bias, inputs.keep

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(keep[b, j], score + shared[0, h, i, j], -torch.inf)

    leaves = _heads_first(inputs)
    attend = functools.partial(compiled_flex()[0], *leaves, score_mod=score_mod)
    return recorded_run(attend, [*leaves, shared], inputs.grad_out.transpose(1, 2).contiguous())


def cuequivariance(inputs: Inputs) -> Run:
    """Run cuEquivariance's triangle attention: `[B, N, H, S, D]`, bias `[B, 1, H, S, S]`, mask `[B, N, 1, 1, S]`."""
    try:
        from cuequivariance_torch import triangle_attention
    except ImportError as error:
        raise Unavailable(f"cuequivariance_torch: {error}") from error
    leaves = [leaf.detach().unsqueeze(0).requires_grad_() for leaf in _heads_first(inputs)]
    bias = inputs.bias.detach().unsqueeze(0).requires_grad_()
    mask = inputs.keep[None, :, None, None]
    attend = functools.partial(triangle_attention, *leaves, bias, mask=mask, scale=inputs.query.shape[-1] ** -0.5)
    return recorded_run(attend, [*leaves, bias], inputs.grad_out.transpose(1, 2).contiguous().unsqueeze(0))


PEERS: dict[str, Callable[[Inputs], Run]] = {"sdpa": sdpa, "flex": flex, "cuequivariance": cuequivariance}


def agreeing(make: Callable[[Inputs], Run], inputs: Inputs, ours: Run) -> Run:
    """Return a peer's run; `Unavailable` where its gradient of the bias, in which everything meets, differs from ours."""
    run = make(inputs)
    assert run.backward is not None and ours.backward is not None
    theirs, own = run.backward()[-1].float(), ours.backward()[-1].float()
    difference = ((theirs.view_as(own) - own).norm() / own.norm()).item()
    if not difference <= TOLERANCE:
        raise Unavailable(f"its gradient of the bias differs from ours by {difference:.2g} (relative L2)")
    return run


def peak_mib(run: Run) -> float | None:
    """Return the most memory that a forward and a backward take beyond what was there; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = run.forward()
    torch.autograd.grad(out, list(run.inputs), run.grad_out)
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def experiment(size: Size, session: Session) -> list[Row]:
    """Measure one size."""
    inputs = draw(size, session.options.device)
    own = dmattn(inputs)
    makers: dict[str, Maker] = {
        name: (functools.partial(agreeing, make, inputs, own), True) for name, make in PEERS.items()
    }
    found, absent = set_up(makers, own, ())
    runs = {"dmattn": own} | found
    memory = {name: peak_mib(run) for name, run in runs.items()}
    rows = session.measured(parts_of(runs))
    for row in rows:
        row["peak_mib"] = memory[row["implementation"]]
    return rows + absent


def main(arguments: list[str]) -> list[Row]:
    """Measure the sizes that are asked for; return all rows of the result file."""
    chosen = parser(__doc__, SIZES).parse_args(arguments)
    session = begun(chosen, "pair-bias", "bench_pair_bias.py")
    for name, size in (TINY if chosen.tiny else SIZES).items():
        words = f"{size.seqlen} rows of {size.seqlen}, {size.heads} heads of {size.dim}"
        session.run(name, words, functools.partial(experiment, size, session))
    return session.finish()


if __name__ == "__main__":
    main(sys.argv[1:])
