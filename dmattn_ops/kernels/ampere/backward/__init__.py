"""The backward of `kernels.ampere`."""
