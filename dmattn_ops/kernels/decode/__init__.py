"""Attention of one query for each head, as in decoding: plain Triton kernels that read each key once for all heads of a group."""
