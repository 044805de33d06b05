"""Compile the SM 9.0 backward without a GPU, as its own launcher does, and read what ptxas made of it.

A child process stands in for the driver (target SM 9.0, nothing is launched) and reports spilled registers, serialized matrix
instructions, shared memory, and the instructions of the kernel and of its loops. `DMATTN_COMPILE_ALL=1` compiles every
configuration instead of a few.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.spills import bytes_at_most, moves_at_most

ROOT = Path(__file__).resolve().parents[2]
SHARED_LIMIT = 232448
# Bytes moved to or from the stack with triton 3.6.0: counters and addresses kept around the loops, the exact statistics that a
# branch of each step loads where rows are large, and in loops with a test the words of the step ahead or the rows' limits.
# Batch-invariant calls keep where the flags of rows lie around the loops of a block.
# With a full bias or a soft cap there are loops of their own for exact statistics; most of their bytes are spilled there.
ALLOWED = {
    "d64 full": 4, "d64 causal": 4, "d64 window": 4, "d64 grouped causal": 4, "d64 bits": 128, "d64 segments": 456,
    "d128 full": 36, "d128 causal": 36, "d128 window": 36, "d128 grouped causal": 28, "d128 bits": 152, "d128 segments": 164,
    "d128 float16 causal": 36,
    "d64 full ordered": 4, "d64 causal ordered": 4, "d64 window ordered": 4, "d64 grouped causal ordered": 20,
    "d128 full ordered": 8, "d128 causal ordered": 8, "d128 window ordered": 12, "d128 grouped causal ordered": 4,
    "d64 full key-bias": 28, "d64 causal key-bias": 28, "d64 bits key-bias": 548, "d64 segments key-bias": 1140,
    "d128 full key-bias": 52, "d128 causal key-bias": 52, "d128 bits key-bias": 260, "d128 segments key-bias": 552,
    "d64 full full-bias": 1880, "d64 bits full-bias": 3156, "d128 full full-bias": 968, "d128 bits full-bias": 1364,
    "d64 causal softcap": 508, "d128 causal softcap": 108, "d64 grouped causal interleaved": 4,
    "d128 grouped causal interleaved": 0,
    "d64 intervals": 92, "d64 window intervals": 92, "d64 hidden intervals": 200, "d64 intervals key-bias": 536,
    "d128 intervals": 148, "d128 hidden intervals": 180, "d128 intervals key-bias": 268,
    "d64 full softcap key-bias": 3508, "d128 full softcap key-bias": 1096, "d128 causal softcap key-bias": 1096,
    "d64 causal key-bias ordered": 108,
    "d64 varlen": 44, "d128 varlen": 84, "d64 grouped varlen": 48, "d128 grouped varlen": 116, "d64 varlen key-bias": 112,
    "d128 varlen key-bias": 108, "d64 varlen softcap": 516, "d128 varlen softcap": 316,
    "d64 causal dropout": 284, "d64 bits dropout": 548, "d64 full key-bias dropout": 516, "d64 causal ordered dropout": 252,
    "d64 causal softcap dropout": 4196, "d128 full dropout": 40, "d128 causal dropout": 40, "d128 bits dropout": 296,
    "d128 grouped causal dropout": 112, "d128 intervals dropout": 420, "d128 segments dropout": 876,
    "d128 full key-bias dropout": 312, "d128 causal softcap dropout": 2496, "d128 full full-bias dropout": 2288,
    "d80 full": 24, "d80 causal": 24, "d96 full": 44, "d96 causal": 44, "d96 causal ordered": 36, "d96 bits": 188,
    "d96 causal key-bias": 60, "d96 causal softcap": 24, "d80 causal softcap": 40,
    "d64 causal shares": 8, "d128 causal shares": 36,
    "d64 causal ordered invariant": 48, "d128 causal ordered invariant": 12, "d128 grouped causal ordered invariant": 20,
    "d64 grouped causal ordered invariant": 96, "d128 window ordered invariant": 8, "d96 causal ordered invariant": 48,
}  # fmt: skip
# Instructions of a step without a test that move them, on its fast path; none where a case is not named.
IN_LOOPS = {
    "d64 segments": 4, "d64 bits key-bias": 6, "d64 segments key-bias": 5, "d128 segments key-bias": 4,
    "d64 causal softcap": 12, "d64 intervals key-bias": 6, "d64 full softcap key-bias": 143,
    "d128 full softcap key-bias": 10, "d128 causal softcap key-bias": 10, "d64 causal key-bias ordered": 4,
    "d64 varlen softcap": 14, "d64 causal dropout": 21, "d64 bits dropout": 11, "d64 full key-bias dropout": 29,
    "d64 causal ordered dropout": 21, "d64 causal softcap dropout": 214, "d128 full dropout": 1, "d128 causal dropout": 1,
    "d128 bits dropout": 2, "d128 segments dropout": 9, "d128 full key-bias dropout": 12,
    "d128 causal softcap dropout": 107, "d128 intervals dropout": 20,
}  # fmt: skip
LISTED = {"bits", "segments", "intervals"}
NO_REGISTERS = ("d64 full softcap key-bias", "d128 full softcap key-bias", "d128 causal softcap key-bias")
QUICK = (
    "d96 causal", "d128 causal", "d128 bits", "d64 causal ordered", "d128 bits key-bias", "d64 varlen", "d128 causal dropout",
    "d128 intervals", "d128 grouped causal ordered invariant",
)  # fmt: skip
CASES = tuple(ALLOWED) if os.environ.get("DMATTN_COMPILE_ALL") == "1" else QUICK


@pytest.fixture(scope="module")
def reports() -> dict[str, dict]:
    pytest.importorskip("triton.experimental.gluon")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(Path(__file__).resolve()), *CASES]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_no_matrix_instruction_is_serialized(case: str, reports: dict[str, dict]) -> None:
    found = reports[case]["serialized"]
    if found and case in NO_REGISTERS:
        pytest.xfail("no registers are left to hold operands")
    assert found == []


@pytest.mark.parametrize("case", CASES)
def test_no_loop_forgets_what_it_carries(case: str, reports: dict[str, dict]) -> None:
    assert not reports[case]["stale"]


@pytest.mark.parametrize("case", CASES)
def test_spills_stay_within_what_is_known(case: str, reports: dict[str, dict]) -> None:
    assert reports[case]["spilled"] <= bytes_at_most(ALLOWED[case])


@pytest.mark.parametrize("case", CASES)
def test_shared_memory_is_what_the_configuration_says(case: str, reports: dict[str, dict]) -> None:
    from dmattn_ops.choice import config

    dim = int(case.split()[0][1:])
    row = next(row for row in config.BACKWARD if row.kernel == "hopper" and row.dim >= dim)
    assert reports[case]["shared"] <= row.shared_memory <= SHARED_LIMIT


@pytest.mark.parametrize("case", [case for case in CASES if "full-bias" not in case])  # which loads in its loops
def test_loops_without_a_test_hold_five_products_and_few_barriers_and_touch_no_stack(
    case: str, reports: dict[str, dict]
) -> None:
    loops = reports[case]["loops"]
    sums = 0 if "key-bias" not in case else 8 if case.startswith("d64") else 4
    assert len(loops) == (0 if {"window", "ordered"} <= set(case.split()) else 2)  # one of each consumer
    for loop in loops:
        # S, dP and dq 8 each, dv and dk 4 each; twice 4 and three times 8 at D 64; two parts double those of dv and dk
        assert loop["HGMMA"] == {80: 2 * 5 + 24, 96: 2 * 6 + 24}.get(int(case.split()[0][1:]), 32) + sums
        assert loop["BAR"] <= (5 if case.startswith("d64") else 4 if case.startswith(("d80", "d96")) else 3)
        assert loop["LDG"] <= (1 if LISTED & set(case.split()) else 0)  # which tile is next, for statistics of its rows
        assert loop["LDL"] + loop["STL"] <= moves_at_most(IN_LOOPS.get(case, 0))


@pytest.mark.parametrize("case", CASES)
def test_loads_and_reductions_are_bulk_copies(case: str, reports: dict[str, dict]) -> None:
    found = reports[case]["opcodes"]
    assert found["UTMALDG"] >= 6
    assert found["UTMAREDG"] >= 2
    dim = int(case.split()[0][1:])
    pieces, parts = 1 if dim == 64 else 2, 2 if dim in (80, 96) else 1
    assert found["UTMASTG"] == 2 * (2 * pieces + parts)  # dk and dv of two reducers, dq of two consumers
    assert found["STS.128"] >= 16  # dq goes out in 16-byte stores


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_counted_and_additions_only_where_ordered(case: str, reports: dict[str, dict]) -> None:
    found = reports[case]["opcodes"]
    # a block of slots without keys is counted too, by an instruction of either kind
    passed_over = (0, 1) if "intervals" in case else (0,)
    assert found["REDG.E.ADD"] - (2 + (found["UTMAREDG"] if "ordered" in case else 0)) in passed_over


@pytest.mark.parametrize("case", CASES)
def test_sums_of_dq_are_loaded_16_bytes_at_a_time(case: str, reports: dict[str, dict]) -> None:
    threads_bytes = 64 * int(case.split()[0][1:]) * 4 // 128  # of a consumer's 128 threads
    assert reports[case]["opcodes"]["LDG.E.128.STRONG.GPU"] == 2 * 2 * threads_bytes // 16  # a tile, and the one ahead


@pytest.mark.parametrize("case", CASES)
def test_plans_lay_parameters_out_as_the_kernels_have_them(case: str, reports: dict[str, dict]) -> None:
    # tiles of queries, tiles of keys and their order have kernels of their own, and so have sums of shares
    launches = 5 if "varlen" in case else 3 if "shares" in case else 2
    behind = 2 * bool(LISTED & set(case.split()))  # the kernels that compute again
    assert reports[case]["laid_out"] == [True] * (launches + behind)


# --------------------------------------------------------------------------------------------------- the child process
def _plain_loops(sass: str, exponentials: int, dropped: int) -> list[dict[str, int]]:
    """Return counts of the loops that multiply matrices, test nothing but `dropped` random words, and load no row: what a step
    without a mask executes.

    Of loops that ask whether rows need exact statistics it is what they execute where no row does (`machine_code`).
    """
    from tests.tools.machine_code import count, product_loops

    counts = [
        {name: count(loop.fast, name) for name in ("HGMMA", "BAR", "LDG", "ISETP", "R2P", "MUFU.EX2", "LDL", "STL")}
        for loop in product_loops(sass, 32)
    ]
    return [
        loop
        for loop in counts
        if loop["MUFU.EX2"] == exponentials and loop["ISETP"] <= 8 + dropped and loop["R2P"] == 0 and loop["LDG"] <= 1
    ]


def _report(compiled, log: str, exponentials: int, dropped: int) -> dict:
    from tests.tools.compile_only import read_resources
    from tests.tools.machine_code import count, opcodes

    found = read_resources(compiled, 90, log)
    names = ("UTMALDG", "UTMAREDG", "UTMASTG", "STS.128", "REDG.E.ADD", "LDG.E.128.STRONG.GPU")
    every = opcodes(found.machine_code)
    return {
        "serialized": found.serialized,
        "stale": found.stale,
        "spilled": found.spill_bytes,
        "shared": found.shared_memory,
        "loops": _plain_loops(found.machine_code, exponentials, dropped),
        "opcodes": {name: count(every, name) for name in names},
    }


def _stand_in_driver() -> list:
    """Make launches compile for SM 9.0 and stop there; return a list: of each a pair of the kernel and what ptxas said."""
    import triton
    from triton import knobs
    from triton.runtime.jit import JITFunction

    from dmattn_ops.api.stand_in import Driver

    triton.runtime.driver.set_active(Driver(90))
    launched = []
    run = JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **keywords):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            compiled = run(self, *arguments, grid=grid, warmup=True, **keywords)
        launched.append((compiled, said.getvalue()))
        return compiled

    knobs.nvidia.dump_ptxas_log = True

    JITFunction.run = compile_only
    _stand_in_parameters(launched)
    return launched


def _stand_in_parameters(launched: list) -> None:
    """Let plans ask the PTX instead of the driver which parameters a kernel has."""
    from triton.compiler.compiler import CompiledKernel

    from dmattn_ops.launching import driver, plan

    sizes = {"b8": 1, "u8": 1, "b32": 4, "u32": 4, "f32": 4, "b64": 8, "u64": 8}

    def parameter_sizes(function: int, declared: int | None) -> list[int]:
        ptx = launched[function][0].asm["ptx"]
        head = ptx[ptx.index(".entry") : ptx.index(".reqntid")]
        found = re.findall(r"\.param (?:\.align \d+ )?\.(\w+)[^,\[\n]*(?:\[(\d+)\])?", head)
        assert declared == len(found)
        return [int(count) if count else sizes[kind] for kind, count in found]

    def take_handle(self: CompiledKernel) -> None:
        self.function = next(place for place, (compiled, _) in enumerate(launched) if compiled is self)

    CompiledKernel._init_handles = take_handle
    plan.parameter_sizes = parameter_sizes
    functions = driver.Driver(None, None, None)
    driver.driver = lambda: functions


def _compile(case: str, launched: list) -> dict:
    import torch

    from dmattn_ops.call import NO_MASK, UNBOUNDED, Call, Gradients, Mask, Saved, Varlen, plain_options
    from dmattn_ops.choice import arch, config, resolve
    from dmattn_ops.kernels.hopper.backward import launch as hopper_backward
    from dmattn_ops.launching import launch, plan, recording

    words = case.split()
    dim = int(words[0][1:])
    dtype = torch.float16 if "float16" in words else torch.bfloat16
    batch, seqlen, heads, kv_heads = 2, 512, 4, 2 if {"grouped", "bits", "segments", "intervals"} & set(words) else 4
    query, grad_out = (torch.empty(batch, seqlen, heads, dim, dtype=dtype) for _ in range(2))
    key, value = (torch.empty(batch, seqlen, kv_heads, dim, dtype=dtype) for _ in range(2))
    lse = torch.empty(batch, heads, seqlen)
    lists = torch.empty(batch, heads, 4, 8, dtype=torch.int32)
    mask = NO_MASK
    if "bits" in words:
        bits = torch.empty(batch, heads, 512, 16, dtype=torch.int32)
        mask = Mask(lists, lists, bits, bits)
    elif "segments" in words:
        ids = torch.empty(batch, seqlen, dtype=torch.int32)
        mask = Mask(lists, lists, q_segments=ids, k_segments=ids[:, None].expand(batch, heads, seqlen).contiguous())
    elif "intervals" in words:
        numbers = torch.empty(batch, kv_heads, seqlen, dtype=torch.int32)
        hidden = (numbers, numbers) if "hidden" in words else (None, None)
        mask = Mask(lists, lists, start=numbers, end=numbers, hidden_from=hidden[0], hidden_to=hidden[1])
    low = -100 if "window" in words or "segments" in words else -UNBOUNDED
    high = UNBOUNDED if "full" in words else 0
    flags = {"softcap": 30.0 * ("softcap" in words), "dropout_p": 0.1 * ("dropout" in words)}
    alone = "invariant" in words
    options = plain_options(dim**-0.5, low, high, deterministic="ordered" in words, batch_invariant=alone, **flags)
    bias = None
    if "key-bias" in words or "full-bias" in words:
        bias = torch.empty(1, kv_heads, 1 if "key-bias" in words else seqlen, seqlen)
    varlen, of_lengths = None, []
    if "varlen" in words:
        query, key, value, grad_out, lse = query[0], key[0], value[0], grad_out[0], lse[0]
        bias = None if bias is None else bias[0, :, 0]
        of_lengths = [torch.tensor([0, 200, seqlen], dtype=torch.int32) for _ in range(2)]
        varlen = Varlen(*of_lengths, 312, 312, False)
    seed = torch.empty(batch, heads, dtype=torch.int64) if "dropout" in words else None
    call = Call(query, key, value, bias, mask, None, seed, varlen, options)
    assert hopper_backward.refusals(call) == []
    row = next(row for row in config.BACKWARD if row.kernel == "hopper" and row.dim >= dim)
    cache = 0 if "interleaved" in words else arch.KNOWN[90].l2_bytes
    arch.physical = lambda device: replace(arch.KNOWN[90], l2_bytes=cache)
    for compiled in (launched, launch._compiled):  # what was compiled here cannot be launched
        compiled.clear()
    outputs = [torch.empty_like(tensor) for tensor in (query, key, value)]
    saved, grads = Saved(grad_out, lse, lse.clone()), Gradients(grad_out, None, *outputs, None)
    shares = 3 if "shares" in words else 1
    made_for = replace(resolve.backward_config(row.config, call, saved, grads), shares=shares)
    inputs = [
        part
        for part in dict.fromkeys((grad_out, query, key, value, *saved[1:], bias, seed, *mask[:-1], *of_lengths))
        if part is not None
    ]
    with launch.recording(inputs) as made, recording.one_call():
        hopper_backward.backward(call, saved, grads, made_for)
    behind = 2 * (mask.kind != "none")  # the kernels that compute again
    assert len(launched) == (5 if varlen is not None else 2 if shares == 1 else 3) + behind
    packed = [step.packed is not None for step in made.plan(outputs, 0).steps if isinstance(step, plan.Relaunch)]
    elements = 64 if dim == 64 else 32  # of a thread in a step
    report = _report(*launched[-1 - behind if shares == 1 else -2], elements, elements * ("dropout" in words))
    return report | {"laid_out": packed}


if __name__ == "__main__":
    kernels = _stand_in_driver()
    print(json.dumps({case: _compile(case, kernels) for case in sys.argv[1:]}))
