"""For which architecture kernels are compiled in a run of the tests on a GPU."""

import os

import pytest
import torch


def version() -> int:
    """Return it as 10 times major plus minor: the GPU's, or the one that `DMATTN_ARCH` asks for; 0 where there is no GPU."""
    if not torch.cuda.is_available():
        return 0
    asked = os.environ.get("DMATTN_ARCH")
    major, minor = map(int, asked.split(".")) if asked else torch.cuda.get_device_capability()
    return 10 * major + minor


HOPPER = version() == 90
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs kernels for SM 9.0")


def skip_file_without_hopper() -> None:
    """Skip all tests of the file that calls this, where kernels are not compiled for SM 9.0."""
    if not HOPPER:
        pytest.skip("needs kernels for SM 9.0", allow_module_level=True)
