"""Attention to blocks of keys that each query names: this library, the same mask as bits, dense causal attention, and peers.

bfloat16, indices given. In one process and in turns: milliseconds of mask work (`prepare_ms`), forward and backward. `dmattn` is
`selection_mask`; `dmattn-bits` the same mask as bits; `dmattn-dense` dense causal attention; `flex` flex_attention with a predicate
over a byte for each pair of a query and a block; `nsa` the kernels of native-sparse-attention where they are importable, which take
blocks of 16 keys and more. Each case prints how many times as many blocks 4, 8, 32 and 128 neighbours choose together as one of
them. `beyond_gb` is what forward and backward allocate beyond out, gradients and a dq in float32. `long` is measured beside dense
attention alone. `--rows` chooses parts.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from chosen_rows import NEIGHBOURS, SHAPES, TINY, Shape, clustered, independent, unions
from dmattn_ops import flash_dmattn_func, selection_mask
from dmattn_ops.masks.tile_mask import as_bits
from experiments import Row, Session, begun, parser
from interval_peers import Attention, flex, parts_of, set_up
from peers import Run, Unavailable, recorded_run

TARGETS = {  # by part and kind of choice: (at least, aim) over dense causal attention
    ("blocks of 64", "clustered"): (3.5, 5.5),
    ("blocks of 64", "independent"): (1.1, 2.0),
    ("blocks of 4", "clustered"): (1.4, 2.2),
    ("tokens", "clustered"): (1.4, 2.0),
}


LONGEST = 65536  # of what peers are measured with


def draw(shape: Shape, device: str) -> Attention:
    """Return random inputs."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    sizes = (
        (shape.heads, shape.dim),
        (shape.heads_kv, shape.dim),
        (shape.heads_kv, shape.dim_v),
        (shape.heads, shape.dim_v),
    )
    query, key, value, grad_out = (
        torch.randn(1, shape.seqlen, heads, dim, device=device, dtype=dtype) for heads, dim in sizes
    )
    return Attention(query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), grad_out)


def own(call: Attention, prepare: Any) -> Run:
    """Run this library with a mask that is made anew where mask work is timed."""
    attend = functools.partial(flash_dmattn_func, *call.leaves, prepare())
    return recorded_run(attend, [*call.leaves], call.grad_out, prepare)


def dense(call: Attention) -> Run:
    """Run this library on all keys before a query."""
    attend = functools.partial(flash_dmattn_func, *call.leaves, is_causal=True)
    return recorded_run(attend, [*call.leaves], call.grad_out)


def by_bytes(call: Attention, indices: Tensor, shape: Shape) -> Run:
    """Run flex_attention with a predicate over a byte for each query and block."""
    group, blocks = shape.heads // shape.heads_kv, -(-shape.seqlen // shape.block)
    shown = torch.zeros(shape.heads_kv, shape.seqlen, blocks + 1, dtype=torch.uint8, device=indices.device)
    shown.scatter_(-1, torch.where(indices[0] < 0, blocks, indices[0]).long(), 1)

    def predicate(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (shown[h // group, i, j // shape.block] != 0) & (j <= i)

    return flex(call, predicate, shape.heads)


def nsa(call: Attention, indices: Tensor, shape: Shape) -> Run:
    """Run the kernels of chosen blocks of native-sparse-attention."""
    try:
        from native_sparse_attention.ops.parallel import parallel_nsa_bwd, parallel_nsa_fwd
    except ImportError as error:
        raise Unavailable(str(error)) from error
    if shape.block < 16:
        raise Unavailable("blocks of at least 16 keys")
    query, key, value = (leaf.detach() for leaf in call.leaves)
    listed, scale = indices.transpose(1, 2).contiguous(), shape.dim**-0.5
    forward = functools.partial(parallel_nsa_fwd, query, key, value, listed, shape.named, shape.block, scale)
    out, lse = forward()
    backward = functools.partial(
        parallel_nsa_bwd, query, key, value, out, lse, call.grad_out, listed, shape.named, shape.block, scale
    )
    difference = (
        out.float() - flash_dmattn_func(query, key, value, selection_mask(indices, block=shape.block)).float()
    ).norm()
    if difference > 2e-2 * out.float().norm():
        raise Unavailable("its results differ")
    return Run(forward, backward)


def beyond_gb(run: Run) -> float:
    """Return the gigabytes that forward and backward allocate at their peak beyond out, gradients and a dq in float32."""
    if run.inputs[0].device.type != "cuda" or run.backward is None:
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = [run.forward(), *run.backward()]
    expected = sum(part.nbytes for part in made) + 4 * run.inputs[0].numel()
    return round((torch.cuda.max_memory_allocated() - before - expected) / 1e9, 3)


def experiment(shape: Shape, kind: str, session: Session) -> list[Row]:
    """Measure one shape and kind of choice."""
    device = session.options.device
    indices = clustered(shape).to(device) if kind == "clustered" else independent(shape, device)
    call, prepare = draw(shape, device), functools.partial(selection_mask, indices, block=shape.block)
    ours = own(call, prepare)
    peers = {
        "dmattn-bits": (lambda: own(call, lambda: as_bits(prepare())), False),
        "dmattn-dense": (lambda: dense(call), False),
        "nsa": (lambda: nsa(call, indices, shape), False),
        "flex": (lambda: by_bytes(call, indices, shape), True),
    }
    if shape.seqlen > LONGEST:
        peers = {"dmattn-dense": peers["dmattn-dense"]}
    found, absent = set_up(peers, ours, ("dmattn-bits", "flex"))
    rows = session.measured(parts_of({"dmattn": ours} | found))
    rows[0] |= {"beyond_gb": beyond_gb(ours), "unions": {str(count): unions(indices, count) for count in NEIGHBOURS}}
    return rows + absent


def ratios_of(rows: list[Row]) -> list[Row]:
    """Return how many times as long others take, with what is asked of dense causal attention."""
    found: list[Row] = []
    for part, kind in dict.fromkeys((row["part"], row["case"]) for row in rows):
        of_case = [row for row in rows if (row["part"], row["case"]) == (part, kind) and "missing" not in row]
        whole = {row["implementation"]: row["forward_ms"] + row["backward_ms"] for row in of_case}
        for name, others in whole.items():
            if name != "dmattn" and "dmattn" in whole:
                ratio = {"part": part, "case": kind, "over": name, "measured": round(others / whole["dmattn"], 3)}
                if name == "dmattn-dense" and (part, kind) in TARGETS:
                    ratio["must"], ratio["aim"] = TARGETS[part, kind]
                found.append(ratio)
    return found


def main(arguments: list[str]) -> list[Row]:
    """Measure the parts that are asked for; return all rows of the result file."""
    options = parser(__doc__, SHAPES).parse_args(arguments)
    session = begun(options, "selection", "bench_selection.py")
    for part, shape in (TINY if options.tiny else SHAPES).items():
        for kind in ("clustered", "independent") if part != "long" else ("clustered",):
            session.run(part, kind, functools.partial(experiment, shape, kind, session))
    return session.finish(ratios=ratios_of(session.rows))


if __name__ == "__main__":
    main(sys.argv[1:])
