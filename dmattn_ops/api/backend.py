"""What runs here: `backend_info`."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata

import torch

from dmattn_ops.choice import arch
from dmattn_ops.dispatch import run
from dmattn_ops.version import __version__


@dataclass(frozen=True)
class Device:
    """The kernels of one device, fastest first, and why the others do not run there; `str()` is readable."""

    name: str
    arch: str  # such as "SM9.0"; "CPU"
    kernels: tuple[str, ...]
    missing: dict[str, str]  # from a kernel to the reason and what to do

    def __str__(self) -> str:
        lines = [f"{self.name} ({self.arch}): {', '.join(self.kernels)}"]
        return "\n".join([*lines, *(f"    not {kernel}: {reason}" for kernel, reason in self.missing.items())])


@dataclass(frozen=True)
class BackendInfo:
    """Versions, and the kernels of each device; `str()` is readable."""

    version: str
    torch: str
    triton: str | None
    python: str
    cpu: Device
    gpus: tuple[Device, ...]

    def __str__(self) -> str:
        triton = self.triton or "not installed"
        head = f"dmattn_ops {self.version}, torch {self.torch}, triton {triton}, python {self.python}"
        gpus = "\n".join(map(str, self.gpus)) or "no GPU that torch can use"
        return f"{head}\n{self.cpu}\n{gpus}"


def backend_info() -> BackendInfo:
    """Tell which kernels exist on this machine, which do not and why, and the versions that this depends on.

    `explain` tells what a certain call would run. Asks the driver for the GPUs that torch can use; runs nothing on them.
    """
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return BackendInfo(
        __version__,
        str(torch.__version__),
        _triton_version(),
        platform.python_version(),
        _cpu(),
        tuple(map(_gpu, gpus)),
    )


def _cpu() -> Device:
    from dmattn_ops.kernels import native

    reason = native.reason()
    name = platform.processor() or platform.machine()
    if reason:
        return Device(name, "CPU", ("reference (plain torch operations, slow)",), {"native": reason})
    return Device(name, "CPU", ("native (C++)",), {})


def _gpu(index: int) -> Device:
    device = torch.device("cuda", index)
    on = arch.physical(device)
    missing, kernels = run.missing_kernels(on), run.kernels_on(on)
    return Device(arch.name(device), str(on), kernels or ("reference (plain torch operations, slow)",), missing)


def _triton_version() -> str | None:
    """Return the version of the installed Triton without loading it."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None
