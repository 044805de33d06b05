"""The SM 9.0 backward for head dimensions up to 256: two kernels with seven products."""
