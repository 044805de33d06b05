"""Which row of `config.py` a problem gets on each architecture; what `explain` and the environment show of it."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import dmattn_ops
from dmattn_ops.call import Call, Demand, Gradients, Mask, Saved, Takes, plain_options
from dmattn_ops.choice import arch, choose, config
from dmattn_ops.dispatch import run as dispatch
from dmattn_ops.kernels import native, reference

LINE = re.compile(
    r"FLASH_DMATTN_PROFILE: HeadDim=\d+, Arch=(SM\d+\.\d|CPU), SeqQ=\d+, SeqK=\d+, Batch=\d+,"
    r" Choice=(SM\d+|CPU)_(LargeBlock|MediumBlock|LongSeq|StandardSeq|Standard|LowMem|Legacy)_\d+x\d+(_VinRegs)?"
)


def labels(rows, itemsize=2):
    def taken_by_all(kernel):
        return []

    lines = []
    for sm, known in arch.KNOWN.items():
        choices = []
        for dim in (32, 64, 96, 128, 192, 256, 512, 1024):
            choice = choose.choose(rows, known, Demand(2, 16, 4096, 4096, dim, dim, itemsize), taken_by_all)
            choices.append(f"{choice.row.kernel}:{choice.label.split('_', 1)[1]}")
        lines.append(f"{sm}: {' '.join(choices)}")
    return "\n".join(lines)


SIZES = {  # batch, heads, length
    "few": (1, 8, 1024),
    "few, long": (1, 1, 8192),
    "short": (8, 16, 2048),
    "4096": (2, 16, 4096),
    "8192": (2, 16, 8192),
}


def labels_by_size(rows, sms, dims):
    lines = []
    for sm in sms:
        for dim in dims:
            choices = []
            for name, (batch, heads, seqlen) in SIZES.items():
                demand = Demand(batch, heads, seqlen, seqlen, dim, dim, 2)
                choice = choose.choose(rows, arch.KNOWN[sm], demand, lambda kernel: [])
                choices.append(f"{name}: {choice.label.split('_', 1)[1]}")
            lines.append(f"{sm} D{dim}  " + "  ".join(choices))
    return "\n".join(lines)


@pytest.mark.parametrize("rows", [config.FORWARD, config.BACKWARD], ids=["forward", "backward"])
@pytest.mark.parametrize("sm", [*arch.KNOWN, 87, 103, 121, 130])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_architecture_has_a_row_for_every_head_dimension(rows, sm, itemsize):
    for dim in (1, 8, 31, 64, 65, 128, 129, 256, 257, 512, 1024):
        on = arch.parse(f"{sm // 10}.{sm % 10}")
        choice = choose.choose(rows, on, Demand(1, 1, 1, 1, dim, 1, itemsize), lambda kernel: [])
        assert choice.row.dim >= dim and choice.row.shared_memory <= on.shared_memory


def test_a_refusing_kernel_gives_way_and_its_reason_is_kept():
    demand = Demand(1, 1, 128, 128, 64, 64, 2)
    best = choose.choose(config.BACKWARD, arch.KNOWN[90], demand, lambda kernel: [])
    refused = choose.choose(
        config.BACKWARD, arch.KNOWN[90], demand, lambda kernel: ["dropout"] if kernel == best.row.kernel else []
    )
    assert refused.row.kernel != best.row.kernel
    assert any(reason == "dropout" for _, reason in refused.passed_over)


def test_when_every_kernel_refuses_the_error_names_every_reason():
    demand = Demand(1, 1, 128, 128, 64, 64, 2)
    with pytest.raises(NotImplementedError, match="first reason; second reason"):
        choose.choose(config.FORWARD, arch.KNOWN[80], demand, lambda kernel: ["first reason", "second reason"])


@pytest.mark.parametrize(
    "version", ["", "nine", "9", "9.", "9.0.1", "9.x", "-9.0", "5.2", "52", "sm_", "sm__90", "9000", "٩.٠"]
)
def test_a_version_that_names_no_architecture_is_refused(version):
    with pytest.raises(ValueError, match=r"DMATTN_ARCH must be .*got '" + re.escape(version)):
        arch.parse(version)


def test_the_environment_names_the_architecture_of_every_gpu(monkeypatch):
    monkeypatch.setenv("DMATTN_ARCH", "8.6")
    on = arch.current(torch.device("cuda", 0))  # asks no driver
    assert (on.sm, on.shared_memory, on.emulated) == (86, 101376, True)
    large = replace(config.HOPPER_BACKWARD[0], sm=86)
    suited, passed_over = choose.candidates((large,), on, Demand(1, 1, 128, 128, 64, 64, 2))
    assert not suited and "SM8.6 gives a block 101376" in passed_over[0].reason
    monkeypatch.setenv("DMATTN_ARCH", "")
    assert arch.forced() is None


@pytest.mark.parametrize("version", ["8.6", "86", "sm_86", "sm86", " 8.6 ", "SM8.6"])
def test_an_architecture_has_several_spellings(version, monkeypatch):
    query = torch.randn(1, 8, 1, 16)
    monkeypatch.setenv("DMATTN_ARCH", version)
    assert arch.current(torch.device("cuda", 0)) == arch.parse("8.6")
    assert dmattn_ops.explain(query, query, query).forward.arch == "SM8.6"
    assert arch.parse("100").sm == arch.parse("10.0").sm == 100


@pytest.mark.parametrize("version", ["nine", "9", "5.2"])
def test_a_wrong_architecture_is_refused_by_the_name_that_it_came_by(version, monkeypatch):
    query = torch.randn(1, 8, 1, 16)
    with pytest.raises(ValueError, match=f"^arch must be .*got '{version}'"):
        dmattn_ops.explain(query, query, query, arch=version)
    monkeypatch.setenv("DMATTN_ARCH", version)
    with pytest.raises(ValueError, match=f"^DMATTN_ARCH must be .*got '{version}'"):
        dmattn_ops.explain(query, query, query)
    with pytest.raises(ValueError, match=f"^DMATTN_ARCH must be .*got '{version}'"):
        arch.current(torch.device("cuda", 0))


def test_an_architecture_that_is_no_string_is_refused():
    query = torch.randn(1, 8, 1, 16)
    with pytest.raises(TypeError, match=r"^arch must be a string such as .*, got float"):
        dmattn_ops.explain(query, query, query, arch=9.0)


def test_explain_reads_a_call_as_the_call_does(monkeypatch, tmp_path):
    query = torch.randn(1, 256, 4, 64)
    monkeypatch.setenv("DMATTN_RECORD", str(tmp_path / "record"))
    with torch.autocast("cpu", torch.bfloat16):
        assert "16" in dmattn_ops.explain(query, query, query, arch="8.0").forward.swept
    half = query.bfloat16()
    try:
        torch.use_deterministic_algorithms(True)
        asked = dmattn_ops.explain(half, half, half, arch="9.0").backward
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == dmattn_ops.explain(half, half, half, deterministic=True, arch="9.0").backward
    for wrong, words in (
        ({"softcap": -1.0}, "softcap must be finite"),
        ({"dropout_p": 2.0}, "dropout_p must be"),
        ({"bias": torch.zeros(3, 3, 3, 3)}, "bias must have shape"),
        ({"mask": torch.ones(1, 3, 256, 256, dtype=torch.bool)}, "mask must have shape"),
    ):
        with pytest.raises(ValueError, match=words):
            dmattn_ops.explain(query, query, query, **wrong)
    assert not (tmp_path / "record").exists()


@pytest.mark.parametrize(
    ("batch", "heads", "seqlen", "causal", "rows"),
    [
        (1, 16, 2048, True, 128),  # 176 tiles of 192 for 132 multiprocessors: all wait for the longest
        (1, 16, 2048, False, 128),  # two rounds of either size
        (1, 8, 1000, True, 128),
        (64, 12, 512, False, 192),
        (4, 32, 4096, True, 192),
    ],
)
def test_the_sm90_forward_takes_small_tiles_where_the_last_multiprocessor_is_done_sooner(
    batch, heads, seqlen, causal, rows
):
    query = torch.empty(batch, seqlen, heads, 64, dtype=torch.bfloat16)
    shown = str(dmattn_ops.explain(query, query, query, is_causal=causal, arch="9.0"))
    assert f"block_m={rows}, block_n=128, stages=2" in shown


def test_explain_takes_packed_sequences_and_says_what_the_launchers_get(monkeypatch):
    query, key = torch.randn(300, 4, 64), torch.randn(300, 2, 64)
    offsets = torch.tensor([0, 100, 300], dtype=torch.int32)
    packed = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 200, "max_seqlen_k": 200}
    keep = torch.rand(1, 300) > 0.5
    chosen = []
    for direction in ("forward", "backward"):
        choose_one = getattr(dispatch, f"{direction}_choice")
        monkeypatch.setattr(
            dispatch,
            f"{direction}_choice",
            lambda *given, choose=choose_one: chosen.append(choose(*given)) or chosen[-1],
        )
    query.requires_grad_()
    for causal_from, mask in (("bottom_right", None), ("top_left", keep)):
        options = {"is_causal": True, "causal_from": causal_from}
        told = dmattn_ops.explain(query, key, key, mask, **packed, **options)
        chosen.clear()
        dmattn_ops.flash_dmattn_varlen_func(query, key, key, mask=mask, **packed, **options).sum().backward()
        assert [choice.label for choice in chosen] == [told.forward.choice, told.backward.choice]
        keys = "j <= i" if mask is None else "the keys j <= i that the mask shows"
        assert told.visible == f"{keys} in each sequence, j counted from its {'last' if mask is None else 'first'} key"
        assert ("segment ids" in told.mask) == (mask is not None)
    for arch_name, tier in (("9.0", "SM90"), ("8.0", "SM80")):
        told = dmattn_ops.explain(query.detach().bfloat16(), key.bfloat16(), key.bfloat16(), **packed, arch=arch_name)
        assert told.forward.choice.startswith(tier) and told.backward.choice.startswith(tier)
    with pytest.raises(ValueError, match=r"^max_seqlen_k must be given as well"):
        dmattn_ops.explain(query, key, key, **{**packed, "max_seqlen_k": None})
    with pytest.raises(ValueError, match=r"^max_seqlen_q must be at least the longest sequence, 200, got 199"):
        dmattn_ops.explain(query, key, key, **{**packed, "max_seqlen_q": 199})
    with pytest.raises(ValueError, match=r"^query must have 4 dimensions, got 3"):
        dmattn_ops.explain(query, key, key)


def test_without_gluon_portable_kernels_take_the_call(monkeypatch):
    query = torch.randn(1, 256, 4, 64, dtype=torch.bfloat16)
    monkeypatch.setitem(sys.modules, "dmattn_ops.kernels.hopper.forward.launch", None)
    launch = dmattn_ops.explain(query, query, query, arch="9.0").forward
    assert launch.kernel == "portable"
    assert any("needs another Triton" in reason for reason in launch.passed_over)


def test_intervals_whose_lists_would_be_too_long_are_left_to_kernels_that_need_none(monkeypatch):
    interval_lists = pytest.importorskip("dmattn_ops.kernels.interval_lists")
    start = torch.zeros(1, 1, 512, dtype=torch.int32)
    mask = dmattn_ops.prepare_mask(intervals=(start, start + 300), seqlen_q=512)
    for dim, kernel in ((64, "hopper"), (256, "hopper256")):
        query = torch.randn(1, 512, 4, dim, dtype=torch.bfloat16)
        with monkeypatch.context() as patch:
            found = dmattn_ops.explain(query, query, query, mask, arch="9.0")
            assert (found.forward.kernel, found.backward.kernel) == ("hopper", kernel)
            patch.setattr(interval_lists, "_LONGEST_LISTS", 0)
            found = dmattn_ops.explain(query, query, query, mask, arch="9.0")
        for launch in (found.forward, found.backward):
            assert launch.kernel == "portable"
            assert any("lists of tiles" in reason and "too long" in reason for reason in launch.passed_over)


def test_explain_follows_the_environment_unless_it_is_told_an_architecture(monkeypatch):
    query = torch.randn(1, 8, 1, 16)
    monkeypatch.setenv("DMATTN_ARCH", "8.6")
    assert dmattn_ops.explain(query, query, query).forward.arch == "SM8.6"
    assert dmattn_ops.explain(query, query, query, arch="8.0").forward.arch == "SM8.0"


def test_an_unknown_architecture_gets_the_limits_of_the_nearest_older_one():
    assert arch.parse("10.3").shared_memory == arch.KNOWN[100].shared_memory
    assert arch.parse("13.0").shared_memory == arch.KNOWN[120].shared_memory


def test_explain_names_both_directions_and_reads_well():
    query = torch.randn(1, 256, 4, 64, dtype=torch.bfloat16)
    explanation = dmattn_ops.explain(query, query, query, is_causal=True, arch="8.6")
    assert explanation.backward.arch == "SM8.6" and explanation.backward.choice.startswith("SM86_")
    text = str(explanation)
    assert "forward" in text and "block_m=" in text and "j <= i" in text


@pytest.mark.parametrize(
    ("window_size", "said"),
    [((None, None), "every key"), ((None, 0), "j <= i"), ((7, 3), "i - 7 <= j <= i + 3"), ((0, None), "i <= j")],
)
def test_explain_says_which_keys_a_window_shows(window_size, said):
    query = torch.randn(1, 64, 2, 16)
    assert dmattn_ops.explain(query, query, query, window_size=window_size).visible == said


def test_explain_tells_the_names_of_others():
    query = torch.randn(1, 64, 2, 16)
    with pytest.raises(
        TypeError, match=r"^explain\(\) got an unexpected keyword argument 'causal': here it is called is_causal$"
    ):
        dmattn_ops.explain(query, query, query, causal=True)


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (torch.ones(1, 1, 64, 64, dtype=torch.bool), "every key that the mask shows"),
        (dmattn_ops.prepare_mask(documents=torch.zeros(1, 64).int()), "every key that the mask shows"),
        (
            dmattn_ops.dynamic_mask(torch.randn(1, 2, 64), 5, keep_last=2),
            "the keys j <= i that the mask shows, at most 7 for each query",
        ),
    ],
    ids=["bits", "documents", "dynamic"],
)
def test_explain_says_that_a_mask_hides_keys(mask, said):
    query = torch.randn(1, 64, 2, 16)
    assert dmattn_ops.explain(query, query, query, mask).visible == said


def test_a_deterministic_backward_on_hopper_orders_its_additions_unless_tiles_are_listed():
    pytest.importorskip("triton.experimental.gluon")
    query = torch.randn(1, 256, 4, 64, dtype=torch.bfloat16)
    mask = torch.ones(1, 1, 256, 256, dtype=torch.bool).tril()
    dense = dmattn_ops.explain(query, query, query, is_causal=True, deterministic=True, arch="9.0").backward
    masked = dmattn_ops.explain(query, query, query, mask, deterministic=True, arch="9.0").backward
    assert (dense.kernel, masked.kernel) == ("hopper", "hopper256")
    assert any("deterministic accumulation of dq over listed tiles" in reason for reason in masked.passed_over)


@pytest.mark.parametrize(
    ("dim", "dtype", "version", "kernel"),
    [
        (320, torch.float32, "9.0", "portable"),
        (1024, torch.bfloat16, "8.0", "portable"),
        (1024, torch.float32, "9.0", "reference"),
        (1024, torch.bfloat16, "8.6", "reference"),
    ],
)
@pytest.mark.filterwarnings("ignore:dmattn_ops has no kernels")
def test_wide_heads_run_where_a_tile_fits_and_else_on_plain_operations(dim, dtype, version, kernel):
    query = torch.zeros(1, 8, 1, dim, dtype=dtype)
    explanation = dmattn_ops.explain(query, query, query, arch=version)
    for launch in (explanation.forward, explanation.backward):
        assert launch.kernel == kernel
        assert any("head dimension" in reason for reason in launch.passed_over)
    assert kernel == "portable" or "plain torch operations, where no kernel fits" in str(explanation)


@pytest.mark.parametrize(
    ("heads", "seqlen_q", "kernel"), [(2, 2, "portable"), (33, 128, "portable"), (64, 2, "hopper")]
)
def test_few_blocks_of_queries_over_many_keys_share_their_walk(heads, seqlen_q, kernel):
    query, key = (torch.empty(1, size, heads, 128, dtype=torch.bfloat16) for size in (seqlen_q, 4096))
    launch = dmattn_ops.explain(query, key, key, arch="9.0").forward
    assert launch.kernel == kernel
    assert any("leave most SMs idle" in reason for reason in launch.passed_over) == (kernel == "portable")


@pytest.mark.parametrize("batch", [1, 64])
def test_one_query_of_each_head_has_a_kernel_of_its_own(batch):
    query, key = (
        torch.empty(batch, 1, 8, 128, dtype=torch.bfloat16),
        torch.empty(batch, 300, 2, 128, dtype=torch.bfloat16),
    )
    assert dmattn_ops.explain(query, key, key, arch="9.0").forward.kernel == "decode"
    launch = dmattn_ops.explain(query.expand(-1, 2, -1, -1), key, key, arch="9.0").forward
    assert launch.kernel != "decode" and any("2 queries of a head are not one" in each for each in launch.passed_over)
    wide = dmattn_ops.explain(query.float(), key.float(), key.float(), arch="9.0").forward
    assert wide.kernel == "portable"


def test_the_device_itself_says_how_many_multiprocessors_there_are_to_fill(monkeypatch):
    query, key = (torch.empty(1, size, 33, 128, dtype=torch.bfloat16) for size in (128, 4096))
    assert dmattn_ops.explain(query, key, key, arch="9.0").forward.kernel == "portable"  # H100 SXM, H200: 132
    monkeypatch.setattr(arch, "physical", lambda device: replace(arch.KNOWN[90], num_sms=114))  # H100 PCIe
    assert dmattn_ops.explain(query, key, key, arch="9.0").forward.kernel == "hopper"


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done


TRAIN_STEP = """
import os, threading, torch, dmattn_ops
def step(function=dmattn_ops.flash_dmattn_func):
    query = torch.randn(2, 40, 2, 16, requires_grad=True)
    function(query, query, query).sum().backward()
