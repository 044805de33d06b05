"""Compile a Triton or Gluon kernel for any NVIDIA architecture, without a GPU, and read what came out.

It also finds what compiles but cannot run, or not well: more shared memory than a block can have, a kernel that consists of
`trap;`, wgmma instructions that ptxas serialized (warnings C7510 to C7515), and loop bounds that are never updated (`carried.py`).
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from dmattn_ops.api.stand_in import target_of
from dmattn_ops.choice.arch import Arch
from dmattn_ops.choice.resources import Usage
from dmattn_ops.launching.launch import OPTIONS
from tests.tools.carried import stale_bounds
from tests.tools.machine_code import disassemble, opcodes

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
# Names of the matrix instructions in PTX. A kernel with products but without any of these has many "fma" instructions.
_PRODUCTS = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma": "mma.sync"}
_MANY = 256
_SERIALIZED = tuple(f"C751{last}" for last in range(6))  # warnings of ptxas that wgmma run one after the other


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes."""

    registers: int  # per thread at launch; a warp-specialized kernel moves them afterwards
    spill_bytes: int
    shared_memory: int
    threads: int
    warnings: tuple[str, ...]  # of ptxas, C75xx: C7510 to C7515: serialized wgmma, C7519: an added arrive
    traps: bool
    stale: bool  # a Gluon kernel in which an inner loop's bound stays what it was (see `carried`)
    tensor_memory: int  # columns; SM 10.0 has 512
    products: str  # as in `resources.Usage`
    cubin: bytes = field(repr=False)

    @cached_property
    def machine_code(self) -> str:
        """The disassembled kernel; `machine_code` has functions that read it."""
        return disassemble(self.cubin)

    @cached_property
    def opcodes(self) -> Counter[str]:
        """The number of instructions by name, without what follows a dot."""
        found: Counter[str] = Counter()
        for name, times in opcodes(self.machine_code).items():
            found[name.split(".")[0]] += times
        return found

    @property
    def serialized(self) -> list[str]:
        """The warnings that wgmma instructions run one after the other."""
        return [warning for warning in self.warnings if warning in _SERIALIZED]

    @property
    def faults(self) -> str:
        """What is wrong with a compiled kernel: serialized wgmma, a trap, stale loop bounds, too much tensor memory."""
        named = self.serialized
        named += ["trap"] * self.traps + ["stale bound"] * self.stale
        named += [f"tensor memory {self.tensor_memory}"] * (self.tensor_memory > 512)
        return " ".join(named)

    def usage(self, on: Arch) -> Usage:
        """Return the columns of a table."""
        occupancy = round(on.occupancy(self.registers, self.shared_memory, self.threads), 4)
        return Usage(
            self.registers, self.spill_bytes, self.shared_memory, self.threads, occupancy, self.products, self.faults
        )


def compile_only(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], aligned: tuple[str, ...], sm: int, **options: Any
) -> Resources:
    """Compile `kernel` for `sm` (90 for SM 9.0); `aligned` names the arguments that are multiples of 16."""
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    position = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    types = {**signature, **dict.fromkeys(constants, "constexpr")}
    with target_of(sm):
        compiled = triton.compile(
            source(
                fn=kernel,
                signature={name: types[name] for name in kernel.arg_names},
                constexprs={position[name]: value for name, value in constants.items()},
                attrs={position[name]: [["tt.divisibility", 16]] for name in aligned},
            ),
            target=GPUTarget("cuda", sm, 32),
            options={**OPTIONS, **options},
        )
    return read_resources(compiled, sm)


def _log_of_assembling(code: str, sm: int) -> str:
    """Return the log of ptxas for some PTX, with the options that this Triton gives it: they decide about spills."""
    target = GPUTarget("cuda", sm, 32)
    backend = make_backend(target)
    with contextlib.redirect_stdout(io.StringIO()) as said, knobs.nvidia.scope():
        knobs.nvidia.dump_ptxas_log = True
        backend.make_cubin(code, {}, backend.parse_options({"arch": f"sm{sm}", **OPTIONS}), sm)
    return said.getvalue()


def read_resources(compiled: Any, sm: int, log: str = "") -> Resources:
    """Return registers, spills and shared memory of a kernel for `sm`; without `log` (of `ptxas -v`), ptxas runs again."""
    code = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _run(_TOOLS / "cuobjdump", "-res-usage", cubin)
    if "spill stores" not in log:
        log = _log_of_assembling(code, sm)
    registers = re.search(r"REG:(\d+)", usage)
    if registers is None or "spill stores" not in log:
        raise RuntimeError(f"cuobjdump or ptxas said nothing of use: {usage[:200]} {log[:200]}")
    threads = re.search(r"\.reqntid (\d+)", code)
    return Resources(
        registers=int(registers.group(1)),
        spill_bytes=max(int(size) for pair in _SPILLS.findall(log) for size in pair),
        shared_memory=compiled.metadata.shared,
        threads=int(threads.group(1)) if threads else compiled.metadata.num_warps * 32,
        warnings=tuple(sorted(set(re.findall(r"C75\d\d", log)))),
        traps=re.search(r"\btrap;", code) is not None,
        stale="ttir" not in compiled.asm and stale_bounds(compiled.asm["source"], sm) != [],
        tensor_memory=compiled.metadata.tmem_size or 0,
        products=_products(code),
        cubin=compiled.asm["cubin"],
    )


def _products(ptx: str) -> str:
    found = [kind for kind, name in _PRODUCTS.items() if name in ptx]
    return "+".join(found) or ("fma" if ptx.count("fma.rn.f32") >= _MANY else "")


def _run(program: Path | str, *arguments: Path | str) -> str:
    done = subprocess.run([str(part) for part in (program, *arguments)], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr
