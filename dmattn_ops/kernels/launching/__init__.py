"""How kernels are launched, and how a call's launches are repeated."""