"""


def test_the_profile_prints_one_line_for_each_backward():
    done = run(TRAIN_STEP + "step(); step()", FLASH_DMATTN_PROFILE_BACKWARD="1")
    lines = [line for line in done.stderr.splitlines() if line.startswith("FLASH_DMATTN_PROFILE")]
    assert len(lines) == 2 and all(LINE.fullmatch(line) for line in lines), done.stderr
    assert "HeadDim=16, Arch=CPU, SeqQ=40, SeqK=40, Batch=2, Choice=CPU_" in lines[0]


def test_the_profile_is_read_at_each_call_and_works_in_threads_and_compiled_code():
    done = run(
        TRAIN_STEP
        + "step(); os.environ['FLASH_DMATTN_PROFILE_BACKWARD'] = '1'\n"
        + "thread = threading.Thread(target=step); thread.start(); thread.join()\n"
        + "step(torch.compile(dmattn_ops.flash_dmattn_func, fullgraph=True, backend='aot_eager'))\n"
        + "os.environ['FLASH_DMATTN_PROFILE_BACKWARD'] = '0'; step()",
        FLASH_DMATTN_PROFILE_BACKWARD="",
    )
    assert len(LINE.findall(done.stderr)) == 2, done.stderr


def test_a_backward_of_packed_keys_in_passes_prints_one_line_of_the_call_as_it_was_asked(monkeypatch, capfd):
    batch, seqlen, heads = 1, 6, 4
    row = torch.zeros(batch, heads, seqlen)
    ran = []

    def in_passes(call, saved, grads, packed, run):
        for head in range(heads):
            run(call._replace(query=call.query[:, :, head : head + 1], key=torch.zeros(batch, 900, 1, 8)), saved, grads)

    takes = Takes(("intervals",))
    launchers = {
        dispatch.PACKED: in_passes,
        "dmattn_ops.kernels.native": lambda call, *_: ran.append(call),
    }
    monkeypatch.setenv("FLASH_DMATTN_PROFILE_BACKWARD", "1")
    monkeypatch.setattr(dispatch, "packing_of", lambda *_, **__: ("packed", []))
    monkeypatch.setattr(dispatch, "cpu_kernels", lambda: "native")
    monkeypatch.setattr(dispatch, "_launcher", lambda module: SimpleNamespace(backward=launchers[module], TAKES=takes))
    query = torch.zeros(batch, seqlen, heads, 8)
    mask = Mask(end=torch.zeros(1, 1, seqlen, dtype=torch.int32), at_most=2)
    call = Call(query, query, query, None, mask, None, None, None, plain_options(1.0))
    dispatch.backward(call, Saved(query, row, row), Gradients(query, None, query, query, query, None))
    lines = capfd.readouterr().err.splitlines()
    assert len(ran) == heads
    assert len(lines) == 1 and LINE.fullmatch(lines[0]) and "SeqQ=6, SeqK=6, Batch=1" in lines[0], lines


@pytest.mark.parametrize("kernels", [native, reference], ids=["native", "reference"])
def test_a_kind_of_mask_that_cpu_kernels_do_not_declare_is_refused(kernels, monkeypatch):
    monkeypatch.setattr(dispatch, "cpu_kernels", lambda: kernels.__name__.rpartition(".")[2])
    query, mask = torch.randn(1, 5, 1, 8, requires_grad=True), torch.ones(1, 1, 5, 5, dtype=torch.bool)
    out = dmattn_ops.flash_dmattn_func(query, query, query, mask)
    monkeypatch.setattr(kernels, "TAKES", Takes(("none", "segments")))
    refusal = "takes masks of the kinds none, segments, not bits"
    with pytest.raises(NotImplementedError, match=refusal):
        dmattn_ops.flash_dmattn_func(query, query, query, mask)
    with pytest.raises(NotImplementedError, match=refusal):
        out.sum().backward()
    dmattn_ops.flash_dmattn_func(query, query, query).sum().backward()


def test_a_kind_of_mask_that_gpu_kernels_do_not_declare_goes_to_others_or_is_refused(monkeypatch):
    query, mask = torch.randn(1, 256, 4, 64, dtype=torch.bfloat16), torch.ones(1, 1, 256, 256, dtype=torch.bool)
    refusal = "takes masks of the kinds none, not bits"
    for direction, kernel, other in (("forward", "hopper", "portable"), ("backward", "hopper", "hopper256")):
        with monkeypatch.context() as patch:
            patch.setattr(
                dispatch.launcher(direction, kernel), "TAKES", Takes(("none",), sinks=True, oldest=90, newest=90)
            )
            found = getattr(dmattn_ops.explain(query, query, query, mask, arch="9.0"), direction)
            assert found.kernel == other and any(refusal in reason for reason in found.passed_over)
    for kernel in ("ampere", "portable"):
        monkeypatch.setattr(dispatch.launcher("forward", kernel), "TAKES", Takes(("none",), sinks=True, oldest=80))
    monkeypatch.setattr(reference, "TAKES", Takes(("none",)))
    with pytest.raises(NotImplementedError, match=f"no kernel takes this call: .*{refusal}"):
        dmattn_ops.explain(query, query, query, mask, arch="8.0")
