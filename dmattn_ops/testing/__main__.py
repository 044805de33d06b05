"""Run random problems from the command line."""

from __future__ import annotations

import argparse
import sys

import torch

from dmattn_ops.testing import Problem, check, draw, shrink
from dmattn_ops.testing.check import fails


def main() -> int:
    """Run the problems that the arguments ask for; return the number of failures."""
    parser = argparse.ArgumentParser(description="random attention problems against a float64 oracle")
    parser.add_argument("--cases", type=int, default=200, help="how many problems to draw")
    parser.add_argument("--start", type=int, default=0, help="seed of the first problem")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=1, help="launches of each problem")
    parser.add_argument("--problem", help="a line that an earlier failure printed")
    options = parser.parse_args()
    if options.problem:
        check(eval(options.problem, {"Problem": Problem}), options.device, options.repeats)
        print("1 passed, 0 failed")
        return 0
    failures = 0
    for seed in range(options.start, options.start + options.cases):
        problem = draw(seed, options.device)
        try:
            check(problem, options.device, options.repeats)
        except Exception as error:
            failures += 1
            small = shrink(problem, lambda candidate: fails(candidate, options.device))
            print(f"FAILED seed {seed}: {type(error).__name__}: {str(error)[:300]}\n  {small!r}", flush=True)
        if (seed - options.start) % 100 == 99:
            print(f"{seed - options.start + 1} of {options.cases}, {failures} failed", flush=True)
    print(f"{options.cases - failures} passed, {failures} failed")
    return failures


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
