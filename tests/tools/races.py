"""Races that compute-sanitizer's racecheck reports in the kernels for SM 9.0: which of them are proven to be none, and by what.

Racecheck 2025.3 (CUDA 13.0) reports pairs of accesses that barriers order, in some blocks of a launch and not in others that run
the same instructions. NVIDIA's release notes say what was mended since: "multiple false-positives in racecheck involving mbarrier
usage" (2025.4), "false positives in racecheck when using warpgroup-level synchronizations on Hopper" (2026.1), "potential false
positives in racecheck when using mbarrier complete-tx operations" (2026.3).

A proof names the lines of two accesses, and the chains of lines that order them: in each, an access, the arrival at a barrier
behind it, the wait for that barrier, and the other access. It holds for what stands in the source now: where a line of a
chain is missing or out of order, or an access is in another line, the report counts as a race.

What a proof takes for granted, `tests/kernels/test_hopper_publication.py` sees in the compiled kernels: all threads of a
partition meet between an access to shared memory and the arrival of the one thread that speaks for them.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import dmattn_ops.kernels

KERNELS = Path(dmattn_ops.kernels.__file__).parent

_FIRST = re.compile(r"Race reported between (Read|Write) access at (\S+?)\+0x[0-9a-f]+ in (\S+):(\d+)\s*$")
_OTHER = re.compile(r"^=+\s+and (Read|Write) access at (\S+?)\+0x[0-9a-f]+ in (\S+):(\d+) \[(\d+) hazards?\]\s*$")
_ANY_FIRST, _ANY_OTHER = re.compile(r"Race reported|hazard detected"), re.compile(r"^=+\s+and \w+ access")
_SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazard")


Line = tuple[str, str]  # a file of a kernel's folder, and how a line of it begins


class Access(NamedTuple):
    """An access to shared memory as racecheck names it."""

    kind: str  # Read or Write
    kernel: str
    file: str
    line: int


class Proof(NamedTuple):
    """Why accesses to some shared memory are ordered."""

    memory: str
    kernel: str
    folder: str  # below that of the kernels
    writes: tuple[Line, ...]
    reads: tuple[Line, ...]
    chains: tuple[tuple[Line, ...], ...]  # what follows one another in one function of a file

    def covers(self, one: Access, other: Access) -> bool:
        """Return whether the proof is about these two accesses."""
        if (one.kernel, other.kernel) != (self.kernel, self.kernel) or {one.kind, other.kind} != {"Read", "Write"}:
            return False
        read, write = sorted((one, other))
        return self._is_at(read, self.reads) and self._is_at(write, self.writes)

    def missing(self) -> list[str]:
        """Return the parts of the proof that the source lacks: accesses, and chains whose lines do not follow one another."""
        accesses = ((line,) for line in (*self.writes, *self.reads))
        return [
            " -> ".join(text for _, text in chain) for chain in (*accesses, *self.chains) if not self._stands(chain)
        ]

    def _stands(self, chain: tuple[Line, ...]) -> bool:
        file = chain[0][0]
        return any(_follow(body, [text for _, text in chain]) for body in _functions(self._text_of(file)))

    def _is_at(self, access: Access, lines: tuple[Line, ...]) -> bool:
        text = line_of(KERNELS / self.folder / access.file, access.line)
        return any(access.file == file and text.startswith(begins) for file, begins in lines)

    def _text_of(self, file: str) -> list[str]:
        return _lines_of(KERNELS / self.folder / file)


def line_of(path: Path, number: int) -> str:
    """Return a line of a file without its indentation; nothing where there is no such line, or no file."""
    lines = _lines_of(path)
    return lines[number - 1].strip() if 0 < number <= len(lines) else ""


def _lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _functions(lines: list[str]) -> list[list[str]]:
    """Divide a file at its top-level statements, so that each function is a part."""
    parts: list[list[str]] = [[]]
    for line in lines:
        if line and not line[0].isspace() and not line.startswith(")"):
            parts.append([])
        parts[-1].append(line.strip())
    return parts


def _follow(body: list[str], texts: list[str]) -> bool:
    """Return whether lines that begin so follow one another."""
    rest = iter(body)
    return all(any(line.startswith(text) for line in rest) for text in texts)


def _handed_over(kernel: str, folder: str, file: str, *around: str) -> Proof:
    """Return the proof for the byte that tells each warp its partition, of which the source has no line.

    Triton writes it before `warp_specialize` and at the end of the kernel; it is reported at lines that access nothing themselves.
    Warps read it behind `barrier.sync 1`, at which all threads of the block meet after each write and before the next one.
    """
    start = (file, f"def {kernel}(")
    writes = (start, *((file, line) for line in (*around, "gl.warp_specialize([")))
    return Proof("partitions of warps", kernel, folder, writes, (start,), ())


_FORWARD, _BACKWARD, _WIDE = "hopper/forward", "hopper/backward", "hopper/backward_256"
_FREE = ("walk.py", "mbarrier.wait(bars.q_empty.index(slot), ((turn // T.Q_STAGES) & 1) ^ 1)")
_PIECE = ("walk.py", "smem.pieces.index(slot).store(parts)")
_LAST = ("walk.py", "smem.pieces.index(slot).store(gl.full([WORDS], -1, gl.int32, layout=PIECE))")
_FIRST_PIECE = ("kernel.py", "parts = smem.pieces.index(0).load(PIECE)")
_NEXT_PIECE = ("kernel.py", "parts = smem.pieces.index(slot).load(PIECE)")
# Words that only the loop uses: of both loads, LLVM makes one at the head of the loop.
_WORDS = ("kernel.py", "batch = head // sizes.H")
# The word that only the first tile of segments uses is loaded where that is tested: LLVM makes one load of two there, which stands
# at no line. Racecheck names the kernel's first line then.
_TILE_WORD = ("kernel.py", "def forward_kernel(")
_KEYS_OF_TILE = ("step.py", "return Keys(first, gl.load(visible.segments + key, ")
_WHOLE_KEYS_OF_TILE = ("step.py", "segments = gl.load(visible.segments + key, ")
_COUNTS = ("kernel.py", "if first < n:")  # the words of which it is made, where nothing else needs them
_BIAS = ("walk.py", "smem.biases.index(b).store(added)")
_RANGE = ("walk.py", "smem.ranges.index(b).store((127 + begin + (128 - stop) * 256).to(gl.int16))")
_KEYS_FREE = ("walk.py", "mbarrier.wait(bars.k_empty.index(b), ((step // T.STAGES) & 1) ^ 1)")
_KEYS_FULL = ("walk.py", "mbarrier.arrive(bars.k_full.index(b), count=1)")
_PLACE = ("work.py", "work.places.index(slot).store(")
_RECEIVED = ("work.py", "parts = work.places.index(slot).load(PARTS)")
_P = ("keys.py", "smem.p.index(b).store(")
_P_READ = ("keys.py", "ds = smem.p.index(b).load(SL)")
_WIDE_BIAS = ("queries.py", "smem.bias.index(b).store(")
_WIDE_BIAS_READ = ("queries.py", "added = smem.bias.index(b).load(")


def _of_keys(memory: str, write: Line, read: str, reader: str) -> Proof:
    """Return the proof for numbers of keys that the forward's producer stores beside the keys themselves."""
    chains = (
        (_KEYS_FREE, write, _KEYS_FULL),
        *(
            (
                (file, f"mbarrier.wait(bars.k_full.index({b}), "),
                (file, reader),
                (file, f"mbarrier.arrive(bars.k_empty.index({b}), "),
            )
            for file, b in (("kernel.py", "b"), ("step.py", "b_next"))
        ),
    )
    return Proof(memory, "forward_kernel", _FORWARD, (write,), (("step.py", read),), chains)


