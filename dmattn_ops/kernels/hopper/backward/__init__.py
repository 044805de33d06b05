"""The SM 9.0 backward for head dimensions up to 128: one kernel with five products."""
