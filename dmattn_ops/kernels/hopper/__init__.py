"""Gluon kernels for SM 9.0."""
