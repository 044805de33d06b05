"""Attention on packed prefix trees: rollouts behind their prompt, on the tree, as separate sequences, and by flex_attention.

H32/8 D128 bfloat16. In one process and in turns: milliseconds of mask work, forward and backward. `dmattn` attends to the tree,
and makes its mask anew (`tree_mask`); `dmattn-sequences` attends to a batch of whole sequences, causal; `flex` attends to the tree
with a BlockMask that `create_block_mask`, compiled, makes anew. `tokens_per_ms` counts the tokens of the whole sequences, which all
compute. `pack_ms` is what finding the prefixes takes on the host, which is part of no other time. `--rows` chooses parts.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import NamedTuple

import torch
from torch import Tensor

from dmattn_ops import flash_dmattn_func
from dmattn_ops.trees import pack_prefix_tree, tree_mask
from experiments import Row, Session, begun, parser
from interval_peers import Attention, flex, parts_of, set_up
from peers import Run, recorded_run

HEADS, KV_HEADS, DIM = 32, 8, 128


class Shape(NamedTuple):
    """Rollouts of one length behind a prompt."""

    rollouts: int
    rollout: int
    prompt: int


SHAPES = {"8x1024": Shape(8, 1024, 8192), "16x512": Shape(16, 512, 16384)}
TINY = {"8x1024": Shape(3, 40, 150), "16x512": Shape(4, 20, 200)}
TARGETS = {"dmattn-sequences": "separate sequences", "flex": "flex_attention on the tree"}


def sequences_of(shape: Shape) -> list[Tensor]:
    """Return random sequences that share the prompt and nothing else."""
    drawn = torch.randint(1000, 100_000, (shape.rollouts, shape.prompt + shape.rollout))
    drawn[:, : shape.prompt] = drawn[0, : shape.prompt]
    drawn[:, shape.prompt] = torch.arange(shape.rollouts)  # here they part
    return list(drawn)


def draw(batch: int, seqlen: int, device: str) -> Attention:
    """Return random inputs."""
    heads, kv_heads, dim, dtype = (
        (HEADS, KV_HEADS, DIM, torch.bfloat16) if device == "cuda" else (4, 1, 32, torch.float32)
    )
    query, key, value, grad_out = (
        torch.randn(batch, seqlen, count, dim, device=device, dtype=dtype)
        for count in (heads, kv_heads, kv_heads, heads)
    )
    return Attention(query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), grad_out)


def on_the_tree(call: Attention, ends: Tensor) -> Run:
    """Run this library on the tree."""
    prepare = functools.partial(tree_mask, ends)
    attend = functools.partial(flash_dmattn_func, *call.leaves, prepare())
    return recorded_run(attend, [*call.leaves], call.grad_out, prepare)


def on_sequences(shape: Shape, device: str) -> Run:
    """Run this library on whole sequences as a batch."""
    call = draw(shape.rollouts, shape.prompt + shape.rollout, device)
    attend = functools.partial(flash_dmattn_func, *call.leaves, is_causal=True)
    return recorded_run(attend, [*call.leaves], call.grad_out)


def experiment(shape: Shape, session: Session) -> list[Row]:
    """Measure one shape."""
    device = session.options.device
    sequences = sequences_of(shape)
    began = time.perf_counter()
    tree = pack_prefix_tree(sequences)
    pack_ms = 1e3 * (time.perf_counter() - began)
    ends = tree.ends[None].to(device)
    of_keys, call = ends[0], draw(1, ends.shape[1], device)

    def predicate(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i < of_keys[j])

    own = on_the_tree(call, ends)
    found, absent = set_up({"flex": (lambda: flex(call, predicate, 1), True)}, own, ("flex",))
    rows = session.measured(parts_of({"dmattn": own, "dmattn-sequences": on_sequences(shape, device)} | found))
    tokens = sum(map(len, sequences))
    for row in rows:
        row["tokens_per_ms"] = round(tokens / row["whole_ms"], 2)
    rows[0] |= {"pack_ms": round(pack_ms, 3), "tokens": tokens, "tokens_of_tree": ends.shape[1]}
    return rows + absent


def ratios_of(rows: list[Row]) -> list[Row]:
    """Return how many times as long others take, of each part."""
    found: list[Row] = []
    for part in dict.fromkeys(row["part"] for row in rows):
        whole = {row["implementation"]: row["whole_ms"] for row in rows if row["part"] == part and "missing" not in row}
        for name, words in TARGETS.items():
            if name in whole and "dmattn" in whole:
                found.append({"part": part, "target": words, "measured": round(whole[name] / whole["dmattn"], 3)})
    return found


def main(arguments: list[str]) -> list[Row]:
    """Measure the parts that are asked for; return all rows of the result file."""
    chosen = parser(__doc__, SHAPES).parse_args(arguments)
    session = begun(chosen, "trees", "bench_trees.py")
    for part, shape in (TINY if chosen.tiny else SHAPES).items():
        words = f"{shape.rollouts} of {shape.rollout} behind {shape.prompt}"
        session.run(part, words, functools.partial(experiment, shape, session))
    return session.finish(ratios=ratios_of(session.rows))


if __name__ == "__main__":
    main(sys.argv[1:])
