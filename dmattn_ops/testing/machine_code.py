"""Read the machine code of a compiled kernel: its instructions, and what one iteration of each of its loops executes.

The SM 9.0 backward kernels ask in every iteration whether rows are so large that they need exact statistics. That path loads
many numbers from global memory. So an iteration is counted without the blocks that do: its fast path. A loop that cannot be
gone through without such loads, like one that tests segments, has no fast path.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import triton

_NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
_LABEL = re.compile(r"(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);")
_JUMP = re.compile(r"\bBRA\b.*\((\.L_x_\d+)\)")
_OPCODE = re.compile(r"(?:@!?U?P\w+ +)?([A-Z][A-Z0-9_.]*)")
_ENDS = ("BRA", "EXIT", "RET", "BRX", "JMP")
_MANY = 8  # loads of a block; the next tile of a list is one


@dataclass(frozen=True)
class Loop:
    """One loop that multiplies matrices, as numbers of instructions by their full names (`opcodes`)."""

    fast: Counter[str]  # of an iteration without the blocks that load much; empty where there is no such iteration
    every: Counter[str]  # of all blocks of the loop


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
    starts = sorted(
        {0, *labels.values(), *(k + 1 for k, each in enumerate(code) if _opcode(each).split(".")[0] in _ENDS)}
    )
    blocks = {
        start: range(start, end) for start, end in zip(starts, [*starts[1:], len(code)], strict=True) if start < end
    }
    follow = {start: _following(code, block, labels, blocks) for start, block in blocks.items()}
    found = []
    for head, latch in _innermost(code, labels, blocks, least):
        inside = _around(head, latch, follow, set(blocks))
        quiet = {b for b in inside if sum(_opcode(code[k]).startswith("LDG") for k in blocks[b]) < _MANY}
        fast = _around(head, latch, follow, quiet) if {head, latch} <= quiet else set()
        found.append(Loop(*(Counter(_opcode(code[k]) for b in some for k in blocks[b]) for some in (fast, inside))))
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
    jump, name = _JUMP.search(last), _opcode(last).split(".")[0]
    found = [labels[jump[1]]] if jump and jump[1] in labels else []
    falls = name not in _ENDS or last.startswith("@") or " P" in last.split("`")[0]
    if falls and block.stop in blocks:
        found.append(block.stop)
    return [each for each in found if each in blocks]


def _innermost(
    code: list[str], labels: dict[str, int], blocks: dict[int, range], least: int
) -> Iterable[tuple[int, int]]:
    """Return (first block, block that jumps back) of the innermost loops with enough matrix instructions."""
    place = {k: start for start, block in blocks.items() for k in block}
    spans = []
    for end, instruction in enumerate(code):
        jump = _JUMP.search(instruction)
        if jump and labels.get(jump[1], end + 1) <= end:
            start = labels[jump[1]]
            if sum(_opcode(each).startswith("HGMMA") for each in code[start : end + 1]) >= least:
                spans.append((start, end))
    for start, end in spans:
        if not any((a, b) != (start, end) and start <= a and b <= end for a, b in spans):
            yield start, place[end]


def _around(head: int, latch: int, follow: dict[int, list[int]], allowed: set[int]) -> set[int]:
    """Return the blocks on paths from `head` to `latch` through `allowed` ones, that do not go through `head` again."""
    before: dict[int, list[int]] = {}
    for block, after in follow.items():
        for each in after:
            before.setdefault(each, []).append(block)
    ahead = _reached(head, latch, follow, allowed)
    return ahead & _reached(latch, head, before, allowed) if latch in ahead else set()


def _reached(start: int, stop: int, edges: dict[int, list[int]], allowed: set[int]) -> set[int]:
    found, pending = {start}, [start]
    while pending:
        block = pending.pop()
        if block == stop:
            continue
        for each in edges.get(block, ()):
            if each in allowed and each not in found:
                found.add(each)
                pending.append(each)
    return found
