"""Where compute-sanitizer's tools found something, and which reads of unwritten memory are none that a result could depend on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from tests.tools.races import KERNELS, line_of

BEGINS = "begins "  # and the name of a call: printed before it is made
_REPORT = re.compile(r"========= (?! |ERROR SUMMARY|RACECHECK|COMPUTE-SANITIZER)(.+)")
_PLACE = re.compile(r"=========     at (?:void )?([\w.:]+).*?(?: in (\S+))?$")
_READ = re.compile(r": Uninitialized __global__ memory read of size \d+ bytes at (\w+) in (\S+):(\d+)$")


class Unused(NamedTuple):
    """A line of a kernel that reads words which nobody may have written, and of which nothing is used then."""

    kernel: str
    path: str  # below the folder of the kernels
    begins: str  # the line

    def is_at(self, kernel: str, file: str, line: int) -> bool:
        """Return whether a kernel's line, which is named by its file's name alone, is this one."""
        path = KERNELS / self.path
        return (kernel, file) == (self.kernel, path.name) and line_of(path, line).startswith(self.begins)


UNUSED = (
    # The words of the first two tiles of a list are loaded at once. A list of one tile has no second word: `load_step` would use it
    # for the keys behind the first ones, which then are not loaded.
    Unused("forward_kernel", "hopper/forward/walk.py", "second = gl.load(at + gl.minimum(HEADER + 1 "),
)


def of(text: str) -> Counter[str]:
    """Count what a process's tool reported, by the call that ran, what is wrong, and where: the innermost function and line."""
    found: Counter[str] = Counter()
    call, wrong = "before the first call", ""
    for line in text.splitlines():
        if line.startswith(BEGINS):
            call = line.removeprefix(BEGINS)
        elif report := _REPORT.match(line):
            wrong = report[1]
        elif wrong and (place := _PLACE.match(line)):
            found[f"{call}: {wrong} at {' in '.join(filter(None, place.groups()))}"] += 1
            wrong = ""
    return found


def unused(found: Mapping[str, int]) -> dict[str, int]:
    """Return those of `of` that are reads of words that nothing uses."""
    return {site: count for site, count in found.items() if _is_unused(site)}


def _is_unused(site: str) -> bool:
    read = _READ.search(site)
    return read is not None and any(each.is_at(read[1], read[2], int(read[3])) for each in UNUSED)
