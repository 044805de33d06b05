"""Read the machine code of a compiled kernel: its instructions, and what one iteration of each of its loops executes.

The SM 9.0 backward kernels ask in every iteration whether rows are so large that they need exact statistics, and loops wait
for barriers in loops of their own. So an iteration is counted along the shortest way through its loop: what it executes where
no row is large, and nothing has to be waited for.
"""

from __future__ import annotations

import heapq
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton

_NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
_LABEL = re.compile(r"(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);")
_TARGET = re.compile(r"\.L_x_\d+")
_OPCODE = re.compile(r"(?:@!?U?P\w+ +)?([A-Z][A-Z0-9_.]*)")
_ENDS = ("BRA", "EXIT", "RET", "BRX", "JMP")


@dataclass(frozen=True)
class Loop:
    """One loop that multiplies matrices, as numbers of instructions by their full names (`opcodes`)."""

    fast: Counter[str]  # along the shortest way through the loop
    every: Counter[str]  # of all its blocks


def count(found: Counter[str], *names: str) -> int:
    """Return how many instructions have one of these names, or a name that continues one of them after a dot."""
    return sum(times for name, times in found.items() if any(f"{name}.".startswith(f"{each}.") for each in names))


def disassemble(cubin: bytes) -> str:
    """Return the machine code of a cubin as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(_NVDISASM), "-c", file.name], capture_output=True, text=True, check=True).stdout


def opcodes(sass: str) -> Counter[str]:
    """Count all instructions by their full names, such as "LDG.E.128.STRONG.GPU"."""
    return Counter(_opcode(instruction) for instruction in _parsed(sass)[0])


def product_loops(sass: str, least: int) -> list[Loop]:
    """Return the innermost loops with at least `least` matrix instructions (HGMMA), in the order of the code."""
    code, labels = _parsed(sass)
    ends = (k + 1 for k, each in enumerate(code) if _opcode(each).split(".")[0] in _ENDS)
    starts = sorted({0, *labels.values(), *ends})
    blocks = {
        start: range(start, end) for start, end in zip(starts, [*starts[1:], len(code)], strict=True) if start < end
    }
    follow = {start: _following(code, block, labels, blocks) for start, block in blocks.items()}
    products = {start: sum(_opcode(code[k]).startswith("HGMMA") for k in block) for start, block in blocks.items()}
    bodies = {edge: _between(*edge, follow) for edge in _back_edges(follow)}
    bodies = {edge: body for edge, body in bodies.items() if sum(products[block] for block in body) >= least}
    heads = {head for head, _ in bodies}
    found = []
    for (head, latch), body in sorted(bodies.items()):
        if body & heads == {head}:
            ways = (_shortest(head, latch, follow, blocks), body)
            found.append(Loop(*(Counter(_opcode(code[k]) for block in way for k in blocks[block]) for way in ways)))
    return found


def _parsed(sass: str) -> tuple[list[str], dict[str, int]]:
    """Return the instructions, and to which of them each label points."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif instruction := _INSTRUCTION.search(line):
            code.append(instruction[1])
    return code, labels


def _opcode(instruction: str) -> str:
    found = _OPCODE.match(instruction)
    return found[1] if found else ""


def _following(code: list[str], block: range, labels: dict[str, int], blocks: dict[int, range]) -> list[int]:
    """Return the blocks that may follow one."""
    last = code[block[-1]]
    name = _opcode(last).split(".")[0]
    targets = _TARGET.findall(last) if name in _ENDS else []
    found = [labels[target] for target in targets if target in labels]
    if name not in _ENDS or last.startswith("@") or " P" in last.split("`")[0]:
        found.append(block.stop)
    return [each for each in found if each in blocks]


def _back_edges(follow: dict[int, list[int]]) -> list[tuple[int, int]]:
    """Return (first block, block that jumps back to it) of every loop: all ways to the second go through the first."""
    entered = {each for after in follow.values() for each in after}
    roots = [block for block in follow if block not in entered or block == 0]
    found = []
    for latch, after in follow.items():
        for head in after:
            if head <= latch and latch not in _reached([root for root in roots if root != head], head, follow):
                found.append((head, latch))
    return found


def _between(head: int, latch: int, follow: dict[int, list[int]]) -> set[int]:
    """Return the blocks on all ways from `head` to `latch`."""
    before: dict[int, list[int]] = {}
    for block, after in follow.items():
        for each in after:
            before.setdefault(each, []).append(block)
    return (_reached([head], latch, follow) & _reached([latch], head, before)) | {head, latch}


def _reached(starts: list[int], without: int, edges: dict[int, list[int]]) -> set[int]:
    """Return the blocks that ways from `starts` reach which end at `without`; it is not among them."""
    found = set(starts) - {without}
    pending = list(found)
    while pending:
        new = [each for each in edges.get(pending.pop(), ()) if each not in found and each != without]
        found.update(new)
        pending += new
    return found


def _shortest(head: int, latch: int, follow: dict[int, list[int]], blocks: dict[int, range]) -> list[int]:
    """Return the blocks of the way from `head` to `latch` with the fewest instructions."""
    queue = [(len(blocks[head]), [head])]
    seen = set()
    while queue:
        length, way = heapq.heappop(queue)
        if way[-1] == latch:
            return way
        if way[-1] not in seen:
            seen.add(way[-1])
            for each in follow[way[-1]]:
                heapq.heappush(queue, (length + len(blocks[each]), [*way, each]))
    raise ValueError(f"no way from instruction {head} to {latch}")
