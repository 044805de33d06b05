"""How kernels are launched: through Triton at first, then again from what was noted, with new addresses."""
