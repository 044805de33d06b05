"""Calls on which a peer was once ahead, and shapes drawn at random, beside the peers in one process.

Prints milliseconds of this library and of each peer, interleaved, with a cold L2 cache; the fastest peer's time over ours, and
whether what must hold does. A ratio under 0.97 is measured a second time, and a must counts as held from 0.98 of it. Writes a
result file. `--only WORD ...` takes the rows whose names hold one of the words.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import dense_rows
import varlen_rows
from rows import measure, missed, text
from table import default_output, parser
from timing import Gauge, write_results

SOURCES = (varlen_rows.cases, dense_rows.cases)


def main(arguments: list[str]) -> list[dict[str, Any]]:
    """Measure the rows, print and write them, and say which musts are missed."""
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", help="words, of which the names of rows must hold one")
    chosen = options.parse_args(arguments)
    if chosen.device != "cuda":
        raise SystemExit("bench_rows.py needs a GPU")
    gauge, rows = Gauge(), []
    torch.manual_seed(0)
    output = chosen.output or default_output("cuda", "rows")
    wanted = chosen.only or [""]
    for case in (case for cases in SOURCES for case in cases() if any(word in case.name for word in wanted)):
        rows.append(measure(case, chosen.rounds, gauge))
        print(text(rows[-1]), flush=True)
        write_results(output, rows, "cuda", gauge, say=False)  # now, as peers compile for minutes and time may run out
        torch.cuda.empty_cache()
    for name in missed(rows):
        print(f"missed: {name}")
    print(f"written: {output}")
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
