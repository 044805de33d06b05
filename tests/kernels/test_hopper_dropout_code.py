"""The PTX of dropout in the SM 9.0 kernels, carried out here: every element of a tile meets the fate that the reference states."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")

from dmattn_ops.call import last_dropped
from dmattn_ops.kernels import reference
from dmattn_ops.kernels.hopper.dropout import drop_code

WORD = 0xFFFFFFFF


def carry_out(code: str, registers: dict[str, int]) -> None:
    """Carry out PTX of moves, products, exclusive ors, comparisons and predicated changes on `registers`."""
    for line in code.strip("{ }").split(";"):
        parts = re.findall(r"[@.$\w]+", line)
        if not parts or parts[0] == ".reg":
            continue
        if parts[0].startswith("@"):
            if not registers[parts[0][1:]]:
                continue
            parts = parts[1:]
        name, to, *operands = parts
        if name == "mov.b64":  # {low, high}, pair
            low, high = to, operands[0]
            registers[low], registers[high] = registers[operands[1]] & WORD, registers[operands[1]] >> 32
            continue
        values = [int(each[2:], 16) if each.startswith("0x") else registers[each] for each in operands]
        if name == "mov.b32":
            registers[to] = values[0]
        elif name == "mul.wide.u32":
            registers[to] = values[0] * values[1]
        elif name == "lop3.b32":
            assert values[3] == 0x96  # exclusive or of all three
            registers[to] = values[0] ^ values[1] ^ values[2]
        elif name == "setp.ls.u32":
            registers[to] = int(values[0] <= values[1])
        elif name == "and.b32":
            registers[to] = values[0] & values[1]
        else:
            assert name == "neg.f32"
            registers[to] = values[0] ^ 1 << 31


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("queries_are_rows", [True, False])
def test_registers_meet_the_fate_that_the_reference_states(queries_are_rows: bool, packed: bool) -> None:
    seed, dropout_p, origins = -(1 << 61) + 987654321, 0.4, (48, 1 << 20)
    kept = reference.philox_keep(torch.tensor([[seed]]), 64, 32, dropout_p, *origins)[0, 0]
    if not queries_are_rows:
        kept = reference.philox_keep(torch.tensor([[seed]]), 32, 64, dropout_p, *origins)[0, 0].T
        origins = origins[::-1]
    code, width = drop_code(queries_are_rows, packed), 4 if packed else 8
    for row in (*range(8), *range(48, 56)):
        for column in (*range(0, 8, 2), *range(16, 24, 2)):
            inputs = [0x3F803F80 if packed else 0x3F800000] * width
            for number in (
                origins[0] + row,
                origins[1] + column,
                seed & WORD,
                seed >> 32 & WORD,
                last_dropped(dropout_p),
            ):
                inputs += [number & WORD] * 8
            inputs[width + 8 + 1] += 1  # the second element lies one column further
            registers = {f"${width + k}": value for k, value in enumerate(inputs)}
            carry_out(code, registers)
            for k in range(8):
                i, j = row + 8 * (k >> 1 & 1), column + (k & 1) + 8 * (k >> 2)
                if packed:
                    found = (registers[f"${k // 2}"] >> 16 * (k & 1) & 0xFFFF) != 0
                else:
                    found = registers[f"${k}"] >> 31 == 0
                assert found == kept[i, j].item(), (row, column, k)
