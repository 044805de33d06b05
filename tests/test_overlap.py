"""Kernels that may begin before the one in front of them has ended: each waits for it before it touches memory."""

import re

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
from dmattn_ops.kernels.packing import launch as packing
from dmattn_ops.kernels.selection import launch as selection
from dmattn_ops.packing import epochs
from dmattn_ops.problem import UNBOUNDED
from dmattn_ops.resources import Specialization
from dmattn_ops.testing import configurations
from dmattn_ops.testing.stand_in import compiled_launches

TOUCHES = re.compile(r"\b(ld|st|ldu|red|atom|prefetch|cp\.async)[.\w:]*\.global")


def attend(direction, dim, wanted):
    rows = configurations.reachable(configurations.DIRECTIONS[direction], 90)
    row = next(row for row in rows if row.kernel != "portable" and row.dim == dim and not row.dim_v)
    configurations.launch(configurations.Unit(direction, row, dim, wanted))


def select():
    scores, documents = torch.empty(1, 2, 9000), torch.empty(1, 9000, dtype=torch.int32)
    start, end = (torch.empty(1, 2, 9000, dtype=torch.int32) for _ in range(2))
    selection.lifetimes(scores, documents, 512, 0, 0, True, start, end)


def pack():
    start, end = (torch.empty(1, 2, 4096, dtype=torch.int32) for _ in range(2))
    rows = torch.empty(1, 4096, 2, 64, dtype=torch.bfloat16)
    made = packing.plan_slots(start, end, epochs(4096, 4096, 256, 0, 512), 4096, -UNBOUNDED, 0, 0, 2, inverse=True)
    copies = packing.gather_rows((rows, rows), made, 2, 0, 1)
    packing.sum_rows(copies, made, (rows, rows), 0, 1)


CALLS = {
    "dense": (lambda: attend("backward", 64, Specialization(grouped=True)), {"backward_kernel", "add_shares_kernel"}),
    "wide heads": (lambda: attend("backward", 256, Specialization(band="causal")), {"keys_kernel", "queries_kernel"}),
    "packed sequences": (
        lambda: attend("backward", 128, Specialization(varlen=True)),
        {"_write_spans", "backward_kernel"},
    ),
    "packed sequences forward": (lambda: attend("forward", 128, Specialization(varlen=True)), {"forward_kernel"}),
    "intervals": (
        lambda: attend("forward", 64, Specialization(mask="intervals")),
        {"list_tiles_kernel", "rank_kernel", "forward_kernel"},
    ),
    "packed keys": (pack, {"gather_kernel", "sum_kernel"}),
    "selection": (select, {"write_bounds", "sort_alive", "write_deaths"}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_that_follows_waits_before_it_touches_memory(name):
    run, expected = CALLS[name]
    with compiled_launches(90) as launches:
        run()
    assert {made.kernel for made in launches if made.compiled.metadata.launch_pdl} == expected
    assert not launches[0].compiled.metadata.launch_pdl  # what is in front of a call is not known
    for made in launches:
        before, wait, _ = made.compiled.asm["ptx"].partition("griddepcontrol.wait")
        assert wait, made.kernel
        assert "griddepcontrol.launch_dependents" in before, made.kernel
        assert not TOUCHES.search(before), made.kernel


def test_other_architectures_know_nothing_of_it():
    with compiled_launches(80) as launches:
        pack()
        select()
    assert launches
    for made in launches:
        assert not made.compiled.metadata.launch_pdl
        assert "griddepcontrol" not in made.compiled.asm["ptx"]
