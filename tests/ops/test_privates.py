"""Private names of torch: which the package uses, and what a torch that lacks one gives: the same, and a warning."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import dmattn_ops
from dmattn_ops.checks import require

SHORT_CUTS = (
    "torch._C._len_torch_dispatch_stack",
    "torch.autograd._profiler_enabled",
    "torch.jit.is_tracing",
)
NEEDED = (
    "torch._C._AutoDispatchBelowAutograd",
    "torch._C._are_functorch_transforms_active",
    "torch.autograd.function._SingleLevelFunction",
)
# Without one of these, something else stands in for it or is refused (`ops/torch_privates.py`), or they are documented by torch
OTHERS = (
    "torch._C",  # DisableTorchFunctionSubclass, of the documentation of subclasses
    "torch._C._dynamo",  # guards._empty_strided_cuda: to allocate in half of the time
    "torch._check",
    "torch._dynamo",  # mark_static_address: memory that CUDA graphs of compiled functions may write
    "torch._functorch",  # settings of its partitioner; what lets a Function be applied at one level of torch.func
    "torch.distributed._functional_collectives",
    "torch.utils._python_dispatch",
    "torch.utils._pytree",
)
# Each name is taken away in a process of its own, a copy of one that has imported torch. torch itself uses some of them,
# and finds them in its own modules again: what is taken away is what the package finds when it is imported.
CODE = """
import inspect, json, operator, os, sys, traceback, warnings
import torch
from torch._dynamo.utils import counters
from torch.autograd import forward_ad
from torch.autograd.forward_ad import make_dual, dual_level, unpack_dual

def results(dmattn_ops):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 33, 4, 8, requires_grad=True) for _ in range(3))
    bias, mask = torch.randn(1, 1, 33, 33, requires_grad=True), torch.rand(2, 1, 33, 33) < 0.7
    leaves = (query, key, value, bias)
    out, lse = dmattn_ops.flash_dmattn_func(query, key, value, mask, bias, is_causal=True, return_lse=True)
    found = [out, lse, *torch.autograd.grad(out.sin().sum() + lse.sum(), leaves)]
    with torch.no_grad():
        found.append(dmattn_ops.flash_dmattn_func(query, key, value, mask))
    found.append(torch.ops.dmattn.forward(query, key, value)[0])
    qkv = torch.stack((query, key, value), 2).detach().requires_grad_()
    found += torch.autograd.grad(dmattn_ops.flash_dmattn_qkvpacked_func(qkv).sin().sum(), qkv)
    return [tensor.detach().double().sum().item() for tensor in found]

def words(call):
    try:
        call()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return type(error).__name__ + ": " + str(error)
    return "nothing was raised"

