"""Kernels of mma.sync and cp.async, the instructions of SM 8.0 to 8.9 that newer GPUs have as well."""