PROOFS = (
    Proof(
        # All lanes of the producer store the same four or eight words, the arriving one among them.
        "a piece of work",
        "forward_kernel",
        _FORWARD,
        (_PIECE, _LAST),
        (_FIRST_PIECE, _NEXT_PIECE, _WORDS, _COUNTS, _TILE_WORD, _KEYS_OF_TILE, _WHOLE_KEYS_OF_TILE),
        (
            (
                _FREE,
                _PIECE,
                ("walk.py", "thread_barrier()"),
                ("walk.py", "mbarrier.expect(bars.q_full.index(slot), "),
                ("walk.py", "load_parts(maps.q, "),
            ),
            (_FREE, _LAST, ("walk.py", "mbarrier.arrive(bars.q_full.index(slot), count=1)")),
            (
                ("kernel.py", "mbarrier.wait(bars.q_full.index(0), 0)"),
                _FIRST_PIECE,
                _WORDS,
                _COUNTS,
                ("kernel.py", "keys = tested_keys(first_tile, "),
                ("kernel.py", "release_queries(turn - 1, "),
            ),
            (("kernel.py", "mbarrier.wait(bars.q_full.index(slot), (turn // T.Q_STAGES) & 1)"), _NEXT_PIECE),
            (
                ("kernel.py", "def release_queries("),
                ("kernel.py", "mbarrier.arrive(q_empty.index(turn % Q_STAGES), count=1)"),
            ),
        ),
    ),
    _of_keys("bias of keys", _BIAS, "return biases.index(step % T.STAGES).load(", "bias = stored_bias("),
    _of_keys(
        "ranges of keys",
        _RANGE,
        "return reinterpret(smem.ranges.index(step % T.STAGES), ",
        "stored = stored_mask(",
    ),
    Proof(
        "a block's place",
        "backward_kernel",
        _BACKWARD,
        (_PLACE,),
        (_RECEIVED,),
        (
            (
                ("work.py", "mbarrier.wait(work.empty.index(slot), ((turn >> 1) & 1) ^ 1)"),
                _PLACE,
                ("work.py", "mbarrier.arrive(work.full.index(slot), count=1)"),
            ),
            (
                ("work.py", "mbarrier.wait(work.full.index(slot), (turn >> 1) & 1)"),
                _RECEIVED,
                ("work.py", "mbarrier.arrive(work.empty.index(slot), count=1)"),
            ),
        ),
    ),
    Proof(
        # Its next P there needs the next queries, which are loaded when the reader has given back these.
        "P between the consumers",
        "keys_kernel",
        _WIDE,
        (_P,),
        (_P_READ,),
        (
            (
                ("keys.py", "mbarrier.wait(smem.q_full.index(b), phase)"),
                _P,
                ("keys.py", "mbarrier.arrive(smem.p_full.index(b), count=1)"),
                ("keys.py", "mbarrier.arrive(smem.q_empty.index(b), count=1)"),
            ),
            (
                ("keys.py", "mbarrier.wait(smem.p_full.index(b), phase)"),
                _P_READ,
                ("keys.py", "mbarrier.arrive(smem.q_empty.index(b), count=1)"),
            ),
            (("keys.py", "mbarrier.init(q_empty.index(b), count=2)"),),
            (
                ("keys.py", "mbarrier.wait(smem.q_empty.index(b), phase)"),
                ("keys.py", "mbarrier.expect(q_full, "),
            ),
        ),
    ),
    Proof(
        "bias of keys",
        "queries_kernel",
        _WIDE,
        (_WIDE_BIAS,),
        (_WIDE_BIAS_READ,),
        (
            (
                ("queries.py", "mbarrier.wait(smem.k_empty.index(b), ((i >> 1) & 1) ^ 1)"),
                _WIDE_BIAS,
                ("queries.py", "mbarrier.arrive(k_full, count=1)"),
            ),
            (
                ("queries.py", "mbarrier.wait(smem.k_full.index(b), (i >> 1) & 1)"),
                _WIDE_BIAS_READ,
                ("queries.py", "mbarrier.arrive(smem.k_empty.index(b), count=1)"),
            ),
        ),
    ),
    _handed_over("forward_kernel", _FORWARD, "kernel.py", "if T.BM == 128:"),
    _handed_over("backward_kernel", _BACKWARD, "kernel.py"),
    _handed_over("keys_kernel", _WIDE, "keys.py"),
    _handed_over("queries_kernel", _WIDE, "queries.py"),
    _handed_over("shared_bias_kernel", "hopper/dbias", "launch.py"),
)


