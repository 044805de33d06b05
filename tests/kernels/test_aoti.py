"""A program in C++ that runs a package of AOTInductor with dynamic masks, without Python (examples/aoti)."""

import importlib.util
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dmattn_ops.kernels import native

EXAMPLE = Path(__file__).parents[2] / "examples" / "aoti"
LIBRARY = Path(native.__file__).parents[1] / native.LIBRARY

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=f"THE LIBRARY IS NOT TESTED: {native.reason()}"),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="THE C++ PROGRAM IS NOT TESTED: there is no cmake"),
]


@pytest.fixture(scope="module")
def export():
    """The module that exports the model."""
    spec = importlib.util.spec_from_file_location("aoti_export", EXAMPLE / "export.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory, export):
    """A folder with the model, calls of it, and the program."""
    folder = tmp_path_factory.mktemp("aoti")
    export.main(folder)
    build = ["cmake", "-S", EXAMPLE, "-B", folder, f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"]
    for command in (build, ["cmake", "--build", folder]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def run(folder, library, calls, model="model.pt2", *kernels, program=None):
    command = [(program or folder) / "run", library, folder / model, folder / calls, *kernels]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def test_the_program_computes_what_python_computes_at_every_length(folder, export):
    done = run(folder, LIBRARY, "calls.pt")
    assert done.returncode == 0, done.stdout + done.stderr
    lengths = [int(line.split(":")[0].removeprefix("length ")) for line in done.stdout.splitlines()]
    assert lengths == list(export.LENGTHS)
    needed = subprocess.run(["ldd", folder / "run"], capture_output=True, text=True, check=True).stdout
    assert "libtorch" in needed and "libpython" not in needed


def test_the_program_computes_the_gradients_of_a_training_step(folder, export):
    done = run(folder, LIBRARY, "steps.pt", "step.pt2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"length {export.LENGTHS[0]}: ")


def test_the_program_never_computes_with_the_numbers_of_another_mask(folder, export):
    [(_, expected), *_] = torch.load(folder / "calls.pt")
    hidden, mask = export.inputs_of(export.LENGTHS[0])
    for changed in (replace(mask, at_most=9), replace(mask, band_hi=-3)):
        torch.save([(export.tensors_of((hidden, changed)), expected)], folder / "others.pt")
        done = run(folder, LIBRARY, "others.pt")
        assert done.returncode != 0
        assert "the program was exported with a mask of lengths" in done.stderr


@pytest.mark.gpu
def test_the_program_launches_the_kernels_of_a_file_on_a_gpu(folder, export, tmp_path):
    export.main(tmp_path, "cuda")
    for names in (("calls.pt", "model.pt2"), ("steps.pt", "step.pt2")):
        done = run(tmp_path, LIBRARY, *names, tmp_path / "kernels.dmattn", program=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        done = run(tmp_path, LIBRARY, *names, program=folder)
        assert done.returncode != 0 and "there is no plan for this call on SM" in done.stderr


def test_without_the_library_the_model_cannot_be_loaded(folder):
    done = run(folder, "libm.so.6", "calls.pt")
    assert done.returncode != 0
    assert "dmattn" in done.stderr
