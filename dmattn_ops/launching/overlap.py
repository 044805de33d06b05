"""Kernels of a call that begin while the one before them ends: programmatic dependent launch, on SM 9.0.

Between two kernels of a stream an H200 is idle for 1 to 2 us, as long as a short call's row work takes. `launch(..., follows=True)`
lets a kernel be on the GPU before the one in front of it has ended. What makes that right:

- Each program of such a kernel calls `follow_kernel_before()` before it reads or writes memory that others use (Gluon kernels
  call that of `hopper.gluon_compat`). It returns when the kernel in front has ended and all that it wrote can be read.
- As every program waits, no kernel ends before those in front of it, and what comes next in the stream may rely on all.
- The same function says that the kernel behind may begin. It does once all programs here have said so or ended, so that it
  never takes the place of a program that still has to begin. A kernel that follows none may say it without waiting.

The function does nothing in a kernel that was launched as usual, on other architectures, and in the interpreter. Only a kernel
that comes after another one of the same call follows it: what a caller launched before is not known here, and may itself end
before those in front of it. `launch` sees to that: it counts the kernels of a call (`recording.one_call`), and the first one,
like any outside of a call, is launched as usual, whatever a launcher says. So it is where a mask comes with its lists of tiles.

It pays where the kernel that follows has few programs. Each wait empties the L1 cache of its SM, so that kernels of very many small
programs became slower (docs/lab/sm90-backward.md, entry 42, has what was measured).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import current_target


@triton.constexpr_function
def kernels_overlap():
    """Return whether the GPU that kernels are compiled for is one on which this was measured and tested."""
    target = current_target()
    return target is not None and target.backend == "cuda" and target.arch == 90


@triton.jit
def follow_kernel_before():
    """Let the kernel behind this one begin, and wait until the one in front has ended."""
    if kernels_overlap():
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
