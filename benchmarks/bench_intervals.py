"""The twelve masks of FlashMask at 8192, 32768 and 131072 positions, against flex_attention and FlashAttention 4 (FA4).

B1 D128 bfloat16; H32 without groups, H8 for the longest. In one process and in turns: milliseconds of mask work, forward and
backward, and TFLOP/s over the 128 x 128 tiles in which something is visible (backward: 2.5 times the operations of the
forward). `dmattn` takes each mask as a user would write it (a flag, documents, intervals, how many keys are left at most),
`dmattn-intervals` all as intervals. The peers get predicates and lists of blocks by `create_block_mask`, which counts.
`--rows` chooses lengths.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch

import dmattn_ops
from experiments import Row, Session, begun, parser
from interval_masks import MASKS, PUBLISHED, TILE, IntervalMask, nonempty_tiles
from interval_peers import Attention, Intervals, fa4, flex, parts_of, set_up
from peers import Run, recorded_run
from table import BACKWARD_FLOPS

DIM = 128
LENGTHS = {"8192": (8192, 32), "32768": (32768, 32), "131072": (131072, 8)}  # S, heads
TINY = {"8192": (256, 2), "32768": (384, 2), "131072": (512, 1)}
TARGET_LENGTH = "32768"


def _prepared(call: Attention, **keywords: Any) -> Run:
    """Run this library with what `prepare_mask` makes of these arguments."""
    prepare = functools.partial(dmattn_ops.prepare_mask, **keywords)
    attend = functools.partial(dmattn_ops.flash_dmattn_func, *call.leaves, prepare())
    return recorded_run(attend, [*call.leaves], call.grad_out, prepare)


def as_intervals(call: Attention, mask: IntervalMask) -> Run:
    """Run this library with the mask as intervals."""
    return _prepared(call, intervals=(mask.start, mask.end), hidden=mask.hidden, seqlen_q=call.query.shape[1])


def as_written(call: Attention, name: str, mask: IntervalMask) -> Run | None:
    """Run this library with the mask as flags, documents or a number of kept keys; None where it is neither."""
    if mask.at_most is not None:
        kept = {"at_most": mask.at_most, "seqlen_q": call.query.shape[1]}
        return _prepared(call, intervals=(None, mask.end), is_causal=True, **kept)
    if mask.documents is not None:
        return _prepared(call, documents=mask.documents, is_causal=mask.causal)
    attend = functools.partial(dmattn_ops.flash_dmattn_func, *call.leaves, is_causal=mask.causal)
    if mask.window is not None:
        attend = functools.partial(attend, window_size=(mask.window - 1, None))
    elif not (mask.causal or name == "full"):
        return None
    return recorded_run(attend, [*call.leaves], call.grad_out)


def experiment(name: str, seqlen: int, heads: int, session: Session) -> list[Row]:
    """Measure one mask at one length."""
    device = session.options.device
    dim, dtype = (DIM, torch.bfloat16) if device == "cuda" else (32, torch.float32)
    tensors = [torch.randn(1, seqlen, heads, dim, device=device, dtype=dtype) for _ in range(4)]
    query, key, value = (tensor.requires_grad_() for tensor in tensors[:3])
    call = Attention(query, key, value, tensors[3])
    mask = MASKS[name](seqlen, device)
    tiles = nonempty_tiles(mask)
    own = as_intervals(call, mask)
    written = as_written(call, name, mask)
    runs = {"dmattn": own} if written is None else {"dmattn": written, "dmattn-intervals": own}
    intervals = Intervals(mask.start, mask.end, mask.hidden)
    makers: dict[str, tuple[Callable[[], Run], bool]] = {
        "flex": (lambda: flex(call, mask.predicate, 1), True),
        "fa4": (lambda: fa4(call, intervals, mask.predicate), False),
    }
    found, absent = set_up(makers, own, tuple(makers))
    rows = session.measured(parts_of(runs | found))
    flops = 4 * heads * dim * tiles * TILE * TILE
    for row in rows:
        for part, factor in (("forward", 1.0), ("backward", BACKWARD_FLOPS)):
            row[f"{part}_tflops"] = round(factor * flops / row[f"{part}_ms"] / 1e9, 4)
    rows[0] |= {"tiles": tiles, "share_of_tiles": round(tiles / (-(-seqlen // TILE)) ** 2, 4)}
    return rows + absent


def targets_of(rows: list[Row]) -> list[Row]:
    """Return what is meant to be reached at 32768 positions, and what was measured."""
    wholes: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["part"] == TARGET_LENGTH and "missing" not in row:
            wholes.setdefault(row["mask"], {})[row["implementation"]] = row["whole_ms"]
    found: list[Row] = []
    for peer, must, aim, least in (("flex", 1.5, 1.9, 1.1), ("fa4", 1.1, 1.3, None)):
        ratios = [of[peer] / of["dmattn"] for of in wholes.values() if peer in of and "dmattn" in of]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            words = f"masks that take less time than {peer}'s: geometric mean of {len(ratios)}"
            found.append({"target": words, "must": must, "aim": aim, "measured": round(mean, 3)})
            if least is not None:
                found.append(
                    {"target": f"the least of these {len(ratios)}", "must": least, "measured": round(min(ratios), 3)}
                )
    eviction, causal = (wholes.get(name, {}).get("dmattn") for name in ("random eviction", "causal"))
    if eviction is not None and causal is not None:
        entry = {"must": 0.95, "aim": 0.85, "measured": round(eviction / causal, 3)}
        found.append({"target": "random eviction over own causal (at most)", **entry})
    return found


def main(arguments: list[str]) -> list[Row]:
    """Measure the lengths that are asked for; return all rows of the result file."""
    options = parser(__doc__, LENGTHS)
    options.add_argument("--masks", nargs="+", choices=list(MASKS), help="only these masks")
    chosen = options.parse_args(arguments)
    session = begun(chosen, "intervals", "bench_intervals.py")
    for part, (seqlen, heads) in (TINY if chosen.tiny else LENGTHS).items():
        for name in chosen.masks or MASKS:
            run = functools.partial(experiment, name, seqlen, heads, session)
            session.run(part, f"{name} S{seqlen} H{heads}", run, mask=name)
    published: dict[str, Any] = {name: list(rates) for name, rates in PUBLISHED.items()}
    return session.finish(targets=targets_of(session.rows), published_tflops=published)


if __name__ == "__main__":
    main(sys.argv[1:])
