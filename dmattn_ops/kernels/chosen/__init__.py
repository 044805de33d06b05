"""Attention to blocks of keys that each query names, at a cost that follows what is named: plain Triton, SM 8.0 and newer."""
