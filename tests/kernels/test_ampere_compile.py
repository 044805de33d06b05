"""The kernels of mma.sync and cp.async compile for SM 8.0, 8.6, 8.9 and 12.0, inside of the shared memory of each."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

triton = pytest.importorskip("triton")

from dmattn_ops.api.stand_in import compiled_launches  # noqa: E402
from dmattn_ops.choice import arch, config  # noqa: E402
from dmattn_ops.choice.configurations import Row  # noqa: E402
from dmattn_ops.choice.resources import Specialization  # noqa: E402
from tests.tools.compile_only import Resources, read_resources  # noqa: E402
from tests.tools.configurations import BITS, CAUSAL, KEYS, PLAIN, SEGMENTS, VARLEN, Unit, arguments, launch  # noqa: E402

KERNELS = ("forward_kernel", "backward_kernel", "finish_kernel")
WANTED = {
    "full": PLAIN,
    "causal": CAUSAL,
    "bits": BITS,
    "segments": SEGMENTS,
    "keys": KEYS,
    "causal keys": replace(KEYS, band="causal"),
    "intervals": replace(CAUSAL, mask="intervals"),
    "hidden intervals": replace(CAUSAL, mask="hidden intervals"),
    "varlen": VARLEN,
    "varlen, key bias": replace(VARLEN, bias="key bias"),
    "key bias": replace(CAUSAL, bias="key bias"),
    "bias": replace(BITS, bias="bias", wide_bias=True),
    "causal bias": replace(CAUSAL, bias="bias", wide_bias=True),
    "softcap, grouped": replace(CAUSAL, softcap=True, grouped=True),
    "dropout": replace(CAUSAL, dropout=True),
    "float16": replace(BITS, dtype="float16"),
}


class Case(NamedTuple):
    """One row, the width of its heads, and what else its kernels depend on."""

    direction: str
    row: Row
    width: int
    wanted: str

    def __str__(self) -> str:
        return f"{self.direction}, SM {self.row.sm}, D {self.width}, {self.wanted}"


CASES = [
    Case(direction, row, width, wanted)
    for wanted in WANTED
    for direction, rows in (("forward", config.AMPERE_FORWARD), ("backward", config.AMPERE_BACKWARD))
    for row in rows
    for width in {64: (32, 64), 128: (80, 96, 128), 256: (192, 256)}[row.dim]
]


def compiled(case: Case) -> dict[str, Resources]:
    """Compile what a launch of a row launches; return what each of its own kernels takes."""
    wanted: Specialization = WANTED[case.wanted]
    with compiled_launches(case.row.sm) as launches:
        launch(Unit(case.direction, case.row, case.width, wanted))
    return {
        each.kernel: read_resources(each.compiled, case.row.sm, each.log) for each in launches if each.kernel in KERNELS
    }


@pytest.mark.sampled(103)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_compile_into_the_shared_memory_of_their_architecture(case: Case) -> None:
    found = compiled(case)
    assert set(found) == set(KERNELS[:1] if case.direction == "forward" else KERNELS[1:])
    for resources in found.values():
        assert not resources.faults
        assert resources.products == ("mma" if resources.opcodes["HMMA"] else "")
        assert resources.shared_memory <= case.row.shared_memory <= arch.KNOWN[case.row.sm].shared_memory


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("wanted", ["full", "bits"])
def test_gradients_of_biases_are_added_up_in_memory(wanted: str, sm: int) -> None:
    """No kernel computes them again then, and of 64 x 128 pairs each of 128 threads adds 64 beside 16 numbers of dq."""
    row = config.HOPPER_NARROW_BIAS
    unit = Unit("backward", row, 32, replace(WANTED[wanted], bias="broadcast bias"))
    *given, made = arguments(unit)
    found = {}
    for fewest in (1, 0):
        with compiled_launches(sm) as launches:
            unit.launcher.backward(*given, replace(made, bias_sums=fewest))
        names = [each.kernel for each in launches]
        assert ("finish_bias_kernel" in names, "dbias_kernel" in names) == (fewest == 1, fewest == 0)
        code = next(each.compiled.asm["ptx"] for each in launches if each.kernel == "backward_kernel")
        found[fewest] = code.count("atom.global.gpu.relaxed.add.f32")
    assert found[1] == 5 * found[0] > 0


def test_the_causal_forward_of_narrow_heads_keeps_everything_in_registers() -> None:
    """The causal forward at D 64 spills nothing."""
    row = next(row for row in config.AMPERE_FORWARD if (row.sm, row.dim) == (80, 64))
    found = compiled(Case("forward", row, 64, "causal"))["forward_kernel"]
    assert found.spill_bytes == 0 and found.registers <= 255


@pytest.mark.parametrize("sm", [80, 86])
def test_a_bias_in_float32_leaves_the_causal_forward_its_registers(sm: int) -> None:
    """On SM 8.0 ptxas takes 32 of them, and spills the rest, where nothing is said."""
    row = next(row for row in config.AMPERE_FORWARD if (row.sm, row.dim) == (sm, 128))
    found = compiled(Case("forward", row, 128, "causal bias"))["forward_kernel"]
    assert found.registers > 200 and found.spill_bytes <= 1000
