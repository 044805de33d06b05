"""One thread arrives at a barrier for its partition: before it does, all threads meet behind their last access to shared memory.

Without that, the arrival would publish the arriving thread's accesses alone, and a buffer could be filled again while others
still read it. Triton puts the meeting there for `mbarrier.arrive`, but until 3.6 not for `mbarrier.expect`: kernels that
store before one call `gluon_compat.meet`. The kernels are compiled for SM 9.0 without a GPU, and their PTX is read.
"""

from __future__ import annotations

import re
from functools import cache

import pytest

from dmattn_ops.api.stand_in import compiled_launches
from dmattn_ops.choice.resources import Specialization
from tests.tools import configurations
from tests.tools.configurations import DIRECTIONS, Unit

_MEETING = re.compile(r"\b(bar\.sync|bar\.warp\.sync|barrier\.sync|barrier\.cta\.sync)\b")
_ACCESS = re.compile(r"\b(ld|st|atom|red)\.shared|\b(ld|st)matrix\b")
KERNELS = [
    ("forward", "hopper", 64, Specialization(), "forward_kernel"),
    ("forward", "hopper", 64, Specialization(band="causal", bias="key bias"), "forward_kernel"),
    ("forward", "hopper", 128, Specialization(band="causal", mask="intervals"), "forward_kernel"),
    ("forward", "hopper", 64, Specialization(band="causal", mask="segments"), "forward_kernel"),
    ("forward", "hopper", 64, Specialization(band="causal", varlen=True), "forward_kernel"),
    ("backward", "hopper", 64, Specialization(), "backward_kernel"),
    ("backward", "hopper", 128, Specialization(band="causal", deterministic=True), "backward_kernel"),
    ("backward", "hopper256", 256, Specialization(bias="key bias"), "keys_kernel"),
    ("backward", "hopper256", 256, Specialization(bias="key bias"), "queries_kernel"),
    ("backward", "hopper", 128, Specialization(bias="broadcast bias"), "shared_bias_kernel"),
]


@cache
def _ptx(direction: str, kernel: str, width: int, wanted: Specialization) -> dict[str, str]:
    """Return the PTX of every kernel that a call launches."""
    row = next(row for row in DIRECTIONS[direction] if row.kernel == kernel and row.sm == 90 and row.dim >= width)
    with compiled_launches(90) as launches:
        configurations.launch(Unit(direction, row, width, wanted))
    return {each.kernel: each.compiled.asm["ptx"] for each in launches}


def unpublished(ptx: str) -> list[tuple[str, str]]:
    """Return the arrivals behind accesses after which the threads do not meet: the arrival, and the first access."""
    found, pending = [], []
    for line in map(str.strip, ptx.splitlines()):
        if _MEETING.search(line):
            pending = []
        elif "mbarrier.arrive" in line and pending:
            found.append((line, pending[0]))
        elif _ACCESS.search(line):
            pending.append(line)
    return found


@pytest.mark.parametrize(("direction", "kernel", "width", "wanted", "name"), KERNELS)
def test_threads_meet_before_one_of_them_arrives(
    direction: str, kernel: str, width: int, wanted: Specialization, name: str
) -> None:
    ptx = _ptx(direction, kernel, width, wanted)[name]
    assert not unpublished(ptx)
    assert ptx.count("mbarrier.arrive") >= 8
    without = "\n".join(line for line in ptx.splitlines() if not _MEETING.search(line))
    assert len(unpublished(without)) > 5, "the test would see it"


@pytest.mark.parametrize(("direction", "kernel", "width", "wanted", "name"), KERNELS)
def test_warps_read_their_partition_behind_a_meeting_of_the_block(
    direction: str, kernel: str, width: int, wanted: Specialization, name: str
) -> None:
    lines = [line.strip() for line in _ptx(direction, kernel, width, wanted)[name].splitlines()]
    code = [line for line in lines if line and not line.startswith((".loc", "//", "$L", "."))]
    (read,) = [at for at, line in enumerate(code) if line.startswith("ld.shared.b8")]
    assert "barrier.sync \t1;" in code[read - 3 : read], "all threads meet, then a warp reads"
    meetings = [at for at, line in enumerate(code) if line == "barrier.sync \t1;"]
    stores = [at for at, line in enumerate(code) if line.startswith("st.shared")]
    address = code[stores[-1]][code[stores[-1]].index("[") : code[stores[-1]].index("]")]
    first, last = (at for at in stores if address in code[at])
    assert first < min(meetings), "written before the partitions start"
    assert code[last + 1] == "barrier.sync \t1;" and code[last + 2].startswith("ret"), "and at the end"


@pytest.mark.parametrize("width", [64, 128])
def test_a_word_that_is_read_at_no_line_is_read_while_the_queries_are_held(width: int) -> None:
    """What `races.py` says of accesses at the kernel's first line: the last barrier before them is a wait, and so is the next."""
    specialization = Specialization(band="causal", mask="segments")
    lines = list(map(str.strip, _ptx("forward", "hopper", width, specialization)["forward_kernel"].splitlines()))
    places = [at for at, line in enumerate(lines) if line.startswith(".loc")]
    barriers = [at for at, line in enumerate(lines) if "mbarrier.try_wait" in line or "mbarrier.arrive" in line]
    reads = [at for at, line in enumerate(lines) if line.startswith("ld.shared")]
    unplaced = [at for at in reads if lines[max(place for place in places if place < at)].split()[2:4] == ["0", "0"]]
    assert len(unplaced) == 2, "one of each consumer"
    for at in unplaced:
        before, after = max(each for each in barriers if each < at), min(each for each in barriers if each > at)
        assert "try_wait" in lines[before] and "try_wait" in lines[after]
