"""What the compiled kernels take: the frozen tables keep their promises, and compiling again gives their figures."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dmattn_ops
from dmattn_ops.call import NO_MASK, Call, Mask, plain_options
from dmattn_ops.choice import arch, config, resources
from dmattn_ops.choice.resources import Specialization, Usage

OLDEST = "3.6.0"
# bytes of a block, with opt-in
SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
# which have no products
SMALL_KERNELS = (
    "statistics_kernel",
    "prepare_kernel",
    "merge_kernel",
    "mark_kernel",
    "add_shares_kernel",
    "finish_kernel",
)

# Bytes that may be spilled, by what "row | specialization | kernel" matches, and why. Everything else spills nothing.
SPILLS = (
    (r"forward hopper D32 ", 188, "words of a test beside a bias, in the 104 registers of a thread"),
    (r"forward hopper D(64|128|192|256) ", 220, "counters kept around the loops, beside 200 registers of accumulators"),
    (r"forward hopper D256 .*window", 256, "the same, and both limits of the rows"),
    (
        r"backward hopper D(64|128) ",
        1520,
        "the same, limits or words of a test, a soft cap's slope: not in loops without them (test_hopper_compile.py)",
    ),
    (
        r"backward hopper D(64|128) .*broadcast bias .*backward_kernel",
        3316,
        "the same, and the bias of a step: most of it in loops of their own for exact statistics",
    ),
    (r"(backward hopper256 D256|forward hopper D192) .*broadcast bias", 592, "the bias of a step, and words of a test"),
    (r"forward hopper D192 .*block_n=128 .*bits broadcast bias", 620, "the same"),
    (
        r"forward hopper D(64|128|256) .*bits broadcast bias",
        372,
        "the bias of a step, and words of a test; addresses of a bias that is asked for ahead",
    ),
    (r"shared_bias_kernel", 88, "arguments around the loops, and words of a test"),
    (r"backward hopper256 D256 .*segments", 96, "what the consumer of dv keeps from one query head to the next"),
    (r"backward hopper256 D256 .*(softcap|key bias)", 88, "a slope or a bias beside the statistics, which are pairs"),
    (
        r"SM9.0 .* portable D(64|128|256) 16-bit",
        664,
        "the fastest of the measured candidates (config.py), and with everything asked for at once",
    ),
    (r"unaligned", 948, "rows that start at any byte are loaded one element at a time, each by an address of its own"),
    (
        r"dbias_kernel",
        1292,
        "a bias for several heads: its kernel holds four operands, dS and a sum of dS in registers",
    ),
    (
        r"portable D(512|1024) ",
        840,
        "one accumulator of such a head fills the registers; no smaller block is a product",
    ),
    (r"bias softcap dropout", 692, "everything that a call can ask for at once"),
    (r"SM8.(0|6|9) .* portable D32 16-bit", 16, "compiled only; a word to three around the loop"),
    (r"SM(8.6|8.9|12.0) backward portable D64 16-bit .*intervals", 92, "compiled only; limits of intervals"),
    (r"SM10.0 backward portable D64 16-bit .*dropout", 28, "compiled only; a few words of the generator"),
    (
        r"SM10.0 forward portable D(128|256) 16-bit .*dropout",
        368,
        "compiled only; the generator beside 128 rows of out",
    ),
    (r"SM8.0 .* portable D(64|256) 16-bit", 132, "compiled only; the next smaller blocks halve the keys of a step"),
    (r"SM10.0 .* portable D128 16-bit", 48, "compiled only; the next smaller blocks halve the keys of a step"),
    (r"SM12.0 .* portable D(32|64|128) 16-bit", 16, "blocks of SM 8.6, which another assembler gives a few words less"),
    (
        r"SM(8.0|8.6|8.9|12.0) .*portable D(64|128) 16-bit block_m=(128 block_n=(32|64|128)|(32|64) block_n=64)",
        228,
        "compiled only: tiers by keys that the cost model ranks first, which counts spilled bytes (cost.py)",
    ),
    (r"32-bit .* causal float32", 20, "IEEE products take no tensor cores; a word or four around the loop"),
    # Walks that are taken again, carefully, where a sum is NaN (`visibility.some_nan`) came after the blocks were chosen, and were
    # compiled into this table on 2026-11-26: blocks for masks are to be chosen anew on a GPU.
    (r"forward portable .*(bits|segments|intervals)", 2244, "a second walk, carefully, where a sum is NaN"),
    (r"forward portable D(256|512) 32-bit .*bits bias softcap dropout", 6900, "the same, and everything at once"),
    (
        r"SM8.0 forward portable D256 32-bit .*bits bias softcap dropout",
        20624,
        "the same, in 32 registers: what ptxas takes for some kernels of SM 8.0 where it is given no limit; with 255, 3820",
    ),
    (r"backward portable D128 16-bit .*intervals", 752, "the same for keys; limits of intervals for queries"),
    (r"SM9.0 backward portable D128 16-bit .*intervals .*dropout", 760, "the same, and everything at once"),
    (r"SM9.0 backward portable D256 16-bit .*(bits|intervals)", 1108, "the same for queries"),
    (r"SM9.0 backward portable .*unaligned", 2840, "the same, each element by an address of its own"),
    (r"SM9.0 backward portable .*bits( float32)? bias softcap dropout", 1584, "the same, and everything at once"),
    (r"SM9.0 backward portable D512 32-bit .*bits bias softcap dropout", 6880, "the same"),
    (r"backward portable D(32|64|128|256) .*bias softcap dropout", 3784, "compiled only; everything at once"),
    (r"backward portable D(512|1024) .*bits( float32)? bias softcap dropout", 6904, "compiled only; the same"),
    (r"SM(8.0|8.6|8.9|12.0) backward portable D(32|64) 16-bit .*(bits|intervals)", 452, "compiled only; a second walk"),
    (r"SM8.0 backward portable D(64|256) 16-bit .*(intervals|key bias)", 288, "compiled only; the same"),
    (r"SM8.0 backward portable D32 32-bit .*causal float32", 228, "compiled only; products in float32"),
    (
        r"SM8.(6|9) backward portable D64 16-bit ",
        116,
        "compiled only; mma.sync kernels serve these heads (kernels/ampere)",
    ),
    (r"SM10.0 backward portable D(64|256) 16-bit ", 32, "compiled only; a few words around the loop"),
    (r"forward ampere D(64|128|256) .*bias", 416, "words of a test and addresses of a bias, beside 255 registers"),
    (r"forward ampere D128 .*float32 bias", 988, "the same: such a bias is read element by element"),
    (r"forward ampere D(128|256) ", 384, "words of a test, in steps that are not seen whole"),
    (r"backward ampere D(64|128|256) ", 376, "the same, and statistics of the rows"),
    (r"SM9.0 backward ampere D32 ", 680, "the same: blocks that were measured beside a bias with queries"),
    (r"SM9.0 forward hopper D(128|192) .*bits broadcast bias", 716, "words of bits beside a bias for several heads"),
)
# What the assembler of triton 3.9 spills beyond that. Nothing was measured with it: the rows stay those that 3.6 is fastest with.
NEWER_SPILLS = (
    (
        r"SM9.0 forward hopper D(128|256) .*(segments|bias|window|bits|softcap)",
        664,
        "limits of a test, or a bias, beside the accumulators",
    ),
    (
        r"SM9.0 forward hopper D(128|192) .*(segments|bias)",
        1260,
        "the same beside accumulators in two parts, or with words of a test and a bias at once",
    ),
    (r"SM9.0 forward hopper D256 .*(dropout|varlen)", 268, "the generator, or the limits of a sequence"),
    (r"SM9.0 forward hopper D256 .*bits broadcast bias", 740, "words of bits beside a bias for several heads"),
    (r"SM9.0 forward portable D256 32-bit .*bits bias softcap dropout", 7148, "a second walk, and everything at once"),
    (r"SM9.0 backward hopper256 D256 ", 328, "limits of a test, or a bias, in the kernel of dq"),
    (r"SM9.0 backward hopper256 D256 .*broadcast bias", 1036, "the bias of a step, and words of a test"),
    (r"SM9.0 backward hopper256 D128 .*shared_bias_kernel", 120, "arguments around the loops"),
    (r"SM9.0 backward portable D256 16-bit", 1328, "one accumulator more than 3.6 keeps outside registers"),
    (r"SM9.0 backward portable D256 16-bit .*unaligned", 2900, "the same, each element by an address of its own"),
    (r"SM9.0 backward portable D64 16-bit .*intervals float32 bias softcap dropout", 788, "a second walk; limits"),
    (r"SM9.0 backward portable .*bits( float32)? bias softcap dropout", 1956, "a second walk, and everything at once"),
    (r"SM10.0 .* portable D(64|128|256) 16-bit", 1428, "compiled only; blocks that fit with 3.6"),
    (r"SM12.0 forward portable D(128|256) 16-bit", 308, "compiled only; blocks that fit with 3.6"),
    (r"SM8.(0|6|9) .* portable D(64|128) 16-bit", 12, "compiled only; a word or three around the loop"),
    (r"SM8.(0|6|9) backward portable D64 16-bit .*intervals", 264, "compiled only; limits of intervals"),
)
# Kernels whose table is still to be made with a version. `tests/kernels/test_ampere_compile.py` compiles them.
NOT_SWEPT = {"3.9.0": ("ampere",)}
# Where ptxas may serialize wgmma (C7510 to C7515), and why.
SERIALIZED = (
    (
        r"SM9.0 backward portable D(64|128) 16-bit .*dropout",
        "the fastest measured blocks (config.py): calls with a number to each pair of query and key",
    ),
    (
        r"SM9.0 forward portable D64 16-bit .*float32 bias softcap dropout",
        "everything that a call can ask for at once, with triton 3.9",
    ),
)


def lines():
    """Return (version, row, specialization, kernel, usage) of every kernel of every table."""
    for version in resources.versions():
        for row, specializations in resources.table(version)["rows"].items():
            for wanted, kernels in specializations.items():
                if wanted == resources.SOURCE:
                    continue
                for kernel, columns in kernels.items():
                    yield version, row, wanted, kernel, Usage(*columns)


def sm_of(row):
    return int(row[2 : row.index(" ")].replace(".", ""))


def allowed_spills(version, row, wanted, kernel):
    named = SPILLS if version == OLDEST else SPILLS + NEWER_SPILLS
    found = [size for pattern, size, _ in named if re.search(pattern, f"{row} | {wanted} | {kernel}")]
    return max(found, default=0)


def test_the_oldest_version_of_triton_was_swept_and_explain_takes_the_nearest_older_table():
    swept = resources.versions()
    assert swept[0] == OLDEST
    assert resources.nearest_version("3.6.0") == OLDEST and resources.nearest_version("3.7.1") == OLDEST
    assert resources.nearest_version("99.0") == swept[-1] and resources.nearest_version("") == OLDEST


def test_shared_memory_fits_every_architecture():
    assert {sm: arch.KNOWN[sm].shared_memory for sm in SHARED_MEMORY} == SHARED_MEMORY
    over = [line for line in lines() if line[-1].shared_memory > SHARED_MEMORY[sm_of(line[1])]]
    assert not over


def test_nothing_spills_but_what_is_named_with_a_reason():
    spilled = [line for line in lines() if line[-1].spill_bytes > allowed_spills(*line[:4])]
    assert not spilled


def test_no_exception_for_spills_outlives_its_reason():
    spilled = [f"{row} | {wanted} | {kernel}" for _, row, wanted, kernel, usage in lines() if usage.spill_bytes]
    idle = [pattern for pattern, _, _ in SPILLS + NEWER_SPILLS if not any(re.search(pattern, line) for line in spilled)]
    assert not idle


def test_no_kernel_traps_and_no_matrix_instruction_is_serialized_but_where_a_reason_is_named():
    named = [
        line
        for line in lines()
        if line[-1].faults
        and not (
            line[-1].faults[:4] == "C751" and any(re.match(where, " | ".join(line[1:4])) for where, _ in SERIALIZED)
        )
    ]
    assert not named


def test_matrices_are_multiplied_by_the_instructions_of_their_architecture():
    wrong = []
    for _, row, wanted, kernel, usage in lines():
        kinds = {"mma"}
        if kernel in SMALL_KERNELS:
            kinds = {""}
        elif wanted.endswith("float32"):
            kinds = {"fma"}  # IEEE precision
        elif "hopper" in row and kernel != "dbias_kernel":  # a portable one
            kinds = {"wgmma"}
        elif sm_of(row) in (90, 100):
            kinds = {
                "mma",
                "wgmma" if sm_of(row) == 90 else "tcgen05",
            }  # small blocks are below what the newer ones take
        if not set(usage.products.split("+")) <= kinds:
            wrong.append((row, wanted, kernel, usage.products))
    assert not wrong


def test_occupancy_follows_from_registers_shared_memory_and_threads():
    for version, row, wanted, kernel, usage in lines():
        on = arch.KNOWN[sm_of(row)]
        occupancy = on.occupancy(usage.registers, usage.shared_memory, usage.threads)
        assert usage.occupancy == round(occupancy, 4) > 0, (version, row, wanted, kernel)
        assert usage.threads * usage.registers <= on.registers


@pytest.mark.parametrize(
    ("sm", "registers", "shared_memory", "threads", "blocks"),
    [  # as CUDA's occupancy calculator has them
        (80, 32, 0, 128, 16),
        (80, 255, 0, 256, 1),
        (86, 128, 0, 256, 2),
        (86, 32, 0, 32, 16),
        (90, 168, 201176, 384, 1),
        (90, 64, 100000, 128, 2),
    ],
)
def test_occupancy_is_that_of_the_calculator(sm, registers, shared_memory, threads, blocks):
    on = arch.KNOWN[sm]
    assert on.occupancy(registers, shared_memory, threads) == blocks * threads / 32 / on.max_warps


# ------------------------------------------------------------------------------------------ what the tables are made of
@pytest.fixture(scope="module")
def configurations():
    pytest.importorskip("triton.experimental.gluon")
    from tests.tools import configurations

    return configurations


@pytest.mark.parametrize("version", resources.versions())
def test_a_table_holds_every_configuration_that_dispatch_can_return(configurations, version):
    from tests.tools import sweep

    kernels = [kernel for kernel in configurations.KERNELS if kernel not in NOT_SWEPT.get(version, ())]
    every = configurations.units(configurations.ARCHITECTURES, tuple(kernels))
    rows = sweep.load(version)
    assert list(sweep.missing(every, rows)) == [], "python -m tests.tools.sweep --stale --write"
    assert set(rows) == set(every)


def test_every_row_for_triton_is_reached(configurations):
    for rows in (config.FORWARD, config.BACKWARD):
        reached = {row for sm in configurations.ARCHITECTURES for row in configurations.reachable(rows, sm)}
        elsewhere = ("reference", "decode")  # tests/kernels/test_decode_compile.py
        assert [row.name for row in rows if row not in reached and row.kernel not in elsewhere] == []


def test_a_call_that_is_made_for_a_specialization_has_it(configurations):
    for lines in configurations.units((90,), configurations.KERNELS).values():
        for unit in lines.values():
            assert resources.specialization(configurations.make_call(unit.wanted, unit.width)) == unit.wanted


def test_every_launch_of_a_call_is_recorded_each_time_it_is_compiled(configurations):
    from dmattn_ops.api.stand_in import compiled_launches

    lines = next(iter(configurations.units((86,), ("portable",)).values()))
    decode = next(iter(lines.values()))._replace(wanted=Specialization(decode=True))
    for sm in (86, 86, 80):
        with compiled_launches(sm) as launches:
            configurations.launch(decode)
        assert [each.kernel for each in launches] == ["forward_kernel", "merge_kernel"]
        assert all(each.compiled.metadata.target.arch == sm for each in launches)


# Compiled again here: a specialization of each architecture, and of each kind of kernel. `make sweep` compiles all.
REPRESENTATIVES = (
    ("SM8.0 forward portable D128 16-bit", "bits bfloat16"),
    ("SM8.6 backward portable D64 16-bit", "causal bfloat16"),
    ("SM8.9 forward portable D64 32-bit", "causal float32"),
    ("SM9.0 backward portable D128 16-bit", "causal segments float32 bias softcap dropout bfloat16"),
    ("SM9.0 forward hopper D64 16-bit", "causal bfloat16"),
    ("SM9.0 backward hopper D128 16-bit", "causal bfloat16"),
    ("SM10.0 forward portable D64 16-bit", "full bfloat16"),
    ("SM10.0 forward portable D64 16-bit", "bits bfloat16"),  # whose careful walk Triton 3.6 once did not compile
    ("SM10.0 backward portable D128 16-bit", "bits bfloat16"),
    ("SM12.0 backward portable D256 16-bit", "causal dropout bfloat16"),
)
COMPILE = """
import json, sys, torch
from tests.tools import configurations, sweep
torch.set_num_threads(1)
every = configurations.units(configurations.ARCHITECTURES, configurations.KERNELS)
for row, line in json.loads(sys.argv[1]):
    entry = next(entry for entry in every if entry.startswith(row) and line in every[entry])
    print(json.dumps([entry, sweep.compile_unit(every[entry][line])]))
