"""The forward of `kernels.ampere`."""
