"""`export_kernels`: what the library launches from a file, without Python, is what was recorded."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
import dmattn_ops
from dmattn_ops.choice import arch as architectures
from dmattn_ops.dispatch import run
from dmattn_ops.kernels import native
from dmattn_ops.kernels.masks import launch as mask_kernels
from dmattn_ops.kernels.selection import launch as selection_kernels
from dmattn_ops.launching import driver, plan, plan_file, plans
from dmattn_ops.ops import schemas

SUPPORT = Path(__file__).parents[1] / "support"
LIBRARY = Path(native.__file__).parents[1] / native.LIBRARY
MAP = 0x70616D726F736E74

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=f"THE LIBRARY IS NOT TESTED: {native.reason()}"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="THE LIBRARY IS NOT TESTED WITH PLANS: there is no gcc"),
]


def as_on_a_gpu(patch):
    """Let tensors on the CPU take the way of those on a GPU, which is older than what kernels are compiled for."""
    with_a_gpu(patch)
    patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    patch.setattr(torch.cuda, "current_device", lambda: -1)
    patch.setattr(plans, "enter_thread", lambda: None)
    patch.setattr(run, "kernels_of_masks", lambda device: mask_kernels)
    patch.setattr(run, "kernels_of_lifetimes", lambda device: selection_kernels)


def with_a_gpu(patch):
    """Let there be a GPU."""
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(architectures, "_of_device", lambda index: architectures.KNOWN[75])
    patch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.fixture
def on_a_gpu(monkeypatch):
    as_on_a_gpu(monkeypatch)


def qkv(seqlen=300):
    torch.manual_seed(0)
    return [torch.randn(2, seqlen, heads, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)]


def trained():
    """Call forwards and backwards: dense, with words of a mask, and with intervals."""
    mask = torch.rand(2, 1, 300, 300) < 0.5
    for more in ({"is_causal": True}, {"mask": mask}, {"mask": dmattn_ops.dynamic_mask(torch.randn(2, 2, 300), 40)}):
        query, key, value = qkv()
        out = dmattn_ops.flash_dmattn_func(query.transpose(1, 2).contiguous().transpose(1, 2), key, value, **more)
        out.sum().backward()
    bias, sink = torch.randn(1, 2, 1, 300, requires_grad=True), torch.randn(4, requires_grad=True)
    dmattn_ops.flash_dmattn_func(*qkv(), bias=bias, sink=sink).sum().backward()


@pytest.fixture(scope="module", params=["9.0", "8.0"])
def exported(request, tmp_path_factory):
    """The architecture, a file of plans, and the calls that it serves."""
    path, calls = tmp_path_factory.mktemp("plans") / "some.dmattn", []
    with pytest.MonkeyPatch.context() as patch:
        as_on_a_gpu(patch)
        add = plan_file.PlanFile.add
        patch.setattr(plan_file.PlanFile, "add", lambda self, call: calls.append(call) or add(self, call))
        dmattn_ops.export_kernels(trained, path, arch=request.param)
    return request.param, path, calls


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory):
    """The folder of a library that stands in for libcuda."""
    folder = tmp_path_factory.mktemp("libcuda")
    command = ["gcc", "-shared", "-fPIC", "-O1", SUPPORT / "fake_libcuda.c", "-o", folder / "libcuda.so.1"]
    subprocess.run(command, check=True, timeout=100)
    return folder


def described(value):
    """Return an argument as `planned_calls.py` takes it."""
    if not isinstance(value, tuple):
        return value
    shape, strides, dtype, _ = value
    return tuple(shape), tuple(strides), str(dtype).removeprefix("torch.")


def made(libcuda, folder, path, calls, arch="9.0", counts="", **variables):
    """Return what the calls print, and what they launch."""
    torch.save(calls, folder / "calls.pt")
    log = folder / "log"
    environment = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "DMATTN_KERNELS")}
    environment |= {"LD_LIBRARY_PATH": str(libcuda), "FAKE_CUDA_SM": arch.replace(".", ""), **variables}
    environment |= {"FAKE_CUDA_LOG": str(log), "FAKE_CUDA_COUNTS": counts}
    command = [sys.executable, SUPPORT / "planned_calls.py", LIBRARY, path, folder / "calls.pt"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    launched = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [json.loads(line) for line in done.stdout.splitlines()], launched


def expected_word(kind, value, addresses):
    """Return the words of a parameter; of workspaces, whose addresses nobody knows, a name."""
    if kind != "map" and type(value) is not plan.Slot:
        return [driver.word(kind, value)]
    tensor, offset = value[:2]
    address = addresses[tensor] + offset if tensor < len(addresses) else (tensor, offset)
    if kind != "map":
        return [address]
    of, swizzle = value[2:]
    encoded, sizes, steps, box = driver.encoding(of.dtype, of.shape, of.strides, of.block)
    rank, filled = len(sizes), [0] * (5 - len(sizes))
    boxes = sum(size << 12 * dim for dim, size in enumerate(box))
    return [MAP, address, encoded << 16 | rank << 8 | swizzle, *sizes, *filled, *steps, *filled, boxes]


def same_words(got, want, workspaces):
    """Return whether the words of a parameter are as expected, and note where a workspace lies."""
    for word, expected in zip(got, want, strict=True):
        if isinstance(expected, tuple):
            tensor, offset = expected
            if word == 0 or workspaces.setdefault(tensor, word - offset) != word - offset:
                return False
        elif word != expected:
            return False
    return True


def launched_as_recorded(libcuda, folder, path, calls, arch):
    """Assert that the library launches what was recorded, and return the launches: call, step, shape and parameters."""
    wanted = []  # place of the call, launch
    for place, call in enumerate(calls):
        for step in call.plan.steps:
            if isinstance(step, plan.Relaunch):
                wanted.append((place, step, *plan.laid_out(step.compiled, step.grid, step.references)))
    counts = " ".join(str(len(parameters)) for *_, parameters in wanted)
    given = [(call.name, [described(value) for value in call.arguments]) for call in calls]
    said, launched = made(libcuda, folder, path, given, arch, counts)
    assert all(isinstance(addresses, list) for addresses in said), said
    assert len(launched) == len(wanted) >= len(calls)
    workspaces = [{} for _ in calls]
    for (name, grid, threads, shared, overlaps, words), (place, step, shape, parameters) in zip(
        launched, wanted, strict=True
    ):
        assert (name, tuple(grid), threads, shared, overlaps) == (step.compiled.metadata.name, *shape)
        for got, parameter in zip(words, parameters, strict=True):
            want = expected_word(*parameter, said[place])
            assert same_words(got, want, workspaces[place]), (name, parameter, got, want)
    return wanted


def test_the_library_launches_what_was_recorded(exported, libcuda, tmp_path):
    arch, path, calls = exported
    assert [call.name for call in calls].count("backward") == 4
    assert {"pack_mask", "key_lifetimes"} <= {call.name for call in calls}
    wanted = launched_as_recorded(libcuda, tmp_path, path, calls, arch)
    assert len(wanted) > 10
    overlapping, maps = (sum(shape.overlaps for *_, shape, _ in wanted), sum("map" in dict(p) for *_, p in wanted))
    assert (overlapping > 0 and maps > 0) == (arch == "9.0")


def test_what_no_plan_serves_is_refused_in_words(exported, libcuda, tmp_path):
    arch, path, calls = exported
    call = next(call for call in calls if call.name == "forward")
    arguments = [described(value) for value in call.arguments]
    shape, strides, dtype = arguments[0]
    names = list(call.signature.names)

    def changed(name, value):
        return call.name, [value if known == name else old for known, old in zip(names, arguments, strict=True)]

    others = [
        changed("query", ((1, *shape[1:]), strides, dtype)),
        changed("query", (shape, strides, "float16")),
        changed("softcap", 2.0),
        changed("band_lo", -7),
        changed("query", (shape, (*strides[:-1], 2), dtype)),
        changed("query", (shape, strides, dtype, 1)),
        ("rank_ids", [((2, 9), (9, 1), "int64")]),
    ]
    said, launched = made(libcuda, tmp_path, path, others, arch)
    known = plan_file.call_text(call.name, call.signature, call.arguments)
    assert launched == []
    for text, asked in zip(
        said[:5], ("[1,300,4,64]", "query=float16[", "softcap=2 ", "band_lo=-7", ",2)"), strict=True
    ):
        where = f"NotImplementedError: there is no plan for this call on SM {arch} with 132 multiprocessors. Asked:\n"
        assert where in text
        wanted, there = text.split(where)[1].split("There is:")
        assert asked.strip() in wanted and known in there and str(path) in there
    assert "without Python the addresses of tensors must be multiples of 16 bytes" in said[5]
    assert "rank_ids ids=int64[2,9]" in said[6] and "plans more, also of other operators" in said[6]
    [text], _ = made(libcuda, tmp_path, path, [(call.name, arguments)], "8.6")
    assert "on SM 8.6 with" in text and f"for SM {arch} with" in text
    [text], _ = made(libcuda, tmp_path, "", [(call.name, arguments)], arch)
    assert "no file: write one with dmattn_ops.export_kernels, and name it in DMATTN_KERNELS" in text


def test_files_are_found_by_the_variable_and_damaged_ones_are_refused(exported, libcuda, tmp_path):
    arch, path, calls = exported
    call = next(call for call in calls if call.name == "forward")
    given = [(call.name, [described(value) for value in call.arguments])]
    [addresses], launched = made(libcuda, tmp_path, "", given, arch, "0 0 0 0", DMATTN_KERNELS=str(path))
    assert isinstance(addresses, list) and launched
    data = path.read_bytes()
    for name, damaged in (
        ("half", data[: len(data) // 2]),
        ("newer", data.replace(b"kernels 2", b"kernels 9", 1)),
        ("of another library", data.replace(b"kernels 2 ", b"kernels 2 9.", 1)),
        ("", b""),
        ("twice", data + data[data.index(b"plan ") :]),
        (
            "huge",
            b" ".join([*data.split(b"\n", 2)[1].split(b" ")[:-1], b"99999999999\n"]).join(
                [data[: data.index(b"kernel ")], b""]
            ),
        ),
        ("below 0", data.replace(b"\nlaunch ", b"\nlaunch -", 1)),
    ):
        (tmp_path / f"damaged {name}").write_bytes(damaged)
    damage, mine = "is no file of dmattn_ops.export_kernels, or is damaged", f"dmattn_ops {dmattn_ops.__version__}"
    words = {
        "damaged half": damage,
        "damaged newer": f"has format 9 of dmattn_ops.export_kernels, and libdmattn.so of {mine} reads format 2: write the"
        " file with that version",
        "damaged of another library": f"was written by dmattn_ops 9.{dmattn_ops.__version__}, and libdmattn.so is that of {mine}:"
        " write the file with that version",
        "damaged ": damage,
        "damaged twice": damage,
        "damaged huge": damage,
        "damaged below 0": damage,
        "missing": "cannot be read",
    }
    [addresses], _ = made(
        libcuda, tmp_path, path, given, arch, "0 0 0 0", DMATTN_KERNELS=str(tmp_path / "damaged half")
    )
    assert isinstance(addresses, list), "a program that loads its file does not need those that the variable names"
    said, _ = made(libcuda, tmp_path, ":".join(str(tmp_path / name) for name in words), given, arch)
    assert said[:-1] == [f"ValueError: {tmp_path / name} {text}" for name, text in words.items()]
    assert "there is no plan for this call" in said[-1]


def test_the_same_calls_write_the_same_file(exported, on_a_gpu, tmp_path):
    arch, path, _ = exported
    dmattn_ops.export_kernels(trained, tmp_path / "again", arch=arch)
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


LENGTHS = (100, 128, 144, 160, 200, 272, 517)  # with and without a last part of a tile, multiples of 16 and others


@pytest.fixture(scope="module", params=["9.0", "8.0"])
def of_lengths(request, tmp_path_factory):
    """The architecture, a file of calls at several lengths, and these calls."""

    def of_length(seqlen):
        mask = dmattn_ops.dynamic_mask(torch.zeros(2, 2, seqlen), 40)
        return tuple(part.detach() for part in qkv(seqlen)), mask

    path, calls = tmp_path_factory.mktemp("plans") / "some.dmattn", []
    with pytest.MonkeyPatch.context() as patch:
        as_on_a_gpu(patch)
        add = plan_file.PlanFile.add
        patch.setattr(plan_file.PlanFile, "add", lambda self, call: calls.append(call) or add(self, call))

        def target(parts, mask):
            return dmattn_ops.flash_dmattn_func(*parts, mask)

        inputs = (of_length(seqlen) for seqlen in LENGTHS)
        dmattn_ops.export_kernels(target, path, inputs=inputs, arch=request.param)
    return request.param, path, calls


def test_calls_of_several_lengths_share_plans_and_are_launched_as_recorded(of_lengths, libcuda, tmp_path):
    arch, path, calls = of_lengths
    assert [call.name for call in calls].count("forward") == len(LENGTHS)
    heads = [line.split(b" ") for line in path.read_bytes().split(b"\n") if line.startswith(b"plan ")]
    assert sum(int(count) for _, count, *_ in heads) == len(calls)
    assert len(heads) < len(calls) / 2
    launched_as_recorded(libcuda, tmp_path, path, [*calls, *reversed(calls)], arch)


def test_refusals_name_the_lengths_that_a_file_has(of_lengths, libcuda, tmp_path):
    arch, path, calls = of_lengths
    forward = [call for call in calls if call.name == "forward"][1]
    names, arguments = forward.signature.names, [described(value) for value in forward.arguments]
    others = []
    for change in ({"query": 129}, {"query": 144}, {"query": 144, "key": 144, "value": 144}):  # not those of one call
        changed = list(arguments)
        for name, seqlen in change.items():
            (batch, _, heads, dim), strides, dtype = changed[names.index(name)]
            changed[names.index(name)] = ((batch, seqlen, heads, dim), (seqlen * heads * dim, *strides[1:]), dtype)
        others.append(("forward", changed))
    said, launched = made(libcuda, tmp_path, path, others, arch)
    assert launched == []
    for text in said:
        assert f"NotImplementedError: there is no plan for this call on SM {arch}" in text
        assert re.search(r"\n  forward query=bfloat16\[2,\{[^]]*\},4,64\]", text.split("There is:")[1])


def edited(path, old, new):
    """Write the file with other bytes in place of the first such ones."""
    data = path.read_bytes()
    assert old in data
    path.with_suffix(".edited").write_bytes(data.replace(old, new, 1))
    return path.with_suffix(".edited")


def test_damaged_columns_are_refused(of_lengths, libcuda, tmp_path):
    arch, path, calls = of_lengths
    given = [(calls[0].name, [described(value) for value in calls[0].arguments])]
    line = next(line for line in path.read_bytes().split(b"\n") if line.startswith(b"column "))
    plan_head = next(line for line in path.read_bytes().split(b"\n") if line.startswith(b"plan ") and b"$" in line)
    _, count, *more = line.split(b" ")
    for old, new in (
        (line, b" ".join((b"column", str(int(count) + 1).encode(), *more))),
        (line, b" ".join((b"column", b"99999999999", *more))),
        (line, line + b" 7"),
        (line + b"\n", b""),
        (plan_head, plan_head.replace(b"$", b"$9999999", 1)),
        (plan_head, plan_head.replace(b"$", b"$x", 1)),
        (plan_head, plan_head.replace(b"plan ", b"plan 9", 1)),
    ):
        damaged = edited(path, old, new)
        [said, _], _ = made(libcuda, tmp_path, damaged, given, arch)
        assert said == f"ValueError: {damaged} is no file of dmattn_ops.export_kernels, or is damaged", (old, new)


def test_columns_are_runs_of_equally_distant_numbers():
    assert plan_file._column((16, 32, 48, 48, 48, 48, -7)) == "column 7 3 16 16 3 48 0 3 -7 0 1\n"
    columns = {}
    calls = [(2, 100, 4, 100), (2, 200, 4, 200)]
    text = plan_file._plan("f x=float32[$,$] softmax_scale=0.125\nallocate int32 $ $", calls, columns)
    assert text == "plan 2 f x=float32[2,$0] softmax_scale=0.125\nallocate int32 4 $0\nend\n"
    assert columns == {(100, 200): 0}
    kept = "bfloat16 x=1e-05 y=-0 z=0.5 w=-inf 18446744073709551615 007"
    assert plan_file._WHOLE.sub("$", kept) == kept
    assert plan_file._WHOLE.findall("a=-7 [0,12,3]/(4,1) 16") == ["-7", "0", "12", "3", "4", "1", "16"]


def export(target, tmp_path, arch="9.0", **more):
    dmattn_ops.export_kernels(target, tmp_path / "some.dmattn", arch=arch, **more)


def test_what_takes_more_than_kernels_is_refused_in_words(on_a_gpu, tmp_path):
    query, key, value = (part.detach() for part in qkv(256))
    documents, mask = torch.arange(256).expand(2, -1) // 40, torch.ones(1, 1, 256, 256)
    refused = {
        "rank_ids: it takes operators of torch": lambda: dmattn_ops.prepare_mask(documents=documents),
        "operators of torch (ne)": lambda: dmattn_ops.prepare_mask(mask.int()),
        "(aten.zero_.default)": lambda: dmattn_ops.flash_dmattn_func(query[:0], key[:0], value[:0]),
        "pack_mask: it takes no kernel": lambda: dmattn_ops.prepare_mask(mask[:0] > 0),
    }
    for words, target in refused.items():
        with pytest.raises(NotImplementedError, match="export_kernels cannot write this call of") as raised:
            export(target, tmp_path)
        assert words in str(raised.value)
        assert plans._exported is None and not (tmp_path / "some.dmattn").exists()


def test_bad_arguments_are_refused(monkeypatch, tmp_path):
    with_a_gpu(monkeypatch)
    with pytest.raises(ValueError, match="target made no call of an operator of dmattn_ops on a GPU"):
        export(lambda: dmattn_ops.flash_dmattn_func(*(part.detach() for part in qkv(9))), tmp_path)
    with pytest.raises(ValueError, match=r"arch must be one of 7\.5, 8\.0"):
        export(print, tmp_path, "mine")
    with pytest.raises(TypeError, match="target must be a function or an ExportedProgram, got int"):
        export(7, tmp_path)
    with pytest.raises(ValueError, match="inputs are those of one target, got 2 targets"):
        export([print, print], tmp_path, inputs=[()])
    with pytest.raises(TypeError, match="inputs must hold tuples of arguments, got Tensor at place 1"):
        export(lambda *given: None, tmp_path, inputs=[(), torch.ones(3)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="runs its target on a GPU, and there is none"):
        export(print, tmp_path)


class Model(torch.nn.Module):
    def forward(self, query, key, value):
        return dmattn_ops.flash_dmattn_func(query, key, value, is_causal=True)


def forwards_in(path):
    return set(re.findall(rb"\nplan (\d+ forward query=\S*) ", path.read_bytes()))


def test_an_exported_program_is_run_with_its_example_inputs(on_a_gpu, tmp_path):
    given = tuple(part.detach() for part in qkv())
    exported = torch.export.export(Model(), given)
    export(exported, tmp_path)
    assert forwards_in(tmp_path / "some.dmattn") == {b"1 forward query=bfloat16[2,300,4,64]"}
    export([exported, lambda: dmattn_ops.flash_dmattn_func(*(part[:1] for part in given))], tmp_path)
    assert forwards_in(tmp_path / "some.dmattn") == {
        b"1 forward query=bfloat16[%d,300,4,64]" % batch for batch in (1, 2)
    }


def test_an_exported_program_of_any_length_is_run_with_the_inputs_that_are_given(on_a_gpu, tmp_path):
    inputs = [tuple(part.detach() for part in qkv(seqlen)) for seqlen in (300, 310, 200, 300)]
    length = torch.export.Dim("length", min=2)
    exported = torch.export.export(Model(), inputs[0], dynamic_shapes=({1: length},) * 3)
    export(exported, tmp_path, inputs=inputs)
    data = (tmp_path / "some.dmattn").read_bytes()
    [(head, column)] = re.findall(rb"\nplan (\d+) forward query=bfloat16\[2,\$(\d+),4,64\]", data)
    assert head == b"3"
    assert re.findall(rb"\n(column .*)", data)[int(column)] == b"column 3 2 200 100 2 310 0 1"


def test_texts_of_calls_leave_out_defaults_and_what_says_nothing():
    signature = schemas.SIGNATURES["list_tiles"]
    dense, apart, one = (
        (shape, strides, torch.int32, -1) for shape, strides in (((2, 9), (9, 1)), ((2, 9), (10, 1)), ((1, 9), (77, 1)))
    )
    texts = [plan_file.call_text("list_tiles", signature, (None, of, 9, -(1 << 30), 3)) for of in (dense, apart, one)]
    assert texts == [
        f"list_tiles k_segments=int32{of} seqlen_q=9 band_hi=3" for of in ("[2,9]", "[2,9]/(10,1)", "[1,9]")
    ]
