"""Plain Triton kernels, for every architecture that Triton compiles for."""
