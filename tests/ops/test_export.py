"""Exported programs: both tracers, dynamic sizes, training afterwards, saved and run in another process."""

import inspect
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch._inductor.codegen import cpp_wrapper_cpu
from torch.export import Dim
from torch.utils import _pytree as pytree

import dmattn_ops
from dmattn_ops import TileMask
from tests.support import block, call_inputs

BATCH, SEQLEN = Dim("batch", min=2, max=64), Dim("seqlen", min=129, max=1 << 16)


def nodes(program):
    return [str(node.target) for node in program.graph.nodes if str(node.target).startswith("dmattn.")]


class Masked(torch.nn.Module):
    """Attention with a mask and a bias given by the caller."""

    def forward(self, query, key, value, mask, bias):
        return dmattn_ops.flash_dmattn_func(query, key, value, mask, bias, is_causal=True, window_size=(64, 0))


def masked_inputs(batch, seqlen):
    inputs = call_inputs.qkv(batch, seqlen, heads_kv=2, requires_grad=False)
    mask = call_inputs.random_mask(batch, 1, seqlen, seqlen)
    return *inputs, mask, call_inputs.random_bias(1, 4, 1, seqlen, requires_grad=False)


SIZES = [{0: BATCH, 1: SEQLEN}] * 3 + [{0: BATCH, 2: SEQLEN, 3: SEQLEN}, {3: SEQLEN}]


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_takes_other_sizes(strict):
    program = torch.export.export(Masked(), masked_inputs(3, 140), dynamic_shapes=tuple(SIZES), strict=strict)
    assert nodes(program) == ["dmattn.pack_mask.default", "dmattn.forward.default"]
    for batch, seqlen in ((3, 140), (2, 129), (5, 300)):
        inputs = masked_inputs(batch, seqlen)
        assert torch.equal(program.module()(*inputs), Masked()(*inputs))
    lowered = program.run_decompositions()
    assert nodes(lowered) == nodes(program)
    assert torch.equal(lowered.module()(*masked_inputs(4, 150)), Masked()(*masked_inputs(4, 150)))


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_block_still_trains(strict):
    torch.manual_seed(0)
    module, hidden = block.Block(), torch.randn(3, 140, 64)
    program = torch.export.export(module, (hidden,), dynamic_shapes=({0: BATCH, 1: SEQLEN},), strict=strict)
    exported, other = program.module(), torch.randn(2, 200, 64)
    for trained in (module, exported):
        trained(other).square().sum().backward()
    expected = dict(module.named_parameters())
    for name, parameter in exported.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad)


class Packed(torch.nn.Module):
    """Attention of packed sequences."""

    def forward(self, query, key, value, cu_seqlens, mask):
        lengths = (cu_seqlens, cu_seqlens, 4096, 4096)
        return dmattn_ops.flash_dmattn_varlen_func(query, key, value, *lengths, mask, is_causal=True, return_lse=True)


def test_packed_sequences_export_with_any_number_and_length():
    def inputs(lengths):
        rows, (offsets, *_) = call_inputs.packed(lengths, lengths, requires_grad=False)
        return *(row.detach() for row in rows), offsets, call_inputs.random_mask(1, sum(lengths))

    total, sequences = Dim("total", min=2), Dim("sequences", min=2)
    sizes = ({0: total}, {0: total}, {0: total}, {0: sequences}, {1: total})
    program = torch.export.export(Packed(), inputs([5, 9]), dynamic_shapes=sizes)
    assert nodes(program) == ["dmattn.varlen_forward.default"]
    for lengths in ([5, 9], [3, 40, 12], [20, 0, 7, 31]):
        torch.testing.assert_close(program.module()(*inputs(lengths)), Packed()(*inputs(lengths)), rtol=0, atol=0)


class Prepared(torch.nn.Module):
    """Attention with a prepared mask, which is an input."""

    def forward(self, query, key, value, mask: TileMask):
        return dmattn_ops.flash_dmattn_func(query, key, value, mask)


def test_a_saved_program_runs_in_another_process(tmp_path):
    query, key, value, mask, bias = masked_inputs(3, 140)
    torch.export.save(
        torch.export.export(Masked(), (query, key, value, mask, bias), dynamic_shapes=tuple(SIZES)),
        tmp_path / "masked.pt2",
    )
    prepared = dmattn_ops.prepare_mask(mask, is_causal=True)
    torch.export.save(torch.export.export(Prepared(), (query, key, value, prepared)), tmp_path / "prepared.pt2")
    other = masked_inputs(2, 200)
    expected = Masked()(*other), Prepared()(query, key, value, prepared)
    torch.save((other, (query, key, value), mask, expected), tmp_path / "inputs.pt")
    code = """
import sys, torch, dmattn_ops
folder = sys.argv[1]
other, inputs, mask, expected = torch.load(f"{folder}/inputs.pt")
masked, prepared = (torch.export.load(f"{folder}/{name}.pt2").module() for name in ("masked", "prepared"))
assert torch.equal(masked(*other), expected[0])
assert torch.equal(prepared(*inputs, dmattn_ops.prepare_mask(mask, is_causal=True)), expected[1])
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


LATER = """
import sys
from importlib.machinery import PathFinder, SourceFileLoader

