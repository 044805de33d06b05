"""`backend_info` and `__version__`: what runs here, what does not, and why."""

import re
from importlib import metadata

import pytest
import torch

import dmattn_ops
from dmattn_ops.api import backend
from dmattn_ops.choice import arch
from dmattn_ops.dispatch import run
from dmattn_ops.kernels import native

GPUS = {"NVIDIA H200": 90, "Tesla T4": 75, "NVIDIA A10": 86}


def test_the_version_is_public():
    assert re.fullmatch(r"\d+\.\d+\.\d+[\w.+]*", dmattn_ops.__version__)
    assert dmattn_ops.backend_info().version == dmattn_ops.__version__


def test_versions_and_cpu_kernels_are_told():
    info = dmattn_ops.backend_info()
    text = str(info)
    assert f"dmattn_ops {dmattn_ops.__version__}, torch {torch.__version__}" in text
    assert run.cpu_kernels() in info.cpu.kernels[0] and info.cpu.arch == "CPU"
    if not torch.cuda.is_available():
        assert info.gpus == () and "no GPU that torch can use" in text


@pytest.mark.parametrize("reason", ["", "the C++ kernels are not built: a compiler is missing"])
def test_why_the_cpu_kernels_are_missing_is_told(reason: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "reason", lambda: reason)
    cpu = dmattn_ops.backend_info().cpu
    assert cpu.missing == ({"native": reason} if reason else {})
    assert (f"not native: {reason}" in str(cpu)) == bool(reason)
    assert ("reference" in cpu.kernels[0]) == bool(reason)


def test_each_gpu_tells_its_kernels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(GPUS))
    monkeypatch.setattr(arch, "physical", lambda device: arch.KNOWN[list(GPUS.values())[device.index]])
    monkeypatch.setattr(arch, "name", lambda device: list(GPUS)[device.index])
    hopper, turing, ampere = dmattn_ops.backend_info().gpus
    assert hopper.kernels == ("decode", "hopper", "hopper256", "ampere", "portable") and hopper.missing == {}
    assert ampere.kernels == ("ampere", "portable") and ampere.missing["hopper"] == "runs on SM 9.0 only"
    assert "plain torch" in turing.kernels[0] and turing.missing["portable"] == "needs SM 8.0 or newer"
    assert str(ampere).splitlines()[0] == "NVIDIA A10 (SM8.6): ampere, portable"

    def no_gluon(module: str) -> None:
        raise ImportError("No module named 'triton.experimental.gluon'")

    monkeypatch.setattr(run, "import_module", no_gluon)
    lost = dmattn_ops.backend_info().gpus[0]
    assert lost.missing["hopper"] == "needs another Triton: No module named 'triton.experimental.gluon'"
    assert "not portable: needs another Triton" in str(lost)


def test_no_triton_is_told(monkeypatch: pytest.MonkeyPatch):
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(backend.metadata, "version", version)
    assert dmattn_ops.backend_info().triton is None and "triton not installed" in str(dmattn_ops.backend_info())