"""


def test_compiling_again_gives_the_frozen_figures(configurations, tmp_path):
    import triton

    if triton.__version__ not in resources.versions():
        pytest.skip(f"no table for triton {triton.__version__}")
    frozen = resources.table(triton.__version__)["rows"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(
        tmp_path
    )  # what lies in a cache has no log, and assembling it again needs more
    halves = (REPRESENTATIVES[::2], REPRESENTATIVES[1::2])  # a process for each of two cores
    children = [
        subprocess.Popen(
            [sys.executable, "-c", COMPILE, json.dumps(half)],
            env=environment,
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for half in halves
    ]
    for half, child in zip(halves, children, strict=True):
        said, errors = child.communicate(timeout=900)
        assert child.returncode == 0, errors[-3000:]
        for (_, line), found in zip(half, said.splitlines(), strict=True):
            entry, kernels = json.loads(found)
            assert kernels == frozen[entry][line], (entry, line)


# --------------------------------------------------------------------------------------------------- names and look-ups
def call(dtype=torch.bfloat16, bias=None, mask=NO_MASK, heads_k=4, options=None, seqlen=256, dim=64):
    query = torch.empty(2, seqlen, 4, dim, dtype=dtype)
    key = torch.empty(2, 256, heads_k, dim, dtype=dtype)
    return Call(query, key, key, bias, mask, None, None, None, options or plain_options(0.1))


def test_a_specialization_names_what_is_there():
    assert str(resources.specialization(call())) == "full"
    causal = plain_options(0.1, band_hi=0, softcap=30.0, dropout_p=0.5)
    bias = torch.empty(1, 1, 256, 256)
    assert str(resources.specialization(call(bias=bias, heads_k=2, options=causal))) == (
        "causal float32 broadcast bias softcap dropout grouped"
    )
    bits = torch.empty(2, 4, 256, 8, dtype=torch.int32)
    assert str(resources.specialization(call(mask=Mask(bits, bits, bits, bits), options=causal))) == (
        "bits softcap dropout"
    )
    ends = torch.empty(1, 1, 256, dtype=torch.int32)
    for mask, name in (
        (Mask(start=ends, end=ends), "causal intervals"),
        (Mask(start=ends, end=ends, hidden_from=ends, hidden_to=ends), "causal hidden intervals"),
        (Mask(bits, bits, k_segments=ends), "causal key segments"),
        (Mask(bits, bits, q_segments=ends[0], k_segments=ends), "causal segments"),
    ):
        options = plain_options(0.1, band_hi=0)
        assert str(resources.specialization(call(mask=mask, options=options))) == name
    assert str(resources.specialization(call(seqlen=1, dim=63))) == "decode unaligned"


def test_a_kernel_ignores_what_it_is_told_at_run_time():
    window = Specialization(band="window", grouped=True)
    assert str(resources.canonical("portable", "forward", window)) == "causal grouped"
    assert str(resources.canonical("hopper", "forward", window)) == "window"
    assert str(resources.canonical("hopper", "backward", window)) == "window grouped"
    assert resources.canonical("hopper256", "backward", Specialization(mask="key segments")).mask == "segments"


def test_explain_shows_what_the_kernels_take_and_groups_the_rows_by_reason():
    query = torch.empty(1, 256, 4, 128, dtype=torch.bfloat16)
    explanation = dmattn_ops.explain(query, query, query, is_causal=True, arch="10.0")
    taken = explanation.backward.resources
    assert set(taken) == {"statistics_kernel", "keys_kernel", "queries_kernel"}
    assert taken["keys_kernel"].shared_memory <= SHARED_MEMORY[100]
    assert explanation.backward.swept.startswith("D 128, causal bfloat16, triton 3.")
    reason, rows = next(iter(explanation.backward.passed_over.items()))
    assert reason == "head dimension 128 is wider" and len(rows) > 1
    assert "registers" in str(explanation) and str(explanation).count(reason) == 2


def test_explain_shows_no_figures_for_what_was_not_swept():
    query = torch.empty(1, 256, 4, 128, dtype=torch.bfloat16)
    explanation = dmattn_ops.explain(query, query, query, softcap=2.0, dropout_p=0.1, arch="8.6")
    assert explanation.forward.resources is None
    assert dmattn_ops.explain(query, query, query).forward.resources is None  # the CPU


def test_explain_names_the_blocks_that_run_for_this_call():
    query = torch.empty(1, 256, 4, 128, dtype=torch.bfloat16)
    plain = dmattn_ops.explain(query, query, query, arch="9.0")
    many = torch.empty(4, 4096, 16, 64, dtype=torch.bfloat16)
    assert dmattn_ops.explain(many, many, many, arch="9.0").forward.configuration["block_m"] == 192
    narrow = query[..., :64].contiguous()
    assert dmattn_ops.explain(narrow, narrow, narrow, arch="9.0").forward.configuration["block_m"] == 128
    mask = torch.ones(1, 1, 4096, 4096, dtype=torch.bool)
    assert dmattn_ops.explain(many, many, many, mask, arch="9.0").forward.configuration["block_m"] == 128
    bias = torch.empty(1, 16, 1, 4096)
    assert dmattn_ops.explain(many, many, many, bias=bias, arch="9.0").forward.configuration["block_m"] == 128
    biased = dmattn_ops.explain(query, query, query, bias=torch.empty(1, 4, 256, 256), arch="9.0")
    assert plain.backward.kernel == "hopper" and biased.backward.kernel == "portable"
    assert any("bias" in reason for reason in biased.backward.passed_over)
    dropped = dmattn_ops.explain(query, query, query, dropout_p=0.5, softmax_scale=0.0, arch="9.0")
    assert dropped.backward.configuration == biased.backward.configuration  # blocks for a number to each pair
