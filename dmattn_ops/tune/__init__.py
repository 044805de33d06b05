"""The command `python -m dmattn_ops.tune`: measure configurations on this GPU, and keep those that are faster."""
