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
# Names without a gate: three are documented, some have what serves without them, and for the others torch has no public way
OTHERS = (
    "torch._C.DisableTorchFunctionSubclass",  # of the documentation of subclasses
    "torch._C._dynamo.guards._empty_strided_cuda",  # or torch.empty_strided, in twice the time
    "torch.Tensor._has_symbolic_sizes_strides",  # or the types of its sizes
    "torch._check",  # documented
    "torch._dynamo.mark_static_address",  # memory that CUDA graphs of compiled functions may write
    "torch._functorch.config",  # settings of the partitioner that decide whether dropout draws seeds twice
    "torch._functorch.utils.enable_single_level_autograd_function",  # below torch.func
    "torch.distributed._functional_collectives.AsyncCollectiveTensor",  # collectives in compiled graphs, and beside computations
    "torch.distributed._functional_collectives.all_gather_single",  # or the next one, its name before torch 2.12
    "torch.distributed._functional_collectives.all_gather_tensor",
    "torch.distributed._functional_collectives.all_to_all_single",
    "torch.utils._python_dispatch.TorchDispatchMode",  # documented
    "torch.utils._pytree",  # or dataclasses
    "torch.utils._pytree.tree_map_only",
)
# Of Functions and libraries of operators
ATTRIBUTES = {"_autograd_function_id", "_destroy"}
OF_PYTHON = {"_asdict", "_exit", "_getframe", "_replace"}
OF_OTHER_LIBRARIES = {
    "_attn_implementation", "_can_set_attn_implementation", "_convert_to_ir_values", "_data", "_hf_hook", "_init_handles",
    "_is_stateful", "_pre_quantization_dtype", "_reinterpret", "_version",
}  # fmt: skip
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
    trees = [ast.parse(path.read_text()) for path in Path(dmattn_ops.__file__).parent.rglob("*.py")]
    used = {name for tree in trees for name in private_names(tree)}
    known = {name for name in (*SHORT_CUTS, *NEEDED, *OTHERS) if is_private(name)}
    assert used == known
    parts = {part for name in known for part in name.split(".")}
    own = {name for tree in trees for name in defined(tree)}
    attributes = {name for tree in trees for name in private_attributes(tree)}
    assert attributes - own - parts == ATTRIBUTES | OF_PYTHON | OF_OTHER_LIBRARIES


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_names(tree: ast.Module) -> set[str]:
    """Return the private names of torch in a file, in full; parts of a name that stands there are left out."""
    stands_for: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {each.asname: each.name for each in node.names if each.asname}
            stands_for |= names | {each.name.partition(".")[0]: each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            stands_for |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}

    def in_full(node: ast.AST | None) -> str:
        """Return a dotted name, or what `getattr` and its like ask for by name, in full; empty for all else."""
        match node:
            case ast.Name(id=name):
                return stands_for.get(name, "")
            case ast.Attribute(value=holder, attr=name):
                return f"{in_full(holder)}.{name}"
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"),
                args=[holder, ast.Constant(value=name), *_],
            ):
                return f"{in_full(holder)}.{name}"
            case ast.BoolOp(values=[first, *_]):
                return in_full(first)
        return ""

    for node in ast.walk(tree):  # other names for private ones
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if targets and is_private(whole := in_full(getattr(node, "value", None))) and whole.startswith("torch."):
            stands_for |= {target.id: whole for target in targets if isinstance(target, ast.Name)}
    found = {*stands_for.values(), *map(in_full, ast.walk(tree))}
    found = {name for name in found if name.startswith("torch.") and is_private(name)}
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


def private_attributes(tree: ast.Module) -> Iterator[str]:
    """Yield the private attributes that a file asks objects for."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Attribute(attr=name)
                | ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=name), *_])
            ):
                if isinstance(name, str) and is_private(name):
                    yield name


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file defines or imports, attributes of objects among them."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.alias(name=name, asname=asname):
                yield asname or name


def test_a_private_name_is_found_however_it_is_written():
    written = """
import torch, torch._inner.deep as deep
from torch.library import Library
from torch.outer import _hidden as shown, inner as own
torch._made(torch.made())
called = own._below.it
other = getattr(torch._C, "_name", None) or None
print(torch._given, hasattr(torch._C, "_asked"))
_c = torch._C
_c._new()
Library.__name__, own.x
"""
    assert private_names(ast.parse(written)) == {
        "torch._inner.deep", "torch.outer._hidden", "torch._made", "torch.outer.inner._below.it", "torch._C._name",
        "torch._given", "torch._C._asked", "torch._C._new",
    }  # fmt: skip
