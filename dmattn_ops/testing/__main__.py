"""Run random problems from the command line."""

from __future__ import annotations

import argparse
import os
import sys

import torch

from dmattn_ops.testing import Problem, check, workers


def main() -> int:
    """Run the problems that the arguments ask for; return the number of failures and of processes that ended badly."""
    parser = argparse.ArgumentParser(description="random attention problems against a float64 oracle")
    parser.add_argument("--cases", type=int, default=200, help="how many problems to draw")
    parser.add_argument("--start", type=int, default=0, help="seed of the first problem")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=1, help="launches of each problem")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the problems")
    parser.add_argument("--problem", help="a line that an earlier failure printed")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return workers.work(sys.stdin, options.device, options.repeats)
    if options.problem:
        problem = eval(options.problem, {"Problem": Problem})
        variables = workers.environment(problem.instructions)
        if variables != dict(os.environ):
            os.execve(sys.executable, [sys.executable, "-m", "dmattn_ops.testing", *sys.argv[1:]], variables)
        check(problem, options.device, options.repeats)
        print("1 passed, 0 failed")
        return 0
    seeds = range(options.start, options.start + options.cases)
    tally = workers.run(seeds, options.device, options.repeats, options.jobs)
    print(*tally.lines(), sep="\n")
    return tally.failures + tally.bad_ends


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
