"""Triton and Gluon kernels; imported lazily, and only by dispatch."""
