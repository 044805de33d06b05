"""The sharding rules by themselves: all operators have one, and no combination over a mesh parts a query head from its key."""

import json
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def printed(*command):
    """Return what a fresh process prints as JSON."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=TESTS.parent, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_heads_stay_together_over_meshes_of_any_size():
    found = printed(str(TESTS / "support" / "sharding_choices.py"))
    assert found["wrong"] == []
    assert len(found["kept"]) > 30
    for sizes, heads, heads_kv, split in found["kept"]:  # right placements are not given up
        assert split == sizes[-1], (sizes, heads, heads_kv)


def test_every_operator_has_a_rule_and_registering_twice_is_harmless():
    code = (
        "import json, torch, dmattn_ops.distributed as d; from torch.distributed.tensor import DTensor;"
        "d.register_sharding_rules(); from dmattn_ops.ops import schemas as ops;"
        "known = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs;"
        "print(json.dumps([name for name in ops.SCHEMAS if ops.overload(name) not in known]))"
    )
    assert printed("-c", code) == []


def test_importing_the_package_loads_no_dtensor():
    code = (
        "import sys, json, torch; before = set(sys.modules); import dmattn_ops;"
        "dmattn_ops.flash_dmattn_func(*[torch.ones(1, 4, 1, 8)] * 3, dropout_p=0.5);"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    loaded = printed("-c", code)
    assert "dmattn_ops.checks.dtensors" in loaded
    assert not [name for name in loaded if name.startswith(("torch.distributed.tensor", "dmattn_ops.distributed"))]
