"""Compile a Triton or Gluon kernel for any NVIDIA architecture, without a GPU, and read what came out.

What a compiler lets pass and a GPU does not is read here too: shared memory over the limit, a kernel that is only
`trap;`, wgmma that ptxas serialized (warnings C7510 to C7515).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from dmattn_ops.arch import Arch

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes."""

    registers: int  # per thread at launch; a warp-specialized kernel moves them afterwards
    spill_bytes: int
    shared_memory: int
    threads: int
    warnings: tuple[str, ...]  # of ptxas, C75xx
    traps: bool
    opcodes: Counter[str]

    def occupancy(self, arch: Arch) -> float:
        """Return the theoretical share of an SM's warps that can be resident."""
        warps = -(-self.threads // 32)
        per_warp = -(-self.registers * 32 // 256) * 256
        blocks = min(arch.registers // max(per_warp * warps, 1), arch.max_warps // warps, 32)
        if self.shared_memory:
            blocks = min(blocks, arch.shared_memory_per_sm // (self.shared_memory + 1024))
        return blocks * warps / arch.max_warps


def compile_only(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], aligned: tuple[str, ...], sm: int, **options: Any
) -> Resources:
    """Compile `kernel` for `sm` (90 for SM 9.0); `aligned` names the arguments that are multiples of 16."""
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    position = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    types = {**signature, **dict.fromkeys(constants, "constexpr")}
    compiled = triton.compile(
        source(
            fn=kernel,
            signature={name: types[name] for name in kernel.arg_names},
            constexprs={position[name]: value for name, value in constants.items()},
            attrs={position[name]: [["tt.divisibility", 16]] for name in aligned},
        ),
        target=GPUTarget("cuda", sm, 32),
        options=options,
    )
    return _read(compiled, sm)


def _read(compiled: Any, sm: int) -> Resources:
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        cubin.write_bytes(compiled.asm["cubin"])
        ptx.write_text(compiled.asm["ptx"])
        usage = _run("cuobjdump", "-res-usage", str(cubin))
        sass = _run("nvdisasm", "-c", str(cubin))
        assembler = "ptxas-blackwell" if sm >= 100 else "ptxas"
        name = f"sm_{sm}{'a' if sm >= 90 else ''}"
        log = _run(assembler, "-v", f"--gpu-name={name}", str(ptx), "-o", str(Path(folder, "kernel.o")))
    registers = re.search(r"REG:(\d+)", usage)
    if registers is None:
        raise RuntimeError(f"cuobjdump printed no register count: {usage[:200]}")
    warps = re.search(r"\.reqntid (\d+)", compiled.asm["ptx"])
    return Resources(
        registers=int(registers.group(1)),
        spill_bytes=max((int(size) for pair in _SPILLS.findall(log) for size in pair), default=0),
        shared_memory=compiled.metadata.shared,
        threads=int(warps.group(1)) if warps else compiled.metadata.num_warps * 32,
        warnings=tuple(sorted(set(re.findall(r"C75\d\d", log)))),
        traps=re.search(r"\btrap;", compiled.asm["ptx"]) is not None,
        opcodes=Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ +)?([A-Z0-9]+)", sass, re.MULTILINE)),
    )


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([str(_TOOLS / tool), *arguments], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr
