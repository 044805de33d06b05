"""What the GPU is: the only module that asks the driver.

`DMATTN_ARCH=8.6` in the environment (read at each call) dispatches calls on a GPU as that architecture would, its shared
memory included, and makes `explain` tell of it wherever the tensors lie. Calls on the CPU run there all the same. 8.6, 86, sm_86
and sm86 are the same; a value that names no architecture is a ValueError before any kernel starts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from dmattn_ops import environment


@dataclass(frozen=True, slots=True)
class Arch:
    """One GPU architecture: capability times ten, and the limits that a launch has to respect."""

    sm: int  # 90 for SM 9.0
    shared_memory: int  # bytes that one block can have with opt-in
    num_sms: int
    l2_bytes: int
    registers: int = 65536  # per SM
    max_warps: int = 64  # resident warps per SM
    max_blocks: int = 32  # resident blocks per SM
    shared_memory_per_sm: int = 0
    emulated: bool = False  # chosen by DMATTN_ARCH or `arch=`, not found in the machine

    def __str__(self) -> str:
        return f"SM{self.sm // 10}.{self.sm % 10}"

    def occupancy(self, registers: int, shared_memory: int, threads: int) -> float:
        """Return the theoretical share of an SM's warps that can be resident: registers of a thread, bytes of a block.

        A warp gets registers in units of 256 from its own quarter of the SM; a block gets shared memory in units of 128
        bytes, with 1 KiB that the driver takes (CUDA's occupancy calculator).
        """
        warps = -(-threads // 32)
        by_registers = self.registers // 4 // max(256, -(-registers // 8) * 256) * 4 // (-(-warps // 4) * 4)
        by_shared_memory = self.shared_memory_per_sm // (-(-shared_memory // 128) * 128 + 1024)
        return min(by_registers, by_shared_memory, self.max_warps // warps, self.max_blocks) * warps / self.max_warps


# Limits from the CUDA programming guide's table of compute capabilities; SMs and L2 of the named card.
KNOWN = {
    75: Arch(75, 65536, 40, 4 << 20, max_warps=32, max_blocks=16, shared_memory_per_sm=65536),  # T4
    80: Arch(80, 166912, 108, 40 << 20, shared_memory_per_sm=167936),  # A100
    86: Arch(86, 101376, 84, 6 << 20, max_warps=48, max_blocks=16, shared_memory_per_sm=102400),  # RTX 3090
    89: Arch(89, 101376, 128, 72 << 20, max_warps=48, max_blocks=24, shared_memory_per_sm=102400),  # RTX 4090
    90: Arch(90, 232448, 132, 50 << 20, shared_memory_per_sm=233472),  # H100, H200
    100: Arch(100, 232448, 148, 126 << 20, shared_memory_per_sm=233472),  # B200
    120: Arch(120, 101376, 170, 96 << 20, max_warps=48, max_blocks=24, shared_memory_per_sm=102400),  # RTX 5090
}


def nearest(sm: int) -> Arch:
    """Return the newest known architecture that is not newer than `sm`."""
    return KNOWN[max((known for known in KNOWN if known <= sm), default=min(KNOWN))]


_VERSION = re.compile(r"(?:sm_?)?(\d{1,2})\.?(\d)", re.ASCII | re.IGNORECASE)


@lru_cache(maxsize=32)
def parse(version: str, named: str = environment.ARCHITECTURE) -> Arch:
    """Return the architecture that a version such as "8.6", "86" or "sm_86" names; ValueError where it names none.

    `named` is what the message calls it: the variable, or the argument that it came by.
    """
    if not isinstance(version, str):
        raise TypeError(f"{named} must be a string such as '9.0', got {type(version).__name__}")
    found = _VERSION.fullmatch(version.strip())
    sm = 0 if found is None else int(found[1] + found[2])
    if sm < min(KNOWN):
        raise ValueError(f"{named} must be one of {_versions()}, or newer, also as 90, sm_90 or sm90, got {version!r}")
    return replace(nearest(sm), sm=sm, emulated=True)


@lru_cache(maxsize=64)
def _of_device(index: int) -> Arch:
    properties = torch.cuda.get_device_properties(index)
    sm = properties.major * 10 + properties.minor
    known = nearest(sm)
    return Arch(
        sm,
        getattr(properties, "shared_memory_per_block_optin", known.shared_memory),
        properties.multi_processor_count,
        getattr(properties, "L2_cache_size", known.l2_bytes),
        max_warps=properties.max_threads_per_multi_processor // 32,
        shared_memory_per_sm=getattr(properties, "shared_memory_per_multiprocessor", known.shared_memory_per_sm),
    )


def forced() -> Arch | None:
    """Return the architecture that `DMATTN_ARCH` names, None where it is unset or empty."""
    version = environment.architecture()
    return parse(version) if version else None


def current(device: torch.device) -> Arch:
    """Return the architecture to dispatch for on a CUDA device: `DMATTN_ARCH` if set, else the device's own."""
    named = forced()
    if named is not None:
        return named
    return _of_device(device.index if device.index is not None else torch.cuda.current_device())


def physical(device: torch.device) -> Arch:
    """Return the architecture of the device itself, whatever `DMATTN_ARCH` says.

    For tensors on no GPU (what `explain` is asked about, what an interpreter runs) it is that of the known SM 9.0.
    """
    if device.type != "cuda":
        return KNOWN[90]
    return _of_device(device.index if device.index is not None else torch.cuda.current_device())


def has_gpu() -> bool:
    """Return whether there is a GPU that torch can use: a tracer may be told of one where there is none."""
    return torch.cuda.is_available()


def name(device: torch.device) -> str:
    """Return the driver's name of the device, such as "NVIDIA H200"."""
    return torch.cuda.get_device_name(device)


def _versions() -> str:
    return ", ".join(f"{sm // 10}.{sm % 10}" for sm in KNOWN)
