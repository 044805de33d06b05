"""The benchmark of chosen blocks, in small."""

from __future__ import annotations

import json

import pytest
import torch

import bench_selection
from chosen_rows import TINY, Shape, clustered, independent, unions


def test_it_measures_both_kinds_of_choices_beside_bits_and_dense_attention(tmp_path):
    output = tmp_path / "results.json"
    rows = bench_selection.main(["--tiny", "--rounds=1", "--device=cpu", f"--output={output}"])
    assert {(row["part"], row["case"]) for row in rows} == {
        (part, case)
        for part in TINY
        for case in ("clustered", "independent")
        if (part, case) != ("long", "independent")
    }
    for name in ("dmattn", "dmattn-bits", "dmattn-dense"):
        assert all(row["forward_ms"] > 0 and row["backward_ms"] > 0 for row in rows if row["implementation"] == name)
    assert {ratio["over"] for ratio in json.loads(output.read_text())["ratios"]} == {"dmattn-bits", "dmattn-dense"}
    with pytest.raises(SystemExit, match="needs a GPU; on a CPU it takes"):
        bench_selection.main(["--device=cpu", f"--output={output}"])


@pytest.mark.parametrize("draw", [clustered, lambda shape: independent(shape, "cpu")], ids=["clustered", "independent"])
def test_a_query_names_as_many_blocks_as_it_may_see(draw):
    shape = Shape(400, 4, 2, 32, 32, 8, 12)
    indices = draw(shape)
    assert indices.shape == (1, 2, 400, 12)
    for query in range(400):
        visible = query // 8 + 1
        for named in indices[0, :, query]:
            kept = named[named >= 0]
            assert len(torch.unique(kept)) == len(kept) == min(12, visible) and int(kept.max()) < visible


def test_neighbours_agree_where_choices_are_clustered():
    shape = Shape(1000, 4, 1, 32, 32, 4, 20)
    assert unions(clustered(shape), 8) < 1.5 < 3 < unions(independent(shape, "cpu"), 8)
    changed = (clustered(shape)[0, 0, 501:] != clustered(shape)[0, 0, 500:-1]).sum(-1).float().mean()
    assert 0.4 < changed < 0.6  # one at every second query
