"""What some versions of Triton refuse, and what the kernels for SM 9.0 do instead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dmattn_ops

gluon_compat = pytest.importorskip("dmattn_ops.kernels.hopper.gluon_compat")

COMPILE = """
import sys
from dmattn_ops.kernels.hopper import gluon_compat
gluon_compat.VIEWS_ARE_WHOLE = sys.argv[1] == "whole"
times, asked = gluon_compat._times, []
gluon_compat._times = lambda *views: asked.append(times(*views)) or asked[-1]
from dmattn_ops.choice.resources import Specialization
from tests.tools import configurations, machine_code
from dmattn_ops.api.stand_in import compiled_launches
row = next(row for row in configurations.DIRECTIONS["backward"] if (row.kernel, row.sm, row.dim) == ("hopper", 90, 64))
with compiled_launches(90) as launches:
    configurations.launch(configurations.Unit("backward", row, 64, Specialization(band="causal")))
kernel = next(each.compiled for each in launches if each.kernel == "backward_kernel")
print(max(asked, default=0))
print(machine_code.disassemble(kernel.asm["cubin"]))
"""


@pytest.mark.skipif(gluon_compat.VIEWS_ARE_WHOLE, reason="this Triton takes whole views alone")
def test_views_of_whole_buffers_are_the_same_machine_code(tmp_path: Path) -> None:
    found = []
    for views in ("whole", "parts"):
        # the flag is no part of what Triton finds its compiled kernels by
        variables = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / views)}
        variables.pop("TRITON_INTERPRET", None)
        command = [sys.executable, "-c", COMPILE, views]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(done.stdout.split("\n", 1))
    (times, whole), (none, parts) = found
    assert (int(times), int(none)) == (4, 0), "some view is a quarter of what it views"
    assert "HGMMA" in whole and whole == parts


def test_slices_are_not_viewed_where_triton_refuses_that(monkeypatch: pytest.MonkeyPatch) -> None:
    from dmattn_ops.kernels.hopper.backward import launch

    monkeypatch.setattr(launch, "VIEWS_ARE_WHOLE", True)
    for dim, kernel in ((64, "hopper"), (96, "hopper256"), (128, "hopper")):
        query = torch.randn(1, 256, 4, dim, dtype=torch.bfloat16)
        found = dmattn_ops.explain(query, query, query, arch="9.0")
        assert found.forward.kernel == "hopper"
        assert found.backward.kernel == kernel
        assert any("in two parts with triton 3.8" in reason for reason in found.backward.passed_over) == (dim == 96)