def second(dmattn_ops):
    query = torch.randn(1, 4, 2, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(dmattn_ops.flash_dmattn_func(query, query, query).sum(), query, create_graph=True)
    grad.sum().backward()

def tangent(dmattn_ops):
    query = torch.randn(1, 4, 2, 8)
    with dual_level():
        dmattn_ops.flash_dmattn_func(make_dual(query, query), query, query)

def wrong(dmattn_ops):
    query = torch.randn(1, 4, 2, 8)
    dmattn_ops.flash_dmattn_func(query, query[:, 1:], query)

def child(name):
    if name:
        place, _, attribute = name.removeprefix("torch.").rpartition(".")
        holder = operator.attrgetter(place)(torch)
        taken = inspect.getattr_static(holder, attribute)
        delattr(holder, attribute)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import dmattn_ops
    if name:
        setattr(holder, attribute, taken)
    said = [str(warning.message) for warning in caught if "dmattn_ops" in str(warning.message)]
    errors = [words(lambda: call(dmattn_ops)) for call in (second, tangent, wrong)]
    return {"results": results(dmattn_ops), "errors": errors, "said": said, "short": dmattn_ops.ops.torch_privates.has_short_cuts,
            "needed": dmattn_ops.ops.torch_privates.has_needed}

for name in json.loads(sys.argv[1]):
    sys.stdout.flush()
    forked = os.fork()
    if forked == 0:
        try:
            line = child(name)
        except BaseException:
            line = {"failed": traceback.format_exc()}
        print(json.dumps([name, line]), flush=True)
        os._exit(0)
    os.waitpid(forked, 0)
"""


@pytest.fixture(scope="module")
def without() -> dict:
    """What a process finds without each name, and ("") with all of them."""
    names = ["", *SHORT_CUTS, *NEEDED]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # no threads before a process is copied
    command = [sys.executable, "-W", "ignore", "-c", CODE, json.dumps(names)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert set(found) == set(names)
    return found


@pytest.mark.parametrize("name", [*SHORT_CUTS, *NEEDED])
def test_results_gradients_and_errors_stay_the_same(without: dict, name: str):
    assert "failed" not in without[name], without[name]["failed"]
    assert without[name]["results"] == without[""]["results"]
    assert without[name]["errors"] == without[""]["errors"]
    second, tangent, wrong = without[""]["errors"]
    assert "no double backward" in second and "no forward-mode derivative" in tangent and "key must have shape" in wrong


@pytest.mark.parametrize("name", SHORT_CUTS)
def test_a_lost_short_cut_is_told_once_and_costs_no_more_than_time(without: dict, name: str):
    (words,) = without[name]["said"]
    assert name in words and "some microseconds more" in words
    assert without[name]["needed"] and not without[name]["short"]


@pytest.mark.parametrize("name", NEEDED)
def test_a_lost_name_that_derivatives_need_is_told_with_what_is_lost(without: dict, name: str):
    (words,) = without[name]["said"]
    assert name in words and "torch.func is not supported" in words
    assert not without[name]["needed"]


def test_without_the_word_of_a_tensor_its_shape_tells_whether_sizes_are_traced(monkeypatch: pytest.MonkeyPatch):
    query, graphs = torch.randn(2, 40, 4, 8, requires_grad=True), []
    for says in (True, False):
        monkeypatch.setattr(require, "_SAYS_TRACED", says)
        torch._dynamo.reset()
        counters.clear()
        call = torch.compile(dmattn_ops.flash_dmattn_func, fullgraph=True, dynamic=True, backend="aot_eager")
        for seqlen in (40, 33):
            rows = torch.randn(2, seqlen, 4, 8, requires_grad=True)  # no view: a guard would ask for its base
            out = call(rows, rows, rows, torch.ones(2, 1, seqlen, seqlen, dtype=torch.bool), is_causal=True)
            assert torch.equal(out, dmattn_ops.flash_dmattn_func(rows, rows, rows, is_causal=True))
        with pytest.raises(ValueError, match=r"key must have shape \(2, 40, 4, 8\), got \(2, 39, 4, 8\)"):
            dmattn_ops.flash_dmattn_func(query, query[:, 1:], query)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 1]


def test_nothing_is_told_where_nothing_is_lost(without: dict):
    assert without[""]["said"] == [] and without[""]["short"] and without[""]["needed"]


def test_no_other_private_name_is_used():
    package = Path(dmattn_ops.__file__).parent
    used = {name for path in package.rglob("*.py") for name in private_names(ast.parse(path.read_text()))}
    assert used == {name for name in (*SHORT_CUTS, *NEEDED, *OTHERS) if is_private(name)}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_names(tree: ast.Module) -> Iterator[str]:
    """Yield the private names of torch in a file, in full and up to their last private part."""
    stands_for: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {each.asname: each.name for each in node.names if each.asname}
            stands_for |= names | {each.name.partition(".")[0]: each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            stands_for |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}

    def in_full(node: ast.AST) -> str:
        """Return a dotted name, or what `getattr` is asked for by name, in full; empty for all else."""
        match node:
            case ast.Name(id=name):
                return stands_for.get(name, "")
            case ast.Attribute(value=holder, attr=name):
                return f"{in_full(holder)}.{name}"
            case ast.Call(func=ast.Name(id="getattr"), args=[holder, ast.Constant(value=name), *_]):
                return f"{in_full(holder)}.{name}"
        return ""

    found = {*stands_for.values(), *map(in_full, ast.walk(tree))}
    for name in found:
        if any(other.startswith(f"{name}.") for other in found):  # a part of that one
            continue
        while name.startswith("torch.") and is_private(name) and not is_private(name.rpartition(".")[2]):
            name = name.rpartition(".")[0]
        if name.startswith("torch.") and is_private(name):
            yield name


def test_a_private_name_is_found_however_it_is_written():
    written = """
import torch, torch._inner.deep as deep
from torch.library import Library
from torch.outer import _hidden as shown, inner as own
torch._made(torch.made())
called = own._below.it
other = getattr(torch._C, "_name", None)
print(torch._given)
Library.__name__, own.x
"""
    found = set(private_names(ast.parse(written)))
    assert found == {
        "torch._inner",
        "torch.outer._hidden",
        "torch._made",
        "torch.outer.inner._below",
        "torch._C._name",
        "torch._given",
    }