class Found(NamedTuple):
    """What racecheck reported."""

    proven: dict[str, int]  # hazards by kernel and memory
    unproven: list[str]

    def as_result(self) -> dict[str, Any]:
        """Return the entries of a file of results: only what is not proven to be ordered counts as an error."""
        return {"errors": len(self.unproven), "unproven": self.unproven, "proven to be ordered": self.proven}


def judge(text: str) -> Found:
    """Divide racecheck's reports into those that are proven to be ordered, and all others, with what cannot be parsed."""
    holds = {proof: not proof.missing() for proof in PROOFS}
    proven: Counter[str] = Counter()
    unproven, reports, one = [], 0, None
    for line in text.splitlines():
        if _ANY_FIRST.search(line):
            reports += 1
            first = _FIRST.search(line)
            one = None if first is None else _access(first)
            unproven += [] if first else [line]
        elif _ANY_OTHER.match(line):
            second = _OTHER.match(line)
            other = None if second is None else _access(second)
            found = next((each for each in PROOFS if one and other and each.covers(one, other) and holds[each]), None)
            if found is None or second is None:
                unproven.append(f"{_told(one)} {line.lstrip('= ')}")
            else:
                proven[f"{found.kernel}: {found.memory}"] += int(second.group(5))
    summary = sum(int(count) for count in _SUMMARY.findall(text))
    if summary > reports:
        unproven.append(f"{summary - reports} of {summary} reports were not printed")
    return Found(dict(proven), unproven)


def _access(match: re.Match[str]) -> Access:
    return Access(match.group(1), match.group(2), match.group(3), int(match.group(4)))


def _told(access: Access | None) -> str:
    return "?" if access is None else f"{access.kind} access at {access.kernel} in {access.file}:{access.line}"


def version(sanitizer: str) -> str:
    """Return the version of compute-sanitizer: what racecheck reports depends on it."""
    done = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"Version (\S+)", done.stdout)
    return found.group(1) if found else "unknown"