class Loader(SourceFileLoader):
    def get_code(self, name):
        text = self.get_source(name)
        now = 'APPENDED = ", bool batch_invariant=False"'
        assert text.count(now) == 1
        return compile(text.replace(now, now[:-1] + ', float warmth=1.0, int? age=None"'), self.path, "exec")

class Finder:
    def find_spec(name, path, target=None):
        if name == "dmattn_ops.ops.schemas":
            spec = PathFinder.find_spec(name, path)
            spec.loader = Loader(spec.loader.name, spec.loader.path)
            return spec

sys.meta_path.insert(0, Finder)
import torch, dmattn_ops
from torch.utils._python_dispatch import TorchDispatchMode

class Calls(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function is torch.ops.dmattn.backward.default:
            seen.append(dmattn_ops.ops.schemas.SIGNATURES["backward"].read(arguments))
        return function(*arguments, **(keywords or {}))

seen = []
folder = sys.argv[1]
inputs, expected, gradients = torch.load(f"{folder}/inputs.pt")
leaves = [tensor.requires_grad_() for tensor in inputs[:3]]
def check(out, warmth, age):
    assert torch.equal(out, expected)
    with Calls():
        found = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert all(map(torch.equal, found, gradients))
    read = seen.pop()
    assert (read.needs_dbias, read.needs_dsink, read.warmth, read.age) == (False, False, warmth, age)
check(torch.export.load(f"{folder}/masked.pt2").module()(*leaves, *inputs[3:]), 1.0, None)
call = lambda: dmattn_ops.flash_dmattn_func(*leaves, inputs[3], inputs[4], is_causal=True, window_size=(64, 0))
check(call(), 1.0, None)
check(torch.compile(call, fullgraph=True, backend="aot_eager")(), 1.0, None)
prepared = dmattn_ops.prepare_mask(inputs[3], is_causal=True, window_size=(64, 0))
lists = {name: getattr(prepared, name) for name in ("row_tiles", "col_tiles", "row_bits", "col_bits")}
check(torch.ops.dmattn.forward(*leaves, inputs[4], **lists, band_lo=-64, band_hi=0, warmth=0.5, age=3)[0], 0.5, 3)
"""


def test_a_saved_program_trains_with_a_version_that_appended_numbers(tmp_path):
    inputs = masked_inputs(3, 140)
    program = torch.export.export(Masked(), inputs, dynamic_shapes=tuple(SIZES))
    torch.export.save(program, tmp_path / "masked.pt2")
    leaves = [tensor.requires_grad_() for tensor in inputs[:3]]
    out = Masked()(*inputs)
    gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
    torch.save(([tensor.detach() for tensor in inputs], out.detach(), gradients), tmp_path / "inputs.pt")
    done = subprocess.run([sys.executable, "-c", LATER, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_compiled_package_runs_where_the_library_is_imported(tmp_path):
    with torch.no_grad():
        program = torch.export.export(Masked(), masked_inputs(3, 140), dynamic_shapes=tuple(SIZES))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "masked.pt2"))
    inputs = masked_inputs(2, 200)
    torch.save((inputs, Masked()(*inputs)), tmp_path / "inputs.pt")
    code = """
import sys, torch, dmattn_ops
inputs, expected = torch.load(f"{sys.argv[1]}/inputs.pt")
assert torch.equal(torch._inductor.aoti_load_package(sys.argv[2])(*inputs), expected)
"""
    command = [sys.executable, "-c", code, str(tmp_path), path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


class Masks(torch.nn.Module):
    """Attention with prepared masks of every kind, and parts of them, all of which are inputs."""

    def forward(self, query, masks: dict[str, TileMask]):
        outs = [dmattn_ops.flash_dmattn_func(query, query, query, mask) for mask in masks.values()]
        return [*outs, masks["intervals"].queries(3, 9).to_dense(), masks["segments"].keys(3, 9).to_dense()]


def masks_of_every_kind(seqlen, window, at_most):
    """Return masks whose tensors are the same each time, and with them the same shapes."""
    band = {"window_size": (window, 0)}
    keep, ids = torch.ones(1, 1, seqlen, seqlen, dtype=torch.bool), torch.arange(seqlen)[None] // (seqlen // 2)
    start, end = torch.zeros(1, 1, seqlen, dtype=torch.int32), torch.full((1, 1, seqlen), seqlen, dtype=torch.int32)
    made = {
        "bits": dmattn_ops.prepare_mask(keep, **band),
        "segments": dmattn_ops.prepare_mask(documents=ids, **band),
        "padding": dmattn_ops.prepare_mask(ids == 0, seqlen_q=seqlen, **band),
        "intervals": dmattn_ops.prepare_mask(intervals=(start, end), at_most=at_most, seqlen_q=seqlen, **band),
        "dynamic": dmattn_ops.dynamic_mask(torch.arange(0.0, seqlen).view(1, 1, -1), 5),
    }
    return {name: pytree.tree_map(lambda leaf: leaf, mask) for name, mask in made.items()}


def with_other_numbers(masks):
    """Yield masks in which one integer among the leaves of one is another one."""
    for name, mask in masks.items():
        leaves, tree = pytree.tree_flatten(mask)
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                other = not leaf if isinstance(leaf, bool) else leaf - 1 if leaf > 0 else leaf + 1
                changed = [*leaves[:place], other, *leaves[place + 1 :]]
                yield f"{name} {place}", {**masks, name: pytree.tree_unflatten(changed, tree)}
        yield f"{name} at_most", {**masks, name: replace(mask, at_most=16 if mask.at_most is None else None)}
        longer = torch.empty(mask.seqlen_q + 1, mask.seqlen_k, 0, dtype=torch.uint8)
        if mask.kind == "intervals":
            yield f"{name} lengths", {**masks, name: replace(mask, lengths=longer)}


@pytest.mark.skipif(
    "CHECK(aoti_torch_proxy_executor_call_function" not in inspect.getsource(cpp_wrapper_cpu),
    reason="packages of this torch go on after an error of an operator (pytorch/pytorch#180884)",
)
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_compiled_package_never_computes_with_the_numbers_of_another_mask(tmp_path, strict):
    query, masks = torch.randn(1, 16, 2, 8), masks_of_every_kind(16, 4, 16)
    with torch.no_grad():
        program = torch.export.export(Masks(), (query, masks), strict=strict)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "masks.pt2"))
    package = torch._inductor.aoti_load_package(path)
    for out, expected in zip(package(query, masks), Masks()(query, masks), strict=True):
        assert torch.equal(out, expected)
    others = dict(with_other_numbers(masks)) | {
        f"{name} window {window}": {**masks, name: masks_of_every_kind(16, window, 16)[name]}
        for name in ("bits", "segments", "padding", "intervals")
        for window in (3, 9)
    }
    assert len(others) == 3 * 4 + 2 * 6 + 4 * 2
    silent = []
    for name, other in others.items():
        try:
            package(query, other)
        except RuntimeError:
            continue
        silent.append(name)
    assert not silent
    for out, expected in zip(package(query, masks), Masks()(query, masks), strict=True):
        assert torch.equal(out, expected)


def test_an_exported_program_says_which_mask_it_was_exported_with():
    part, lengths = torch.zeros(1, 1, 4, dtype=torch.int32), torch.empty(4, 4, 0)
    same = torch.ops.dmattn.mask_as_exported
    for numbers in ((-3, 0, 5, True), (-(1 << 30), 1 << 30, None, False), (-(1 << 31), -7, 0, True)):
        made = dmattn_ops.masks.tile_mask.made(
            lengths=lengths,
            end=part,
            band_lo=numbers[0],
            band_hi=numbers[1],
            at_most=numbers[2],
            from_bottom_right=numbers[3],
        )
        sizes = pytree.tree_flatten(made)[0][-1]
        assert sizes.numel() == 0 and torch.equal(same(part, lengths, sizes, 4, 4, *numbers), part)
        numbers_of = "band_lo -2, band_hi 1, at_most 9, from_bottom_right True"
        words = rf"the program was exported with a mask of lengths \(4, 4\), {numbers_of}, got one of"
        with pytest.raises(ValueError, match=words):
            same(part, lengths, sizes, 4, 4, -2, 1, 9, True)
    torch.library.opcheck(same, (part, lengths, sizes, 4, 4, *numbers), test_utils=("test_schema", "test_faketensor"))


def test_a_joint_graph_holds_both_operators():
    from torch._functorch.aot_autograd import aot_export_joint_simple

    inputs = call_inputs.qkv()
    joint = aot_export_joint_simple(
        lambda query, key, value: [dmattn_ops.flash_dmattn_func(query, key, value)], inputs, trace_joint=True
    )
    targets = [str(node.target) for node in joint.graph.nodes if str(node.target).startswith("dmattn.")]
    assert targets == ["dmattn.forward.default", "dmattn.backward.default"]
