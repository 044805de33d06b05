"""Compile the SM 9.0 forward without a GPU and read what ptxas made of it.

The child process compiles without TRITON_INTERPRET, which other tests set. `DMATTN_COMPILE_ALL=1` compiles every
combination of masks, bands and caps instead of a few.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.spills import bytes_at_most

ROOT = Path(__file__).resolve().parents[2]
SHARED_LIMIT = 232448
KINDS = (
    "full", "causal", "window", "softcap", "bits", "segments", "window segments", "segments alone",
    "causal segments alone", "intervals", "causal intervals",
    "window intervals", "hidden intervals", "causal hidden intervals", "ragged", "ragged softcap", "ragged key-bias",
    "ragged causal", "ragged window edges", "causal edges",
    *(f"{mask} key-bias" for mask in ("full", "causal", "softcap", "bits", "segments", "intervals")),
    *(f"{mask} full-bias" for mask in ("full", "bits", "intervals")),
    *(f"{mask} tiles-bias" for mask in ("full", "causal", "softcap", "segments", "segments alone")),
    *(f"{mask} maximum" for mask in ("causal", "softcap", "bits", "full key-bias")), "causal sink",
    *(f"{mask} dropout" for mask in ("full", "causal", "softcap", "bits", "segments", "causal intervals", "causal key-bias")),
)  # fmt: skip
# Bytes moved to or from the stack (triton 3.6): counters and limits of rows, kept around the loops beside 200 registers of
# accumulators and P; those of D 256 with a test or a cap also in its loop. Everything that is not named spills nothing.
ALLOWED = {
    "d64 causal key-bias": 12, "d64 causal tiles-bias": 8, "d64 segments tiles-bias": 60, "d64 bits dropout": 96,
    "d64 causal intervals dropout": 84, "d128 window": 40, "d128 bits": 24, "d128 segments": 52, "d128 window segments": 52,
    "d128 intervals": 24, "d128 causal intervals": 32, "d128 window intervals": 36, "d128 hidden intervals": 60,
    "d128 causal hidden intervals": 68, "d128 causal edges": 24, "d128 full key-bias": 8, "d128 causal key-bias": 32,
    "d128 softcap key-bias": 8, "d128 bits key-bias": 24, "d128 segments key-bias": 52, "d128 intervals key-bias": 40,
    "d128 full full-bias": 96, "d128 bits full-bias": 380, "d128 intervals full-bias": 592, "d128 full tiles-bias": 64,
    "d128 causal tiles-bias": 104, "d128 softcap tiles-bias": 64, "d128 segments tiles-bias": 180, "d128 bits maximum": 24,
    "d128 full key-bias maximum": 8, "d128 full dropout": 20, "d128 causal dropout": 24, "d128 softcap dropout": 32,
    "d128 bits dropout": 204, "d128 segments dropout": 156, "d128 causal intervals dropout": 136,
    "d128 causal key-bias dropout": 48, "d256 full": 36, "d256 causal": 12, "d256 window": 124, "d256 softcap": 28,
    "d256 bits": 44, "d256 segments": 96, "d256 window segments": 196, "d256 intervals": 32, "d256 causal intervals": 36,
    "d256 window intervals": 36, "d256 hidden intervals": 116, "d256 causal hidden intervals": 132, "d256 ragged": 20,
    "d256 ragged softcap": 8, "d256 ragged key-bias": 20, "d256 ragged causal": 44, "d256 ragged window edges": 124,
    "d256 causal edges": 52, "d256 full key-bias": 32, "d256 causal key-bias": 52, "d256 softcap key-bias": 32,
    "d256 bits key-bias": 28, "d256 segments key-bias": 140, "d256 intervals key-bias": 32, "d256 full full-bias": 136,
    "d256 bits full-bias": 548, "d256 intervals full-bias": 308, "d256 causal maximum": 8, "d256 softcap maximum": 20,
    "d256 bits maximum": 36, "d256 full key-bias maximum": 40, "d256 causal sink": 24, "d256 full dropout": 160,
    "d256 causal dropout": 8, "d256 softcap dropout": 88, "d256 bits dropout": 132, "d256 segments dropout": 168,
    "d256 causal intervals dropout": 84, "d256 causal key-bias dropout": 216, "d80 full": 8, "d80 causal": 8, "d96 full": 8,
    "d96 bits": 40, "d192/128 full": 16, "d192/128 causal": 28, "d192/128 softcap": 16, "d192/128 bits": 44,
    "d64 bits tiles-bias": 24, "d64 intervals tiles-bias": 36, "d96 bits tiles-bias": 40, "d64 segments alone": 56,
    "d64 causal segments alone": 52, "d64 segments alone tiles-bias": 92, "d128 segments alone": 116,
    "d128 causal segments alone": 124, "d128 segments alone tiles-bias": 276, "d256 segments alone": 80,
    "d256 causal segments alone": 116,
    "d32 hidden intervals": 52, "d32 causal hidden intervals": 60, "d32 bits key-bias": 32, "d32 intervals key-bias": 72,
    "d32 causal tiles-bias": 8, "d32 segments tiles-bias": 100, "d32 segments alone tiles-bias": 56, "d32 full dropout": 104,
    "d32 causal dropout": 8, "d32 bits dropout": 136, "d32 segments dropout": 8, "d32 causal intervals dropout": 112,
    "d32 causal key-bias dropout": 16, "d16 segments alone tiles-bias": 36,
}  # fmt: skip
PARTS = ("d16 full", "d16 segments alone tiles-bias", "d80 full", "d80 causal", "d96 full", "d96 bits", "d192 causal",
         "d192/128 full", "d192/128 causal", "d192/128 softcap", "d192/128 bits", "d64 bits tiles-bias",
         "d64 intervals tiles-bias", "d96 bits tiles-bias", "d160 full",
         "d64/128 full", "d128/64 full", "d256/128 causal")  # fmt: skip
QUICK = (
    "d80 full", "d192/128 causal", "d64 causal", "d128 bits", "d256 causal", "d128 bits key-bias", "d64 causal sink",
    "d64 ragged window edges", "d128 causal dropout", "d128 intervals", "d64 full tiles-bias", "d64 segments alone tiles-bias",
    "d32 causal", "d32 segments alone tiles-bias",
)  # fmt: skip
# Kinds that no call makes of a head dimension
WITHOUT = {32: "full-bias", 64: "full-bias", 128: "none", 256: "tiles-bias"}
EVERY = tuple(f"d{dim} {kind}" for dim, without in WITHOUT.items() for kind in KINDS if without not in kind)
EVERY += PARTS
CASES = EVERY if os.environ.get("DMATTN_COMPILE_ALL") == "1" else QUICK


@pytest.fixture(scope="module")
def reports() -> dict[str, dict]:
    pytest.importorskip("triton.experimental.gluon")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, str(Path(__file__).resolve()), *CASES]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_no_matrix_instruction_is_serialized_and_no_bound_is_stale(case: str, reports: dict[str, dict]) -> None:
    assert reports[case]["faults"] == ""


@pytest.mark.parametrize("case", CASES)
def test_spills_stay_within_what_is_known(case: str, reports: dict[str, dict]) -> None:
    assert reports[case]["spilled"] <= bytes_at_most(ALLOWED.get(case, 0))


@pytest.mark.parametrize("case", CASES)
def test_shared_memory_is_what_the_configuration_says(case: str, reports: dict[str, dict]) -> None:
    from dmattn_ops.choice import config

    row = _row(config, *_dims(case))
    assert reports[case]["shared"] <= row.shared_memory <= SHARED_LIMIT


@pytest.mark.parametrize("case", CASES)
def test_products_run_on_the_tensor_cores_and_tiles_move_by_tma(case: str, reports: dict[str, dict]) -> None:
    found = reports[case]["opcodes"]
    from dmattn_ops.choice import config
    from dmattn_ops.kernels.hopper.forward.launch import tiles_of

    dim, kind = case.split(" ", 1)
    of_rows = kind.removesuffix(" maximum").removesuffix(" sink").removesuffix(" edges")
    consumers = 3 if dim == "d64" and of_rows in ("full", "causal", "window", "softcap") else 2
    keys = _row(config, *_dims(case)).config.block_n
    columns, columns_v = tiles_of(*_dims(case))
    # the first scores, the two loops with both products, the last product; those with values for each part of them
    assert found["HGMMA"] == consumers * 3 * (sum(columns) // 16 + keys // 16 * (2 if columns_v[1] else 1))
    assert found["UTMALDG"] >= consumers + 3
    assert found["UTMASTG"] >= consumers
    assert found["HMMA"] == 0


def _dims(case: str) -> tuple[int, int]:
    """Return the head dimensions that a case names: d192/128, or d64 for both."""
    dim, _, dim_v = case.split()[0][1:].partition("/")
    return int(dim), int(dim_v or dim)


def _row(config, dim: int, dim_v: int):
    """Return the row that head dimensions get."""
    rows = (row for row in config.FORWARD if row.kernel == "hopper")
    return next(row for row in rows if max(dim, dim_v) <= row.dim and dim_v <= (row.dim_v or row.dim))


OPTIONAL = {
    "q2_desc", "k2_desc", "v2_desc", "o2_desc", "bits_desc", "bias_desc", "lists", "q_segments", "k_segments", "start", "end",
    "hidden_from", "hidden_to", "bias", "seed", "row_max", "sink", "counts_b",
}  # fmt: skip


def _traits(case: str, row: Any, mask: str, bias: str, block_m: int) -> Any:
    """Return what the kernel of a case is compiled for."""
    from dmattn_ops.kernels.hopper.forward.launch import tiles_of
    from dmattn_ops.kernels.hopper.forward.types import Traits
    from dmattn_ops.kernels.hopper.scores import BIAS_KINDS

    _, *words = case.split()
    (columns, second), (columns_v, second_v) = tiles_of(*_dims(case))
    return Traits(
        BM=block_m,
        BN=row.config.block_n,
        PER_SM=row.config.per_sm,
        D=columns,
        D2=second,
        DV=columns_v,
        DV2=second_v,
        STAGES=row.config.stages,
        Q_STAGES=1 if bias == "tiles" and columns == 128 else row.config.query_stages,
        MASK=mask,
        BIAS=BIAS_KINDS[bias],
        HAS_LO="window" in words,
        HAS_HI=bool({"causal", "window"} & set(words)) or (mask == "segments" and "alone" not in words),
        SOFTCAP="softcap" in words,
        HIDDEN="hidden" in words,
        WHOLE_KEYS="alone" in words,
        NATURAL=bias != "none" or "natural" in words,
        DROPOUT="dropout" in words,
        ROW_MAX="maximum" in words,
        EDGES="edges" in words,
        WATCH=mask not in ("band", "ragged"),
    )


def _compile(case: str) -> dict:
    from triton.experimental.gluon import language as gl

    from dmattn_ops.choice import config
    from dmattn_ops.kernels.hopper.forward.kernel import SCALARS, forward_kernel
    from dmattn_ops.kernels.hopper.forward.launch import REGISTERS_OF_HALF, tiles_of
    from tests.tools.compile_only import compile_only

    _, *words = case.split()
    (columns, second), (columns_v, second_v) = tiles_of(*_dims(case))
    row = _row(config, *_dims(case))
    mask = next((kind for kind in ("bits", "segments", "intervals", "ragged") if kind in words), "band")
    bias = next((word.removesuffix("-bias") for word in words if word.endswith("-bias")), "none")
    dropout = "dropout" in words
    block_m = row.config.block_m if mask == "band" and bias == "none" and not dropout else 128
    block_n = row.config.block_n

    def boxes(rows: int, width: int, dtype: str) -> str:
        box = [1] * (3 if mask == "ragged" else 2) + [rows, width]
        layout = gl.NVMMASharedLayout.get_default_for(box, gl.int32 if dtype == "i32" else gl.bfloat16)
        return f"tensordesc<{dtype}{box},{layout!r}>"

    signature = dict.fromkeys(SCALARS, "i32") | dict.fromkeys(("lse_b", "lse_h", "lists_b", "lists_h"), "i64")
    signature |= dict.fromkeys(("bias_b", "bias_h", "bias_q"), "i64")
    signature |= dict.fromkeys(("scale", "cap_inner", "rescale"), "fp32") | {
        "lse": "*fp32",
        "lse_tail": "*fp32",
        "counter": "*i32",
    }
    signature |= {"q_desc": boxes(64, columns, "bf16"), "o_desc": boxes(64, columns_v, "bf16")}
    signature |= {"k_desc": boxes(block_n, columns, "bf16"), "v_desc": boxes(block_n, columns_v, "bf16")}
    constants: dict[str, Any] = {"T": _traits(case, row, mask, bias, block_m)}
    optional = {"bits_desc": boxes(64, 4, "i32")} if mask == "bits" else {}
    optional |= {"bias_desc": boxes(64, block_n, "bf16")} if bias == "tiles" else {}
    optional |= {"q2_desc": boxes(64, second, "bf16"), "k2_desc": boxes(block_n, second, "bf16")} if second else {}
    optional |= (
        {"v2_desc": boxes(block_n, second_v, "bf16"), "o2_desc": boxes(64, second_v, "bf16")} if second_v else {}
    )
    optional |= {} if mask == "band" else {"lists": "*i32"}
    optional |= {"k_segments": "*i32"} if mask == "segments" else {}
    optional |= {"q_segments": "*i32"} if mask == "segments" and "alone" not in words else {}
    optional |= {"start": "*i32", "end": "*i32"} if mask == "intervals" else {}
    optional |= {"hidden_from": "*i32", "hidden_to": "*i32"} if "hidden" in words else {}
    optional |= {} if bias == "none" else {"bias": "*bf16"}
    optional |= {"seed": "*i64"} if dropout else {}
    optional |= {"row_max": "*fp32"} if "maximum" in words else {}
    optional |= {"sink": "*fp32"} if "sink" in words else {}
    optional |= {"counts_b": "i32"} if "invariant" in words else {}
    constants |= dict.fromkeys(OPTIONAL - set(optional))
    aligned = tuple(name for name, kind in {**signature, **optional}.items() if kind.startswith("*"))
    aligned += ("bias_b", "bias_h", "bias_q")
    limit = {"maxnreg": REGISTERS_OF_HALF} if row.config.per_sm == 2 else {}
    found = compile_only(forward_kernel, signature | optional, constants, aligned, 90, num_warps=4, **limit)
    return {
        "faults": found.faults, "spilled": found.spill_bytes, "shared": found.shared_memory,
        "opcodes": dict(found.opcodes) | {"HMMA": found.opcodes["HMMA"]},
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps({case: _compile(case) for case in sys.argv[1:]}))
