"""For which architecture kernels are compiled in a run of the tests on a GPU."""

import pytest
import torch

from dmattn_ops.choice import arch


def version() -> int:
    """Return it as 90 for SM 9.0: the GPU's, or the one that `DMATTN_ARCH` asks for; 0 where there is no GPU."""
    return arch.current(torch.device("cuda")).sm if arch.has_gpu() else 0


HOPPER = version() == 90
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs kernels for SM 9.0")


def skip_file_without_hopper() -> None:
    """Skip all tests of the file that calls this, where kernels are not compiled for SM 9.0."""
    if not HOPPER:
        pytest.skip("needs kernels for SM 9.0", allow_module_level=True)
