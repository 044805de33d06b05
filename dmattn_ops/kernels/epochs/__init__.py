"""Packed keys: copies of the keys that each epoch of queries sees, side by side, for the kernels that walk tile lists."""
